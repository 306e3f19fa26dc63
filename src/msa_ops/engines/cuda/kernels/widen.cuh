// Widening of stored K and V to the operand type of the products, exact for every finite value.

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
constexpr float KV_FACTOR = KV_FORMAT == KV_FP8 ? FP8_FACTOR : 1.f;

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
