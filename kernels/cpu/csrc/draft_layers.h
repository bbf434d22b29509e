// The layers of a drafter (DSpark, DFlash, EAGLE-3, diffusion) as stages of a team: checks at construction, and all
// shared computation.
#pragma once
#include <ATen/ops/empty.h>

#include <algorithm>
#include <optional>

#include "stages.h"

namespace outrider {

using Tensors = std::vector<Tensor>;

// A draft: tokens and confidences [R, gamma], and probs [R, gamma, columns] if a sampled request wants them.
struct Drawn {
  Tensor tokens, confidence;
  std::optional<Tensor> probs;
  bool sampled;

  // Allocates the outputs of `draws`, which has its rules already. noise: [R, gamma].
  Drawn(DraftDrawArgs& draws, const Tensor& noise, int64_t columns, bool wants_probs)
      : tokens(at::empty(noise.sizes(), noise.options())),
        confidence(at::empty(noise.sizes(), noise.options().dtype(at::kFloat))) {
    const float* const heat = draws.rules.temperatures;
    sampled = std::any_of(heat, heat + noise.size(0), [](float t) { return t > 0; });
    if (sampled && wants_probs)
      probs = at::empty({noise.size(0), noise.size(1), columns}, noise.options().dtype(at::kFloat));
    draws.keys = noise.data_ptr<int64_t>();
    draws.probs = probs ? probs->data_ptr<float>() : nullptr;
    draws.tokens = tokens.data_ptr<int64_t>();
    draws.confidence = confidence.data_ptr<float>();
  }
};

// Queries by request, and their places in the cache: request r has `count(r)` queries, from position starts[r] on.
struct QueryPlacement {
  Tensor positions, slots, indptr, kv_lens;

