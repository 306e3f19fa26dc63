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

// Where four blocks share a multiprocessor the query operand is read from shared memory in every tile: its 32 registers are
// not to be had.
constexpr bool QUERY_STAYS = SCALED && MIN_BLOCKS >= 4;
static_assert(!QUERY_STAYS || WEIGHT_PITCH == HEAD_DIM * 2, "the query operand is read as weights are");
static_assert(!SCALED || (KEY_TILES == 4 && DIM_TILES == 4), "NVFP4: a warp takes 32 keys, and 32 dims of one 16-byte column");

// Independent chains of products per warp, at least four: a product waits long for the one it adds to.
constexpr int SCORE_CHAINS = 4 / KEY_TILES;

typedef float Scores[KEY_TILES][4];
typedef float Output[DIM_TILES][4];

// NVFP4: which key of its 16-key step takes which place in the product with V. The four places of a lane, two neighbouring ones
// of either half of the step, are four neighbouring keys, whose scales are one word of the planar layout. Of the two bits of
// such a quad's number the upper and the lower are exchanged: two score tiles' weights of a lane are then neighbours too.
DEVICE int swap_two_bits(int x) { return (x & 1) << 1 | (x >> 1 & 1); }
DEVICE int value_key(int place) { return (place & ~15) + swap_two_bits(place >> 1 & 3) * 4 + (place >> 3 & 1) * 2 + (place & 1); }

// A lane's addresses in the first stage and in the first buffer of weights. The swizzle permutes 16-byte chunks by exclusive or
// with the row, and every buffer is aligned to 1,024 bytes, so that the chunk of a later step is this address exclusive or a
// constant.
struct LaneAddresses {
  u32 k, v, read, write;
  u32 query;            // of the query operand that stays, behind the weights, read as a row of them is
  u32 k_scale, v_scale; // NVFP4: of this lane's key of the first key tile, and of its first four keys (where they are planar)
  u32 k_select;         // NVFP4: even or odd groups of a key's eight

  DEVICE_MEMBER LaneAddresses(const Params &p, u32 stages, u32 weights, int warp, int lane) {
    const int matrix = lane >> 3, r7 = lane & 7;
    constexpr bool BYTES = KV_FORMAT == KV_FP8 || KV_FORMAT == KV_NVFP4;
    // Which key tile and which chunk of 16 bytes the four matrices of one ldmatrix are: see score_tile.
    constexpr int TILES = BYTES ? KEY_TILES : KEY_TILES == 1 ? 1 : 2, SPAN = 4 / TILES;
    const int tile = BYTES ? matrix % TILES : matrix / SPAN, chunk = BYTES ? matrix / TILES : matrix % SPAN;
    const int key = warp * WARP_KEYS + tile * 8 + r7;
    k = stages + chunk_offset(SCALED ? paired_row(key, p.k_paired) : key, chunk);
    v = stages + SIDE_BYTES +
        (SCALED  ? chunk_offset(paired_row(value_key(lane), p.v_paired), warp)
         : BYTES ? chunk_offset(lane, warp * (DIM_TILES / 2))
                 : chunk_offset((matrix & 1) * 8 + r7, warp * DIM_TILES + (matrix >> 1)));
    const int row = lane & 15, first = warp * KEY_TILES + (SCALED ? lane & 1 : 0);
    read = weights + row * WEIGHT_PITCH + (((lane >> 4) ^ (row & 7)) << 4);
    write = weights + (lane >> 2) * WEIGHT_PITCH + ((first ^ (lane >> 2)) << 4) + (SCALED ? (lane & 2) * 4 : (lane & 3) * 4);
    if constexpr (SCALED) {
      const u32 scales = stages + 2 * SIDE_BYTES;
      k_scale = scales + (p.scale_layout == SCALES_TILED ? (lane >> 2) * 16 + warp * 4 : (warp * WARP_KEYS + (lane >> 2)) * 8);
      v_scale = scales + SCALE_BYTES + swap_two_bits(lane) * 32 + warp * 8 + (lane >> 4) * 4;
      k_select = lane & 2 ? 0x7531 : 0x6420;
      // Computed once: left to itself the compiler does it anew in every tile.
      keep(k, lane), keep(v, lane), keep(read, lane), keep(write, lane);
      keep(k_scale, lane), keep(v_scale, lane), keep(k_select, lane);
      query = read + 2 * ROWS * WEIGHT_PITCH;
    }
  }
};

// NVFP4: scales of V are read as the planar layout has them: [key / 4][group][key % 4]. Other layouts are first brought into it,
// in a table of the group's: every warp its own two groups.
constexpr int VALUE_SCALE_BYTES = SCALED ? SCALE_BYTES / WARPS : 0; // of one warp

