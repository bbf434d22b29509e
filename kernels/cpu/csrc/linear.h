// y = x W^T + bias with W packed once into panels of PANEL output columns, so that a step reads every weight once, in
// order. Few rows: memory-bound. The sum over the depth has one order for any number of rows: batch-invariant.
// Items are pairs of a panel and a group of rows; a thread gets neighbouring ones, so that it reads on where it stopped.
#pragma once
#include "kernels.h"
#include "product.h"

namespace ISA {

// Panel p holds outputs p * PANEL ...; [depth][PANEL] numbers, or pairs of bf16 where the processor multiplies those.
template <typename T>
void pack(const void* weight, void* panels, int64_t outputs, int64_t depth, int64_t begin, int64_t end) {
  const T* from = static_cast<const T*>(weight);
  T* to = static_cast<T*>(panels) + begin * PANEL * depth;
  constexpr int64_t GROUP = HAS_PAIRS && sizeof(T) == 2 ? 2 : 1;
  for (int64_t panel = begin; panel < end; ++panel)
    for (int64_t i = 0; i < depth; i += GROUP)
      for (int64_t c = panel * PANEL; c < (panel + 1) * PANEL; ++c)
        for (int64_t g = 0; g < GROUP; ++g) *to++ = c < outputs ? from[c * depth + i + g] : T{};
}

constexpr int64_t AHEAD = 8192;  // bytes between a weight that is read and the one that is asked for

template <typename T>
void linear(const LinearArgs& a, int64_t begin, int64_t end) {
  constexpr bool PAIRS = HAS_PAIRS && sizeof(T) == 2;
  static thread_local std::vector<float> widened;
  static thread_local std::vector<T> edge;
  const int64_t depth = PAIRS ? a.depth / 2 : a.depth, groups = (a.rows + a.row_group - 1) / a.row_group;
  const char* last = static_cast<const char*>(a.packed) + a.panels * PANEL * a.depth * sizeof(T) - 1;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t column = item / groups * PANEL, row = item % groups * a.row_group;
    const int64_t rows = std::min(a.row_group, a.rows - row), width = std::min(PANEL, a.outputs - column);
    const T* from = static_cast<const T*>(a.x) + row * a.x_stride;
    const float* x = reinterpret_cast<const float*>(from);
    int64_t x_stride = PAIRS ? a.x_stride / 2 : a.x_stride;
    if (sizeof(T) == 2 && !PAIRS) {
      widened.resize(rows * depth);
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < depth; ++i) widened[r * depth + i] = scalar(from[r * a.x_stride + i]);
      x = widened.data();
      x_stride = depth;
    }
    T* out = static_cast<T*>(a.out) + row * a.outputs + column;
    int64_t out_stride = a.outputs;
    const bool narrow = width % W != 0;  // the last outputs do not fill a vector
    if (narrow) {
      edge.resize(rows * PANEL);
      out = edge.data();
      out_stride = PANEL;
    }
    using Panel = std::conditional_t<PAIRS, float, T>;
    const Panel* panel = reinterpret_cast<const Panel*>(static_cast<const T*>(a.packed) + column * a.depth);
    const float* bias = a.bias ? a.bias + column : nullptr;
    const auto again = [panel](int64_t i, int64_t c) { return load(panel + i * PANEL + c); };
    const auto first = [panel, last](int64_t i, int64_t c) {  // a panel's first rows wait for memory, the others do not
      const Panel* from = panel + i * PANEL + c;
      if (c * sizeof(Panel) % 64 == 0) __builtin_prefetch(std::min(reinterpret_cast<const char*>(from) + AHEAD, last));
      return load(from);
    };
    const int64_t padded = (width + W - 1) / W * W, few = row ? 0 : std::min<int64_t>(ROWS, rows);
    product<PAIRS>(few, x, x_stride, first, depth, padded, bias, out, out_stride);
    product<PAIRS>(rows - few, x + few * x_stride, x_stride, again, depth, padded, bias, out + few * out_stride, out_stride);
    for (int64_t r = 0; narrow && r < rows; ++r)
      std::memcpy(static_cast<T*>(a.out) + (row + r) * a.outputs + column, out + r * PANEL, width * sizeof(T));
  }
}

}  // namespace ISA
