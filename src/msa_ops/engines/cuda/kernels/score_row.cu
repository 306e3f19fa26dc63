// Index scores of decoding steps: a request has one row of blocks, which thread blocks of its own score.
//
// Which blocks they are follows from a thread block's number and its request alone, so that pages can be looked up beside the
// request. A team has one block under way, whose keys wait in shared memory: registers do not bound how many thread blocks a
// multiprocessor holds, and these keep the memory busy. Where there are more than fit at once, the machine hands them out as
// others end, which evens out the end.
//
// Some thread blocks settle what to begin with before the previous kernel has ended, by lengths and pages as they are then. They
// ask for it right after the wait, read lengths and pages again beside it, and start over where these have changed.
template <int COLUMNS> struct RowShared : Shared<COLUMNS> {
  alignas(128) uint4 keys[WARPS][WARP_TILES * 16][ROW_BYTES / 16];
  uint4 scales[SCALED ? SETS : 1][SCALED ? THREADS : 1]; // NVFP4: of a lane's keys of a set
};

// Where 16 bytes of a key lie: the eight lanes that read together have half of the words of two neighbours.
DEVICE int key_place(int key, int chunk) { return ROW_BYTES == 64 ? chunk : chunk ^ (key & 1) * 4; }

// A warp copies those keys of a block that it is going to read. Keys that no token sees are not read: the last one seen stands
// for them.
DEVICE void copy_keys(const ScoreParams &p, uint4 (&to)[WARP_TILES * 16][ROW_BYTES / 16], const u8 *block, int last, u64 policy,
                      int warp, int lane) {
  constexpr int PARTS = ROW_BYTES / 16, KEYS = WARP_TILES * 16, GROUP = 8 * SETS, COPIES = KEYS * PARTS / 32;
  const int own = GROUP * (warp % TEAM) + lane / PARTS, chunk = lane % PARTS;
  auto place = [&](int i) {
    const int key = i * 32 / PARTS + lane / PARTS;
    return &to[key][key_place(key, chunk)];
  };
  auto row = [](int i) { return i * 32 / PARTS % GROUP + 32 * (i * 32 / PARTS / GROUP); }; // from the lane's first on
  const u8 *const first = block + chunk * 16;
  if (last >= BLOCK_KEYS - 1) {
    const u8 *const from = first + own * (i64)p.k_row;
#pragma unroll
    for (int i = 0; i < COPIES; i++) copy_async<16>(place(i), from + row(i) * (i64)p.k_row, policy);
  } else {
#pragma unroll
    for (int i = 0; i < COPIES; i++) copy_async<16>(place(i), first + min(own + row(i), last) * (i64)p.k_row, policy);
  }
}

// NVFP4: each lane copies the scales of its own keys of a block, from position `first` on.
DEVICE void copy_scales(const ScoreParams &p, uint4 (&to)[SETS][THREADS], const Run &run, int first, int page, u64 policy,
                        int lane) {
  const u8 *const from = p.k_scale + ((lane & 3) >> 1) * 512;
  if (p.paged) {
    const u8 *const own = from + ((i64)page * p.kv_heads + run.kv_head) * SCALE_TILE_BYTES + (first & 127) * 16;
#pragma unroll
    for (int set = 0; set < SETS; set++) copy_async<16>(&to[set][threadIdx.x], own + set * 128, policy);
  } else {
#pragma unroll
    for (int set = 0; set < SETS; set++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        copy_async<4>((u32 *)&to[set][threadIdx.x] + i, from + flat_scale(p, run, first + 8 * set + 32 * i), policy);
  }
}

// The keys of a tile.
DEVICE void read_keys(const uint4 (&from)[WARP_TILES * 16][ROW_BYTES / 16], Part<1> &part, int tile, int lane) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int key = 8 * SETS * (2 * (tile & 1) + half) + 8 * (tile >> 1) + (lane >> 2);
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) part.keys[0][half][i] = from[key][key_place(key, 4 * i + (lane & 3))];
  }
}

// Blocks of a request that a thread block scores, `TEAMS` at a time.
struct RowShare {
  int first, last;

