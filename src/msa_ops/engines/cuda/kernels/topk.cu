// Block selection: the blocks of keys that a token attends, from their index scores. A row is a token and an index head.
//
// A score becomes a 32-bit key that ascends with it, 0 for what is never chosen. The search finds where the row's largest
// keys begin, and everything from there on is written in the order of blocks: nothing is sorted. Blocks that are chosen
// whatever their score take no part in the search. Up to 256 blocks a row is one warp's, with its keys in registers; longer
// rows are a thread block's, which counts keys by their digits in shared memory.
typedef unsigned int u32;
typedef long long i64;

#define DEVICE static __device__ __forceinline__
#define ALL_LANES 0xffffffffu

// Division by a number known at launch, for dividends below 2^31.
struct Divisor {
  u32 value, multiplier, shift; // multiplier 0: a divisor of 1
  __device__ __forceinline__ u32 quotient(u32 n) const { return multiplier ? __umulhi(n, multiplier) >> shift : n; }
};

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

// The previous kernel on the stream has finished and its writes are visible; nothing may be read or written before.
DEVICE void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Ascends with the score, -0 as 0; 0 for -inf and NaN. Others lie between those of the lowest number and of +inf.
constexpr u32 LOWEST_KEY = 0x00800000u, INFINITY_KEY = 0xff800000u;

DEVICE u32 key_of(float score) {
  const u32 bits = __float_as_uint(score + 0.f); // which makes -0 to 0
  const u32 key = bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
  return key - LOWEST_KEY <= INFINITY_KEY - LOWEST_KEY ? key : 0;
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
};

// Keys above `floor` are chosen, and of those equal to it the first `ties`.
struct Cut {
  u32 floor;
  int ties;
};

constexpr Cut NOTHING = {0xffffffffu, 0};
DEVICE Cut all_from(u32 key) { return {key - 1, 0}; }

DEVICE u32 lanes_below(int lane) { return (1u << lane) - 1; }

// --- a warp a row -----------------------------------------------------------------------------------------------------
// Lane l holds blocks l, l + 32, ...
template <int KEYS> struct WarpRow {
  u32 key[KEYS];

  __device__ __forceinline__ u32 count_from(u32 least) const {
    u32 n[4] = {}; // one chain of additions would take longer than the comparisons
#pragma unroll
    for (int j = 0; j < KEYS; j++) n[j % 4] += key[j] >= least;
    return __reduce_add_sync(ALL_LANES, n[0] + n[1] + (n[2] + n[3]));
  }

  __device__ __forceinline__ Cut search(u32 wanted) const {
    if (wanted == 0) return NOTHING;
    u32 largest = 0;
#pragma unroll
    for (int j = 0; j < KEYS; j++) largest = max(largest, key[j]);
    if (count_from(1) <= wanted) return all_from(1);
    // The wanted-th largest key lies between these two: 32 keys are at least as large as the lower one.
    const u32 high = __reduce_max_sync(ALL_LANES, largest);
    const u32 low = wanted <= 32 ? __reduce_min_sync(ALL_LANES, largest) : 0;
    const int differing = 32 - __clz(high ^ low); // low bits that are not the same in both
    u32 cut = differing < 32 ? low >> differing << differing : 0;
    for (int bit = differing - 1; bit >= 0; bit--) {
      const u32 candidate = cut | 1u << bit, n = count_from(candidate);
      if (n == wanted) return all_from(candidate);
      if (n > wanted) cut = candidate;
    }
    return {cut, (int)(wanted - count_from(cut + 1))};
  }
};

