// What stands in for CUDA where the sources of device code are compiled for the host: its words, its instructions, and the
// threads of a thread block. Thread blocks run one after the other.
//
// The threads of a block are fibers. One runs until it has to meet others, in a warp's instruction or at a barrier; which one
// goes on then is drawn. So lanes and warps get as far ahead of one another as a barrier lets them, in another order for each
// seed. Until some thread of a block has waited for the previous kernel, memory is as that kernel finds it. What is wrong ends
// the launch with a message: lanes that meet in different instructions, threads that wait for ever, copies and hints that leave
// their tensors, reads by ldmatrix of what has not come.
//
// device_code.py gives __CUDA_ARCH__ and the program's options. Signatures are those of the functions whose place these take.
#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <type_traits>
#include <ucontext.h>
#include <utility>
#include <vector>

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __maxnreg__(...)

struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) float2 { float x, y; };
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static struct { u32 x; } threadIdx, blockIdx, gridDim;

// --- the machine ------------------------------------------------------------------------------------------------------
enum Arrival { EARLY, LATE, ANY }; // of copies: at once, no sooner than somebody waits for them, or either

// Memory that may be read ahead or copied from. `before`: what stands there until the previous kernel has ended, or null. `hints`:
// how often threads have asked L2 for a line of it.
struct Region {
  const u8 *first, *last, *before;
  u64 hints;
};

