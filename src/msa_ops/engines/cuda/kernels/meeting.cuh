// The end of an item: what a block shares, how results of groups and of a cluster's blocks meet, and where they are stored.

#ifdef HAS_CLUSTER
constexpr bool CAN_CLUSTER = MIN_BLOCKS <= 2; // more blocks a multiprocessor leave no registers for it, and serve items alone
#else
constexpr bool CAN_CLUSTER = false;
#endif

struct GroupShared {
  Barrier largest_here; // counts warps that have left their largest scores of a tile
  float row_scale[ROWS];
  alignas(16) float by_warp[ROWS][WARPS]; // these
  float end_sum[WARPS][ROWS]; // at the end of an item: every warp's part of the sums, and the bases
  float end_base[ROWS];
};

// Rows of partial results that a block of a cluster receives: GROUPS * ROWS where all blocks own some rows, and half as many again in
// clusters of 3 and 6, which blocks of one a multiprocessor may have.
constexpr bool SIZES_BETWEEN = CAN_CLUSTER && MIN_BLOCKS == 1;
constexpr int PEER_ROWS = GROUPS * ROWS * (SIZES_BETWEEN ? 3 : 2) / 2;

// Where two blocks share a multiprocessor this is 1,024 bytes to the last one: no more fit beside their copy rings.
struct Shared {
  Ring ring;
  Barrier states_left;                // cluster: counts warps that have left their sums and bases
  Barrier states_here, outputs_here;  // cluster: count what its blocks have sent here
  Barrier weights_here;               // cluster: the copying warp has made weights of the states
  GroupShared group[GROUPS];
  alignas(16) float2 peer_state[PEER_ROWS]; // cluster, [part][own row]: base and sum
  float peer_weight[PEER_ROWS];             // the same order: of the part in its row, over the row's sum
};

// Bits of the number of a cluster's blocks that own rows: all of them, or the next smaller power of two.
DEVICE int owner_bits(int ranks) { return 31 - __clz(ranks); }

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

// The warp has done with what a barrier guards, or has made it.
DEVICE void release(Barrier *barrier, int lane) {
  __syncwarp();
  if (lane < WARP_ARRIVALS) barrier_arrive(barrier);
}

// Leaves what there is to say of a group's rows at the end of an item, but for the output. All its warps have to meet before it is
// read.
DEVICE void leave_states(const Softmax &softmax, GroupShared &mine, int warp, int lane) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = (lane >> 2) + 8 * r;
    const float sum = softmax.warp_sum(r);
    if ((lane & 3) == 0) mine.end_sum[warp][row] = sum;
    if ((lane & 3) == 1 && warp == 0) mine.end_base[row] = softmax.base[r];
  }
}

DEVICE float row_sum(const GroupShared &group, int row) {
  float sum = group.end_sum[0][row];
#pragma unroll
  for (int w = 1; w < WARPS; w++) sum += group.end_sum[w][row];
  return sum;
}

// Where partial results of an item meet. The first blocks of a cluster, a power of two, share the rows of an item: with OWN rows
// each, block `r` owns rows [r * OWN, (r + 1) * OWN), and receives them from all groups of all blocks. Without a cluster one block
// owns all of them.
// `peers` is [part][own row][dim], a part being a group of a block, with its 16-byte groups permuted by row against bank conflicts.
DEVICE int permuted(int slot, int dim) { return (((dim >> 2) ^ (slot & 7)) << 2) + (dim & 3); }

// How a lane gives its share of a group's output: to whom, and where. Made while the first tile is awaited, because all that comes
// after the last is on the way to the end.
struct Delivery {
  u32 place[2];  // of the first vector of the lane's two rows
  u32 barrier;
  u32 offset[2]; // cluster: from an address here to the same in the block that owns the row

  DEVICE_MEMBER Delivery(Shared &shared, float *peers, int ranks, int rank, int group, int warp, int lane) {
    const int own_bits = 4 - owner_bits(ranks), part = rank * GROUPS + group;
    barrier = shared_address(&shared.outputs_here);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = (lane >> 2) + 8 * r, slot = (part << own_bits) + (row & ((1 << own_bits) - 1));
      place[r] = shared_address(peers + slot * HEAD_DIM + permuted(slot, vector_dim(warp, lane, 0)));
      offset[r] = 0;
#ifdef HAS_CLUSTER
      if (ranks > 1) offset[r] = address_in_rank(barrier, row >> own_bits) - barrier;
#endif
    }
  }

  template <bool CLUSTER> DEVICE_MEMBER void give(const Output &o) const {
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int i = 0; i < OUT_VECTORS; i++) {
        OutVector x;
        output_vector(o, i, r, x);
        const u32 at = place[r] ^ (i * VECTOR_STEP * 4);
        if constexpr (OUT_VECTOR == 4)
          put<CLUSTER>(at, r, make_float4(x[0], x[1], x[2], x[3]));
        else
          put<CLUSTER>(at, r, make_float2(x[0], x[1]));
      }
  }

  template <bool CLUSTER, typename T> DEVICE_MEMBER void put(u32 at, int r, T x) const {
#ifdef HAS_CLUSTER
    if constexpr (CLUSTER) {
      send(at + offset[r], barrier + offset[r], x);
      return;
    }
#endif
    *(T *)__cvta_shared_to_generic(at) = x;
  }
};

