// Quantising: rows of 128 elements to NVFP4, and new tokens into the slots of a paged cache, as NVFP4 or fp8.
// quantize.py packs the parameters. Results are those of nvfp4.py and kv_cache.py on the CPU to the bit, so nothing here is
// left to the compiler's contraction: products and sums have their rounding in their name.
//
// A thread has 16 elements, which share one NVFP4 scale; 8 threads have a row. Nothing is shared between threads.
constexpr int GROUP = 16;      // elements of a thread, and of an NVFP4 scale
constexpr int CODE_BYTES = 64; // of an NVFP4 row
constexpr int PAGE = 128;      // tokens of a page, and rows of a tile of scales
constexpr int SCALE_BYTES = 8 * PAGE;
constexpr int WARPS = 8;
constexpr int THREADS = WARPS * 32;
constexpr int WARP_ROWS = 32 * GROUP / 128; // 4
constexpr u32 INFINITY_BITS = 0x7f800000u;

// --- parameters -------------------------------------------------------------------------------------------------------
enum Fault { FAULT_X = 0, FAULT_FACTOR = 1 }; // words of `faults`

struct RowsParams {
  const u8 *x;
  const float *factor_at; // the factor in device memory, or null
  u8 *codes, *scales;
  int *faults;              // set where x is not finite, or the factor not positive and finite
  i64 outer, middle, inner; // strides of the three leading dims, bytes; with an inner size of 1, `inner` is that of all rows
  Divisor middle_size, inner_size;
  float factor;
  int rows;
};

// Where the scale of a token's group `s` lies in the 1024 bytes of a page's head. Each of the three layouts is linear in
// the parts of both numbers: the lowest `token_bits` of the token and the others, the lowest 2 of `s` and the third.
struct ScaleOrder {
  u32 token_bits, low_token, high_token, low_s, high_s;
};

struct Side { // K or V
  const u8 *x;
  const float *factor_at; // NVFP4: the factor in device memory, or null
  u8 *out, *scales;
  i64 x_token, x_head;              // bytes, as all strides
  i64 out_page, out_head, out_token;
  i64 scales_page, scales_head;     // of the 1024 bytes of scales of a page's head
  float factor;                     // NVFP4: the global factor. fp8: 2^-e of the divisor m * 2^e
  float mantissa, reciprocal, rest; // fp8: m, of [1, 2); 1 / m is reciprocal + rest
  ScaleOrder scale_order;           // NVFP4
  u32 unused;
};

struct WriteParams {
  Side k, v;
  const void *slots; // page * 128 + token: int or i64
  i64 slots_step;    // elements
  i64 pages;
  Divisor heads;
  int tokens, wide_slots;
};

// --- names for instructions -------------------------------------------------------------------------------------------
// The larger of two magnitudes, in both halves; NaN if one is. The sign means nothing.
#if __CUDA_ARCH__ >= 860
DEVICE u32 larger_bf16(u32 a, u32 b) {
  u32 r;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
DEVICE u32 larger_fp16(u32 a, u32 b) {
  u32 r;
  asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
#else
DEVICE u32 larger_bf16(u32 a, u32 b) {
  u32 r;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a & 0x7fff7fffu), "r"(b & 0x7fff7fffu));
  return r;
}
DEVICE u32 larger_fp16(u32 a, u32 b) {
  u32 r;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a & 0x7fff7fffu), "r"(b & 0x7fff7fffu));
  return r;
}
#endif

DEVICE float smaller_or_nan(float a, float b) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

DEVICE float widen_fp16(u32 low_half) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"((u16)low_half));
  return r;
}

