// The two products of a tile. A block's computing warps share a tile: each computes the scores of its own keys, and then, with
// the weights of all warps in shared memory, its own dims of the output. So a warp holds 128 / WARPS output dims, and nothing
// is merged between warps at the end.
constexpr int WARP_KEYS = TILE / WARPS;
constexpr int KEY_TILES = WARP_KEYS / 8;  // n8 tiles of scores a warp computes
constexpr int WARP_DIMS = HEAD_DIM / WARPS;
constexpr int DIM_TILES = WARP_DIMS / 8;  // n8 tiles of output a warp holds
constexpr int WEIGHT_PITCH = TILE * 2;    // bytes of a row of weights in shared memory
static_assert(KEY_TILES == 1 || KEY_TILES == 2 || KEY_TILES == 4, "a warp takes 8, 16 or 32 keys of a tile");
static_assert(DIM_TILES == 2 || DIM_TILES == 4, "a warp takes 16 or 32 dims");

// Independent chains of products per warp, at least four: a product waits long for the one it adds to.
constexpr int SCORE_CHAINS = 4 / KEY_TILES;

typedef float Scores[KEY_TILES][4];
typedef float Output[DIM_TILES][4];

// A lane's offsets into K, V and the weights. The swizzle permutes 16-byte chunks by exclusive or with the row, and every
// buffer is aligned to 1,024 bytes, so that the chunk of a later step is this address exclusive or a constant.
struct LaneOffsets {
  u32 k, v, read, write;

  DEVICE_MEMBER LaneOffsets(int warp, int lane) {
    const int matrix = lane >> 3, r7 = lane & 7;
    constexpr bool BYTES = KV_FORMAT == KV_FP8;
    // Which key tile and which chunk of 16 bytes the four matrices of one ldmatrix are: see score_tile.
    constexpr int TILES = BYTES ? KEY_TILES : KEY_TILES == 1 ? 1 : 2, SPAN = 4 / TILES;
    const int tile = BYTES ? matrix % TILES : matrix / SPAN, chunk = BYTES ? matrix / TILES : matrix % SPAN;
    k = chunk_offset(warp * WARP_KEYS + tile * 8 + r7, chunk);
    v = BYTES ? chunk_offset(lane, warp * (DIM_TILES / 2))
              : chunk_offset((matrix & 1) * 8 + r7, warp * DIM_TILES + (matrix >> 1));
    const int row = lane & 15;
    read = row * WEIGHT_PITCH + (((lane >> 4) ^ (row & 7)) << 4);
    write = (lane >> 2) * WEIGHT_PITCH + (((warp * KEY_TILES) ^ (lane >> 2)) << 4) + (lane & 3) * 4;
  }
};

// s = q K^T for this warp's keys.
DEVICE void score_tile(u32 k, const u32 (&q)[8][4], Scores &s) {
  float c[SCORE_CHAINS][KEY_TILES][4] = {};
  if constexpr (KV_FORMAT == KV_FP8) {
    constexpr int STEPS = 4 / KEY_TILES; // 16-dim steps (one chunk each) that one ldmatrix covers
#pragma unroll
    for (int step = 0; step < 8; step += STEPS) {
      u32 r[4];
      load_matrices(k ^ (step << 4), r);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int at = step + i / KEY_TILES;
        u32 b0, b1;
        widen_fp8(r[i], b0, b1);
        multiply_add(c[at % SCORE_CHAINS][i % KEY_TILES], q[at], b0, b1);
      }
    }
  } else {
    constexpr int TILES = KEY_TILES == 1 ? 1 : 2; // key tiles that one ldmatrix covers
    constexpr int SPAN = 4 / TILES;               // chunks of 8 dims that it covers
#pragma unroll
    for (int chunk = 0; chunk < 16; chunk += SPAN) {
#pragma unroll
      for (int pair = 0; pair < KEY_TILES; pair += TILES) {
        u32 r[4];
        load_matrices((k + pair * 8 * 128 + (chunk >> 3) * TILE * 128) ^ ((chunk & 7) << 4), r);
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          const int at = (chunk + i % SPAN) / 2;
          multiply_add(c[at % SCORE_CHAINS][pair + i / SPAN], q[at], r[i], r[i + 1]);
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      s[n][e] = c[0][n][e];
#pragma unroll
      for (int i = 1; i < SCORE_CHAINS; i++) s[n][e] += c[i][n][e];
    }
}

// o += weights V for this warp's dims.
DEVICE void output_tile(u32 v, u32 weights, Output &o) {
#pragma unroll
  for (int pair = 0; pair < TILE / 16; pair += 2) {
    u32 a[2][4];
#pragma unroll
    for (int i = 0; i < 2; i++) load_matrices(weights ^ ((pair + i) << 5), a[i]);
    if constexpr (KV_FORMAT == KV_FP8) {
      // A 16-bit column of the transposed matrices is a pair of dims of one key; the permute turns two keys' pairs into
      // two dims' pairs, which widen to the operands of an even-dims and an odd-dims tile.
#pragma unroll
      for (int d = 0; d < DIM_TILES / 2; d++) {
        u32 r[4];
        load_matrices_transposed((v ^ (d << 4)) + pair * 16 * 128, r);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          u32 even0, odd0, even1, odd1;
          widen_fp8(__byte_perm(r[2 * i], 0, 0x3120), even0, odd0);
          widen_fp8(__byte_perm(r[2 * i + 1], 0, 0x3120), even1, odd1);
          multiply_add(o[2 * d], a[i], even0, even1);
          multiply_add(o[2 * d + 1], a[i], odd0, odd1);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int d = 0; d < DIM_TILES; d += 2) {
          u32 r[4];
          load_matrices_transposed((v ^ (d << 4)) + (pair + i) * 16 * 128, r);
          multiply_add(o[d], a[i], r[0], r[1]);
          multiply_add(o[d + 1], a[i], r[2], r[3]);
        }
      }
    }
  }
}

// Output values lie in a lane as vectors of neighbouring dims: 4 where even and odd dims are separate tiles, else 2.
constexpr int OUT_VECTOR = KV_FORMAT == KV_FP8 ? 4 : 2;
constexpr int OUT_VECTORS = WARP_DIMS / (4 * OUT_VECTOR); // a lane's vectors per row
typedef float OutVector[OUT_VECTOR];

DEVICE int vector_dim(int warp, int lane, int i) { return warp * WARP_DIMS + i * 4 * OUT_VECTOR + (lane & 3) * OUT_VECTOR; }

// Vector `i` of row (lane >> 2) + 8 * half.
DEVICE void output_vector(const Output &o, int i, int half, OutVector &x) {
#pragma unroll
  for (int e = 0; e < OUT_VECTOR; e++) {
    const int tile = OUT_VECTOR == 4 ? 2 * i + (e & 1) : i, at = half * 2 + (OUT_VECTOR == 4 ? e >> 1 : e);
    x[e] = o[tile][at];
  }
}