  template <typename F>
  QueryPlacement(const Tensor& starts, const Tensor& rows, const Tensor& page_table, const F& count) {
    const int64_t requests = rows.numel();
    check_dense(starts, at::kLong, {requests}, "starts");
    check_dense(rows, at::kLong, {requests}, "rows");
    indptr = at::empty({requests + 1}, page_table.options());
    kv_lens = at::empty({requests}, page_table.options());
    int32_t* const ends = indptr.data_ptr<int32_t>();
    ends[0] = 0;
    for (int64_t r = 0; r < requests; ++r) ends[r + 1] = ends[r] + int32_t(count(r));
    positions = at::empty({ends[requests]}, starts.options());
    slots = at::empty({ends[requests]}, starts.options());
    for (int64_t r = 0; r < requests; ++r) {
      const int64_t first = starts.data_ptr<int64_t>()[r], queries = ends[r + 1] - ends[r];
      const int32_t* from = slots_of(page_table, r, rows.data_ptr<int64_t>()[r], first, first + queries);
      for (int64_t i = 0; i < queries; ++i) {
        positions.data_ptr<int64_t>()[ends[r] + i] = first + i;
        slots.data_ptr<int64_t>()[ends[r] + i] = from[i];
      }
      kv_lens.data_ptr<int32_t>()[r] = int32_t(first + queries);
    }
  }
};

// DFlash 2's convolution before (side 0) and after (side 1) a sublayer.
struct BlockConvolution {
  Weight added;      // outputs [2, taps, groups]: added to a row's kernels by its input
  const void* base;  // [2, taps, d]
  int64_t taps, groups;
};

struct DraftLayer {
  Weight qkv, out, up, down;
  const void *norm_before, *norm_queries, *norm_keys, *norm_between;  // of queries and keys: null if absent
  void *k_pool, *v_pool;
  const void* bias = nullptr;  // of q|k|v
  std::optional<BlockConvolution> around_attention, around_mlp;
};

struct LayerBuffers {
  Tensor residual, normed, qkv, attended, x, up, gated, partials, added;
  RoundedInput rounded;
  int64_t block_rows = 1;  // rows of one convolution
};

// Constructor arguments that all drafters share. weights: four a layer (q|k|v, out, gate|up, down), then the drafter's;
// each has its kind, outputs and depth, as in weight_of. norms, all [d]: four a layer (before
// attention, of queries, of keys, before the MLP; empty norms of queries and keys mean none), then the drafter's.
// pools: keys and values [slots, heads, width] of each layer. convolutions: none, or two bases a layer, around
// attention and around the MLP; their weights come last. bias: of q|k|v in the first layer.
struct DrafterTensors {
  Tensors weights;
  std::vector<int64_t> kinds;
  std::vector<int64_t> outputs, depths;
  Tensors norms, k_pools, v_pools;
  Tensor cos_sin;
  Tensors convolutions{};
  std::optional<Tensor> bias{};
};

// An attention of all layers of a pass, and whether its work is split into chunks to be merged.
struct SharedAttention {
  AttentionPlan plan;
  bool split;
};

class DraftLayers {
 public:
  // `like` has the type of all numbers and d columns. The drafter has `own` weights and `own_norms` norms of its own.
  // input_width: columns of the input of q|k|v in the first layer; 0 means d.
  DraftLayers(DrafterTensors parts, const Tensor& like, size_t own, size_t own_norms, double eps,
              int64_t input_width = 0)
      : eps(float(eps)), type(type_of(like, "inputs")), hidden(like.size(-1)), parts_(std::move(parts)), like_(like) {
    const DrafterTensors& p = parts_;
    const size_t count = p.k_pools.size(), products = 4 * count + own + p.convolutions.size();
    TORCH_CHECK(count && p.weights.size() == products && p.kinds.size() == products &&
                    p.outputs.size() == products && p.depths.size() == products &&
                    p.norms.size() == 4 * count + own_norms && p.v_pools.size() == count &&
                    (p.convolutions.empty() || p.convolutions.size() == 2 * count),
                "expected ", products, " weights for ", count, " layers, four norms and two pools each and ", own_norms,
                " norms, got ", p.weights.size(), " weights and ", p.norms.size(), " norms");
    read_pools();
    heads = p.outputs[0] / width - 2 * kv_heads;
    mlp = p.outputs[2] / 2;
    TORCH_CHECK(heads > 0 && p.outputs[0] == (heads + 2 * kv_heads) * width, "outputs of q|k|v are ", p.outputs[0],
                ", which the pool's heads do not fit");
    TORCH_CHECK(hidden % 16 == 0 && mlp % 16 == 0 && width % 32 == 0, "widths must be multiples of 16, of heads 32");
    check_dense(p.cos_sin, at::kFloat, {p.cos_sin.size(0), width}, "cos_sin");
    for (size_t i = 0; i < p.norms.size(); ++i) {
      const bool of_heads = i < 4 * count && (i % 4 == 1 || i % 4 == 2);
      if (!of_heads || p.norms[i].numel())
        check_dense(p.norms[i], like.scalar_type(), {of_heads ? width : hidden}, "a norm");
    }
    const int64_t deep[4] = {hidden, heads * width, hidden, mlp}, wide[4] = {p.outputs[0], hidden, 2 * mlp, hidden};
    std::vector<Weight> all;
    for (size_t i = 0; i < products; ++i) {
      const int64_t depth = i == 0 && input_width ? input_width : deep[i % 4];
      TORCH_CHECK(i >= 4 * count || (p.outputs[i] == wide[i % 4] && p.depths[i] == depth), "weight ", i % 4,
                  " of layer ", i / 4, " is [", p.outputs[i], ", ", p.depths[i], "], expected [", wide[i % 4], ", ",
                  depth, "]");
      all.push_back(weight_of(p.weights[i], p.kinds[i], p.outputs[i], p.depths[i], like));
    }
    const auto norm = [&](size_t i) -> const void* { return p.norms[i].numel() ? p.norms[i].data_ptr() : nullptr; };
    for (size_t i = 0; i < count; ++i) {
      const Weight* w = &all[4 * i];
      layers.push_back({w[0], w[1], w[2], w[3], norm(4 * i), norm(4 * i + 1), norm(4 * i + 2), norm(4 * i + 3),
                        p.k_pools[i].data_ptr(), p.v_pools[i].data_ptr()});
    }
    own_weights.assign(all.begin() + 4 * count, all.begin() + 4 * count + own);
    for (size_t i = 0; i < p.convolutions.size(); ++i)
      (i % 2 ? layers[i / 2].around_mlp : layers[i / 2].around_attention) =
          convolution_of(p.convolutions[i], all[4 * count + own + i]);
    if (!p.bias) return;
    check_dense(*p.bias, like.scalar_type(), {p.outputs[0]}, "the bias of q|k|v");
    layers[0].bias = p.bias->data_ptr();
  }

