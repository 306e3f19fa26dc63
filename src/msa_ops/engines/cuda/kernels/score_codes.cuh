// Scores of NVFP4 keys for few queries: products of the codes themselves, in integers, and scales behind them.
//
// Widening e2m1 to fp16 and scaling it takes longer than the keys take to arrive. Twice an e2m1 value is an integer of at most
// 12, which a byte permutation makes of its code, four at a time: the low three bits choose a byte of eight, and where the sign
// bit is set as well the result is that byte's sign, eight times. So values are sums of two: with `POSITIVE` by the codes, with
// `NEGATIVE` by the codes with their signs turned. Of a value above 0 the first is one more, and the second is -1.
//
// The scales of a key differ by group, and a step of the products, 32 dims, has two of them. Its eight columns are four (token,
// head) pairs twice: with the dims of the first group, zeros elsewhere, and with those of the second.
constexpr int CODE_COLUMNS = 4; // (token, head) pairs
constexpr int CODE_STEPS = HEAD_DIM / 32, CODE_GROUPS = HEAD_DIM / 16;

struct Bytes {
  u32 low, high;
};
constexpr Bytes POSITIVE = {0x04030200u, 0x0d090705u}; // of magnitudes 0, 1, 2, 3, 4, 6, 8, 12
constexpr Bytes NEGATIVE = {0xfdfeff00u, 0xf4f8fafcu};

// What `Shared` is to other kernels.
template <> struct Shared<CODE_COLUMNS> {
  uint2 query[CODE_STEPS][32];            // operands of a step, by lane
  float scale[CODE_COLUMNS][CODE_GROUPS]; // of the queries, with what undoes that codes stand for half of what they are here
  float factor[CODE_COLUMNS];
  int limit[CODE_COLUMNS];
  float best[2][WARPS][CODE_COLUMNS];
  float *out[CODE_COLUMNS];
  Run run[1];
  u32 positive, negative; // the low words of `POSITIVE` and `NEGATIVE`: constants would come into a register anew each time
};

constexpr u32 SIGNS = 0x88888888u; // of the codes in a word

// By the four codes in the low half of `codes`.
DEVICE u32 choose(Bytes from, u32 codes) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(from.low), "r"(from.high), "r"(codes));
  return r;
}

// The bits of a float, 1.5 * 2^23, that accumulators start from. What is added to them, less than 2^22, is added to the float as
// well: they are one when the products are done, and nothing has to be converted.
constexpr u32 START = 0x4b400000u;
constexpr float START_FLOAT = 12582912.f;