template <int KEYS> DEVICE void select_by_warp(const TopkParams &p) {
  const int lane = threadIdx.x & 31;
  const u32 index = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
  const Row row(p, min(index, (u32)p.rows - 1));
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (index >= (u32)p.rows) return;
  float score[KEYS];
  const float *at = row.score + lane * p.score_block;
#pragma unroll
  for (int j = 0; j < KEYS; j++, at += 32 * p.score_block) score[j] = j * 32 + lane < p.blocks ? *at : 0.f;
  const Forced forced(p, extent_of(p, row)); // read while the scores are under way
  WarpRow<KEYS> keys;
#pragma unroll
  for (int j = 0; j < KEYS; j++) keys.key[j] = forced.open(j * 32 + lane) ? key_of(score[j]) : 0;
  const Cut cut = keys.search(forced.wanted);
  int written = 0, equal = 0; // in blocks before j * 32
#pragma unroll
  for (int j = 0; j < KEYS; j++) {
    const int block = j * 32 + lane;
    bool chosen = forced.holds(block) || keys.key[j] > cut.floor;
    if (cut.ties) {
      const u32 same = __ballot_sync(ALL_LANES, keys.key[j] == cut.floor);
      chosen |= keys.key[j] == cut.floor && equal + __popc(same & lanes_below(lane)) < cut.ties;
      equal += __popc(same);
    }
    const u32 all = __ballot_sync(ALL_LANES, chosen);
    if (chosen) row.output[written + __popc(all & lanes_below(lane))] = block;
    written += __popc(all);
  }
#pragma unroll 1
  for (int i = written + lane; i < p.topk; i += 32) row.output[i] = -1;
}

extern "C" __global__ void __launch_bounds__(128) msa_topk_256(const __grid_constant__ TopkParams p) { select_by_warp<8>(p); }

// --- a thread block a row ---------------------------------------------------------------------------------------------
constexpr int THREADS = 1024, WARPS = THREADS / 32;
constexpr int TILES = 8;   // keys of a thread that are loaded together; block tile * THREADS + t is thread t's
constexpr int BINS = 2048; // of 11 bits of a key; also the (tile, warp) pairs of the longest row
constexpr int MAX_BLOCKS = BINS / WARPS * THREADS;
static_assert(BINS == 2 * THREADS && MAX_BLOCKS == 65536, "two bins a thread");

struct BlockShared {
  alignas(8) u32 bins[BINS]; // two of them are read at once
  u32 by_warp[WARPS];
  u32 keys;          // that may be chosen
  int bin;           // in which the wanted key lies; -1: all keys are wanted
  u32 before, in_it; // keys of the bins before that one, and in it
};

// Sum of what lies before the thread's two bins. Clears them if told so; ends with no barrier after the bins' last use.
DEVICE u32 sum_before(BlockShared &s, bool clear, u32 &first, u32 &second) {
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

template <bool RESIDENT> struct BlockRow {
  const float *score; // of the thread's first block
  i64 step;           // to that of the next tile
  int blocks;
  int tiles; // of blocks that exist for the token
  u32 key[TILES];

  __device__ __forceinline__ BlockRow(const TopkParams &p, const Row &row) {
    score = row.score + threadIdx.x * p.score_block, step = THREADS * p.score_block, blocks = p.blocks;
  }
  __device__ __forceinline__ void load(int base, float (&x)[TILES]) const {
    const float *at = score + base * step;
#pragma unroll
    for (int j = 0; j < TILES; j++, at += step) x[j] = (base + j) * THREADS + (int)threadIdx.x < blocks ? *at : 0.f;
  }
  __device__ __forceinline__ void make_keys(int base, const float (&x)[TILES], const Forced &forced) {
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      const u32 open = key_of(x[j]);
      key[j] = forced.open((base + j) * THREADS + threadIdx.x) ? open : 0;
    }
  }
  // Calls `use(tile, key)` for all tiles, and empty ones to the next multiple of TILES. Where the row does not fit the
  // registers its scores are read again.
  template <typename Use> __device__ __forceinline__ void for_each(const Forced &forced, Use use) {
    for (int base = 0; RESIDENT ? base == 0 : base < tiles; base += TILES) {
      if (!RESIDENT) {
        float x[TILES];
        load(base, x);
        make_keys(base, x, forced);
      }
#pragma unroll
      for (int j = 0; j < TILES; j++) use(base + j, key[j]);
    }
  }

  // All threads of the block call it, with empty bins and a barrier behind them; leaves the bins so, with a barrier.
  __device__ __forceinline__ Cut search(const Forced &forced, BlockShared &s) {
    if (forced.wanted == 0) return NOTHING;
    // The wanted-th largest of all keys is the wanted-th largest of those from `least` to `least + span`.
    u32 least = 1, span = 0xfffffffeu, wanted = forced.wanted;
#pragma unroll 1
    for (int shift = 21;; shift = shift == 21 ? 10 : 0) { // 11 bits each; the last 11 hold one that is settled
      for_each(forced, [&](int, u32 key) {
        if (key - least <= span) atomicAdd(&s.bins[BINS - 1 - ((key >> shift) & (BINS - 1))], 1u);
      });
      __syncthreads();
      u32 first, second;
      const u32 before = sum_before(s, true, first, second);
      if (shift == 21 && threadIdx.x == THREADS - 1) s.keys = before + first + second;
      if (before < wanted && wanted <= before + first + second) {
        const bool in_first = wanted <= before + first;
        s.bin = 2 * threadIdx.x + !in_first;
        s.before = in_first ? before : before + first;
        s.in_it = in_first ? first : second;
      }
      __syncthreads();
      if (s.bin < 0) return all_from(1); // so few are there
      least = (shift == 21 ? 0 : least) | (u32)(BINS - 1 - s.bin) << shift, span = (1u << shift) - 1;
      wanted -= s.before;
      if (s.in_it == wanted) return all_from(least);
      if (shift == 0) return {least, (int)wanted};
    }
  }
};

