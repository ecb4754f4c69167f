// Iteration over a tile graph: tiles of queries, and the keys that each tile may see.
//
// Letters: B samples, H query heads, G key/value heads, T query tokens, S key tokens, D head dim, E that
// of values.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "vectors.h"

// A tensor [B, heads, tokens, D] (D, E or S) with last stride 1; strides in elements.
struct Tokens {
  const void* data;
  int64_t sample, head, token;

  template <class F>
  const F* of(int64_t b, int64_t h) const {
    return static_cast<const F*>(data) + b * sample + h * head;
  }
};

// The fields of _CALL and _ROWS in attention_cpu.py, in order. "or null" marks optional fields.
struct Problem {
  Tokens q, k, v, o_in, dout, bias;  // bias [B, H, T, S], or null
  const void *sinks, *slopes;      // [B, H], or null
  void *o, *lse;                   // [B, H, T, E], [B, H, T]: results of the forward
  const void *lse_in, *dlse;       // [B, H, T]; dlse or null
  void *dq, *dk, *dv;              // [B, H, T, D]; [B, G, S, padded], [..., value_padded], added to
  void *dbias;                     // [B, H, T, S], or null
  double* dweights;                // [W], added to; or null
  double* row_sums;                // [4, B, H, T], or null: sums over keys, see attention_cpu.py
  const int64_t* dweights_of;      // [B, H]: index in dweights of run 0, for each head
  const int32_t* key_range;        // [B, 2], or null
  int64_t batch, heads, key_heads, queries, keys, dim, padded, value_dim, value_padded;
  int64_t distance_shift, threads;
  double scale, softcap;           // softcap 0 means no softcap
  // The tables of the graph's rows, packed once per graph.
  const int32_t *groups, *runs;    // tile_graph.Side
  const double* weights;           // [R]: log multiplicities
  const int32_t *variants, *row_variants;
  int64_t variant_sample, variant_head;  // strides of row_variants [B, H]
};

constexpr int kKeys = 64;        // keys that a tile processes at a time
constexpr int64_t kTile = 128;   // maximum number of queries of a tile
constexpr int32_t kUnbounded = (1 << 30) - 1;  // tile_graph.UNBOUNDED

// Number of queries that are processed together, as the lanes of up to kVectors vectors.
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
struct RowsOf {
  std::array<Rows, (kTile + kWidth<F> - 1) / kWidth<F>> rows;
  int64_t count = 0;

  explicit RowsOf(const Tile& tile) {
    for (int64_t i = 0; i < tile.count; i += kWidth<F>) {
      int queries = int(std::min<int64_t>(kWidth<F>, tile.count - i));
      int vectors = (queries + kLanes<F> - 1) / kLanes<F>;
      rows[count++] = {tile.position(i), tile.stride(), queries, vectors};
    }
  }
  const Rows& operator[](int64_t i) const { return rows[i]; }
};

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

inline int64_t floor_div(int64_t a, int64_t b) {
  int64_t quotient = a / b;
  return quotient * b > a ? quotient - 1 : quotient;
}

// Calls visit(run, column, step, count) for each run, with the columns that the tile may see.
template <class Visit>
void for_runs(const Problem& p, const Tile& tile, Visit visit) {
  int64_t first = tile.position(0), last = tile.position(tile.count - 1);
  int64_t begin = 0, end = p.keys;
  if (p.key_range) {
    begin = std::max<int64_t>(begin, p.key_range[2 * tile.b]);
    end = std::min<int64_t>(end, p.key_range[2 * tile.b + 1]);
  }
  for (int64_t r = tile.group[3]; r < tile.group[4]; ++r) {
    if (p.weights[r] == -kInfinity<double>) continue;
    const int32_t* run = p.runs + 5 * r;
    int64_t column = run[0], step = std::max(1, run[1]), length = run[2];
    int64_t low = run[4] < kUnbounded ? std::max(begin, first - run[4]) : begin;
    int64_t high = run[3] > -kUnbounded ? std::min(end - 1, last - run[3]) : end - 1;
    int64_t from = std::max<int64_t>(0, -floor_div(column - low, step));
    int64_t count = std::min(length, floor_div(high - column, step) + 1) - from;
    if (count > 0) visit(r, column + from * step, step, count);
  }
}

// Calls run(keys) with all keys that the tile may see, up to kKeys at a time.
template <class Run>
void for_keys(const Problem& p, const Tile& tile, Run run) {
  Keys keys;
  for_runs(p, tile, [&](int64_t r, int64_t column, int64_t step, int64_t count) {
    for (int64_t j = 0; j < count; ++j) {
      int x = keys.count++;
      keys.position[x] = column + j * step;
      keys.run[x] = r;
      keys.lo[x] = p.runs[5 * r + 3];
      keys.hi[x] = p.runs[5 * r + 4];
      keys.weight[x] = p.weights[r];
      keys.weighted = keys.weighted || p.weights[r] != 0;
      if (keys.count == kKeys) {
        run(keys);
        keys.count = 0;
        keys.weighted = false;
      }
    }
  });
  if (keys.count) run(keys);
}

// Appends the tiles of a sample's head, in the order of the groups.
inline void add_tiles(const Problem& p, int64_t b, int64_t h, std::vector<Tile>& tiles) {
  int32_t variant = p.row_variants[b * p.variant_sample + h * p.variant_head];
  for (int64_t g = p.variants[variant]; g < p.variants[variant + 1]; ++g) {
    const int32_t* group = p.groups + 5 * g;
    for (int64_t i = 0; i < group[2]; i += kTile) {
      tiles.push_back({b, h, group, i, std::min<int64_t>(kTile, group[2] - i)});
    }
  }
}

