// One launch's arguments; launch.py packs the same fields in the same order. Strides of q, K and V are bytes.
enum Combine { COMBINE_NONE = 0, COMBINE_CLUSTER = 1, COMBINE_SCRATCH = 2 };
enum ScaleLayout { SCALES_TILED = 0, SCALES_PLANAR = 1, SCALES_GATHERED = 2 }; // how copy.cuh leaves them in a stage
enum PartialType { PARTIAL_FP32 = 0, PARTIAL_BF16 = 1, PARTIAL_FP16 = 2, PARTIAL_FP8 = 3 };

// A tensor map of the driver (cuTensorMapEncodeTiled), opaque.
struct alignas(64) TensorMap {
  u64 words[16];
};

struct Params {
  TensorMap k_map, v_map; // 9.0 and up: bytes of a row, rows, KV heads, and for a paged cache pages
  const u8 *q, *k, *v;
  const int *ids;
  const int *table;     // page table of a paged cache
  const int *lengths;   // seqused_k, or cu_seqlens_k for a flat cache
  const int *q_offset;  // or null
  const float *k_global, *v_global; // or null
  const u8 *k_scale, *v_scale;      // NVFP4
  void *out;
  float *lse; // or null
  void *partial;        // scratch route: [item][split][ROWS][HEAD_DIM]
  float *partial_state; // scratch route: [item][split][ROWS][2], maximum and sum
  i64 q_token, q_head;
  i64 k_page, k_head, k_row;
  i64 v_page, v_head, v_row;
  i64 ids_head, ids_token; // elements
  i64 table_row, lengths_step, q_offset_step; // elements
  i64 ks_page, ks_head, vs_page, vs_head;     // a page's scales of one head, bytes
  i64 cache_rows; // pages of a paged cache, rows of a flat one
  float softmax_scale;
  float output_scale;
  Divisor kv_heads, row_tiles, seqlen_q, splits;
  int group, topk, table_width, items, combine, query_type, partial_type, q_offset_int, has_q_offset_int, causal, paged,
      scale_layout, k_paired, v_paired; // paired: copy.cuh
  int early; // what is read first is asked for before the previous kernel has ended
#ifdef SELECTS
  // What ids are chosen by. They are written to `ids`.
  const float *score;
  i64 score_head, score_block, score_token; // elements
  int sink_blocks, local_blocks;
#endif
};
