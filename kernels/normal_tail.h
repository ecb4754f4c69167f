// P(N > x) of a standard normal N in integers of 128 bits, and on which side of a border the
// normal lies that a word stands for. No floating-point rounding takes part in it.
#pragma once

#include <cmath>
#include <cstdint>

typedef unsigned __int128 Wide;
// In units of 2^-120, and below 16 in size.
typedef __int128 Fixed;
constexpr int kFraction = 120;

// a b, rounded toward zero.
inline Fixed product(Fixed a, Fixed b) {
  bool negative = (a < 0) != (b < 0);
  Wide x = Wide(a < 0 ? -a : a), y = Wide(b < 0 ? -b : b);
  uint64_t x1 = uint64_t(x >> 64), x0 = uint64_t(x), y1 = uint64_t(y >> 64), y0 = uint64_t(y);
  Wide middle = Wide(x1) * y0 + Wide(x0) * y1 + (Wide(x0) * y0 >> 64);
  Fixed size = Fixed((Wide(x1) * y1 << (128 - kFraction)) + (middle >> (kFraction - 64)));
  return negative ? -size : size;
}

// At a place x of a standard normal's density.
struct Tail {
  Fixed above;  // P(N > x)
  Fixed density;
};

// Terms of the density's Taylor series, and nodes a unit, from which steps are made.
constexpr int kTerms = 16, kNodes = 64;
// The tail behind it is less than a word resolves: P(N > 9.2) < 2^-65.
constexpr double kEnd = 9.2;

// From x to x + d, for 0 <= d <= 1 / kNodes. The terms b_n = d^n times the density's derivatives
// over n! follow (n + 1) b_(n+1) = -(x d b_n + d^2 b_(n-1)). After 16 of them the rest is
// below 2^-118 (Cramer: |b_n| < 0.44 d^n / sqrt(n!)), and the roundings make less than 2^-113.
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

// The tail at x = j / kNodes, each made from the one before. Steps fewer than 2^10 leave the error
// of densities below 2^-103, and that of tails, 1 / kNodes of it at a step, below 2^-98.
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

// (k + 1/2) / scale, rounded down, where it is below kEnd; for 0 <= k and scale < 2^46.
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

// Where the border (k + 1/2) / scale lies of all x with P(N > x) from m 2^-64 to (m + 1) 2^-64,
// for 0 < m < 2^63. kWithin also where 2^-96 could change the answer.
inline Side side(int64_t k, double scale, int64_t m) {
  if (double(k) + 0.5 >= kEnd * scale) return kAbove;
  Fixed above = kTails.above(border(k, scale));
  const Fixed error = Fixed(1) << (kFraction - 96);
  if (above - error >= Fixed(m + 1) << (kFraction - 64)) return kBelow;
  if (above + error <= Fixed(m) << (kFraction - 64)) return kAbove;
  return kWithin;
}
