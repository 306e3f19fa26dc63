// Scores of NVFP4 keys for few queries: products of the codes themselves, in integers, and scales behind them.
//
// On 9.0 widening e2m1 to fp16 and scaling it takes longer than the keys take to arrive. Twice an e2m1 value is an integer of at
// most 12, and a byte permutation finds it by its code, four at a time: a code's low three bits choose one of eight bytes, and
// with its sign bit set the result is that byte's sign, -1 or 0. So a value is the sum of two, of `POSITIVE` by the codes and
// `NEGATIVE` by the codes with their signs flipped: v > 0 is (v + 1) + -1, and v <= 0 is 0 + v. The product of a group of 16 is
// exact.
//
// The scales of a key differ by group, and a step of the products, 32 dims, has two groups. Its eight columns are four (token,
// head) pairs twice: with the dims of the first group, zeros elsewhere, and with those of the second.
constexpr int PAIRS = 4; // (token, head)
constexpr int CODE_STEPS = HEAD_DIM / 32, CODE_GROUPS = HEAD_DIM / 16;
constexpr float CODE_FACTOR = 0.25f; // operands are twice the values, on both sides
constexpr u32 SIGNS = 0x88888888u;   // of the codes in a word

struct Bytes {
  u32 low, high;
};
constexpr Bytes POSITIVE = {0x04030200u, 0x0d090705u}; // 0, then twice each magnitude, and one more
constexpr Bytes NEGATIVE = {0xfdfeff00u, 0xf4f8fafcu}; // less twice each magnitude

// By the four codes in the low half of `codes`.
DEVICE u32 choose(Bytes from, u32 codes) { return permute(from.low, from.high, codes); }

// Of the keys of a product: eight codes each of two.
struct Operand {
  u32 words[4];
  DEVICE_MEMBER Operand(Bytes from, u32 first, u32 second)
      : words{choose(from, first), choose(from, second), choose(from, high_half(first)), choose(from, high_half(second))} {}
};

// Accumulators start from the bits of this float, 1.5 * 2^23. What is added to them, less than 2^22, is added to the float as
// well: they are floats when the products are done, and nothing has to be converted.
constexpr float BIAS = 12582912.f;