  // The even part of a row of `blocks` that the `slot`-th of the request's thread blocks has.
  static DEVICE_MEMBER RowShare even(const ScoreParams &p, u32 slot, u32 blocks) {
    const u32 each = p.row_parts.quotient(blocks), rest = blocks - each * p.row_parts.value;
    return {(int)(each * slot + p.row_parts.quotient(rest * slot)),
            (int)(each * (slot + 1) + p.row_parts.quotient(rest * (slot + 1)))};
  }
  // Where there is a thread block for each `TEAMS` blocks of a row that is as long as it can be.
  static DEVICE_MEMBER RowShare one(u32 slot, int blocks) {
    return {(int)slot * TEAMS, min((int)(slot + 1) * TEAMS, blocks)};
  }
};

DEVICE bool has_page(const ScoreParams &p, int page) { return !p.paged || (u32)page < (u32)p.pages; }

// Where the keys of a block start.
DEVICE const u8 *first_key(const ScoreParams &p, const Run &run, int block, int page) {
  const i64 from = p.paged ? page * p.k_page : ((i64)run.request.first_key + block * BLOCK_KEYS) * p.k_row;
  return p.k + run.kv_head * p.k_head + from;
}

// Asks L2 for a block of keys that lie side by side, by one thread, or for the first token's queries, by a warp. Hints, by what is
// known before the wait.
DEVICE void prefetch_keys(const ScoreParams &p, const Run &run, int block, int page) {
#ifdef HAS_CLUSTER
  const int keys = min(run.highest - block * BLOCK_KEYS, BLOCK_KEYS);
  if (p.k_row == ROW_BYTES && has_page(p, page)) prefetch_bytes(first_key(p, run, block, page), keys * ROW_BYTES);
#endif
}
DEVICE void prefetch_query(const ScoreParams &p, const Run &run, int lane) {
  if (lane < run.heads) prefetch_line(p.q + run.token * p.q_token + (run.first_head + lane) * p.q_head);
}

