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
  alignas(8) float peer_state[GROUPS * ROWS][2]; // [rank][group][own row], maximum and sum
};

static_assert(GROUPS < STAGES, "a group holds a tile while it waits for its next");
constexpr int RING_BYTES = STAGES * STAGE_BYTES;
constexpr int WEIGHT_BYTES = ROWS * WEIGHT_PITCH; // two of them: one is written while the other is still read

struct RowTotals {
  float maximum[2], sum[2];
};

DEVICE i64 output_row(const Params &p, const Item &item, int row) {
  return ((i64)item.token * p.kv_heads.value + item.head) * p.group + item.row0 + row;
}

DEVICE void store_output(const Params &p, i64 row, int dim, float a, float b) {
  *(u32 *)((u16 *)p.out + row * HEAD_DIM + dim) = p.query_type == QUERY_FP16 ? pack_fp16(a, b) : pack_bf16(a, b);
}

DEVICE float output_factor(const Params &p) { return p.output_scale * KV_FACTOR * (p.v_global ? *p.v_global : 1.f); }

DEVICE void store_lse(const Params &p, i64 row, float maximum, float sum) {
  if (p.lse) p.lse[row] = sum > 0.f ? (maximum + log2_approx(sum)) * 0.693147180559945f : NEG_INF;
}

// The sums of a row over a group's warps; every thread gets its two rows'.
DEVICE RowTotals total_rows(const Softmax &softmax, float (*sums)[ROWS], int group, int warp, int lane) {
  RowTotals t;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float s = softmax.sum[r];
    s += __shfl_xor_sync(~0u, s, 1);
    s += __shfl_xor_sync(~0u, s, 2);
    if ((lane & 3) == 0) sums[warp][(lane >> 2) + 8 * r] = s;
  }
  group_sync(group);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    t.maximum[r] = softmax.maximum[r];
    t.sum[r] = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) t.sum[r] += sums[w][(lane >> 2) + 8 * r];
  }
  return t;
}

// Where partial results of an item meet. A cluster of `ranks` blocks (1: no cluster) shares the rows of an item: block `r` owns
// rows [r * own, (r + 1) * own), and receives them from all groups of all ranks. `peers` is [rank][group][own row][dim], its
// 16-byte groups permuted by row against bank conflicts.
struct Meeting {
  int ranks, rank, own_log2;

  DEVICE_MEMBER Meeting(const Params &p, int rank_) {
    ranks = p.combine == COMBINE_CLUSTER ? p.splits.value : 1; // a power of two up to ROWS
    rank = p.combine == COMBINE_CLUSTER ? rank_ : 0;
    own_log2 = 4 - (__ffs(ranks) - 1);
  }
  DEVICE_MEMBER int own() const { return 1 << own_log2; }
  DEVICE_MEMBER int owner(int row) const { return row >> own_log2; }
  DEVICE_MEMBER int slot(int from, int own_row) const { return (from << own_log2) + own_row; }
  static DEVICE_MEMBER int permuted(int slot, int dim) { return (((dim >> 2) ^ (slot & 7)) << 2) + (dim & 3); }

