// Block selection: the blocks of keys that a token attends, from their index scores. A row is a token and an index head.
//
// Blocks that are chosen whatever their score take no part in the search. The others fall into 32 groups, by the number of
// their block modulo 32, so that neighbours, whose scores are alike, lie in different ones. The wanted-th largest of the
// groups' largest scores is a floor that at least as many blocks reach, and as a rule hardly more: 20 for 15, however long
// the row. These are ranked by counting, each against all others. Where more blocks are wanted than there are groups, or too
// many reach the floor because they are equal, a search by digits finds the cut instead.
//
// Up to 256 blocks a row is one warp's, with its scores in registers. Longer rows are a thread block's; up to 1,024 blocks each of its
// warps narrows its part in this way, and the first one what they list.
// Strides are elements. topk.py packs the same fields in the same order.
struct TopkParams {
  const float *score;
  int *output;
  const int *extents;  // blocks of each token, or keys of each request; null: `extent` blocks for all
  const int *q_offset; // null: q_offset_int, if there is one
  i64 score_head, score_block, score_token;
  i64 output_token, output_head;
  i64 extents_step, q_offset_step;
  Divisor tokens, seqlen_q;
  int rows, blocks, topk, begin, end, extent, from_lengths, causal, has_q_offset, q_offset_int;
};

// Ascends with the score, -0 as 0; 0 for -inf and NaN. Others lie between those of the lowest number and of +inf.
constexpr u32 LOWEST_KEY = 0x00800000u, INFINITY_KEY = 0xff800000u;

DEVICE u32 key_of(float score) {
  const u32 bits = __float_as_uint(score + 0.f); // which makes -0 to 0
  const u32 key = bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
  return key - LOWEST_KEY <= INFINITY_KEY - LOWEST_KEY ? key : 0;
}

// The same order without exceptions, and back.
DEVICE u32 ordered(float score) {
  const u32 bits = __float_as_uint(score);
  return bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
}
DEVICE float score_of(u32 ordered) { return __uint_as_float(ordered ^ (~(u32)((int)ordered >> 31) | 0x80000000u)); }

constexpr u32 MINUS_INFINITY_BITS = 0xff800000u;
constexpr float LARGEST_SCORE = 3.402823466e38f;

constexpr int GROUPS = 32;

// Values of `list` that are larger. Summed as floats: comparisons and sums are then the work of different units.
template <typename T> DEVICE float count_larger(const T (&list)[GROUPS], T than) {
  struct alignas(16) Four {
    T x, y, z, w;
  };
  float n[4] = {};
#pragma unroll
  for (int i = 0; i < GROUPS / 4; i++) {
    const Four four = ((const Four *)list)[i];
    n[0] += four.x > than ? 1.f : 0.f, n[1] += four.y > than ? 1.f : 0.f;
    n[2] += four.z > than ? 1.f : 0.f, n[3] += four.w > than ? 1.f : 0.f;
  }
  return n[0] + n[1] + (n[2] + n[3]);
}

// What a row reads and writes; addresses only, so that it may be made before the wait.
struct Row {
  const float *score;
  int *output;
  u32 request, query; // place of the token among its request's

  __device__ __forceinline__ Row(const TopkParams &p, u32 row) {
    const u32 head = p.tokens.quotient(row); // neighbouring rows share lines where tokens lie innermost
    const u32 token = row - head * p.tokens.value;
    request = p.seqlen_q.quotient(token), query = token - request * p.seqlen_q.value;
    score = p.score + head * p.score_head + token * p.score_token;
    output = p.output + token * p.output_token + head * p.output_head;
  }
};

DEVICE void prefetch_extent(const TopkParams &p, const Row &row) {
  if (p.extents) prefetch_line(p.extents + row.request * p.extents_step);
  if (p.q_offset) prefetch_line(p.q_offset + row.request * p.q_offset_step);
}

constexpr int SECTOR = 8; // scores of one access to memory

// Of a row whose scores lie side by side.
DEVICE void prefetch_scores(const TopkParams &p, const Row &row, int thread) {
  if (p.score_block == 1 && thread * SECTOR < p.blocks) prefetch_line(row.score + thread * SECTOR);
}

// Blocks that exist for the row's token.
DEVICE int extent_of(const TopkParams &p, const Row &row) {
  const int given = p.extents ? p.extents[row.request * p.extents_step] : p.extent;
  const int offset = p.q_offset ? p.q_offset[row.request * p.q_offset_step] : p.q_offset_int;
  if (!p.from_lengths) return min(max(given, 0), p.blocks);
  const i64 length = max(given, 0), first = p.has_q_offset ? (i64)offset : length - p.seqlen_q.value;
  const u32 seen = p.causal ? min(length, max(first + row.query + 1, 0LL)) : length;
  return min((int)((seen + 127) / 128), p.blocks);
}

