// Vectors of the machine's width, their exponential and tanh, and two matrix products that keep
// sums in registers. F is float or double. The code uses the compiler's vector extensions and no
// intrinsics, so it compiles for any CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kVectors = 4;  // 32 registers
#elif defined(__AVX__)
constexpr int kVectorBytes = 32, kVectors = 2;  // 16 registers
#elif defined(__SSE2__)
constexpr int kVectorBytes = 16, kVectors = 2;  // 16 registers
#else
constexpr int kVectorBytes = 16, kVectors = 4;  // 32 registers
#endif
// A product keeps the sums of kRegisterRows rows of kVectors vectors in registers.
constexpr int kRegisterRows = 6;
// Up to kLongest terms of a sum are added one by one; a longer sum is taken in blocks of kBlock.
constexpr int kLongest = 128, kBlock = 64;

template <class F>
struct Number;

template <>
struct Number<float> {
  typedef float Vector __attribute__((vector_size(kVectorBytes)));
  typedef int32_t Integers __attribute__((vector_size(kVectorBytes)));
  typedef int32_t Integer;
  static constexpr int mantissa_bits = 23, exponent_bias = 127, taylor_degree = 7;
  static constexpr float lowest = -87.0f, highest = 88.0f, round = 12582912.0f;  // 1.5 * 2^23
  static constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
};

template <>
struct Number<double> {
  typedef double Vector __attribute__((vector_size(kVectorBytes)));
  typedef int64_t Integers __attribute__((vector_size(kVectorBytes)));
  typedef int64_t Integer;
  static constexpr int mantissa_bits = 52, exponent_bias = 1023, taylor_degree = 13;
  static constexpr double lowest = -708.0, highest = 709.0, round = 6755399441055744.0;
  static constexpr double ln2_high = 0.693145751953125, ln2_low = 1.42860682030941723212e-6;
};

template <class F>
using Vector = typename Number<F>::Vector;
template <class F>
using Integers = typename Number<F>::Integers;
template <class F>
constexpr int kLanes = kVectorBytes / sizeof(F);
template <class F>
constexpr F kInfinity = std::numeric_limits<F>::infinity();

template <class F>
inline Vector<F> load(const F* from) {
  Vector<F> v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class F>
inline void store(F* to, Vector<F> v) {
  std::memcpy(to, &v, sizeof v);
}

template <class F>
inline Vector<F> splat(F x) {
  return Vector<F>{} + x;
}

template <class F, int N>
constexpr F kInverseFactorial = kInverseFactorial<F, N - 1> / N;
template <class F>
constexpr F kInverseFactorial<F, 0> = 1;

// The sum of r^n / n! from n = `degree` down to 0, by Horner's rule; `sum` has the higher terms.
template <class F, int degree>
inline Vector<F> taylor(Vector<F> r, Vector<F> sum) {
  if constexpr (degree < 0) {
    return sum;
  } else {
    return taylor<F, degree - 1>(r, sum * r + kInverseFactorial<F, degree>);
  }
}

// The sum of r^(n - 1) / n! from n = `degree` down to 1.
template <class F, int degree>
inline Vector<F> taylor_of_ratio(Vector<F> r, Vector<F> sum) {
  if constexpr (degree < 1) {
    return sum;
  } else {
    return taylor_of_ratio<F, degree - 1>(r, sum * r + kInverseFactorial<F, degree>);
  }
}

// Returns r and writes 2^n to `power`, where x = n ln2 + r with a small r.
template <class F>
inline Vector<F> reduced(Vector<F> x, Vector<F>* power) {
  using N = Number<F>;
  // Adding `round` leaves the nearest integer in the low bits.
  Vector<F> shifted = x * F(1.44269504088896340736) + N::round;
  Vector<F> n = shifted - N::round;
  Vector<F> r = x - n * N::ln2_high;
  r = r - n * N::ln2_low;
  Integers<F> bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + typename N::Integer(N::exponent_bias)) << N::mantissa_bits;
  std::memcpy(power, &bits, sizeof bits);
  return r;
}

// e^x to about one unit in the last place, NaN for NaN, and exactly 0 if it is below the least
// normal number.
template <class F>
inline Vector<F> exponential(Vector<F> x) {
  using N = Number<F>;
  Vector<F> power, r = reduced<F>(x, &power);
  Vector<F> top = splat<F>(kInverseFactorial<F, N::taylor_degree>);
  Vector<F> mantissa = taylor<F, N::taylor_degree - 1>(r, top);
  Vector<F> y = mantissa * power;
  y = x < N::lowest ? Vector<F>{} : y;
  return x > N::highest ? splat<F>(kInfinity<F>) : y;
}

// tanh x to a few units in the last place, also near 0, and NaN for NaN. It is computed as
// (e^2x - 1) / (e^2x + 1) from e^2x - 1 = 2^n (e^r - 1) + (2^n - 1).
template <class F>
inline Vector<F> tangent(Vector<F> x) {
  using N = Number<F>;
  Vector<F> twice = x + x;
  twice = twice > F(60) ? splat<F>(60) : twice;
  twice = twice < F(-60) ? splat<F>(-60) : twice;
  Vector<F> power, r = reduced<F>(twice, &power);
  // The sum of r^n / (n + 1)!, which times r is e^r - 1.
  Vector<F> ratio = splat<F>(kInverseFactorial<F, N::taylor_degree>);
  ratio = taylor_of_ratio<F, N::taylor_degree - 1>(r, ratio);
  Vector<F> less_one = power * (r * ratio) + (power - F(1));
  return less_one / (less_one + F(2));
}

// Number of rows of `vectors` vectors whose sums fit into the registers.
template <int vectors>
constexpr int kRows = kRegisterRows * kVectors / vectors;

