// Flat paged attention. The rows of a tile (queries x heads of a group) meet the positions of a KV head in chunks of
// CHUNK. Each chunk gives a partial softmax. Partials merge in the order of the positions, and sums of rows never mix:
// a query's result depends neither on its batch nor on the threads.
#pragma once
#include "few_rows.h"

namespace ISA {

constexpr float MASKED = -1e30f;

// The products of attention by vectors. Few rows read keys and values in the cache; many rows read packed panels.
class VectorProducts {
 public:
  static constexpr int64_t STRIP = 4 * ROWS;  // rows; their weights of a chunk fit the first cache
  static constexpr int64_t TOGETHER = W;      // positions; missing ones have weight 0
  static constexpr int64_t PAIRS_TOGETHER = 1;
  static constexpr int64_t WEIGHTS = CHUNK;  // from one row of scores to the next
  static constexpr int SOFTMAX_ROWS = 1;  // rows per step from scores to weights

  template <int R, bool PAIRS, typename T>
  void scores(const float* queries, int64_t depth, const T* const* keys, int64_t from, LinePrefetcher<T>& ahead,
              float* out, int64_t stride) {
    if constexpr (NARROW) narrow_scores<R>(queries, depth, keys, from, ahead, out, stride);
    else ISA::scores<R, PAIRS>(queries, depth, keys, from, out, stride);
  }
  template <int R, bool PAIRS, typename T>
  void add_values(const float* weights, int64_t stride, const T* const* values, int64_t from, int64_t keys,
                  int64_t width, LinePrefetcher<T>& ahead, float* out, int64_t out_stride) {
    if constexpr (NARROW) narrow_values<R>(weights, stride, values, from, keys, width, ahead, out, out_stride);
    else ISA::add_values<R, PAIRS>(weights, stride, values, from, keys, width, out, out_stride);
  }
  template <bool PAIRS>
  void multiply(int64_t rows, const float* x, int64_t x_stride, const float* right, int64_t right_stride, int64_t depth,
                int64_t width, float* out, int64_t out_stride) {
    constexpr const float* NO_BIAS = nullptr;
    const auto packed = [=](int64_t i, int64_t c) { return load(right + i * right_stride + c); };
    product<PAIRS>(rows, x, x_stride, packed, depth, width, NO_BIAS, out, out_stride);
  }
};

inline int64_t whole(int64_t numbers, int64_t part) { return (numbers + part - 1) / part * part; }

// Memory aligned to cache lines.
class AlignedBuffer {
 public:
  float* at_least(int64_t numbers) {
    if (int64_t(lines_.size()) * 16 < numbers) lines_.resize((numbers + 15) / 16);
    return lines_[0].numbers;
  }

 private:
  struct alignas(64) Line {
    float numbers[16];
  };
  std::vector<Line> lines_;
};

struct Scratch {
  AlignedBuffer queries, keys, values, weights, chunk, state;
};

// The slots of the positions in one chunk of a tile.
struct Positions {
  const int32_t* slots = nullptr;
  int64_t count = 0, first_head = 0;  // first_head: the first KV head needed
};

// The state of a row has `state_stride` floats: the weighted values, then at `value_dim` the largest score and the sum
// of the weights. Weights are powers of 2, and the largest score is an exponent of 2.
template <typename T, typename Products>
class TileWorker {
  static constexpr int64_t STRIP = Products::STRIP, WEIGHTS = Products::WEIGHTS;

 public:
  TileWorker(const AttentionArgs& args, Scratch& scratch)
      : a(args), s(scratch), group(args.q_heads / args.kv_heads), state_stride(args.state_stride()),
        pairs(HAS_PAIRS && sizeof(T) == 2 && args.head_dim % (2 * W) == 0),
        depth(pairs ? args.head_dim / 2 : args.head_dim), unit(1.44269504f * (args.logit_cap > 0 ? 1.f : args.scale)),
        key_panels(scratch.keys.at_least(CHUNK * depth)),
        packed_values(scratch.values.at_least(CHUNK * args.value_dim)),
        weights(scratch.weights.at_least(std::max(STRIP, args.kv_heads * ROWS) * WEIGHTS)) {}

