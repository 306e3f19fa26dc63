// The decode kernel. One block works on one share of an item (a token, a KV head and up to 16 of its query heads): with
// `splits` blocks an item, block `rank` takes tiles rank, rank + splits, ... of the selected blocks' keys. A grid smaller than
// the work makes each block go through several items.
//
// One warp copies: it turns ids, which it may have to choose first, into tiles, and keeps the ring of STAGES tiles filled, across the borders of items. The others
// compute, in GROUPS groups that take tiles in turn, each with a softmax and an output of its own. Partial results, of groups
// and of a cluster's blocks alike, meet in shared memory, each row in the block that owns it; splits beyond a cluster meet in
// device memory (scratch), where a second kernel merges them.

static_assert(GROUPS < STAGES, "a group holds a tile while it waits for its next");
constexpr int RING_BYTES = STAGES * STAGE_BYTES;
constexpr int WEIGHT_BYTES = ROWS * WEIGHT_PITCH; // two of them: one is written while the other is still read
constexpr int OPERAND_BYTES = QUERY_STAYS ? QUERY_BYTES : 0; // the query operand, where it stays in shared memory

// Masks the raw scores of a tile and leaves this warp's largest of each row, `own`, for the others. Those of the tile before may be
// overwritten: all warps have read them before the last barrier of its `weigh_tile`.
DEVICE void leave_largest(const Softmax &softmax, Scores &s, const TileInfo &info, GroupShared &mine, int warp, int lane,
                          float (&own)[2]) {
  softmax.mask(s, info, warp, lane, own);
  if ((lane & 3) == 0) mine.by_warp[lane >> 2][warp] = own[0], mine.by_warp[(lane >> 2) + 8][warp] = own[1];
}

// Clears what a tile's copy brought beside the attended rows.
DEVICE void clear_unused(const Params &p, const TileInfo &info, Ring &ring, const RingPosition<STAGES> &at, u8 *stage, int thread) {
  if (info.lo <= 0 && info.hi >= TILE) return;
#ifdef HAS_CLUSTER
  barrier_wait(&ring.v_full[at.slot], at.parity);
  if (!SCALED) clear_unused_rows(stage + SIDE_BYTES, info, thread);
#else
  if (SCALED) barrier_wait(&ring.v_full[at.slot], at.parity);
#endif
  if (SCALED) clear_unused_scales(p, stage + 2 * SIDE_BYTES + SCALE_BYTES, info, thread);
}

// Whether the largest scores of a tile are exchanged before the output of the tile before is taken, which hides that, so that weights
// are written once. Else they are written from the base there is, and a second time where it turns out to have been outgrown: fewer
// instructions while that is rare. Measured on 9.0 alone.
constexpr bool EXCHANGE_FIRST = !SCALED;

// From the masked scores of a tile to its weights in shared memory, ready for all warps of the group. `fresh`: its first tile of the
// item.
DEVICE void weigh_tile(const Params &p, const Scores &s, const float (&own)[2], u32 weights, GroupShared &mine, u32 parity, bool fresh,
                       Softmax &softmax, Output &o, int group) {
  float largest[2], added[2];
  const int lane = threadIdx.x & 31;
  if constexpr (EXCHANGE_FIRST) {
    barrier_wait(&mine.largest_here, parity);
    softmax.read_largest(mine.by_warp, lane, largest);
    if (__any_sync(ALL_LANES, fresh || softmax.outgrown(p, largest))) softmax.raise(largest, fresh, o); // the same in all warps
    softmax.write_weights(s, weights, added);
    group_sync(group);
  } else {
    if (!fresh) softmax.write_weights(s, weights, added);
    if (group_sync_or(group, fresh || softmax.outgrown(p, own))) {
      softmax.read_largest(mine.by_warp, lane, largest);
      softmax.raise(largest, fresh, o);
      softmax.write_weights(s, weights, added);
      group_sync(group);
    }
  }
  softmax.sum[0] += added[0], softmax.sum[1] += added[1];
}

