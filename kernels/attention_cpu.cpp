// Attention over tile graphs on the CPU. attention_cpu.py calls it and describes the tensors.
//
// The queries of a tile are the lanes of vectors, and scores are stored as S[key][query]. So keys
// and values are read in place, one number at a time, with any stride, and a query's maximum, sum
// and lse need no reduction over lanes. kKeys keys, of one or several runs, are processed at a
// time.
// Recurrences of flash attention: Dao, arXiv:2307.08691, algorithms 1 and 2.
//
// Letters: B samples, H query heads, G key/value heads, T query tokens, S key tokens, D head dim, E that
// of values.

#include <cmath>
#include <condition_variable>
#include <mutex>

#include "threads.h"
#include "tiles.h"

namespace {

// Numbers that threads may buffer for parts that wait for their turn. If the gradients of keys and
// values have more numbers, threads may buffer that many.
constexpr int64_t kWaiting = int64_t(1) << 26;

int64_t distance(const Problem& p, int64_t query, int64_t key) {
  int64_t d = query - key + p.distance_shift;
  return d < 0 ? -d : d;
}

// Adds log multiplicities and slopes to scores [key][query], and masks by the runs' bands.
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

// Replaces scores by softcap * tanh(score / softcap); writes the tanh to `tangents` unless null.
template <class F>
void cap(const Problem& p, int keys, int vectors, F* scores, F* tangents) {
  F bound = F(p.softcap), inverse = F(1 / p.softcap);
  for (int v = 0; v < vectors; ++v) {
    for (int x = 0; x < keys; ++x) {
      int64_t at = x * kWidth<F> + v * kLanes<F>;
      Vector<F> value = tangent<F>(load<F>(scores + at) * inverse);
      if (tangents) store<F>(tangents + at, value);
      store<F>(scores + at, value * bound);
    }
  }
}

// Adds the bias [query][key] of a sample's head to scores [key][query].
template <class F>
void add_bias(const Problem& p, const Keys& keys, const Rows& rows, const F* of_head, F* scores) {
  for (int i = 0; i < rows.count; ++i) {
    const F* line = of_head + rows.at(i) * p.bias.token;
    for (int x = 0; x < keys.count; ++x) scores[x * kWidth<F> + i] += line[keys.position[x]];
  }
}

// The slope and the bias of a tile's sample and head.
template <class F>
struct Added {
  F slope;
  const F* bias;

  Added(const Problem& p, const Tile& tile)
      : slope(p.slopes ? static_cast<const F*>(p.slopes)[tile.b * p.heads + tile.h] : F(0)),
        bias(p.bias.data ? p.bias.of<F>(tile.b, tile.h) : nullptr) {}
};

// Computes scores [key][query]; returns false if the rows see none of the keys.
template <class F>
bool score(const Problem& p, const Keys& keys, const Rows& rows, const F* const* k, const F* q,
           const Added<F>& added, F* const* scores, F* tangents) {
  Seen seen = keys.seen_by(rows);
  if (seen == kNone) return false;
  product<F, false, kKeys>(scores, k, q, kWidth<F>, keys.count, int(p.dim), rows.vectors);
  if (p.softcap > 0) cap<F>(p, keys.count, rows.vectors, scores[0], tangents);
  if (added.bias) add_bias<F>(p, keys, rows, added.bias, scores[0]);
  if (seen == kSome || keys.weighted || p.slopes) {
    bias<F>(p, keys, rows, seen == kSome, added.slope, scores[0]);
  }
  return true;
}

// Writes the rows of x, times `factor`, as [D][query]; lanes without a query are 0.
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

// Writes the rows of x [query][dim], times `factor`, as [query][padded].
template <class F>
void copy(const F* x, int64_t stride, const Rows& rows, int64_t dim, int64_t padded, F factor,
          F* out) {
  for (int i = 0; i < rows.count; ++i, out += padded) {
    const F* from = x + rows.at(i) * stride;
    for (int64_t d = 0; d < dim; ++d) out[d] = from[d] * factor;
    std::fill(out + dim, out + padded, F(0));
  }
}

int64_t key_head(const Problem& p, const Tile& tile) { return tile.h / (p.heads / p.key_heads); }

// A step of the online softmax: replaces scores by e^(score - top), and updates top, sum and
// o [D][query] to include these keys.
template <class F>
void soften(int count, int64_t dim, int vectors, F* scores, F* top, F* sum, F* o) {
  for (int v = 0; v < vectors; ++v) {
    int lane = v * kLanes<F>;
    Vector<F> before = load<F>(top + lane), most = before;
    for (int x = 0; x < count; ++x) {
      Vector<F> value = load<F>(scores + x * kWidth<F> + lane);
      most = value > most ? value : most;
    }
    // If a query has seen no key yet, e^(-inf - 0) = 0.
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
  Added<F> added(p, tile);
  F sink = p.sinks ? static_cast<const F*>(p.sinks)[tile.b * p.heads + tile.h] : -kInfinity<F>;
  RowsOf<F> all(tile);
  int64_t count = all.count, block = p.dim * width, value_block = p.value_dim * width;
  F* scores = scratch;
  F* qs = scores + kKeys * width;
  F* os = qs + count * block;
  F* top = os + count * value_block;
  F* sum = top + count * width;
  for (int64_t i = 0; i < count; ++i) {
    transpose<F>(q, p.q.token, all[i], p.dim, F(p.scale), qs + i * block);
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
      F* o = os + i * value_block;
      if (!score<F>(p, keys, all[i], ks, qs + i * block, added, of_keys, nullptr)) continue;
      soften<F>(keys.count, p.value_dim, all[i].vectors, scores, top + i * width, sum + i * width,
                o);
      outer<F>(o, width, vs, scores, int(p.value_dim), keys.count, all[i].vectors);
    }
  });
  int64_t line = (tile.b * p.heads + tile.h) * p.queries;
  for (int64_t i = 0; i < count; ++i) {
    for (int r = 0; r < all[i].count; ++r) {
      int64_t row = line + all[i].at(r);
      F most = top[i * width + r], total = sum[i * width + r], factor = 1;
      bool fully_masked = total == 0;
      if (sink > most) {
        factor = std::exp(most - sink);
        total = total * factor + 1;
        most = sink;
      } else if (sink != -kInfinity<F>) {
        total += std::exp(sink - most);
      }
      F* o = static_cast<F*>(p.o) + row * p.value_dim;
      const F* from = os + i * value_block + r;
      factor /= total;
      for (int64_t d = 0; d < p.value_dim; ++d) o[d] = fully_masked ? F(0) : from[d * width] * factor;
      static_cast<F*>(p.lse)[row] = most + std::log(total);
    }
  }
}