// The blocks [0, begin) and [last, extent) are chosen, and `wanted` of those between.
struct Forced {
  int begin, last, extent, wanted;

  __device__ __forceinline__ Forced(const TopkParams &p, int extent_) {
    extent = extent_;
    begin = min(min(p.begin, p.topk), extent);
    const int end = min(min(p.end, p.topk - begin), extent - begin);
    last = extent - end;
    wanted = p.topk - begin - end;
  }
  __device__ __forceinline__ bool open(int block) const { return (u32)(block - begin) < (u32)(last - begin); }
  __device__ __forceinline__ bool holds(int block) const { return block < begin || (block >= last && block < extent); }
  __device__ __forceinline__ int count() const { return begin + extent - last; }

  // Writes all of a row except its `found` blocks that were not forced, which come after the first `begin`.
  __device__ __forceinline__ void write_rest(int *output, int topk, int found, int thread, int threads) const {
#pragma unroll 1
    for (int i = thread; i < topk; i += threads) {
      const int behind = i - begin - found; // place among the last blocks
      if (i < begin || behind >= 0) output[i] = i < begin ? i : behind < extent - last ? last + behind : -1;
    }
  }
};

// Keys above `floor` are chosen, and of those equal to it the first `ties`.
struct Cut {
  u32 floor;
  int ties;
};

constexpr Cut NOTHING = {0xffffffffu, 0};
DEVICE Cut all_from(u32 key) { return {key - 1, 0}; }

DEVICE u32 lanes_below(int lane) { return (1u << lane) - 1; }

// Two stores to shared memory, or none, without a branch.
DEVICE void store_if(bool wanted, float *score, float x, unsigned char *block, int number) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %4, 0; @p st.shared.f32 [%0], %1; @p st.shared.u8 [%2], %3;}" ::"r"(
                   (u32)__cvta_generic_to_shared(score)),
               "f"(x), "r"((u32)__cvta_generic_to_shared(block)), "r"(number), "r"((u32)wanted)
               : "memory");
}
DEVICE void store_if(bool wanted, float *score, float x, u16 *block, int number) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %4, 0; @p st.shared.f32 [%0], %1; @p st.shared.u16 [%2], %3;}" ::"r"(
                   (u32)__cvta_generic_to_shared(score)),
               "f"(x), "r"((u32)__cvta_generic_to_shared(block)), "h"((u16)number), "r"((u32)wanted)
               : "memory");
}

// --- a warp a row -----------------------------------------------------------------------------------------------------
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

// --- a thread block a row ---------------------------------------------------------------------------------------------
// How a row is gone through: each warp narrows its part to a list; the keys stay in registers; they are read whenever needed.
enum Way { LISTS, RESIDENT, STREAMED };

// Sizes of a thread block. TILES keys of a thread are loaded together. A slot is 32 neighbouring blocks, one for each lane; with
// lists a warp's slots are neighbours.
template <int THREADS_, int TILES_, Way WAY_> struct Layout {
  static constexpr int THREADS = THREADS_, TILES = TILES_, WARPS = THREADS / 32;
  static constexpr Way WAY = WAY_;
  static constexpr bool STAYS = WAY != STREAMED;
  static constexpr int BINS = 2 * THREADS;    // of a digit of a key; also the slots of the longest row
  static constexpr int DIGIT = THREADS == 1024 ? 11 : THREADS == 512 ? 10 : THREADS == 256 ? 9 : 8;
  static constexpr int MAX_BLOCKS = STAYS ? TILES * THREADS : BINS / WARPS * THREADS;
  static_assert(BINS == 1 << DIGIT && MAX_BLOCKS <= BINS * 32, "two bins a thread");

  static DEVICE_MEMBER int slot(int tile) {
    const int warp = threadIdx.x >> 5;
    return WAY == LISTS ? warp * TILES + tile : tile * WARPS + warp;
  }
  static DEVICE_MEMBER int block(int tile) {
    return WAY == LISTS ? slot(tile) * 32 + (threadIdx.x & 31) : tile * THREADS + threadIdx.x;
  }
};

constexpr int CANDIDATES = 128; // that are ranked; where more reach the floor, most of them are equal

