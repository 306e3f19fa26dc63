// The online softmax of a block: weights are 2^(score - base), with scores in units of log2. Every thread holds the base of its
// two rows (the same in all warps) and its own part of their sums.
struct Softmax {
  float scale[2];   // raw score to log2 units, per row; above 0 (query.cuh puts the sign into q)
  float base[2];    // the largest score when it was last raised, plus BIAS; -inf until a key was seen
  float sum[2];

  // Allowed growth of the largest score before anything is rescaled. Largest weights are exact, which takes 0
  // (docs/kernel-notes.md, "An exact largest weight"), except in a cluster, where rescaling costs most and the parts' errors meet in
  // the mean, and with NVFP4, whose time is its instructions.
  static constexpr float SLACK = 8.f;
  static DEVICE_MEMBER float slack(const Params &p) { return SCALED || p.combine == COMBINE_CLUSTER ? SLACK : 0.f; }
  // Weights in bf16 are taken 2^20 smaller, so that sums of the largest bf16 values stay inside float32. Weights in fp16 are taken
  // 2^7 larger, up to 2^15 with the slack, so that small ones, which the sum counts, are not lost where many meet few large ones.
  static constexpr float BIAS = PRODUCT_BF16 ? 20.f : -7.f;

  DEVICE_MEMBER void reset(const float *row_scale, int lane) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      scale[r] = row_scale[(lane >> 2) + 8 * r];
      base[r] = NEG_INF;
      sum[r] = 0.f;
    }
  }

  // Masks the raw scores in place and finds each row's largest over this warp's keys, in log2 units.
  DEVICE_MEMBER void mask(Scores &s, const TileInfo &tile, int warp, int lane, float (&largest)[2]) const {
    if (tile.lo > 0 || tile.hi < TILE) {
#pragma unroll
      for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int key = warp * WARP_KEYS + n * 8 + (lane & 3) * 2 + (e & 1);
          if (key < tile.lo || key >= tile.hi) s[n][e] = NEG_INF;
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float x = fmaxf(s[0][2 * r], s[0][2 * r + 1]);
#pragma unroll
      for (int n = 1; n < KEY_TILES; n++) x = fmaxf(x, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
      x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
      x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
      largest[r] = x * scale[r];
    }
  }

  // The sum of row `r` over the four lanes that share it: this warp's part.
  DEVICE_MEMBER float warp_sum(int r) const {
    float s = sum[r];
    s += __shfl_xor_sync(~0u, s, 1);
    return s + __shfl_xor_sync(~0u, s, 2);
  }

  DEVICE_MEMBER bool outgrown(const Params &p, const float (&largest)[2]) const {
    // By the difference, which is exact: where float32 is coarser than 1 a sum could round past what fp16 weights hold.
    const float most = slack(p) - BIAS;
    return largest[0] - base[0] > most || largest[1] - base[1] > most;
  }

  // The largest scores of a tile, of what every warp has left.
  DEVICE_MEMBER void read_largest(const float (&by_warp)[ROWS][WARPS], int lane, float (&largest)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float4 *const all = (const float4 *)by_warp[(lane >> 2) + 8 * r];
      largest[r] = NEG_INF;
#pragma unroll
      for (int i = 0; i < WARPS / 4; i++)
        largest[r] = fmaxf(largest[r], fmaxf(fmaxf(all[i].x, all[i].y), fmaxf(all[i].z, all[i].w)));
    }
  }

  // Raises the bases to a tile's largest scores and scales what was accumulated, if anything was.
  DEVICE_MEMBER void raise(const float (&largest)[2], bool fresh, Output &o) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float before = base[r];
      base[r] = fmaxf(before, largest[r] + BIAS);
      if (fresh) continue;
      const float factor = base[r] == NEG_INF ? 1.f : exp2_approx(before - base[r]);
      sum[r] *= factor;
#pragma unroll
      for (int d = 0; d < DIM_TILES; d++) o[d][2 * r] *= factor, o[d][2 * r + 1] *= factor;
    }
  }

  // Weights of this warp's keys to shared memory (`weights`: this lane's place), and their sums per row.
  DEVICE_MEMBER void write_weights(const Scores &s, u32 weights, float (&added)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float from = base[r] == NEG_INF ? 0.f : base[r];
      u32 even = 0;
#pragma unroll
      for (int n = 0; n < KEY_TILES; n++) {
        // Not fused: the largest score must meet the base that was made of it, also where float32 is coarser than 1 (scores of 1e14).
        const float a = exp2_approx(__fmul_rn(s[n][2 * r], scale[r]) - from);
        const float b = exp2_approx(__fmul_rn(s[n][2 * r + 1], scale[r]) - from);
        added[r] = n == 0 ? a + b : added[r] + (a + b);
        const u32 packed = pack_product(a, b), at = (weights ^ ((SCALED ? n & ~1 : n) << 4)) + 8 * r * WEIGHT_PITCH;
        if (!SCALED)
          store_shared(at, packed);
        else if (n & 1) // with the last tile's: product.cuh, value_key
          store_shared(at, even, packed);
        else
          even = packed;
      }
    }
  }
};
