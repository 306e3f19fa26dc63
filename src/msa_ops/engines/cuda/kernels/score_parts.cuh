// What the score kernels share: keys as operands of the products, queries, the largest scores of a block, and what is written
// where a token sees no keys.
//
// The keys are a stream that is read once and hardly used: a token's few heads make a few products of each. Keys are the rows
// of the products and queries their columns: 16 keys meet 8 (token, head) pairs. Four lanes have a key; in which order they
// take its dims does not matter as long as the queries, which are brought into that order once, agree.
//
// A block of 128 keys is shared by a team of warps, which compare their largest scores in shared memory.
constexpr int HEAD_DIM = 128;
constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr bool SCALED = KV_FORMAT == KV_NVFP4;
constexpr int ROW_BYTES = SCALED ? HEAD_DIM / 2 : KV_FORMAT == KV_FP8 ? HEAD_DIM : HEAD_DIM * 2;
constexpr int CHUNKS = ROW_BYTES / 64;           // loads of a lane for a key
constexpr int SCALE_TILE_BYTES = 8 * BLOCK_KEYS; // of 128 rows in the 128x4 tiled layout

// How a block of keys is shared: by a team of N warps.
template <int N> struct Team {
  static constexpr int WARPS_EACH = N, COUNT = WARPS / N, THREADS_EACH = 32 * N;
  // What a warp has of a block: sets of 32 keys, tiles of 16. It has so many of each 32 of the block's.
  static constexpr int SETS = 4 / N, TILES = 2 * SETS, GROUP = 8 * SETS;
  static DEVICE_MEMBER int first_key(int warp) { return GROUP * (warp % N); }
};
// Where keys are operands as they come or widened. Widening NVFP4 takes most of a warp's time: two warps a block instead of four
// halve what there is to do beside it.
typedef Team<SCALED ? 2 : 4> WideningTeam;
constexpr int TEAM = WideningTeam::WARPS_EACH, TEAMS = WideningTeam::COUNT, TEAM_THREADS = WideningTeam::THREADS_EACH;
constexpr int WARP_TILES = WideningTeam::TILES;

// --- keys -------------------------------------------------------------------------------------------------------------
// Of each 32 keys of a block, set n of a team's warp w has the eight from GROUP w + 8 n on, which makes the NVFP4 scales of a
// set neighbours too. So a lane has four keys of a set, 32 apart: two are its rows of the set's first tile, two of its second.
DEVICE int first_key_of(int warp, int lane) { return WideningTeam::first_key(warp) + (lane >> 2); }
DEVICE int tile_key(int tile) { return 8 * (tile >> 1) + 64 * (tile & 1); } // from a lane's first key on

// A warp's keys of a part of a block, as stored.
template <int TILES> struct Part {
  uint4 keys[TILES][2][CHUNKS]; // rows lane / 4 and lane / 4 + 8 of each tile; bytes 64 i + 16 (lane % 4) ...
  uint4 scales;                 // NVFP4: word i has those of the lane's i-th key of the set
  bool present;                 // the block has a page
};

// The page of a block, -1 if the table has none.
template <typename Read> DEVICE int page_of(const ScoreParams &p, int index, int block, Read read) {
  return p.paged && block < p.table_width ? read(p.table + index * p.table_row + block * p.table_column) : -1;
}
DEVICE int page_of(const ScoreParams &p, int index, int block) { return page_of(p, index, block, read_now); }

// Where the scale of a row's `group`-th 16 dims lies in the 128x4 tiled layout.
DEVICE i64 tiled_scale(i64 row, int group) {
  return ((row >> 7) * 2 + (group >> 2)) * (SCALE_TILE_BYTES / 2) + (row & 31) * 16 + ((row & 127) >> 5) * 4 + (group & 3);
}

// Flat NVFP4 cache: where a position's scales of the first 64 dims lie. For what no token sees, those of the last one seen.
DEVICE i64 flat_scale(const ScoreParams &p, const Run &run, int position) {
  const i64 row = ((i64)run.request.first_key + min(position, run.highest - 1)) * p.kv_heads + run.kv_head;
  return tiled_scale(row, 0);
}