// For the search by digits.
template <typename L> struct SearchShared {
  alignas(16) u32 bins[L::BINS]; // two of them are read at once
  u32 by_warp[L::WARPS];
  u32 keys;          // that may be chosen
  int bin;           // in which the wanted key lies; -1: all keys are wanted
  u32 before, in_it; // keys of the bins before that one, and in it
};

// For ranking what reaches the floor.
template <typename L> struct BlockShared : SearchShared<L> {
  alignas(16) u32 largest[GROUPS];
  alignas(16) u64 candidates[CANDIDATES]; // the key above ~block, 0 where there is none: the better, the larger
  alignas(16) u32 chosen[GROUPS];         // by rank: ~block, or 0
  u32 floor, count;
};

// Each warp's list, and what all of them make. Rows of which more reach a floor than there is room for are searched: most are equal.
template <typename L> struct ListsShared : SearchShared<L> {
  WarpShared<L::TILES, unsigned char, 128> of_warp[L::WARPS];
  WarpShared<L::WARPS, u16> best;
};

// Sum of what lies before the thread's two bins. Clears them if told so; ends with no barrier after the bins' last use.
template <typename L> DEVICE u32 sum_before(SearchShared<L> &s, bool clear, u32 &first, u32 &second) {
  const int t = threadIdx.x, warp = t >> 5, lane = t & 31;
  const uint2 mine = ((const uint2 *)s.bins)[t];
  first = mine.x, second = mine.y;
  if (clear) ((uint2 *)s.bins)[t] = make_uint2(0, 0);
  u32 sum = first + second;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const u32 other = __shfl_up_sync(ALL_LANES, sum, d);
    if (lane >= d) sum += other;
  }
  if (lane == 31) s.by_warp[warp] = sum;
  __syncthreads();
  return __reduce_add_sync(ALL_LANES, lane < warp ? s.by_warp[lane] : 0) + sum - first - second;
}

template <typename L> struct BlockRow {
  static constexpr int THREADS = L::THREADS, TILES = L::TILES;
  static constexpr bool STAYS = L::STAYS;
  const float *score; // of the thread's first block
  i64 step;           // to that of the next tile
  int blocks;
  int tiles = 0; // of blocks that exist for the token; counted where they do not stay
  u32 key[TILES];

  __device__ __forceinline__ BlockRow(const TopkParams &p, const Row &row) {
    score = row.score + L::block(0) * p.score_block, step = (L::block(1) - L::block(0)) * p.score_block, blocks = p.blocks;
  }
  __device__ __forceinline__ void load(int base, float (&x)[TILES]) const {
    const float *at = score + base * step;
#pragma unroll
    for (int j = 0; j < TILES; j++, at += step) x[j] = L::block(base + j) < blocks ? *at : 0.f;
  }
  __device__ __forceinline__ void make_keys(int base, const float (&x)[TILES], const Forced &forced) {
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      const u32 open = key_of(x[j]);
      key[j] = forced.open(L::block(base + j)) ? open : 0;
    }
  }
  // Calls `use(tile, key)` for all tiles, and empty ones to the next multiple of TILES. Where the row does not fit the
  // registers its scores are read again.
  template <typename Use> __device__ __forceinline__ void for_each(const Forced &forced, Use use) {
    for (int base = 0; STAYS ? base == 0 : base < tiles; base += TILES) {
      if (!STAYS) {
        float x[TILES];
        load(base, x);
        make_keys(base, x, forced);
      }
#pragma unroll
      for (int j = 0; j < TILES; j++) use(base + j, key[j]);
    }
  }

  // Fills `s.chosen` and returns true, unless the row needs a search; `least` is then a key that enough reach. All threads of
  // the block call it. What it leaves in shared memory is behind a barrier.
  __device__ __forceinline__ bool choose(const Forced &forced, BlockShared<L> &s, u32 &least) {
    const int t = threadIdx.x, lane = t & 31;
    least = 1;
    if ((u32)forced.wanted - 1 >= GROUPS) return false;
    u32 largest = 0;
    for_each(forced, [&](int, u32 key) { largest = max(largest, key); });
    if (largest) atomicMax(&s.largest[lane], largest);
    __syncthreads();
    if (t < 32) {
      const u32 mine = s.largest[lane];
      const bool among = count_larger(s.largest, mine) < (float)forced.wanted;
      const u32 floor = __reduce_min_sync(ALL_LANES, among ? mine : 0xffffffffu);
      if (lane == 0) s.floor = max(floor, 1u);
    }
    __syncthreads();
    least = s.floor;
    if (largest >= least)
      for_each(forced, [&](int tile, u32 key) {
        if (key < least) return;
        const u32 at = atomicAdd(&s.count, 1);
        if (at >= CANDIDATES) return;
        volatile u32 *half = (u32 *)(s.candidates + at); // written as one, every key would hold a pair of registers
        half[0] = ~(u32)L::block(tile), half[1] = key;
      });
    __syncthreads();
    const u32 n = s.count;
    if (n > CANDIDATES) return false;
    if (t < n) {
      const u64 mine = s.candidates[t];
      int rank = 0;
#pragma unroll 4
      for (int i = 0; i < n; i += 2) {
        const ulonglong2 two = *(const ulonglong2 *)(s.candidates + i);
        rank += (two.x > mine) + (two.y > mine);
      }
      if (rank < forced.wanted) s.chosen[rank] = (u32)mine;
    }
    __syncthreads();
    return true;
  }

  // All threads of the block call it, with empty bins and a barrier behind them; leaves the bins so, with a barrier.
  __device__ __forceinline__ Cut search(const Forced &forced, SearchShared<L> &s, u32 least) {
    constexpr int DIGIT = L::DIGIT, BINS = L::BINS, FIRST = 32 - DIGIT;
    if (forced.wanted == 0) return NOTHING;
    // The wanted-th largest of all keys is the wanted-th largest of those from `least` to `least + span`.
    u32 span = 0xffffffffu - least, wanted = forced.wanted;
#pragma unroll 1
    for (int shift = FIRST;; shift = max(shift - DIGIT, 0)) { // the last digit begins with bits that are settled
      for_each(forced, [&](int, u32 key) {
        if (key - least <= span) atomicAdd(&s.bins[BINS - 1 - ((key >> shift) & (BINS - 1))], 1u);
      });
      __syncthreads();
      u32 first, second;
      const u32 before = sum_before(s, true, first, second);
      if (shift == FIRST && threadIdx.x == THREADS - 1) s.keys = before + first + second;
      if (before < wanted && wanted <= before + first + second) {
        const bool in_first = wanted <= before + first;
        s.bin = 2 * threadIdx.x + !in_first;
        s.before = in_first ? before : before + first;
        s.in_it = in_first ? first : second;
      }
      __syncthreads();
      if (s.bin < 0) return all_from(1); // so few are there
      least = (shift == FIRST ? 0 : least) | (u32)(BINS - 1 - s.bin) << shift, span = (1u << shift) - 1;
      wanted -= s.before;
      if (s.in_it == wanted) return all_from(least);
      if (shift == 0) return {least, (int)wanted};
    }
  }
};

