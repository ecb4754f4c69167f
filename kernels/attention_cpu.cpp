// Attention over tile graphs on the CPU. attention_cpu.py calls it, and says what the tensors are.
//
// The queries of a tile are the lanes of vectors: scores stand as S[key][query]. So keys and values
// are read where they lie, number by number, whatever their stride, and what belongs to a query
// (maximum, sum, lse) needs no sum over lanes. Keys of several runs go together, kKeys at a time.
// Flash attention's recurrences: Dao, arXiv:2307.08691, algorithms 1 and 2.
//
// Letters: B samples, H query heads, G key/value heads, T query tokens, S key tokens, D head dim.

#include <atomic>
#include <cmath>
#include <system_error>
#include <thread>
#include <vector>

#include "vectors.h"

// Tensors [B, heads, tokens, D] with stride 1 in D; strides in elements.
struct Tokens {
  const void* data;
  int64_t sample, head, token;

  template <class F>
  const F* of(int64_t b, int64_t h) const {
    return static_cast<const F*>(data) + b * sample + h * head;
  }
};

// The fields of attention_cpu.py's _Problem, in its order. Pointers may be null where it says so.
struct Problem {
  Tokens q, k, v, o_in, dout;
  void *o, *lse;                    // [B, H, T, D], [B, H, T]: results of the forward
  const void *lse_in, *dlse;        // [B, H, T]; dlse or null
  void *dq, *dk, *dv;               // [B, H, T, D]; [parts, B, G, S, padded], added to
  double *dslopes, *dweights;       // [parts, B, H], [parts, B, G, R], added to; or null
  void* scratch;                    // [threads, scratch_elements]
  const int32_t *groups, *runs;     // tile_graph.Side
  const double* weights;            // [R]: log multiplicities
  const int32_t *variants, *row_variants, *key_range;  // key_range or null
  const void* slopes;               // [B, H], or null
  int64_t variant_sample, variant_head;  // strides of row_variants [B, H]
  int64_t batch, heads, key_heads, queries, keys, dim, padded, num_runs;
  int64_t distance_shift, threads, parts;
  double scale;
};

namespace {

constexpr int kKeys = 64;        // that meet a tile at a time
constexpr int64_t kTile = 128;   // queries of a tile, at most
constexpr int32_t kUnbounded = (1 << 30) - 1;  // tile_graph.UNBOUNDED

// Queries that are the lanes of up to kVectors vectors.
template <class F>
constexpr int kWidth = kVectors * kLanes<F>;

// Queries first, first + 1, ... of a group, for one sample and head.
struct Tile {
  int64_t b, h;
  const int32_t* group;
  int64_t first, count;

  int64_t stride() const { return group[1]; }
  int64_t position(int64_t i) const { return group[0] + stride() * (first + i); }
};

// A part of a tile: at most kWidth queries.
struct Rows {
  int64_t position, stride;
  int count, vectors;

  int64_t at(int i) const { return position + stride * i; }
};

template <class F>
std::vector<Rows> parts_of(const Tile& tile) {
  std::vector<Rows> parts;
  for (int64_t i = 0; i < tile.count; i += kWidth<F>) {
    int count = int(std::min<int64_t>(kWidth<F>, tile.count - i));
    int vectors = (count + kLanes<F> - 1) / kLanes<F>;
    parts.push_back({tile.position(i), tile.stride(), count, vectors});
  }
  return parts;
}

enum Seen { kNone, kSome, kAll };

// Keys that some query of a tile may see.
struct Keys {
  int count = 0;
  bool weighted = false;
  int64_t position[kKeys], run[kKeys];
  int32_t lo[kKeys], hi[kKeys];
  double weight[kKeys];

