// Block selection: the blocks of keys that a token attends, from their index scores. A row is a token and an index head.
//
// Blocks that are chosen whatever their score take no part in the search. The others fall into 32 groups, by the number of
// their block modulo 32, so that neighbours, whose scores are alike, lie in different ones. The wanted-th largest of the
// groups' largest scores is a floor that at least as many blocks reach, and as a rule hardly more: 20 for 15, however long
// the row. These are ranked by counting, each against all others. Where more blocks are wanted than there are groups, or too
// many reach the floor because they are equal, a search by digits finds the cut instead.
//
// Up to 256 blocks a row is one warp's, with its scores in registers. Longer rows are a thread block's; up to 1,024 blocks each of its
// warps narrows its part in this way, and the first one what they list. A few rows of up to 8,192 blocks are clusters' from 9.0 on.
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