DEVICE float reciprocal_approx(float x) { // to one unit in the last place
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// --- 16 elements ------------------------------------------------------------------------------------------------------
enum Input { BF16, FP16, FP32 };

template <int INPUT> struct Elements {
  static constexpr int SIZE = INPUT == FP32 ? 4 : 2;
  u32 words[GROUP * SIZE / 4];

  // Volatile: to stay before what comes after it in the source.
  DEVICE_MEMBER void load(const u8 *from) {
#pragma unroll
    for (int i = 0; i < GROUP * SIZE / 4; i += 4)
      asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[i]), "=r"(words[i + 1]), "=r"(words[i + 2]), "=r"(words[i + 3])
                   : "l"(from + 4 * i));
  }

  DEVICE_MEMBER float operator[](int i) const {
    if constexpr (INPUT == FP32) return __uint_as_float(words[i]);
    const u32 word = words[i / 2];
    if constexpr (INPUT == FP16) return widen_fp16(i % 2 ? word >> 16 : word);
    return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
  }

  // The largest magnitude as a float's bits: those of a NaN if any element is one.
  DEVICE_MEMBER u32 largest() const {
    u32 most = INPUT == FP32 ? words[0] & 0x7fffffffu : words[0];
#pragma unroll
    for (int i = 1; i < GROUP * SIZE / 4; i++) {
      if constexpr (INPUT == BF16) most = larger_bf16(most, words[i]);
      if constexpr (INPUT == FP16) most = larger_fp16(most, words[i]);
      if constexpr (INPUT == FP32) most = max(most, words[i] & 0x7fffffffu);
    }
    if constexpr (INPUT == FP32) return most;
    most &= 0x7fff7fffu;
    if constexpr (INPUT == BF16) return max(most << 16, most & 0xffff0000u);
    return max(__float_as_uint(widen_fp16(most)), __float_as_uint(widen_fp16(most >> 16)));
  }

  // The top bytes of elements 4i to 4i + 3: their signs are bits 7, 15, 23 and 31.
  DEVICE_MEMBER u32 tops(int i) const {
    if constexpr (INPUT == FP32)
      return __byte_perm(__byte_perm(words[4 * i], words[4 * i + 1], 0x0073),
                         __byte_perm(words[4 * i + 2], words[4 * i + 3], 0x0073), 0x5410);
    else
      return __byte_perm(words[2 * i], words[2 * i + 1], 0x7531);
  }

  // Puts the signs of elements 8i to 8i + 7 into the top bits of a word's nibbles. `mask`: bits 7, 15, 23, 31, or none.
  DEVICE_MEMBER u32 add_signs(u32 codes, int i, u32 mask) const {
    const u32 a = tops(2 * i), b = tops(2 * i + 1);
    const u32 even = __byte_perm(a, b, 0x6420), odd = __byte_perm(a, b, 0x7531);
    return codes | (odd & mask) | ((even >> 4) & (mask >> 4));
  }
};

// --- rounding ---------------------------------------------------------------------------------------------------------
// Nearest even e4m3 of 0 <= x <= 448: its byte, and its value.
DEVICE u32 round_e4m3(float x, float &value) {
  // The sum with a power of two whose last place is e4m3's step at x is rounded there; its low bits count the steps.
  const u32 exponent = max(__float_as_uint(x) & 0x7f800000u, 121u << 23); // at least 2^-6
  const u32 anchor = exponent + (20u << 23);
  const float sum = __fadd_rn(x, __uint_as_float(anchor));
  value = __fsub_rn(sum, __uint_as_float(anchor));
  return __float_as_uint(sum) - anchor + ((exponent - (121u << 23)) >> 20);
}

// Four e4m3 bytes of magnitudes up to 1024 or NaN, saturating at 448.
DEVICE u32 narrow_e4m3(const float (&x)[4]) {
  u32 r;
#ifdef HAS_E4M3_CVT
  asm("{.reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, %2, %1; cvt.rn.satfinite.e4m3x2.f32 b, %4, %3;"
      "mov.b32 %0, {a, b};}"
      : "=r"(r)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]));
#else
  r = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float unused;
    const u32 byte = x[i] != x[i] ? 0x7fu : min(round_e4m3(x[i], unused), 0x7eu);
    r |= byte << (8 * i);
  }
#endif
  return r;
}

