// From stored values to operands of the products: bf16 for bf16 K and V, else fp16. Widening is exact for every finite value.
#define KV_BF16 0
#define KV_FP16 1
#define KV_FP8 2
#define KV_NVFP4 3
enum QueryType { QUERY_BF16 = 0, QUERY_FP16 = 1, QUERY_FP8 = 2, QUERY_NVFP4 = 3 }; // the last for scores alone

constexpr bool PRODUCT_BF16 = KV_FORMAT == KV_BF16;

DEVICE u32 pack_product(float lo, float hi) { return PRODUCT_BF16 ? pack_bf16(lo, hi) : pack_fp16(lo, hi); }

// c += a (16 x 16, row) * b (16 x 8, column), fp32 accumulation.
DEVICE void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (PRODUCT_BF16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// bf16 spans far more than fp16: a power of two per row brings its largest element to [2^14, 2^15), and every element
// down to 2^-24 of that keeps its bits. Returns the inverse power. Sixteen neighbouring lanes hold one row.
DEVICE float narrow_row(u32 (&w)[4]) {
  u32 largest = 0;
#pragma unroll
  for (int j = 0; j < 4; j++) largest = max(largest, max(w[j] & 0x7fffu, (w[j] >> 16) & 0x7fffu));
#pragma unroll
  for (int d = 8; d >= 1; d >>= 1) largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, d));
  const int shift = max(-126, min(126, 14 + 127 - (int)(largest >> 7)));
  const float factor = power_of_two(shift);
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const float2 x = unpack_bf16(w[j]);
    w[j] = pack_fp16(x.x * factor, x.y * factor);
  }
  return power_of_two(-shift);
}

// Four e4m3 bytes to two fp16 pairs: bytes 0, 1 and bytes 2, 3.
DEVICE void widen_fp8(u32 x, u32 &lo, u32 &hi) {
#ifdef HAS_E4M3_CVT
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b;}"
      : "=r"(lo), "=r"(hi)
      : "r"(x));
#else
  // The seven magnitude bits of e4m3 moved under fp16's exponent are the value times 2^-8 (FP8_FACTOR undoes it).
  u32 a = __byte_perm(x, 0, 0x1404), b = __byte_perm(x, 0, 0x3424);
  lo = (a & 0x80008000u) | ((a >> 1) & 0x3f803f80u);
  hi = (b & 0x80008000u) | ((b >> 1) & 0x3f803f80u);
#endif
}

// What a widened e4m3 element must be multiplied with to be the stored value; folded into the softmax scale and the output.
#ifdef HAS_E4M3_CVT
constexpr float FP8_FACTOR = 1.f;
#else
constexpr float FP8_FACTOR = 256.f;
#endif

// NVFP4. A word of eight e2m1 codes, element 0 in the lowest nibble, widens to four fp16 pairs; NVFP4_FACTOR undoes the power of
// two that is left in them. Their products with an e4m3 block scale have at most 6 significant bits and stay multiples of
// fp16's smallest step below its largest value: exact.
#ifdef HAS_E2M1_CVT
constexpr float NVFP4_FACTOR = 1.f;
DEVICE void widen_fp4_bytes(u32 x, u32 (&r)[4]) { // pair i: elements 2i, 2i + 1
  asm("{.reg .b8 a, b, c, d; mov.b32 {a, b, c, d}, %4; cvt.rn.f16x2.e2m1x2 %0, a; cvt.rn.f16x2.e2m1x2 %1, b;"
      "cvt.rn.f16x2.e2m1x2 %2, c; cvt.rn.f16x2.e2m1x2 %3, d;}"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
      : "r"(x));
}
#else
// The magnitude of e2m1 moved under fp16's exponent is the value times 2^-14. It and the sign lie in the upper byte, so that four
// elements are made at a time, as bytes: elements 0, 2, 4, 6 (`even`) and 1, 3, 5, 7 (`odd`).
constexpr float NVFP4_FACTOR = 16384.f;
DEVICE void widen_fp4_bytes(u32 x, u32 &even, u32 &odd) {
  even = ((x << 4) & 0x80808080u) | ((x << 1) & 0x0e0e0e0eu);
  odd = (x & 0x80808080u) | ((x >> 3) & 0x0e0e0e0eu);
}
#endif

