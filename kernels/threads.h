// Threads that live for one call, and their scratch memory.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

// The processor's register of rounding and flush-to-zero modes.
#if defined(__SSE2__)
typedef unsigned Control;
constexpr Control kFlush = 0x8040, kPlain = 0x1F80;
inline Control control() { return _mm_getcsr(); }
inline void set_control(Control x) { _mm_setcsr(x); }
#elif defined(__aarch64__)
typedef uint64_t Control;
constexpr Control kFlush = Control(1) << 24, kPlain = 0;
inline Control control() {
  Control x;
  asm volatile("mrs %0, fpcr" : "=r"(x));
  return x;
}
inline void set_control(Control x) { asm volatile("msr fpcr, %0" ::"r"(x)); }
#else
typedef int Control;
constexpr Control kFlush = 0, kPlain = 0;
inline Control control() { return 0; }
inline void set_control(Control) {}
#endif

// Subnormal numbers count as 0. Processors are up to 100 times slower on them, and a backward has
// many of them if scores differ a lot.
struct FlushToZero {
  Control before = control();
  FlushToZero() { set_control(before | kFlush); }
  ~FlushToZero() { set_control(before); }
};

// Arithmetic in the default modes of IEEE 754, whatever modes the caller has set.
struct PlainArithmetic {
  Control before = control();
  PlainArithmetic() { set_control(kPlain); }
  ~PlainArithmetic() { set_control(before); }
};

// Calls work(task, thread) for all tasks; a free thread takes the next task.
template <class Mode, class Work>
void share(int64_t tasks, int64_t threads, Work work) {
  std::atomic<int64_t> next{0};
  auto run = [&](int64_t thread) {
    Mode mode;
    for (int64_t task = next++; task < tasks; task = next++) work(task, thread);
  };
  std::vector<std::thread> others;
  threads = std::min(tasks, threads);
  others.reserve(size_t(std::max<int64_t>(threads, 1)));
  for (int64_t thread = 1; thread < threads; ++thread) {
    try {
      others.emplace_back(run, thread);
    } catch (...) {
      break;  // the system has no more threads: the existing ones do all tasks
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

  // Aligned to cache lines.
  F* of(int64_t thread) const {
    auto address = reinterpret_cast<uintptr_t>(all_.get() + thread * elements_);
    return reinterpret_cast<F*>((address + 63) / 64 * 64);
  }

 private:
  int64_t elements_;
  std::unique_ptr<F[]> all_;
};

// Runs work(); returns 0, or 1 if memory cannot be allocated.
template <class Work>
int status(Work work) {
  try {
    work();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