  // Heads of an item that are computed together.
  int64_t heads_at_once(const Tile& tile) const { return tile.queries * group <= ROWS ? a.heads_of_item : 1; }

  // Starts a tile (queries of one request) and `some_heads` KV heads from `head` on.
  void begin(const Tile& tile, int64_t head, int64_t some_heads = 1) {
    t = &tile;
    kv_head = head;
    heads = some_heads;
    rows = tile.queries * group;
    queries = s.queries.at_least(heads * rows * a.head_dim);
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < tile.queries; ++i) {
        const int64_t query = (tile.first_query + i) * a.q_stride + (head + h) * group * a.head_dim;
        const T* from = static_cast<const T*>(a.q) + query;
        float* to = queries + (h * rows + i * group) * depth;
        if (pairs) std::memcpy(to, from, group * a.head_dim * sizeof(T));
        else
          for (int64_t d = 0; d < group * a.head_dim; d += W) store(to + d, load(from + d));
      }
  }

  // The partial softmax of one chunk, [heads][rows][state_stride]; prefetches keys and values of the following chunk,
  // `next`.
  void partial(int64_t chunk, float* out, const Positions& next = {}) {
    const int64_t start = chunk * CHUNK;
    const Positions now = positions(*t, chunk, kv_head);
    next_positions = next;
    if (rows <= ROWS) {
      with_rows(rows, [&](auto r) {
        if (HAS_PAIRS && pairs) few_rows<r, HAS_PAIRS>(now, start, out);
        else few_rows<r, false>(now, start, out);
      });
      return;
    }
    packed_keys = 0;
    pack_values(now.slots, now.count);
    for (int64_t r = 0; r < rows; r += STRIP) strip_of(r, std::min(STRIP, rows - r), start, now, out);
  }

  Positions positions(const Tile& tile, int64_t chunk, int64_t head) const {
    const int32_t* slots = a.page_table + a.rows[tile.request] * a.page_stride + chunk * CHUNK;
    return {slots, std::min(CHUNK, tile.end - chunk * CHUNK), head};
  }

  void reset(float* state) const {
    std::fill(state, state + heads * rows * state_stride, 0.f);
    for (int64_t r = 0; r < heads * rows; ++r) state[r * state_stride + a.value_dim] = MASKED;
  }

  __attribute__((noinline)) void merge(float* state, const float* part) const {
    for (int64_t r = 0; r < heads * rows; ++r, state += state_stride, part += state_stride) {
      float &top = state[a.value_dim], &mass = state[a.value_dim + 1];
      const float peak = std::max(top, part[a.value_dim]);
      const Vec old = exp2(splat(top - peak)), fresh = exp2(splat(part[a.value_dim] - peak));
      for (int64_t d = 0; d < a.value_dim; d += W) store(state + d, load(state + d) * old + load(part + d) * fresh);
      mass = mass * old[0] + part[a.value_dim + 1] * fresh[0];
      top = peak;
    }
  }

  void finish(const float* state) const {
    for (int64_t r = 0; r < heads * rows; ++r, state += state_stride) {
      const int64_t token = t->first_query + r % rows / group, head = (kv_head + r / rows) * group + r % group;
      T* to = static_cast<T*>(a.out) + (token * a.q_heads + head) * a.value_dim;
      float mass = state[a.value_dim + 1];
      if (a.sinks) mass += exp2(splat(a.sinks[head] * 1.44269504f - state[a.value_dim]))[0];
      const float share = 1.f / mass;
      for (int64_t d = 0; d < a.value_dim; d += W) store(to + d, load(state + d) * share);
    }
  }

  int64_t rows = 0;  // of a head

 private:
  const T* key(int32_t slot, int64_t head) const {
    return static_cast<const T*>(a.k_pool) + slot * a.k_stride + head * a.head_dim;
  }
  const T* value(int32_t slot, int64_t head) const {
    return static_cast<const T*>(a.v_pool) + slot * a.v_stride + head * a.value_dim;
  }

  // Slots are scattered: no hardware prefetcher follows them.
  static void prefetch(const T* from, int64_t numbers) {
    const char* line = reinterpret_cast<const char*>(from);
    for (int64_t byte = 0; byte < int64_t(numbers * sizeof(T)); byte += 64) __builtin_prefetch(line + byte, 0, 2);
  }