template <bool RESIDENT> DEVICE void select_by_block(const TopkParams &p, BlockShared &s) {
  const int t = threadIdx.x, warp = t >> 5, lane = t & 31;
  const Row row(p, blockIdx.x);
  BlockRow<RESIDENT> keys(p, row);
  ((uint2 *)s.bins)[t] = make_uint2(0, 0);
  if (t == 0) s.bin = -1, s.keys = 0;
  __syncthreads();
  wait_for_previous_kernel();
  let_next_kernel_start();
  float x[TILES];
  if (RESIDENT) keys.load(0, x);
  const Forced forced(p, extent_of(p, row)); // read while the scores are under way
  keys.tiles = (forced.extent + THREADS - 1) / THREADS;
  if (RESIDENT) keys.make_keys(0, x, forced);
  const Cut cut = keys.search(forced, s);

  // Chosen keys and keys equal to the cut, the latter in the upper half, by tile and warp: in the order of blocks.
  auto is_above = [&](int tile, u32 key) { return forced.holds(tile * THREADS + t) || key > cut.floor; };
  keys.for_each(forced, [&](int tile, u32 key) {
    const u32 above = __ballot_sync(ALL_LANES, is_above(tile, key)), same = __ballot_sync(ALL_LANES, key == cut.floor);
    if (lane == 0) s.bins[tile * WARPS + warp] = __popc(above) | (cut.ties ? __popc(same) << 16 : 0);
  });
  __syncthreads();
  u32 first, second;
  const u32 before = sum_before(s, false, first, second);
  ((uint2 *)s.bins)[t] = make_uint2(before, before + first); // a thread's own bins: no other has read them
  __syncthreads();
  keys.for_each(forced, [&](int tile, u32 key) {
    const bool above = is_above(tile, key), tie = cut.ties && key == cut.floor;
    const u32 all_above = __ballot_sync(ALL_LANES, above), all_ties = __ballot_sync(ALL_LANES, tie);
    const u32 counts = s.bins[tile * WARPS + warp];
    const int ties = min((counts >> 16) + __popc(all_ties & lanes_below(lane)), (u32)cut.ties);
    const int at = (counts & 0xffff) + __popc(all_above & lanes_below(lane)) + ties;
    if (above || (tie && ties < cut.ties)) row.output[at] = tile * THREADS + t;
  });
  const int chosen = forced.count() + min((u32)forced.wanted, s.keys);
#pragma unroll 1
  for (int i = chosen + t; i < p.topk; i += THREADS) row.output[i] = -1;
}

#if __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000 || __CUDA_ARCH__ == 1030
constexpr int ROWS_AT_ONCE = 2; // a multiprocessor of 2,048 threads
#else
constexpr int ROWS_AT_ONCE = 1;
#endif

extern "C" __global__ void __launch_bounds__(THREADS, ROWS_AT_ONCE) msa_topk_8192(const __grid_constant__ TopkParams p) {
  __shared__ BlockShared shared;
  select_by_block<true>(p, shared);
}
extern "C" __global__ void __launch_bounds__(THREADS, 1) msa_topk_65536(const __grid_constant__ TopkParams p) {
  __shared__ BlockShared shared;
  select_by_block<false>(p, shared);
}