template <class F, int rows, int vectors, bool add>
inline void product_in_registers(F* const* c, const F* const* a, const F* x, int64_t stride,
                                 int depth) {
  Vector<F> sums[rows][vectors];
  const F* of_row[rows];
#pragma GCC unroll 32
  for (int r = 0; r < rows; ++r) {
    of_row[r] = a[r];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      sums[r][v] = Vector<F>{};
    }
  }
  for (int d = 0; d < depth; ++d) {
    Vector<F> line[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) line[v] = load<F>(x + d * stride + v * kLanes<F>);
#pragma GCC unroll 32
    for (int r = 0; r < rows; ++r) {
      F factor = of_row[r][d];
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) sums[r][v] += line[v] * factor;
    }
  }
#pragma GCC unroll 32
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      F* at = c[r] + v * kLanes<F>;
      store<F>(at, add ? load<F>(at) + sums[r][v] : sums[r][v]);
    }
  }
}

template <class F, int vectors, bool add, int rows = kRows<vectors>>
void product_by_rows(F* const* c, const F* const* a, const F* x, int64_t stride, int count,
                     int depth) {
  int r = 0;
  for (; r + rows <= count; r += rows) {
    product_in_registers<F, rows, vectors, add>(c + r, a + r, x, stride, depth);
  }
  if constexpr (rows > 1) {
    if (r < count) {
      product_by_rows<F, vectors, add, (rows + 1) / 2>(c + r, a + r, x, stride, count - r, depth);
    }
  }
}

// C[r] = sum_d A[r][d] X[d] for `count` rows r, or C[r] += this sum. A row of C and of X has
// `vectors` vectors. Rows of A and of C may be anywhere in memory; rows of C must differ.
// The sum over d starts at 0 and is then added to C. Long sums are taken in blocks, see `product`,
// so that small terms are not rounded relative to a large sum.
template <class F, bool add, int most>
void product_at_once(F* const* c, const F* const* a, const F* x, int64_t stride, int count, int depth,
             int vectors) {
  F* moved[most];
  for (int done = 0; done < vectors;) {
    for (int r = 0; r < count; ++r) moved[r] = c[r] + done * kLanes<F>;
    const F* from = x + done * kLanes<F>;
    int now = std::min(kVectors, vectors - done);
    if (now == 4) {
      product_by_rows<F, std::min(4, kVectors), add>(moved, a, from, stride, count, depth);
    } else if (now == 3) {
      product_by_rows<F, std::min(3, kVectors), add>(moved, a, from, stride, count, depth);
    } else if (now == 2) {
      product_by_rows<F, 2, add>(moved, a, from, stride, count, depth);
    } else {
      product_by_rows<F, 1, add>(moved, a, from, stride, count, depth);
    }
    done += now;
  }
}

// `product_at_once` for rows of any length, in blocks of kBlock if they are longer than kLongest.
template <class F, bool add, int most>
void product(F* const* c, const F* const* a, const F* x, int64_t stride, int count, int depth,
             int vectors) {
  if (depth <= kLongest) {
    product_at_once<F, add, most>(c, a, x, stride, count, depth, vectors);
    return;
  }
  const F* moved[most];
  product_at_once<F, add, most>(c, a, x, stride, count, kBlock, vectors);
  for (int done = kBlock; done < depth; done += kBlock) {
    for (int r = 0; r < count; ++r) moved[r] = a[r] + done;
    product_at_once<F, true, most>(c, moved, x + done * stride, stride, count,
                                   std::min(kBlock, depth - done), vectors);
  }
}

template <class F, int rows, int vectors>
inline void outer_in_registers(F* c, int64_t stride, const F* const* a, int first, const F* x,
                               int depth) {
  Vector<F> sums[rows][vectors];
#pragma GCC unroll 32
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) sums[r][v] = Vector<F>{};
  }
  for (int d = 0; d < depth; ++d) {
    Vector<F> line[vectors];
    const F* factors = a[d] + first;
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) line[v] = load<F>(x + d * stride + v * kLanes<F>);
#pragma GCC unroll 32
    for (int r = 0; r < rows; ++r) {
      F factor = factors[r];
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) sums[r][v] += line[v] * factor;
    }
  }
#pragma GCC unroll 32
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      F* at = c + r * stride + v * kLanes<F>;
      store<F>(at, load<F>(at) + sums[r][v]);
    }
  }
}

template <class F, int vectors, int rows = kRows<vectors>>
void outer_by_rows(F* c, int64_t stride, const F* const* a, const F* x, int first, int count,
                   int depth) {
  for (; first + rows <= count; first += rows) {
    outer_in_registers<F, rows, vectors>(c + first * stride, stride, a, first, x, depth);
  }
  if constexpr (rows > 1) {
    if (first < count) {
      outer_by_rows<F, vectors, (rows + 1) / 2>(c, stride, a, x, first, count, depth);
    }
  }
}

// C[r] += sum_d A[d][r] X[d] for `count` rows r of at most kVectors vectors. The sum over d starts
// at 0 and is then added to C. Rows of A may be anywhere; C and X have rows `stride` apart.
template <class F>
void outer(F* c, int64_t stride, const F* const* a, const F* x, int count, int depth,
           int vectors) {
  if (vectors == 4) {
    outer_by_rows<F, std::min(4, kVectors)>(c, stride, a, x, 0, count, depth);
  } else if (vectors == 3) {
    outer_by_rows<F, std::min(3, kVectors)>(c, stride, a, x, 0, count, depth);
  } else if (vectors == 2) {
    outer_by_rows<F, 2>(c, stride, a, x, 0, count, depth);
  } else {
    outer_by_rows<F, 1>(c, stride, a, x, 0, count, depth);
  }
}
