// Squared norms of per-sample gradients, sums of clipped gradients on a grid, noise on this grid,
// and the backward of layer norm, on the CPU. grads_cpu.py and noise_cpu.py call it and describe
// the tensors.
//
// A call takes all parameters that are clipped together, each as one Part.

#include <cmath>
#include <limits>
#include <mutex>
#include <new>
#include <type_traits>

#include "chacha20.h"
#include "rounded_normal.h"
#include "threads.h"

namespace {

// A block of kSquaresBlock elements has kSums sums of squares, added in an order that is the same
// on all processors.
constexpr int kSums = 32;
constexpr int64_t kSquaresBlock = 4096;
// The backward of layer norm adds up the gradients of kNormRows rows of a sample at a time.
constexpr int64_t kNormRows = 64;

// A parameter: its per-sample gradients and the result. noise_cpu.py makes Parts.
struct Part {
  const void* grads;
  int64_t stride, elements;  // stride: between samples; elements: per sample
  void* out;
  int64_t threads, offset, id;  // offset, id: position in the noise stream, parameter's number

  template <class F>
  const F* of_sample(int64_t i) const { return static_cast<const F*>(grads) + i * stride; }
};

// Loads `count` numbers as fp64; the remaining lanes are 0.
template <class F>
inline Doubles wide(const F* from, int64_t count = kDoubles) {
  typedef F Narrow __attribute__((vector_size(kDoubles * sizeof(F))));
  Narrow x{};
  std::memcpy(&x, from, size_t(count) * sizeof(F));
  return __builtin_convertvector(x, Doubles);
}

inline void store_some(double* to, Doubles x, int64_t count) {
  std::memcpy(to, &x, size_t(count) * sizeof(double));
}

// Calls work(i, n) for each vector of n numbers from i on; n is a constant for full vectors.
template <int lanes = kDoubles, class Work>
inline void for_vectors(int64_t count, Work work) {
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) work(i, std::integral_constant<int64_t, lanes>());
  if (i < count) work(i, count - i);
}

// Adds the squares of `count` numbers to kSums sums.
template <class F>
inline void add_squares(const F* from, int64_t count, double* sums) {
  constexpr int kEach = kSums / kDoubles;
  Doubles own[kEach];
  for (int k = 0; k < kEach; ++k) own[k] = load<double>(sums + k * kDoubles);
  int64_t i = 0;
  for (; i + kSums <= count; i += kSums) {
    for (int k = 0; k < kEach; ++k) {
      Doubles x = wide(from + i + k * kDoubles);
      own[k] += x * x;
    }
  }
  for (int k = 0; k < kEach && i < count; ++k, i += kDoubles) {
    Doubles x = wide(from + i, std::min<int64_t>(kDoubles, count - i));
    own[k] += x * x;
  }
  for (int k = 0; k < kEach; ++k) store<double>(sums + k * kDoubles, own[k]);
}

inline double total(double* sums) {
  for (int half = kSums / 2; half > 0; half /= 2) {
    for (int k = 0; k < half; ++k) sums[k] += sums[k + half];
  }
  return sums[0];
}

// Adds an upper bound of the sum of the squares of sample i to squares[i].
template <class F>
void squared_norms(const Part& part, int64_t batch, double* squares) {
  int64_t blocks = (part.elements + kSquaresBlock - 1) / kSquaresBlock;
  // A square is in at most 127 additions to one of the sums, 5 within its block, and 1 per block.
  int64_t terms = std::min(part.elements, 132 + blocks);
  double rounding = 1 + double(terms + 1) * 0x1p-52;
  std::vector<double> of_blocks(size_t(batch * blocks));
  share<PlainArithmetic>(batch * blocks, part.threads, [&](int64_t task, int64_t) {
    int64_t begin = task % blocks * kSquaresBlock;
    double sums[kSums] = {};
    const F* from = part.of_sample<F>(task / blocks) + begin;
    add_squares(from, std::min(kSquaresBlock, part.elements - begin), sums);
    of_blocks[size_t(task)] = total(sums);
  });
  for (int64_t i = 0; i < batch; ++i) {
    double sum = 0;
    for (int64_t k = 0; k < blocks; ++k) sum += of_blocks[size_t(i * blocks + k)];
    // volatile: not fused into the sum, as in the reference implementation.
    volatile double bounded = sum * rounding;
    squares[i] += bounded;
  }
}

