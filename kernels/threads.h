// Threads that live for a call, and their memory.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

// Numbers below the least normal one count as 0: processors are up to 100 times as slow on them,
// and where scores lie far apart a backward is full of them.
class FlushToZero {
 public:
#if defined(__SSE2__)
  FlushToZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushToZero() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  FlushToZero() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" ::"r"(before_ | (uint64_t(1) << 24)));
  }
  ~FlushToZero() { asm volatile("msr fpcr, %0" ::"r"(before_)); }

 private:
  uint64_t before_;
#endif
};

// Calls work(task, thread) for all tasks, the next to whichever thread is free.
template <class Work>
void share(int64_t tasks, int64_t threads, Work work) {
  std::atomic<int64_t> next{0};
  auto run = [&](int64_t thread) {
    FlushToZero flush;
    for (int64_t task = next++; task < tasks; task = next++) work(task, thread);
  };
  std::vector<std::thread> others;
  threads = std::min(tasks, threads);
  others.reserve(size_t(std::max<int64_t>(threads, 1)));
  for (int64_t thread = 1; thread < threads; ++thread) {
    try {
      others.emplace_back(run, thread);
    } catch (...) {
      break;  // the system gives no more threads: those that there are do all
    }
  }
  run(0);
  for (auto& thread : others) thread.join();
}

template <class F>
class Memory {
 public:
  Memory(int64_t threads, int64_t elements)
      : elements_(elements), all_(new F[size_t(threads * elements)]) {}

  // Aligned to the lines of caches.
  F* of(int64_t thread) const {
    auto address = reinterpret_cast<uintptr_t>(all_.get() + thread * elements_);
    return reinterpret_cast<F*>((address + 63) / 64 * 64);
  }

 private:
  int64_t elements_;
  std::unique_ptr<F[]> all_;
};