  Seen seen_by(const Rows& rows) const {
    int64_t first = rows.at(0), last = rows.at(rows.count - 1);
    bool all = true, none = true;
    for (int x = 0; x < count; ++x) {
      int64_t nearest = first - position[x], farthest = last - position[x];
      all = all && nearest >= lo[x] && farthest <= hi[x];
      none = none && (farthest < lo[x] || nearest > hi[x]);
    }
    return all ? kAll : none ? kNone : kSome;
  }
};

int64_t floor_div(int64_t a, int64_t b) {
  int64_t quotient = a / b;
  return quotient * b > a ? quotient - 1 : quotient;
}

// Calls run(keys) until all keys that the tile may see had their turn.
template <class Run>
void for_keys(const Problem& p, const Tile& tile, Run run) {
  int64_t first = tile.position(0), last = tile.position(tile.count - 1);
  int64_t begin = 0, end = p.keys;
  if (p.key_range) {
    begin = std::max<int64_t>(begin, p.key_range[2 * tile.b]);
    end = std::min<int64_t>(end, p.key_range[2 * tile.b + 1]);
  }
  Keys keys;
  for (int64_t r = tile.group[3]; r < tile.group[4]; ++r) {
    if (p.weights[r] == -kInfinity<double>) continue;
    const int32_t* table = p.runs + 5 * r;
    int64_t column = table[0], step = std::max(1, table[1]), length = table[2];
    int32_t lo = table[3], hi = table[4];
    int64_t low = hi < kUnbounded ? std::max(begin, first - hi) : begin;
    int64_t high = lo > -kUnbounded ? std::min(end - 1, last - lo) : end - 1;
    int64_t stop = std::min(length, floor_div(high - column, step) + 1);
    for (int64_t j = std::max<int64_t>(0, -floor_div(column - low, step)); j < stop; ++j) {
      int x = keys.count++;
      keys.position[x] = column + j * step;
      keys.run[x] = r;
      keys.lo[x] = lo;
      keys.hi[x] = hi;
      keys.weight[x] = p.weights[r];
      keys.weighted = keys.weighted || p.weights[r] != 0;
      if (keys.count == kKeys) {
        run(keys);
        keys.count = 0;
        keys.weighted = false;
      }
    }
  }
  if (keys.count) run(keys);
}

int64_t distance(const Problem& p, int64_t query, int64_t key) {
  int64_t d = query - key + p.distance_shift;
  return d < 0 ? -d : d;
}

// What weights, slope and bands make of scores [key][query].
template <class F>
void bias(const Problem& p, const Keys& keys, const Rows& rows, bool masked, F slope, F* scores) {
  using Integer = typename Number<F>::Integer;
  for (int v = 0; v < rows.vectors; ++v) {
    Integers<F> query;
    for (int i = 0; i < kLanes<F>; ++i) query[i] = Integer(rows.at(v * kLanes<F> + i));
    for (int x = 0; x < keys.count; ++x) {
      F* at = scores + x * kWidth<F> + v * kLanes<F>;
      Vector<F> value = load<F>(at) + F(keys.weight[x]);
      Integers<F> gap = query - Integer(keys.position[x]);
      if (p.slopes) {
        Integers<F> d = gap + Integer(p.distance_shift);
        d = d < 0 ? -d : d;
        value -= __builtin_convertvector(d, Vector<F>) * slope;
      }
      if (masked) {
        Integers<F> seen = (gap >= Integer(keys.lo[x])) & (gap <= Integer(keys.hi[x]));
        value = seen ? value : splat<F>(-kInfinity<F>);
      }
      store<F>(at, value);
    }
  }
}

// Scores [key][query] of keys that the rows see at least in part; false if they see none.
template <class F>
bool score(const Problem& p, const Keys& keys, const Rows& rows, const F* const* k, const F* q,
           F slope, F* const* scores) {
  Seen seen = keys.seen_by(rows);
  if (seen == kNone) return false;
  product<F, false, kKeys>(scores, k, q, kWidth<F>, keys.count, int(p.dim), rows.vectors);
  if (seen == kSome || keys.weighted || p.slopes) {
    bias<F>(p, keys, rows, seen == kSome, slope, scores[0]);
  }
  return true;
}

// [D][query] of the rows of x, times `factor`; lanes without a query get 0.
template <class F>
void transpose(const F* x, int64_t stride, const Rows& rows, int64_t dim, F factor, F* out) {
  for (int i = 0; i < rows.count; ++i) {
    const F* from = x + rows.at(i) * stride;
    for (int64_t d = 0; d < dim; ++d) out[d * kWidth<F> + i] = from[d] * factor;
  }
  for (int64_t d = 0; d < dim; ++d) {
    std::fill(out + d * kWidth<F> + rows.count, out + (d + 1) * kWidth<F>, F(0));
  }
}

// [query][padded] of the rows of x, times `factor`.
template <class F>
void copy(const F* x, int64_t stride, const Rows& rows, const Problem& p, F factor, F* out) {
  for (int i = 0; i < rows.count; ++i, out += p.padded) {
    const F* from = x + rows.at(i) * stride;
    for (int64_t d = 0; d < p.dim; ++d) out[d] = from[d] * factor;
    std::fill(out + p.dim, out + p.padded, F(0));
  }
}

template <class F>
F slope_of(const Problem& p, const Tile& tile) {
  return p.slopes ? static_cast<const F*>(p.slopes)[tile.b * p.heads + tile.h] : F(0);
}

int64_t key_head(const Problem& p, const Tile& tile) { return tile.h / (p.heads / p.key_heads); }

// Scores become e^(score - top), and top, sum and o [D][query] those of the keys so far.
template <class F>
void soften(int count, int64_t dim, int vectors, F* scores, F* top, F* sum, F* o) {
  for (int v = 0; v < vectors; ++v) {
    int lane = v * kLanes<F>;
    Vector<F> before = load<F>(top + lane), most = before;
    for (int x = 0; x < count; ++x) {
      Vector<F> value = load<F>(scores + x * kWidth<F> + lane);
      most = value > most ? value : most;
    }
    // A query that has seen nothing yet has e^(-inf - 0) = 0.
    Vector<F> pivot = most == -kInfinity<F> ? Vector<F>{} : most;
    Vector<F> total{};
    for (int x = 0; x < count; ++x) {
      F* at = scores + x * kWidth<F> + lane;
      Vector<F> e = exponential<F>(load<F>(at) - pivot);
      total += e;
      store<F>(at, e);
    }
    Integers<F> moved = most > before;
    bool any = false;
    for (int i = 0; i < kLanes<F>; ++i) any = any || moved[i];
    if (any) {
      Vector<F> factor = exponential<F>(before - pivot);
      store<F>(top + lane, most);
      store<F>(sum + lane, load<F>(sum + lane) * factor);
      for (int64_t d = 0; d < dim; ++d) {
        F* at = o + d * kWidth<F> + lane;
        store<F>(at, load<F>(at) * factor);
      }
    }
    store<F>(sum + lane, load<F>(sum + lane) + total);
  }
}

template <class F>
void forward_tile(const Problem& p, const Tile& tile, F* scratch) {
  constexpr int width = kWidth<F>;
  const F* q = p.q.of<F>(tile.b, tile.h);
  const F* k = p.k.of<F>(tile.b, key_head(p, tile));
  const F* v = p.v.of<F>(tile.b, key_head(p, tile));
  F slope = slope_of<F>(p, tile);
  auto parts = parts_of<F>(tile);
  int64_t count = int64_t(parts.size()), block = p.dim * width;
  F* scores = scratch;
  F* qs = scores + kKeys * width;
  F* os = qs + count * block;
  F* top = os + count * block;
  F* sum = top + count * width;
  for (int64_t i = 0; i < count; ++i) {
    transpose<F>(q, p.q.token, parts[i], p.dim, F(p.scale), qs + i * block);
  }
  std::fill(os, top, F(0));
  std::fill(top, sum, -kInfinity<F>);
  std::fill(sum, sum + count * width, F(0));
  for_keys(p, tile, [&](const Keys& keys) {
    const F *ks[kKeys], *vs[kKeys];
    F* of_keys[kKeys];
    for (int x = 0; x < keys.count; ++x) {
      ks[x] = k + keys.position[x] * p.k.token;
      vs[x] = v + keys.position[x] * p.v.token;
      of_keys[x] = scores + x * width;
    }
    for (int64_t i = 0; i < count; ++i) {
      F* o = os + i * block;
      if (!score<F>(p, keys, parts[i], ks, qs + i * block, slope, of_keys)) continue;
      soften<F>(keys.count, p.dim, parts[i].vectors, scores, top + i * width, sum + i * width, o);
      outer<F>(o, width, vs, scores, int(p.dim), keys.count, parts[i].vectors);
    }
  });
  int64_t line = (tile.b * p.heads + tile.h) * p.queries;
  for (int64_t i = 0; i < count; ++i) {
    for (int r = 0; r < parts[i].count; ++r) {
      int64_t row = line + parts[i].at(r);
      F total = sum[i * width + r];
      F* o = static_cast<F*>(p.o) + row * p.dim;
      const F* from = os + i * block + r;
      for (int64_t d = 0; d < p.dim; ++d) o[d] = total == 0 ? F(0) : from[d * width] / total;
      static_cast<F*>(p.lse)[row] = top[i * width + r] + std::log(total);
    }
  }
}

// Takes ds [key][query] into the gradients of the slope and of the runs' weights.
template <class F>
void backward_bias(const Problem& p, const Keys& keys, const Rows& rows, const F* ds,
                   double* dslope, double* dweights) {
  for (int x = 0; x < keys.count; ++x) {
    double total = 0, far = 0;
    for (int i = 0; i < rows.count; ++i) {
      double value = ds[x * kWidth<F> + i];
      total += value;
      far += value * double(distance(p, rows.at(i), keys.position[x]));
    }
    if (dslope) *dslope -= far;
    if (dweights) dweights[keys.run[x]] += total;
  }
}

template <class F>
void backward_tile(const Problem& p, const Tile& tile, int64_t part, F* scratch) {
  constexpr int width = kWidth<F>;
  const F* q = p.q.of<F>(tile.b, tile.h);
  const F* k = p.k.of<F>(tile.b, key_head(p, tile));
  const F* v = p.v.of<F>(tile.b, key_head(p, tile));
  const F* o = p.o_in.of<F>(tile.b, tile.h);
  const F* dout = p.dout.of<F>(tile.b, tile.h);
  int64_t head = part * p.batch * p.heads + tile.b * p.heads + tile.h;
  int64_t unit = (part * p.batch + tile.b) * p.key_heads + key_head(p, tile);
  int64_t line = (tile.b * p.heads + tile.h) * p.queries;
  F* dk = static_cast<F*>(p.dk) + unit * p.keys * p.padded;
  F* dv = static_cast<F*>(p.dv) + unit * p.keys * p.padded;
  double* dslope = p.dslopes ? p.dslopes + head : nullptr;
  double* dweights = p.dweights ? p.dweights + unit * p.num_runs : nullptr;
  F slope = slope_of<F>(p, tile);
  auto parts = parts_of<F>(tile);
  int64_t count = int64_t(parts.size()), block = width * p.padded;
  F* scores = scratch;
  F* ds = scores + kKeys * width;
  F* q_lanes = ds + kKeys * width;
  F* do_lanes = q_lanes + count * block;
  F* dq_lanes = do_lanes + count * block;
  F* q_rows = dq_lanes + count * block;
  F* do_rows = q_rows + count * block;
  F* lse = do_rows + count * block;
  F* delta = lse + count * width;
  std::fill(dq_lanes, q_rows, F(0));
  std::fill(lse, delta, kInfinity<F>);  // e^(s - inf) = 0, also for queries without keys
  std::fill(delta, delta + count * width, F(0));
  for (int64_t i = 0; i < count; ++i) {
    transpose<F>(q, p.q.token, parts[i], p.dim, F(p.scale), q_lanes + i * block);
    transpose<F>(dout, p.dout.token, parts[i], p.dim, F(1), do_lanes + i * block);
    copy<F>(q, p.q.token, parts[i], p, F(p.scale), q_rows + i * block);
    copy<F>(dout, p.dout.token, parts[i], p, F(1), do_rows + i * block);
    for (int r = 0; r < parts[i].count; ++r) {
      int64_t row = parts[i].at(r);
      F own = static_cast<const F*>(p.lse_in)[line + row];
      if (own != -kInfinity<F>) lse[i * width + r] = own;
      F sum = p.dlse ? -static_cast<const F*>(p.dlse)[line + row] : F(0);
      for (int64_t d = 0; d < p.dim; ++d) {
        sum += dout[row * p.dout.token + d] * o[row * p.o_in.token + d];
      }
      delta[i * width + r] = sum;
    }
  }
  for_keys(p, tile, [&](const Keys& keys) {
    const F *ks[kKeys], *vs[kKeys], *ps[kKeys], *dss[kKeys];
    F *to_scores[kKeys], *to_ds[kKeys], *dks[kKeys], *dvs[kKeys];
    for (int x = 0; x < keys.count; ++x) {
      ks[x] = k + keys.position[x] * p.k.token;
      vs[x] = v + keys.position[x] * p.v.token;
      dks[x] = dk + keys.position[x] * p.padded;
      dvs[x] = dv + keys.position[x] * p.padded;
      ps[x] = to_scores[x] = scores + x * width;
      dss[x] = to_ds[x] = ds + x * width;
    }
    for (int64_t i = 0; i < count; ++i) {
      const Rows& rows = parts[i];
      if (!score<F>(p, keys, rows, ks, q_lanes + i * block, slope, to_scores)) continue;
      product<F, false, kKeys>(to_ds, vs, do_lanes + i * block, width, keys.count, int(p.dim),
                               rows.vectors);
      for (int w = 0; w < rows.vectors; ++w) {
        int lane = w * kLanes<F>;
        Vector<F> of_row = load<F>(lse + i * width + lane);
        Vector<F> less = load<F>(delta + i * width + lane);
        for (int x = 0; x < keys.count; ++x) {
          F *to = scores + x * width + lane, *to_gradient = ds + x * width + lane;
          Vector<F> e = exponential<F>(load<F>(to) - of_row);
          store<F>(to, e);
          store<F>(to_gradient, e * (load<F>(to_gradient) - less));
        }
      }
      int vectors = int(p.padded) / kLanes<F>;
      outer<F>(dq_lanes + i * block, width, ks, ds, int(p.dim), keys.count, rows.vectors);
      product<F, true, kKeys>(dvs, ps, do_rows + i * block, p.padded, keys.count, rows.count,
                              vectors);
      product<F, true, kKeys>(dks, dss, q_rows + i * block, p.padded, keys.count, rows.count,
                              vectors);
      if (dslope || dweights) backward_bias<F>(p, keys, rows, ds, dslope, dweights);
    }
  });
  for (int64_t i = 0; i < count; ++i) {
    for (int r = 0; r < parts[i].count; ++r) {
      F* dq = static_cast<F*>(p.dq) + (line + parts[i].at(r)) * p.dim;
      const F* from = dq_lanes + i * block + r;
      for (int64_t d = 0; d < p.dim; ++d) dq[d] = from[d * width] * F(p.scale);
    }
  }
}

void add_tiles(const Problem& p, int64_t b, int64_t h, std::vector<Tile>& tiles) {
  int32_t variant = p.row_variants[b * p.variant_sample + h * p.variant_head];
  for (int64_t g = p.variants[variant]; g < p.variants[variant + 1]; ++g) {
    const int32_t* group = p.groups + 5 * g;
    for (int64_t i = 0; i < group[2]; i += kTile) {
      tiles.push_back({b, h, group, i, std::min<int64_t>(kTile, group[2] - i)});
    }
  }
}

// Calls work(task, thread) for all tasks, the next to whichever thread is free.
template <class Work>
void share(int64_t tasks, int64_t threads, Work work) {
  std::atomic<int64_t> next{0};
  auto run = [&](int64_t thread) {
    for (int64_t task = next++; task < tasks; task = next++) work(task, thread);
  };
  std::vector<std::thread> others;
  for (int64_t thread = 1; thread < std::min(tasks, threads); ++thread) {
    try {
      others.emplace_back(run, thread);
    } catch (const std::system_error&) {
      break;  // the system gives no more threads: those that there are do all
    }
  }
  run(0);
  for (auto& thread : others) thread.join();
}

template <class F>
int64_t scratch_elements(const Problem& p) {
  int64_t parts = (kTile + kWidth<F> - 1) / kWidth<F>, width = kWidth<F>;
  return 2 * kKeys * width + parts * width * (5 * p.padded + 2);
}

template <class F>
void forward(const Problem& p) {
  std::vector<Tile> tiles;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.heads; ++h) add_tiles(p, b, h, tiles);
  }
  // The last first: they are the long ones where queries are causal.
  int64_t count = int64_t(tiles.size());
  share(count, p.threads, [&](int64_t task, int64_t thread) {
    F* scratch = static_cast<F*>(p.scratch) + thread * scratch_elements<F>(p);
    forward_tile<F>(p, tiles[count - 1 - task], scratch);
  });
}