  // This group's output and totals to the rows' owners.
  DEVICE_MEMBER void give(const Output &o, const Softmax &softmax, float *peers, Shared &shared, int group, int warp,
                          int lane) const {
    const int from = rank * GROUPS + group;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = (lane >> 2) + 8 * r, at = slot(from, row & (own() - 1));
#pragma unroll
      for (int i = 0; i < OUT_VECTORS; i++) {
        OutVector x;
        output_vector(o, i, r, x);
        float *to = peers + at * HEAD_DIM + permuted(at, vector_dim(warp, lane, i));
        if constexpr (OUT_VECTOR == 4)
          put(to, make_float4(x[0], x[1], x[2], x[3]), owner(row), shared);
        else
          put(to, make_float2(x[0], x[1]), owner(row), shared);
      }
    }
    const RowTotals t = total_rows(softmax, shared.group[group].by_warp, group, warp, lane);
    if (warp == 0 && (lane & 3) == 0) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int row = (lane >> 2) + 8 * r;
        put((float *)shared.peer_state[slot(from, row & (own() - 1))], make_float2(t.maximum[r], t.sum[r]), owner(row), shared);
      }
    }
  }

  template <typename T> DEVICE_MEMBER void put(float *to, T x, int to_rank, Shared &shared) const {
#ifdef HAS_CLUSTER
    if (ranks > 1) {
      send(address_in_rank(shared_address(to), to_rank), address_in_rank(shared_address(&shared.arrival), to_rank), x);
      return;
    }
#endif
    *(T *)to = x;
  }

  // Merges the rows that this block owns and stores them: the result, or the partial result of `share` (scratch).
  DEVICE_MEMBER void merge(const Params &p, const Item &item, const float *peers, const float (*state)[2], i64 share) const {
    for (int e = threadIdx.x; e < own() * (HEAD_DIM / 4); e += WORKERS) {
      const int mine = e / (HEAD_DIM / 4), dim = e % (HEAD_DIM / 4) * 4, row = rank * own() + mine;
      if (row >= item.rows) continue;
      const int parts = ranks * GROUPS;
      float maximum = NEG_INF, sum = 0.f, x[4] = {};
#pragma unroll 2
      for (int c = 0; c < parts; c++) maximum = fmaxf(maximum, state[slot(c, mine)][0]);
      const float from = maximum == NEG_INF ? 0.f : maximum;
#pragma unroll 2
      for (int c = 0; c < parts; c++) {
        const int at = slot(c, mine);
        const float2 s = *(const float2 *)state[at];
        const float4 y = *(const float4 *)(peers + at * HEAD_DIM + permuted(at, dim));
        const float weight = exp2_approx(s.x - from);
        sum = fmaf(s.y, weight, sum);
        x[0] = fmaf(y.x, weight, x[0]), x[1] = fmaf(y.y, weight, x[1]);
        x[2] = fmaf(y.z, weight, x[2]), x[3] = fmaf(y.w, weight, x[3]);
      }
      const float scale = sum > 0.f ? __fdividef(p.combine == COMBINE_SCRATCH ? 1.f : output_factor(p), sum) : 0.f;
#pragma unroll
      for (int i = 0; i < 4; i++) x[i] = sum > 0.f ? x[i] * scale : 0.f;
      if (p.combine == COMBINE_SCRATCH) {
        const i64 line = share * ROWS + row;
        store_partial(p, line * HEAD_DIM + dim, x[0], x[1]);
        store_partial(p, line * HEAD_DIM + dim + 2, x[2], x[3]);
        if (dim == 0) ((float2 *)p.partial_state)[line] = make_float2(maximum, sum);
      } else {
        const i64 at = output_row(p, item, row);
        store_output(p, at, dim, x[0], x[1]), store_output(p, at, dim + 2, x[2], x[3]);
        if (dim == 0) store_lse(p, at, maximum, sum);
      }
    }
  }
};

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
    const float scale = t.sum[r] > 0.f ? __fdividef(factor, t.sum[r]) : 0.f;
    const i64 at = scratch ? share * ROWS + row : output_row(p, item, row);
#pragma unroll
    for (int i = 0; i < OUT_VECTORS; i++) {
      OutVector x;
      output_vector(o, i, r, x);
#pragma unroll
      for (int e = 0; e < OUT_VECTOR; e++) x[e] = t.sum[r] > 0.f ? x[e] * scale : 0.f;
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
        ((float2 *)p.partial_state)[at] = make_float2(t.maximum[r], t.sum[r]);
      else
        store_lse(p, at, t.maximum[r], t.sum[r]);
    }
  }
}