// Four sums over keys for each row of a tile: of ds, p, ds * distance and p * distance.
template <class F>
struct RowSums {
  std::array<double, kTile + kWidth<F>> ds{}, p{}, ds_far{}, p_far{};
};

// Adds ds [key][query] to the gradients of the runs' weights.
template <class F>
void add_to_weights(const Keys& keys, const Rows& rows, const F* ds, double* dweights) {
  for (int x = 0; x < keys.count; ++x) {
    double total = 0;
    for (int i = 0; i < rows.count; ++i) total += ds[x * kWidth<F> + i];
    dweights[keys.run[x]] += total;
  }
}

// Adds ds and probabilities [key][query] to the sums of the rows from `first` on.
template <class F>
void add_to_row_sums(const Problem& p, const Keys& keys, const Rows& rows, const F* ds,
                     const F* ps, int64_t first, RowSums<F>* sums) {
  double *of_ds = &sums->ds[size_t(first)], *of_p = &sums->p[size_t(first)];
  double *of_ds_far = &sums->ds_far[size_t(first)], *of_p_far = &sums->p_far[size_t(first)];
  for (int x = 0; x < keys.count; ++x) {
    for (int i = 0; i < rows.count; ++i) {
      double value = ds[x * kWidth<F> + i], weight = ps[x * kWidth<F> + i];
      double far = double(distance(p, rows.at(i), keys.position[x]));
      of_ds[i] += value;
      of_p[i] += weight;
      of_ds_far[i] += value * far;
      of_p_far[i] += weight * far;
    }
  }
}

// Writes ds [key][query] to the bias' gradient [query][key] of a sample's head.
template <class F>
void write_bias_grad(const Problem& p, const Keys& keys, const Rows& rows, const F* ds, F* to) {
  for (int i = 0; i < rows.count; ++i) {
    F* line = to + rows.at(i) * p.keys;
    for (int x = 0; x < keys.count; ++x) line[keys.position[x]] = ds[x * kWidth<F> + i];
  }
}

// Replaces the gradient of the scores after the softcap by that of the scores before the softcap.
template <class F>
void uncap(int keys, int vectors, const F* tangents, F* ds) {
  for (int v = 0; v < vectors; ++v) {
    for (int x = 0; x < keys; ++x) {
      int64_t at = x * kWidth<F> + v * kLanes<F>;
      Vector<F> t = load<F>(tangents + at);
      store<F>(ds + at, load<F>(ds + at) * (F(1) - t * t));
    }
  }
}

// Buffers for a part's gradients of keys and values; row 0 belongs to key `first`.
template <class F>
struct Sums {
  F *dk, *dv;
  int64_t first;
};