DEVICE u32 word_of(const uint4 &x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// NVFP4: the scales of a lane's two groups of 16 dims, for both of its keys of a tile, each as an fp16 pair.
DEVICE void tile_scales(const uint4 &words, int tile, int lane, u32 (&scales)[2]) {
  const u32 first = tile & 1 ? words.z : words.x, second = tile & 1 ? words.w : words.y;
  widen_scales(__byte_perm(first, second, lane & 1 ? 0x7632 : 0x5410), scales[0], scales[1]);
}

// The operands of two of the products' eight steps over the dims. A lane's 16-bit keys are dims 32 i + 8 (lane % 4) ... of load
// i, bytes are dims 64 i + 16 (lane % 4) ..., codes dims 32 (lane % 4) ...: in each case the eight dims of step pair `pair`
// follow one another, as they do in `query_place`.
DEVICE void key_operands(const uint4 (&keys)[2][CHUNKS], int pair, const u32 (&scales)[2], u32 (&a)[2][4]) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    if constexpr (SCALED) {
      u32 r[4];
      widen_fp4_keys(word_of(keys[half][0], pair), r);
      const u32 scale = __byte_perm(scales[half], 0, pair < 2 ? 0x1010 : 0x3232);
#pragma unroll
      for (int i = 0; i < 4; i++) a[i >> 1][(i & 1) * 2 + half] = multiply_fp16(r[i], scale);
    } else if constexpr (KV_FORMAT == KV_FP8) {
#pragma unroll
      for (int i = 0; i < 2; i++)
        widen_fp8(word_of(keys[half][(pair >> 1) % CHUNKS], (pair & 1) * 2 + i), a[i][half], a[i][2 + half]);
    } else {
      const uint4 &x = keys[half][pair % CHUNKS];
      a[0][half] = x.x, a[0][2 + half] = x.y, a[1][half] = x.z, a[1][2 + half] = x.w;
    }
  }
}

// --- queries ----------------------------------------------------------------------------------------------------------
// NVFP4: the global scales that are known to the device alone, and what scores are multiplied with in the end.
struct GlobalScales {
  float q, k;

  DEVICE_MEMBER void load(const ScoreParams &p) {
    q = p.q_global ? *p.q_global : 1.f;
    k = p.k_global ? *p.k_global : 1.f;
  }
  DEVICE_MEMBER float product(const ScoreParams &p) const { return p.factor * q * k; }
};

// NVFP4: undoes the powers of two of widened queries and keys. Apart from `Shared::factor`, whose product with it could leave the
// range of floats.
constexpr float PRODUCT_FACTOR = SCALED ? NVFP4_FACTOR * NVFP4_FACTOR : 1.f;

template <int COLUMNS> struct Shared {
  uint4 query[QUERY_PARTS][COLUMNS / 8][4][32]; // operands of 8 columns and two steps, by lane
  float factor[COLUMNS];                        // what a column's products are multiplied with, beside PRODUCT_FACTOR
  int limit[COLUMNS];                           // keys that a column's token sees
  float best[2][WARPS][COLUMNS];
  float *out[COLUMNS];                          // where the scores of a column, or of a token's columns, go: those of block 0
  float reduced[COLUMNS];                       // a token's largest score over the heads of the runs before
  Run run[2]; // the present one; where a thread block has several, also the one before or after it
};