// d = c + a (16 x 32, row) * b (32 x 8, column).
DEVICE void multiply_add_codes(u32 (&d)[4], const u32 (&a)[4], uint2 b, const u32 (&c)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

// Of a pair's query for the two groups of a step: its scales, with CODE_FACTOR, and what takes the bias off.
struct alignas(16) StepScales {
  float factor[2], unbias[2];
};

struct CodeShared {
  uint2 query[CODE_STEPS][32];     // operands of a step, by lane
  StepScales scale[CODE_STEPS][PAIRS];
  int limit[PAIRS];                // keys that a pair's token sees
  float best[WARPS][PAIRS];
  float *out[PAIRS]; // where the scores of a pair go, or of the token whose first pair it is: that of block 0; null: nowhere
  float factor;      // what scores are multiplied with
  Run run[1];
  // The low words of `POSITIVE` and `NEGATIVE`, once a pair and read by lane: constants, and what all lanes read in one place, the
  // compiler knows to be the same for all, and brings into a register anew each time.
  u32 positive[PAIRS], negative[PAIRS];
};

// From stored queries to operands. A thread has a word of a step's; of the first 32, each has a scale too.
struct CodeQueries {
  const u8 *from, *scale_from; // null: there is nothing to load
  u32 codes, scale;
  GlobalScales global_scales;

  DEVICE_MEMBER void find(const ScoreParams &p, const Run &run) {
    const int step = threadIdx.x >> 5, lane = threadIdx.x & 31, column = lane >> 2, word = lane & 3;
    from = scale_from = nullptr;
    const int pair = column >> 1;
    if (pair < run.tokens * run.heads && word >> 1 == (column & 1))
      from = p.q + token_of(p, run, pair) * p.q_token + head_of(p, run, pair) * p.q_head + step * 16 + word * 4;
    const int scaled = threadIdx.x / CODE_GROUPS;
    if (scaled < run.tokens * run.heads) {
      const i64 row = (i64)token_of(p, run, scaled) * (p.kv_heads * p.group) + head_of(p, run, scaled);
      scale_from = p.q_scale + tiled_scale(row, threadIdx.x % CODE_GROUPS);
    }
  }

  DEVICE_MEMBER void load(const ScoreParams &p, const Run &) {
    global_scales.load(p);
    codes = from ? *(const u32 *)from : 0;
    scale = scale_from ? *scale_from : 0;
  }

  DEVICE_MEMBER void store(const ScoreParams &p, const Run &run, CodeShared &shared) const {
    const u32 flipped = codes ^ SIGNS;
    shared.query[threadIdx.x >> 5][threadIdx.x & 31] =
        make_uint2(__vadd4(choose(POSITIVE, codes), choose(NEGATIVE, flipped)),
                   __vadd4(choose(POSITIVE, codes >> 16), choose(NEGATIVE, flipped >> 16)));
    const int pair = threadIdx.x / CODE_GROUPS, group = threadIdx.x % CODE_GROUPS;
    if (pair >= PAIRS) return;
    const float global = global_scales.product(p);
    u32 widened, unused;
    widen_scales(scale, widened, unused);
    // A factor below 0 makes the largest score of the smallest product: its sign goes into the scales.
    const float x = unpack_fp16(widened).x * (global < 0.f ? -CODE_FACTOR : CODE_FACTOR);
    StepScales &scales = shared.scale[group >> 1][pair];
    scales.factor[group & 1] = x, scales.unbias[group & 1] = x * -BIAS; // exact
    if (group > 0) return;
    shared.positive[pair] = POSITIVE.low, shared.negative[pair] = NEGATIVE.low;
    if (pair == 0) shared.factor = fabsf(global);
    const int token = token_of(p, run, pair), head = head_of(p, run, pair);
    shared.limit[pair] = run.request.limit(p, run.place + token - run.token);
    float *out = p.out + token * p.out_token;
    if (!p.reduce) out += head * p.out_head;
    const bool given = pair < run.tokens * run.heads && (!p.reduce || head == run.first_head);
    shared.out[pair] = given ? out : nullptr;
  }

  static DEVICE_MEMBER int token_of(const ScoreParams &p, const Run &run, int pair) {
    return run.token + p.tile_heads.quotient(pair);
  }
  static DEVICE_MEMBER int head_of(const ScoreParams &p, const Run &run, int pair) {
    return run.first_head + pair - p.tile_heads.quotient(pair) * run.heads;
  }
};

// The largest scores of a warp's keys of a block that N warps share. A lane has those of pair lane % 4.
template <int N> struct CodeScorer {
  static constexpr bool FEW = true, BY_SETS = true;
  static constexpr bool ONE = N > 1; // teams have no more than a block each
  // Sets that are under way when one is waited for, that one included. Not all that there are places for: of what is asked for at
  // once, memory may bring the first last (kernel-notes, "Beside the products"). A team with one block asks for both its sets.
  static constexpr int AHEAD = ONE ? Team<N>::SETS : 2;
  static_assert(ONE || AHEAD < Team<N>::SETS, "a place would be overwritten that lanes may still read");
  typedef Team<N> T;
  typedef CodeQueries Queries;
  typedef SetCopier<T> Copier;
  typedef SetPlaces<T> Places;
  typedef RowShared<CodeShared, T> Memory;
  float best;
  u32 positive, negative; // see `CodeShared`

  // Takes what is the same for all blocks.
  DEVICE_MEMBER void begin(const Memory &shared, int lane) {
    positive = shared.positive[lane & 3], negative = shared.negative[lane & 3];
  }

  // Takes in a block, whose first sets are under way. Asks for its last ones, and for the first ones of the block after it if there
  // are `more`: `next` gives the copier of that. `straight`: `all_seen`, by all tokens, as all keys of the block after it are by some;
  // and keys lie side by side in both.
  template <typename Next>
  DEVICE_MEMBER void take(const ScoreParams &p, const Memory &shared, const Places &places, Copier &copier, Next next, bool more,
                          bool straight, int block, bool all_seen, int warp, int lane) {
    constexpr int OWN = T::SETS - AHEAD; // sets that have not been asked for
    auto arrived = [] {
      wait_for_copies<AHEAD - 1>();
      __syncwarp(); // the other lanes' copies; and all have read the sets before: one of them is overwritten now
    };
    best = NEG_INF;
    if (straight) { // the usual way: without a branch
#pragma unroll
      for (int set = 0; set < T::SETS; set++) {
        arrived();
        if (set == OWN && !ONE) copier = next();
        if (set < OWN || !ONE) copier.copy_side_by_side(places, (set + AHEAD) % T::SETS, lane, set < OWN || more);
        commit_copies(); // one group a set, be it empty
        score(shared, block, set, true, warp, lane);
      }
    } else {
      const bool present = copier.present();
#pragma unroll 1
      for (int set = 0; set < T::SETS; set++) {
        arrived();
        if (set == OWN && more) copier = next();
        if (set < OWN || more) copier.copy(p, places, (set + AHEAD) % T::SETS, warp, lane);
        commit_copies();
        if (present) score(shared, block, set, all_seen, warp, lane);
      }
    }
  }

  // Takes in a set of a warp's keys: two tiles, of which a lane has two keys each. Both are taken through the steps together: they
  // share the queries' operands, and what a lane has of codes at once is short.
  DEVICE_MEMBER void score(const Memory &shared, int block, int set, bool all_seen, int warp, int lane) {
    // This lane's row of the four matrices that are read at once: a piece of a tile's first and second eight keys, and the next.
    const int row = lane & 7, own = lane >> 2;
    const u32 from = shared_address(&shared.keys[warp][half_tile<T>(0, lane >> 3 & 1) + row][key_place(row, lane >> 4)]);
    uint4 scales[2]; // of the first and the last 64 dims: a word for each of the four keys
#pragma unroll
    for (int half = 0; half < 2; half++) scales[half] = shared.scales[warp][half][scale_place(half, 8 * set + own)];
    float sum[2][2] = {};
    u32 codes[2][4]; // eight dims of a key each, for two steps
#pragma unroll
    for (int step = 0; step < CODE_STEPS; step++) {
      const int parity = step & 1;
#pragma unroll
      for (int i = 0; i < 2 && parity == 0; i++) // `key_place` is an exclusive or, and so is the way to a later step
        load_matrices((from ^ step * 16) + half_tile<T>(2 * set + i, 0) * ROW_BYTES, codes[i]);
      const uint2 q = shared.query[step][lane];
      const StepScales scale = shared.scale[step][lane & 3]; // each time: registers for all are short
#pragma unroll
      for (int i = 0; i < 2; i++) {
        u32 c[4];
        multiply(codes[i][2 * parity], codes[i][2 * parity + 1], q, c);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          u32 pair[2];
          widen_scales(word_of(scales[step >> 1], 2 * i + half), pair[0], pair[1]);
          const float2 widened = unpack_fp16(pair[parity]);
#pragma unroll
          for (int group = 0; group < 2; group++) {
            const float product = fmaf(__uint_as_float(c[2 * half + group]), scale.factor[group], scale.unbias[group]); // exact
            sum[i][half] = fmaf(product, group ? widened.y : widened.x, sum[i][half]);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float (&x)[2] = sum[i];
      if (!all_seen) {
        const int key = block * BLOCK_KEYS + T::first_key(warp) + own + tile_key(2 * set + i), limit = shared.limit[lane & 3];
        x[0] = key < limit ? x[0] : NEG_INF, x[1] = key + 32 < limit ? x[1] : NEG_INF;
      }
      best = larger(best, larger(x[0], x[1]));
    }
  }

  // Products of a step, and BIAS, with eight codes each of a lane's two keys of a tile.
  DEVICE_MEMBER void multiply(u32 first, u32 second, uint2 q, u32 (&c)[4]) const {
    const u32 start[4] = {__float_as_uint(BIAS), __float_as_uint(BIAS), __float_as_uint(BIAS), __float_as_uint(BIAS)};
    multiply_add_codes(c, Operand({positive, POSITIVE.high}, first, second).words, q, start);
    multiply_add_codes(c, Operand({negative, NEGATIVE.high}, first ^ SIGNS, second ^ SIGNS).words, q, c);
  }

  // Writes them, with those of the team's other warps.
  DEVICE_MEMBER void give(const ScoreParams &p, Memory &shared, const Run &run, int block, int warp, int lane) {
#pragma unroll
    for (int d = 4; d <= 16; d <<= 1) best = larger(best, __shfl_xor_sync(ALL_LANES, best, d));
    if constexpr (ONE) { // those of another tile of tokens are apart by `__syncthreads`
      if (lane < PAIRS) shared.best[warp][lane] = best;
      barrier_sync<T::THREADS_EACH>(1 + warp / N);
      if (warp % N > 0) return;
#pragma unroll
      for (int w = 1; w < N; w++) best = larger(best, shared.best[warp + w][lane & 3]);
    }
    float x = best == NEG_INF ? best : best * shared.factor;
    if (p.reduce) { // the pairs of a token are side by side
      if (run.heads == 3 && (lane & 3) == 3) x = NEG_INF;
      if (run.heads > 1) x = larger(x, __shfl_xor_sync(ALL_LANES, x, 1));
      if (run.heads > 2) x = larger(x, __shfl_xor_sync(ALL_LANES, x, 2));
    }
    float *const out = shared.out[lane & 3];
    if (lane < PAIRS && out && block * BLOCK_KEYS < shared.limit[lane & 3]) out[block * p.out_block] = x;
  }
};