// Adds a tile's gradients to `sums`, and writes dq and the row sums.
template <class F>
void backward_tile(const Problem& p, const Tile& tile, const Sums<F>& sums, F* scratch) {
  constexpr int width = kWidth<F>;
  const F* q = p.q.of<F>(tile.b, tile.h);
  const F* k = p.k.of<F>(tile.b, key_head(p, tile));
  const F* v = p.v.of<F>(tile.b, key_head(p, tile));
  const F* o = p.o_in.of<F>(tile.b, tile.h);
  const F* dout = p.dout.of<F>(tile.b, tile.h);
  int64_t head = tile.b * p.heads + tile.h, line = head * p.queries;
  double* dweights = p.dweights ? p.dweights + p.dweights_of[head] : nullptr;
  Added<F> added(p, tile);
  RowsOf<F> all(tile);
  int64_t count = all.count, block = width * p.padded, value_block = width * p.value_padded;
  F* dbias = p.dbias ? static_cast<F*>(p.dbias) + line * p.keys : nullptr;
  F* scores = scratch;
  F* ds = scores + kKeys * width;
  F* tangents = ds + kKeys * width;
  F* q_lanes = tangents + kKeys * width;
  F* dq_lanes = q_lanes + count * block;
  F* q_rows = dq_lanes + count * block;
  F* do_lanes = q_rows + count * block;
  F* do_rows = do_lanes + count * value_block;
  F* lse = do_rows + count * value_block;
  F* delta = lse + count * width;
  RowSums<F> row_sums;
  std::fill(dq_lanes, q_rows, F(0));
  std::fill(lse, delta, kInfinity<F>);  // e^(s - inf) = 0, also for queries without keys
  std::fill(delta, delta + count * width, F(0));
  for (int64_t i = 0; i < count; ++i) {
    transpose<F>(q, p.q.token, all[i], p.dim, F(p.scale), q_lanes + i * block);
    transpose<F>(dout, p.dout.token, all[i], p.value_dim, F(1), do_lanes + i * value_block);
    copy<F>(q, p.q.token, all[i], p.dim, p.padded, F(p.scale), q_rows + i * block);
    copy<F>(dout, p.dout.token, all[i], p.value_dim, p.value_padded, F(1),
            do_rows + i * value_block);
    for (int r = 0; r < all[i].count; ++r) {
      int64_t row = all[i].at(r);
      F own = static_cast<const F*>(p.lse_in)[line + row];
      if (own != -kInfinity<F>) lse[i * width + r] = own;
      // In double, since an error of delta enters every ds of the row.
      double sum = p.dlse ? -static_cast<const F*>(p.dlse)[line + row] : F(0);
      for (int64_t d = 0; d < p.value_dim; ++d) {
        sum += double(dout[row * p.dout.token + d]) * double(o[row * p.o_in.token + d]);
      }
      delta[i * width + r] = F(sum);
    }
  }
  for_keys(p, tile, [&](const Keys& keys) {
    const F *ks[kKeys], *vs[kKeys], *ps[kKeys], *dss[kKeys];
    F *to_scores[kKeys], *to_ds[kKeys], *dks[kKeys], *dvs[kKeys];
    for (int x = 0; x < keys.count; ++x) {
      ks[x] = k + keys.position[x] * p.k.token;
      vs[x] = v + keys.position[x] * p.v.token;
      dks[x] = sums.dk + (keys.position[x] - sums.first) * p.padded;
      dvs[x] = sums.dv + (keys.position[x] - sums.first) * p.value_padded;
      ps[x] = to_scores[x] = scores + x * width;
      dss[x] = to_ds[x] = ds + x * width;
    }
    for (int64_t i = 0; i < count; ++i) {
      const Rows& rows = all[i];
      if (!score<F>(p, keys, rows, ks, q_lanes + i * block, added, to_scores, tangents)) continue;
      product<F, false, kKeys>(to_ds, vs, do_lanes + i * value_block, width, keys.count,
                               int(p.value_dim), rows.vectors);
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
      if (dweights) add_to_weights<F>(keys, rows, ds, dweights);
      if (p.row_sums) add_to_row_sums<F>(p, keys, rows, ds, scores, i * width, &row_sums);
      if (dbias) write_bias_grad<F>(p, keys, rows, ds, dbias);
      if (p.softcap > 0) uncap<F>(keys.count, rows.vectors, tangents, ds);
      outer<F>(dq_lanes + i * block, width, ks, ds, int(p.dim), keys.count, rows.vectors);
      product<F, true, kKeys>(dvs, ps, do_rows + i * value_block, p.value_padded, keys.count,
                              rows.count, int(p.value_padded) / kLanes<F>);
      product<F, true, kKeys>(dks, dss, q_rows + i * block, p.padded, keys.count, rows.count,
                              int(p.padded) / kLanes<F>);
    }
  });
  for (int64_t i = 0; i < count; ++i) {
    for (int r = 0; r < all[i].count; ++r) {
      F* dq = static_cast<F*>(p.dq) + (line + all[i].at(r)) * p.dim;
      const F* from = dq_lanes + i * block + r;
      if (p.row_sums) {
        double* to = p.row_sums + line + all[i].at(r);
        int64_t rows = p.batch * p.heads * p.queries;
        size_t at = size_t(i * width + r);
        to[0] = row_sums.ds[at], to[rows] = row_sums.p[at];
        to[2 * rows] = row_sums.ds_far[at], to[3 * rows] = row_sums.p_far[at];
      }
      for (int64_t d = 0; d < p.dim; ++d) dq[d] = from[d * width] * F(p.scale);
    }
  }
}

