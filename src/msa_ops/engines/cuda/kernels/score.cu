// Index scores: for each index query head, block of 128 keys and query token the largest product with a key that the token
// sees.
//
// Keys go from memory straight into the registers that are operands of the products, asked for a few kilobytes a warp ahead,
// with no shared memory between. Thread blocks share all blocks of all requests evenly, from the lengths as they are on the
// device. Decoding steps have kernels of their own, in score_row.cu.
template <int COLUMNS> struct StreamShared : Shared<COLUMNS> {
  Schedule schedule;
};

// Keys under way, in parts of what a warp has of a block: as many as the registers hold beside the scores of the columns.
template <int COLUMNS> struct Ring {
  static constexpr int TILES = ROW_BYTES == 256 || COLUMNS > 16 ? 1 : 2; // of a part
  static constexpr int PARTS = WARP_TILES / TILES;                       // of a block
  // Parts under way. From 64 columns on keys are read again and again, from L2.
  static constexpr int DEPTH = TILES == 1 && ROW_BYTES < 256 && COLUMNS < 64 ? 4 : 2;
};

// A lane's way through its team's blocks of a run.
struct KeyReader {
  const u8 *keys;   // its first key: in page 0, or in the present block of a flat cache
  const u8 *scales; // NVFP4, paged: its scales in page 0
  const int *ids;   // paged: where the next block's page is named
  int page, id;     // of the present block; of the next, asked for that far ahead
  const u8 *at;     // its first key in the present block
  bool present;
  int block, last;
  int room; // how far its first key of the block lies before the last key that any token sees

  DEVICE_MEMBER KeyReader(const ScoreParams &p, const Run &run, int first, int first_id, int warp, int lane) {
    const int own = first_key_of(warp, lane);
    block = first, last = run.last;
    if (p.paged) {
      ids = p.table + run.index * p.table_row + block * p.table_column;
      id = first_id;
    }
    room = run.highest - block * BLOCK_KEYS - own - 1;
    keys = p.k + run.kv_head * p.k_head + (i64)own * p.k_row + (lane & 3) * 16;
    if (p.paged) {
      if constexpr (SCALED) scales = p.k_scale + run.kv_head * SCALE_TILE_BYTES + ((lane & 3) >> 1) * 512 + own * 16;
    } else {
      keys += ((i64)run.request.first_key + block * BLOCK_KEYS) * p.k_row;
    }
  }

  // Asks for all parts of the blocks in turn. Keys that no token sees are not read: the last one seen stands for them.
  template <int TILES>
  DEVICE_MEMBER void ask(const ScoreParams &p, const Run &run, Part<TILES> &part, int index, u64 policy, int lane) {
    if (index == 0) {
      if (p.paged) {
        page = id;
        present = (u32)page < (u32)p.pages;
        at = keys + page * p.k_page;
        ids += TEAMS * p.table_column;
        if (block + TEAMS < last) id = *ids;
      } else {
        present = true, at = keys;
        keys += (i64)(TEAMS * BLOCK_KEYS) * p.k_row;
      }
    }
    part.present = present;
    if (present) {
#pragma unroll
      for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const u8 *const key = at + (i64)min(tile_key(index * TILES + t) + 32 * half, room) * p.k_row;
#pragma unroll
          for (int i = 0; i < CHUNKS; i++) part.keys[t][half][i] = load_keys(key + i * 64, policy);
        }
      if constexpr (SCALED) {
        const int set = index * TILES >> 1;
        if (p.paged)
          part.scales = load_keys(scales + set * 128 + (i64)page * (p.kv_heads * SCALE_TILE_BYTES), policy);
        else
          part.scales = flat_scales(p, run, set, lane);
      }
    }
    if (index == WARP_TILES / TILES - 1) block += TEAMS, room -= TEAMS * BLOCK_KEYS;
  }

  DEVICE_MEMBER uint4 flat_scales(const ScoreParams &p, const Run &run, int set, int lane) const {
    const int first = run.highest - 1 - room + 8 * set; // the lane's first key of the set
    const u8 *const from = p.k_scale + ((lane & 3) >> 1) * 512;
    u32 word[4];
#pragma unroll
    for (int i = 0; i < 4; i++) word[i] = *(const u32 *)(from + flat_scale(p, run, first + 32 * i));
    return make_uint4(word[0], word[1], word[2], word[3]);
  }
};

