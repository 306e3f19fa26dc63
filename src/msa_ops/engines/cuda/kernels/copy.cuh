// The copy ring: K and V rows of one tile from global to shared memory, asked for by the copying warp.
//
// A tile's rows lie in shared memory in columns of 128 bytes (64 for NVFP4 codes) whose 16-byte chunks are permuted by the row
// number, so that eight rows of one chunk column fall into different banks for ldmatrix. It is the layout that tensor copies
// call 128-byte (64-byte) swizzle; below 9.0 the lanes of the copying warp produce it chunk by chunk.
constexpr int ROW_BYTES = KV_FORMAT == KV_NVFP4 ? 64 : KV_FORMAT == KV_FP8 ? 128 : 256;
constexpr int CHUNKS = ROW_BYTES / 16;
constexpr int COLUMN = ROW_BYTES < 128 ? ROW_BYTES : 128;
constexpr int SIDE_BYTES = TILE * ROW_BYTES; // K or V of a tile
constexpr int STAGE_BYTES = 2 * SIDE_BYTES;

// Byte offset of chunk `c` of row `r` inside K or V of a stage.
DEVICE u32 chunk_offset(int r, int c) {
  if constexpr (COLUMN == 64)
    return (u32)(r * 64 + ((c ^ ((r >> 1) & 3)) << 4));
  else
    return (u32)((c >> 3) * TILE * 128 + r * 128 + (((c & 7) ^ (r & 7)) << 4));
}

// What the computing warps need to know of a tile in the ring.
struct TileInfo {
  int lo, hi; // rows [lo, hi) of the tile may be attended; lo >= hi: no data came with it
  int last;   // the item's last tile for the group that takes it
};

// A tile to copy. `block` is the page, or in a flat cache the row of the first key; `skip` the rows of the block before it.
struct TileSource {
  int block, skip;
  TileInfo info;
};

struct Ring {
  Barrier k_full[STAGES], v_full[STAGES], empty[STAGES];
  TileInfo info[STAGES];
};

#ifdef HAS_CLUSTER
constexpr int FULL_ARRIVALS = 1;

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
#else
constexpr int FULL_ARRIVALS = 33; // every lane's copies, and lane 0 for the tile's description
#endif

// K and V are read once: their lines leave L2 before any other. (Also what keeps a deep ring from crowding L2: kernel-notes.)
DEVICE u64 l2_evict_first() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
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

// Asks for one tile; the whole copying warp calls it, with the stage free.
DEVICE void copy_tile(const Params &p, const TileSource &tile, int head, u8 *stage, Ring &ring, int slot, u64 policy, int lane) {
#ifdef HAS_CLUSTER
  if (lane == 0) {
    const bool data = tile.info.lo < tile.info.hi;
    ring.info[slot] = tile.info;
    if (data) {
      const u32 to = shared_address(stage);
      const bool paged = p.paged;
      const int row = paged ? tile.skip : tile.block + tile.skip, page = paged ? tile.block : 0;
      barrier_expect(&ring.k_full[slot], SIDE_BYTES);
#pragma unroll
      for (int column = 0; column < ROW_BYTES / COLUMN; column++)
        copy_box(to + column * TILE * COLUMN, &p.k_map, column * COLUMN, row, head, page, paged,
                 shared_address(&ring.k_full[slot]), policy);
      barrier_expect(&ring.v_full[slot], SIDE_BYTES);
#pragma unroll
      for (int column = 0; column < ROW_BYTES / COLUMN; column++)
        copy_box(to + SIDE_BYTES + column * TILE * COLUMN, &p.v_map, column * COLUMN, row, head, page, paged,
                 shared_address(&ring.v_full[slot]), policy);
    } else {
      barrier_arrive(&ring.k_full[slot]);
      barrier_arrive(&ring.v_full[slot]);
    }
  }
#else
  const i64 k_block = p.paged ? tile.block * p.k_page : tile.block * p.k_row;
  const i64 v_block = p.paged ? tile.block * p.v_page : tile.block * p.v_row;
  const u32 to = shared_address(stage);
  copy_rows(to, p.k + head * p.k_head + k_block, p.k_row, tile, lane);
  barrier_arrive_after_copies(&ring.k_full[slot]);
  copy_rows(to + SIDE_BYTES, p.v + head * p.v_head + v_block, p.v_row, tile, lane);
  barrier_arrive_after_copies(&ring.v_full[slot]);
  if (lane == 0) {
    ring.info[slot] = tile.info;
    barrier_arrive(&ring.k_full[slot]);
    barrier_arrive(&ring.v_full[slot]);
  }
#endif
}