// Number of scratch elements that a thread needs for one tile.
template <class F>
int64_t scratch_elements(const Problem& p) {
  int64_t rows = (kTile + kWidth<F> - 1) / kWidth<F> * kWidth<F>;
  int64_t numbers = 3 * p.padded + 2 * p.value_padded + 2;
  return 3 * kKeys * kWidth<F> + rows * numbers + 64 / int64_t(sizeof(F));
}

template <class F>
void forward(const Problem& p) {
  std::vector<Tile> tiles;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.heads; ++h) add_tiles(p, b, h, tiles);
  }
  // The last tiles go first, since they see most keys if attention is causal.
  int64_t count = int64_t(tiles.size());
  Memory<F> scratch(p.threads, scratch_elements<F>(p));
  share<FlushToZero>(count, p.threads, [&](int64_t task, int64_t thread) {
    forward_tile<F>(p, tiles[count - 1 - task], scratch.of(thread));
  });
}

template <class F>
void backward(const Problem& p) {
  std::vector<Tile> tiles;
  std::vector<Part> parts = parts_of(p, tiles);
  int64_t rows = 0;
  for (const Part& part : parts) {
    if (part.turn > 0) rows = std::max(rows, part.end_key - part.first_key);
  }
  int64_t numbers = p.padded + p.value_padded;
  int64_t waiting = rows * numbers, all = p.batch * p.key_heads * p.keys * numbers;
  int64_t threads = std::max<int64_t>(1, std::min<int64_t>(p.threads, int64_t(parts.size())));
  if (waiting > 0) {
    threads = std::min(threads, std::max<int64_t>(1, std::max(kWaiting, all) / waiting));
  }
  Memory<F> scratch(threads, scratch_elements<F>(p));
  Memory<F> sums_of_parts(threads, waiting + 64 / int64_t(sizeof(F)));
  std::vector<int64_t> turns(size_t(p.batch * p.key_heads));
  std::mutex mutex;
  std::condition_variable turned;
  share<FlushToZero>(int64_t(parts.size()), threads, [&](int64_t task, int64_t thread) {
    const Part& part = parts[size_t(task)];
    F* dk = static_cast<F*>(p.dk) + part.unit * p.keys * p.padded;
    F* dv = static_cast<F*>(p.dv) + part.unit * p.keys * p.value_padded;
    int64_t keys = part.end_key - part.first_key;
    Sums<F> sums{dk, dv, 0};
    if (part.turn > 0) {
      F* own = sums_of_parts.of(thread);
      std::fill(own, own + keys * numbers, F(0));
      sums = {own, own + keys * p.padded, part.first_key};
    }
    for (int64_t i = part.first; i < part.end; ++i) {
      backward_tile<F>(p, tiles[size_t(i)], sums, scratch.of(thread));
    }
    std::unique_lock<std::mutex> lock(mutex);
    turned.wait(lock, [&] { return turns[size_t(part.unit)] == part.turn; });
    lock.unlock();
    if (part.turn > 0) {
      F *to_k = dk + part.first_key * p.padded, *to_v = dv + part.first_key * p.value_padded;
      for (int64_t i = 0; i < keys * p.padded; ++i) to_k[i] += sums.dk[i];
      for (int64_t i = 0; i < keys * p.value_padded; ++i) to_v[i] += sums.dv[i];
    }
    lock.lock();
    ++turns[size_t(part.unit)];
    turned.notify_all();
  });
}

}  // namespace

extern "C" {

int64_t problem_bytes() { return sizeof(Problem); }
int64_t vector_bytes() { return kVectorBytes; }
int forward_float(const Problem* p) { return status([p] { forward<float>(*p); }); }
int forward_double(const Problem* p) { return status([p] { forward<double>(*p); }); }
int backward_float(const Problem* p) { return status([p] { backward<float>(*p); }); }
int backward_double(const Problem* p) { return status([p] { backward<double>(*p); }); }
}
