// Phase barriers, clusters of thread blocks and their shared memory: names for instructions that CUDA C++ has no word for.

// Phase barriers in shared memory. A waiter names the parity of the phase it waits for, starting at 0.
typedef u64 Barrier;
DEVICE void barrier_init(Barrier *b, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}
DEVICE void barrier_arrive(Barrier *b) {
  asm volatile("{.reg .b64 s; mbarrier.arrive.shared.b64 s, [%0];}" ::"r"(shared_address(b)) : "memory");
}
// Arrives when this thread's `cp.async` copies so far are complete.
DEVICE void barrier_arrive_after_copies(Barrier *b) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(b)) : "memory");
}
DEVICE void barrier_wait(Barrier *b, u32 parity) {
  u32 done;
  do {
#ifdef HAS_CLUSTER
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(shared_address(b)), "r"(parity)
                 : "memory");
#else
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(shared_address(b)), "r"(parity)
                 : "memory");
#endif
  } while (!done);
}
#ifdef HAS_CLUSTER
// Arrives, and makes the phase wait for `bytes` more to be written by tensor copies or by peers' sends.
DEVICE void barrier_expect(Barrier *b, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes) : "memory");
}
DEVICE void barrier_wait_for_peers(Barrier *b, u32 parity) {
  u32 done;
  do {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(shared_address(b)), "r"(parity)
                 : "memory");
  } while (!done);
}
#endif
// Makes initialised barriers visible to the copy engines and to the cluster.
DEVICE void publish_barriers() {
#ifdef HAS_CLUSTER
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// --- clusters ---------------------------------------------------------------------------------------------------------
#ifdef HAS_CLUSTER
DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE u32 address_in_rank(u32 address, u32 rank) {
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}
// Stores into a peer's shared memory; `barrier`, in the peer too, counts the bytes as they arrive. So a receiver waits for its
// data alone: no fence on the sender's side, no second barrier of the whole cluster.
DEVICE void send(u32 address, u32 barrier, float x) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
               "r"(__float_as_uint(x)), "r"(barrier)
               : "memory");
}
DEVICE void send(u32 address, u32 barrier, float2 x) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address),
               "f"(x.x), "f"(x.y), "r"(barrier)
               : "memory");
}
DEVICE void send(u32 address, u32 barrier, float4 x) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
               "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
               : "memory");
}
#endif
