// From the ids an indexer picked, or that are chosen here by its scores, to tiles to read: bounds, duplicates, page table, causal limit.

// The part of the problem that is worked on at once: 16 query heads (or fewer) of one token and one KV head.
struct Item {
  int token, head, request, row0, rows;

  DEVICE_MEMBER Item(const Params &p, u32 index) {
    const u32 rest = p.row_tiles.quotient(index);
    row0 = (index - rest * p.row_tiles.value) * ROWS;
    token = p.kv_heads.quotient(rest);
    head = rest - token * p.kv_heads.value;
    request = p.seqlen_q.quotient(token);
    rows = min(ROWS, p.group - row0);
  }
};

#ifdef SELECTS
constexpr int CHOICES = SELECTS / 32; // blocks a lane that are chosen among: no table is wider

// For choosing: room in a stage of the ring that nothing is copied into yet.
struct ChoiceShared {
  WarpShared<CHOICES> list;
  int ids[LIST];
};
static_assert(SELECTS % 32 == 0 && SELECTS <= 256 && sizeof(ChoiceShared) <= STAGE_BYTES, "numbers of blocks are bytes");

// What narrow.cuh wants to know.
struct ChoiceAsked {
  int begin, end, topk;
  int *output;
};

// What the kernel before this one scored.
DEVICE const float *scores_of(const Params &p, const Item &item) {
  return p.score + item.head * p.score_head + item.token * p.score_token;
}
#endif

// Entries of a page table row that are fetched before it is known which are needed: one dependent read less. By lane.
#ifdef SELECTS
constexpr int NEAR_ENTRIES = CHOICES;
#else
constexpr int NEAR_ENTRIES = 8;
#endif

// What the copying warp knows of an item: everything that decides which tiles are read.
struct Selection {
  const int *lengths, *ids, *table, *offset; // this item's
#ifdef SELECTS
  const float *scores;
  WarpRow<CHOICES> row;
#endif
  int query;              // place of the token among its request's
  int id;                 // this lane's id of the first LIST
  int near[NEAR_ENTRIES]; // entries i * 32 + lane of the table row
  bool paged, near_table, plain; // plain: a short selection of a paged cache whose table row is near
  int length, limit; // keys of the request; keys that the token may see
  int start;         // flat cache: row of position 0
  int largest;       // largest valid id so far

  // Addresses only: this may run while the previous kernel still writes.
  DEVICE_MEMBER Selection(const Params &p, const Item &item) {
    lengths = p.lengths + item.request * p.lengths_step;
    ids = p.ids + item.head * p.ids_head + item.token * p.ids_token;
    table = p.table + item.request * p.table_row;
#ifdef SELECTS
    scores = scores_of(p, item);
#endif
    paged = p.paged;
    offset = p.q_offset ? p.q_offset + item.request * p.q_offset_step : nullptr;
    query = p.seqlen_q.remainder(item.token);
    near_table = paged && p.table_width <= NEAR_ENTRIES * 32;
    plain = near_table && p.topk <= LIST;
    largest = -1;
  }

  // Everything whose address is known is asked for at once. What follows the reads is on the way to the first copy: 32 bits
  // where they are enough.
  DEVICE_MEMBER void load(const Params &p, int lane) {
    const int first = read_global(lengths), from = offset ? read_global(offset) : p.q_offset_int;
#ifdef SELECTS
    const float *at = scores + lane * p.score_block;
#pragma unroll
    for (int j = 0; j < CHOICES; j++, at += 32 * p.score_block)
      row.score[j] = j * 32 + lane < p.table_width ? __int_as_float(read_global((const int *)at)) : 0.f;
#else
    id = lane < p.topk ? read_global(ids + lane) : -1;
#endif
    if (near_table)
#pragma unroll
      for (int i = 0; i < NEAR_ENTRIES; i++) near[i] = i * 32 + lane < p.table_width ? read_global(table + i * 32 + lane) : -1;
    if (paged) {
      start = 0, length = max(first, 0);
    } else {
      const i64 keys = (i64)read_global(lengths + p.lengths_step) - first;
      start = first, length = (int)max(0LL, min(keys, 0x7fffffffLL));
    }
    const i64 end = offset || p.has_q_offset_int ? (i64)from + query + 1 : (i64)length - (int)p.seqlen_q.value + query + 1;
    limit = p.causal ? (int)max(min((i64)length, end), 0LL) : length;
  }

#ifdef SELECTS
  // Behind `load`: chooses the ids, as the selection does (topk_warp.cu), and writes them too if told so.
  DEVICE_MEMBER void choose(const Params &p, bool writes, u8 *room, int lane) {
    ChoiceShared &s = *(ChoiceShared *)room;
    const ChoiceAsked asked = {p.sink_blocks, p.local_blocks, p.topk, s.ids};
    const Forced forced(asked, min((int)(((u32)limit + (BLOCK_KEYS - 1)) / BLOCK_KEYS), p.table_width));
#pragma unroll
    for (int j = 0; j < CHOICES; j++) {
      row.block[j] = j * 32 + lane;
      if (!forced.open(row.block[j])) row.score[j] = __uint_as_float(MINUS_INFINITY_BITS);
    }
    row.write_narrowed(asked, asked, forced, s.list, lane);
    warp_sync();
    id = lane < p.topk ? s.ids[lane] : -1;
    if (writes && lane < p.topk) const_cast<int *>(ids)[lane] = id;
#ifdef HAS_CLUSTER
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); // before the copy engine writes there
#endif
    warp_sync();
  }
