// The order in which products by the tile unit take items: memory and rows.
#pragma once
#include <algorithm>
#include <vector>

#include "kernels.h"

namespace ISA {

constexpr int64_t CACHED_ROW_BYTES = 5 << 18;  // of rows that stay in the second cache

inline float* aligned(std::vector<float>& room, int64_t numbers) {
  room.resize(numbers + 16);
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(room.data()) + 63) & ~uintptr_t(63));
}

// Prefetches the whole range or no line, since prefetches past the end are slow. Fills the second cache: a core has few
// line buffers for the first. Inlined: gcc 12 drops calls of a function that only prefetches.
__attribute__((always_inline)) inline void fetch(const uint8_t* from, int64_t bytes, const uint8_t* end) {
  if (end - from < bytes) return;
  for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(from + byte, 0, 2);
}

// Calls f(0), f(1) .. with constants.
template <int COUNT, typename F>
inline void each(const F& f) {
  [&]<int... I>(std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>()), ...);
  }(std::make_integer_sequence<int, COUNT>());
}

// Calls multiply(panel, row, rows) for items as in multiply_items(). It joins the items of a panel while their rows, of
// `row_bytes` each, fit the second cache.
template <typename F>
inline void each_panel(const LinearArgs& a, int64_t begin, int64_t end, int64_t row_bytes, const F& multiply) {
  const int64_t groups = (a.rows + a.row_group - 1) / a.row_group;
  const int64_t most = std::max<int64_t>(32, CACHED_ROW_BYTES / row_bytes / 32 * 32);
  for (int64_t first = 0; first < a.rows; first += most)
    for (int64_t item = begin, next; item < end; item = next) {
      const int64_t panel = item / groups;
      next = std::min(end, (panel + 1) * groups);
      const int64_t row = std::max(first, (item - panel * groups) * a.row_group);
      const int64_t rows = std::min({first + most, a.rows, (next - panel * groups) * a.row_group}) - row;
      if (rows > 0) multiply(panel, row, rows);
    }
}

}  // namespace ISA
