// Keys of decoding steps on their way through shared memory: who copies which, and where they lie there.

DEVICE bool has_page(const ScoreParams &p, int page) { return !p.paged || (u32)page < (u32)p.pages; }

// Where the keys of a block start.
DEVICE const u8 *first_key(const ScoreParams &p, const Run &run, int block, int page) {
  const i64 from = p.paged ? page * p.k_page : ((i64)run.request.first_key + block * BLOCK_KEYS) * p.k_row;
  return p.k + run.kv_head * p.k_head + from;
}

// What a warp has of a block under way: keys, and the scales of NVFP4 ones, the first or last 64 dims of four keys, 32 apart.
template <typename T> using Keys = uint4[32 * T::SETS][ROW_BYTES / 16];
template <typename T> using Scales = uint4[2][T::GROUP];

template <typename Queries, typename T> struct RowShared : Queries {
  alignas(128) Keys<T> keys[WARPS];
  Scales<T> scales[SCALED ? WARPS : 1];
};

// Where 16 bytes of a key lie. Eight lanes read at once: four pieces of two neighbours (`read_keys`), or the same piece of eight
// NVFP4 keys (ldmatrix).
DEVICE int key_place(int key, int chunk) { return ROW_BYTES == 64 ? chunk ^ (key >> 1 & 3) : chunk ^ (key & 1) * 4; }
// Where the scales of `row` lie. Eight lanes read at once: both halves of two rows, or one half of two. Those that write have one
// half of eight.
DEVICE int scale_place(int half, int row) { return row ^ half * 4; }

// A warp copies those keys of a block that it is going to read. Keys that no token sees are not read: the last one seen stands
// for them.
template <typename T>
DEVICE void copy_keys(const ScoreParams &p, Keys<T> &to, const u8 *block, int last, u64 policy, int warp, int lane) {
  constexpr int PARTS = ROW_BYTES / 16, GROUP = T::GROUP, COPIES = T::SETS * PARTS;
  const int own = T::first_key(warp) + lane / PARTS, chunk = lane % PARTS;
  auto place = [&](int i) {
    const int key = i * 32 / PARTS + lane / PARTS;
    return &to[key][key_place(key, chunk)];
  };
  auto row = [](int i) { return i * 32 / PARTS % GROUP + 32 * (i * 32 / PARTS / GROUP); }; // from the lane's first on
  const u8 *const first = block + chunk * 16;
  if (last >= BLOCK_KEYS - 1) {
    const u8 *const from = first + own * (i64)p.k_row;
#pragma unroll
    for (int i = 0; i < COPIES; i++) copy_async<16>(place(i), from + row(i) * (i64)p.k_row, policy);
  } else {
#pragma unroll
    for (int i = 0; i < COPIES; i++) copy_async<16>(place(i), first + min(own + row(i), last) * (i64)p.k_row, policy);
  }
}

// NVFP4: a warp copies the scales of its keys of a block, which is that of page `page` or begins with position `first`.
template <typename T>
DEVICE void copy_scales(const ScoreParams &p, Scales<T> &to, const Run &run, int first, int page, u64 policy, int warp,
                        int lane) {
  const u8 *const tile = p.k_scale + ((i64)page * p.kv_heads + run.kv_head) * SCALE_TILE_BYTES;
#pragma unroll
  for (int i = lane; i < 2 * T::GROUP; i += 32) {
    const int half = i / T::GROUP, own = i % T::GROUP, row = T::first_key(warp) + own;
    uint4 *const place = &to[half][scale_place(half, own)];
    if (p.paged) {
      copy_async<16>(place, tile + half * 512 + row * 16, policy);
    } else {
#pragma unroll
      for (int j = 0; j < 4; j++)
        copy_async<4>((u32 *)place + j, p.k_scale + half * 512 + flat_scale(p, run, first + row + 32 * j), policy);
    }
  }
}

// A block of keys, copied as a whole.
template <typename T> struct BlockCopier {
  int block, page;

  BlockCopier() = default;
  DEVICE_MEMBER BlockCopier(const ScoreParams &, const Run &, int block, int page, int, int) // the parameters of `SetCopier`'s
      : block(block), page(page) {}
  DEVICE_MEMBER bool present(const ScoreParams &p) const { return has_page(p, page); }

  template <typename Memory>
  DEVICE_MEMBER void copy(const ScoreParams &p, const Run &run, Memory &to, int warp, int lane) const {
    const u64 policy = l2_evict_first();
    const int last_seen = run.highest - block * BLOCK_KEYS - 1;
    copy_keys<T>(p, to.keys[warp], first_key(p, run, block, page), last_seen, policy, warp, lane);
    if constexpr (SCALED) copy_scales<T>(p, to.scales[warp], run, block * BLOCK_KEYS, page, policy, warp, lane);
    commit_copies();
  }
};

