// The operations of a decoder as stages of a team, on plain memory, without checks and allocations.
#pragma once
#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

#include "team.h"

namespace outrider {

constexpr int64_t WORK_PER_NUMBER = 4;  // cost of a number of a norm, rotation or activation, in multiplications

// Some outputs of a weight, in one layout, without a bias.
struct WeightPart {
  const char* packed;
  Function<const LinearArgs&, int64_t, int64_t> function;  // null for integer products, where it depends on the rows
  int64_t kind, outputs, bytes;  // bytes of a panel
  enum { AS_IT_IS, NARROW, WIDE } input;  // x, or its rows from round_rows()
  int64_t panels() const { return (outputs + PANEL - 1) / PANEL; }
};

// A weight with its parts one below the next.
struct Weight {
  std::vector<WeightPart> parts;
  int64_t outputs = 0, depth = 0;
  bool rounds() const { return reads(WeightPart::NARROW) || reads(WeightPart::WIDE); }
  bool reads(int input) const {
    return std::any_of(parts.begin(), parts.end(), [=](const WeightPart& part) { return part.input == input; });
  }
};

// packed: as in packed_linear, which checks it, on no rows of `like`'s type.
inline WeightPart part_of(const Tensor& packed, int64_t kind, int64_t outputs, int64_t depth, const Tensor& like) {
  const int type = type_of(like, "inputs");
  const Tensor none = at::empty({0, depth}, like.options());
  const int64_t panels = (outputs + PANEL - 1) / PANEL, plain = kind & ~ROUNDED;
  WeightPart part{static_cast<const char*>(packed.data_ptr()), nullptr, plain, outputs,
                  int64_t(packed.nbytes()) / panels, WeightPart::AS_IT_IS};
  packed_linear(none, packed, kind, std::nullopt, outputs);
  if (kind < 0) part.function = kernels().linear[type];
  else if (kind & ROUNDED) part.input = rounds_wide(plain) ? WeightPart::WIDE : WeightPart::NARROW;
  else part.function = kernels().block_linear[type][plain];
  return part;
}
inline Weight weight_of(const Tensor& packed, int64_t kind, int64_t outputs, int64_t depth, const Tensor& like) {
  return {{part_of(packed, kind, outputs, depth, like)}, outputs, depth};
}

// The rounded input of integer products of blocks.
struct RoundedInput {
  std::vector<char> blocks[2];  // from round_rows(), narrow and wide
  void reserve(int64_t rows, const Weight& w) {
    for (const bool wide : {false, true})
      if (w.reads(wide ? WeightPart::WIDE : WeightPart::NARROW))
        blocks[wide].resize(std::max<size_t>(blocks[wide].size(), rows * rounded_bytes(w.depth, wide)));
  }
};

// The steps before the rotation of queries and keys; null: none. bias: of queries|keys|values side by side. queries,
// keys: norms of each head.
struct BeforeRotation {
  const void *bias, *queries, *keys;
  float eps;
};

class Stages {
 public:
  Stages(TeamMember& member, int type, int64_t rows, RoundedInput& rounded)
      : member_(member), type_(type), rows_(rows), rounded_(rounded) {}

  // Sets the number of rows of the following stages.
  void set_rows(int64_t rows) { rows_ = rows; }

  // Makes later products prefetch these lines with their weights; null: none.
  void prefetch_during(CachePrefetch* prefetch) { prefetch_ = prefetch; }

  // out = x times the weight. `next`: the following product; a member prefetches the start of its share of it. A member
  // does its share of one part after the next: parts write separate outputs, so no member waits in between.
  void product(const void* x, const Weight& w, void* out, const Weight* next) const {
    for (const bool wide : {false, true}) {
      if (!w.reads(wide ? WeightPart::WIDE : WeightPart::NARROW)) continue;
      const auto round = [&](int64_t begin, int64_t end) {
        kernels().round_rows[type_][wide](x, rounded_.blocks[wide].data(), w.depth, begin, end);
      };
      member_.run_ranges(rows_, round, rows_ * w.depth * WORK_PER_NUMBER);
    }
    const int64_t shares = member_.shards();
    const auto share = [&](int64_t begin, int64_t end) {
      char* to = static_cast<char*>(out);
      for (const WeightPart& part : w.parts) {
        const bool wide = part.input == WeightPart::WIDE, as_it_is = part.input == WeightPart::AS_IT_IS;
        const LinearArgs a{as_it_is ? x : rounded_.blocks[wide].data(), part.packed, nullptr, to,
                           as_it_is ? w.depth : rounded_bytes(w.depth, wide), rows_,
                           even_row_group(rows_, part.panels(), shares), w.depth, part.outputs, part.panels(),
                           w.outputs, prefetch_};
        const int64_t items = a.panels * ((rows_ + a.row_group - 1) / a.row_group);
        const auto function = part.function ? part.function : int_block_product(type_, part.kind, rows_);
        function(a, items * begin / shares, items * end / shares);
        to += part.outputs * (type_ ? 2 : 4);
      }
    };
    member_.run_ranges(shares, share, rows_ * w.depth * w.outputs);
    if (next) prefetch_start(*next);
  }

