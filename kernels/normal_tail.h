// Computes P(N > x) of a standard normal N in 128-bit integers, and decides on which side of a
// border a word's normal number lies. No result depends on floating-point rounding.
#pragma once

#include <cmath>
#include <cstdint>

typedef unsigned __int128 Wide;
// A fixed-point number in units of 2^-120, with magnitude below 16.
typedef __int128 Fixed;
constexpr int kFraction = 120;

// The product a b, rounded toward zero.
inline Fixed product(Fixed a, Fixed b) {
  bool negative = (a < 0) != (b < 0);
  Wide x = Wide(a < 0 ? -a : a), y = Wide(b < 0 ? -b : b);
  uint64_t x1 = uint64_t(x >> 64), x0 = uint64_t(x), y1 = uint64_t(y >> 64), y0 = uint64_t(y);
  Wide middle = Wide(x1) * y0 + Wide(x0) * y1 + (Wide(x0) * y0 >> 64);
  Fixed size = Fixed((Wide(x1) * y1 << (128 - kFraction)) + (middle >> (kFraction - 64)));
  return negative ? -size : size;
}

// The tail probability and the density of a standard normal N at x.
struct Tail {
  Fixed above;  // P(N > x)
  Fixed density;
};

// Number of terms of the density's Taylor series, and number of nodes per unit of x.
constexpr int kTerms = 16, kNodes = 64;
// The end of the nodes: the tail beyond it is below the resolution of a word, P(N > 9.2) < 2^-65.
constexpr double kEnd = 9.2;

// The tail and density at x + d, from those at x, for 0 <= d <= 1 / kNodes. The Taylor terms
// b_n = d^n f^(n)(x) / n! of the density f satisfy (n + 1) b_(n+1) = -(x d b_n + d^2 b_(n-1)).
// After 16 terms the remainder is below 2^-118 (Cramer: |b_n| < 0.44 d^n / sqrt(n!)), and the
// rounding errors are below 2^-113.
inline Tail moved(Tail at, Fixed x, Fixed d) {
  Fixed xd = product(x, d), dd = product(d, d), before = 0, term = at.density;
  Fixed density = 0, integral = 0;
  for (int n = 0; n < kTerms; ++n) {
    density += term;
    Fixed inverse = (Fixed(1) << kFraction) / (n + 1);
    Fixed part = product(term, inverse);
    integral += part;
    Fixed next = -product(xd, part) - product(product(dd, before), inverse);
    before = term;
    term = next;
  }
  return {at.above - product(d, integral), density};
}

// The tails at x = j / kNodes, each computed from the one before. Since there are fewer than 2^10
// steps, the error of densities is below 2^-103, and that of tails, to which each step adds
// 1 / kNodes of the density's error, is below 2^-98.
class Nodes {
 public:
  Nodes() {
    // 1 / sqrt(2 pi)
    Fixed density = Fixed(Wide(0x662114cf50d942) << 64 | 0x343f2cf1402eae38);
    Tail tail{Fixed(1) << (kFraction - 1), density};
    for (int j = 0; j < kCount; ++j) {
      of_[j] = tail;
      tail = moved(tail, place(j), Fixed(1) << kFraction >> 6);
    }
  }

  // P(N > x) to 2^-97, for 0 <= x < kEnd.
  Fixed above(Fixed x) const {
    int j = int(x >> (kFraction - 6));
    return moved(of_[j], place(j), x - place(j)).above;
  }

 private:
  static_assert(kNodes == 1 << 6, "shifts by 6");
  static constexpr int kCount = int(kEnd * kNodes) + 2;
  static Fixed place(int j) { return Fixed(j) << (kFraction - 6); }
  Tail of_[kCount];
};

const Nodes kTails;

// (k + 1/2) / scale, rounded down, for 0 <= k and scale < 2^46; the result must be below kEnd.
inline Fixed border(int64_t k, double scale) {
  int exponent;
  uint64_t mantissa = uint64_t(std::ldexp(std::frexp(scale, &exponent), 53));
  Wide quotient = 0, rest = Wide(2 * k + 1);
  for (int left = kFraction + 52 - exponent; left > 0;) {
    int now = left < 64 ? left : 64;
    quotient = (quotient << now) + (rest << now) / mantissa;
    rest = (rest << now) % mantissa;
    left -= now;
  }
  return Fixed(quotient);
}

enum Side { kBelow, kAbove, kWithin };

// Returns whether the border (k + 1/2) / scale is below, above or within the interval of all x with
// P(N > x) from m 2^-64 to (m + 1) 2^-64, for 0 < m < 2^63. Returns kWithin also if an error of
// 2^-96 could change the answer.
inline Side side(int64_t k, double scale, int64_t m) {
  if (double(k) + 0.5 >= kEnd * scale) return kAbove;
  Fixed above = kTails.above(border(k, scale));
  const Fixed error = Fixed(1) << (kFraction - 96);
  if (above - error >= Fixed(m + 1) << (kFraction - 64)) return kBelow;
  if (above + error <= Fixed(m) << (kFraction - 64)) return kAbove;
  return kWithin;
}