// By digits of the keys; the whole thread block calls it.
template <typename L>
DEVICE void select_by_search(const TopkParams &p, const Row &row, const Forced &forced, BlockRow<L> &keys, SearchShared<L> &s,
                             u32 least) {
  constexpr int THREADS = L::THREADS;
  const int t = threadIdx.x, lane = t & 31;
  const Cut cut = keys.search(forced, s, least);

  // Chosen keys and keys equal to the cut, the latter in the upper half, by slot: in the order of blocks.
  auto is_above = [&](int tile, u32 key) { return forced.holds(L::block(tile)) || key > cut.floor; };
  keys.for_each(forced, [&](int tile, u32 key) {
    const u32 above = __ballot_sync(ALL_LANES, is_above(tile, key)), same = __ballot_sync(ALL_LANES, key == cut.floor);
    if (lane == 0) s.bins[L::slot(tile)] = __popc(above) | (cut.ties ? __popc(same) << 16 : 0);
  });
  __syncthreads();
  u32 first, second;
  const u32 before = sum_before(s, false, first, second);
  ((uint2 *)s.bins)[t] = make_uint2(before, before + first); // a thread's own bins: no other has read them
  __syncthreads();
  keys.for_each(forced, [&](int tile, u32 key) {
    const bool above = is_above(tile, key), tie = cut.ties && key == cut.floor;
    const u32 all_above = __ballot_sync(ALL_LANES, above), all_ties = __ballot_sync(ALL_LANES, tie);
    const u32 counts = s.bins[L::slot(tile)];
    const int ties = min((counts >> 16) + __popc(all_ties & lanes_below(lane)), (u32)cut.ties);
    const int at = (counts & 0xffff) + __popc(all_above & lanes_below(lane)) + ties;
    if (above || (tie && ties < cut.ties)) row.output[at] = L::block(tile);
  });
  const int chosen = forced.count() + min((u32)forced.wanted, s.keys);
#pragma unroll 1
  for (int i = chosen + t; i < p.topk; i += THREADS) row.output[i] = -1;
}