namespace machine {
constexpr int WARP = 32, MOST_THREADS = 128, STACK = 1 << 16;
constexpr u32 SHARED = 48 << 10; // bytes that a thread block has without asking
constexpr u8 POISON = 0x7f;      // NaN as a scale, and twice 6 and -6 as codes

struct Copy {
  u32 to;
  const void *from;
  u32 bytes;
};

struct Thread {
  ucontext_t start;
  jmp_buf here;
  bool started, waited;    // for the previous kernel
  const void *instruction; // where it meets the other lanes, with these operands
  void *operands;
  std::vector<std::vector<Copy>> groups; // committed copies under way; the last group is open
  std::vector<u8> stack;
};

struct Barrier {
  u32 expected;
  std::vector<int> threads;
};

static Thread threads[MOST_THREADS];
static std::vector<int> ready;
static int count, current, finished, favoured; // threads of the block; who runs; the warp that is ahead for a while
static int met[MOST_THREADS / WARP];
static std::map<int, Barrier> barriers;
static std::function<void()> body;
static jmp_buf host;
static char error[200];
static std::mt19937 draw;

alignas(1024) static u8 shared_memory[SHARED];
static bool under_way[SHARED]; // bytes that a copy is going to write
static u32 shared_used;
static Arrival arrival;
static std::vector<Region> regions;
static std::vector<std::vector<u8>> now; // of each region that has a `before`: what stands there when that kernel has ended
static bool ended;                                      // the previous kernel, for this block
static u32 stale;                                       // of two guesses so many are by what was before
static std::map<std::pair<int, const int *>, bool> saw; // by warp and place: lanes that read together see the same

[[noreturn]] static void fail(const char *what, long long detail = 0) {
  std::snprintf(error, sizeof error, "thread block %u, thread %d: %s (%lld)", blockIdx.x, current, what, detail);
  _longjmp(host, 1);
}

// On to a thread that can go on.
[[noreturn]] static void run_next() {
  if (ready.empty()) {
    if (finished == count) _longjmp(host, 1);
    fail("all threads wait: finished are", finished);
  }
  if (draw() % 64 == 0) favoured = draw() % (count / WARP);
  size_t place = draw() % ready.size();
  for (int tries = 0; tries < 4 && ready[place] / WARP != favoured; tries++) place = draw() % ready.size();
  current = ready[place];
  ready[place] = ready.back(), ready.pop_back();
  threadIdx.x = current;
  Thread &thread = threads[current];
  if (thread.started) _longjmp(thread.here, 1);
  thread.started = true;
  setcontext(&thread.start);
  fail("no such fiber");
}

// The others' turn, until this thread is ready again.
static void pause() {
  if (_setjmp(threads[current].here) == 0) run_next();
}

static void begin() {
  body();
  finished++;
  run_next();
}

// All lanes of a warp meet here, and the last one does the work of all. An instruction is its `work`.
template <typename Operands> static void together(Operands &mine, void (*work)(Operands *const (&)[WARP])) {
  const int warp = current / WARP;
  threads[current].instruction = (const void *)work, threads[current].operands = &mine;
  if (++met[warp] == WARP) {
    met[warp] = 0;
    Operands *all[WARP];
    for (int lane = 0; lane < WARP; lane++) {
      const Thread &other = threads[warp * WARP + lane];
      if (other.instruction != (const void *)work) fail("this lane and another meet in different instructions", lane);
      all[lane] = (Operands *)other.operands;
    }
    work(all);
    for (int lane = 0; lane < WARP; lane++) ready.push_back(warp * WARP + lane);
  }
  pause();
}

static void arrive(int number, u32 expected) {
  Barrier &barrier = barriers[number];
  if (!barrier.threads.empty() && barrier.expected != expected) fail("a barrier of different sizes", number);
  barrier.expected = expected;
  barrier.threads.push_back(current);
  if (barrier.threads.size() == expected) {
    ready.insert(ready.end(), barrier.threads.begin(), barrier.threads.end());
    barrier.threads.clear();
  }
  pause();
}

static Region &region_of(const void *at, u64 bytes, const char *what) {
  for (Region &region : regions)
    if ((const u8 *)at >= region.first && (const u8 *)at + bytes <= region.last) return region;
  fail(what, bytes);
}

static void land(const Copy &copy) {
  std::memcpy(shared_memory + copy.to, copy.from, copy.bytes);
  std::memset(under_way + copy.to, false, copy.bytes);
}

static void start_copy(u32 to, const void *from, u32 bytes) {
  if (!threads[current].waited) fail("copies before the previous kernel has ended");
  region_of(from, bytes, "copies from outside a tensor");
  if ((u64)from % bytes || to % bytes || to > shared_used - bytes) fail("copies to or from where it cannot", to);
  for (u32 i = 0; i < bytes; i++)
    if (under_way[to + i]) fail("copies to where a copy is under way", to);
  const Copy copy = {to, from, bytes};
  std::memset(shared_memory + to, POISON, bytes), std::memset(under_way + to, true, bytes);
  if (arrival == EARLY || (arrival == ANY && draw() % 2))
    land(copy);
  else
    threads[current].groups.back().push_back(copy);
}

static void wait_for_groups(size_t left) {
  auto &groups = threads[current].groups;
  const size_t due = groups.size() - 1 > left ? groups.size() - 1 - left : 0;
  for (size_t i = 0; i < due; i++)
    for (const Copy &copy : groups[i]) land(copy);
  groups.erase(groups.begin(), groups.begin() + due);
}

template <typename T> static T &shared() {
  static_assert(sizeof(T) <= SHARED, "");
  shared_used = sizeof(T);
  return *(T *)shared_memory;
}

// Puts into memory what stands there while the previous kernel still runs, or when it has ended.
static void set_memory(bool when_ended) {
  ended = when_ended;
  for (size_t i = 0; i < regions.size(); i++)
    if (const Region &r = regions[i]; r.before) std::memcpy((u8 *)r.first, ended ? now[i].data() : r.before, now[i].size());
}

// Others may get here first, or read meanwhile what they should not.
static void wait_for_previous_kernel() {
  ready.push_back(current);
  pause();
  threads[current].waited = true;
  if (!ended) set_memory(true);
}

static void run_block(u32 number) {
  blockIdx.x = number;
  std::memset(shared_memory, POISON, SHARED), std::memset(under_way, false, SHARED), std::memset(met, 0, sizeof met);
  barriers.clear(), ready.clear(), saw.clear();
  finished = favoured = 0, stale = draw() % 3;
  for (int i = 0; i < count; i++) {
    Thread &thread = threads[i];
    thread.started = false, thread.waited = __CUDA_ARCH__ < 900; // there a kernel starts when the one before has ended
    thread.groups.assign(1, {});
    thread.stack.resize(STACK);
    getcontext(&thread.start);
    thread.start.uc_stack.ss_sp = thread.stack.data(), thread.start.uc_stack.ss_size = STACK;
    makecontext(&thread.start, begin, 0);
    ready.push_back(i);
  }
  set_memory(__CUDA_ARCH__ < 900);
  if (_setjmp(host) == 0) run_next();
}

// What went wrong, or "".
template <typename Params>
static const char *launch(void (*kernel)(Params), const Params &params, int grid, int block, int arrivals, u32 seed,
                          Region *of, int number) {
  body = [=, &params] { kernel(params); };
  gridDim.x = grid, count = block, arrival = (Arrival)arrivals, error[0] = 0;
  regions.assign(of, of + number);
  draw.seed(seed);
  now.assign(number, {});
  for (int i = 0; i < number; i++)
    if (of[i].before) now[i].assign(of[i].first, of[i].last);
  for (int i = 0; i < grid && !error[0]; i++) run_block(i);
  set_memory(true);
  std::copy(regions.begin(), regions.end(), of);
  return error;
}
} // namespace machine