// d = c + a (16 x 32, row) * b (32 x 8, column).
DEVICE void multiply_add_codes(u32 (&d)[4], const u32 (&a)[4], uint2 b, const u32 (&c)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

// A thread has a word of a step's operands; of the first 32, each has a scale too.
template <> struct QueryRows<CODE_COLUMNS> {
  u32 codes, scale;

  DEVICE_MEMBER void load(const ScoreParams &p, const Run &run) {
    const int step = threadIdx.x >> 5, lane = threadIdx.x & 31, column = lane >> 2, word = lane & 3;
    codes = scale = 0;
    if (const Pair pair(p, run, column >> 1); pair.exists && word >> 1 == (column & 1))
      codes = *(const u32 *)(p.q + pair.token * p.q_token + pair.head * p.q_head + step * 16 + word * 4);
    if (threadIdx.x >= CODE_COLUMNS * CODE_GROUPS) return;
    if (const Pair pair(p, run, threadIdx.x / CODE_GROUPS); pair.exists) {
      const int group = threadIdx.x % CODE_GROUPS;
      const i64 r = (i64)pair.token * (p.kv_heads * p.group) + pair.head; // row of the scales
      scale = p.q_scale[((r >> 7) * 2 + (group >> 2)) * 512 + (r & 31) * 16 + ((r & 127) >> 5) * 4 + (group & 3)];
    }
  }

  DEVICE_MEMBER void store(const ScoreParams &p, const Run &run, Shared<CODE_COLUMNS> &shared) const {
    const u32 turned = codes ^ SIGNS;
    shared.query[threadIdx.x >> 5][threadIdx.x & 31] =
        make_uint2(__vadd4(choose(POSITIVE, codes), choose(NEGATIVE, turned)),
                   __vadd4(choose(POSITIVE, codes >> 16), choose(NEGATIVE, turned >> 16)));
    if (threadIdx.x >= CODE_COLUMNS * CODE_GROUPS) return;
    const float global = p.factor * (p.q_global ? *p.q_global : 1.f) * (p.k_global ? *p.k_global : 1.f);
    const int at = threadIdx.x / CODE_GROUPS, group = threadIdx.x % CODE_GROUPS;
    u32 widened, unused;
    widen_scales(scale, widened, unused);
    // A factor below 0 makes the largest score of the smallest product: its sign goes into the scales.
    shared.scale[at][group] = unpack_fp16(widened).x * (global < 0.f ? -0.25f : 0.25f);
    if (group > 0) return;
    if (at == 0) shared.positive = POSITIVE.low, shared.negative = NEGATIVE.low;
    shared.factor[at] = fabsf(global);
    const int token = p.tile_heads.quotient(at), head = at - token * run.heads;
    shared.limit[at] = run.request.limit(p, run.place + token);
    float *const out = p.out + (run.token + token) * p.out_token;
    if (!p.reduce) shared.out[at] = out + (run.first_head + head) * p.out_head;
    if (p.reduce && head == 0 && token < run.tokens) shared.out[token] = out;
  }

  // Of a run's tokens and heads.
  struct Pair {
    int token, head;
    bool exists;

    DEVICE_MEMBER Pair(const ScoreParams &p, const Run &run, int at) {
      const int in_tile = p.tile_heads.quotient(at);
      token = run.token + in_tile, head = run.first_head + at - in_tile * run.heads;
      exists = at < run.tokens * run.heads;
    }
  };
};

// The largest scores of a warp's keys of a block that N warps share. A lane has those of column lane % 4.
template <int N> struct CodeScorer {
  static constexpr int COLUMNS = CODE_COLUMNS;
  static constexpr bool FEW = true, BY_SETS = true;
  typedef Team<N> T;
  typedef RowShared<COLUMNS, T> Memory;
  float best;
  float scale[CODE_GROUPS], offset[CODE_GROUPS]; // of the column's queries; what takes off what accumulators start from
  u32 positive, negative;                        // see `Shared`

  DEVICE_MEMBER void begin(const Memory &shared, int lane) {
    best = NEG_INF;
#pragma unroll
    for (int i = 0; i < CODE_GROUPS; i += 4) {
      const float4 x = *(const float4 *)&shared.scale[lane & 3][i];
      scale[i] = x.x, scale[i + 1] = x.y, scale[i + 2] = x.z, scale[i + 3] = x.w;
    }
#pragma unroll
    for (int i = 0; i < CODE_GROUPS; i++) offset[i] = scale[i] * -START_FLOAT; // exact
    positive = shared.positive, negative = shared.negative;
  }

  // Takes in a set of a warp's keys.
  DEVICE_MEMBER void score(const Memory &shared, int block, int set, bool all_seen, int warp, int lane) {
    // This lane's row of the four matrices that are read at once: 16 bytes of a tile's first and second eight keys, and the next 16.
    const int row = lane & 7, own = lane >> 2;
    const u32 from = shared_address(&shared.keys[warp][half_tile<T>(0, lane >> 3 & 1) + row][key_place(row, lane >> 4)]);
    uint4 scales[2];
#pragma unroll
    for (int half = 0; half < 2; half++) scales[half] = shared.scales[warp][half][scale_place(half, 8 * set + own)];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int tile = 2 * set + i;
      u32 codes[CODE_STEPS][2];
#pragma unroll
      for (int step = 0; step < CODE_STEPS; step += 2) {
        u32 r[4];
        load_matrices((from ^ step * 16) + half_tile<T>(tile, 0) * ROW_BYTES, r);
        codes[step][0] = r[0], codes[step][1] = r[1], codes[step + 1][0] = r[2], codes[step + 1][1] = r[3];
      }
      const u32 words[2][2] = {{word_of(scales[0], 2 * i), word_of(scales[1], 2 * i)},
                               {word_of(scales[0], 2 * i + 1), word_of(scales[1], 2 * i + 1)}};
      float x[2];
      score_tile(shared, codes, words, lane, x);
      if (!all_seen) {
        const int key = block * BLOCK_KEYS + T::GROUP * (warp % N) + own + tile_key(tile), limit = shared.limit[lane & 3];
        x[0] = key < limit ? x[0] : NEG_INF, x[1] = key + 32 < limit ? x[1] : NEG_INF;
      }
      best = larger(best, larger(x[0], x[1]));
    }
  }

  // The scores of a lane's two keys of a tile, of which it has the `codes` of eight dims a step, and all scales in two words.
  DEVICE_MEMBER void score_tile(const Memory &shared, const u32 (&codes)[CODE_STEPS][2], const u32 (&scales)[2][2], int lane,
                                float (&sum)[2]) const {
    const u32 start[4] = {START, START, START, START};
    sum[0] = sum[1] = 0.f;
#pragma unroll
    for (int step = 0; step < CODE_STEPS; step++) {
      const uint2 q = shared.query[step][lane];
      u32 a[4], c[4];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const u32 x = codes[step][half];
        a[half] = choose({positive, POSITIVE.high}, x), a[2 + half] = choose({positive, POSITIVE.high}, x >> 16);
      }
      multiply_add_codes(c, a, q, start);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const u32 x = codes[step][half] ^ SIGNS;
        a[half] = choose({negative, NEGATIVE.high}, x), a[2 + half] = choose({negative, NEGATIVE.high}, x >> 16);
      }
      multiply_add_codes(c, a, q, c);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u32 pair[2];
        widen_scales(scales[half][step >> 1], pair[0], pair[1]);
        const float2 widened = unpack_fp16(pair[step & 1]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int group = 2 * step + i;
          const float product = fmaf(__uint_as_float(c[2 * half + i]), scale[group], offset[group]); // exact
          sum[half] = fmaf(product, i ? widened.y : widened.x, sum[half]);
        }
      }
    }
  }

  // Writes them, with those of the team's other warps.
  DEVICE_MEMBER void give(const ScoreParams &p, Memory &shared, const Run &run, int block, int warp, int lane) {
#pragma unroll
    for (int d = 4; d <= 16; d <<= 1) best = larger(best, __shfl_xor_sync(ALL_LANES, best, d));
    if constexpr (N > 1) {
      float(&all)[WARPS][COLUMNS] = shared.best[block / T::COUNT & 1]; // two: who writes one again has passed the next's barrier
      if (lane < COLUMNS) all[warp][lane] = best;
      barrier_sync<T::THREADS_EACH>(1 + warp / N);
      if (warp % N > 0) return;
#pragma unroll
      for (int w = 1; w < N; w++) best = larger(best, all[warp + w][lane & 3]);
    }
    float x = best == NEG_INF ? best : best * shared.factor[lane & 3];
    int cells = run.tokens * run.heads, column = lane & 3;
    if (p.reduce) { // a lane for each token
      const float of_column = x;
      cells = run.tokens, column = lane * run.heads & 3;
      for (int i = 0; i < run.heads; i++) {
        const float other = __shfl_sync(ALL_LANES, of_column, column + i);
        x = i == 0 ? other : larger(x, other);
      }
    }
    if (lane < cells && block * BLOCK_KEYS < shared.limit[column]) shared.out[lane][block * p.out_block] = x;
  }
};
