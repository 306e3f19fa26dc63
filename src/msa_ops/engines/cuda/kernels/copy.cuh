// The copy ring: K and V rows of one tile from global to shared memory, asked for by the copying warp.
//
// A tile's rows lie in shared memory in columns of 128 bytes (64 for NVFP4 codes) whose 16-byte chunks are permuted by the row
// number, so that eight rows of one chunk column fall into different banks for ldmatrix. It is the layout that tensor copies
// call 128-byte (64-byte) swizzle; below 9.0 the lanes of the copying warp produce it chunk by chunk.
constexpr int ROW_BYTES = KV_FORMAT == KV_NVFP4 ? 64 : KV_FORMAT == KV_FP8 ? 128 : 256;
constexpr int CHUNKS = ROW_BYTES / 16;
constexpr int COLUMN = ROW_BYTES < 128 ? ROW_BYTES : 128;
constexpr int SIDE_BYTES = TILE * ROW_BYTES; // K or V of a tile
constexpr bool SCALED = KV_FORMAT == KV_NVFP4;
constexpr int SCALE_BYTES = SCALED ? TILE * 8 : 0; // block scales of K or V of a tile
constexpr int STAGE_BYTES = 2 * (SIDE_BYTES + SCALE_BYTES); // K, V, scales of K, scales of V
// A ring of two stages gives K's place back when the scores are taken, a tile's time before V's: so two tiles stay under
// way. With more stages it was slower, by 3% from 256 items of fp8 on.
constexpr bool EARLY_K = STAGES == 2 && MIN_BLOCKS >= 4;
static_assert(!SCALED || TILE == BLOCK_KEYS, "the scales of a block are copied whole");

// Byte offset of chunk `c` of row `r` inside K or V of a stage.
DEVICE u32 chunk_offset(int r, int c) {
  if constexpr (COLUMN == 64)
    return (u32)(r * 64 + ((c ^ ((r >> 1) & 3)) << 4));
  else
    return (u32)((c >> 3) * TILE * 128 + r * 128 + (((c & 7) ^ (r & 7)) << 4));
}

// NVFP4 rows that lie one behind the other are copied two at a time, as rows of 128 bytes: half as many for the copy engine. Its
// 128-byte swizzle then leaves the two rows of a pair in turn where bit 3 of the row number is set.
DEVICE int paired_row(int r, int paired) { return r ^ (paired & (r >> 3) & 1); }

// What the computing warps need to know of a tile in the ring.
struct alignas(16) TileInfo {
  int lo, hi; // rows [lo, hi) of the tile may be attended; lo >= hi: no data came with it
  int last;   // the item's last tile for the group that takes it
};

// A tile to copy. `block` is the page, or in a flat cache the row of the first key; `skip` the rows of the block before it.
struct TileSource {
  int block, skip;
  TileInfo info;
};

struct Ring {
  Barrier k_full[STAGES], v_full[STAGES], k_empty[STAGES], empty[STAGES]; // k_empty: where K is given back early
  TileInfo info[STAGES];
};

// Block scales as they lie in a stage: a page's 1,024 bytes as they are in memory, or 8 bytes a row (gathered).
DEVICE bool scales_gathered(const Params &p) { return p.scale_layout == SCALES_GATHERED; }

// Four bytes, or zeros without reading.
DEVICE void copy_word(u32 to, const u8 *from, bool used) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(used ? 4 : 0) : "memory");
}

// Scales in the 128x4 tiled layout whose rows are not one page's, or do not start on 16 bytes: word by word. A flat cache counts
// (token, KV head) rows, so that a head's rows lie kv_heads apart.
DEVICE void gather_scales(const Params &p, u32 to, const u8 *scales, const TileSource &tile, int head, int lane) {
#pragma unroll
  for (int i = 0; i < TILE / 32; i++) {
    const int r = i * 32 + lane;
    const bool used = r >= tile.info.lo && r < tile.info.hi;
    const i64 row = p.paged ? ((i64)tile.block * p.kv_heads.value + head) * BLOCK_KEYS + r
                            : ((i64)tile.block + tile.skip + r) * p.kv_heads.value + head;
    const u8 *from = used ? scales + (row >> 7) * 1024 + (row & 31) * 16 + (row >> 5 & 3) * 4 : scales;
    copy_word(to + r * 8, from, used);
    copy_word(to + r * 8 + 4, used ? from + 512 : from, used);
  }
}

