// Index scores of decoding steps: a request has one row of blocks, which thread blocks of its own score.
//
// Which blocks they are follows from a thread block's number and its request alone, so that pages can be looked up beside the
// request. A team has one block under way, whose keys wait in shared memory: registers do not bound how many thread blocks a
// multiprocessor holds, and these keep the memory busy. Where there are more than fit at once, the machine hands them out as
// others end, which evens out the end.
//
// Where codes are multiplied (score_codes.cuh) registers do bound them: four thread blocks a multiprocessor of 9.0. There a set of
// 32 keys is begun with as soon as it has come. Where rows are shared, a later one, of this block or the next, is asked for just
// before, in the place of one that all lanes have read. Whether a block can be taken without a branch depends on the one after it
// too, so pages are read a block ahead.
//
// Some thread blocks settle what to begin with before the previous kernel has ended, by lengths and pages as they are then. They
// ask for it right after the wait, read lengths and pages again beside it, and start over where these have changed.

// The largest scores of a warp's keys of a block, for as many columns.
template <int COLUMNS> struct RowScorer {
  static constexpr bool FEW = !SCALED && COLUMNS <= (ROW_BYTES == 128 ? 16 : 8); // queries: they may wait in registers
  static constexpr bool BY_SETS = false;                                         // or a block at a time
  typedef WideningTeam T;
  typedef QueryRows<COLUMNS> Queries;
  typedef BlockCopier<T> Copier;
  typedef NoPlaces Places;
  typedef RowShared<Shared<COLUMNS>, T> Memory;
  float best[COLUMNS / 4];

  DEVICE_MEMBER void score(const Memory &shared, int block, bool all_seen, bool present, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < COLUMNS / 4; i++) best[i] = NEG_INF;
    if (!present) return;
#pragma unroll
    for (int i = 0; i < WARP_TILES; i++) {
      Part<1> part;
      read_keys<T>(shared.keys[warp], part, i, lane);
      if constexpr (SCALED) {
        const int half = (lane & 3) >> 1;
        part.scales = shared.scales[warp][half][scale_place(half, 8 * (i >> 1) + (lane >> 2))];
      }
      score_part(shared, part, i, block, all_seen, warp, lane, best);
    }
  }

  // Writes them, with those of the team's other warps.
  DEVICE_MEMBER void give(const ScoreParams &p, Memory &shared, const Run &run, int block, int warp, int lane) {
    reduce_lanes<COLUMNS / 4>(best, lane);
    const u32 turn = block / TEAMS & 1;
    put_columns(best, shared.best[turn][warp], lane);
    team_sync(warp / TEAM); // two buffers: whoever writes this one again has passed the next block's barrier
    const int cells = p.reduce ? run.tokens : run.tokens * run.heads;
    give_scores(p, shared, run, turn, block, cells, p.reduce ? run.heads : 1);
  }
};

// Blocks of a request that a thread block scores, one for each team at a time.
struct RowShare {
  int first, last;

  // The part of a row of `blocks` that the `slot`-th of the request's thread blocks has, which scores `count` at a time. Parts are
  // even, or get smaller: then the large ones of all requests come first, and the small ones even out the end. The n-th begins at
  // n (step - n bend) of 2^31, rounded up (score.py, `row_slope`): the first has something to do if there is anything.
  static DEVICE_MEMBER RowShare part(const ScoreParams &p, u32 slot, int blocks, int count) {
    const u32 twice = (u32)(blocks + count - 1) / (u32)count * 2;
    auto start = [&](u32 n) { return (int)(__umulhi(twice, n * (p.row_step - n * p.row_bend)) + (n > 0)) * count; };
    return {start(slot), min(start(slot + 1), blocks)};
  }
  // Where there is a thread block for each `count` blocks of a row that is as long as it can be.
  static DEVICE_MEMBER RowShare one(u32 slot, int blocks, int count) {
    return {(int)slot * count, min((int)(slot + 1) * count, blocks)};
  }
};

// Asks L2 for a block of keys that lie side by side, by one thread, or for the first token's queries, by a warp, with the scales of
// the first of them. Hints, by what is known before the wait.
DEVICE void prefetch_keys(const ScoreParams &p, const Run &run, int block, int page) {
#ifdef HAS_CLUSTER
  const int keys = min(run.highest - block * BLOCK_KEYS, BLOCK_KEYS);
  if (p.k_row == ROW_BYTES && has_page(p, page)) prefetch_bytes(first_key(p, run, block, page), keys * ROW_BYTES);
#endif
}
DEVICE void prefetch_query(const ScoreParams &p, const Run &run, int lane) {
  if (lane < run.heads) prefetch_line(p.q + run.token * p.q_token + (run.first_head + lane) * p.q_head);
  if constexpr (SCALED) // two lines, of the first 64 dims and the last, with those of the next heads as a rule
    if (lane >= 30)
      prefetch_line(p.q_scale + tiled_scale((i64)run.token * (p.kv_heads * p.group) + run.first_head, (lane - 30) * 4));
}