  // out = the norm of x + residual, which becomes that sum; residual null: the norm of x. copy: null, or where to store
  // the sum of a row.
  void norm(const void* x, void* residual, const void* weight, void* out, int64_t width, float eps,
            void* copy = nullptr, int64_t copy_stride = 0) const {
    const int64_t size = type_ ? 2 : 4;
    const auto share = [&](int64_t begin, int64_t end) {
      kernels().norm[type_](x, residual, weight, out, width, eps, begin, end);
      for (int64_t row = begin; copy && row < end; ++row)
        std::memcpy(static_cast<char*>(copy) + row * copy_stride * size,
                    static_cast<const char*>(residual) + row * width * size, width * size);
    };
    member_.run_ranges(rows_, share, rows_ * width * WORK_PER_NUMBER);
  }

  void silu_mul(const void* x, void* out, int64_t width) const {
    const auto share = [&](int64_t begin, int64_t end) { kernels().silu_mul[type_](x, out, width, begin, end); };
    member_.run_ranges(rows_, share, rows_ * width * 2 * WORK_PER_NUMBER);
  }

  // Rotates each head of queries (if any) and keys; writes keys and values to the pools.
  void rope(const RopeArgs& a, const BeforeRotation& before) const {
    const int64_t size = type_ ? 2 : 4, width = (a.q_heads + a.kv_heads) * a.head_dim;
    const auto share = [&](int64_t begin, int64_t end) {
      if (before.bias)
        kernels().add_bias[type_](a.q, before.bias, width + a.kv_heads * a.value_dim, a.q_stride, begin, end);
      for (int64_t row = begin; row < end && before.keys; ++row) {
        char *const q = static_cast<char*>(a.q) + row * a.q_stride * size;
        char *const k = static_cast<char*>(a.k) + row * a.k_stride * size;
        kernels().norm[type_](q, nullptr, before.queries, q, a.head_dim, before.eps, 0, a.q_heads);
        kernels().norm[type_](k, nullptr, before.keys, k, a.head_dim, before.eps, 0, a.kv_heads);
      }
      kernels().rope[type_](a, begin, end);
    };
    const int64_t numbers = rows_ * width * (before.bias || before.keys ? 2 : 1);
    member_.run_ranges(rows_, share, numbers * WORK_PER_NUMBER);
  }

  void convolve(const BlockConvolutionArgs& a) const {
    const auto share = [&](int64_t begin, int64_t end) { kernels().convolve_blocks[type_](a, begin, end); };
    member_.run_ranges(rows_ / a.rows, share, rows_ * a.width * a.taps * WORK_PER_NUMBER);
  }

  // work: cost of a column in multiplications.
  void draw_drafts(const DraftDrawArgs& a, int64_t work) const {
    const auto draw = [&](std::atomic<int64_t>& next) { kernels().draw_drafts[type_](a, next); };
    member_.run_items(a.rows, draw, a.rows * a.columns * work);
  }

  // partials: room for the partials of a split plan, else null.
  void attention(const AttentionArgs& a, const AttentionPlan& plan, float* partials) const {
    const int64_t* offsets = plan.offsets.data();
    const auto attend = [&](std::atomic<int64_t>& next) { kernels().attention[type_](a, next, partials, offsets); };
    if (!partials) return member_.run_items(plan.items(), attend, plan.multiplications);
    member_.run_items(offsets[plan.tiles.size()], attend);
    member_.run_items(plan.items(),
                  [&](std::atomic<int64_t>& next) { kernels().merge[type_](a, next, partials, offsets); });
  }

 private:
  static constexpr int64_t PREFETCH_BYTES = 32768;  // bytes

  void prefetch_start(const Weight& w) const {
    const WeightPart& part = w.parts[0];
    const int64_t panels = part.panels();
    const char* from = part.packed + panels * member_.shard() / member_.shards() * part.bytes;
    const char* end = std::min(from + PREFETCH_BYTES, part.packed + panels * part.bytes);
    for (; from < end; from += 64) __builtin_prefetch(from, 0, 2);
  }

  TeamMember& member_;
  const int type_;
  int64_t rows_;
  RoundedInput& rounded_;
  CachePrefetch* prefetch_ = nullptr;
};

}  // namespace outrider