// ONE: there is a thread block for each `TEAMS` blocks.
template <int COLUMNS, bool ONE> DEVICE void score_row(const ScoreParams &p) {
  constexpr bool FEW = !SCALED && COLUMNS <= (ROW_BYTES == 128 ? 16 : 8); // queries: they may wait in registers
  __shared__ RowShared<COLUMNS> shared;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, team = warp / TEAM;
  const bool fills = blockIdx.x < p.fill_blocks;
  const u32 number = blockIdx.x - p.fill_blocks;
  const int index = p.row_parts.quotient(number);
  const u32 slot = number - index * p.row_parts.value;
  auto share_of = [&](int blocks) { return ONE ? RowShare::one(slot, blocks) : RowShare::even(p, slot, blocks); };
  bool present; // the block under way has a page
  auto ask = [&](const Run &run, int block, int page) {
    present = has_page(p, page);
    if (!present) return;
    const u64 policy = l2_evict_first();
    const int last_seen = run.highest - block * BLOCK_KEYS - 1;
    copy_keys(p, shared.keys[warp], first_key(p, run, block, page), last_seen, policy, warp, lane);
    if constexpr (SCALED)
      copy_scales(p, shared.scales, run, block * BLOCK_KEYS + first_key_of(warp, lane), page, policy, lane);
    commit_copies();
  };

  Run run;
  run.index = index, run.before = run.more = false;
  run.take_heads(p, 0);
  int first = share_of(p.row_blocks).first + team, guessed_page = -1; // block of a request that is as long as it can be
  bool guessed = false;
#ifdef HAS_CLUSTER
  if (number < (u32)p.early) {
    const Request::Words words(p, index, read_early);
    guessed_page = page_of(p, index, first, read_early);
    run.take_tokens(p, Request(p, words), 0);
    const RowShare share = share_of(run.tokens > 0 ? Request::blocks(p, run.highest) : 0);
    if (!ONE && share.first + team != first) {
      first = share.first + team;
      guessed_page = page_of(p, index, first, read_early);
    }
    guessed = first < share.last;
    if (guessed) {
      if (FEW && warp == WARPS - 1) prefetch_query(p, run, lane);
      if (number < (u32)p.hinting && threadIdx.x % TEAM_THREADS == 0) prefetch_keys(p, run, first, guessed_page);
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
  // Reads in this order: those behind the keys of many thread blocks arrive after them.
  const int page = page_of(p, index, first);
  const Request::Words words(p, index, read_now);
  QueryRows<COLUMNS> rows;
  if (guessed && FEW) rows.load(p, run);
  if (guessed) ask(run, first, guessed_page);
  const Request request(p, words);
  if (guessed && !(request == run.request && page == guessed_page)) {
    guessed = false;
    wait_for_copies<0>(); // to where others go
  }
  u32 tile = 0;
  do {
    run.take_tokens(p, request, tile);
    const RowShare share = share_of(run.tokens > 0 ? Request::blocks(p, run.highest) : 0);
    if (share.first >= share.last) continue;
    run.first = share.first, run.last = share.last;
    int block = share.first + team;
    const bool any = block < share.last;
    const bool anew = !guessed || tile > 0;
    if (anew && any) ask(run, block, block == first ? page : page_of(p, index, block));
    if (anew || !FEW) rows.load(p, run);
    if (tile > 0) __syncthreads(); // the tile before is done with what is written now
    if (threadIdx.x == 0) shared.run[0] = run;
    rows.store(p, run, shared);
    __syncthreads();
    const Run &same = shared.run[0]; // which leaves its registers to others
#pragma unroll 1
    for (bool left = ONE ? any : block < same.last; left; left = !ONE && (block += TEAMS) < same.last) {
      const int next = block + TEAMS, page = !ONE && next < same.last ? page_of(p, same.index, next) : -1;
      wait_for_copies<0>();
      __syncwarp(); // the other lanes' copies
      const bool all_seen = block * BLOCK_KEYS <= same.lowest - BLOCK_KEYS; // by all tokens
      float best[COLUMNS / 4];
#pragma unroll
      for (int i = 0; i < COLUMNS / 4; i++) best[i] = NEG_INF;
      if (present)
#pragma unroll
        for (int i = 0; i < WARP_TILES; i++) {
          Part<1> part;
          read_keys(shared.keys[warp], part, i, lane);
          if constexpr (SCALED) part.scales = shared.scales[i >> 1][threadIdx.x];
          score_part(shared, part, i, block, all_seen, warp, lane, best);
        }
      if (!ONE && next < same.last) {
        __syncwarp(); // all lanes have read what is overwritten now
        ask(same, next, page);
      }
      reduce_lanes<COLUMNS / 4>(best, lane);
      const u32 turn = block / TEAMS & 1;
      put_columns(best, shared.best[turn][warp], lane);
      team_sync(team); // two buffers: whoever writes this one again has passed the next block's barrier
      const int cells = p.reduce ? same.tokens : same.tokens * same.heads;
      give_scores(p, shared, same, turn, block, cells, p.reduce ? same.heads : 1);
    }
    run = same;
    // One tile, but where a request has more tokens than promised.
  } while (++tile < p.tile_tokens.quotient((u32)request.queries + p.tile_tokens.value - 1));
}

// Elsewhere than on 9.0, where they were counted, registers are taken to hold a third less; half as many where NVFP4 is widened.
// score.py knows the rule (`Operands.held`).
constexpr int room(int there) {
#if __CUDA_ARCH__ == 900
  return there;
#else
  return SCALED ? there / 2 : there * 2 / 3;
#endif
}

#define ENTRIES(COLUMNS)                                                                                      \
  extern "C" __global__ void __launch_bounds__(THREADS, room(ROOM_ONE_##COLUMNS))                             \
      msa_score_one_##COLUMNS(const __grid_constant__ ScoreParams p) {                                        \
    score_row<COLUMNS, true>(p);                                                                              \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(THREADS, room(ROOM_ROW_##COLUMNS))                             \
      msa_score_row_##COLUMNS(const __grid_constant__ ScoreParams p) {                                        \
    score_row<COLUMNS, false>(p);                                                                             \
  }
ENTRIES(8)
ENTRIES(16)
#ifdef ROOM_ROW_32
ENTRIES(32)
#endif