// Adds up the rows that a block owns and stores them: the result, or the partial result of a share (scratch). Sizes are known to
// the compiler. A warp has one row at a time, and a lane DIMS dims of it. Few rows are spread over all warps.
template <int RANKS> struct Meeting {
  static constexpr int OWNERS = RANKS >= 16 ? 16 : RANKS >= 8 ? 8 : RANKS >= 4 ? 4 : RANKS >= 2 ? 2 : 1;
  static constexpr int OWN = ROWS / OWNERS, PARTS = RANKS * GROUPS; // PARTS: results that meet in a row
  static constexpr int DIMS = OWN * (HEAD_DIM / 4) < WORKERS ? 1 : 4, THREADS_A_ROW = HEAD_DIM / DIMS;
  static constexpr int ROUNDS = (OWN * THREADS_A_ROW - 1) / WORKERS + 1;
  float weight[ROUNDS][PARTS]; // of every part in a row, over the row's sum
  bool keys[ROUNDS];           // the row has some
  float factor;                // of the output
  i64 at[ROUNDS];              // where the row goes; below 0: there is none

  static DEVICE_MEMBER int place(int round) { return round * WORKERS + threadIdx.x; }
  static DEVICE_MEMBER int own_row(int round) { return place(round) / THREADS_A_ROW; }
  static DEVICE_MEMBER int dim(int round) { return place(round) % THREADS_A_ROW * DIMS; }

  DEVICE_MEMBER Meeting(const Params &p, const Item &item, i64 share, int rank) {
    const bool scratch = RANKS == 1 && p.combine == COMBINE_SCRATCH;
    factor = scratch ? 1.f : output_factor(p);
#pragma unroll
    for (int e = 0; e < ROUNDS; e++) {
      const int row = rank * OWN + own_row(e);
      const bool none = row >= item.rows || (OWN * THREADS_A_ROW % WORKERS && own_row(e) >= OWN); // for a whole warp
      at[e] = none ? -1 : scratch ? share * ROWS + row : output_row(p, item, row);
    }
  }

  // A cluster's, as the copying warp has made them.
  DEVICE_MEMBER void take_weights(const Shared &shared) {
#pragma unroll
    for (int e = 0; e < ROUNDS; e++) {
      if (at[e] < 0) continue;
      float all = 0.f;
#pragma unroll
      for (int c = 0; c < PARTS; c++) all += weight[e][c] = shared.peer_weight[c * OWN + own_row(e)];
      keys[e] = has_keys(all); // all of them are 0 where the sum is
    }
  }

  // Those of a block's groups, whose states are left.
  DEVICE_MEMBER void make_weights(const Params &p, const Shared &shared) {
#pragma unroll
    for (int e = 0; e < ROUNDS; e++) {
      if (at[e] < 0) continue;
      const int row = own_row(e);
      float base = NEG_INF, sum = 0.f;
#pragma unroll
      for (int g = 0; g < GROUPS; g++) base = fmaxf(base, shared.group[g].end_base[row]);
#pragma unroll
      for (int g = 0; g < GROUPS; g++) {
        weight[e][g] = exp2_approx(shared.group[g].end_base[row] - (base == NEG_INF ? 0.f : base));
        sum = fmaf(row_sum(shared.group[g], row), weight[e][g], sum);
      }
#pragma unroll
      for (int g = 0; g < GROUPS; g++) weight[e][g] *= normaliser(sum);
      keys[e] = has_keys(sum);
      if (dim(e)) continue;
      if (p.combine == COMBINE_SCRATCH)
        ((float2 *)p.partial_state)[at[e]] = make_float2(base, sum);
      else
        store_lse(p, at[e], base, sum);
    }
  }

  DEVICE_MEMBER void finish(const Params &p, const float *peers) const {
#pragma unroll
    for (int e = 0; e < ROUNDS; e++) {
      if (at[e] < 0) continue;
      float x[2][DIMS] = {}, y[PARTS][DIMS]; // two sums, or each addition would wait for the one before
#pragma unroll
      for (int c = 0; c < PARTS; c++) {
        const int slot = c * OWN + own_row(e);
        const float *from = peers + slot * HEAD_DIM + permuted(slot, dim(e));
        if constexpr (DIMS == 4)
          *(float4 *)y[c] = *(const float4 *)from;
        else
          y[c][0] = *from;
      }
#pragma unroll
      for (int c = 0; c < PARTS; c++)
#pragma unroll
        for (int i = 0; i < DIMS; i++) x[c & 1][i] = fmaf(y[c][i], weight[e][c], x[c & 1][i]);
      float z[DIMS];
#pragma unroll
      for (int i = 0; i < DIMS; i++) z[i] = keys[e] ? (x[0][i] + x[1][i]) * factor : 0.f;
      if (RANKS == 1 && p.combine == COMBINE_SCRATCH) {
        if constexpr (DIMS == 4) {
          store_partial(p, at[e] * HEAD_DIM + dim(e), z[0], z[1]);
          store_partial(p, at[e] * HEAD_DIM + dim(e) + 2, z[2], z[3]);
        }
      } else if constexpr (DIMS == 4) {
        store_output(p, at[e], dim(e), z[0], z[1]), store_output(p, at[e], dim(e) + 2, z[2], z[3]);
      } else {
        store_output(p, at[e], dim(e), z[0]);
      }
    }
  }
};

