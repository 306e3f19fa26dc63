// The decode kernel. One block works on one share of an item (a token, a KV head and up to 16 of its query heads): with
// `splits` blocks an item, block `rank` takes tiles rank, rank + splits, ... of the selected blocks' keys. A grid smaller than
// the work makes each block go through several items.
//
// One warp copies: it turns ids into tiles, and keeps the ring of STAGES tiles filled, across the borders of items. The others
// compute, in GROUPS groups that take tiles in turn, each with a softmax and an output of its own. Partial results, of groups
// and of a cluster's blocks alike, meet in shared memory, each row in the block that owns it; splits beyond a cluster meet in
// device memory (scratch), where a second kernel merges them.

struct GroupShared {
  float row_scale[ROWS];
  float by_warp[WARPS][ROWS]; // the largest scores of a tile, at the end of an item the sums
};

struct Shared {
  Ring ring;
  Barrier arrival; // cluster: counts what peers have sent here
  GroupShared group[GROUPS];
  // [rank][group][own row]: the base of each row that this block owns, and every warp's part of its sum.
  float peer_base[GROUPS * ROWS];
  alignas(16) float peer_sum[GROUPS * ROWS][WARPS];
};
constexpr int PEER_BYTES = GROUPS * ROWS * (HEAD_DIM + WARPS + 1) * 4; // what a block of a cluster receives, its own included

static_assert(GROUPS < STAGES, "a group holds a tile while it waits for its next");
constexpr int RING_BYTES = STAGES * STAGE_BYTES;
constexpr int WEIGHT_BYTES = ROWS * WEIGHT_PITCH; // two of them: one is written while the other is still read

constexpr int OPERAND_BYTES = QUERY_STAYS ? QUERY_BYTES : 0; // the query operand, where it stays in shared memory

struct RowTotals {
  float base[2], sum[2];
};

DEVICE i64 output_row(const Params &p, const Item &item, int row) {
  return ((i64)item.token * p.kv_heads.value + item.head) * p.group + item.row0 + row;
}

DEVICE void store_output(const Params &p, i64 row, int dim, float a, float b) {
  *(u32 *)((u16 *)p.out + row * HEAD_DIM + dim) = p.query_type == QUERY_FP16 ? pack_fp16(a, b) : pack_bf16(a, b);
}

DEVICE void store_output(const Params &p, i64 row, int dim, float a) {
  const u32 x = p.query_type == QUERY_FP16 ? pack_fp16(a, a) : pack_bf16(a, a);
  ((u16 *)p.out)[row * HEAD_DIM + dim] = (u16)x;
}

// What an output in units of V is multiplied with. It may be as large as float32 goes: nothing but an output meets it.
DEVICE float output_factor(const Params &p) { return p.output_scale * (p.v_global ? *p.v_global : 1.f); }

// Whether a row had a key, by the sum of its weights. A sum of NaN, from an attended NaN, had one, and stays NaN.
DEVICE bool has_keys(float sum) { return sum != 0.f; }

// What an unnormalised sum of weights times widened V is multiplied with to be in units of V; 0 where there was no key.
DEVICE float normaliser(float sum) { return has_keys(sum) ? __fdividef(KV_FACTOR, sum) : 0.f; }

DEVICE void store_lse(const Params &p, i64 row, float base, float sum) {
  if (p.lse) p.lse[row] = has_keys(sum) ? (base + log2_approx(sum)) * 0.693147180559945f : NEG_INF;
}

// The sums of a row over a group's warps; every thread gets its two rows'.
DEVICE RowTotals total_rows(const Softmax &softmax, float (*sums)[ROWS], int group, int warp, int lane) {
  RowTotals t;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float s = softmax.warp_sum(r);
    if ((lane & 3) == 0) sums[warp][(lane >> 2) + 8 * r] = s;
  }
  group_sync(group);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    t.base[r] = softmax.base[r];
    t.sum[r] = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) t.sum[r] += sums[w][(lane >> 2) + 8 * r];
  }
  return t;
}

