// Normalisation, rotary embedding and activation: one row at a time, sums in float32 in a fixed order.
#pragma once
#include <algorithm>

#include "kernels.h"
#include "simd.h"

namespace ISA {

// out = w * (x + residual) / rms(x + residual); residual (may be null) becomes x + residual.
template <typename T>
void norm(const void* x, void* residual, const void* weight, void* out, int64_t width, float eps, int64_t begin,
          int64_t end) {
  static thread_local std::vector<float> sums;
  sums.resize(width);
  const T* w = static_cast<const T*>(weight);
  for (int64_t row = begin; row < end; ++row) {
    const T* from = static_cast<const T*>(x) + row * width;
    T* rest = residual ? static_cast<T*>(residual) + row * width : nullptr;
    T* to = static_cast<T*>(out) + row * width;
    Vec squares{};
    for (int64_t i = 0; i < width; i += W) {
      Vec value = load(from + i);
      if (rest) {
        value += load(rest + i);
        store(rest + i, value);
      }
      squares += value * value;
      store(sums.data() + i, value);
    }
    const float factor = 1.f / std::sqrt(sum(squares) / float(width) + eps);
    for (int64_t i = 0; i < width; i += W) store(to + i, load(sums.data() + i) * factor * load(w + i));
  }
}

// x += bias, in rows that are `stride` numbers apart.
template <typename T>
void add_bias(void* x, const void* bias, int64_t width, int64_t stride, int64_t begin, int64_t end) {
  const T* b = static_cast<const T*>(bias);
  for (int64_t row = begin; row < end; ++row) {
    T* to = static_cast<T*>(x) + row * stride;
    for (int64_t i = 0; i < width; i += W) store(to + i, load(to + i) + load(b + i));
  }
}

template <typename T>
void silu_mul(const void* x, void* out, int64_t width, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = static_cast<const T*>(x) + row * 2 * width;
    T* to = static_cast<T*>(out) + row * width;
    for (int64_t i = 0; i < width; i += W) {
      const Vec g = load(gate + i);
      store(to + i, g / (1.f + exp(-g)) * load(gate + width + i));
    }
  }
}

// Convolves blocks. It starts at the last row, so that earlier rows are read unchanged.
template <typename T>
void convolve_blocks(const BlockConvolutionArgs& a, int64_t begin, int64_t end) {
  const T* base = static_cast<const T*>(a.base);
  const int64_t group = a.width / a.groups;
  for (int64_t row = end * a.rows - 1; row >= begin * a.rows; --row) {
    T* x = static_cast<T*>(a.x) + row * a.width;
    const T* added = static_cast<const T*>(a.added) + row * a.stride;
    const int64_t taps = std::min(a.taps, row % a.rows + 1);
    for (int64_t i = 0; i < a.width; i += W) {
      Vec total{};
      for (int64_t tap = 0; tap < taps; ++tap) {
        const Vec kernel = load(base + tap * a.width + i) + scalar(added[tap * a.groups + i / group]);
        total += kernel * load(x - tap * a.width + i);
      }
      store(x + i, total);
    }
  }
}

// Rotates the halves of the first rotary_dim numbers of one head (neox) by the angles in cos_sin = [cos | sin].
template <typename T, typename C>
inline void rotate(T* x, const C* cos_sin, int64_t half) {
  for (int64_t i = 0; i < half; i += W) {
    const Vec cos = load(cos_sin + i), sin = load(cos_sin + half + i), a = load(x + i), b = load(x + half + i);
    store(x + i, a * cos - b * sin);
    store(x + half + i, b * cos + a * sin);
  }
}

template <typename T, typename C>
inline void rope_rows(const RopeArgs& a, int64_t begin, int64_t end) {
  for (int64_t n = begin; n < end; ++n) {
    const C* angles = static_cast<const C*>(a.cos_sin) + a.positions[n] * a.rotary_dim;
    T* q = static_cast<T*>(a.q) + n * a.q_stride;
    T* k = static_cast<T*>(a.k) + n * a.k_stride;
    for (int64_t h = 0; h < a.q_heads; ++h) rotate(q + h * a.head_dim, angles, a.rotary_dim / 2);
    for (int64_t h = 0; h < a.kv_heads; ++h) rotate(k + h * a.head_dim, angles, a.rotary_dim / 2);
    if (!a.k_pool) continue;
    const T* v = static_cast<const T*>(a.v) + n * a.v_stride;
    std::memcpy(static_cast<T*>(a.k_pool) + a.slots[n] * a.k_slot, k, a.kv_heads * a.head_dim * sizeof(T));
    std::memcpy(static_cast<T*>(a.v_pool) + a.slots[n] * a.v_slot, v, a.kv_heads * a.value_dim * sizeof(T));
  }
}

template <typename T>
void rope(const RopeArgs& a, int64_t begin, int64_t end) {
  a.wide_cache ? rope_rows<T, float>(a, begin, end) : rope_rows<T, T>(a, begin, end);
}

}  // namespace ISA
