// To the range of fp16; NaN stays.
DEVICE float saturated(float x) { return x > 65504.f ? 65504.f : x < -65504.f ? -65504.f : x; }

// Partial results in device memory (scratch route), in pairs of neighbouring dims.
DEVICE void store_partial(const Params &p, i64 element, float a, float b) {
  switch (p.partial_type) {
  case PARTIAL_FP32: *(float2 *)((float *)p.partial + element) = make_float2(a, b); break;
  case PARTIAL_BF16: *(u32 *)((u16 *)p.partial + element) = pack_bf16(a, b); break;
  case PARTIAL_FP16: *(u32 *)((u16 *)p.partial + element) = pack_fp16(saturated(a), saturated(b)); break;
  default: *(u16 *)((u8 *)p.partial + element) = narrow_fp8(a, b); break;
  }
}

DEVICE float2 load_partial(const Params &p, i64 element) {
  switch (p.partial_type) {
  case PARTIAL_FP32: return *(const float2 *)((const float *)p.partial + element);
  case PARTIAL_BF16: return unpack_bf16(*(const u32 *)((const u16 *)p.partial + element));
  case PARTIAL_FP16: return unpack_fp16(*(const u32 *)((const u16 *)p.partial + element));
  default: {
    u32 lo, hi;
    widen_fp8(*(const u16 *)((const u8 *)p.partial + element), lo, hi);
    const float2 x = unpack_fp16(lo);
    return make_float2(x.x * FP8_FACTOR, x.y * FP8_FACTOR);
  }
  }
}