// Where partial results of an item meet. A cluster of RANKS blocks (1: no cluster) shares the rows of an item: block `r` owns
// rows [r * OWN, (r + 1) * OWN), and receives them from all groups of all ranks. `peers` is [rank][group][own row][dim], its
// 16-byte groups permuted by row against bank conflicts. Sizes are known to the compiler, because this code runs once a block and
// every instruction of it is on the way from the last tile to the end.
template <int RANKS> struct Meeting {
  static constexpr int OWN = ROWS / RANKS, PARTS = RANKS * GROUPS; // PARTS: results that meet in a row
  int rank;

  static DEVICE_MEMBER int slot(int from, int own_row) { return from * OWN + own_row; }
  static DEVICE_MEMBER int permuted(int slot, int dim) { return (((dim >> 2) ^ (slot & 7)) << 2) + (dim & 3); }

  // This group's output and totals to the rows' owners.
  DEVICE_MEMBER void give(const Output &o, const Softmax &softmax, float *peers, Shared &shared, int group, int warp,
                          int lane) const {
    const int from = rank * GROUPS + group;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = (lane >> 2) + 8 * r, at = slot(from, row % OWN);
      const Receiver to(shared, row / OWN);
#pragma unroll
      for (int i = 0; i < OUT_VECTORS; i++) {
        OutVector x;
        output_vector(o, i, r, x);
        float *place = peers + at * HEAD_DIM + permuted(at, vector_dim(warp, lane, i));
        if constexpr (OUT_VECTOR == 4)
          to.put(place, make_float4(x[0], x[1], x[2], x[3]));
        else
          to.put(place, make_float2(x[0], x[1]));
      }
      const float sum = softmax.warp_sum(r);
      if ((lane & 3) == 0) to.put(&shared.peer_sum[at][warp], sum);
      if ((lane & 3) == 1 && warp == 0) to.put(&shared.peer_base[at], softmax.base[r]);
    }
  }

  // Another block of the cluster, or this one.
  struct Receiver {
    u32 offset, barrier; // from an address here to the same there

    DEVICE_MEMBER Receiver(Shared &shared, int to) {
#ifdef HAS_CLUSTER
      if constexpr (RANKS > 1) {
        const u32 here = shared_address(&shared.arrival);
        barrier = address_in_rank(here, to);
        offset = barrier - here;
      }
#endif
    }
    template <typename T> DEVICE_MEMBER void put(float *to, T x) const {
#ifdef HAS_CLUSTER
      if constexpr (RANKS > 1) {
        send(shared_address(to) + offset, barrier, x);
        return;
      }
#endif
      *(T *)to = x;
    }
  };

  // Merges the rows that this block owns and stores them: the result, or the partial result of `share` (scratch). A warp has one
  // row at a time: its lanes first each take one part's weight, then DIMS dims each. Few rows are spread over all warps.
  DEVICE_MEMBER void merge(const Params &p, const Item &item, const float *peers, const Shared &shared, i64 share, int lane) const {
    constexpr int DIMS = OWN * (HEAD_DIM / 4) < WORKERS ? 1 : 4;
    constexpr int THREADS_A_ROW = HEAD_DIM / DIMS;
    const float factor = RANKS == 1 && p.combine == COMBINE_SCRATCH ? 1.f : output_factor(p);
#pragma unroll
    for (int e = 0; e < OWN * THREADS_A_ROW; e += WORKERS) {
      const int place = e + threadIdx.x, mine = place / THREADS_A_ROW, dim = place % THREADS_A_ROW * DIMS;
      const int row = rank * OWN + mine;
      if (row >= item.rows || (OWN * THREADS_A_ROW % WORKERS && mine >= OWN)) continue; // the same for the whole warp
      const int part = slot(lane & (PARTS - 1), mine);
      const float part_base = shared.peer_base[part];
      float x[DIMS] = {}, y[PARTS][DIMS];
#pragma unroll
      for (int c = 0; c < PARTS; c++) {
        const int at = slot(c, mine);
        const float *from = peers + at * HEAD_DIM + permuted(at, dim);
        if constexpr (DIMS == 4)
          *(float4 *)y[c] = *(const float4 *)from;
        else
          y[c][0] = *from;
      }
      float sum = 0.f, base = part_base;
#pragma unroll
      for (int w = 0; w < WARPS; w++) sum += shared.peer_sum[part][w];
#pragma unroll
      for (int d = PARTS / 2; d >= 1; d >>= 1) base = fmaxf(base, __shfl_xor_sync(~0u, base, d));
      const float weight = exp2_approx(part_base - (base == NEG_INF ? 0.f : base));
      sum *= weight;
#pragma unroll
      for (int c = 0; c < PARTS; c++) {
        const float w = __shfl_sync(~0u, weight, c);
#pragma unroll
        for (int i = 0; i < DIMS; i++) x[i] = fmaf(y[c][i], w, x[i]);
      }
#pragma unroll
      for (int d = PARTS / 2; d >= 1; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
      const float scale = normaliser(sum);
#pragma unroll
      for (int i = 0; i < DIMS; i++) x[i] = has_keys(sum) ? x[i] * scale * factor : 0.f;
      if (RANKS == 1 && p.combine == COMBINE_SCRATCH) {
        const i64 at = share * ROWS + row;
        if constexpr (DIMS == 4) {
          store_partial(p, at * HEAD_DIM + dim, x[0], x[1]);
          store_partial(p, at * HEAD_DIM + dim + 2, x[2], x[3]);
        }
        if (dim == 0) ((float2 *)p.partial_state)[at] = make_float2(base, sum);
      } else {
        const i64 at = output_row(p, item, row);
        if constexpr (DIMS == 4)
          store_output(p, at, dim, x[0], x[1]), store_output(p, at, dim + 2, x[2], x[3]);
        else
          store_output(p, at, dim, x[0]);
        if (dim == 0) store_lse(p, at, base, sum);
      }
    }
  }
};