// ONE: teams have no more than a block each.
template <typename Scorer, bool ONE> DEVICE void score_row(const ScoreParams &p) {
  typedef typename Scorer::T T;
  constexpr bool FEW = Scorer::FEW, BY_SETS = Scorer::BY_SETS;
  if constexpr (BY_SETS) static_assert(Scorer::ONE == ONE);
  __shared__ typename Scorer::Memory shared;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, team = warp / T::WARPS_EACH;
  const bool fills = blockIdx.x < p.fill_blocks;
  const u32 number = blockIdx.x - p.fill_blocks;
  const u32 slot = p.row_requests.quotient(number); // of all requests the first parts come first
  const int index = number - slot * p.row_requests.value;
  auto share_of = [&](int blocks) {
    return ONE ? RowShare::one(slot, blocks, T::COUNT) : RowShare::part(p, computed_anew(slot), blocks, T::COUNT);
  };
  const typename Scorer::Places places(shared, warp, lane);
  bool present; // the block under way has a page; by sets the copier tells: there are registers to keep it in
  auto copier_of = [&](const Run &run, int block, int page) {
    return typename Scorer::Copier(p, run, block, page, warp, lane);
  };
  auto ask = [&](typename Scorer::Copier &copier, const Run &run) {
    if constexpr (BY_SETS) {
      copier.template copy_first<Scorer::AHEAD>(p, places, warp, lane);
    } else {
      present = copier.present(p);
      if (present) copier.copy(p, run, shared, warp, lane);
    }
  };

  Run run;
  run.index = index, run.before = run.more = false;
  run.take_heads(p, 0);
  auto take = [&](const Request &request, u32 tile) {
    run.take_tokens(p, request, tile);
    const RowShare share = share_of(run.tokens > 0 ? Request::blocks(p, run.highest) : 0);
    run.first = share.first, run.last = share.last;
  };
  int first = share_of(p.row_blocks).first + team, guessed_page = -1; // block of a request that is as long as it can be
  bool guessed = false;
  typename Scorer::Queries rows;
  typename Scorer::Copier copier;
#ifdef HAS_CLUSTER
  if (number < (u32)p.early) {
    const Request::Words words(p, index, read_early);
    guessed_page = page_of(p, index, first, read_early);
    take(Request(p, words), 0);
    if (!ONE && run.first + team != first) {
      first = run.first + team;
      guessed_page = page_of(p, index, first, read_early);
    }
    guessed = first < run.last;
    if (guessed) {
      // By sets one thread block asks for a request's queries, that of the largest part: hundreds that asked for one line would
      // wait for one another.
      const bool asks = BY_SETS ? warp == 0 && slot == 0 : warp == WARPS - 1;
      if (FEW && asks) prefetch_query(p, run, lane);
      if (number < (u32)p.hinting && threadIdx.x % T::THREADS_EACH == 0) prefetch_keys(p, run, first, guessed_page);
      if (BY_SETS) { // elsewhere registers are short
        rows.find(p, run);
        copier = copier_of(run, first, guessed_page);
      }
    }
  }
#endif
  // Many thread blocks leave the next kernel no room until they end: it had better be in line before. Few leave it room, and all of
  // them ask early: what starts then would take from these.
  const bool all_ask = p.hinting + p.fill_blocks >= gridDim.x;
  if (!all_ask) let_next_kernel_start();
  wait_for_previous_kernel();
  if (all_ask) let_next_kernel_start();
  if (fills) {
    fill_unseen(p);
    return;
  }
  // By sets registers are short: what was computed before the wait had better not stay in them.
  const int same_index = BY_SETS ? computed_anew(index) : index;
  // Reads in this order: those behind the keys of many thread blocks arrive after them.
  int page = page_of(p, same_index, first);
  // Of the block after the present one.
  int page_ahead = BY_SETS && !ONE && guessed ? page_of(p, same_index, first + T::COUNT) : -1;
  const Request::Words words(p, same_index, read_now);
  if (guessed && FEW) rows.load(p, run);
  if (guessed) {
    if (!BY_SETS) copier = copier_of(run, first, guessed_page);
    ask(copier, run);
  }
  Request request(p, words);
  if (guessed && !(request == run.request && page == guessed_page)) {
    guessed = false;
    wait_for_copies<0>(); // to where others go
  }
  u32 tile = 0;
  do {
    const bool anew = !guessed || tile > 0;
    if (!BY_SETS || anew) take(request, tile); // by sets a guess that held has settled it: there are registers to keep it in
    if (run.first >= run.last) continue;
    int block = run.first + team;
    const bool any = block < run.last;
    if (anew && any) {
      copier = copier_of(run, block, block == first ? page : page_of(p, BY_SETS || !ONE ? run.index : index, block));
      ask(copier, run);
    }
    if (anew || !FEW) {
      rows.find(p, run);
      rows.load(p, run);
    }
    if (tile > 0) __syncthreads(); // the tile before is done with what is written now
    if (threadIdx.x == 0) shared.run[0] = run;
    rows.store(p, run, shared);
    __syncthreads();
    const Run &same = shared.run[0]; // which leaves its registers to others
    Scorer scorer;
    if constexpr (BY_SETS) scorer.begin(shared, lane);
    auto page_in_share = [&](int block) { return !ONE && block < same.last ? page_of(p, same.index, block) : -1; };
    if (BY_SETS && anew) page_ahead = page_in_share(block + T::COUNT);
#pragma unroll 1
    for (bool left = ONE ? any : block < same.last; left; left = !ONE && (block += T::COUNT) < same.last) {
      const int next = block + T::COUNT;
      if constexpr (BY_SETS) {
        const bool more = !ONE && next < same.last;
        const bool all_seen = block * BLOCK_KEYS <= same.lowest - BLOCK_KEYS; // by all tokens
        typedef typename Scorer::Copier Copier;
        // Bit by bit: one stretch of code, and fewer registers.
        const bool straight = all_seen & Copier::side_by_side(p, copier.last) &
                              (!more | Copier::side_by_side(p, Copier::last_seen(p, same, next, page_ahead)));
        auto follow = [&, page = page_ahead] { return copier_of(same, next, page); };
        page_ahead = page_in_share(next + T::COUNT);
        scorer.take(p, shared, places, copier, follow, more, straight, block, all_seen, warp, lane);
      } else {
        const int page = !ONE && next < same.last ? page_of(p, same.index, next) : -1;
        wait_for_copies<0>();
        __syncwarp(); // the other lanes' copies
        const bool all_seen = block * BLOCK_KEYS <= same.lowest - BLOCK_KEYS; // by all tokens
        scorer.score(shared, block, all_seen, present, warp, lane);
        if (!ONE && next < same.last) {
          __syncwarp(); // all lanes have read what is overwritten now
          copier = copier_of(same, next, page);
          ask(copier, same);
        }
      }
      scorer.give(p, shared, same, block, warp, lane);
    }
    run = same;
    // So that these take no registers beside the products. Which of them where, by what the compiler then does not spill: told more, or
    // where teams have one block, it spills elsewhere.
    if constexpr (BY_SETS) request = run.request, guessed = false;
    if constexpr (BY_SETS || !ONE) first = page = -1;
    // One tile, but where a request has more tokens than promised.
  } while (++tile < p.tile_tokens.quotient((u32)request.queries + p.tile_tokens.value - 1));
}

