// Gated delta networks: a short convolution, and a state of each head that every token decays and then corrects. States
// are [key_dim][value_dim]. A lane is one value; its sums run over the key's numbers in order. add_product() fixes the
// fusing where the compiler's choice could change bits.
#pragma once
#include <algorithm>
#include <vector>

#include "kernels.h"
#include "simd.h"

namespace ISA {

// Weights and adds the last inputs of each channel, then applies SiLU. Rows are tokens.
template <typename T>
void convolve(const ConvolutionArgs& a, int64_t begin, int64_t end) {
  const T* inputs = static_cast<const T*>(a.inputs);
  int64_t request = 0;
  for (int64_t row = begin; row < end; ++row) {
    while (a.indptr[request + 1] <= row) ++request;
    const int64_t place = row - a.indptr[request], in_window = std::max<int64_t>(0, a.taps - 1 - place);
    const float* window = a.windows + a.slots[request] * a.window_stride + place * a.channels;
    T* out = static_cast<T*>(a.out) + row * a.channels;
    for (int64_t i = 0; i < a.channels; i += W) {
      Vec sum{};
      const auto add = [&](int64_t tap, Vec x) { sum = add_product(sum, x, load(a.weight + tap * a.channels + i)); };
      for (int64_t tap = 0; tap < in_window; ++tap) add(tap, load(window + tap * a.channels + i));
      for (int64_t tap = in_window; tap < a.taps; ++tap)
        add(tap, load(inputs + (row + 1 - a.taps + tap) * a.stride + i));
      store(out + i, sum / (1.f + exp(-sum)));
    }
  }
}

// to = x scaled to the norm `length`.
template <typename T>
inline void set_length(const T* x, float* to, int64_t width, float length) {
  Vec squares{};
  for (int64_t i = 0; i < width; i += W) squares = add_product(squares, load(x + i), load(x + i));
  const float factor = length / std::sqrt(sum(squares) + 1e-6f);
  for (int64_t i = 0; i < width; i += W) store(to + i, load(x + i) * factor);
}

// Normed queries and keys, decays and strengths of corrections. Rows are tokens.
template <typename T>
void delta_inputs(const GatedDeltaArgs& a, int64_t begin, int64_t end) {
  const float length = 1.f / std::sqrt(float(a.key_dim));
  for (int64_t row = begin; row < end; ++row) {
    const T* mixed = static_cast<const T*>(a.mixed) + row * a.channels();
    for (int64_t head = 0; head < a.key_heads; ++head) {
      set_length(mixed + head * a.key_dim, a.queries + a.key_at(row, head), a.key_dim, length);
      set_length(mixed + (a.key_heads + head) * a.key_dim, a.keys + a.key_at(row, head), a.key_dim, 1.f);
    }
    for (int64_t head = 0; head < a.heads; ++head) {
      const float shifted = scalar(static_cast<const T*>(a.a)[row * a.a_stride + head]) + a.shifts[head];
      const float softplus = shifted > 20.f ? shifted : std::log1p(std::exp(shifted));
      a.decays[row * a.heads + head] = std::exp(-a.rates[head] * softplus);
      const float strength = scalar(static_cast<const T*>(a.b)[row * a.b_stride + head]);
      a.strengths[row * a.heads + head] = 1.f / (1.f + std::exp(-strength));
    }
  }
}

constexpr int DELTA_VECTORS = 4;  // at most, of a state's row in one tile
inline int64_t delta_tiles(int64_t value_dim) {
  return (value_dim + DELTA_VECTORS * W - 1) / (DELTA_VECTORS * W);
}

template <int N>
struct StateRow {
  Vec of[N];
};

// All tokens of a request, for N vectors of a head's values. A token's write joins the next decay, so each token reads
// and writes the tile once.
template <typename T, int N>
void delta_tile(const GatedDeltaArgs& a, int64_t request, int64_t head, int64_t first) {
  static thread_local std::vector<StateRow<N>> tile;
  tile.resize(a.key_dim);
  const int64_t begin = a.indptr[request], end = a.indptr[request + 1], key_head = head / (a.heads / a.key_heads);
  const int64_t value_at = 2 * a.key_heads * a.key_dim + head * a.value_dim + first;
  float* const state = a.state(request, head) + first;
  StateRow<N> known, delta, out;
  const auto finish = [&](int64_t row) {
    T* to = static_cast<T*>(a.out) + a.value_at(row, head) + first;
    for (int n = 0; n < N; ++n) store(to + n * W, out.of[n]);
  };
  const auto correct = [&](int64_t k, int n, float key, float query) {
    const Vec corrected = add_product(tile[k].of[n], delta.of[n], splat(key));
    out.of[n] = add_product(out.of[n], corrected, splat(query));
    return corrected;
  };
  const auto decay_by = [&](int64_t k, int n, Vec x, Vec decay, float key) {
    tile[k].of[n] = x * decay;
    known.of[n] = add_product(known.of[n], tile[k].of[n], splat(key));
  };
  for (int64_t row = begin; row < end; ++row) {
    const float* key = a.keys + a.key_at(row, key_head);
    const Vec decay = splat(a.decays[row * a.heads + head]);
    known = {};
    if (row == begin) {
      for (int64_t k = 0; k < a.key_dim; ++k)
        for (int n = 0; n < N; ++n) decay_by(k, n, load(state + k * a.value_dim + n * W), decay, key[k]);
    } else {
      const float *last = a.keys + a.key_at(row - 1, key_head), *query = a.queries + a.key_at(row - 1, key_head);
      out = {};
      for (int64_t k = 0; k < a.key_dim; ++k)
        for (int n = 0; n < N; ++n) decay_by(k, n, correct(k, n, last[k], query[k]), decay, key[k]);
      finish(row - 1);
    }
    const T* value = static_cast<const T*>(a.mixed) + row * a.channels() + value_at;
    const float strength = a.strengths[row * a.heads + head];
    for (int n = 0; n < N; ++n) {
      delta.of[n] = (load(value + n * W) - known.of[n]) * strength;
      store(a.deltas + a.value_at(row, head) + first + n * W, delta.of[n]);
    }
  }
  const float *key = a.keys + a.key_at(end - 1, key_head), *query = a.queries + a.key_at(end - 1, key_head);
  out = {};
  for (int64_t k = 0; k < a.key_dim; ++k)
    for (int n = 0; n < N; ++n) {
      const Vec corrected = correct(k, n, key[k], query[k]);
      if (a.write) store(state + k * a.value_dim + n * W, corrected);
    }
  finish(end - 1);
}

// The state of a tile after the first counts of a request's tokens, by the operations of delta_tile().
template <int N>
void replay_tile(const GatedDeltaArgs& a, int64_t request, int64_t head, int64_t first) {
  const int64_t begin = a.indptr[request], end = begin + a.counts[request], key_head = head / (a.heads / a.key_heads);
  float* state = a.state(request, head) + first;
  for (int64_t k = 0; k < a.key_dim; ++k, state += a.value_dim) {
    StateRow<N> s;
    for (int n = 0; n < N; ++n) s.of[n] = load(state + n * W);
    for (int64_t row = begin; row < end; ++row) {
      const Vec decay = splat(a.decays[row * a.heads + head]), key = splat(a.keys[a.key_at(row, key_head) + k]);
      const float* delta = a.deltas + a.value_at(row, head) + first;
      for (int n = 0; n < N; ++n) s.of[n] = add_product(s.of[n] * decay, load(delta + n * W), key);
    }
    for (int n = 0; n < N; ++n) store(state + n * W, s.of[n]);
  }
}

// Calls work.operator()<N>(request, head, first value) for all tiles of all requests with rows, until `next` runs out.
template <typename F>
inline void for_delta_tiles(const GatedDeltaArgs& a, std::atomic<int64_t>& next, const F& work) {
  const int64_t tiles = delta_tiles(a.value_dim), items = a.requests * a.heads * tiles;
  for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;) {
    const int64_t request = item / tiles / a.heads, head = item / tiles % a.heads;
    const int64_t first = item % tiles * DELTA_VECTORS * W;
    if (a.indptr[request] == a.indptr[request + 1]) continue;
    switch (std::min<int64_t>(DELTA_VECTORS, (a.value_dim - first) / W)) {
      case 1: work.template operator()<1>(request, head, first); break;
      case 2: work.template operator()<2>(request, head, first); break;
      case 3: work.template operator()<3>(request, head, first); break;
      default: work.template operator()<DELTA_VECTORS>(request, head, first);
    }
  }
}

template <typename T>
void gated_delta(const GatedDeltaArgs& a, std::atomic<int64_t>& next) {
  for_delta_tiles(a, next, [&]<int N>(auto... at) { delta_tile<T, N>(a, at...); });
}

inline void replay_delta(const GatedDeltaArgs& a, std::atomic<int64_t>& next) {
  for_delta_tiles(a, next, [&]<int N>(auto... at) { replay_tile<N>(a, at...); });
}

}  // namespace ISA