// Eight nearest even e2m1 codes of magnitudes up to 6 and a few units in the last place, the first in the lowest nibble.
DEVICE u32 narrow_e2m1(const float (&x)[8]) {
#ifdef HAS_E2M1_CVT
  u32 r;
  asm("{.reg .b8 a, b, c, d; cvt.rn.satfinite.e2m1x2.f32 a, %2, %1; cvt.rn.satfinite.e2m1x2.f32 b, %4, %3;"
      "cvt.rn.satfinite.e2m1x2.f32 c, %6, %5; cvt.rn.satfinite.e2m1x2.f32 d, %8, %7; mov.b32 %0, {a, b, c, d};}"
      : "=r"(r)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "f"(x[4]), "f"(x[5]), "f"(x[6]), "f"(x[7]));
  return r;
#else
  // Codes 0 to 4 are steps of 1/2, 4 to 6 steps of 1, 6 and 7 a step of 2: the code is min(2x, x + 2, x/2 + 4), rounded.
  // Each is rounded as it is added to 2^23, and the low bits of the sum are the code.
  constexpr float ANCHOR = 8388608.f;
  u32 pairs[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    u32 code[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const float q = x[2 * i + j];
      // The sums are positive, so that they are ordered as their bits are.
      code[j] = min(min(__float_as_uint(__fmaf_rn(q, 2.f, ANCHOR)), __float_as_uint(__fadd_rn(q, ANCHOR + 2.f))),
                    __float_as_uint(__fmaf_rn(q, 0.5f, ANCHOR + 4.f)));
    }
    pairs[i] = code[1] * 16u + code[0]; // in the lowest byte
  }
  return __byte_perm(__byte_perm(pairs[0], pairs[1], 0x0040), __byte_perm(pairs[2], pairs[3], 0x0040), 0x5410);
#endif
}

// --- NVFP4 ------------------------------------------------------------------------------------------------------------
struct Nvfp4Group {
  uint2 codes;
  u32 scale;
  bool finite; // all elements were
};

// A quotient by `divisor` as a product with its reciprocal in two parts.
struct Reciprocal {
  float high, low;
  DEVICE_MEMBER float times(float x) const { return __fmaf_rn(x, high, __fmul_rn(x, low)); }
};

template <bool CLAMPED, int INPUT>
DEVICE uint2 e2m1_codes(const Elements<INPUT> &x, float factor, float limit, const Reciprocal &reciprocal) {
  u32 codes[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float q[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float product = __fmul_rn(fabsf(x[8 * half + i]), factor);
      q[i] = reciprocal.times(CLAMPED ? fminf(product, limit) : product);
    }
    codes[half] = narrow_e2m1(q);
  }
  return make_uint2(codes[0], codes[1]);
}

// scale = e4m3(min(448, factor * largest / 6)), code = e2m1(x * factor / scale), saturating. A NaN makes the group's scale
// NaN. Codes are 0 where the scale is 0 or NaN.
//
// Products with a reciprocal in two parts err by 2^-46, which is as good as division: a quotient decides only by the side
// of a midpoint t of e2m1 or e4m3 that it is on, or by being t. One float divides to t, exactly, and the quotients of all
// others are 2^-28 or more (relatively) away from where they would be rounded to t.
template <int INPUT> DEVICE Nvfp4Group quantize_nvfp4(const Elements<INPUT> &x, float factor) {
  Nvfp4Group r;
  const u32 bits = x.largest();
  r.finite = bits < INFINITY_BITS;
  const float largest = __fmul_rn(__uint_as_float(bits), factor);
  const Reciprocal sixth = {0.16666667163372040f, -4.9670537e-9f};
  float scale;
  r.scale = round_e4m3(sixth.times(fminf(largest, 2688.f)), scale); // 448 * 6
  if (largest != largest) r.scale = 0x7fu, scale = 0.f;

  const float divisor = fmaxf(scale, 0.001953125f); // 2^-9, the smallest above 0
  const float approx = reciprocal_approx(divisor);
  Reciprocal reciprocal;
  reciprocal.high = __fmaf_rn(__fmaf_rn(-divisor, approx, 1.f), approx, approx);
  reciprocal.low = __fmul_rn(__fmaf_rn(-divisor, reciprocal.high, 1.f), reciprocal.high);
  // A scale that is not 448 and not very small was not rounded down by much, and nothing lies beyond the last code.
  if (largest <= __fmul_rn(scale, 6.5f))
    r.codes = e2m1_codes<false>(x, factor, 0.f, reciprocal);
  else
    r.codes = e2m1_codes<true>(x, factor, __fmul_rn(scale, 6.f), reciprocal);
  const u32 signs = scale > 0.f ? 0x80808080u : 0u;
  r.codes.x = x.add_signs(r.codes.x, 0, signs), r.codes.y = x.add_signs(r.codes.y, 1, signs);
  return r;
}

