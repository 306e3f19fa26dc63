// The score kernels' parameters, and what a thread block scores: requests, tiles of tokens and heads, runs of blocks.
constexpr int BLOCK_KEYS = 128; // keys of a block, and tokens of a page

// score.py packs the same fields in the same order. Strides of q and k are bytes, others elements.
struct ScoreParams {
  const u8 *q, *k;
  const u8 *q_scale, *k_scale;      // NVFP4, 128x4 tiled
  const float *q_global, *k_global; // NVFP4, or null
  const int *query_starts;          // cu_seqlens_q
  const int *lengths;               // seqused_k, or cu_seqlens_k for a flat cache
  const int *table;                 // page table of a paged cache
  const int *q_offset;              // or null
  float *out;
  i64 q_token, q_head;
  i64 k_page, k_head;
  i64 query_starts_step, lengths_step, table_row, table_column, q_offset_step;
  i64 out_head, out_block, out_token;
  Divisor workers;                 // thread blocks that score
  Divisor tile_tokens, tile_heads; // columns of the products: so many tokens of a request, so many heads of a group each
  Divisor row_requests;            // requests, where each has a row of blocks and thread blocks of its own
  u32 row_step, row_bend;          // of the parts of a row: `RowShare`
  int k_row;                       // bytes
  int most_keys;                   // that a request can have, or rows of a flat cache
  int batch, total_q, blocks, pages, table_width, kv_heads, group, query_type, q_offset_int;
  int has_q_offset, causal, paged, reduce;
  int head_tiles;              // tiles of a group's heads
  int grain;                   // log2 of the blocks that are a unit of work
  int fill_blocks;             // thread blocks before those that score, which write what no token sees
  int fill_shift, fill_splits; // log2 of the tokens side by side in a fill block; fill blocks that share their blocks
  int keys_stay;               // keys are read again soon: they stay in L2
  int row_blocks;              // most blocks of such a row
  int early;                   // thread blocks that settle their first keys before the previous kernel has ended
  int hinting;                 // and those that also ask L2 for them
  float factor;                // NVFP4: global scales known on the host
  float requests_per_worker;
};

// --- what is to be scored ---------------------------------------------------------------------------------------------
struct Request {
  int first_query, queries; // rows of q
  int length;               // keys that there are
  int first_key;            // flat cache: row of position 0
  int position;             // of the first query

  // What is read of it.
  struct Words {
    int begin, end, given, next, offset;

    template <typename Read> DEVICE_MEMBER Words(const ScoreParams &p, int index, Read read) {
      const int *const starts = p.query_starts + index * p.query_starts_step, *const at = p.lengths + index * p.lengths_step;
      begin = read(starts), end = read(starts + p.query_starts_step), given = read(at);
      next = p.paged ? 0 : read(at + p.lengths_step);
      offset = p.q_offset ? read(p.q_offset + index * p.q_offset_step) : p.q_offset_int;
    }
  };

  Request() = default;
  DEVICE_MEMBER Request(const ScoreParams &p, int index) : Request(p, Words(p, index, read_now)) {}
  DEVICE_MEMBER Request(const ScoreParams &p, const Words &words) {
    const int begin = words.begin, end = words.end, given = words.given, next = words.next, offset = words.offset;
    first_query = min(max(begin, 0), p.total_q);
    queries = min(max(end, first_query), p.total_q) - first_query;
    int keys = max(given, 0);
    length = min(keys, p.most_keys);
    first_key = 0;
    if (!p.paged) {
      const bool valid = given >= 0 && next > given;
      keys = valid ? next - given : 0;
      length = valid ? max(min(next, p.most_keys) - given, 0) : 0;
      first_key = given;
    }
    position = p.has_q_offset ? offset : keys - queries;
  }

  DEVICE_MEMBER bool operator==(const Request &other) const {
    return first_query == other.first_query && queries == other.queries && length == other.length &&
           first_key == other.first_key && position == other.position;
  }

  // Keys that its i-th query sees.
  DEVICE_MEMBER int limit(const ScoreParams &p, int i) const {
    if (!p.causal) return length;
    const u32 seen = (u32)position + i + 1; // does not pass 32 bits
    return position < 0 && (int)seen < 0 ? 0 : (int)min(seen, (u32)length);
  }

  static DEVICE_MEMBER u32 blocks(const ScoreParams &p, int keys) {
    return min(((u32)keys + (BLOCK_KEYS - 1)) / BLOCK_KEYS, (u32)p.blocks);
  }
};

// What a thread block scores next: consecutive blocks for the columns of one tile, which are some tokens of a request and some
// heads of one KV head's group.
struct Run {
  Request request;
  int index;                      // of the request
  int first, last;                // blocks; none: all is done
  int token, tokens;              // rows of q
  int place;                      // of the first among the request's
  int lowest, highest;            // keys that the first and the last of them see
  int kv_head, first_head, heads; // `first_head` of all index heads
  bool before, more;              // scores are reduced with those of other heads, in runs before this one and after it

  // The `tile`-th tile of a request's tokens.
  DEVICE_MEMBER void take_tokens(const ScoreParams &p, const Request &from, u32 tile) {
    request = from;
    place = tile * p.tile_tokens.value;
    token = from.first_query + place;
    tokens = min((int)p.tile_tokens.value, from.queries - place);
    lowest = from.limit(p, place), highest = from.limit(p, place + tokens - 1);
  }

