// Rotary position embeddings on the CPU. rotary.py calls it and describes the tensors.

#include <type_traits>

#include "threads.h"
#include "vectors.h"

namespace {

constexpr int64_t kTokens = 32;  // tokens per task

// A tensor [B, count, T, D] with stride 1 in its last dimension; strides in elements.
struct Heads {
  void* data;
  int64_t sample, head, token, count;
};

// The fields of _Rotation in rotary.py, in its order.
struct Rotation {
  Heads q, k, new_q, new_k;  // new_q and new_k may be q and k
  const void *cos, *sin;     // [T, D / 2]
  int64_t batch, tokens, pairs, back, narrow, threads;  // narrow: q and k are bfloat16
};

typedef uint16_t Bfloat16;
typedef Bfloat16 Bfloat16s __attribute__((vector_size(kVectorBytes / 2)));
typedef uint32_t Unsigned __attribute__((vector_size(kVectorBytes)));

template <class To, class From>
inline To bits_of(From x) {
  static_assert(sizeof(To) == sizeof(From), "of one size");
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

// Loads `count` numbers into a vector; the remaining lanes are 0.
template <class V>
inline V load_some(const void* from, int64_t count, size_t bytes) {
  V x{};
  std::memcpy(&x, from, size_t(count) * bytes);
  return x;
}

template <class F>
inline Vector<F> wide(const F* from, int64_t count) {
  return load_some<Vector<F>>(from, count, sizeof(F));
}

inline Vector<float> wide(const Bfloat16* from, int64_t count) {
  auto x = load_some<Bfloat16s>(from, count, sizeof(Bfloat16));
  return bits_of<Vector<float>>(__builtin_convertvector(x, Unsigned) << 16);
}

template <class F>
inline void store_some(F* to, Vector<F> x, int64_t count) {
  std::memcpy(to, &x, size_t(count) * sizeof(F));
}

// Rounds to bfloat16, to nearest, ties to even.
inline void store_some(Bfloat16* to, Vector<float> x, int64_t count) {
  auto bits = bits_of<Unsigned>(x);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  bits = x == x ? bits : Unsigned{} + 0x7fc0;
  auto narrow = __builtin_convertvector(bits, Bfloat16s);
  std::memcpy(to, &narrow, size_t(count) * sizeof(Bfloat16));
}

// Signs of the products. All signs, also a constant sign, are applied as bits. So the compiler does
// not fuse a product with the following sum, and the result's bits equal those of the reference
// implementation.
template <class F>
struct Signs {
  Integers<F> same{}, first{}, second{};

  explicit Signs(bool back) {
    using Integer = typename Number<F>::Integer;
    volatile Integer zero = 0;
    same += zero;
    first = second = same;
    (back ? second : first) += std::numeric_limits<Integer>::min();
  }
};

template <class F>
inline Vector<F> changed(Vector<F> x, Integers<F> sign) {
  return bits_of<Vector<F>>(bits_of<Integers<F>>(x) ^ sign);
}

// Rotates the pairs (x[j], x[j + pairs]) of one token; `to` may be x.
template <class F, class X>
inline void turn(const X* x, X* to, const F* cos, const F* sin, int64_t pairs,
                 const Signs<F> signs) {
  auto some = [&](int64_t j, auto n) {
    Vector<F> a = wide(x + j, n), b = wide(x + pairs + j, n);
    Vector<F> c = wide(cos + j, n), s = wide(sin + j, n);
    store_some(to + j, changed<F>(a * c, signs.same) + changed<F>(b * s, signs.first), n);
    store_some(to + pairs + j, changed<F>(b * c, signs.same) + changed<F>(a * s, signs.second), n);
  };
  int64_t j = 0;
  for (; j + kLanes<F> <= pairs; j += kLanes<F>) {
    some(j, std::integral_constant<int64_t, kLanes<F>>());
  }
  if (j < pairs) some(j, pairs - j);
}

template <class X>
X* at(const Heads& x, int64_t b, int64_t h, int64_t t) {
  return static_cast<X*>(x.data) + b * x.sample + h * x.head + t * x.token;
}

template <class F, class X>
void apply_rotary(const Rotation& r) {
  int64_t blocks = (r.tokens + kTokens - 1) / kTokens;
  const Signs<F> signs(r.back != 0);
  share<PlainArithmetic>(r.batch * blocks, r.threads, [&](int64_t task, int64_t) {
    int64_t b = task / blocks, first = task % blocks * kTokens;
    for (int64_t t = first; t < std::min(r.tokens, first + kTokens); ++t) {
      const F* cos = static_cast<const F*>(r.cos) + t * r.pairs;
      const F* sin = static_cast<const F*>(r.sin) + t * r.pairs;
      for (int64_t h = 0; h < r.q.count; ++h) {
        turn<F>(at<const X>(r.q, b, h, t), at<X>(r.new_q, b, h, t), cos, sin, r.pairs, signs);
      }
      for (int64_t h = 0; h < r.k.count; ++h) {
        turn<F>(at<const X>(r.k, b, h, t), at<X>(r.new_k, b, h, t), cos, sin, r.pairs, signs);
      }
    }
  });
}

}  // namespace

extern "C" {

int apply_rotary_float(const Rotation* r) {
  return status([r] {
    r->narrow ? apply_rotary<float, Bfloat16>(*r) : apply_rotary<float, float>(*r);
  });
}
int apply_rotary_double(const Rotation* r) {
  return status([r] { apply_rotary<double, double>(*r); });
}
}