DEVICE i64 row_offset(const RowsParams &p, u32 row) {
  const u32 outer = p.inner_size.quotient(row), inner = row - outer * p.inner_size.value;
  const u32 first = p.middle_size.quotient(outer), middle = outer - first * p.middle_size.value;
  return first * p.outer + middle * p.middle + inner * p.inner;
}

// A block takes 64 rows of a tile of 128, a warp rows r, r + 32, r + 64 and r + 96 at a time: their scales are neighbours.
template <int INPUT> DEVICE void quantize_rows(const RowsParams &p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const u32 lane = threadIdx.x & 31, s = lane & 7, quarter = lane >> 3;
  const u32 tile = blockIdx.x >> 1, line = (blockIdx.x & 1) * 16 + (threadIdx.x >> 5); // row % 32
  const u32 first = tile * PAGE + quarter * 32 + line;
  i64 offsets[2] = {first * p.inner, (first + WARPS) * p.inner};
  if (p.inner_size.multiplier) offsets[0] = row_offset(p, first), offsets[1] = row_offset(p, first + WARPS);
  Elements<INPUT> x[2];
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (first + i * WARPS < (u32)p.rows) x[i].load(p.x + offsets[i] + s * (GROUP * Elements<INPUT>::SIZE));
  const float factor = p.factor_at ? *p.factor_at : p.factor;
  u8 *scales = p.scales + (i64)tile * SCALE_BYTES + (s / 4 * 512 + line * 16 + quarter * 4 + s % 4);
  u8 *codes = p.codes + (i64)first * CODE_BYTES + s * 8;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (first + i * WARPS >= (u32)p.rows) { // a row that only fills the tile up
      scales[i * WARPS * 16] = 0;
      continue;
    }
    const Nvfp4Group group = quantize_nvfp4<INPUT>(x[i], factor);
    *(uint2 *)(codes + i * WARPS * CODE_BYTES) = group.codes;
    scales[i * WARPS * 16] = (u8)group.scale;
    if (!group.finite) p.faults[FAULT_X] = 1;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0 && !(factor > 0.f && factor < __uint_as_float(INFINITY_BITS)))
    p.faults[FAULT_FACTOR] = 1;
}

// --- tokens into slots ------------------------------------------------------------------------------------------------
struct Place {
  bool inside;              // of the cache: nothing is stored elsewhere
  u32 page, head, token, s; // s: the thread's 16 elements of the row
};

DEVICE u8 *row_of(const Side &side, const Place &at) {
  return side.out + at.page * side.out_page + at.head * side.out_head + at.token * side.out_token;
}

DEVICE u32 scale_offset(const ScaleOrder &order, u32 token, u32 s) {
  const u32 high = token >> order.token_bits, low = token - (high << order.token_bits);
  return low * order.low_token + high * order.high_token + s % 4 * order.low_s + s / 4 * order.high_s;
}

