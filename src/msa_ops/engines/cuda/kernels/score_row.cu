// Index scores of decoding steps: a request has one row of blocks, which thread blocks of its own score.
//
// Which blocks they are follows from a thread block's number and its request alone, so that pages can be looked up beside the
// request. A team has one block under way, whose keys wait in shared memory: registers do not bound how many thread blocks a
// multiprocessor holds, and these keep the memory busy. Where there are more than fit at once, the machine hands them out as
// others end, which evens out the end.
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

// Asks L2 for a block of keys by lengths and pages as they are before the wait (common.cuh, `read_early`), in the usual order of
// leaving. By the threads of a team. There is one KV head.
DEVICE void prefetch_keys(const ScoreParams &p, int index, int block, int thread) {
#ifdef HAS_CLUSTER
  const int *const at = p.lengths + index * p.lengths_step;
  const bool together = p.k_row == ROW_BYTES; // one hint, by one thread
  if (together && thread > 0) return;
  const int given = read_early(at);
  i64 row = (i64)block * BLOCK_KEYS, last = given, from; // of the keys there are
  if (p.paged) {
    const int page = block < p.table_width ? read_early(p.table + index * p.table_row + block * p.table_column) : -1;
    if ((u32)page >= (u32)p.pages) return;
    from = page * p.k_page;
  } else {
    if (given < 0) return;
    row += given, last = min(read_early(at + p.lengths_step), p.most_keys);
    from = row * p.k_row;
  }
  const int rows = (int)max(min(last - row, (i64)BLOCK_KEYS), 0LL);
  if (together) {
    if (rows > 0) prefetch_bytes(p.k + from, rows * ROW_BYTES);
  } else {
    for (int i = thread; i < rows; i += TEAM_THREADS) prefetch_bytes(p.k + from + i * (i64)p.k_row, ROW_BYTES);
  }
#endif
}

// Brings into L2, while the kernel before may still be running, what is read first. Hints: the reads come after the wait.
DEVICE void prefetch_row(const ScoreParams &p, int index, int block, int lane) {
#ifdef HAS_CLUSTER
  const int token = min(index * (p.total_q / p.batch), p.total_q - 1);
  if (lane == 0) prefetch_line(p.query_starts + index * p.query_starts_step);
  if (lane == 1) prefetch_line(p.lengths + index * p.lengths_step);
  if (lane == 2 && p.paged && block < p.table_width)
    prefetch_line(p.table + index * p.table_row + block * p.table_column);
  if (lane < p.kv_heads * p.group) prefetch_line(p.q + token * p.q_token + lane * p.q_head);
#endif
}

// ONE: there is a thread block for each `TEAMS` blocks.
template <int COLUMNS, bool ONE> DEVICE void score_row(const ScoreParams &p) {
  __shared__ RowShared<COLUMNS> shared;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, team = warp / TEAM;
  const bool fills = blockIdx.x < p.fill_blocks;
  const u32 number = blockIdx.x - p.fill_blocks;
  const int index = p.row_parts.quotient(number);
  const u32 slot = number - index * p.row_parts.value;
  // Of a request that is as long as it can be. Others have another share as a rule, unless there is a thread block for each.
  const int guess = team + (ONE ? (int)slot * TEAMS : RowShare::even(p, slot, p.row_blocks).first);
  if (!fills && warp == WARPS - 1) prefetch_row(p, index, guess, lane);
  if (number < (u32)p.early) prefetch_keys(p, index, guess, threadIdx.x % TEAM_THREADS);
  // Many thread blocks leave the next kernel no room until they end: it had better be in line before. Few leave it room, and all of
  // them ask early: what starts then would take from these.
  const bool all_ask = p.early + p.fill_blocks >= gridDim.x;
  if (!all_ask) let_next_kernel_start();
  wait_for_previous_kernel();
  if (all_ask) let_next_kernel_start();
  if (fills) {
    fill_unseen(p);
    return;
  }
  const int guessed_page = page_of(p, index, guess);
  Run run;
  run.request = Request(p, index);
  run.index = index, run.before = run.more = false;
  run.take_heads(p, 0);
  bool present; // the block under way has a page
  auto ask = [&](const Run &run, int block, int page) {
    present = !p.paged || (u32)page < (u32)p.pages;
    if (!present) return;
    const i64 at = p.paged ? page * p.k_page : ((i64)run.request.first_key + block * BLOCK_KEYS) * p.k_row;
    const u64 policy = l2_evict_first();
    const int last_seen = run.highest - block * BLOCK_KEYS - 1;
    copy_keys(p, shared.keys[warp], p.k + run.kv_head * p.k_head + at, last_seen, policy, warp, lane);
    if constexpr (SCALED)
      copy_scales(p, shared.scales, run, block * BLOCK_KEYS + first_key_of(warp, lane), page, policy, lane);
    commit_copies();
  };
  const bool more = run.request.queries > (int)p.tile_tokens.value; // tokens than promised: further tiles
  u32 tile = 0;
  do {
    run.take_tokens(p, run.request, tile);
    const int blocks = run.tokens > 0 ? Request::blocks(p, run.highest) : 0;
    const RowShare share = ONE ? RowShare::one(slot, blocks) : RowShare::even(p, slot, blocks);
    if (share.first >= share.last) continue;
    run.first = share.first, run.last = share.last;
    int block = share.first + team;
    const bool any = block < share.last;
    if (any) ask(run, block, ONE || block == guess ? guessed_page : page_of(p, index, block));
    QueryRows<COLUMNS> rows;
    rows.load(p, run);
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
    if (!ONE || more) run = same;
  } while ((!ONE || more) && ++tile < p.tile_tokens.quotient((u32)run.request.queries + p.tile_tokens.value - 1));
}

// Elsewhere than on 9.0, where they were counted, registers are taken to hold a quarter less.
constexpr int room(int there) {
#if __CUDA_ARCH__ == 900
  return there;
#else
  return there * 3 / 4;
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