#ifdef HAS_CLUSTER
// The end of a cluster's only item.
template <int RANKS>
DEVICE void meet_in_cluster(const Params &p, const Item &item, const Output &o, const Softmax &softmax, float *peers, Shared &shared,
                            int rank, int group, int warp, int lane) {
  const Meeting<RANKS> meeting = {rank};
  cluster_wait(); // all blocks of the cluster have started: their shared memory may be written
  meeting.give(o, softmax, peers, shared, group, warp, lane);
  barrier_wait_for_peers(&shared.arrival, 0);
  meeting.merge(p, item, peers, shared, 0, lane);
}
#endif

// One group had all of a share: its result goes from registers to memory, or as the partial result of `share` (scratch).
DEVICE void finish_alone(const Params &p, const Item &item, const Output &o, const Softmax &softmax, GroupShared &mine, i64 share,
                         int warp, int lane) {
  const RowTotals t = total_rows(softmax, mine.by_warp, 0, warp, lane);
  const bool scratch = p.combine == COMBINE_SCRATCH;
  const float factor = scratch ? 1.f : output_factor(p);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = (lane >> 2) + 8 * r;
    if (row >= item.rows) continue;
    const float scale = normaliser(t.sum[r]);
    const i64 at = scratch ? share * ROWS + row : output_row(p, item, row);
#pragma unroll
    for (int i = 0; i < OUT_VECTORS; i++) {
      OutVector x;
      output_vector(o, i, r, x);
#pragma unroll
      for (int e = 0; e < OUT_VECTOR; e++) x[e] = has_keys(t.sum[r]) ? x[e] * scale * factor : 0.f;
      const int dim = vector_dim(warp, lane, i);
#pragma unroll
      for (int e = 0; e < OUT_VECTOR; e += 2) {
        if (scratch)
          store_partial(p, at * HEAD_DIM + dim + e, x[e], x[e + 1]);
        else
          store_output(p, at, dim + e, x[e], x[e + 1]);
      }
    }
    if (warp == 0 && (lane & 3) == 0) {
      if (scratch)
        ((float2 *)p.partial_state)[at] = make_float2(t.base[r], t.sum[r]);
      else
        store_lse(p, at, t.base[r], t.sum[r]);
    }
  }
}

// From the raw scores of a tile to its weights in shared memory, ready for all warps of the group. `fresh`: its first tile of the
// item. `stage` is where the tile lies.
DEVICE void weigh_tile(const Params &p, Scores &s, const TileInfo &info, Ring &ring, const RingPosition<STAGES> &at, u8 *stage,
                       u32 weights, float (*by_warp)[ROWS], bool fresh, Softmax &softmax, Output &o, int group, int warp,
                       int lane) {
  float largest[2], added[2];
  softmax.mask(s, info, warp, lane, largest);
  if ((lane & 3) == 0) by_warp[warp][lane >> 2] = largest[0], by_warp[warp][(lane >> 2) + 8] = largest[1];
  if (!fresh) softmax.write_weights(s, weights, added);
  if (info.lo > 0 || info.hi < TILE) {
#ifdef HAS_CLUSTER
    barrier_wait(&ring.v_full[at.slot], at.parity);
    if (!SCALED) clear_unused_rows(stage + SIDE_BYTES, info, warp * 32 + lane);
#else
    if (SCALED) barrier_wait(&ring.v_full[at.slot], at.parity);
#endif
    if (SCALED) clear_unused_scales(p, stage + 2 * SIDE_BYTES + SCALE_BYTES, info, warp * 32 + lane);
  }
  if (group_sync_or(group, fresh || softmax.outgrown(largest))) { // rare after the first tile: weights from a new base
    softmax.raise(&by_warp[0][0], lane, o);
    softmax.write_weights(s, weights, added);
    group_sync(group);
  }
  softmax.sum[0] += added[0], softmax.sum[1] += added[1];
}