// A word of K: the pairs of elements are whatever comes cheapest, and `pair_fp4_query` brings the query into the same order.
DEVICE void widen_fp4_keys(u32 x, u32 (&r)[4]) {
#ifdef HAS_E2M1_CVT
  widen_fp4_bytes(x, r); // (0, 1), (2, 3), (4, 5), (6, 7)
#else
  u32 even, odd; // (0, 2), (4, 6), (1, 3), (5, 7)
  widen_fp4_bytes(x, even, odd);
  r[0] = __byte_perm(even, 0, 0x1404), r[1] = __byte_perm(even, 0, 0x3424);
  r[2] = __byte_perm(odd, 0, 0x1404), r[3] = __byte_perm(odd, 0, 0x3424);
#endif
}

// Neighbouring pairs (0, 1), (2, 3), (4, 5), (6, 7) of a query to the pairs of `widen_fp4_keys`.
DEVICE void pair_fp4_query(const u32 (&w)[4], u32 (&r)[4]) {
#ifdef HAS_E2M1_CVT
  r[0] = w[0], r[1] = w[1], r[2] = w[2], r[3] = w[3];
#else
  r[0] = __byte_perm(w[0], w[1], 0x5410), r[1] = __byte_perm(w[2], w[3], 0x5410);
  r[2] = __byte_perm(w[0], w[1], 0x7632), r[3] = __byte_perm(w[2], w[3], 0x7632);
#endif
}

// Words of V hold elements 0..3 of two keys, one key a half: pair i is element i of both keys.
DEVICE void widen_fp4_values(u32 x, u32 (&r)[4]) {
#ifdef HAS_E2M1_CVT
  u32 y[4];
  widen_fp4_bytes(x, y);
  r[0] = __byte_perm(y[0], y[2], 0x5410), r[1] = __byte_perm(y[0], y[2], 0x7632);
  r[2] = __byte_perm(y[1], y[3], 0x5410), r[3] = __byte_perm(y[1], y[3], 0x7632);
#else
  u32 even, odd;
  widen_fp4_bytes(x, even, odd);
  r[0] = __byte_perm(even, 0, 0x2404), r[1] = __byte_perm(odd, 0, 0x2404);
  r[2] = __byte_perm(even, 0, 0x3414), r[3] = __byte_perm(odd, 0, 0x3414);
#endif
}

// Four e4m3 block scales to two fp16 pairs, in units of 1.
DEVICE void widen_scales(u32 x, u32 &lo, u32 &hi) {
  widen_fp8(x, lo, hi);
#ifndef HAS_E4M3_CVT
  lo = multiply_fp16(lo, 0x5c005c00u), hi = multiply_fp16(hi, 0x5c005c00u); // 256
#endif
}

constexpr float KV_FACTOR = KV_FORMAT == KV_FP8 ? FP8_FACTOR : KV_FORMAT == KV_NVFP4 ? NVFP4_FACTOR : 1.f;

// Eight stored query values, e4m3 in the first two words, to operands of the products, in place. Returns what the products must be
// multiplied with for it. NVFP4 is not for this.
DEVICE float widen_query(u32 (&w)[4], int type) {
  float undo = 1.f;
  if (type == QUERY_FP8) {
    const u32 low = w[0], high = w[1];
    widen_fp8(low, w[0], w[1]);
    widen_fp8(high, w[2], w[3]);
    undo = FP8_FACTOR;
    if constexpr (PRODUCT_BF16) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float2 x = unpack_fp16(w[j]);
        w[j] = pack_bf16(x.x, x.y);
      }
    }
  } else if (!PRODUCT_BF16 && type == QUERY_BF16) {
    undo = narrow_row(w);
  }
  return undo;
}

// Two floats to two e4m3 bytes, nearest even, saturating.
DEVICE u16 narrow_fp8(float a, float b) {
#ifdef HAS_E4M3_CVT
  u16 r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(b), "f"(a));
  return r;
#else
  u32 r = 0;
  const float x[2] = {a, b};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    // Adding 2^e with e chosen so that the wanted last bit is the float's last bit rounds to nearest even.
    const float m = fminf(fabsf(x[i]), 448.f);
    const int exponent = max((__float_as_int(m) >> 23) - 127, -6);
    const float anchor = power_of_two(exponent - 3 + 23);
    const float rounded = (m + anchor) - anchor;
    const int top = max((__float_as_int(rounded) >> 23) - 127, -6);
    const int steps = (int)(rounded * power_of_two(3 - top)); // in units of the last place: 0..15
    const int code = steps < 8 ? steps : ((top + 7) << 3) + steps - 8;
    r |= (u32)(code | (x[i] < 0.f ? 0x80 : 0)) << (8 * i);
  }
  return (u16)r;
#endif
}