// The first key of either half of a tile among a warp's copied ones.
template <typename T> DEVICE int half_tile(int tile, int half) { return T::GROUP * (2 * (tile & 1) + half) + 8 * (tile >> 1); }

// The keys of a tile.
template <typename T> DEVICE void read_keys(const Keys<T> &from, Part<1> &part, int tile, int lane) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int key = half_tile<T>(tile, half) + (lane >> 2);
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) part.keys[0][half][i] = from[key][key_place(key, 4 * i + (lane & 3))];
  }
}

// Where a lane writes what it copies of a warp's first set of NVFP4 keys, in shared memory. Those of the next sets are a constant
// further, because `key_place` and `scale_place` repeat every eight keys.
template <typename T> struct SetPlaces {
  u32 keys, scales;

  template <typename Memory> DEVICE_MEMBER SetPlaces(const Memory &memory, int warp, int lane) {
    const int half = lane >> 3 & 1;
    keys = shared_address(&memory.keys[warp][lane >> 2][key_place(lane >> 2, lane & 3)]);
    scales = shared_address(&memory.scales[warp][half][scale_place(half, lane & 7)]);
  }
};
// Of blocks that are copied as a whole: nothing. The parameters of `SetPlaces`'s.
struct NoPlaces {
  template <typename Memory> DEVICE_MEMBER NoPlaces(const Memory &, int, int) {}
};

// A warp's NVFP4 keys of a block, and their scales, copied a set at a time. A lane copies 16 bytes of a key and of those 32, 64 and
// 96 on; the first 16 lanes copy a row of scales each. The cache is paged, so that such a row is in one place, and has one KV
// head, as always where there are rows of blocks: score.py, `make_plan`.
template <typename T> struct SetCopier {
  const u8 *keys, *scales; // the lane's 16 bytes of the first set, and its row of scales
  int last;                // that any token sees; below 0: there is nothing to copy

  SetCopier() = default;
  DEVICE_MEMBER SetCopier(const ScoreParams &p, const Run &run, int block, int page, int warp, int lane) {
    last = last_seen(p, run, block, page);
    keys = p.k + page * p.k_page + (own_key(warp, lane) * (i64)p.k_row + (lane & 3) * 16);
    scales = p.k_scale + (i64)page * SCALE_TILE_BYTES + (lane >> 3 & 1) * 512 + (T::first_key(warp) + (lane & 7)) * 16;
  }
  static DEVICE_MEMBER int own_key(int warp, int lane) { return T::first_key(warp) + (lane >> 2); } // of the first set, in the block
  // `last` of a block.
  static DEVICE_MEMBER int last_seen(const ScoreParams &p, const Run &run, int block, int page) {
    return has_page(p, page) ? run.highest - block * BLOCK_KEYS - 1 : -1;
  }
  DEVICE_MEMBER bool present() const { return last >= 0; }
  // All keys are seen, by some token, and nothing lies between them.
  static DEVICE_MEMBER bool side_by_side(const ScoreParams &p, int last) {
    return last >= BLOCK_KEYS - 1 && p.k_row == ROW_BYTES;
  }

  // A set of keys that lie side by side, if `wanted`: no branch, and addresses are constants apart.
  DEVICE_MEMBER void copy_side_by_side(const SetPlaces<T> &to, int set, int lane, bool wanted) const {
#pragma unroll
    for (int i = 0; i < 4; i++)
      copy_async_if(wanted, to.keys + (i * T::GROUP + 8 * set) * ROW_BYTES, keys + (32 * i + 8 * set) * ROW_BYTES);
    copy_async_if(wanted && lane < 16, to.scales + 8 * set * 16, scales + 8 * set * 16);
  }

  // Any set.
  DEVICE_MEMBER void copy(const ScoreParams &p, const SetPlaces<T> &to, int set, int warp, int lane) const {
    if (side_by_side(p, last)) {
      copy_side_by_side(to, set, lane, true);
    } else if (present()) {
      const int key = own_key(warp, lane);
#pragma unroll 1 // straight code the compiler would put, predicated off, into the usual way
      for (int i = 0; i < 4; i++)
        copy_async_if(true, to.keys + (i * T::GROUP + 8 * set) * ROW_BYTES,
                      keys + (min(key + 8 * set + 32 * i, last) - key) * (i64)p.k_row);
      copy_async_if(lane < 16, to.scales + 8 * set * 16, scales + 8 * set * 16);
    }
  }

  // The first `COUNT` sets, a group of copies each.
  template <int COUNT> DEVICE_MEMBER void copy_first(const ScoreParams &p, const SetPlaces<T> &to, int warp, int lane) const {
#pragma unroll
    for (int set = 0; set < COUNT; set++) {
      copy(p, to, set, warp, lane);
      commit_copies();
    }
  }
};