// A key head's gradients are summed by one thread, or each part of its tiles by one.
template <class F>
void backward(const Problem& p) {
  int64_t units = p.batch * p.key_heads, heads = p.heads / std::max<int64_t>(1, p.key_heads);
  share(units * p.parts, p.threads, [&](int64_t task, int64_t thread) {
    int64_t unit = task % units, part = task / units;
    std::vector<Tile> tiles;
    for (int64_t h = 0; h < heads; ++h) {
      add_tiles(p, unit / p.key_heads, unit % p.key_heads * heads + h, tiles);
    }
    F* scratch = static_cast<F*>(p.scratch) + thread * scratch_elements<F>(p);
    for (size_t i = size_t(part); i < tiles.size(); i += size_t(p.parts)) {
      backward_tile<F>(p, tiles[i], part, scratch);
    }
  });
}

}  // namespace

extern "C" {

int64_t problem_bytes() { return sizeof(Problem); }
int64_t vector_bytes() { return kVectorBytes; }
int64_t scratch_elements_float(const Problem* p) { return scratch_elements<float>(*p); }
int64_t scratch_elements_double(const Problem* p) { return scratch_elements<double>(*p); }
void forward_float(const Problem* p) { forward<float>(*p); }
void forward_double(const Problem* p) { forward<double>(*p); }
void backward_float(const Problem* p) { backward<float>(*p); }
void backward_double(const Problem* p) { backward<double>(*p); }
}
