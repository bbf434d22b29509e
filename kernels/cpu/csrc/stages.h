// The operations of a decoder as stages of a team, on plain memory: nothing is checked or allocated here.
#pragma once
#include <ATen/ops/empty.h>

#include "team.h"

namespace outrider {

constexpr int64_t WORK_PER_NUMBER = 4;  // multiplications that a number of a norm, rotation or activation is worth

// A prepared weight without a bias.
struct Weight {
  const char* packed;
  const float* scales;  // of int8_linear, otherwise null
  Function<const LinearArgs&, int64_t, int64_t> function;
  int64_t outputs, depth, bytes;  // bytes of a panel
  int64_t panels() const { return (outputs + PANEL - 1) / PANEL; }
};

// packed: codes of int8_linear beside their `scales`; without those (no numbers) what its kind says: blocks of
// block_linear or, where that is negative, panels of packed_linear. Checked by that operation, on no rows of `like`'s
// type.
inline Weight weight_of(const Tensor& packed, int64_t kind, const Tensor& scales, int64_t outputs, int64_t depth,
                        const Tensor& like) {
  const int type = type_of(like, "inputs");
  const Tensor none = at::empty({0, depth}, like.options());
  const int64_t panels = (outputs + PANEL - 1) / PANEL;
  Weight w{
      static_cast<const char*>(packed.data_ptr()), nullptr, nullptr, outputs, depth, int64_t(packed.nbytes()) / panels};
  if (scales.numel()) {
    int8_linear(none, packed, scales, std::nullopt, outputs);
    w.scales = scales.data_ptr<float>();
  } else if (kind >= 0) {
    block_linear(none, packed, kind, std::nullopt, outputs);
    w.function = kernels().block_linear[type][kind];
  } else {
    packed_linear(none, packed, std::nullopt, outputs);
    w.function = kernels().linear[type];
  }
  return w;
}

// int8_linear's input, rounded.
struct Int8Input {
  std::vector<int8_t> codes;
  std::vector<float> scales;
  std::vector<int32_t> sums;
  void reserve(int64_t rows, int64_t depth) {
    const int64_t groups = (depth + GROUP - 1) / GROUP;
    codes.resize(std::max<size_t>(codes.size(), rows * groups * GROUP));
    scales.resize(std::max<size_t>(scales.size(), rows * groups));
    sums.resize(std::max<size_t>(sums.size(), rows * groups));
  }
};

class Stages {
 public:
  Stages(TeamMember& member, int type, int64_t rows, Int8Input& int8)
      : member_(member), type_(type), rows_(rows), int8_(int8) {}

  // Following stages are for so many rows.
  void set_rows(int64_t rows) { rows_ = rows; }

  // Products from now on prefetch these lines beside their weights; null: none.
  void prefetch_during(CachePrefetch* prefetch) { prefetch_ = prefetch; }

  // out = x times the weight. `next`: the product after this one, of which a member prefetches the start of
  // its share.
  void product(const void* x, const Weight& w, void* out, const Weight* next) const {
    const int64_t work = rows_ * w.depth * w.outputs;
    if (w.scales) int8_product(x, w, out, work);
    else float_product(x, w, out, work);
    if (next) prefetch_start(*next);
  }

  // out = the norm of x + residual, which becomes that sum; residual null: of x. copy: null, or where a row's sum goes.
  void norm(const void* x, void* residual, const void* weight, void* out, int64_t width, float eps,
            void* copy = nullptr, int64_t copy_stride = 0) const {
    const int64_t size = type_ ? 2 : 4;
    const auto share = [&](int64_t begin, int64_t end) {
      kernels().norm[type_](x, residual, weight, out, width, eps, begin, end);
      for (int64_t row = begin; copy && row < end; ++row)
        std::memcpy(static_cast<char*>(copy) + row * copy_stride * size,
                    static_cast<const char*>(residual) + row * width * size, width * size);
    };
    member_.run_ranges(ELEMENTWISE, rows_, share, rows_ * width * WORK_PER_NUMBER);
  }

  void silu_mul(const void* x, void* out, int64_t width) const {
    const auto share = [&](int64_t begin, int64_t end) { kernels().silu_mul[type_](x, out, width, begin, end); };
    member_.run_ranges(ELEMENTWISE, rows_, share, rows_ * width * 2 * WORK_PER_NUMBER);
  }

  void rope(const RopeArgs& a) const {
    const auto share = [&](int64_t begin, int64_t end) { kernels().rope[type_](a, begin, end); };
    member_.run_ranges(ELEMENTWISE, rows_, share, rows_ * (a.q_heads + a.kv_heads) * a.head_dim * WORK_PER_NUMBER);
  }

  // work: multiplications that a column is worth.
  void draw_drafts(const DraftDrawArgs& a, int64_t work) const {
    const auto draw = [&](std::atomic<int64_t>& next) { kernels().draw_drafts[type_](a, next); };
    member_.run_items(SAMPLING, a.rows, draw, a.rows * a.columns * work);
  }

  // partials: room for the plan's, where it is split; otherwise null.
  void attention(const AttentionArgs& a, const AttentionPlan& plan, float* partials) const {
    const int64_t* offsets = plan.offsets.data();
    const auto attend = [&](std::atomic<int64_t>& next) { kernels().attention[type_](a, next, partials, offsets); };
    if (!partials) return member_.run_items(ATTENTION, plan.items(), attend, plan.multiplications);
    member_.run_items(ATTENTION, offsets[plan.tiles.size()], attend);
    member_.run_items(ATTENTION, plan.items(),
                  [&](std::atomic<int64_t>& next) { kernels().merge[type_](a, next, partials, offsets); });
  }

 private:
  static constexpr int64_t PREFETCH_BYTES = 32768;  // bytes

  void prefetch_start(const Weight& w) const {
    const int64_t panels = w.panels();
    const char* from = w.packed + panels * member_.shard() / member_.shards() * w.bytes;
    const char* end = std::min(from + PREFETCH_BYTES, w.packed + panels * w.bytes);
    for (; from < end; from += 64) __builtin_prefetch(from, 0, 2);
  }

  void float_product(const void* x, const Weight& w, void* out, int64_t work) const {
    const LinearArgs a{
        x,       w.packed,  nullptr,    out,      w.depth, rows_, even_row_group(rows_, w.panels(), member_.shards()),
        w.depth, w.outputs, w.panels(), prefetch_};
    const auto share = [&](int64_t begin, int64_t end) { w.function(a, begin, end); };
    member_.run_ranges(PRODUCTS, a.panels * ((rows_ + a.row_group - 1) / a.row_group), share, work);
  }

  void int8_product(const void* x, const Weight& w, void* out, int64_t work) const {
    const auto round = [&](int64_t begin, int64_t end) {
      kernels().quantize[type_](x, int8_.codes.data(), int8_.scales.data(), int8_.sums.data(), w.depth, begin, end);
    };
    member_.run_ranges(PRODUCTS, rows_, round, rows_ * w.depth * WORK_PER_NUMBER);
    const Int8Args a{int8_.codes.data(), int8_.scales.data(), int8_.sums.data(),
                     reinterpret_cast<const uint8_t*>(w.packed), w.scales, nullptr, out, rows_,
                     (w.depth + GROUP - 1) / GROUP, w.outputs};
    const auto share = [&](int64_t begin, int64_t end) { kernels().int8_linear[type_](a, begin, end); };
    member_.run_ranges(PRODUCTS, w.panels(), share, work);
  }

  TeamMember& member_;
  const int type_;
  int64_t rows_;
  Int8Input& int8_;
  CachePrefetch* prefetch_ = nullptr;
};

}  // namespace outrider