// Returns min(1, bound / norm), rounded down; 0 if the norm is not finite or the factor subnormal.
void clip_factors(const double* squares, double bound, double above, double below, int64_t batch,
                  float* factors) {
  for (int64_t i = 0; i < batch; ++i) {
    double norm = std::sqrt(squares[i]) * above;
    double factor = norm > bound ? 1 / norm * bound * below : 1.0;
    float narrow = std::isfinite(norm) ? float(factor) : 0.0f;
    if (narrow > factor) narrow = std::nextafter(narrow, 0.0f);
    factors[i] = narrow < std::numeric_limits<float>::min() ? 0.0f : narrow;
  }
}

// Truncates toward zero. The sign is removed and restored as bits, so that the compiler does not
// fuse a product before or a sum after this function.
inline Doubles truncated(Doubles x) {
  Longs bits = as_longs(x), sign = bits & ~kMagnitude;
  Doubles size = as_doubles(bits & kMagnitude), whole = rounded(size);
  whole = whole > size ? whole - 1.0 : whole;
  return as_doubles(as_longs(whole) | sign);
}

struct Grid {
  double step, inverse;
  explicit Grid(double grid) : step(grid), inverse(1 / grid) {}
};

// For each element, adds the numbers of all `samples` times their factors, truncated to the grid.
template <int samples, class F>
inline void add_clipped(const F* const* grads, const double* factors, int64_t begin, int64_t count,
                        Grid grid, double* sums) {
  for_vectors(count, [&](int64_t i, auto n) {
    Doubles sum = wide(sums + i, n);
    for (int s = 0; s < samples; ++s) {
      Doubles x = wide(grads[s] + begin + i, n) * factors[s];
      sum += truncated(x * grid.inverse) * grid.step;
    }
    store_some(sums + i, sum, n);
  });
}

// Clipping factors, float or double.
struct Factors {
  const void* of_samples;
  int64_t bytes;  // bytes per factor
  double operator[](int64_t i) const {
    return bytes == 4 ? static_cast<const float*>(of_samples)[i]
                      : static_cast<const double*>(of_samples)[i];
  }
};

// The samples of a sum, that is, those whose factor is not 0.
template <class F>
struct Samples {
  std::vector<const F*> grads;
  std::vector<double> factors;

  Samples(const Part& part, Factors factor, int64_t batch) {
    for (int64_t i = 0; i < batch; ++i) {
      if (factor[i] == 0) continue;
      grads.push_back(part.of_sample<F>(i));
      factors.push_back(factor[i]);
    }
  }

  void add(int64_t begin, int64_t count, Grid grid, double* sums) const {
    constexpr int kTogether = 4;
    size_t i = 0;
    for (; i + kTogether <= grads.size(); i += kTogether) {
      add_clipped<kTogether>(&grads[i], &factors[i], begin, count, grid, sums);
    }
    for (; i < grads.size(); ++i) {
      add_clipped<1>(&grads[i], &factors[i], begin, count, grid, sums);
    }
  }
};

}  // namespace

// An element whose first word does not determine its noise. `steps` is the element's sum before
// noise, in grid steps.
struct Open {
  int64_t part, index, word;
  double steps;
};

struct Noise {
  Stream stream;
  double scale, grid;
  Open* open;  // owned by the caller, who frees it by `forget`
  int64_t open_count;
};