// From stored queries to operands, 8 dims of a row at a time: loaded by one call, converted and stored by the next.
template <int COLUMNS> struct QueryRows {
  static constexpr int PARTS = COLUMNS * 16 / THREADS;
  uint4 raw[PARTS];

  DEVICE_MEMBER void find(const ScoreParams &, const Run &) {} // `load` does, for registers are short

  DEVICE_MEMBER void load(const ScoreParams &p, const Run &run) {
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
      const int row = (threadIdx.x + i * THREADS) >> 4, chunk = threadIdx.x & 15;
      raw[i] = make_uint4(0, 0, 0, 0);
      if (row >= run.tokens * run.heads) continue;
      const int in_tile = p.tile_heads.quotient(row), token = run.token + in_tile;
      const int which = run.first_head + row - in_tile * run.heads;
      const u8 *const at = p.q + token * p.q_token + which * p.q_head;
      if constexpr (SCALED) {
        const i64 r = (i64)token * (p.kv_heads * p.group) + which; // row of the scales
        raw[i].x = *(const u32 *)(at + chunk * 4);
        raw[i].y = p.q_scale[tiled_scale(r, chunk >> 1)];
      } else if (p.query_type == QUERY_FP8) {
        const uint2 x = *(const uint2 *)(at + chunk * 8);
        raw[i].x = x.x, raw[i].y = x.y;
      } else {
        raw[i] = *(const uint4 *)(at + chunk * 16);
      }
    }
  }

  DEVICE_MEMBER void store(const ScoreParams &p, const Run &run, Shared<COLUMNS> &shared) const {
    float global = 1.f;
    if constexpr (SCALED) {
      GlobalScales scales;
      scales.load(p);
      global = scales.product(p);
    }
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
      const int row = (threadIdx.x + i * THREADS) >> 4, chunk = threadIdx.x & 15;
      u32 w[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
      float undo = 1.f;
      if constexpr (SCALED) {
        u32 scale, unused;
        widen_fp4_keys(raw[i].x, w);
        widen_scales(raw[i].y * 0x0101u, scale, unused);
        // A factor below 0 makes the largest score of the smallest product: its sign goes into the operand.
#pragma unroll
        for (int j = 0; j < 4; j++) w[j] = multiply_fp16(w[j], scale) ^ (global < 0.f ? 0x80008000u : 0u);
      } else {
        undo = widen_query(w, p.query_type);
      }
      const int place = query_place(chunk), lane = (row & 7) * 4 + (place & 3);
      if constexpr (QUERY_PARTS == 2) { // fp16 has three bits more than bf16: the rest is a bf16 too
        u32 rest[4];
#pragma unroll
        for (int j = 0; j < 4; j++) split(w[j], w[j], rest[j]);
        shared.query[QUERY_PARTS - 1][row >> 3][place >> 2][lane] = make_uint4(rest[0], rest[1], rest[2], rest[3]);
      }
      shared.query[0][row >> 3][place >> 2][lane] = make_uint4(w[0], w[1], w[2], w[3]);
      if (chunk == 0) {
        shared.factor[row] = SCALED ? fabsf(global) : undo * KV_FACTOR;
        const int token = p.tile_heads.quotient(row), head = row - token * run.heads;
        shared.limit[row] = run.request.limit(p, run.place + token);
        float *const out = p.out + (run.token + token) * p.out_token;
        if (!p.reduce) shared.out[row] = out + (run.first_head + head) * p.out_head;
        if (p.reduce && head == 0 && token < run.tokens) shared.out[token] = out;
      }
    }
  }

  // Where dims 8 chunk ... of a query go: step pair * 4 + lane % 4. See `key_operands`.
  static DEVICE_MEMBER int query_place(int chunk) {
    if constexpr (SCALED) return (chunk & 3) * 4 + (chunk >> 2);
    if constexpr (KV_FORMAT == KV_FP8) return ((chunk >> 3) * 2 + (chunk & 1)) * 4 + (chunk >> 1 & 3);
    return chunk;
  }

  // An fp16 pair as the sum of two bf16 pairs.
  static DEVICE_MEMBER void split(u32 pair, u32 &high, u32 &low) {
    const float2 x = unpack_fp16(pair);
    high = pack_bf16(x.x, x.y);
    const float2 y = unpack_bf16(high);
    low = pack_bf16(x.x == y.x ? 0.f : x.x - y.x, x.y == y.y ? 0.f : x.y - y.y); // equal: infinities as well
  }
};

// --- scores -----------------------------------------------------------------------------------------------------------
// The threads of one team.
DEVICE void team_sync(int team) {
  if constexpr (TEAMS == 1)
    __syncthreads();
  else
    barrier_sync<TEAM_THREADS>(1 + team);
}

// Writes the scores of a block: the largest of all warps' keys, and of the columns of a token if heads are reduced.
template <int COLUMNS>
DEVICE void give_scores(const ScoreParams &p, Shared<COLUMNS> &shared, const Run &run, u32 turn, int block, int cells,
                        int span) {
  const int cell = threadIdx.x % TEAM_THREADS, column = cell * span, first_warp = threadIdx.x / TEAM_THREADS * TEAM;
  if (cell >= cells || block * BLOCK_KEYS >= shared.limit[column]) return;
  float best = NEG_INF;
#pragma unroll 4
  for (int i = column; i < column + span; i++) {
    float x = shared.best[turn][first_warp][i];
#pragma unroll
    for (int w = 1; w < TEAM; w++) x = larger(x, shared.best[turn][first_warp + w][i]);
    best = larger(best, x == NEG_INF ? x : x * PRODUCT_FACTOR * shared.factor[i]);
  }
  // Runs of one block, all of team 0: the entry is this thread's alone.
  if (run.before) best = larger(best, shared.reduced[cell]);
  if (run.more)
    shared.reduced[cell] = best;
  else
    shared.out[cell][block * p.out_block] = best;
}

// The largest of all lanes with the same lane % 4, for each of the first `LEFT` values. Where lanes can share the values they
// do, half of them each time: lane bits 4, 3, 2 then are the upper bits of the value's number, as far as it has some.
template <int LEFT, int DISTANCE = 16, int VALUES> DEVICE void reduce_lanes(float (&x)[VALUES], int lane) {
  constexpr int HALF = LEFT > 1 ? LEFT / 2 : 1;
#pragma unroll
  for (int i = 0; i < HALF; i++) {
    const bool upper = LEFT > 1 && lane & DISTANCE;
    const float keep = upper ? x[(HALF + i) % VALUES] : x[i], give = upper || LEFT == 1 ? x[i] : x[(HALF + i) % VALUES];
    x[i] = larger(keep, __shfl_xor_sync(ALL_LANES, give, DISTANCE));
  }
  if constexpr (DISTANCE > 4) reduce_lanes<HALF, DISTANCE / 2>(x, lane);
}