// The copying warp's part: for every item the tiles of this block's share. Each group's last is marked so; a
// group that would get none gets a mark without data.
DEVICE void copy_items(const Params &p, Shared &shared_here, u8 *stages_here, u32 first, u32 stride, int rank, int lane) {
  // As offsets that are kept: their bases would be computed between the list and the first copy.
  u32 at_shared = shared_address(&shared_here), at_stages = shared_address(stages_here);
  keep(at_shared, lane), keep(at_stages, lane);
  Shared &shared = *(Shared *)__cvta_shared_to_generic(at_shared);
  u8 *const stages = (u8 *)__cvta_shared_to_generic(at_stages);
  RingPosition<STAGES> at;
  int unused = STAGES; // stages that nothing was copied into yet
  const int splits = p.splits.value;
  // K and V of a request's only token are read once; other tokens of it may select the same blocks: kernel-notes, "The chain
  // of a short call". Evict-first is also what keeps a deep ring from crowding L2: "What holds".
  const u64 policy = p.seqlen_q.value > 1 ? l2_evict_some_first() : l2_evict_first();
  auto copy = [&](const TileSource &tile, int head) {
    copy_tile(p, tile, head, stages + at.slot * STAGE_BYTES, shared.ring, at.slot, at.parity, unused == 0, policy, lane);
    unused = max(unused - 1, 0);
    at.advance(1);
  };
  for (u32 index = first; index < p.items; index += stride) {
    const Item item(p, index);
    Selection selection(p, item);
    if (index == first) {
      keep(selection.lengths), keep(selection.ids), keep(selection.table);
      let_next_kernel_start();
      wait_for_previous_kernel();
    }
    selection.load(p, lane);
#ifdef SELECTS
    if (unused == 0) barrier_wait(&shared.ring.empty[at.slot], at.parity ^ 1); // by all lanes, which write there
    __syncwarp();
    selection.choose(p, rank == 0 && item.row0 == 0, stages + at.slot * STAGE_BYTES, lane);
#endif
    constexpr int PER_BLOCK = BLOCK_KEYS / TILE;
    int marked = 0;
    for (int base = 0; base < p.topk; base += LIST) {
      int blocks, block, lo = 0, hi;
      if (!selection.plain || !selection.ascending_blocks(p, lane, blocks, block, hi))
        blocks = selection.blocks(p, base, lane, block, lo, hi);
      // The second half of the list's last block may lie past the token's limit.
      const bool short_end = PER_BLOCK == 2 && blocks > 0 && __shfl_sync(~0u, hi, blocks - 1) <= TILE;
      const int tiles = blocks * PER_BLOCK - short_end;
      for (int i = rank; i < tiles; i += splits) {
        const int skip = i % PER_BLOCK * TILE;
        const bool last = base + LIST >= p.topk && i + GROUPS * splits >= tiles;
        marked += last;
        const int range = __shfl_sync(~0u, lo | hi << 16, i / PER_BLOCK);
        copy({__shfl_sync(~0u, block, i / PER_BLOCK), skip, {(range & 0xffff) - skip, (range >> 16) - skip, last}}, item.head);
      }
    }
    for (; marked < GROUPS; marked++) copy({0, 0, {0, 0, true}}, item.head);
  }
}

// Asks L2 for a group's first tile by ids, lengths and pages as they are before the wait (common.cuh, `read_early`). One thread
// calls it.
DEVICE void prefetch_first_tile(const Params &p, const Item &item, int rank, int group) {
#ifdef HAS_CLUSTER
  constexpr int PER_BLOCK = BLOCK_KEYS / TILE;
  const int tile = rank + group * p.splits.value, place = tile / PER_BLOCK;
  if (place >= p.topk) return;
  const Selection from(p, item);
  const int id = read_early(from.ids + place), first = read_early(from.lengths);
  const i64 keys = p.paged ? first : (i64)read_early(from.lengths + p.lengths_step) - first;
  if (id < 0 || (i64)id * BLOCK_KEYS + tile % PER_BLOCK * TILE >= keys || (p.paged && id >= p.table_width)) return;
  const i64 block = p.paged ? read_early(from.table + id) : first + (i64)id * BLOCK_KEYS;
  if (block >= 0 && block < p.cache_rows) prefetch_tile(p, (int)block, tile % PER_BLOCK * TILE, item.head);
#endif
}

DEVICE TileInfo next_tile(Ring &ring, const RingPosition<STAGES> &at) {
  barrier_wait(&ring.k_full[at.slot], at.parity);
  return ring.info[at.slot];
}

