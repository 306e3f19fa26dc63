// Selection where a row is a cluster's: each of its thread blocks narrows an eighth of the row to a list, as those of shorter rows
// do, and the first one the lists to the result.
constexpr int PEERS = 8; // thread blocks of a cluster

struct ClusterShared {
  typedef Layout<128, 8, LISTS> Part;
  typedef Layout<128, 8, STREAMED> Whole; // for a search, by the first thread block
  static constexpr int PART = Part::MAX_BLOCKS;
  static_assert(Whole::MAX_BLOCKS == PEERS * PART, "");

  WarpShared<Part::TILES, unsigned char, 128> of_warp[Part::WARPS];
  WarpShared<Part::WARPS, u16> of_block;
  WarpShared<PEERS, u16> best;
  // Those of the other thread blocks: a score and the number of its block, or of no block: more reach the floor than a list holds.
  float2 list[PEERS - 1][32];
  u64 here; // phase barrier: the lists
  SearchShared<Whole> search;
};

#ifdef HAS_CLUSTER
DEVICE void select_by_cluster(const TopkParams &p, ClusterShared &s) {
  typedef ClusterShared::Part Part;
  const int t = threadIdx.x, warp = t >> 5, lane = t & 31, rank = blockIdx.x % PEERS, first = rank * ClusterShared::PART;
  const Row row(p, blockIdx.x / PEERS);
  if (rank == 0) {
    if (t == 0) {
      barrier_init(&s.here, 1);
      publish_barriers();
      barrier_expect(&s.here, sizeof s.list);
      prefetch_extent(p, row);
      s.search.bin = -1, s.search.keys = 0;
    }
    ((uint2 *)s.search.bins)[t] = make_uint2(0, 0);
  }
  cluster_arrive_relaxed(); // the first thread block's barrier is there
  prefetch_scores(p, row, first / SECTOR + t);
  let_next_kernel_start();
  wait_for_previous_kernel();
  WarpRow<Part::TILES> mine;
  const float *at = row.score + (first + Part::block(0)) * p.score_block;
#pragma unroll
  for (int j = 0; j < Part::TILES; j++, at += 32 * p.score_block) mine.score[j] = first + Part::block(j) < p.blocks ? *at : 0.f;
  const Forced forced(p, extent_of(p, row)); // read while the scores are under way
#pragma unroll
  for (int j = 0; j < Part::TILES; j++) {
    mine.block[j] = j * 32 + lane; // of the warp's
    if (!forced.open(first + Part::block(j))) mine.score[j] = __uint_as_float(MINUS_INFINITY_BITS);
  }
  const u32 n = mine.narrow(s.of_warp[warp], forced.wanted, lane);
  cluster_wait();
  bool over = __syncthreads_or(n > 32);
  if (warp == 0) {
    float score = 0.f;
    int block = -1;
    if (!over) {
      WarpRow<Part::WARPS> lists;
#pragma unroll
      for (int w = 0; w < Part::WARPS; w++)
        lists.score[w] = s.of_warp[w].score[lane], lists.block[w] = first + w * Part::TILES * 32 + s.of_warp[w].block[lane];
      over = lists.narrow(s.of_block, forced.wanted, lane) > 32;
      if (!over) score = s.of_block.score[lane], block = s.of_block.block[lane];
    }
    if (rank > 0) {
      const u32 to = address_in_rank(shared_address(&s.list[rank - 1][lane]), 0);
      send(to, address_in_rank(shared_address(&s.here), 0), make_float2(score, __int_as_float(block)));
    } else {
      WarpRow<PEERS> best;
      best.score[0] = score, best.block[0] = block;
      barrier_wait_for_peers(&s.here, 0);
#pragma unroll
      for (int i = 1; i < PEERS; i++) {
        const float2 other = s.list[i - 1][lane];
        best.score[i] = other.x, best.block[i] = __float_as_int(other.y);
        over |= best.block[i] < 0;
      }
      over = __any_sync(ALL_LANES, over);
      if (!over) best.write_narrowed(p, row, forced, s.best, lane);
    }
  }
  if (rank > 0 || !__syncthreads_or(over)) return;
  BlockRow<ClusterShared::Whole> keys(p, row);
  keys.tiles = (forced.extent + Part::THREADS - 1) / Part::THREADS;
  select_by_search(p, row, forced, keys, s.search, 1);
}
#endif

// Launched from 9.0 on.
extern "C" __global__ void __launch_bounds__(128, 8) msa_topk_cluster_8192(const __grid_constant__ TopkParams p) {
#ifdef HAS_CLUSTER
  __shared__ ClusterShared shared;
  select_by_cluster(p, shared);
#endif
}