  // Runs all layers on the inputs b.residual [N, d] of rows at `positions` and `slots` [N]. The first `context_tokens`
  // rows see the tokens before them, by `context`; the block rows that follow see their whole block, by `block`. Keys
  // and values go to the pools. The result of block rows is b.residual + b.x. `next`: the following product. inputs:
  // the input of q|k|v in the first layer; null: the normed residual.
  void run(TeamMember& member, const Tensor& positions, const Tensor& slots, const SharedAttention* context,
           int64_t context_tokens, const SharedAttention* block, LayerBuffers& b, const Weight* next,
           const void* inputs = nullptr) const {
    const int64_t tokens = positions.numel(), own = tokens - context_tokens;
    const Stages every(member, type, tokens, b.rounded), last(member, type, own, b.rounded);
    char* const qkv = data(b.qkv);
    RopeArgs rope = rope_of(b.qkv, positions, slots);
    rope.q = qkv;
    rope.q_heads = heads;
    rope.k = qkv + heads * width * size();
    rope.v = qkv + (heads + kv_heads) * width * size();
    for (size_t i = 0; i < layers.size(); ++i) {
      const DraftLayer& layer = layers[i];
      const bool ends = i + 1 == layers.size();
      const bool given = inputs && i == 0;
      if (!given)
        every.norm(i ? data(b.x) : data(b.residual), i ? data(b.residual) : nullptr, layer.norm_before, data(b.normed),
                   hidden, eps);
      convolve(every, layer.around_attention, 0, data(b.normed), b);
      every.product(given ? inputs : data(b.normed), layer.qkv, qkv, &layer.out);
      rotate(every, rope, layer);
      if (context && !ends) attend(every, *context, layer, 0, b);
      if (ends && !own) return;  // the context needs keys and values only
      if (block) attend(every, *block, layer, context_tokens, b);
      const Stages& stages = ends ? last : every;
      const int64_t skipped = ends ? context_tokens : 0;
      const auto from = [&](const Tensor& t) { return data(t) + skipped * t.size(1) * size(); };
      stages.product(from(b.attended), layer.out, from(b.x), &layer.up);
      convolve(stages, layer.around_attention, 1, from(b.x), b);
      stages.norm(from(b.x), from(b.residual), layer.norm_between, data(b.normed), hidden, eps);
      convolve(stages, layer.around_mlp, 0, data(b.normed), b);
      stages.product(data(b.normed), layer.up, data(b.up), &layer.down);
      stages.silu_mul(data(b.up), data(b.gated), mlp);
      stages.product(data(b.gated), layer.down, from(b.x), ends ? next : &layers[i + 1].qkv);
      convolve(stages, layer.around_mlp, 1, from(b.x), b);
    }
  }

  // Normed states [R * count, d] of rows first .. first + count of each request's `queries`, from row `context_tokens`
  // on.
  void finish(TeamMember& member, const void* norm, int64_t context_tokens, int64_t requests, int64_t queries,
              int64_t first, int64_t count, const LayerBuffers& b, const Tensor& states) const {
    const auto share = [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const int64_t from = (context_tokens + r * queries + first) * hidden * size();
        kernels().norm[type](data(b.x) + from, data(b.residual) + from, norm,
                             data(states) + r * count * hidden * size(), hidden, eps, 0, count);
      }
    };
    member.run_ranges(requests, share, requests * count * hidden * WORK_PER_NUMBER);
  }

  // Norms and rotates each head of queries (if any) and keys; writes keys and values to the layer's pools.
  void rotate(const Stages& stages, RopeArgs rope, const DraftLayer& layer) const {
    rope.k_pool = layer.k_pool;
    rope.v_pool = layer.v_pool;
    stages.rope(rope, {layer.bias, layer.norm_queries, layer.norm_keys, eps});
  }

  // Arguments for keys and values in rows of a matrix, without queries; the caller sets k and v.
  RopeArgs rope_of(const Tensor& matrix, const Tensor& positions, const Tensor& slots) const {
    RopeArgs rope{};
    rope.cos_sin = parts_.cos_sin.data_ptr();
    rope.positions = positions.data_ptr<int64_t>();
    rope.slots = slots.data_ptr<int64_t>();
    rope.q_stride = rope.k_stride = rope.v_stride = matrix.size(1);
    rope.k_slot = rope.v_slot = kv_heads * width;
    rope.kv_heads = kv_heads;
    rope.head_dim = rope.value_dim = rope.rotary_dim = width;
    rope.wide_cache = true;
    return rope;
  }

  void check_places(const Tensor& positions, const Tensor& slots) const {
    check_range(positions, 0, parts_.cos_sin.size(0), "positions");
    check_range(slots, 0, parts_.k_pools[0].size(0), "slots");
  }

  SharedAttention plan(int64_t tokens, const Tensor& indptr, const Tensor& kv_lens, const Tensor& rows,
                       const Tensor& page_table, bool causal) const {
    AttentionPlan plan =
        plan_attention(tokens, heads, kv_heads, width, width, indptr, kv_lens, rows, page_table, causal);
    plan.args.scale = float(1 / std::sqrt(double(width)));
    plan.args.window = -1;
    const bool split = plan.split(at::get_num_threads());
    return {std::move(plan), split};
  }