  DEVICE_MEMBER void take_heads(const ScoreParams &p, u32 tile) {
    kv_head = p.head_tiles == 1 ? tile : tile / p.head_tiles;
    const int size = p.tile_heads.value, in_group = (tile - kv_head * p.head_tiles) * size;
    first_head = kv_head * p.group + in_group;
    heads = min(size, p.group - in_group);
  }
};

// The work of a request: tiles of tokens, in units of blocks each, for each tile of heads that is scored by itself. With
// reduced heads a thread block takes all heads of a token.
struct Work {
  u32 tiles, units, total;

  Work() = default;
  DEVICE_MEMBER Work(const ScoreParams &p, const Request &r) {
    tiles = p.tile_tokens.quotient((u32)r.queries + p.tile_tokens.value - 1);
    units = (Request::blocks(p, r.length) + (1u << p.grain) - 1) >> p.grain;
    total = tiles * units * (p.reduce ? 1 : p.kv_heads * p.head_tiles);
  }
};

// A thread block's part [at, end) of all units. `start` is where those of the present request start.
struct Schedule {
  u32 at, end, start;
  u32 step;  // (block, tile of heads) pairs of the present units that are done, where scores are reduced over several tiles
  int index; // of the present request
  Request request;
  Work work;

  // By one warp, all lanes alike.
  DEVICE_MEMBER void begin(const ScoreParams &p, u32 part, int lane) {
    start = 0, step = 0, index = 0;
    if (p.batch == 1) {
      take(p);
      share(p, work.total, part);
      return;
    }
    u32 mine = 0, total = 0;
#pragma unroll 1
    for (int base = 0; base < p.batch; base += 32) {
      mine = base + lane < p.batch ? Work(p, Request(p, base + lane)).total : 0;
      total += mine;
    }
    share(p, __reduce_add_sync(ALL_LANES, total), part);
    if (at == end) return;
#pragma unroll 1
    for (int base = 0; base < p.batch; base += 32) {
      if (p.batch > 32) mine = base + lane < p.batch ? Work(p, Request(p, base + lane)).total : 0;
      u32 sum = mine; // up to and with this lane's request
#pragma unroll
      for (int d = 1; d < 32; d <<= 1) {
        const u32 other = __shfl_up_sync(ALL_LANES, sum, d);
        if (lane >= d) sum += other;
      }
      const u32 past = __ballot_sync(ALL_LANES, start + sum > at);
      if (past) {
        const int first = __ffs(past) - 1;
        index = base + first;
        start += __shfl_sync(ALL_LANES, sum - mine, first);
        break;
      }
      start += __shfl_sync(ALL_LANES, sum, 31);
    }
    take(p);
  }

  DEVICE_MEMBER void take(const ScoreParams &p) { request = Request(p, index), work = Work(p, request); }

  // The `part`-th of as many equal parts as there are thread blocks: from total * part / blocks on.
  DEVICE_MEMBER void share(const ScoreParams &p, u32 total, u32 part) {
    const u32 each = p.workers.quotient(total), rest = total - each * p.workers.value;
    at = each * part + p.workers.quotient(rest * part);
    end = each * (part + 1) + p.workers.quotient(rest * (part + 1));
  }

  // By one thread.
  DEVICE_MEMBER void next(const ScoreParams &p, Run &run) {
    while (at < end) {
      const u32 place = at - start;
      if (place >= work.total) {
        start += work.total;
        if (++index >= p.batch) break; // never, unless lengths change meanwhile
        take(p);
        continue;
      }
      const u32 row = place < work.units ? 0 : place / work.units, unit = place - row * work.units; // row: of tiles
      const u32 apart = row < work.tiles ? 0 : row / work.tiles; // tiles of heads, one after the other
      const u32 count = min(work.units - unit, end - at);
      run.take_tokens(p, request, ends_in_turn(row - apart * work.tiles));
      run.first = unit << p.grain, run.last = min((unit + count) << p.grain, Request::blocks(p, run.highest));
      if (run.first < run.last) {
        run.index = index;
        run.before = run.more = false;
        run.take_heads(p, apart);
        const u32 together = p.reduce ? p.kv_heads * p.head_tiles : 1;
        if (together > 1)
          take_block(p, run, together, count);
        else
          at += count;
        return;
      }
      at += count;
    }
    run.first = run.last = 0;
  }

  // Scores are reduced over several tiles of heads: one block at a time, with all of them.
  DEVICE_MEMBER void take_block(const ScoreParams &p, Run &run, u32 together, u32 count) {
    const u32 steps = (run.last - run.first) * together, heads = step % together;
    run.first += step / together, run.last = run.first + 1;
    if (++step == steps) step = 0, at += count;
    run.take_heads(p, heads);
    run.before = heads > 0, run.more = heads + 1 < together;
  }

  // Tiles are taken from both ends in turn: early tokens see few keys, late ones many, and neighbouring thread blocks get the
  // same of both.
  DEVICE_MEMBER u32 ends_in_turn(u32 tile) const { return tile & 1 ? work.tiles - 1 - (tile >> 1) : tile >> 1; }
};
