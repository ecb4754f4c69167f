// round(scale * N) for a standard normal N, made from the words described in rounded_normal.py,
// which proves that the result is exact. A step decides the words that the step before leaves
// undecided: first fp64 in vectors, then 128-bit integers, then the caller, by further words.
#pragma once

#include "normal_tail.h"
#include "vectors.h"

typedef Vector<double> Doubles;
typedef Integers<double> Longs;
constexpr int kDoubles = kLanes<double>;

inline Doubles as_doubles(Longs x) {
  Doubles y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

inline Longs as_longs(Doubles x) {
  Longs y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

inline Longs load_longs(const int64_t* from) {
  Longs v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

constexpr int64_t kMagnitude = std::numeric_limits<int64_t>::max();
constexpr double k2_32 = 4294967296.0, k2_52 = 4503599627370496.0;
constexpr double k2_minus_47 = 32 / k2_52, k2_minus_51 = 2 / k2_52;
constexpr double k2_minus_64 = 1 / (k2_32 * k2_32);

// Rounds numbers >= 0 to the nearest integer, ties to even.
inline Doubles rounded(Doubles x) { return x < k2_52 ? (x + k2_52) - k2_52 : x; }

// Converts integers from 0 to 2^63 - 1 with one rounding: each half's bits are put into the
// mantissa of a double.
inline Doubles to_doubles(Longs x) {
  constexpr double k2_84 = k2_52 * k2_32;
  Doubles low = as_doubles((x & 0xFFFFFFFF) | as_longs(splat(k2_52)));
  Doubles high = as_doubles((x >> 32) | as_longs(splat(k2_84)));
  return (high - (k2_84 + k2_52)) + low;
}

// The rational functions of AS 241 for the center, the tail and the far tail; coefficients in
// ascending order.
struct Ratio {
  double above[8], below[8];
};
constexpr Ratio kCenter = {
    {3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3,
     1.3731693765509461125e4, 4.5921953931549871457e4, 6.7265770927008700853e4,
     3.3430575583588128105e4, 2.5090809287301226727e3},
    {1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
     2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4,
     5.2264952788528545610e3}};
constexpr Ratio kTail = {
    {1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0,
     3.64784832476320460504e0, 1.27045825245236838258e0, 2.41780725177450611770e-1,
     2.27238449892691845833e-2, 7.74545014278341407640e-4},
    {1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1,
     1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4,
     1.05075007164441684324e-9}};
constexpr Ratio kFar = {
    {6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0,
     2.96560571828504891230e-1, 2.65321895265761230930e-2, 1.24266094738807843860e-3,
     2.71155556874348757815e-5, 2.01033439929228813265e-7},
    {1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
     7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7,
     2.04426310338993978564e-15}};

template <class X>
inline X ratio(const Ratio& of, X x) {
  X above = x * of.above[7] + of.above[6], below = x * of.below[7] + of.below[6];
  for (int i = 5; i >= 0; --i) above = above * x + of.above[i], below = below * x + of.below[i];
  return above / below;
}

typedef uint64_t Naturals __attribute__((vector_size(kVectorBytes)));
// 1/2 in units of 2^-64. p is subtracted from it as an integer, without cancellation near 1/2.
constexpr uint64_t kHalf = uint64_t(1) << 63;
constexpr double kSplitSquare = 0.180625, kTailOrigin = 1.6, kFarFrom = 5.0;
// The least m for which p = m 2^-64 >= 0.075, where the range of kCenter ends.
constexpr int64_t kMedian = 0x1333333333333333;
// The least m that vectors decide: in N, the ends of a word's interval are off by 2 / m <= 2^-51.
constexpr int64_t kVectorsFrom = int64_t(1) << 52;
// Relative error of a quantile, derived in rounded_normal.py. A fused multiplication and addition
// rounds once less.
constexpr double kRelativeError = k2_minus_47;

// For m >= kMedian.
inline Doubles median_quantiles(Longs m) {
  Doubles q = to_doubles((Longs)(kHalf - (Naturals)m)) * k2_minus_64;
  return q * ratio(kCenter, kSplitSquare - q * q);
}

// -log(m 2^-64) for 0 < m < kMedian, with a relative error of at most 4 units of 2^-53.
// With m = 2^e f and |log f| <= log(2) / 2 it is (64 - e) log(2) - 2 artanh(s), where
// s = (f - 1) / (f + 1), |s| < 0.172. Truncating the series before s^21 has an error of 2^-56.
// Together with 4 units of log f <= 0.35, the rounding of m (1 unit, absolute), 2 units of
// (64 - e) log(2) and 1 unit of the difference, this is at most 4 units, since the result is at
// least 2.59.
inline Doubles negative_logs(Longs m) {
  constexpr double kRootOfHalf = 0.70710678118654752, kLog2 = 0.69314718055994531;
  Longs bits = as_longs(to_doubles(m));
  // The difference is not negative, so the shift needs no sign extension.
  Longs e = (bits - as_longs(splat(kRootOfHalf))) >> 52;
  Doubles f = as_doubles(bits - (e << 52));
  Doubles left = (k2_52 + 64) - as_doubles(e | as_longs(splat(k2_52)));
  Doubles s = (f - 1.0) / (f + 1.0), ss = s * s, sum = splat(1.0 / 19);
  for (int n = 17; n > 0; n -= 2) sum = sum * ss + 1.0 / n;
  return left * kLog2 - (s + s) * sum;
}

// For kVectorsFrom <= m < kMedian.
inline Doubles tail_quantiles(Longs m) {
  Doubles r = negative_logs(m);
  for (int i = 0; i < kDoubles; ++i) r[i] = std::sqrt(r[i]);
  return ratio(kTail, r - kTailOrigin);
}

// For any m > 0; the error of std::log is one or two units in the last place.
inline double quantile(int64_t m) {
  if (m >= kMedian) {
    double q = double(kHalf - uint64_t(m)) * k2_minus_64;
    return q * ratio(kCenter, kSplitSquare - q * q);
  }
  double r = std::sqrt(-std::log(double(m) * k2_minus_64));
  return r <= kFarFrom ? ratio(kTail, r - kTailOrigin) : ratio(kFar, r - kFarFrom);
}

constexpr double kOpen = std::numeric_limits<double>::quiet_NaN();

// round(scale * N) of one word, or kOpen.
inline double settled(int64_t word, double scale) {
  int64_t m = word & kMagnitude;
  if (m == 0) return kOpen;
  double y = quantile(m) * scale, margin = y * kRelativeError + 2 * scale / double(m);
  // kRelativeError includes the rounding errors of these lines.
  double least = std::floor(y - margin + 0.5), most = std::floor(y + margin + 0.5);
  if (most - least > 8) return kOpen;
  int64_t k = least > 0 ? int64_t(least) : 0;
  for (; k < int64_t(most); ++k) {
    Side of_border = side(k, scale, m);
    if (of_border == kWithin) return kOpen;
    if (of_border == kAbove) break;
  }
  // Negated as an integer, which has no negative zero; compilers may turn 0.0 - x into -x.
  return double(word < 0 ? -k : k);
}

// Number of words that are processed at a time, so that their buffers fit into the L1 cache.
constexpr int kRun = 2048, kGroup = 64;

struct Run {
  alignas(64) int64_t words[kRun + kGroup];
  alignas(64) double normals[kRun + kGroup], sums[kRun];
  alignas(64) int64_t tail[kRun + kDoubles];
  int32_t places[kRun];
};

// Writes round(scale * N) of `count` words to run.normals, or kOpen if further words are needed;
// returns whether a word is open. Reads and writes up to kGroup more entries.
inline bool normals_of_words(const int64_t* words, int count, double scale, Run& run) {
  double* normals = run.normals;
  bool open = false;
  int tails = 0;
  for (int i = 0; i < count; i += kDoubles) {
    store<double>(normals + i, median_quantiles(load_longs(words + i) & kMagnitude));
  }
  for (int i = 0; i < count; ++i) {
    int64_t m = words[i] & kMagnitude;
    run.tail[tails] = m, run.places[tails] = i;
    tails += m < kMedian;
  }
  for (int i = 0; i < tails; i += kDoubles) {
    Doubles x = tail_quantiles(load_longs(run.tail + i));
    for (int lane = 0; lane < std::min(kDoubles, tails - i); ++lane) {
      normals[run.places[i + lane]] = x[lane];
    }
  }
  for (int group = 0; group < count; group += kGroup) {
    Longs any{};
    for (int i = group; i < group + kGroup; i += kDoubles) {
      Longs word = load_longs(words + i);
      Doubles y = load<double>(normals + i) * scale, whole = rounded(y), distance = y - whole;
      distance = distance < 0 ? -distance : distance;
      Longs unsure = (distance + (y * kRelativeError + scale * k2_minus_51) >= 0.5) |
                   ((word & kMagnitude) < kVectorsFrom);
      any |= unsure;
      // No negative zeros: added to a zero sum, a negative zero would reveal the sum's sign.
      whole = word < 0 ? 0.0 - whole : whole;
      store<double>(normals + i, unsure ? splat(kOpen) : whole);
    }
    bool undecided = false;
    for (int lane = 0; lane < kDoubles; ++lane) undecided |= any[lane] != 0;
    for (int i = group; undecided && i < std::min(group + kGroup, count); ++i) {
      if (normals[i] == normals[i]) continue;
      normals[i] = settled(words[i], scale);
      open |= normals[i] != normals[i];
    }
  }
  return open;
}