// What a thread block does before it waits for the previous kernel.
template <typename L> DEVICE void prepare(const TopkParams &p, const Row &row, SearchShared<L> &s) {
  const int t = threadIdx.x;
  if (L::STAYS) prefetch_scores(p, row, t);
  if (t == 0) prefetch_extent(p, row);
  ((uint2 *)s.bins)[t] = make_uint2(0, 0);
  if (t == 0) s.bin = -1, s.keys = 0;
  __syncthreads();
  let_next_kernel_start();
  wait_for_previous_kernel();
}

// Each warp narrows its part of the row to a list, and the first one the lists to the result.
template <typename L> DEVICE void select_by_lists(const TopkParams &p, ListsShared<L> &s) {
  constexpr int TILES = L::TILES, WARPS = L::WARPS;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const Row row(p, blockIdx.x);
  const BlockRow<L> read(p, row);
  prepare(p, row, s);
  WarpRow<TILES> mine;
  read.load(0, mine.score);
  const Forced forced(p, extent_of(p, row)); // read while the scores are under way
#pragma unroll
  for (int j = 0; j < TILES; j++) {
    mine.block[j] = j * 32 + lane; // of the warp's
    if (!forced.open(L::block(j))) mine.score[j] = __uint_as_float(MINUS_INFINITY_BITS);
  }
  const u32 n = mine.narrow(s.of_warp[warp], forced.wanted, lane);
  if (!__syncthreads_or(n > 32)) {
    if (warp > 0) return;
    WarpRow<WARPS> best;
#pragma unroll
    for (int w = 0; w < WARPS; w++)
      best.score[w] = s.of_warp[w].score[lane], best.block[w] = w * TILES * 32 + s.of_warp[w].block[lane];
    best.write_narrowed(p, row, forced, s.best, lane);
    return;
  }
  u32 index; // read anew, or all that was made of it would have to be kept
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  const Row same(p, index);
  BlockRow<L> keys(p, same);
  float x[TILES];
  keys.load(0, x);
  keys.make_keys(0, x, forced);
  select_by_search(p, same, forced, keys, s, 1);
}

template <typename L> DEVICE void select_by_block(const TopkParams &p, BlockShared<L> &s) {
  constexpr int THREADS = L::THREADS, TILES = L::TILES;
  const int t = threadIdx.x;
  const Row row(p, blockIdx.x);
  BlockRow<L> keys(p, row);
  if (t < CANDIDATES) s.candidates[t] = 0;
  if (t < GROUPS) s.largest[t] = s.chosen[t] = 0;
  if (t == 0) s.count = 0;
  prepare(p, row, s);
  float x[TILES];
  if (L::STAYS) keys.load(0, x);
  const Forced forced(p, extent_of(p, row)); // read while the scores are under way
  if (!L::STAYS) keys.tiles = (forced.extent + THREADS - 1) / THREADS;
  if (L::STAYS) keys.make_keys(0, x, forced);
  u32 least;
  if (!keys.choose(forced, s, least)) return select_by_search(p, row, forced, keys, s, least);
  const int found = min(s.count, (u32)forced.wanted);
  if (t < GROUPS && s.chosen[t]) row.output[forced.begin + (int)count_larger(s.chosen, s.chosen[t])] = ~s.chosen[t];
  forced.write_rest(row.output, p.topk, found, t, THREADS);
}

extern "C" __global__ void __launch_bounds__(128, 8) msa_topk_1024(const __grid_constant__ TopkParams p) {
  __shared__ ListsShared<Layout<128, 8, LISTS>> shared;
  select_by_lists(p, shared);
}
// Where tokens lie innermost: more threads, each with fewer sectors.
extern "C" __global__ void __launch_bounds__(256, 4) msa_topk_tokens_1024(const __grid_constant__ TopkParams p) {
  __shared__ ListsShared<Layout<256, 4, LISTS>> shared;
  select_by_lists(p, shared);
}
extern "C" __global__ void __launch_bounds__(512, 2) msa_topk_8192(const __grid_constant__ TopkParams p) {
  __shared__ BlockShared<Layout<512, 16, RESIDENT>> shared;
  select_by_block(p, shared);
}
extern "C" __global__ void __launch_bounds__(1024, 1) msa_topk_65536(const __grid_constant__ TopkParams p) {
  __shared__ BlockShared<Layout<1024, 8, STREAMED>> shared;
  select_by_block(p, shared);
}
