// What the score kernels ask of the machine: instructions that CUDA C++ has no word for.
//
// Compile-time choices, set by score.py with -D:
//   KV_FORMAT    format of the index keys: KV_BF16, KV_FP16, KV_FP8 or KV_NVFP4
//   QUERY_PARTS  operands whose sum is a query: 2 for fp16 queries of bf16 keys, else 1
//   ROOM_...     thread blocks that a multiprocessor must have room for, by entry point
// A barrier of `THREADS` threads of the block; number 0 is that of `__syncthreads`.
template <int THREADS> DEVICE void barrier_sync(int number) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(number), "n"(THREADS) : "memory");
}

// 16 bytes of keys or their scales. In the order of the program, so that those asked for ahead are under way first.
DEVICE uint4 load_keys(const u8 *at, u64 policy) {
  uint4 x;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(at), "l"(policy));
  return x;
}

// Copies 16 bytes, or 4, to shared memory; `commit_copies`, `wait_for_copies`, then a barrier of those who read.
template <int BYTES> DEVICE void copy_async(void *to, const void *from, u64 policy) {
  const u32 at = shared_address(to);
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "l"(policy) : "memory");
  else
    asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], %3, %2;" ::"r"(at), "l"(from), "l"(policy), "n"(BYTES) : "memory");
}

// Of 16 bytes to an address in shared memory, if `wanted`: without a branch, and without a policy for L2, which would take
// registers.
DEVICE void copy_async_if(bool wanted, u32 to, const void *from) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p cp.async.cg.shared.global.L2::128B [%0], [%1], 16;}" ::"r"(to), "l"(from),
               "r"((u32)wanted)
               : "memory");
}

DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// For all but the last `LEFT` groups of this thread's copies.
template <int LEFT> DEVICE void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

// 16 bytes of shared memory, read where it stands: the compiler would rather keep what it has read in too many registers.
DEVICE uint4 load_again(const uint4 *at) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(shared_address(at)));
  return x;
}

// NaN if one of them is.
DEVICE float larger(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
