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

static_assert(!SCALED || (KEY_TILES == 4 && DIM_TILES == 4), "NVFP4: a warp takes 32 keys, and 32 dims of one 16-byte column");

// Independent chains of products per warp, at least four: a product waits long for the one it adds to.
constexpr int SCORE_CHAINS = 4 / KEY_TILES;

typedef float Scores[KEY_TILES][4];
typedef float Output[DIM_TILES][4];

// A lane's offsets into K, V and the weights. The swizzle permutes 16-byte chunks by exclusive or with the row, and every
// buffer is aligned to 1,024 bytes, so that the chunk of a later step is this address exclusive or a constant.
struct LaneOffsets {
  u32 k, v, read, write;
  u32 k_scale, k_scale_tile, k_scale_half; // NVFP4: this lane's key's scales, the next key tile's, and groups 4..7 of a key

  DEVICE_MEMBER LaneOffsets(const Params &p, int warp, int lane) {
    const int matrix = lane >> 3, r7 = lane & 7;
    constexpr bool BYTES = KV_FORMAT == KV_FP8 || KV_FORMAT == KV_NVFP4;
    // Which key tile and which chunk of 16 bytes the four matrices of one ldmatrix are: see score_tile.
    constexpr int TILES = BYTES ? KEY_TILES : KEY_TILES == 1 ? 1 : 2, SPAN = 4 / TILES;
    const int tile = BYTES ? matrix % TILES : matrix / SPAN, chunk = BYTES ? matrix / TILES : matrix % SPAN;
    const int key = warp * WARP_KEYS + tile * 8 + r7;
    k = chunk_offset(SCALED ? paired_row(key, p.k_paired) : key, chunk);
    v = SCALED                ? chunk_offset(paired_row(lane, p.v_paired), warp)
        : BYTES               ? chunk_offset(lane, warp * (DIM_TILES / 2))
                              : chunk_offset((matrix & 1) * 8 + r7, warp * DIM_TILES + (matrix >> 1));
    if constexpr (SCALED) {
      const bool tiled = p.scale_layout == SCALES_TILED;
      k_scale = tiled ? (lane >> 2) * 16 + warp * 4 : (warp * WARP_KEYS + (lane >> 2)) * 8;
      k_scale_tile = tiled ? 128 : 64, k_scale_half = tiled ? 512 : 4;
    }
    const int row = lane & 15;
    read = row * WEIGHT_PITCH + (((lane >> 4) ^ (row & 7)) << 4);
    write = (lane >> 2) * WEIGHT_PITCH + (((warp * KEY_TILES) ^ (lane >> 2)) << 4) + (lane & 3) * 4;
  }
};

// NVFP4: the scales of V for one warp's 32 dims (two groups of 16), widened to fp16 pairs of neighbouring keys, in the order in
// which its lanes take them: [group][lane & 3][16-key step][4 keys]. Rows of 80 bytes keep reads of 16 bytes free of conflicts.
constexpr int VALUE_SCALE_PITCH = 80;
constexpr int VALUE_SCALE_BYTES = SCALED ? 8 * VALUE_SCALE_PITCH : 0; // of one warp

// An fp16 pair, groups 2 warp and 2 warp + 1 of one key, to the table.
DEVICE void put_value_scales(u8 *at, u32 pair) {
  *(u16 *)at = (u16)pair;
  *(u16 *)(at + 4 * VALUE_SCALE_PITCH) = (u16)(pair >> 16);
}

DEVICE void widen_value_scales(const Params &p, const u8 *scales, u8 *table, int warp, int lane) {
  __syncwarp(); // all lanes have read the last tile's
  if (p.scale_layout == SCALES_PLANAR) {
    const uint2 x = *(const uint2 *)(scales + lane * 32 + warp * 8); // four keys of one group, and of the other
    u32 a, b, c, d;
    widen_scales(x.x, a, b), widen_scales(x.y, c, d);
    const int key = lane * 4 & 15; // 0, 4, 8 or 12 of its step
    u8 *at = table + (key & 7) / 2 * VALUE_SCALE_PITCH + (lane >> 2) * 8 + (key >> 3) * 4;
    *(u32 *)at = a, *(u32 *)(at + VALUE_SCALE_PITCH) = b;
    *(u32 *)(at + 4 * VALUE_SCALE_PITCH) = c, *(u32 *)(at + 5 * VALUE_SCALE_PITCH) = d;
  } else {
    u32 x[4]; // keys lane, lane + 32, ...: both groups in the lower half
    if (p.scale_layout == SCALES_TILED) {
      const uint4 y = *(const uint4 *)(scales + (warp >> 1) * 512 + lane * 16);
      const int shift = (warp & 1) * 16;
      x[0] = y.x >> shift, x[1] = y.y >> shift, x[2] = y.z >> shift, x[3] = y.w >> shift;
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++) x[i] = *(const u16 *)(scales + (lane + i * 32) * 8 + warp * 2);
    }
    u32 r[4];
    widen_scales(__byte_perm(x[0], x[1], 0x5410), r[0], r[1]);
    widen_scales(__byte_perm(x[2], x[3], 0x5410), r[2], r[3]);
    u8 *at = table + (lane & 7) / 2 * VALUE_SCALE_PITCH + (lane >> 4) * 8 + (lane >> 3 & 1) * 4 + (lane & 1) * 2;
#pragma unroll
    for (int i = 0; i < 4; i++) put_value_scales(at + i * 16, r[i]);
  }
  __syncwarp();
}