// A computing group's part.
DEVICE void compute_items(const Params &p, Shared &shared_here, u8 *stages, u8 *weights, float *peers, u8 *value_scales, u32 first,
                          u32 stride, int rank, int group, int warp, int lane) {
  RingPosition<STAGES> next;
  next.advance(group);
  weights += group * (2 * WEIGHT_BYTES + OPERAND_BYTES);
  value_scales += group * WARPS * VALUE_SCALE_BYTES;
  // As an offset that is kept, or its base is computed anew at every use.
  u32 at_shared = shared_address(&shared_here), table = shared_address(value_scales);
  if (SCALED) keep(at_shared, lane);
  Shared &shared = *(Shared *)__cvta_shared_to_generic(at_shared);
  GroupShared &mine = shared.group[group];
  const LaneAddresses first_at(p, shared_address(stages), shared_address(weights), warp, lane);
  const bool cluster = CAN_CLUSTER && p.combine == COMBINE_CLUSTER;
  const Delivery delivery(shared, peers, cluster ? p.splits.value : 1, cluster ? rank : 0, group, warp, lane);
  u32 turn = 0, parity = 0; // of the weights, and of `largest_here`
  for (u32 index = first; index < p.items; index += stride) {
    const Item item(p, index);
    if (index == first) {
#ifdef HAS_CLUSTER
      if (cluster) cluster_arrive_relaxed(); // waited for before anything is sent
#endif
      if (p.early && warp == 0 && lane == 0) prefetch_first_tile(p, item, rank, group);
      wait_for_previous_kernel();
    }
    QueryRows rows = {};
    rows.load(p, item, warp * 32 + lane);
    const float scale = p.softmax_scale * (p.k_global ? *p.k_global : 1.f);
    // Unless it stays, the operand takes the place of the weights that the first tile does not write.
    u8 *const operand = weights + (QUERY_STAYS ? 2 * WEIGHT_BYTES : WEIGHT_BYTES >= QUERY_BYTES ? (turn ^ 1) * WEIGHT_BYTES : 0);
    rows.store(p, operand, mine.row_scale, scale, warp * 32 + lane);
    group_sync(group);
    u32 q[8][4];
    if (!QUERY_STAYS) load_query_fragments(shared_address(operand), lane, q);
    if (WEIGHT_BYTES < QUERY_BYTES) group_sync(group);
    Softmax softmax;
    softmax.reset(mine.row_scale, lane);
    Output o = {};
#ifdef HAS_CLUSTER
    if (cluster) cluster_wait(); // all blocks of the cluster have started: their shared memory may be written
#endif
    bool left = false; // cluster: the states have been left to the copying warp
    bool held = false, last = false; // a tile whose weights are written and whose output is not taken; it is the item's last
    // The scores of the next tile are taken before the output of the one held: two independent chains of products at a time.
    RingPosition<STAGES> at; // of the tile that is held
    while (true) {
      TileInfo info = {0, 0, 1};
      Scores s;
      float own[2]; // this warp's largest of each row
      if (!last) {
        info = next_tile(shared.ring, next);
        if (info.lo < info.hi) {
          score_tile(p, first_at, next.slot * STAGE_BYTES, q, s);
          if (EARLY_K) release(&shared.ring.k_empty[next.slot], lane);
          if constexpr (EXCHANGE_FIRST) {
            leave_largest(softmax, s, info, mine, warp, lane, own);
            release(&mine.largest_here, lane);
          }
        }
      }
      if (held) {
        const u32 stage = at.slot * STAGE_BYTES;
        barrier_wait(&shared.ring.v_full[at.slot], at.parity);
        u32 scales = first_at.v_scale + stage;
        if (SCALED && p.scale_layout != SCALES_PLANAR) { // the table takes the place of the first stage's
          const u32 from = shared_address(stages) + 2 * SIDE_BYTES + SCALE_BYTES;
          arrange_value_scales(p, from + stage, table, warp, lane);
          scales = first_at.v_scale - from + table;
        }
        output_tile(first_at.v + stage, first_at.read + turn * WEIGHT_BYTES, scales, o);
        turn ^= 1;
        release(&shared.ring.empty[at.slot], lane);
      }
      if (info.lo >= info.hi) break;
      at = next;
      next.advance(GROUPS);
      if constexpr (!EXCHANGE_FIRST) leave_largest(softmax, s, info, mine, warp, lane, own);
      clear_unused(p, info, shared.ring, at, stages + at.slot * STAGE_BYTES, warp * 32 + lane);
      weigh_tile(p, s, own, first_at.write + turn * WEIGHT_BYTES, mine, parity, !held, softmax, o, group);
      held = true, last = info.last, parity ^= 1;
      if (last && cluster) { // before the output of this tile is taken: all blocks have the weights ready when outputs come
        leave_states(softmax, mine, warp, lane);
        release(&shared.states_left, lane);
        left = true;
      }
    }
    if (!last) { // a mark without data
      if (EARLY_K) release(&shared.ring.k_empty[next.slot], lane);
      release(&shared.ring.empty[next.slot], lane);
      next.advance(GROUPS);
    }
#ifdef HAS_CLUSTER
    if (cluster) {
      if (!left) {
        leave_states(softmax, mine, warp, lane);
        release(&shared.states_left, lane);
      }
      delivery.give<true>(o);
      switch (p.splits.value) {
      case 2: meet_in_cluster<2>(p, item, peers, shared, rank); break;
      case 3:
        if constexpr (SIZES_BETWEEN) meet_in_cluster<3>(p, item, peers, shared, rank);
        break;
      case 4: meet_in_cluster<4>(p, item, peers, shared, rank); break;
      case 6:
        if constexpr (SIZES_BETWEEN) meet_in_cluster<6>(p, item, peers, shared, rank);
        break;
      case 8: meet_in_cluster<8>(p, item, peers, shared, rank); break;
      default: meet_in_cluster<16>(p, item, peers, shared, rank); break;
      }
      return;
    }
#endif
    const i64 share = (i64)index * p.splits.value + rank;
    if constexpr (GROUPS == 1) {
      finish_alone(p, item, o, softmax, mine, share, warp, lane);
      continue;
    }
    if (index != first) workers_sync(); // the previous item has been merged
    leave_states(softmax, mine, warp, lane);
    delivery.give<false>(o);
    workers_sync();
    Meeting<1> meeting(p, item, share, 0);
    meeting.make_weights(p, shared);
    meeting.finish(p, peers);
  }
}

