// What the score kernel asks of the machine: instructions that CUDA C++ has no word for.
//
// Compile-time choices, set by score.py with -D:
//   KV_FORMAT    format of the index keys: KV_BF16, KV_FP16, KV_FP8 or KV_NVFP4
//   QUERY_PARTS  operands whose sum is a query: 2 for fp16 queries of bf16 keys, else 1
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define KV_BF16 0
#define KV_FP16 1
#define KV_FP8 2
#define KV_NVFP4 3

#if __CUDA_ARCH__ >= 900
#define HAS_DEPENDENT_LAUNCH 1
#endif
#if __CUDA_ARCH__ >= 890
#define HAS_E4M3_CVT 1 // cvt.rn.f16x2.e4m3x2
#endif
#if __CUDA_ARCH__ >= 1000 && (defined(__CUDA_ARCH_SPECIFIC__) || defined(__CUDA_ARCH_FAMILY_SPECIFIC__))
#define HAS_E2M1_CVT 1 // cvt.rn.f16x2.e2m1x2, on the `a` and `f` targets alone
#endif

#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define ALL_LANES 0xffffffffu
#define NEG_INF (-__int_as_float(0x7f800000))

// The previous kernel on the stream has finished and its writes are visible; nothing may be read or written before.
DEVICE void wait_for_previous_kernel() {
#ifdef HAS_DEPENDENT_LAUNCH
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE void let_next_kernel_start() {
#ifdef HAS_DEPENDENT_LAUNCH
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// A barrier of `THREADS` threads of the block; number 0 is that of `__syncthreads`.
template <int THREADS> DEVICE void barrier_sync(int number) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(number), "n"(THREADS) : "memory");
}

// A hint: brings a line into L2.
DEVICE void prefetch_line(const void *at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// For keys that are read once, and for keys that other thread blocks read soon.
DEVICE u64 l2_evict_first() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
DEVICE u64 l2_evict_normal() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// 16 bytes of keys or their scales. In the order of the program, so that those asked for ahead are under way first.
DEVICE uint4 load_keys(const u8 *at, u64 policy) {
  uint4 x;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(at), "l"(policy));
  return x;
}

// 16 bytes of shared memory, read where it stands: the compiler would rather keep what it has read in too many registers.
DEVICE uint4 load_again(const uint4 *at) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"((u32)__cvta_generic_to_shared(at)));
  return x;
}

// NaN if one of them is.
DEVICE float larger(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// `lo` in the lower half.
DEVICE u32 pack_fp16(float lo, float hi) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
DEVICE u32 pack_bf16(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
DEVICE float2 unpack_fp16(u32 x) {
  float2 r;
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}" : "=f"(r.x), "=f"(r.y) : "r"(x));
  return r;
}
DEVICE float2 unpack_bf16(u32 x) { return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)); }

DEVICE u32 multiply_fp16(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// 2^e as a float, for -126 <= e <= 127.
DEVICE float power_of_two(int e) { return __int_as_float((e + 127) << 23); }

// c += a (16 x 16, row) * b (16 x 8, column), fp32 accumulation.
DEVICE void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if KV_FORMAT == KV_BF16
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