namespace {

// Writes out = grid * (sums / grid + Z) for all elements, rounded once; NaN if Z is open.
// get(begin, count, sums) writes the sums.
template <class F, class Get>
void add_noise(const Noise& noise, const Part& part, int64_t number, std::vector<Open>& all,
               Get get) {
  Grid grid(noise.grid);
  Stream stream = noise.stream;
  stream.nonce[2] = uint32_t(part.id);
  F* out = static_cast<F*>(part.out);
  int64_t first = part.offset / kRun, end = part.offset + part.elements;
  int64_t tasks = (end + kRun - 1) / kRun - first;
  std::mutex mutex;
  bool full = false;
  Memory<Run> memory(std::max<int64_t>(1, std::min(part.threads, tasks)), 1);
  share<PlainArithmetic>(tasks, part.threads, [&](int64_t task, int64_t thread) {
    Run& run = *memory.of(thread);
    int64_t from = (first + task) * kRun, word = std::max(from, part.offset);
    int count = int(std::min(from + kRun, end) - word);
    // The keystream is made in vectors of kBlocks blocks, which begin at multiples of kBlocks.
    int64_t block = word / kBlockWords / kBlocks * kBlocks, skip = word - block * kBlockWords;
    for (int64_t made = 0; made < skip + count; made += kBlocks * kBlockWords) {
      keystream(stream, uint32_t(block + made / kBlockWords), run.words + made);
    }
    bool open = normals_of_words(run.words + skip, count, noise.scale, run);
    int64_t begin = word - part.offset;
    get(begin, count, run.sums);
    for (int i = 0; i < count; ++i) {
      out[begin + i] = F((run.sums[i] * grid.inverse + run.normals[i]) * grid.step);
    }
    for (int i = 0; open && i < count; ++i) {
      if (run.normals[i] == run.normals[i]) continue;
      std::lock_guard<std::mutex> lock(mutex);
      try {
        all.push_back({number, begin + i, run.words[skip + i], run.sums[i] * grid.inverse});
      } catch (const std::bad_alloc&) {
        full = true;
      }
    }
  });
  if (full) throw std::bad_alloc();
}

// Calls add(part, number, open) for each part, and stores the open elements in `noise`.
template <class Add>
void for_noised(Noise& noise, const Part* parts, int64_t count, Add add) {
  std::vector<Open> all;
  for (int64_t k = 0; k < count; ++k) add(parts[k], k, all);
  noise.open = new Open[all.size()];
  noise.open_count = int64_t(all.size());
  std::copy(all.begin(), all.end(), noise.open);
}

inline Doubles nearest(Doubles x) {
  Longs bits = as_longs(x);
  return as_doubles(as_longs(rounded(as_doubles(bits & kMagnitude))) | (bits & ~kMagnitude));
}

// Computes round(scale * N) of words; NaN if a word does not determine it.
void normals_of_words(const int64_t* words, int64_t count, double scale, double* normals) {
  Memory<Run> memory(1, 1);
  share<PlainArithmetic>((count + kRun - 1) / kRun, 1, [&](int64_t task, int64_t) {
    Run& run = *memory.of(0);
    int64_t begin = task * kRun, size = std::min<int64_t>(kRun, count - begin);
    std::copy(words + begin, words + begin + size, run.words);
    normals_of_words(run.words, int(size), scale, run);
    std::copy(run.normals, run.normals + size, normals + begin);
  });
}

// Rounds out to the grid and adds noise.
template <class F>
void noise_alone(Noise& noise, const Part* parts, int64_t count) {
  Grid grid(noise.grid);
  for_noised(noise, parts, count, [&](const Part& part, int64_t number, std::vector<Open>& open) {
    const F* out = static_cast<const F*>(part.out);
    add_noise<F>(noise, part, number, open, [&](int64_t begin, int64_t size, double* sums) {
      for_vectors(size, [&](int64_t i, auto n) {
        store_some(sums + i, nearest(wide(out + begin + i, n) * grid.inverse) * grid.step, n);
      });
    });
  });
}

template <class F>
void noised_sums(Noise& noise, const Part* parts, int64_t count, Factors factors, int64_t batch) {
  Grid grid(noise.grid);
  for_noised(noise, parts, count, [&](const Part& part, int64_t number, std::vector<Open>& open) {
    Samples<F> samples(part, factors, batch);
    add_noise<F>(noise, part, number, open, [&](int64_t begin, int64_t size, double* sums) {
      std::fill(sums, sums + size, 0.0);
      samples.add(begin, size, grid, sums);
    });
  });
}

// Adds the samples' clipped gradients, truncated to the grid, to the results, or to 0 if `fresh`.
template <class F>
void clipped_sums(double step, const Part* parts, int64_t count, Factors factors, int64_t batch,
                  int64_t fresh) {
  Grid grid(step);
  for (const Part* part = parts; part < parts + count; ++part) {
    Samples<F> samples(*part, factors, batch);
    double* sums = static_cast<double*>(part->out);
    int64_t tasks = (part->elements + kRun - 1) / kRun;
    share<PlainArithmetic>(tasks, part->threads, [&](int64_t task, int64_t) {
      int64_t begin = task * kRun, size = std::min<int64_t>(kRun, part->elements - begin);
      if (fresh) std::fill(sums + begin, sums + begin + size, 0.0);
      samples.add(begin, size, grid, sums + begin);
    });
  }
}

// Loads `count` numbers; the remaining lanes are 0.
template <class F>
inline Vector<F> load_some(const F* from, int64_t count) {
  Vector<F> x{};
  std::memcpy(&x, from, size_t(count) * sizeof(F));
  return x;
}

template <class F>
inline void add_some(F* to, Vector<F> x, int64_t count) {
  x += load_some(to, count);
  std::memcpy(to, &x, size_t(count) * sizeof(F));
}

template <class F>
inline F sum_of_lanes(Vector<F> x) {
  F lanes[kLanes<F>];
  store<F>(lanes, x);
  for (int half = kLanes<F> / 2; half > 0; half /= 2) {
    for (int k = 0; k < half; ++k) lanes[k] += lanes[k + half];
  }
  return lanes[0];
}

// Writes the gradients of x [batch, rows, width], and of weight and bias for each sample
// [batch, width]. A task takes kNormRows rows of a sample, so no bit depends on the threads.
template <class F>
void layer_norm(const F* dy, const F* x, const F* mean, const F* rstd, const F* weight,
                int64_t batch, int64_t rows, int64_t width, int64_t threads, F* dx, F* dweight,
                F* dbias) {
  constexpr int kN = kLanes<F>;
  int64_t blocks = (rows + kNormRows - 1) / kNormRows;
  std::vector<F> of_blocks(size_t(batch * blocks * 2 * width));
  share<PlainArithmetic>(batch * blocks, threads, [&](int64_t task, int64_t) {
    int64_t sample = task / blocks * rows, first = task % blocks * kNormRows;
    F* of_weight = of_blocks.data() + task * 2 * width;
    F* of_bias = of_weight + width;
    for (int64_t r = sample + first; r < sample + std::min(rows, first + kNormRows); ++r) {
      const F *of_dy = dy + r * width, *of_x = x + r * width;
      F* out = dx + r * width;
      Vector<F> sum{}, inner{};
      for_vectors<kN>(width, [&](int64_t i, auto n) {
        Vector<F> d = load_some(of_dy + i, n);
        Vector<F> normed = (load_some(of_x + i, n) - mean[r]) * rstd[r];
        add_some(of_weight + i, d * normed, n);
        add_some(of_bias + i, d, n);
        d *= load_some(weight + i, n);
        sum += d;
        inner += d * normed;
      });
      F mean_of_d = sum_of_lanes<F>(sum) / F(width), slope = sum_of_lanes<F>(inner) / F(width);
      for_vectors<kN>(width, [&](int64_t i, auto n) {
        Vector<F> d = load_some(of_dy + i, n) * load_some(weight + i, n);
        Vector<F> normed = (load_some(of_x + i, n) - mean[r]) * rstd[r];
        d = (d - mean_of_d - normed * slope) * rstd[r];
        std::memcpy(out + i, &d, size_t(n) * sizeof(F));
      });
    }
  });
  share<PlainArithmetic>(batch, threads, [&](int64_t sample, int64_t) {
    for (int64_t i = 0; i < 2 * width; ++i) {
      double sum = 0;
      for (int64_t k = sample * blocks; k < (sample + 1) * blocks; ++k) {
        sum += of_blocks[size_t(k * 2 * width + i)];
      }
      (i < width ? dweight + sample * width : dbias + (sample - 1) * width)[i] = F(sum);
    }
  });
}

}  // namespace