// From the raw scores of a tile to its weights in shared memory, ready for all warps of the group. `fresh`: its first tile of the item.
DEVICE void weigh_tile(Scores &s, const TileInfo &info, Ring &ring, const RingPosition<STAGES> &at, u8 *v, u32 weights,
                       float (*by_warp)[ROWS], bool fresh, Softmax &softmax, Output &o, int group, int warp, int lane) {
  float largest[2], added[2];
  softmax.mask(s, info, warp, lane, largest);
  if ((lane & 3) == 0) by_warp[warp][lane >> 2] = largest[0], by_warp[warp][(lane >> 2) + 8] = largest[1];
  if (!fresh) softmax.write_weights(s, weights, added);
#ifdef HAS_CLUSTER
  if (info.lo > 0 || info.hi < TILE) {
    barrier_wait(&ring.v_full[at.slot], at.parity);
    clear_unused_rows(v, info, warp * 32 + lane);
  }
#endif
  if (group_sync_or(group, fresh || softmax.outgrown(largest))) { // rare after the first tile: weights from a new maximum
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
  const int splits = p.splits.value;
  const u64 policy = l2_evict_first();
  auto copy = [&](const TileSource &tile, int head) {
    // One lane waits for all: a lane that lagged by two rounds would see the parity it waits for pass by.
    if (lane == 0) barrier_wait(&shared.ring.empty[at.slot], at.parity ^ 1);
    __syncwarp();
    copy_tile(p, tile, head, stages + at.slot * STAGE_BYTES, shared.ring, at.slot, policy, lane);
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
        copy({__shfl_sync(~0u, block, i / PER_BLOCK), skip,
              {__shfl_sync(~0u, lo, i / PER_BLOCK) - skip, __shfl_sync(~0u, hi, i / PER_BLOCK) - skip, last}},
             item.head);
      }
    }
    for (; marked < GROUPS; marked++) copy({0, 0, {0, 0, true}}, item.head);
  }
}

DEVICE TileInfo next_tile(Ring &ring, const RingPosition<STAGES> &at) {
  barrier_wait(&ring.k_full[at.slot], at.parity);
  return ring.info[at.slot];
}

DEVICE void release_tile(Ring &ring, const RingPosition<STAGES> &at, int lane) {
  __syncwarp();
  if (lane == 0) barrier_arrive(&ring.empty[at.slot]);
}

// A computing group's part.
DEVICE void compute_items(const Params &p, Shared &shared, u8 *stages, u8 *weights, float *peers, u32 first, u32 stride,
                          int rank, int group, int warp, int lane) {
  RingPosition<STAGES> at;
  at.advance(group);
  weights += group * 2 * WEIGHT_BYTES;
  GroupShared &mine = shared.group[group];
  const LaneOffsets offsets(warp, lane);
  const Meeting meeting(p, rank);
  u32 turn = 0;
  for (u32 index = first; index < p.items; index += stride) {
    const Item item(p, index);
    if (index == first) {
#ifdef HAS_CLUSTER
      if (p.combine == COMBINE_CLUSTER) cluster_arrive_relaxed(); // waited for before anything is sent
#endif
      wait_for_previous_kernel();
    }
    QueryRows rows;
    rows.load(p, item, warp * 32 + lane);
    const float scale = p.scale_log2 * KV_FACTOR * (p.k_global ? *p.k_global : 1.f);
    // The operand takes the place of the weights that the first tile does not write.
    u8 *const operand = weights + (WEIGHT_BYTES >= QUERY_BYTES ? (turn ^ 1) * WEIGHT_BYTES : 0);
    rows.store(p, operand, mine.row_scale, scale, warp * 32 + lane);
    group_sync(group);
    u32 q[8][4];
    load_query_fragments(shared_address(operand), lane, q);
    if (WEIGHT_BYTES < QUERY_BYTES) group_sync(group);
    Softmax softmax;
    softmax.reset(mine.row_scale, lane);
    Output o = {};
    bool last = false;
    // The scores of the next tile are taken before the output of this one: two independent chains of products at a time.
    Scores s;
    TileInfo info = next_tile(shared.ring, at);
    if (info.lo < info.hi) score_tile(shared_address(stages) + at.slot * STAGE_BYTES + offsets.k, q, s);
    for (bool fresh = true; info.lo < info.hi; fresh = false) {
      u8 *const v = stages + at.slot * STAGE_BYTES + SIDE_BYTES;
      const u32 now = shared_address(weights) + turn * WEIGHT_BYTES;
      weigh_tile(s, info, shared.ring, at, v, now + offsets.write, mine.by_warp, fresh, softmax, o, group, warp, lane);
      RingPosition<STAGES> next = at;
      next.advance(GROUPS);
      last = info.last;
      info = {0, 0, 1};
      if (!last) {
        info = next_tile(shared.ring, next);
        if (info.lo < info.hi) score_tile(shared_address(stages) + next.slot * STAGE_BYTES + offsets.k, q, s);
      }
      barrier_wait(&shared.ring.v_full[at.slot], at.parity);
      output_tile(shared_address(v) + offsets.v, now + offsets.read, o);
      turn ^= 1;
      release_tile(shared.ring, at, lane);
      at = next;
    }
    if (!last) { // a mark without data
      release_tile(shared.ring, at, lane);
      at.advance(GROUPS);
    }
#ifdef HAS_CLUSTER
    if (meeting.ranks > 1) {
      cluster_wait(); // all blocks of the cluster have started: their shared memory may be written
      meeting.give(o, softmax, peers, shared, group, warp, lane);
      barrier_wait_for_peers(&shared.arrival, 0);
      meeting.merge(p, item, peers, shared.peer_state, 0);
      return;
    }
#endif
    if constexpr (GROUPS == 1) {
      finish_alone(p, item, o, softmax, mine, (i64)index * p.splits.value + rank, warp, lane);
      continue;
    }
    if (index != first) workers_sync(); // the previous item has been merged
    meeting.give(o, softmax, peers, shared, group, warp, lane);
    workers_sync();
    meeting.merge(p, item, peers, shared.peer_state, (i64)index * p.splits.value + rank);
  }
}