  // Counts the positions of a chunk, from `start` on, that rows [first, first + some) see.
  int64_t keys_of(int64_t first, int64_t some, int64_t start, int64_t count) const {
    const int64_t last = t->first_position + (first + some - 1) / group + 1 - start;
    return a.causal ? std::max<int64_t>(0, std::min(count, last)) : count;
  }

  // Turns scores into weights, [some][WEIGHTS]; writes the largest score and the sum to out.
  void softmax_all(float* x, int64_t first, int64_t some, int64_t start, int64_t keys, float* out) const {
    const int64_t width = whole(keys, Products::TOGETHER);
    int64_t r = 0;
    for (; r + Products::SOFTMAX_ROWS <= some; r += Products::SOFTMAX_ROWS)
      softmax<Products::SOFTMAX_ROWS>(x + r * WEIGHTS, first + r, start, keys, width,
                                      out + r * state_stride + a.value_dim);
    for (; r < some; ++r)
      softmax<1>(x + r * WEIGHTS, first + r, start, keys, width, out + r * state_stride + a.value_dim);
  }

  float* weights_of(int64_t row) const { return weights + row * WEIGHTS; }

  // The partial of all rows of all heads, for few rows.
  template <int R, bool PAIRS>
  void few_rows(const Positions& now, int64_t start, float* out) {
    const int64_t keys = keys_of(0, R, start, now.count), dim = a.value_dim;
    key_rows.set(a.k_pool, a.k_stride, kv_head * a.head_dim, now.slots, now.count);
    key_rows.set_next(a.v_pool, a.v_stride, kv_head * dim, now.slots, now.count);
    LinePrefetcher<T> keys_ahead = key_rows.prefetcher(heads * a.head_dim);
    for (int64_t j = 0; j < keys; j += W)
      for (int64_t h = 0; h < heads; ++h)
        products.template scores<R, PAIRS>(queries + h * R * depth, depth, key_rows.at(j), h * a.head_dim, keys_ahead,
                                           weights_of(h * R) + j, WEIGHTS);
    for (int64_t h = 0; h < heads; ++h) softmax_all(weights_of(h * R), 0, R, start, keys, out + h * R * state_stride);
    value_rows.set(a.v_pool, a.v_stride, kv_head * dim, now.slots, now.count);
    value_rows.set_next(a.k_pool, a.k_stride, next_positions.first_head * a.head_dim, next_positions.slots,
                        next_positions.count);
    for (int64_t r = 0; r < heads * R; ++r) std::fill_n(out + r * state_stride, dim, 0.f);
    LinePrefetcher<T> values_ahead = value_rows.prefetcher(heads * dim);
    for (int64_t i = 0; i < keys; i += ROWS_AHEAD)
      for (int64_t h = 0; h < heads; ++h)
        products.template add_values<R, PAIRS>(weights_of(h * R) + i / (1 + PAIRS), WEIGHTS, value_rows.at(i), h * dim,
                                               keys - i, dim, values_ahead, out + h * R * state_stride, state_stride);
  }

  // Rows [first, first + some) of a partial, from packed keys and values, without keys that the last row does not see.
  void strip_of(int64_t first, int64_t some, int64_t start, const Positions& now, float* out) {
    const int64_t keys = keys_of(first, some, start, now.count);
    const int64_t width = whole(keys, W), dim = a.value_dim;
    out += first * state_stride;
    for (int64_t j = 0; j < width; j += STEP) {
      float* panel = key_panels + (rows > STRIP ? j * depth : 0);  // kept for later strips
      if (j >= packed_keys) pack_keys(panel, now, j);
      multiply(some, queries + first * depth, depth, panel, STEP, depth, std::min(STEP, width - j), weights + j,
               WEIGHTS);
    }
    softmax_all(weights, first, some, start, keys, out);
    multiply(some, weights, WEIGHTS, packed_values, dim, pairs ? (keys + 1) / 2 : keys, dim, out, state_stride);
  }