// --- functions of CUDA C++ --------------------------------------------------------------------------------------------
template <typename To, typename From> static To bits_as(From x) {
  To to;
  static_assert(sizeof to == sizeof x, "");
  std::memcpy(&to, &x, sizeof to);
  return to;
}
static int __float_as_int(float x) { return bits_as<int>(x); }
static u32 __float_as_uint(float x) { return bits_as<u32>(x); }
static float __int_as_float(int x) { return bits_as<float>(x); }
static float __uint_as_float(u32 x) { return bits_as<float>(x); }
static u32 __umulhi(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
template <typename A, typename B, typename Both = std::common_type_t<A, B>> static Both min(A a, B b) {
  return (Both)a < (Both)b ? a : b;
}
template <typename A, typename B, typename Both = std::common_type_t<A, B>> static Both max(A a, B b) {
  return (Both)a > (Both)b ? a : b;
}

static u32 permute(u32 a, u32 b, u32 selector) { // the fourth bit of a place makes the byte its sign
  u32 r = 0;
  for (int i = 0; i < 4; i++) {
    const u32 place = selector >> 4 * i & 15, byte = (u32)(((u64)b << 32 | a) >> 8 * (place & 7)) & 255;
    r |= (place < 8 ? byte : byte & 128 ? 255 : 0) << 8 * i;
  }
  return r;
}
static u32 high_half(u32 x) { return x >> 16; }
static int computed_anew(int x) { return x; }
static u32 __byte_perm(u32 a, u32 b, u32 selector) { return permute(a, b, selector & 0x7777); }
static u32 __vadd4(u32 a, u32 b) {
  u32 r = 0;
  for (int i = 0; i < 32; i += 8) r |= ((a >> i) + (b >> i) & 255) << i;
  return r;
}

static void __syncthreads() { machine::arrive(0, machine::count); }
template <int THREADS> static void barrier_sync(int number) { machine::arrive(number, THREADS); }
static void __syncwarp() {
  char nothing;
  machine::together<char>(nothing, [](char *const (&)[machine::WARP]) {});
}

template <typename T> struct Shuffle {
  T given, got;
  int from;
};
template <typename T> static T shuffle(T x, int from) {
  Shuffle<T> mine = {x, x, from & (machine::WARP - 1)};
  machine::together<Shuffle<T>>(mine, [](Shuffle<T> *const (&all)[machine::WARP]) {
    for (Shuffle<T> *lane : all) lane->got = all[lane->from]->given;
  });
  return mine.got;
}
template <typename T> static T __shfl_sync(u32, T x, int from) { return shuffle(x, from); }
template <typename T> static T __shfl_xor_sync(u32, T x, int distance) { return shuffle(x, machine::current ^ distance); }

// Of the kernels for all else, whose sources these share some files with: declared alone.
template <typename T> T __shfl_up_sync(u32, T, int);
u32 __ballot_sync(u32, bool);
u32 __reduce_add_sync(u32, u32);
int __ffs(u32);

// --- functions whose bodies are instructions --------------------------------------------------------------------------
#if __CUDA_ARCH__ >= 900
static void wait_for_previous_kernel() { machine::wait_for_previous_kernel(); }
static void let_next_kernel_start() {}
static void prefetch_bytes(const void *at, u32 bytes) {
  if (bytes == 0 || bytes % 16 || (u64)at % 16) machine::fail("asks L2 for what cannot be asked for", bytes);
  machine::region_of(at, bytes, "asks L2 for what lies outside a tensor");
}
#endif
static void prefetch_line(const void *at) { machine::region_of(at, 1, "asks L2 for a line outside a tensor").hints++; }
static int read_early(const int *at) {
  const Region &region = machine::region_of(at, sizeof *at, "reads early what lies outside a tensor");
  if (!region.before || machine::threads[machine::current].waited) return *at;
  const auto drawn = machine::saw.try_emplace({machine::current / machine::WARP, at}, machine::draw() % 2 < machine::stale);
  const u8 *const values = drawn.first->second ? region.before : machine::now[&region - machine::regions.data()].data();
  return bits_as<int>(*(const u32 *)(values + ((const u8 *)at - region.first)));
}

static u64 l2_evict_first() { return 0; }
static size_t __cvta_generic_to_shared(const void *at) { return (const u8 *)at - machine::shared_memory; }
template <int BYTES> static void copy_async(void *to, const void *from, u64) {
  machine::start_copy((u32)__cvta_generic_to_shared(to), from, BYTES);
}
static void copy_async_if(bool wanted, u32 to, const void *from) {
  if (wanted) machine::start_copy(to, from, 16);
}
static void commit_copies() { machine::threads[machine::current].groups.emplace_back(); }
template <int LEFT> static void wait_for_copies() { machine::wait_for_groups(LEFT); }
static uint4 load_again(const uint4 *at) { return *at; }

// Arithmetic. fp16 numbers are 11-bit multiples of a power of two that is at least 2^-24.
static double of_fp16(u32 x) {
  const int exponent = x >> 10 & 31, fraction = x & 1023;
  const double size = exponent == 31  ? (fraction ? NAN : INFINITY)
                      : exponent == 0 ? std::ldexp(fraction, -24)
                                      : std::ldexp(1024 + fraction, exponent - 25);
  return x & 0x8000 ? -size : size;
}
static u32 to_fp16(double x) { // to nearest even
  if (std::isnan(x)) return 0x7fff;
  const u32 sign = std::signbit(x) ? 0x8000 : 0;
  const double size = std::fabs(x);
  if (size >= 65520) return sign | 0x7c00;
  const int exponent = std::max(size > 0 ? std::ilogb(size) : -14, -14);
  return sign | (u32)((exponent + 14 << 10) + (int)std::nearbyint(std::ldexp(size, 10 - exponent)));
}
static u32 pack_fp16(float lo, float hi) { return to_fp16(lo) | to_fp16(hi) << 16; }
static float2 unpack_fp16(u32 x) { return {(float)of_fp16(x & 0xffff), (float)of_fp16(x >> 16)}; }
static u32 multiply_fp16(u32 a, u32 b) {
  return to_fp16(of_fp16(a & 0xffff) * of_fp16(b & 0xffff)) | to_fp16(of_fp16(a >> 16) * of_fp16(b >> 16)) << 16;
}
static u32 to_bf16(float x) {
  const u32 bits = bits_as<u32>(x);
  return std::isnan(x) ? 0x7fff : bits + 0x7fff + (bits >> 16 & 1) >> 16;
}
static u32 pack_bf16(float lo, float hi) { return to_bf16(lo) | to_bf16(hi) << 16; }
static float larger(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : a > b ? a : b; }
#if __CUDA_ARCH__ >= 890
static u32 e4m3_to_fp16(u32 x) {
  const int exponent = x >> 3 & 15, fraction = x & 7;
  const double size = (x & 127) == 127 ? NAN : exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(fraction, -9);
  return to_fp16(x & 128 ? -size : size);
}
static void widen_fp8(u32 x, u32 &lo, u32 &hi) {
  lo = e4m3_to_fp16(x & 255) | e4m3_to_fp16(x >> 8 & 255) << 16;
  hi = e4m3_to_fp16(x >> 16 & 255) | e4m3_to_fp16(x >> 24) << 16;
}
#endif

// Matrices, as the PTX ISA lays them out (ldmatrix; mma.m16n8k16 of 16-bit and mma.m16n8k32 of 8-bit elements).
struct Matrices {
  u32 address, words[4];
};
static void load_matrices(u32 address, u32 (&r)[4]) {
  if (address % 16 || address > machine::shared_used - 16) machine::fail("ldmatrix of what is no row", address);
  for (u32 i = 0; i < 16; i++)
    if (machine::under_way[address + i]) machine::fail("reads what has not come", address);
  Matrices mine = {address, {}};
  machine::together<Matrices>(mine, [](Matrices *const (&all)[machine::WARP]) {
    for (int matrix = 0; matrix < 4; matrix++)
      for (int lane = 0; lane < machine::WARP; lane++) {
        const u32 row = all[8 * matrix + lane / 4]->address;
        std::memcpy(&all[lane]->words[matrix], machine::shared_memory + row + lane % 4 * 4, 4);
      }
  });
  for (int i = 0; i < 4; i++) r[i] = mine.words[i];
}

template <typename Number> struct Product {
  u32 a[4], b[2];
  Number c[4];
};
// In both shapes a row of A and a column of B are eight words. Those of row r are at lanes r % 8 * 4 ..., four a register, and
// registers alternate between r < 8 and the others; of column n at lanes n * 4 ... Of a word `take` gives the numbers.
template <typename Number, typename Taken, int EACH>
static void multiply(Product<Number> *const (&all)[machine::WARP], Taken (*take)(u32 word, int i)) {
  Taken a[16][8 * EACH], b[8][8 * EACH];
  for (int word = 0; word < 8; word++)
    for (int i = 0; i < EACH; i++) {
      for (int row = 0; row < 16; row++)
        a[row][word * EACH + i] = take(all[row % 8 * 4 + word % 4]->a[row / 8 + word / 4 * 2], i);
      for (int column = 0; column < 8; column++)
        b[column][word * EACH + i] = take(all[column * 4 + word % 4]->b[word / 4], i);
    }
  for (int row = 0; row < 16; row++)
    for (int column = 0; column < 8; column++) {
      Number &c = all[row % 8 * 4 + column / 2]->c[row / 8 * 2 + column % 2];
      Taken sum = (Taken)c;
      for (int k = 0; k < 8 * EACH; k++) sum += a[row][k] * b[column][k];
      c = (Number)sum;
    }
}

static void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  Product<float> mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}, {c[0], c[1], c[2], c[3]}};
  machine::together<Product<float>>(mine, [](Product<float> *const (&all)[machine::WARP]) {
    multiply<float, double, 2>(all, [](u32 word, int i) {
      const u32 half = word >> 16 * i & 0xffff;
      return KV_FORMAT == 0 ? (double)bits_as<float>(half << 16) : of_fp16(half); // bf16 for keys of bf16 alone
    });
  });
  for (int i = 0; i < 4; i++) c[i] = mine.c[i];
}
static void multiply_add_codes(u32 (&d)[4], const u32 (&a)[4], uint2 b, const u32 (&c)[4]) {
  Product<u32> mine = {{a[0], a[1], a[2], a[3]}, {b.x, b.y}, {c[0], c[1], c[2], c[3]}};
  machine::together<Product<u32>>(mine, [](Product<u32> *const (&all)[machine::WARP]) {
    multiply<u32, int, 4>(all, [](u32 word, int i) { return (int)(signed char)(word >> 8 * i); });
  });
  for (int i = 0; i < 4; i++) d[i] = mine.c[i];
}