// Brings the tables' lines of this block's first item into L2 while the previous kernel may still be running. What it writes
// meanwhile is seen all the same: these are hints, the reads come after the wait.
DEVICE void prefetch_tables(const Params &p, u32 first, int lane) {
#ifdef HAS_CLUSTER
  const Item item(p, first);
  auto prefetch = [](const void *at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); };
  if (lane == 0) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&p.k_map) : "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&p.v_map) : "memory");
    prefetch(p.lengths + item.request * p.lengths_step);
    if (p.q_offset) prefetch(p.q_offset + item.request * p.q_offset_step);
  }
  if (lane * 32 < p.topk) prefetch(p.ids + item.head * p.ids_head + item.token * p.ids_token + lane * 32);
  if (p.paged && lane * 32 < p.table_width) prefetch(p.table + item.request * p.table_row + lane * 32);
  if (lane < item.rows)
    prefetch(p.q + item.token * p.q_token + ((i64)item.head * p.group + item.row0 + lane) * p.q_head);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) msa_decode(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) u8 dynamic[];
  __shared__ Shared shared;
  u8 *const weights = dynamic + RING_BYTES;
  float *const peers = (float *)(weights + GROUPS * 2 * WEIGHT_BYTES); // where partial results meet, if any do
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u32 first = p.splits.quotient(blockIdx.x), stride = p.splits.quotient(gridDim.x); // in items
  const int rank = blockIdx.x - first * p.splits.value;
  if (warp == GROUPS * WARPS) {
    if (lane == 0) {
      for (int i = 0; i < STAGES; i++) {
        barrier_init(&shared.ring.k_full[i], FULL_ARRIVALS);
        barrier_init(&shared.ring.v_full[i], FULL_ARRIVALS);
        barrier_init(&shared.ring.empty[i], WARPS);
      }
#ifdef HAS_CLUSTER
      barrier_init(&shared.arrival, 1);
      if (p.combine == COMBINE_CLUSTER) barrier_expect(&shared.arrival, GROUPS * ROWS * (HEAD_DIM + 2) * 4);
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
    compute_items(p, shared, dynamic, weights, peers, first, stride, rank, warp / WARPS, warp % WARPS, lane);
  }
}