#define FOR_NUMBERS(F)                                                                            \
  int squared_norms_##F(const Part* parts, int64_t count, int64_t batch, double* squares) {       \
    return status([&] {                                                                           \
      for (int64_t k = 0; k < count; ++k) squared_norms<F>(parts[k], batch, squares);             \
    });                                                                                           \
  }                                                                                               \
  int clipped_sums_##F(double grid, const Part* parts, int64_t count, const void* factors,        \
                       int64_t bytes, int64_t batch, int64_t fresh) {                             \
    return status([&] {                                                                           \
      clipped_sums<F>(grid, parts, count, Factors{factors, bytes}, batch, fresh);                 \
    });                                                                                           \
  }                                                                                               \
  int noised_sums_##F(Noise* noise, const Part* parts, int64_t count, const void* factors,        \
                      int64_t bytes, int64_t batch) {                                             \
    return status([&] {                                                                           \
      noised_sums<F>(*noise, parts, count, Factors{factors, bytes}, batch);                       \
    });                                                                                           \
  }                                                                                               \
  int noise_alone_##F(Noise* noise, const Part* parts, int64_t count) {                           \
    return status([&] { noise_alone<F>(*noise, parts, count); });                                 \
  }                                                                                               \
  int layer_norm_##F(const F* dy, const F* x, const F* mean, const F* rstd, const F* weight,      \
                     int64_t batch, int64_t rows, int64_t width, int64_t threads, F* dx,          \
                     F* dweight, F* dbias) {                                                      \
    return status([&] {                                                                           \
      layer_norm(dy, x, mean, rstd, weight, batch, rows, width, threads, dx, dweight, dbias);     \
    });                                                                                           \
  }

extern "C" {

FOR_NUMBERS(float)
FOR_NUMBERS(double)

int clip_factors_double(const double* squares, double bound, double above, double below,
                        int64_t batch, float* factors) {
  return status([&] { clip_factors(squares, bound, above, below, batch, factors); });
}
int normals_of_words_double(const int64_t* words, int64_t count, double scale, double* normals) {
  return status([&] { normals_of_words(words, count, scale, normals); });
}
void forget(Open* open) { delete[] open; }
int64_t noise_bytes() { return sizeof(Noise); }
}
