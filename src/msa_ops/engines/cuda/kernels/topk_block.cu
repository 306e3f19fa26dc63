// Selection where a row is a thread block's.

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
  alignas(16) u32 largest[SCORE_GROUPS];
  alignas(16) u64 candidates[CANDIDATES]; // the key above ~block, 0 where there is none: the better, the larger
  alignas(16) u32 chosen[SCORE_GROUPS];   // by rank: ~block, or 0
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
    if ((u32)forced.wanted - 1 >= SCORE_GROUPS) return false;
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
  if (t < SCORE_GROUPS) s.largest[t] = s.chosen[t] = 0;
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
  if (t < SCORE_GROUPS && s.chosen[t]) row.output[forced.begin + (int)count_larger(s.chosen, s.chosen[t])] = ~s.chosen[t];
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
