// What the kernels of all programs share. Header-free: NVRTC compiles the concatenation of a program's files, of which this is the
// first.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#if __CUDA_ARCH__ >= 900
#define HAS_CLUSTER 1 // thread-block clusters, distributed shared memory, dependent launch, tensor copies (TMA)
#endif
#if __CUDA_ARCH__ >= 890
#define HAS_E4M3_CVT 1 // cvt to and from e4m3x2
#endif
#if __CUDA_ARCH__ >= 1000 && (defined(__CUDA_ARCH_SPECIFIC__) || defined(__CUDA_ARCH_FAMILY_SPECIFIC__))
#define HAS_E2M1_CVT 1 // cvt to and from e2m1x2, on the `a` and `f` targets alone
#endif
#if __CUDA_ARCH__ >= 1000 && !defined(HAS_E2M1_CVT)
#error "from compute capability 10.0 on the target is an `a` or `f` one"
#endif

#define DEVICE [[maybe_unused]] static __device__ __forceinline__ // not every program, format or target has a use for all
#define DEVICE_MEMBER __device__ __forceinline__
#define ALL_LANES 0xffffffffu
#define NEG_INF (-__int_as_float(0x7f800000))

// The previous kernel on the stream has finished and its writes are visible. Before this nothing may be written, and what is read
// (`prefetch_line`, `read_early`) decides nothing that is not checked after it.
DEVICE void wait_for_previous_kernel() {
#ifdef HAS_CLUSTER
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE void let_next_kernel_start() {
#ifdef HAS_CLUSTER
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// A hint: brings a line into L2, which the writes of the previous kernel pass through. Allowed before the wait.
DEVICE void prefetch_line(const void *at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

#ifdef HAS_CLUSTER
// The same for many bytes; both numbers are multiples of 16.
DEVICE void prefetch_bytes(const void *at, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(bytes));
}
#endif

// A value as it is now, while the previous kernel may still be writing it: for hints, and for guesses that are checked against
// what is read after the wait. Where that kernel does write it, what was asked for was read in vain. Past the first-level cache,
// where it would stay for the reads after the wait.
DEVICE int read_early(const int *at) {
  int x;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(at));
  return x;
}

DEVICE int read_now(const int *at) { return *at; }

DEVICE u32 shared_address(const void *at) { return (u32)__cvta_generic_to_shared(at); }

// For what is read once, and for what other thread blocks read soon.
DEVICE u64 l2_evict_first() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// For what other thread blocks may read soon or never: a tenth of the lines leaves first.
DEVICE u64 l2_evict_some_first() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.L2::evict_unchanged.b64 %0, 0.1;" : "=l"(policy));
  return policy;
}
DEVICE u64 l2_evict_normal() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Division by a number known at launch, for dividends below 2^31.
struct Divisor {
  u32 value, multiplier, shift; // multiplier 0: a divisor of 1
  DEVICE_MEMBER u32 quotient(u32 n) const { return multiplier ? __umulhi(n, multiplier) >> shift : n; }
  DEVICE_MEMBER u32 remainder(u32 n) const { return n - quotient(n) * value; }
};

// --- arithmetic -------------------------------------------------------------------------------------------------------
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

// The four bytes of a and b that `selector` names by its low four places. The fourth bit of a place makes the byte its sign, eight
// times: `__byte_perm` would first clear it.
DEVICE u32 permute(u32 a, u32 b, u32 selector) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
  return r;
}

// x, of which the compiler does not know that it is the same: what follows from it is computed once more.
DEVICE int computed_anew(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// The high half of x, by a dot product of its halves with 0 and 1: that runs beside the integer operations, of which a shift is one.
DEVICE u32 high_half(u32 x) {
  u32 r;
  asm("dp2a.lo.u32.u32 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(0x0100u), "r"(0u));
  return r;
}

// --- matrix fragments -------------------------------------------------------------------------------------------------
// Four 8 x 8 matrices of 16-bit elements: lane i gives the address of row i % 8 of matrix i / 8.
DEVICE void load_matrices(u32 address, u32 (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
DEVICE void load_matrices_transposed(u32 address, u32 (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
