// Selection where a row is a warp's.

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