// s = q K^T for this warp's keys. `k` is this lane's address, `scales` that of the tile's key scales (NVFP4).
DEVICE void score_tile(u32 k, const u8 *scales, const LaneOffsets &offsets, const u32 (&q)[8][4], int lane, Scores &s) {
  float c[SCORE_CHAINS][KEY_TILES][4] = {};
  if constexpr (KV_FORMAT == KV_NVFP4) {
    // A lane's word of a 16-byte chunk holds eight dims, half of a scale group: lanes 0 and 1 of four have the chunk's first group.
    u32 bytes[KEY_TILES];
#pragma unroll
    for (int n = 0; n < KEY_TILES; n++) {
      const u8 *at = scales + offsets.k_scale + n * offsets.k_scale_tile;
      bytes[n] = __byte_perm(*(const u32 *)at, *(const u32 *)(at + offsets.k_scale_half), lane & 2 ? 0x7531 : 0x6420);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 pair[KEY_TILES]; // scales of two chunks
#pragma unroll
      for (int n = 0; n < KEY_TILES; n += 2)
        widen_scales(__byte_perm(bytes[n], bytes[n + 1], half ? 0x7632 : 0x5410), pair[n], pair[n + 1]);
#pragma unroll
      for (int chunk = 2 * half; chunk < 2 * half + 2; chunk++) {
        u32 r[4];
        load_matrices(k ^ (chunk << 4), r);
#pragma unroll
        for (int n = 0; n < KEY_TILES; n++) {
          u32 b[4];
          widen_fp4_keys(r[n], b);
#pragma unroll
          for (int i = 0; i < 4; i++) b[i] = chunk & 1 ? multiply_fp16_by<1>(b[i], pair[n]) : multiply_fp16_by<0>(b[i], pair[n]);
          multiply_add(c[0][n], q[2 * chunk], b[0], b[1]);
          multiply_add(c[0][n], q[2 * chunk + 1], b[2], b[3]);
        }
      }
    }
  } else if constexpr (KV_FORMAT == KV_FP8) {
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

// o += weights V for this warp's dims. `table`: the warp's value scales (NVFP4).
DEVICE void output_tile(u32 v, u32 weights, const u8 *table, int lane, Output &o) {
#pragma unroll
  for (int pair = 0; pair < TILE / 16; pair += 2) {
    u32 a[2][4];
#pragma unroll
    for (int i = 0; i < 2; i++) load_matrices(weights ^ ((pair + i) << 5), a[i]);
    if constexpr (KV_FORMAT == KV_NVFP4) {
      // A 16-bit column of the transposed matrices is four dims of one key, and eight columns are this warp's 32 dims: output tile
      // j takes dim j of each. The first four columns are the first scale group.
      const uint4 scales = *(const uint4 *)(table + ((lane >> 4) * 4 + (lane & 3)) * VALUE_SCALE_PITCH + pair * 8);
      const u32 scale[4] = {scales.x, scales.y, scales.z, scales.w};
      u32 r[4];
      load_matrices_transposed(v + pair * 16 * 64, r);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        u32 first[4], second[4];
        widen_fp4_values(r[2 * i], first);
        widen_fp4_values(r[2 * i + 1], second);
#pragma unroll
        for (int d = 0; d < 4; d++)
          multiply_add(o[d], a[i], multiply_fp16(first[d], scale[2 * i]), multiply_fp16(second[d], scale[2 * i + 1]));
      }
    } else if constexpr (KV_FORMAT == KV_FP8) {
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

// Output values lie in a lane as vectors of neighbouring dims: 4 where neighbouring dims are separate tiles, else 2.
constexpr int OUT_VECTOR = KV_FORMAT == KV_FP8 || KV_FORMAT == KV_NVFP4 ? 4 : 2;
constexpr int OUT_VECTORS = WARP_DIMS / (4 * OUT_VECTOR); // a lane's vectors per row
typedef float OutVector[OUT_VECTOR];

DEVICE int vector_dim(int warp, int lane, int i) {
  if constexpr (KV_FORMAT == KV_NVFP4) return warp * WARP_DIMS + (lane & 3) * 8 + i * 4;
  return warp * WARP_DIMS + i * 4 * OUT_VECTOR + (lane & 3) * OUT_VECTOR;
}

// Vector `i` of row (lane >> 2) + 8 * half.
DEVICE void output_vector(const Output &o, int i, int half, OutVector &x) {
#pragma unroll
  for (int e = 0; e < OUT_VECTOR; e++) {
    if constexpr (KV_FORMAT == KV_NVFP4) {
      x[e] = o[e][half * 2 + i];
    } else {
      const int tile = OUT_VECTOR == 4 ? 2 * i + (e & 1) : i, at = half * 2 + (OUT_VECTOR == 4 ? e >> 1 : e);
      x[e] = o[tile][at];
    }
  }
}