// The gradients of a key head are summed over at most kParts parts, each of at least kPartQueries
// queries.
constexpr int64_t kParts = 16, kPartQueries = 2048;

// Tiles of one key head, whose gradients are summed one after the other.
struct Part {
  int64_t unit, turn, first, end;     // key head; number of the part in it; range of tiles
  int64_t first_key = 0, end_key = 0; // range of the keys that the tiles see
};

// Tiles of one key head that see keys in [first, end), which no other tiles see.
struct Island {
  int64_t first, end, queries = 0;
};

// Returns the islands of the tiles, and sorts the tiles by island, the last island first.
inline std::vector<Island> islands_of(const Problem& p, std::vector<Tile>::iterator first,
                                      std::vector<Tile>::iterator last) {
  std::vector<Island> of_tiles, islands;
  for (auto tile = first; tile != last; ++tile) {
    Island own{p.keys, 0, tile->count};
    for_runs(p, *tile, [&](int64_t, int64_t column, int64_t step, int64_t count) {
      own.first = std::min(own.first, column);
      own.end = std::max(own.end, column + step * (count - 1) + 1);
    });
    if (own.end == 0) own.first = 0, own.end = 1;  // the tile sees no key
    of_tiles.push_back(own);
  }
  std::vector<Island> sorted = of_tiles;
  auto before = [](const Island& a, const Island& b) { return a.first < b.first; };
  std::sort(sorted.begin(), sorted.end(), before);
  for (const Island& own : sorted) {
    if (islands.empty() || own.first >= islands.back().end) islands.push_back({own.first, 0, 0});
    islands.back().end = std::max(islands.back().end, own.end);
    islands.back().queries += own.queries;
  }
  auto number = [&](const Island& own) {
    return std::upper_bound(islands.begin(), islands.end(), own, before) - islands.begin();
  };
  std::vector<std::pair<int64_t, Tile>> numbered;
  for (size_t i = 0; i < of_tiles.size(); ++i) {
    numbered.push_back({number(of_tiles[i]), *(first + int64_t(i))});
  }
  auto later = [](const auto& a, const auto& b) { return a.first > b.first; };
  std::stable_sort(numbered.begin(), numbered.end(), later);
  for (size_t i = 0; i < numbered.size(); ++i) *(first + int64_t(i)) = numbered[i].second;
  std::reverse(islands.begin(), islands.end());
  return islands;
}

// Divides the tiles of each key head into parts. The gradients of the parts are added in order, so
// that no bit depends on the number of threads or on other samples. How an island is divided
// depends on its own size alone, so that no bit of a packed document depends on other documents.
inline std::vector<Part> parts_of(const Problem& p, std::vector<Tile>& tiles) {
  int64_t units = p.batch * p.key_heads, heads = p.heads / std::max<int64_t>(1, p.key_heads);
  int64_t most = std::max(kPartQueries, heads * p.queries / kParts);
  std::vector<Part> parts;
  for (int64_t unit = 0; unit < units; ++unit) {
    int64_t first = int64_t(tiles.size());
    for (int64_t h = 0; h < heads; ++h) {
      add_tiles(p, unit / p.key_heads, unit % p.key_heads * heads + h, tiles);
    }
    // The last tiles go first, since they see most keys if attention is causal.
    std::reverse(tiles.begin() + first, tiles.end());
    int64_t end = int64_t(tiles.size());
    // With dweights each key head has one part: several parts would add to one run's gradient.
    bool is_cut = !p.dweights && heads * p.queries > kPartQueries;
    std::vector<Island> islands{{0, p.keys, heads * p.queries}};
    if (is_cut) islands = islands_of(p, tiles.begin() + first, tiles.end());
    int64_t turn = 0, begin = first, held = 0;
    auto cut = [&](int64_t at) {
      if (at > begin) parts.push_back({unit, turn++, begin, at});
      begin = at;
      held = 0;
    };
    int64_t at = first;
    for (const Island& island : islands) {
      int64_t own = std::max(kPartQueries, island.queries / kParts), left = island.queries;
      bool is_long = is_cut && left > own;
      if (is_long || held >= most) cut(at);
      for (int64_t of_part = 0; at < end && (!is_cut || left > 0);) {
        int64_t queries = tiles[size_t(at++)].count;
        left -= queries;
        held += queries;
        of_part += queries;
        if (is_long && of_part >= own) {
          cut(at);
          of_part = 0;
        }
      }
      if (is_long) cut(at);
    }
    cut(end);
  }
  for (Part& part : parts) {
    if (part.turn == 0) continue;
    part.first_key = p.keys;
    for (int64_t i = part.first; i < part.end; ++i) {
      auto see = [&](int64_t, int64_t column, int64_t step, int64_t count) {
        part.first_key = std::min(part.first_key, column);
        part.end_key = std::max(part.end_key, column + step * (count - 1) + 1);
      };
      for_runs(p, tiles[size_t(i)], see);
    }
    if (part.end_key == 0) part.first_key = 0;
  }
  // Parts start in the order of their turns, so that no thread waits for a part not yet started.
  auto before = [](const Part& a, const Part& b) { return a.turn < b.turn; };
  std::stable_sort(parts.begin(), parts.end(), before);
  return parts;
}
