// Selection where a row is a warp's, and what a warp does to narrow a row.
// NUMBER holds a block's number. ROOM: blocks that may be listed.
template <int KEYS, typename NUMBER = unsigned char, int ROOM_ = KEYS * 32> struct WarpShared {
  static constexpr int ROOM = ROOM_;
  alignas(16) float largest[GROUPS];
  alignas(16) float score[ROOM]; // of the blocks that reach the floor, ascending
  NUMBER block[ROOM];
};

template <int KEYS> struct WarpRow {
  float score[KEYS]; // -inf or NaN: not to be chosen
  int block[KEYS];   // ascending from lane to lane, then from place to place; a lane is a group

  // Lists the blocks that reach the floor, as far as there is room; their number. `wanted` is 1 to GROUPS.
  template <typename S> __device__ __forceinline__ u32 list_best(S &s, u32 wanted, int lane) const {
    float largest = score[0];
#pragma unroll
    for (int j = 1; j < KEYS; j++) largest = fmaxf(largest, score[j]); // passes over NaN
    largest = fmaxf(largest, __uint_as_float(MINUS_INFINITY_BITS));
    s.largest[lane] = largest;
    __syncwarp();
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
    __syncwarp();
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
    if (wanted - 1 >= GROUPS) return n;
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
    const float mine = s.score[lane], larger = count_larger((const float(&)[GROUPS])s.score, mine);
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

  // The row's result.
  template <typename S>
  __device__ __forceinline__ void write_narrowed(const TopkParams &p, const Row &row, const Forced &forced, S &s, int lane) {
    const u32 n = narrow(s, forced.wanted, lane);
    int *output = row.output + forced.begin;
    const int found = n <= 32 ? write_listed(s, forced.wanted, output, lane) : write_searched(forced.wanted, output, lane);
    forced.write_rest(row.output, p.topk, found, lane, 32);
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

template <int KEYS> DEVICE void select_by_warp(const TopkParams &p, const Row &row, WarpRow<KEYS> &keys, WarpShared<KEYS> &s) {
  const int lane = threadIdx.x & 31;
  const Forced forced(p, extent_of(p, row)); // read while the scores are under way
#pragma unroll
  for (int j = 0; j < KEYS; j++) {
    keys.block[j] = j * 32 + lane;
    if (!forced.open(keys.block[j])) keys.score[j] = __uint_as_float(MINUS_INFINITY_BITS);
  }
  keys.write_narrowed(p, row, forced, s, lane);
}

constexpr int ROWS = 4; // a thread block's

template <int KEYS> DEVICE void select_by_warps(const TopkParams &p, WarpShared<KEYS> (&shared)[ROWS]) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u32 index = blockIdx.x * (blockDim.x >> 5) + warp;
  const Row row(p, min(index, (u32)p.rows - 1));
  const float *at = row.score + lane * p.score_block;
  prefetch_scores(p, row, lane);
  prefetch_extent(p, row);
  let_next_kernel_start();
  wait_for_previous_kernel();
  if (index >= (u32)p.rows) return;
  WarpRow<KEYS> keys;
#pragma unroll
  for (int j = 0; j < KEYS; j++, at += 32 * p.score_block) keys.score[j] = j * 32 + lane < p.blocks ? *at : 0.f;
  select_by_warp(p, row, keys, shared[warp]);
}

extern "C" __global__ void __launch_bounds__(32 * ROWS) msa_topk_64(const __grid_constant__ TopkParams p) {
  __shared__ WarpShared<2> shared[ROWS];
  select_by_warps(p, shared);
}
extern "C" __global__ void __launch_bounds__(32 * ROWS) msa_topk_256(const __grid_constant__ TopkParams p) {
  __shared__ WarpShared<8> shared[ROWS];
  select_by_warps(p, shared);
}

// Rows of neighbouring tokens where tokens lie innermost: a thread block has a sector of them and reads each once.
constexpr int TOKENS = SECTOR;

template <int KEYS> struct TokensShared {
  WarpShared<KEYS> of_warp[TOKENS];
  float score[TOKENS][KEYS * 32 + 32 / TOKENS]; // a warp's writes fall in different banks
};

template <int KEYS> DEVICE void select_by_tokens(const TopkParams &p, TokensShared<KEYS> &s) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int token = threadIdx.x % TOKENS, first = threadIdx.x / TOKENS; // of what this thread reads
  const u32 index = blockIdx.x * TOKENS + warp;
  const Row row(p, min(index, (u32)p.rows - 1)), read(p, min(blockIdx.x * TOKENS + token, (u32)p.rows - 1));
  const float *at = read.score + first * p.score_block;
  if (token * 32 + first < p.blocks) prefetch_line(at + token * 32 * p.score_block); // its neighbours the other sectors
  prefetch_extent(p, row);
  let_next_kernel_start();
  wait_for_previous_kernel();
  WarpRow<KEYS> keys;
#pragma unroll
  for (int j = 0; j < KEYS; j++, at += 32 * p.score_block) keys.score[j] = j * 32 + first < p.blocks ? *at : 0.f;
#pragma unroll
  for (int j = 0; j < KEYS; j++) s.score[token][j * 32 + first] = keys.score[j];
  __syncthreads();
  if (index >= (u32)p.rows) return;
#pragma unroll
  for (int j = 0; j < KEYS; j++) keys.score[j] = s.score[warp][j * 32 + lane];
  select_by_warp(p, row, keys, s.of_warp[warp]);
}

extern "C" __global__ void __launch_bounds__(32 * TOKENS) msa_topk_tokens_64(const __grid_constant__ TopkParams p) {
  __shared__ TokensShared<2> shared;
  select_by_tokens(p, shared);
}
extern "C" __global__ void __launch_bounds__(32 * TOKENS) msa_topk_tokens_256(const __grid_constant__ TopkParams p) {
  __shared__ TokensShared<8> shared;
  select_by_tokens(p, shared);
}