// Brings the tables' lines of this block's first item into L2 while the previous kernel may still be running. What it writes
// meanwhile is seen all the same: these are hints, the reads come after the wait.
DEVICE void prefetch_tables(const Params &p, u32 first, int lane) {
#ifdef HAS_CLUSTER
  const Item item(p, first);
  if (lane == 0) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&p.k_map) : "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&p.v_map) : "memory");
    prefetch_line(p.lengths + item.request * p.lengths_step);
    if (p.q_offset) prefetch_line(p.q_offset + item.request * p.q_offset_step);
  }
#ifdef SELECTS
  if (p.score_block == 1 && lane * 32 < p.table_width) prefetch_line(scores_of(p, item) + lane * 32);
#endif
  if (lane * 32 < p.topk) prefetch_line(p.ids + item.head * p.ids_head + item.token * p.ids_token + lane * 32);
  if (p.paged && lane * 32 < p.table_width) prefetch_line(p.table + item.request * p.table_row + lane * 32);
  if (lane < item.rows)
    prefetch_line(p.q + item.token * p.q_token + ((i64)item.head * p.group + item.row0 + lane) * p.q_head);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) msa_decode(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) u8 dynamic[];
  __shared__ Shared shared;
  u8 *const weights = dynamic + RING_BYTES;
  u8 *const value_scales = weights + GROUPS * (2 * WEIGHT_BYTES + OPERAND_BYTES); // NVFP4
  float *const peers = (float *)(value_scales + GROUPS * WARPS * VALUE_SCALE_BYTES); // where partial results meet, if any do
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u32 first = p.splits.quotient(blockIdx.x), stride = p.splits.quotient(gridDim.x); // in items
  const int rank = blockIdx.x - first * p.splits.value;
  if (warp == GROUPS * WARPS) {
    if (lane == 0) {
      for (int i = 0; i < STAGES; i++) {
        barrier_init(&shared.ring.k_full[i], full_arrivals(p));
        barrier_init(&shared.ring.v_full[i], full_arrivals(p));
        barrier_init(&shared.ring.k_empty[i], WARPS * WARP_ARRIVALS);
        barrier_init(&shared.ring.empty[i], WARPS * WARP_ARRIVALS);
      }
#ifdef HAS_CLUSTER
      barrier_init(&shared.states_left, GROUPS * WARPS * WARP_ARRIVALS);
      barrier_init(&shared.weights_here, WARP_ARRIVALS);
      barrier_init(&shared.states_here, 1);
      barrier_init(&shared.outputs_here, 1);
      if (p.combine == COMBINE_CLUSTER) {
        const u32 rows = p.splits.value * GROUPS * (ROWS >> owner_bits(p.splits.value)); // of all parts, if this block owns any
        barrier_expect(&shared.states_here, rows * 8);
        barrier_expect(&shared.outputs_here, rows * HEAD_DIM * 4);
      }
#endif
      for (int i = 0; i < GROUPS; i++) barrier_init(&shared.group[i].largest_here, WARPS * WARP_ARRIVALS);
      publish_barriers();
    }
    prefetch_tables(p, first, lane);
  }
  __syncthreads();
  if (warp == GROUPS * WARPS) {
#ifdef HAS_CLUSTER
    if (p.combine == COMBINE_CLUSTER) cluster_arrive_relaxed();
#endif
    copy_items(p, shared, dynamic, first, stride, rank, lane);
#ifdef HAS_CLUSTER
    if (CAN_CLUSTER && p.combine == COMBINE_CLUSTER) settle_states(p, Item(p, first), shared, rank, lane);
#endif
  } else {
    compute_items(p, shared, dynamic, weights, peers, value_scales, first, stride, rank, warp / WARPS, warp % WARPS, lane);
  }
}
