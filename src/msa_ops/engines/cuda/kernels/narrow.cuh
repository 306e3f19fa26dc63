// What selecting blocks by their scores consists of, and how a warp narrows a row to the blocks it chooses: for the selection
// (topk.cuh) and for an attention that selects for itself (select.cuh).

// Ascends with the score, -0 as 0; 0 for -inf and NaN. Others lie between those of the lowest number and of +inf.
constexpr u32 LOWEST_KEY = 0x00800000u, INFINITY_KEY = 0xff800000u;

DEVICE u32 key_of(float score) {
  const u32 bits = __float_as_uint(score + 0.f); // which makes -0 to 0
  const u32 key = bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
  return key - LOWEST_KEY <= INFINITY_KEY - LOWEST_KEY ? key : 0;
}

// The same order without exceptions, and back.
DEVICE u32 ordered(float score) {
  const u32 bits = __float_as_uint(score);
  return bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
}
DEVICE float score_of(u32 ordered) { return __uint_as_float(ordered ^ (~(u32)((int)ordered >> 31) | 0x80000000u)); }

constexpr u32 MINUS_INFINITY_BITS = 0xff800000u;
constexpr float LARGEST_SCORE = 3.402823466e38f;

constexpr int SCORE_GROUPS = 32;

// Values of `list` that are larger. Summed as floats: comparisons and sums are then the work of different units.
template <typename T> DEVICE float count_larger(const T (&list)[SCORE_GROUPS], T than) {
  struct alignas(16) Four {
    T x, y, z, w;
  };
  float n[4] = {};
#pragma unroll
  for (int i = 0; i < SCORE_GROUPS / 4; i++) {
    const Four four = ((const Four *)list)[i];
    n[0] += four.x > than ? 1.f : 0.f, n[1] += four.y > than ? 1.f : 0.f;
    n[2] += four.z > than ? 1.f : 0.f, n[3] += four.w > than ? 1.f : 0.f;
  }
  return n[0] + n[1] + (n[2] + n[3]);
}

// The blocks [0, begin) and [last, extent) are chosen, and `wanted` of those between.
struct Forced {
  int begin, last, extent, wanted;

  // `p` has `begin` and `end`, the numbers of blocks that are forced, and `topk`.
  template <typename P> __device__ __forceinline__ Forced(const P &p, int blocks) {
    extent = blocks;
    begin = min(min(p.begin, p.topk), extent);
    const int end = min(min(p.end, p.topk - begin), extent - begin);
    last = extent - end;
    wanted = p.topk - begin - end;
  }
  __device__ __forceinline__ bool open(int block) const { return (u32)(block - begin) < (u32)(last - begin); }
  __device__ __forceinline__ bool holds(int block) const { return block < begin || (block >= last && block < extent); }
  __device__ __forceinline__ int count() const { return begin + extent - last; }

  // Writes all of a row except its `found` blocks that were not forced, which come after the first `begin`.
  __device__ __forceinline__ void write_rest(int *output, int topk, int found, int thread, int threads) const {
#pragma unroll 1
    for (int i = thread; i < topk; i += threads) {
      const int behind = i - begin - found; // place among the last blocks
      if (i < begin || behind >= 0) output[i] = i < begin ? i : behind < extent - last ? last + behind : -1;
    }
  }
};

// Keys above `floor` are chosen, and of those equal to it the first `ties`.
struct Cut {
  u32 floor;
  int ties;
};

constexpr Cut NOTHING = {0xffffffffu, 0};
DEVICE Cut all_from(u32 key) { return {key - 1, 0}; }

// compute-sanitizer overlooks a `__syncwarp` that needs no instruction. For its sake (base.cuh) a barrier of the warp that copies.
DEVICE void warp_sync() {
#if defined(SELECTS) && defined(EVERY_LANE_ARRIVES)
  asm volatile("barrier.cta.sync 14, 32;" ::: "memory");
#else
  __syncwarp();
#endif
}

DEVICE u32 lanes_below(int lane) { return (1u << lane) - 1; }

// Two stores to shared memory, or none, without a branch.
DEVICE void store_if(bool wanted, float *score, float x, unsigned char *block, int number) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %4, 0; @p st.shared.f32 [%0], %1; @p st.shared.u8 [%2], %3;}" ::"r"(
                   (u32)__cvta_generic_to_shared(score)),
               "f"(x), "r"((u32)__cvta_generic_to_shared(block)), "r"(number), "r"((u32)wanted)
               : "memory");
}
DEVICE void store_if(bool wanted, float *score, float x, u16 *block, int number) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %4, 0; @p st.shared.f32 [%0], %1; @p st.shared.u16 [%2], %3;}" ::"r"(
                   (u32)__cvta_generic_to_shared(score)),
               "f"(x), "r"((u32)__cvta_generic_to_shared(block)), "h"((u16)number), "r"((u32)wanted)
               : "memory");
}

// NUMBER holds a block's number. ROOM: blocks that may be listed.
template <int KEYS, typename NUMBER = unsigned char, int ROOM_ = KEYS * 32> struct WarpShared {
  static constexpr int ROOM = ROOM_;
  alignas(16) float largest[SCORE_GROUPS];
  alignas(16) float score[ROOM]; // of the blocks that reach the floor, ascending
  NUMBER block[ROOM];
};

