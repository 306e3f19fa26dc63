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