#ifdef HAS_CLUSTER
// The copying warp's part in the end of a cluster's only item: while the last outputs are taken, it makes weights of the states of
// all parts. A lane has one row of a group, and then one part of a row that this block owns, or two.
DEVICE void settle_states(const Params &p, const Item &item, Shared &shared, int rank, int lane) {
  const int ranks = p.splits.value, rank_bits = owner_bits(ranks), own_bits = 4 - rank_bits, own = 1 << own_bits;
  const int group = min(lane / ROWS, GROUPS - 1), row = lane % ROWS;
  const int slot = ((rank * GROUPS + group) << own_bits) + (row & (own - 1));
  const u32 barrier = shared_address(&shared.states_here), offset = address_in_rank(barrier, row >> own_bits) - barrier;
  const u32 to = shared_address(&shared.peer_state[slot]) + offset;
  constexpr int GROUP_BITS = GROUPS - 1; // one or two groups
  const bool between = SIZES_BETWEEN && ranks != 1 << rank_bits; // there are places for more parts than there are
  const int part_bits = rank_bits + GROUP_BITS + between, places = own << part_bits;
  cluster_wait(); // all blocks of the cluster have started: their shared memory may be written
  barrier_wait(&shared.states_left, 0);
  if (lane < GROUPS * ROWS) {
    const GroupShared &from = shared.group[group];
    send(to, barrier + offset, make_float2(from.end_base[row], row_sum(from, row)));
  }
  if (rank >> rank_bits) return; // owns no rows
  barrier_wait_for_peers(&shared.states_here, 0);
#pragma unroll 1
  for (int place = lane; place < max(places, 32); place += 32) {
    const int part = place & ((1 << part_bits) - 1), mine = (place >> part_bits) & (own - 1);
    const int at = (part << own_bits) + mine, owned = rank * own + mine;
    const bool none = part >= ranks * GROUPS;
    const float2 state = none ? make_float2(NEG_INF, 0.f) : shared.peer_state[at];
    float base = state.x;
#pragma unroll
    for (int d = 16; d >= 1; d >>= 1) {
      const float other = __shfl_xor_sync(~0u, base, d);
      if (d < 1 << part_bits) base = fmaxf(base, other);
    }
    float weight = exp2_approx(state.x - (base == NEG_INF ? 0.f : base)), sum = state.y * weight;
#pragma unroll
    for (int d = 16; d >= 1; d >>= 1) {
      const float other = __shfl_xor_sync(~0u, sum, d);
      if (d < 1 << part_bits) sum += other;
    }
    if (place < places && !none) shared.peer_weight[at] = weight * normaliser(sum);
    if (place + 32 >= places) release(&shared.weights_here, lane);
    if (part == 0 && place < places && owned < item.rows) store_lse(p, output_row(p, item, owned), base, sum);
  }
}

// The computing warps' part, after their outputs have been given.
template <int RANKS> DEVICE void meet_in_cluster(const Params &p, const Item &item, const float *peers, Shared &shared, int rank) {
  if (rank >= Meeting<RANKS>::OWNERS) return;
  Meeting<RANKS> meeting(p, item, 0, rank);
  barrier_wait(&shared.weights_here, 0);
  meeting.take_weights(shared);
  barrier_wait_for_peers(&shared.outputs_here, 0);
  meeting.finish(p, peers);
}
#endif

// One group had all of a share: its result goes from registers to memory, or as the partial result of `share` (scratch).
DEVICE void finish_alone(const Params &p, const Item &item, const Output &o, const Softmax &softmax, GroupShared &mine, i64 share,
                         int warp, int lane) {
  leave_states(softmax, mine, warp, lane);
  group_sync(0);
  const bool scratch = p.combine == COMBINE_SCRATCH;
  const float factor = scratch ? 1.f : output_factor(p);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = (lane >> 2) + 8 * r;
    if (row >= item.rows) continue;
    const float sum = row_sum(mine, row), scale = normaliser(sum);
    const i64 at = scratch ? share * ROWS + row : output_row(p, item, row);
#pragma unroll
    for (int i = 0; i < OUT_VECTORS; i++) {
      OutVector x;
      output_vector(o, i, r, x);
#pragma unroll
      for (int e = 0; e < OUT_VECTOR; e++) x[e] = has_keys(sum) ? x[e] * scale * factor : 0.f;
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
        ((float2 *)p.partial_state)[at] = make_float2(softmax.base[r], sum);
      else
        store_lse(p, at, softmax.base[r], sum);
    }
  }
}
