// What the decode kernel asks of the machine: names for instructions that CUDA C++ has no word for.
//
// Compile-time choices, set by compile.py with -D:
//   KV_FORMAT   KV_BF16, KV_FP16, KV_FP8 or KV_NVFP4
//   GROUPS      groups of computing warps in a block; they take the tiles of an item in turn
//   WARPS       warps of a group; each owns 128 / WARPS output dims, and TILE / WARPS keys of the scores
//   TILE        keys of a tile (128 or 64)
//   STAGES      tiles in the copy ring
//   MIN_BLOCKS  blocks per multiprocessor that the registers must allow
//   SELECTS     if set: ids are chosen here, by scores, among up to so many blocks (128 or 256)
constexpr int HEAD_DIM = 128;
constexpr int BLOCK_KEYS = 128; // keys of a selectable block, and tokens of a page
constexpr int ROWS = 16;        // query heads of a row tile: the M of mma.m16n8k16
constexpr int GROUP_THREADS = WARPS * 32;
constexpr int WORKERS = GROUPS * GROUP_THREADS; // threads that compute
constexpr int THREADS = WORKERS + 32;           // one more warp copies
constexpr int LIST = 32;                     // selected blocks looked at in one go: one per lane of a warp

DEVICE void store_shared(u32 address, u32 x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory"); }
DEVICE void store_shared(u32 address, u32 x, u32 y) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(x), "r"(y) : "memory");
}
DEVICE u32 load_shared(u32 address) {
  u32 x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
DEVICE void load_shared(u32 address, u32 &x, u32 &y) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "r"(address) : "memory");
}
DEVICE u32 load_shared_half(u32 address) {
  u16 x;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(x) : "r"(address) : "memory");
  return x;
}

// Reads past the compiler: what the previous kernel wrote may not be asked for early.
DEVICE int read_global(const int *at) {
  int x;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}

// Has a pointer computed by here, not where it is first used.
template <typename T> DEVICE void keep(T *&x) { asm volatile("" : "+l"(x)); }
// Has a register kept: through a shuffle with itself nothing can be computed anew. The whole warp calls it.
DEVICE void keep(u32 &x, int lane) { x = __shfl_sync(~0u, x, lane); }

// --- barriers ---------------------------------------------------------------------------------------------------------
// All threads of one group; all computing threads of the block. The copying warp takes part in neither.
DEVICE void group_sync(int group) { asm volatile("barrier.cta.sync %0, %1;" ::"r"(group + 1), "n"(GROUP_THREADS) : "memory"); }
DEVICE bool group_sync_or(int group, bool x) {
  u32 any;
  asm volatile("{.reg .pred p, q; setp.ne.u32 p, %1, 0; barrier.cta.red.or.pred q, %3, %2, p; selp.u32 %0, 1, 0, q;}"
               : "=r"(any)
               : "r"((u32)x), "n"(GROUP_THREADS), "r"(group + 1)
               : "memory");
  return any;
}
DEVICE void workers_sync() {
  __syncwarp();
  asm volatile("barrier.cta.sync.aligned 15, %0;" ::"n"(WORKERS) : "memory");
}

// Arrivals of a warp at a phase barrier: one lane's for all, behind a `__syncwarp`. compute-sanitizer overlooks that one where the
// compiler needs no instruction for it; for its sake every lane may arrive for itself (tests/sanitize.py).
#ifdef EVERY_LANE_ARRIVES
constexpr int WARP_ARRIVALS = 32, COPY_ARRIVALS = 32; // the latter beside those that copies need
#else
constexpr int WARP_ARRIVALS = 1, COPY_ARRIVALS = 0;
#endif

// A place in a ring of `SLOTS`, with the parity of its present round.
template <int SLOTS> struct RingPosition {
  int slot = 0;
  u32 parity = 0;
  DEVICE_MEMBER void advance(int by) {
    slot += by;
    if (slot >= SLOTS) slot -= SLOTS, parity ^= 1;
  }
};

// --- arithmetic -------------------------------------------------------------------------------------------------------
DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Both halves times one half of `b`: the instruction takes it from there, which a permutation before it would not know.
template <int HALF> DEVICE u32 multiply_fp16_by(u32 a, u32 b) {
  u32 r;
  if constexpr (HALF == 0)
    asm("{.reg .b16 x, y; .reg .b32 s; mov.b32 {x, y}, %2; mov.b32 s, {x, x}; mul.rn.f16x2 %0, %1, s;}" : "=r"(r) : "r"(a), "r"(b));
  else
    asm("{.reg .b16 x, y; .reg .b32 s; mov.b32 {x, y}, %2; mov.b32 s, {y, y}; mul.rn.f16x2 %0, %1, s;}" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