#ifdef HAS_CLUSTER
// The copy engine's bytes complete a stage; gathered scales are copies of every lane.
DEVICE int full_arrivals(const Params &p) { return (SCALED && scales_gathered(p) ? 33 : 1) + COPY_ARRIVALS; }

DEVICE void copy_box(u32 to, const TensorMap *map, int byte, int row, int head, int page, bool paged, u32 barrier, u64 policy) {
  if (paged)
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
                 "[%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
                 "l"(map), "r"(byte), "r"(row), "r"(head), "r"(page), "r"(barrier), "l"(policy)
                 : "memory");
  else
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
                 "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
                 "l"(map), "r"(byte), "r"(row), "r"(head), "r"(barrier), "l"(policy)
                 : "memory");
}

DEVICE void prefetch_box(const TensorMap *map, int byte, int row, int head, int page, bool paged) {
  if (paged)
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(byte), "r"(row), "r"(head),
                 "r"(page)
                 : "memory");
  else
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(map), "r"(byte), "r"(row), "r"(head)
                 : "memory");
}

// Asks L2 for K and V of a tile where `copy_tile` finds them, without scales and in the usual order of leaving; one lane calls it.
DEVICE void prefetch_tile(const Params &p, int block, int skip, int head) {
  const int row = p.paged ? skip : block + skip, page = p.paged ? block : 0;
#pragma unroll
  for (int side = 0; side < 2; side++)
#pragma unroll
    for (int column = 0; column < ROW_BYTES / COLUMN; column++)
      prefetch_box(side ? &p.v_map : &p.k_map, column * COLUMN, row, (side ? p.v_head : p.k_head) ? head : 0,
                   (side ? p.v_page : p.k_page) ? page : 0, p.paged);
}

// Rows that tensor copies bring beside the attended ones are real memory, but not ours to use: their V must not meet the
// weights 0, because they may hold NaN.
DEVICE void clear_unused_rows(u8 *v, const TileInfo &info, int thread) {
#pragma unroll 1
  for (int i = thread; i < TILE * CHUNKS; i += GROUP_THREADS) {
    const int row = i / CHUNKS;
    if (row < info.lo || row >= info.hi) *(uint4 *)(v + chunk_offset(row, i % CHUNKS)) = make_uint4(0, 0, 0, 0);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); // before the copy engine writes there again
}

// A page's scales of one head, 1,024 bytes.
DEVICE void copy_scales(u32 to, const u8 *from, u32 barrier, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
               "l"(from), "n"(SCALE_BYTES), "r"(barrier), "l"(policy)
               : "memory");
}
#else
DEVICE int full_arrivals(const Params &) { return 33; } // every lane's copies, and lane 0 for the tile's description
#endif

// Unattended rows' scales of V become 0, because they may be NaN: every e2m1 code is finite, so the codes may stay.
DEVICE void clear_unused_scales(const Params &p, u8 *scales, const TileInfo &info, int thread) {
#pragma unroll 1
  for (int row = thread; row < TILE; row += GROUP_THREADS) {
    if (row >= info.lo && row < info.hi) continue;
    if (p.scale_layout == SCALES_TILED) {
      *(u32 *)(scales + (row & 31) * 16 + (row >> 5) * 4) = 0;
      *(u32 *)(scales + 512 + (row & 31) * 16 + (row >> 5) * 4) = 0;
    } else if (p.scale_layout == SCALES_PLANAR) {
#pragma unroll
      for (int s = 0; s < 8; s++) scales[(row >> 2) * 32 + s * 4 + (row & 3)] = 0;
    } else {
      *(uint2 *)(scales + row * 8) = make_uint2(0, 0);
    }
  }
#ifdef HAS_CLUSTER
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); // before the copy engine writes there again
#endif
}