template <int INPUT> struct Nvfp4Writer {
  static DEVICE_MEMBER float factor(const Side &side) { return side.factor_at ? *side.factor_at : side.factor; }

  static DEVICE_MEMBER void store(const Elements<INPUT> &x, float factor, const Side &side, const Place &at) {
    const Nvfp4Group group = quantize_nvfp4<INPUT>(x, factor);
    if (!at.inside) return;
    *(uint2 *)(row_of(side, at) + at.s * 8) = group.codes;
    u8 *scales = side.scales + at.page * side.scales_page + at.head * side.scales_head;
    scales[scale_offset(side.scale_order, at.token, at.s)] = (u8)group.scale;
  }
};

// e4m3(x / divisor), saturating; NaN stays NaN. The divisor's power of two goes first: what that drives out of float's range
// is past 448 or rounds to 0. Then the quotient by m, off by less than a unit in the last place, is corrected once with the
// nearest reciprocal, which rounds it as division does (Markstein, 1990).
template <int INPUT> struct Fp8Writer {
  static DEVICE_MEMBER float factor(const Side &side) { return side.factor; }

  static DEVICE_MEMBER void store(const Elements<INPUT> &x, float factor, const Side &side, const Place &at) {
    const Reciprocal reciprocal = {side.reciprocal, side.rest};
    u32 bytes[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float q[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float magnitude = smaller_or_nan(fabsf(__fmul_rn(x[4 * i + j], factor)), 1024.f);
        const float near = reciprocal.times(magnitude);
        q[j] = __fmaf_rn(__fmaf_rn(-near, side.mantissa, magnitude), reciprocal.high, near);
      }
      bytes[i] = narrow_e4m3(q) | (x.tops(i) & 0x80808080u);
    }
    if (!at.inside) return;
    *(uint4 *)(row_of(side, at) + at.s * GROUP) = make_uint4(bytes[0], bytes[1], bytes[2], bytes[3]);
  }
};

// A warp takes 4 tokens of one head, K and V; a block 32 tokens.
template <int INPUT, typename Writer> DEVICE void write_tokens(const WriteParams &p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const u32 chunk = p.heads.quotient(blockIdx.x), lane = threadIdx.x & 31;
  const u32 token = (chunk * WARPS + (threadIdx.x >> 5)) * WARP_ROWS + lane / 8;
  if (token >= (u32)p.tokens) return;
  const i64 which = token * p.slots_step;
  const i64 slot = p.wide_slots ? ((const i64 *)p.slots)[which] : ((const int *)p.slots)[which];
  const float k_factor = Writer::factor(p.k), v_factor = Writer::factor(p.v);
  Place at;
  at.head = blockIdx.x - chunk * p.heads.value, at.s = lane & 7;
  const u32 in_row = at.s * (GROUP * Elements<INPUT>::SIZE);
  Elements<INPUT> k, v;
  k.load(p.k.x + token * p.k.x_token + at.head * p.k.x_head + in_row);
  v.load(p.v.x + token * p.v.x_token + at.head * p.v.x_head + in_row);
  at.inside = slot >= 0 && slot < p.pages * PAGE;
  at.page = (u32)(slot / PAGE), at.token = (u32)slot % PAGE;
  Writer::store(k, k_factor, p.k, at);
  Writer::store(v, v_factor, p.v, at);
}

// --- entry points -----------------------------------------------------------------------------------------------------
#define ENTRY(NAME, PARAMS, BODY)                                                                                      \
  extern "C" __global__ void __launch_bounds__(THREADS) NAME(const __grid_constant__ PARAMS p) { BODY(p); }
#define ENTRIES(NAME, INPUT)                                                                                           \
  ENTRY(msa_quantize_nvfp4_##NAME, RowsParams, (quantize_rows<INPUT>))                                                 \
  ENTRY(msa_write_nvfp4_##NAME, WriteParams, (write_tokens<INPUT, Nvfp4Writer<INPUT>>))                                \
  ENTRY(msa_write_fp8_##NAME, WriteParams, (write_tokens<INPUT, Fp8Writer<INPUT>>))
ENTRIES(bf16, BF16)
ENTRIES(fp16, FP16)
ENTRIES(fp32, FP32)