// Scores of a run. Teams take its blocks in turn; `page` is that of the team's first.
template <int COLUMNS>
DEVICE void score_run(const ScoreParams &p, Shared<COLUMNS> &shared, const Run &run, int page, u64 policy, u32 &turn) {
  using R = Ring<COLUMNS>;
  constexpr bool IN_STEP = R::DEPTH % R::PARTS == 0; // a place in the ring always has the same part of a block
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, team = warp / TEAM;
  const int first = run.first + team, parts = (run.last - first + TEAMS - 1) / TEAMS * R::PARTS;
  KeyReader reader(p, run, first, page, warp, lane);
  Part<R::TILES> ring[R::DEPTH];
#pragma unroll
  for (int d = 0; d < R::DEPTH; d++)
    if (d < parts) reader.ask(p, run, ring[d], d % R::PARTS, policy, lane);
  QueryRows<COLUMNS> rows;
  rows.load(p, run);
  rows.store(p, run, shared);
  __syncthreads();

  const int lowest = run.lowest, cells = p.reduce ? run.tokens : run.tokens * run.heads, span = p.reduce ? run.heads : 1;

  float best[COLUMNS / 4];
  for (int base = 0; base < parts; base += R::DEPTH) {
#pragma unroll
    for (int d = 0; d < R::DEPTH; d++) {
      const int at = base + d, index = IN_STEP ? d % R::PARTS : at % R::PARTS, block = first + at / R::PARTS * TEAMS;
      if (at >= parts) break;
      if (index == 0)
#pragma unroll
        for (int i = 0; i < COLUMNS / 4; i++) best[i] = NEG_INF;
      const bool all_seen = block * BLOCK_KEYS <= lowest - BLOCK_KEYS; // by all tokens
      if (ring[d].present) score_part(shared, ring[d], index, block, all_seen, warp, lane, best);
      if (at + R::DEPTH < parts) reader.ask(p, run, ring[d], IN_STEP ? index : (at + R::DEPTH) % R::PARTS, policy, lane);
      if (index < R::PARTS - 1) continue;
      reduce_lanes<COLUMNS / 4>(best, lane);
      put_columns(best, shared.best[turn][warp], lane);
      team_sync(team); // two buffers: whoever writes this one again has passed the next block's barrier
      give_scores(p, shared, run, turn, block, cells, span);
      turn ^= 1;
    }
  }
}

// Brings into L2, while the kernel before may still be running, the tables of where this thread block's part begins if all
// requests are as long as there are blocks. Hints: the reads come after the wait.
DEVICE void prefetch_inputs(const ScoreParams &p, u32 index, int lane) {
#ifdef HAS_CLUSTER
  const float place = index * p.requests_per_worker;
  const int request = min((int)place, p.batch - 1), block = min((int)((place - request) * p.blocks), p.table_width - 1);
  const int token = p.batch == 1 ? 0 : min(request * (p.total_q / p.batch), p.total_q - 1);
  if (lane * 32 <= p.batch) prefetch_line(p.query_starts + lane * 32 * p.query_starts_step);
  if (lane * 32 < p.batch) prefetch_line(p.lengths + lane * 32 * p.lengths_step);
  if (p.paged && block >= 0 && lane == 0) prefetch_line(p.table + request * p.table_row + block * p.table_column);
  if (lane < p.kv_heads * p.group) prefetch_line(p.q + token * p.q_token + lane * p.q_head);
#endif
}

template <int COLUMNS> DEVICE void score(const ScoreParams &p) {
  __shared__ StreamShared<COLUMNS> shared;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const bool fills = blockIdx.x < p.fill_blocks;
  const u32 index = blockIdx.x - p.fill_blocks;
  if (!fills && warp == WARPS - 1) prefetch_inputs(p, index, lane);
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (fills) {
    fill_unseen(p);
    return;
  }
  const u64 policy = p.keys_stay ? l2_evict_normal() : l2_evict_first();
  if (warp == 0) {
    Schedule schedule;
    schedule.begin(p, index, lane);
    if (lane == 0) shared.schedule = schedule;
  }
  for (u32 turn = 0, number = 0;; number++) {
    Run &run = shared.run[number & 1];
    if (threadIdx.x == 0) shared.schedule.next(p, run); // while others may still be at the run before
    __syncthreads();                                    // which is done now
    if (run.first == run.last) return;
    score_run(p, shared, run, page_of(p, run.index, run.first + warp / TEAM), policy, turn);
  }
}

// On 10.7 the registers of three thread blocks are a few too few for 64 columns.
#if __CUDA_ARCH__ == 1070
#undef ROOM_64
#define ROOM_64 2
#endif
#define ENTRY(COLUMNS)                                                                                        \
  extern "C" __global__ void __launch_bounds__(THREADS, ROOM_##COLUMNS)                                       \
      msa_score_##COLUMNS(const __grid_constant__ ScoreParams p) {                                            \
    score<COLUMNS>(p);                                                                                        \
  }
ENTRY(8)
ENTRY(16)
ENTRY(32)
ENTRY(64)