template <int KEYS> struct WarpRow {
  float score[KEYS]; // -inf or NaN: not to be chosen
  int block[KEYS];   // ascending from lane to lane, then from place to place; a lane is a group

  // Lists the blocks that reach the floor, as far as there is room; their number. `wanted` is 1 to SCORE_GROUPS.
  template <typename S> __device__ __forceinline__ u32 list_best(S &s, u32 wanted, int lane) const {
    float largest = score[0];
#pragma unroll
    for (int j = 1; j < KEYS; j++) largest = fmaxf(largest, score[j]); // passes over NaN
    largest = fmaxf(largest, __uint_as_float(MINUS_INFINITY_BITS));
    s.largest[lane] = largest;
    warp_sync();
    const bool among = count_larger(s.largest, largest) < (float)wanted;
    const u32 least = __reduce_min_sync(ALL_LANES, among ? ordered(largest) : 0xffffffffu);
    const float floor = fmaxf(score_of(least), -LARGEST_SCORE);
    u32 n = 0;
    const u32 below = lanes_below(lane);
#pragma unroll
    for (int j = 0; j < KEYS; j++) { // without branches: eight that diverge take longer than all else here
      const bool reaches = score[j] >= floor;
      const u32 all = __ballot_sync(ALL_LANES, reaches), at = n + __popc(all & below);
      store_if(reaches && (S::ROOM >= KEYS * 32 || at < S::ROOM), s.score + at, score[j], s.block + at, block[j]);
      n += __popc(all);
    }
    if (lane >= n) s.score[lane] = __uint_as_float(MINUS_INFINITY_BITS);
    warp_sync();
    return n;
  }

  // The list becomes the row.
  template <typename S> __device__ __forceinline__ void take(const S &s, u32 n, int lane) {
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
      const u32 at = j * 32 + lane;
      score[j] = at < n ? s.score[at] : __uint_as_float(MINUS_INFINITY_BITS), block[j] = s.block[at];
    }
  }

  // Narrows the row to a list of at most 32 blocks, the wanted ones among them; their number, or a larger one if three tries do
  // not do it. The row may then be what the last of them began with.
  template <typename S> __device__ __forceinline__ u32 narrow(S &s, u32 wanted, int lane, int tries = 3) {
    u32 n = 0xffffffffu;
    if (wanted - 1 >= SCORE_GROUPS) return n;
    if constexpr (S::ROOM < KEYS * 32) {
      n = list_best(s, wanted, lane);
      if (n <= 32 || n > S::ROOM) return n;
      WarpRow<S::ROOM / 32> rest;
      rest.take(s, n, lane);
      return rest.narrow(s, wanted, lane, tries - 1);
    } else {
#pragma unroll 1
      while (true) { // a list has other groups than its row, and fewer blocks in each
        n = list_best(s, wanted, lane);
        if (n <= 32 || --tries == 0) return n;
        take(s, n, lane);
      }
    }
  }

  // Writes the wanted blocks of a list of at most 32; their number.
  template <typename S> static __device__ __forceinline__ int write_listed(const S &s, u32 wanted, int *output, int lane) {
    const float mine = s.score[lane], larger = count_larger((const float(&)[SCORE_GROUPS])s.score, mine);
    const int block = s.block[lane];
    bool chosen = mine >= -LARGEST_SCORE && larger < (float)wanted;
    u32 all = __ballot_sync(ALL_LANES, chosen);
    if (__popc(all) > wanted) { // the last of them are equal
      const u32 rank = chosen ? (u32)larger : 0, last = __reduce_max_sync(ALL_LANES, rank);
      const u32 equal = __ballot_sync(ALL_LANES, chosen && rank == last);
      if (rank == last) chosen = chosen && __popc(equal & lanes_below(lane)) < wanted - last;
      all = __ballot_sync(ALL_LANES, chosen);
    }
    if (chosen) output[__popc(all & lanes_below(lane))] = block;
    return __popc(all);
  }

  // The same of the row itself, by bits.
  __device__ __forceinline__ int write_searched(u32 wanted, int *output, int lane) const {
    u32 key[KEYS];
#pragma unroll
    for (int j = 0; j < KEYS; j++) key[j] = key_of(score[j]);
    const Cut cut = search(key, wanted);
    int written = 0, equal = 0; // at places before j
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
      bool chosen = key[j] > cut.floor;
      if (cut.ties) {
        const u32 same = __ballot_sync(ALL_LANES, key[j] == cut.floor);
        chosen |= key[j] == cut.floor && equal + __popc(same & lanes_below(lane)) < cut.ties;
        equal += __popc(same);
      }
      const u32 all = __ballot_sync(ALL_LANES, chosen);
      if (chosen) output[written + __popc(all & lanes_below(lane))] = block[j];
      written += __popc(all);
    }
    return written;
  }

  // The row's result, to `output` of `to`.
  template <typename P, typename R, typename S>
  __device__ __forceinline__ void write_narrowed(const P &p, const R &to, const Forced &forced, S &s, int lane) {
    const u32 n = narrow(s, forced.wanted, lane);
    int *output = to.output + forced.begin;
    const int found = n <= 32 ? write_listed(s, forced.wanted, output, lane) : write_searched(forced.wanted, output, lane);
    forced.write_rest(to.output, p.topk, found, lane, 32);
  }

  static __device__ __forceinline__ u32 count_from(const u32 (&key)[KEYS], u32 least) {
    u32 n = 0;
#pragma unroll
    for (int j = 0; j < KEYS; j++) n += key[j] >= least;
    return __reduce_add_sync(ALL_LANES, n);
  }

  static __device__ __forceinline__ Cut search(const u32 (&key)[KEYS], u32 wanted) {
    if (wanted == 0) return NOTHING;
    u32 cut = 0;
#pragma unroll 1
    for (u32 bit = 0x80000000u; bit; bit >>= 1) {
      const u32 n = count_from(key, cut | bit);
      if (n == wanted) return all_from(cut | bit);
      if (n > wanted) cut |= bit;
    }
    if (cut == 0) return all_from(1); // fewer than wanted are there
    return {cut, (int)(wanted - count_from(key, cut + 1))};
  }
};
