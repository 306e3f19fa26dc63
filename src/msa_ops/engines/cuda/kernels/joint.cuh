// Two tokens of a request at once, one for each group of warps: what both selected is copied once, and both groups take it from the
// same place in the ring. Each group goes past the tiles that are not its token's. All groups give every tile back.
//
// A block that a token may not see to its end is never shared: its unused rows of V become zero, which is only right for that token.
enum TileFlags { FOR_GROUP = 1 << 8, FINAL = 1 << 16 }; // FOR_GROUP << g: a tile of group g's; 1 << g: its last; FINAL: the item's last

#if JOINT
static_assert(GROUPS == 2 && !EARLY_K, "two tokens at a time; a tile that is passed is given back whole");

DEVICE bool is_for(const TileInfo &info, int group) { return info.last >> (8 + group) & 1; }
DEVICE bool is_last_for(const TileInfo &info, int group) { return info.last >> group & 1; }
DEVICE bool is_final(const TileInfo &info) { return info.last & FINAL; }

// Both tokens' lists of blocks, an entry a lane, in the order in which they are copied: the first token's entries and those of the
// second's that are its alone, in turn, so that neither group waits for the other's half.
struct JointList {
  int block[2], range[2]; // range: lo | hi << 16
  int count;              // of the first token's entries
  u32 shared, alone;      // of the first token's entries, those of both; of the second's, those of it alone
  bool missing[2];        // a token without a block gets a mark without data

  DEVICE_MEMBER JointList(const Params &p, const Item (&items)[2], Selection (&of)[2], int lane) {
    int n[2], lo, hi;
    bool whole[2];
#pragma unroll
    for (int t = 0; t < 2; t++) {
      n[t] = of[t].blocks(p, 0, lane, block[t], lo, hi);
      if (items[t].rows == 0) n[t] = 0;
      whole[t] = lane < n[t] && lo == 0 && hi == BLOCK_KEYS;
      range[t] = lo | hi << 16;
      missing[t] = n[t] == 0;
    }
    count = n[0];
    bool both[2] = {};
#pragma unroll
    for (int t = 0; t < 2; t++)
#pragma unroll 1
      for (int i = 0; i < n[t ^ 1]; i++) {
        const int other = __shfl_sync(ALL_LANES, whole[t ^ 1] ? of[t ^ 1].listed : -1, i);
        both[t] |= whole[t] && other == of[t].listed;
      }
    shared = __ballot_sync(ALL_LANES, both[0]);
    alone = __ballot_sync(ALL_LANES, lane < n[1] && !both[1]);
  }

  // Calls `copy(block, lo, hi, flags)` for every tile, and for a mark.
  template <typename Copy> DEVICE_MEMBER void for_each(Copy copy) const {
    constexpr int PER_BLOCK = BLOCK_KEYS / TILE;
    const int last_shared = 31 - __clz(shared), last_alone = __popc(alone) - 1; // -1: there is none
    const bool mark = missing[0] || missing[1];
    u32 rest = alone;
    for (int step = 0; step < count || rest; step++) {
#pragma unroll
      for (int t = 0; t < 2; t++) {
        if (t == 0 ? step >= count : rest == 0) continue;
        const int place = t == 0 ? step : __ffs(rest) - 1;
        int groups, last, final;
        if (t == 0) {
          groups = 1 | (shared >> step & 1) << 1;
          last = (step == count - 1) | (step == last_shared && last_shared > last_alone) << 1;
          final = step == count - 1 && last_alone < step;
        } else {
          rest &= rest - 1;
          groups = 2;
          last = (step == last_alone && last_alone >= last_shared) << 1;
          final = step == last_alone && step >= count - 1;
        }
        const int from = __shfl_sync(ALL_LANES, block[t], place), bounds = __shfl_sync(ALL_LANES, range[t], place);
        const int lo = bounds & 0xffff, hi = bounds >> 16, halves = hi > TILE ? PER_BLOCK : 1;
        for (int half = 0; half < halves; half++) {
          const bool ends = half == halves - 1;
          copy(from, half * TILE, lo - half * TILE, hi - half * TILE,
               groups * FOR_GROUP | (ends ? last : 0) | (ends && final && !mark ? FINAL : 0));
        }
      }
    }
    const int groups = missing[0] | missing[1] << 1;
    if (mark) copy(0, 0, 0, 0, groups * FOR_GROUP | groups | FINAL);
  }
};
#endif