  LayerBuffers buffers(int64_t tokens, std::initializer_list<const SharedAttention*> all) const {
    LayerBuffers b{matrix(tokens, hidden), matrix(tokens, hidden), matrix(tokens, layers[0].qkv.outputs),
                   matrix(tokens, heads * width), matrix(tokens, hidden), matrix(tokens, 2 * mlp), matrix(tokens, mlp),
                   {}, {}, {}};
    int64_t partials = 0;
    for (const SharedAttention* each : all)
      if (each && each->split) partials = std::max(partials, each->plan.partials_size());
    if (partials) b.partials = at::empty({partials}, parts_.cos_sin.options());
    for (const DraftLayer& layer : layers)
      for (const Weight* w : {&layer.qkv, &layer.out, &layer.up, &layer.down}) b.rounded.reserve(tokens, *w);
    int64_t added = 0;
    for (const DraftLayer& layer : layers)
      for (const auto* each : {&layer.around_attention, &layer.around_mlp}) {
        if (!*each) continue;
        b.rounded.reserve(tokens, (*each)->added);
        added = std::max(added, (*each)->added.outputs);
      }
    if (added) b.added = matrix(tokens, added);
    return b;
  }

  Tensor matrix(int64_t rows, int64_t columns) const { return at::empty({rows, columns}, like_.options()); }
  int64_t size() const { return type ? 2 : 4; }  // bytes of a number
  at::ScalarType number() const { return like_.scalar_type(); }

  // Norm number i of the drafter itself.
  const void* own_norm(size_t i) const { return parts_.norms[4 * layers.size() + i].data_ptr(); }

  const float eps;
  const int type;
  const int64_t hidden;
  int64_t heads, kv_heads, width, mlp;
  std::vector<DraftLayer> layers;
  std::vector<Weight> own_weights;

 private:
  BlockConvolution convolution_of(const Tensor& base, const Weight& added) const {
    TORCH_CHECK(base.dim() == 3, "a convolution's base is [2, taps, d]");
    const int64_t taps = base.size(1), groups = taps ? added.outputs / (2 * taps) : 0;
    check_dense(base, like_.scalar_type(), {2, taps, hidden}, "a convolution's base");
    TORCH_CHECK(groups && added.outputs == 2 * taps * groups && added.depth == hidden && hidden % (16 * groups) == 0,
                "a convolution of ", taps, " taps has ", added.outputs, " numbers for each row of ", hidden);
    return {added, base.data_ptr(), taps, groups};
  }

  // Convolves x, whole blocks, in place. Side 0 is the input of the sublayer; it gives the kernels of both sides.
  void convolve(const Stages& stages, const std::optional<BlockConvolution>& by, int64_t side, void* x,
                const LayerBuffers& b) const {
    if (!by) return;
    if (side == 0) stages.product(x, by->added, data(b.added), nullptr);
    const char* base = static_cast<const char*>(by->base) + side * by->taps * hidden * size();
    const char* added = data(b.added) + side * by->taps * by->groups * size();
    stages.convolve({x, base, added, b.block_rows, hidden, by->taps, by->groups, by->added.outputs});
  }

  void attend(const Stages& stages, const SharedAttention& how, const DraftLayer& layer, int64_t first,
              const LayerBuffers& b) const {
    AttentionArgs a = how.plan.args;
    a.q = data(b.qkv) + first * b.qkv.size(1) * size();
    a.out = data(b.attended) + first * b.attended.size(1) * size();
    a.q_stride = b.qkv.size(1);
    a.k_stride = a.v_stride = kv_heads * width;
    a.k_pool = layer.k_pool;
    a.v_pool = layer.v_pool;
    stages.attention(a, how.plan, how.split ? b.partials.data_ptr<float>() : nullptr);
  }

  void read_pools() {
    const Tensor& first = parts_.k_pools[0];
    for (const Tensors& pools : {parts_.k_pools, parts_.v_pools})
      for (const Tensor& pool : pools) check_dense(pool, like_.scalar_type(), first.sizes(), "a pool");
    TORCH_CHECK(first.dim() == 3, "pools are [slots, heads, width]");
    kv_heads = first.size(1);
    width = first.size(2);
  }

  const DrafterTensors parts_;  // keeps the memory of the pointers alive
  const Tensor like_;
};

}  // namespace outrider