#ifndef HAS_CLUSTER
// `bytes` is 16, or 0 to write zeros without reading.
DEVICE void copy_chunk(u32 to, const u8 *from, u32 bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// K or V of a tile, chunk by chunk; `block` is the first row of its block. Rows that may not be attended become 0 unread.
DEVICE void copy_rows(u32 to, const u8 *block, i64 pitch, const TileSource &tile, int lane) {
  if (tile.info.lo >= tile.info.hi) return;
  constexpr int ROWS_AT_ONCE = 32 / CHUNKS;
  const int chunk = lane % CHUNKS;
#pragma unroll 4
  for (int r = lane / CHUNKS; r < TILE; r += ROWS_AT_ONCE) {
    const bool used = r >= tile.info.lo && r < tile.info.hi;
    copy_chunk(to + chunk_offset(r, chunk), used ? block + (tile.skip + r) * pitch + chunk * 16 : block, used ? 16 : 0);
  }
}
#endif

// Asks for one tile; the whole copying warp calls it. One lane waits for all until the stage, if it was `used`, is free: a lane that
// lagged by two rounds would see the parity it waits for pass by.
DEVICE void copy_tile(const Params &p, const TileSource &tile, int head, u8 *stage, Ring &ring, int slot, u32 parity, bool used,
                      u64 policy, int lane) {
  const u32 to = shared_address(stage);
  const bool data = tile.info.lo < tile.info.hi;
#ifdef HAS_CLUSTER
  const bool gathered = SCALED && scales_gathered(p);
  if (lane == 0) {
    // A dim whose stride is 0 (an expanded cache) has but one entry in the tensor map.
    const bool paged = p.paged;
    const int row = paged ? tile.skip : tile.block + tile.skip, page = paged ? tile.block : 0;
#pragma unroll
    for (int side = 0; side < 2; side++) {
      Barrier *const full = side ? &ring.v_full[slot] : &ring.k_full[slot];
      const u32 barrier = shared_address(full);
      const u32 scales = SCALED && !gathered ? SCALE_BYTES : 0;
      // A mark waits for all of the stage at once: nobody waits for its V, which may be given back before this lane looks again.
      const bool apart = EARLY_K && data;
      if (used && (apart || !side)) barrier_wait(apart && !side ? &ring.k_empty[slot] : &ring.empty[slot], parity ^ 1);
      if (!side) ring.info[slot] = tile.info;
      barrier_expect(full, data ? SIDE_BYTES + scales : 0);
      if (!data) continue;
#pragma unroll
      for (int column = 0; column < ROW_BYTES / COLUMN; column++)
        copy_box(to + side * SIDE_BYTES + column * TILE * COLUMN, side ? &p.v_map : &p.k_map, column * COLUMN, row,
                 (side ? p.v_head : p.k_head) ? head : 0, (side ? p.v_page : p.k_page) ? page : 0, paged, barrier, policy);
      if (scales)
        copy_scales(to + 2 * SIDE_BYTES + side * SCALE_BYTES,
                    side ? p.v_scale + page * p.vs_page + head * p.vs_head : p.k_scale + page * p.ks_page + head * p.ks_head,
                    barrier, policy);
    }
  }
  __syncwarp();
  if (COPY_ARRIVALS) barrier_arrive(&ring.k_full[slot]), barrier_arrive(&ring.v_full[slot]);
  if (gathered) {
    if (data) gather_scales(p, to + 2 * SIDE_BYTES, p.k_scale, tile, head, lane);
    barrier_arrive_after_copies(&ring.k_full[slot]);
    if (data) gather_scales(p, to + 2 * SIDE_BYTES + SCALE_BYTES, p.v_scale, tile, head, lane);
    barrier_arrive_after_copies(&ring.v_full[slot]);
  }
#else
  if (lane == 0 && used) barrier_wait(&ring.empty[slot], parity ^ 1); // V is given back last
  __syncwarp();
#pragma unroll
  for (int side = 0; side < 2; side++) {
    Barrier *const full = side ? &ring.v_full[slot] : &ring.k_full[slot];
    const i64 pitch = side ? p.v_row : p.k_row;
    const u8 *block = side ? p.v + head * p.v_head + tile.block * (p.paged ? p.v_page : p.v_row)
                           : p.k + head * p.k_head + tile.block * (p.paged ? p.k_page : p.k_row);
    copy_rows(to + side * SIDE_BYTES, block, pitch, tile, lane);
    if constexpr (SCALED) {
      const u32 scales = to + 2 * SIDE_BYTES + side * SCALE_BYTES;
      const u8 *from = side ? p.v_scale : p.k_scale;
      if (!data) {
      } else if (scales_gathered(p)) {
        gather_scales(p, scales, from, tile, head, lane);
      } else {
        from += tile.block * (side ? p.vs_page : p.ks_page) + head * (side ? p.vs_head : p.ks_head);
#pragma unroll
        for (int i = lane; i < SCALE_BYTES / 16; i += 32) copy_chunk(scales + i * 16, from + i * 16, 16);
      }
    }
    if (!side && lane == 0) ring.info[slot] = tile.info;
    barrier_arrive_after_copies(full);
    if (lane == 0) barrier_arrive(full);
  }
#endif
}