// The copying warp's part: for every item the tiles of this block's share. Each group's last is marked so; a
// group that would get none gets a mark without data.
DEVICE void copy_items(const Params &p, Shared &shared, u8 *stages, u32 first, u32 stride, int rank, int lane) {
  RingPosition<STAGES> at;
  int unused = STAGES; // stages that nothing was copied into yet
  const int splits = p.splits.value;
  const u64 policy = l2_evict_first(); // K and V are read once. Also what keeps a deep ring from crowding L2: kernel-notes
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
      wait_for_previous_kernel();
      let_next_kernel_start();
    }
    selection.load(p, lane);
    constexpr int PER_BLOCK = BLOCK_KEYS / TILE;
    int marked = 0;
    for (int base = 0; base < p.topk; base += LIST) {
      int block, lo, hi;
      const int blocks = selection.blocks(p, base, lane, block, lo, hi);
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

DEVICE TileInfo next_tile(Ring &ring, const RingPosition<STAGES> &at) {
  barrier_wait(&ring.k_full[at.slot], at.parity);
  return ring.info[at.slot];
}

DEVICE void release(Barrier *empty, int lane) {
  __syncwarp();
  if (lane == 0) barrier_arrive(empty);
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
  u32 turn = 0;
  for (u32 index = first; index < p.items; index += stride) {
    const Item item(p, index);
    if (index == first) {
#ifdef HAS_CLUSTER
      if (p.combine == COMBINE_CLUSTER) cluster_arrive_relaxed(); // waited for before anything is sent
#endif
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
    bool held = false, last = false; // a tile whose weights are written and whose output is not taken; it is the item's last
    // The scores of the next tile are taken before the output of the one held: two independent chains of products at a time.
    RingPosition<STAGES> at; // of the tile that is held
    while (true) {
      TileInfo info = {0, 0, 1};
      Scores s;
      if (!last) {
        info = next_tile(shared.ring, next);
        if (info.lo < info.hi) {
          score_tile(p, first_at, next.slot * STAGE_BYTES, q, s);
          if (EARLY_K) release(&shared.ring.k_empty[next.slot], lane);
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
      weigh_tile(p, s, info, shared.ring, at, stages + at.slot * STAGE_BYTES, first_at.write + turn * WEIGHT_BYTES, mine.by_warp,
                 !held, softmax, o, group, warp, lane);
      held = true, last = info.last;
    }
    if (!last) { // a mark without data
      if (EARLY_K) release(&shared.ring.k_empty[next.slot], lane);
      release(&shared.ring.empty[next.slot], lane);
      next.advance(GROUPS);
    }
#ifdef HAS_CLUSTER
    if (p.combine == COMBINE_CLUSTER) {
      switch (p.splits.value) {
      case 2: meet_in_cluster<2>(p, item, o, softmax, peers, shared, rank, group, warp, lane); break;
      case 4: meet_in_cluster<4>(p, item, o, softmax, peers, shared, rank, group, warp, lane); break;
      case 8: meet_in_cluster<8>(p, item, o, softmax, peers, shared, rank, group, warp, lane); break;
      default: meet_in_cluster<16>(p, item, o, softmax, peers, shared, rank, group, warp, lane); break;
      }
      return;
    }
#endif
    if constexpr (GROUPS == 1) {
      finish_alone(p, item, o, softmax, mine, (i64)index * p.splits.value + rank, warp, lane);
      continue;
    }
    const Meeting<1> meeting = {0};
    if (index != first) workers_sync(); // the previous item has been merged
    meeting.give(o, softmax, peers, shared, group, warp, lane);
    workers_sync();
    meeting.merge(p, item, peers, shared, (i64)index * p.splits.value + rank, lane);
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
        barrier_init(&shared.ring.k_empty[i], WARPS);
        barrier_init(&shared.ring.empty[i], WARPS);
      }
#ifdef HAS_CLUSTER
      barrier_init(&shared.arrival, 1);
      if (p.combine == COMBINE_CLUSTER) barrier_expect(&shared.arrival, PEER_BYTES);
#endif
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
    if (p.combine == COMBINE_CLUSTER) cluster_wait();
#endif
  } else {
    compute_items(p, shared, dynamic, weights, peers, value_scales, first, stride, rank, warp / WARPS, warp % WARPS, lane);
  }
}