DEVICE void arrange_value_scales(const Params &p, u32 scales, u32 table, int warp, int lane) {
  // Four neighbouring keys, both groups of each.
  const bool tiled = p.scale_layout == SCALES_TILED;
  const u32 from = scales + (tiled ? (lane & 7) * 64 + (lane >> 3) * 4 + (warp >> 1) * 512 + (warp & 1) * 2 : lane * 32 + warp * 2);
  const int pitch = tiled ? 16 : 8;
  u32 x[4];
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = load_shared_half(from + i * pitch);
  const u32 lo = __byte_perm(x[0], x[1], 0x5410), hi = __byte_perm(x[2], x[3], 0x5410);
  __syncwarp(); // all lanes have read the last tile's
  store_shared(table + lane * 32 + warp * 8, __byte_perm(lo, hi, 0x6420), __byte_perm(lo, hi, 0x7531));
  __syncwarp();
}

// s = q K^T for this warp's keys of the tile whose stage is `stage` bytes behind the first. `q` is not read where QUERY_STAYS.
DEVICE void score_tile(const Params &p, const LaneAddresses &at, u32 stage, const u32 (&q)[8][4], Scores &s) {
  const u32 k = at.k + stage;
  float c[SCORE_CHAINS][KEY_TILES][4] = {};
  if constexpr (KV_FORMAT == KV_NVFP4) {
    // A lane's word of a 16-byte chunk holds eight dims, half of a scale group: lanes 0 and 1 of four have the chunk's first group.
    const u32 scales = at.k_scale + stage;
    u32 lo[KEY_TILES], hi[KEY_TILES]; // all eight groups of a key
    if (p.scale_layout == SCALES_TILED) {
#pragma unroll
      for (int n = 0; n < KEY_TILES; n++) lo[n] = load_shared(scales + n * 128), hi[n] = load_shared(scales + n * 128 + 512);
    } else {
#pragma unroll
      for (int n = 0; n < KEY_TILES; n++) load_shared(scales + n * 64, lo[n], hi[n]);
    }
    u32 pair[2][KEY_TILES]; // scales of chunks 0 and 1, 2 and 3
#pragma unroll
    for (int n = 0; n < KEY_TILES; n++) widen_scales(permute(lo[n], hi[n], at.k_select), pair[0][n], pair[1][n]);
#pragma unroll
    for (int chunk = 0; chunk < 4; chunk++) {
      u32 r[4], a[2][4];
      load_matrices(k ^ (chunk << 4), r);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int step = 2 * chunk + i;
        if constexpr (QUERY_STAYS)
          load_matrices((at.query ^ ((step & 3) << 5)) + (step >> 2) * 128, a[i]);
        else
#pragma unroll
          for (int j = 0; j < 4; j++) a[i][j] = q[step][j];
      }
#pragma unroll
      for (int n = 0; n < KEY_TILES; n++) {
        u32 b[4];
        widen_fp4_keys(r[n], b);
        const u32 scale = pair[chunk >> 1][n];
#pragma unroll
        for (int i = 0; i < 4; i++) b[i] = chunk & 1 ? multiply_fp16_by<1>(b[i], scale) : multiply_fp16_by<0>(b[i], scale);
        multiply_add(c[0][n], a[0], b[0], b[1]);
        multiply_add(c[0][n], a[1], b[2], b[3]);
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

// o += weights V for this warp's dims. `scales`: this lane's address (NVFP4).
DEVICE void output_tile(u32 v, u32 weights, u32 scales, Output &o) {
#pragma unroll
  for (int pair = 0; pair < TILE / 16; pair += 2) {
    u32 a[2][4];
#pragma unroll
    for (int i = 0; i < 2; i++) { // the swizzle reaches four steps far
      const int step = pair + i;
      load_matrices((weights ^ ((step & 3) << 5)) + (step >> 2) * 128, a[i]);
    }
    if constexpr (KV_FORMAT == KV_NVFP4) {
      // A 16-bit column of the transposed matrices is four dims of one key, and eight columns are this warp's 32 dims: output tile
      // j takes dim j of each. The first four columns are the first scale group.
      u32 r[4];
      load_matrices_transposed(v + pair * 16 * 64, r);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        u32 first[4], second[4], scale[2];
        widen_scales(load_shared(scales + (pair + i) * 128), scale[0], scale[1]);
        widen_fp4_values(r[2 * i], first);
        widen_fp4_values(r[2 * i + 1], second);
#pragma unroll
        for (int d = 0; d < 4; d++)
          multiply_add(o[d], a[i], multiply_fp16(first[d], scale[0]), multiply_fp16(second[d], scale[1]));
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
constexpr int VECTOR_STEP = KV_FORMAT == KV_NVFP4 ? 4 : 4 * OUT_VECTOR; // dims from one of them to the next
typedef float OutVector[OUT_VECTOR];

DEVICE int vector_dim(int warp, int lane, int i) {
  return warp * WARP_DIMS + i * VECTOR_STEP + (lane & 3) * (KV_FORMAT == KV_NVFP4 ? 8 : OUT_VECTOR);
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