// Puts values 2 n + e, columns 8 n + 2 (lane % 4) + e, where `reduce_lanes` left them.
template <int VALUES> DEVICE void put_columns(const float (&x)[VALUES], float *to, int lane) {
  constexpr int SHARED_BITS = VALUES == 2 ? 1 : VALUES == 4 ? 2 : 3; // lane bits that number the values
  if (lane & ((4 << (3 - SHARED_BITS)) - 4)) return;                 // copies
  const int upper = lane >> (5 - SHARED_BITS);
  if constexpr (VALUES == 16)
    *(float2 *)(to + 8 * upper + 2 * (lane & 3)) = make_float2(x[0], x[1]);
  else
    to[8 * (upper >> 1) + 2 * (lane & 3) + (upper & 1)] = x[0];
}

// Takes a part of a block into the largest scores so far: values 2 n + e of columns 8 n + 2 (lane % 4) + e.
template <int COLUMNS, int TILES>
DEVICE void score_part(const Shared<COLUMNS> &shared, const Part<TILES> &part, int index, int block, bool all_seen, int warp,
                       int lane, float (&best)[COLUMNS / 4]) {
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    const int tile = index * TILES + t;
    float c[COLUMNS / 8][4] = {};
    u32 scales[2] = {};
    if constexpr (SCALED) tile_scales(part.scales, tile, lane, scales);
#pragma unroll
    for (int pair = 0; pair < 4; pair++) {
      u32 a[2][4];
      key_operands(part.keys[t], pair, scales, a);
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
        for (int q = 0; q < QUERY_PARTS; q++) {
          const uint4 *const at = &shared.query[q][n][pair][lane];
          const uint4 b = COLUMNS > 8 ? load_again(at) : *at;
          multiply_add(c[n], a[0], b.x, b.y);
          multiply_add(c[n], a[1], b.z, b.w);
        }
    }
    const int key = block * BLOCK_KEYS + first_key_of(warp, lane) + tile_key(tile);
#pragma unroll
    for (int i = 0; i < COLUMNS / 4; i++) {
      float x = c[i / 2][i % 2], y = c[i / 2][2 + i % 2]; // of this key, and of the one 32 on
      if (!all_seen) {
        const int limit = shared.limit[8 * (i / 2) + 2 * (lane & 3) + i % 2];
        x = key < limit ? x : NEG_INF, y = key + 32 < limit ? y : NEG_INF;
      }
      best[i] = larger(best[i], larger(x, y));
    }
  }
}

// --- blocks that a token does not see ---------------------------------------------------------------------------------
// The request that a row of q belongs to, or -1.
DEVICE int request_of(const ScoreParams &p, int token) {
  auto start = [&](int i) { return p.query_starts[i * p.query_starts_step]; };
  if (token < p.batch && start(token) <= token && token < start(token + 1)) return token; // one token a request
  int low = 0, high = p.batch; // the first request that ends past the token
  while (low < high) {
    const int middle = (low + high) >> 1;
    if (start(middle + 1) > token)
      high = middle;
    else
      low = middle + 1;
  }
  return low < p.batch && start(low) <= token ? low : -1;
}

DEVICE void fill_unseen(const ScoreParams &p) {
  const int width = 1 << p.fill_shift, heads = p.reduce ? 1 : p.kv_heads * p.group;
  const u32 token_tiles = ((u32)p.total_q + width - 1) >> p.fill_shift, units = token_tiles * p.fill_splits;
  const int rows = THREADS >> p.fill_shift, row = threadIdx.x >> p.fill_shift;
  for (u32 unit = blockIdx.x; unit < units; unit += p.fill_blocks) {
    const u32 split = unit / token_tiles;
    const i64 token = (i64)(unit - split * token_tiles) * width + (threadIdx.x & (width - 1));
    if (token >= p.total_q) continue;
    const int index = request_of(p, (int)token);
    int seen = 0;
    if (index >= 0) {
      const Request request(p, index);
      seen = Request::blocks(p, request.limit(p, (int)token - request.first_query));
    }
    for (i64 block = seen + (i64)split * rows + row; block < p.blocks; block += (i64)p.fill_splits * rows)
      for (int head = 0; head < heads; head++) p.out[head * p.out_head + block * p.out_block + token * p.out_token] = NEG_INF;
  }
}