#endif

  DEVICE_MEMBER int page(int block, bool valid) const {
    if (!near_table) return valid ? read_global(table + block) : -1;
    int page = -1;
#pragma unroll
    for (int i = 0; i < NEAR_ENTRIES; i++) {
      const int entry = __shfl_sync(~0u, near[i], block & 31);
      if (block >> 5 == i) page = entry;
    }
    return page;
  }

  // What `blocks` below does, for ids that ascend with nothing to leave out but at the end: nearly all, and it is on the way to the
  // first copy, where every branch counts. False where they are not so.
  DEVICE_MEMBER bool ascending_blocks(const Params &p, int lane, int &count, int &block, int &hi) const {
    const int before = __shfl_up_sync(~0u, id, 1);
    int entry = near[0];
#pragma unroll
    for (int i = 0; i < NEAR_ENTRIES; i++) {
      const int other = __shfl_sync(~0u, near[i], id & 31);
      entry = id >> 5 == i ? other : entry;
    }
    const bool valid = (u32)id < min(((u32)length + (BLOCK_KEYS - 1)) / BLOCK_KEYS, (u32)p.table_width);
    const bool ordered = !valid || lane == 0 || before < id;
    hi = min(BLOCK_KEYS, (int)((u32)limit - (u32)id * BLOCK_KEYS)); // any id: it may be no valid one
    const u32 kept = __ballot_sync(~0u, valid && hi > 0 && entry >= 0 && entry < p.cache_rows);
    block = entry, count = __popc(kept);
    return __all_sync(~0u, ordered) && !(kept & (kept + 1));
  }

  // True where an equal id stands at an earlier place of the row. `valid` lanes hold entries base + lane; `more` follow.
  DEVICE_MEMBER bool is_repeated(int base, bool valid, bool more, int lane) {
    const int before = __shfl_up_sync(~0u, valid ? id : -1, 1);
    // Unsigned: an entry before that is not valid is larger than any id.
    const bool ascending = !valid || (id > largest && (lane == 0 || (u32)before < (u32)id));
    bool repeated = false;
    if (!__all_sync(~0u, ascending)) {
      const u32 same = __match_any_sync(~0u, valid ? id : -1 - lane);
      repeated = (same & ((1u << lane) - 1)) != 0;
      for (int from = 0; from < base; from += LIST) {
        const int earlier = read_global(ids + from + lane);
        for (int i = 0; i < LIST; i++) repeated |= __shfl_sync(~0u, earlier, i) == id;
      }
    }
    if (more) largest = max(largest, __reduce_max_sync(~0u, valid ? id : -1));
    return repeated;
  }

  // Turns ids [base, base + LIST) into a list of blocks, one a lane: lane n gets the n-th block worth reading. Returns their
  // number; `block` is the page or flat row, [lo, hi) the keys of it that may be attended.
  DEVICE_MEMBER int blocks(const Params &p, int base, int lane, int &block, int &lo, int &hi) {
    if (base > 0) id = base + lane < p.topk ? read_global(ids + base + lane) : -1;
    const int count = (int)(((u32)length + (BLOCK_KEYS - 1)) / BLOCK_KEYS);
    bool valid = id >= 0 && id < (paged ? min(count, p.table_width) : count);
    const int entry = paged ? page(id, valid) : 0; // here, so that its shuffles run beside those below
    if (is_repeated(base, valid, base + LIST < p.topk, lane)) valid = false;
    valid = valid && id * BLOCK_KEYS < limit;
    int from, begin = 0, end = valid ? min(BLOCK_KEYS, limit - id * BLOCK_KEYS) : 0;
    if (paged) {
      from = entry;
      valid = valid && from >= 0 && from < p.cache_rows;
    } else {
      const i64 row = start + (i64)id * BLOCK_KEYS;
      begin = (int)min(max(0LL, -row), (i64)BLOCK_KEYS);
      end = (int)max(min((i64)end, p.cache_rows - row), 0LL);
      valid = valid && begin < end;
      from = (int)row;
    }
    const u32 kept = __ballot_sync(~0u, valid);
    block = from, lo = begin, hi = end;
    if (kept & (kept + 1)) { // holes: close them
      const int source = nth_set_bit(kept, lane);
      block = __shfl_sync(~0u, from, source);
      lo = __shfl_sync(~0u, begin, source);
      hi = __shfl_sync(~0u, end, source);
    }
    return __popc(kept);
  }

  // Position of the n-th set bit (0 for the first), or 0 where there are not as many.
  static DEVICE_MEMBER int nth_set_bit(u32 bits, int n) {
    int at = 0;
#pragma unroll
    for (int width = 16; width >= 1; width >>= 1) {
      const int below = __popc(bits & ((1u << width) - 1));
      if (n >= below) n -= below, bits >>= width, at += width;
    }
    return at & 31;
  }
};