  void multiply(int64_t some, const float* x, int64_t x_stride, const float* right, int64_t right_stride, int64_t deep,
                int64_t width, float* out, int64_t out_stride) {
    if (pairs) products.template multiply<true>(some, x, x_stride, right, right_stride, deep, width, out, out_stride);
    else products.template multiply<false>(some, x, x_stride, right, right_stride, deep, width, out, out_stride);
  }

  // The values of two neighbouring positions in each lane. Past the end the last value repeats, with weight 0.
  Vec pair(const int32_t* slots, int64_t i, int64_t c, int64_t keys) const {
    const auto at = [&](int64_t key) { return value(slots[std::min(key, keys - 1)], kv_head) + c; };
    return interleave(at(2 * i), at(2 * i + 1));
  }

  void pack_values(const int32_t* slots, int64_t keys) {
    const int64_t dim = a.value_dim;
    for (int64_t i = 0; i < (pairs ? whole((keys + 1) / 2, Products::PAIRS_TOGETHER) : keys); ++i)
      for (int64_t c = 0; c < dim; c += W)
        store(packed_values + i * dim + c, pairs ? pair(slots, i, c, keys) : load(value(slots[i], kv_head) + c));
  }

  // Transposes keys [first, first + STEP), as pairs of bf16 where the processor multiplies pairs. It prefetches as many
  // of the next positions.
  void pack_keys(float* panel, const Positions& now, int64_t first) {
    packed_keys = first + STEP;
    for (int64_t j = first; j < std::min(now.count, first + STEP); j += W) {
      const T* from[W];
      for (int64_t i = 0; i < W; ++i) {
        from[i] = key(now.slots[std::min(j + i, now.count - 1)], kv_head);  // past the last key: masked later
        if (j + i >= next_positions.count) continue;
        prefetch(key(next_positions.slots[j + i], next_positions.first_head), a.head_dim);
        prefetch(value(next_positions.slots[j + i], next_positions.first_head), a.value_dim);
      }
      if constexpr (NARROW) {
        for_numbers(
            from, 0, depth, [] {}, [&](int64_t d, Vec numbers) { store(panel + d * STEP + j - first, numbers); });
        continue;
      }
      for (int64_t d = 0; d < depth; d += W) {
        Vec block[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i)
          block[i] = pairs ? load(reinterpret_cast<const float*>(from[i]) + d) : load(from[i] + d);
        transpose(block);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) store(panel + (d + i) * STEP + j - first, block[i]);
      }
    }
  }

  // Turns scores of N rows, from `first` on, into weights, 0 at positions a row does not see. Writes each row's largest
  // score and sum.
  template <int N>
  __attribute__((noinline)) void softmax(float* x, int64_t first, int64_t start, int64_t keys, int64_t width,
                                        float* peak_and_mass) const {
    if (a.logit_cap > 0)
      for (int n = 0; n < N; ++n)
        for (float* row = x + n * WEIGHTS; row < x + n * WEIGHTS + width; row += W)
          store(row, a.logit_cap * tanh(load(row) * a.scale / a.logit_cap));
    const IntVec lanes = iota();
    for (int n = 0; n < N; ++n) {
      const int64_t position = t->first_position + (first + n) / group;
      const int64_t low = a.window < 0 ? 0 : std::max<int64_t>(0, position - a.window - start);
      const int64_t high = std::min(keys, (a.causal ? position + 1 : t->end) - start);
      float* row = x + n * WEIGHTS;
      for (int64_t j = 0; j < width; j += W) {
        if (low <= j && j + W <= high) continue;
        const IntVec seen = (lanes + int32_t(j) >= int32_t(low)) & (lanes + int32_t(j) < int32_t(high));
        store(row + j, seen ? load(row + j) : splat(MASKED));
      }
    }
    Vec top[N], mass[N];
    float peak[N], shift[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) top[n] = splat(MASKED), mass[n] = Vec{};
    for (int64_t j = 0; j < width; j += W)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) top[n] = max(top[n], load(x + n * WEIGHTS + j));
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      peak[n] = highest(top[n]);
      shift[n] = peak[n] > MASKED ? peak[n] * unit : 0.f;  // a row that sees no key: MASKED stays far below
    }
    for (int64_t j = 0; j < width; j += W)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        float* row = x + n * WEIGHTS;
        const Vec weight = exp2(load(row + j) * unit - shift[n]);
        mass[n] += weight;
        if (pairs) store(reinterpret_cast<bf16*>(row) + j, weight);  // never overwrites unread scores
        else store(row + j, weight);
      }
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      peak_and_mass[n * state_stride] = peak[n] > MASKED ? shift[n] : MASKED;
      peak_and_mass[n * state_stride + 1] = sum(mass[n]);
    }
  }

  const AttentionArgs& a;
  Scratch& s;
  const int64_t group, state_stride;
  const bool pairs;
  const int64_t depth;
  const float unit;  // of a score, as an exponent of 2
  float *const key_panels, *const packed_values, *const weights;
  float* queries = nullptr;
  const Tile* t = nullptr;
  int64_t kv_head = 0, heads = 0, packed_keys = 0;
  Positions next_positions;
  PoolRows<T> key_rows, value_rows;
  Products products;
};

