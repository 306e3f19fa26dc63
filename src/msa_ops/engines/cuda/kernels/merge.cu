// Second kernel of the scratch route: one warp merges the partial results of one output row.
extern "C" __global__ void __launch_bounds__(128) msa_merge(const __grid_constant__ Params p, i64 rows) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int lane = threadIdx.x & 31;
  const i64 row = (i64)blockIdx.x * 4 + (threadIdx.x >> 5); // token, KV head, query head of the group
  if (row >= rows) return;
  const int in_group = row % p.group;
  const i64 item = row / p.group * p.row_tiles.value + in_group / ROWS;
  const i64 line0 = item * p.splits.value * ROWS + in_group % ROWS;
  const float2 *state = (const float2 *)p.partial_state;
  float maximum = NEG_INF;
  for (u32 c = lane; c < p.splits.value; c += 32) maximum = fmaxf(maximum, state[line0 + (i64)c * ROWS].x);
#pragma unroll
  for (int d = 16; d >= 1; d >>= 1) maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, d));
  const float from = maximum == NEG_INF ? 0.f : maximum;
  float sum = 0.f, x[4] = {};
#pragma unroll 4
  for (u32 c = 0; c < p.splits.value; c++) {
    const i64 line = line0 + (i64)c * ROWS;
    const float2 s = state[line];
    const float weight = exp2_approx(s.x - from) * s.y;
    if (weight == 0.f) continue; // nothing of it counts, not even an overflow of its dtype
    const float2 a = load_partial(p, line * HEAD_DIM + lane * 4), b = load_partial(p, line * HEAD_DIM + lane * 4 + 2);
    sum += weight;
    x[0] += a.x * weight, x[1] += a.y * weight, x[2] += b.x * weight, x[3] += b.y * weight;
  }
  const float scale = has_keys(sum) ? 1.f / sum : 0.f, factor = output_factor(p);
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = has_keys(sum) ? x[i] * scale * factor : 0.f;
  store_output(p, row, lane * 4, x[0], x[1]), store_output(p, row, lane * 4 + 2, x[2], x[3]);
  if (lane == 0) store_lse(p, row, maximum, sum);
}