// Elsewhere than on 9.0, where registers were counted, a multiprocessor is taken to run a third fewer thread blocks, with NVFP4
// keys half as many. score.py knows the rule (`Operands.held`).
constexpr int room(int there) {
#if __CUDA_ARCH__ == 900
  return there;
#else
  return SCALED ? there / 2 : there * 2 / 3;
#endif
}

// With codes rows have 112 registers a thread instead of the 128 that four thread blocks could have. Beside these a thread block of
// most selections finds room, and is in line when the scores are done: by warps, of up to 1,024 blocks, or by clusters; not by tokens.
#define BOUNDS(ROOM) __launch_bounds__(THREADS, room(ROOM))
#if __CUDA_ARCH__ == 900
#define CODE_ROW_BOUNDS __maxnreg__(112)
#else
#define CODE_ROW_BOUNDS BOUNDS(ROOM_ROW_4)
#endif

#define ENTRY(KIND, BOUNDS, COLUMNS, ONE, SCORER)                                                             \
  extern "C" __global__ void BOUNDS msa_score_##KIND##_##COLUMNS(const __grid_constant__ ScoreParams p) {     \
    score_row<SCORER, ONE>(p);                                                                                \
  }
#define ENTRIES(COLUMNS)                                                                                      \
  ENTRY(one, BOUNDS(ROOM_ONE_##COLUMNS), COLUMNS, true, RowScorer<COLUMNS>)                                   \
  ENTRY(row, BOUNDS(ROOM_ROW_##COLUMNS), COLUMNS, false, RowScorer<COLUMNS>)
#ifdef ROOM_ROW_4
ENTRY(one, BOUNDS(ROOM_ONE_4), 4, true, CodeScorer<2>)
ENTRY(row, CODE_ROW_BOUNDS, 4, false, CodeScorer<1>)
#endif
ENTRIES(8)
ENTRIES(16)
#ifdef ROOM_ROW_32
ENTRIES(32)
#endif