inline Scratch& scratch() {
  static thread_local Scratch mine;
  return mine;
}

// Item (tile, head, chunk) has number offsets[tile] + head * chunks_of(tile) + chunk.
template <typename T, typename Products>
void attention(const AttentionArgs& a, std::atomic<int64_t>& next, float* partials, const int64_t* offsets) {
  Scratch& s = scratch();
  TileWorker<T, Products> worker(a, s);
  const int64_t stride = a.state_stride(), tiles = a.tiles.size();
  if (partials) {  // items are chunks, offsets[tiles] in all; the next pass merges them
    const int64_t items = offsets[tiles];
    for (int64_t item; (item = next++) < items;) {
      const int64_t tile = std::upper_bound(offsets, offsets + tiles + 1, item) - offsets - 1;
      const int64_t chunks = chunks_of(a.tiles[tile]), within = item - offsets[tile];
      worker.begin(a.tiles[tile], within / chunks);
      worker.partial(within % chunks, partials + item * a.tile_rows * stride);
    }
    return;
  }
  // Items are (tile, heads). Late tiles are long and come first. The next item is taken early, to prefetch it.
  const int64_t heads = a.heads_of_item, parts = a.kv_heads / heads, items = tiles * parts;
  const auto tile_of = [&](int64_t item) { return &a.tiles[tiles - 1 - item / parts]; };
  for (int64_t item = next++, upcoming; item < items; item = upcoming) {
    upcoming = next++;
    const Tile& tile = *tile_of(item);
    const int64_t first = item % parts * heads, together = worker.heads_at_once(tile);
    const int64_t size = tile.queries * (a.q_heads / a.kv_heads) * stride;
    float *states = s.state.at_least(heads * size), *part = s.chunk.at_least(together * size);
    for (int64_t chunk = 0; chunk < chunks_of(tile); ++chunk) {
      const bool last = chunk == chunks_of(tile) - 1;
      for (int64_t h = 0; h < heads; h += together) {
        Positions after;
        if (!last) after = worker.positions(tile, chunk + 1, first + h);
        else if (upcoming < items) after = worker.positions(*tile_of(upcoming), 0, upcoming % parts * heads + h);
        float* state = states + h * size;
        worker.begin(tile, first + h, together);
        if (chunk == 0) worker.reset(state);
        worker.partial(chunk, part, after);
        worker.merge(state, part);
        if (last) worker.finish(state);
      }
    }
  }
}

template <typename T, typename Products>
void merge(const AttentionArgs& a, std::atomic<int64_t>& next, const float* partials, const int64_t* offsets) {
  Scratch& s = scratch();
  TileWorker<T, Products> worker(a, s);
  const int64_t stride = a.state_stride(), tiles = a.tiles.size();
  for (int64_t item; (item = next++) < tiles * a.kv_heads;) {
    const int64_t tile = item / a.kv_heads, head = item % a.kv_heads, chunks = chunks_of(a.tiles[tile]);
    worker.begin(a.tiles[tile], head);
    float* state = s.state.at_least(worker.rows * stride);
    worker.reset(state);
    for (int64_t chunk = 0; chunk < chunks; ++chunk)
      worker.merge(state, partials + (offsets[tile] + head * chunks + chunk) * a.tile_rows * stride);
    worker.finish(state);
  }
}

}  // namespace ISA
