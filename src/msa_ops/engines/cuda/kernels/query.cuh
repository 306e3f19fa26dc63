// The query rows of an item, from any q dtype to the operand type of the products, in shared memory for ldmatrix.

constexpr int QUERY_PITCH = HEAD_DIM * 2;
constexpr float LOG2_E = 1.44269504088896f;
constexpr int QUERY_BYTES = ROWS * QUERY_PITCH;

// From stored rows to operands, 8 dims of one row at a time: loaded by one call, converted and stored by the next.
struct QueryRows {
  static constexpr int PARTS = ROWS * 16 / GROUP_THREADS;
  uint4 raw[PARTS];

  DEVICE_MEMBER void load(const Params &p, const Item &item, int thread) {
    const u8 *q = p.q + item.token * p.q_token + ((i64)item.head * p.group + item.row0) * p.q_head;
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
      const int row = (thread + i * GROUP_THREADS) >> 4, c = thread & 15;
      raw[i] = make_uint4(0, 0, 0, 0);
      if (row >= item.rows) continue;
      if (p.query_type == QUERY_FP8) {
        const uint2 x = *(const uint2 *)(q + row * p.q_head + c * 8);
        raw[i].x = x.x, raw[i].y = x.y;
      } else {
        raw[i] = *(const uint4 *)(q + row * p.q_head + c * 16);
      }
    }
  }

  // `scale` is the softmax scale. Its sign goes into the operand; `row_scale` gets what a widened score is multiplied with to be in
  // units of log2, and is above 0: a scale of 0 becomes a query of 0. The scale meets the other factors multiplied together, so
  // that no product on the way is past float32 where theirs is not.
  DEVICE_MEMBER void store(const Params &p, u8 *operand, float *row_scale, float scale, int thread) const {
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
      const int row = (thread + i * GROUP_THREADS) >> 4, c = thread & 15;
      u32 w[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
      float undo = widen_query(w, p.query_type);
      if (PRODUCT_BF16 && fabsf(scale) > 1e37f) { // a power of two of it goes into the query
        undo *= 1.f / 256;
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float2 x = unpack_bf16(w[j]);
          w[j] = pack_bf16(x.x * 256.f, x.y * 256.f);
        }
      }
#pragma unroll
      for (int j = 0; j < 4; j++) w[j] = scale == 0.f ? 0u : scale < 0.f ? w[j] ^ 0x80008000u : w[j];
      const float factor = fabsf(scale) * (undo * (KV_FACTOR * LOG2_E));
      // Finite, so that zero keys keep a score of 0; a scale of NaN stays.
      if (c == 0) row_scale[row] = scale == 0.f ? 1.f : factor < 1e-44f ? 1e-44f : factor > 3.4e38f ? 3.4e38f : factor;
      put(operand, row, c, w);
    }
  }

  // Pairs of dims 8c .. 8c+7 of one row. The order of dims inside a 16-dim step of the product is free as long as q and K
  // agree; it is chosen so that one 32-bit word of stored K widens to a lane's two operand registers.
  static DEVICE_MEMBER void put(u8 *operand, int row, int c, const u32 (&w)[4]) {
    u8 *line = operand + row * QUERY_PITCH;
    if constexpr (KV_FORMAT == KV_FP8) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int pair = (c & 1) * 4 + j, chunk = (c & ~1) + (pair & 1);
        *(u32 *)(line + ((chunk ^ (row & 7)) << 4) + (pair >> 1) * 4) = w[j];
      }
    } else if constexpr (KV_FORMAT == KV_NVFP4) {
      // A word of K holds the eight dims of this c: two steps' operands of one lane.
      u32 r[4];
      pair_fp4_query(w, r);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int step = (c >> 2) * 2 + (i >> 1), chunk = step * 2 + (i & 1);
        *(u32 *)(line + ((chunk ^ (row & 7)) << 4) + (c & 3) * 4) = r[i];
      }
    } else {
      *(uint4 *)(line + ((c ^ (row & 7)) << 4)) = make_uint4(w[0], w[1], w[2], w[3]);
    }
  }
};

// The A operands of all products of an item: 16 rows x 128 dims, 8 steps.
DEVICE void load_query_fragments(u32 shared, int lane, u32 (&a)[8][4]) {
  const int row = lane & 15;
#pragma unroll
  for (int step = 0; step < 8; step++)
    load_matrices(shared + row * QUERY_PITCH + (((2 * step + (lane >> 4)) ^ (row & 7)) << 4), a[step]);
}
