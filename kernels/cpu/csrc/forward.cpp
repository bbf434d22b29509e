// All layers of a Llama-like decoder in one call, by one team of threads.
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include "stages.h"

namespace outrider {
namespace {

using Tensors = std::vector<Tensor>;

struct Layer {
  Weight qkv, out, up, down;
  const void *norm_before, *norm_between;
  void *k_pool, *v_pool;
  float scale, logit_cap;
  int64_t window;
};

// Everything that a forward writes on its way, for the rows of one call.
struct Buffers {
  Tensor normed, qkv, attended, x, up, gated, partials;
  Int8Input int8;
};

// What does not change from step to step; checked once, when it is made.
class Decoder : public torch::CustomClassHolder {
 public:
  // weights: four a layer, q|k|v, out, gate|up, down. Codes of int8_linear beside their scales; or, without scales,
  // each what its kind says: blocks of block_linear or, where that is negative, panels of packed_linear. norms: two a
  // layer and the last one. k_pools, v_pools: the layers' caches [slots, heads, width]. attention_scales, windows,
  // logit_caps: as of flat_attention, one a layer.
  Decoder(Tensors weights, std::vector<int64_t> kinds, Tensors scales, std::vector<int64_t> outputs, Tensors norms,
          Tensors k_pools, Tensors v_pools, Tensor cos_sin, double eps, std::vector<double> attention_scales,
          std::vector<int64_t> windows, std::vector<double> logit_caps)
      : kept_{weights, scales, norms, k_pools, v_pools}, cos_sin_(cos_sin), eps_(float(eps)) {
    const size_t layers = k_pools.size();
    TORCH_CHECK(layers && weights.size() == 4 * layers && kinds.size() == 4 * layers && outputs.size() == 4 * layers &&
                    (scales.empty() || scales.size() == 4 * layers) && norms.size() == 2 * layers + 1 &&
                    v_pools.size() == layers && attention_scales.size() == layers && windows.size() == layers &&
                    logit_caps.size() == layers,
                "a layer has four products, two norms, two pools, a scale, a window and a cap");
    type_ = type_of(norms[0], "norms");
    hidden_ = norms[0].numel();
    read_pools();
    const int64_t query = outputs[0] - kv_heads_ * (width_ + value_width_);
    TORCH_CHECK(query > 0 && query % width_ == 0, "outputs of q|k|v are ", outputs[0],
                ", which the pool's heads do not fit");
    heads_ = query / width_;
    mlp_ = outputs[2] / 2;
    TORCH_CHECK(hidden_ % 16 == 0 && mlp_ % 16 == 0, "widths must be multiples of 16");
    TORCH_CHECK(cos_sin.dim() == 2 && cos_sin.is_contiguous() && cos_sin.size(1) % 32 == 0 &&
                    cos_sin.size(1) <= width_ &&
                    (cos_sin.scalar_type() == at::kFloat || cos_sin.scalar_type() == norms[0].scalar_type()),
                "cos_sin must be dense [positions, multiple of 32], float32 or of the norms' type");
    for (const Tensor& norm : norms)
      TORCH_CHECK(norm.scalar_type() == norms[0].scalar_type() && norm.is_contiguous() && norm.numel() == hidden_,
                  "norms must be dense, of one type and width");
    const int64_t depths[4] = {hidden_, heads_ * value_width_, hidden_, mlp_};
    const int64_t wanted[4] = {outputs[0], hidden_, 2 * mlp_, hidden_};
    const Tensor no_scales = at::empty({0}, norms[0].options());
    std::vector<Weight> products;
    for (size_t i = 0; i < 4 * layers; ++i) {
      TORCH_CHECK(outputs[i] == wanted[i % 4], "weight ", i % 4, " of layer ", i / 4, " has ", outputs[i],
                  " outputs, expected ", wanted[i % 4]);
      products.push_back(
          weight_of(weights[i], kinds[i], scales.empty() ? no_scales : scales[i], outputs[i], depths[i % 4], norms[0]));
    }
    for (size_t i = 0; i < layers; ++i)
      layers_.push_back({products[4 * i], products[4 * i + 1], products[4 * i + 2], products[4 * i + 3],
                         norms[2 * i].data_ptr(), norms[2 * i + 1].data_ptr(), k_pools[i].data_ptr(),
                         v_pools[i].data_ptr(), float(attention_scales[i]), float(logit_caps[i]), windows[i]});
  }

  // residual: [N, H], the embedded tokens; it becomes the sum of all layers. positions, slots: [N]. The rest as of
  // flat_attention. captured: before which layers the sum is kept, rising, none the first.
  // Returns the last norm's output [N, H] and the kept sums [N, captured, H].
  std::tuple<Tensor, Tensor> forward(Tensor residual, Tensor positions, Tensor slots, Tensor qo_indptr, Tensor kv_lens,
                                     Tensor rows, Tensor page_table, bool causal,
                                     std::vector<int64_t> captured) const {
    const int64_t tokens = residual.size(0);
    TORCH_CHECK(residual.dim() == 2 && residual.is_contiguous() && residual.size(1) == hidden_ &&
                    type_of(residual, "residual") == type_,
                "residual must be dense [tokens, ", hidden_, "], of the norms' type, got ", residual.sizes());
    check_index(positions, at::kLong, 1, "positions");
    check_index(slots, at::kLong, 1, "slots");
    TORCH_CHECK(positions.size(0) == tokens && slots.size(0) == tokens, "one position and one slot per token");
    check_range(positions, 0, cos_sin_.size(0), "positions");
    check_range(slots, 0, slots_, "slots");
    for (size_t i = 0; i < captured.size(); ++i)
      TORCH_CHECK((i ? captured[i - 1] : 0) < captured[i] && captured[i] < int64_t(layers_.size()),
                  "layers to capture must rise within 1 .. ", layers_.size() - 1);
    const AttentionPlan plan = plan_attention(tokens, heads_, kv_heads_, width_, value_width_, qo_indptr, kv_lens, rows,
                                              page_table, causal);
    Buffers buffers = buffers_for(tokens, residual, plan);
    const Tensor kept = at::empty({tokens, int64_t(captured.size()), hidden_}, residual.options());
    RopeArgs rope{};
    rope.cos_sin = cos_sin_.data_ptr();
    rope.positions = positions.data_ptr<int64_t>();
    rope.slots = slots.data_ptr<int64_t>();
    rope.rotary_dim = cos_sin_.size(1);
    rope.wide_cache = cos_sin_.scalar_type() == at::kFloat;
    const std::vector<int32_t> cached = cached_slots(plan.args, kv_lens.numel(), tokens);
    run_team([&](TeamMember& member) { run(member, residual, plan, rope, captured, kept, cached, buffers); });
    return {buffers.normed, kept};
  }

 private:
  void run(TeamMember& member, const Tensor& residual, const AttentionPlan& plan, const RopeArgs& rope_of_step,
           const std::vector<int64_t>& captured, const Tensor& kept, const std::vector<int32_t>& slots,
           Buffers& b) const {
    const int64_t tokens = residual.size(0), size = type_ ? 2 : 4;
    Stages stages(member, type_, tokens, b.int8);
    CachePrefetch prefetch{};
    const auto fetch_cache = [&](size_t layer) {
      const bool wanted = !slots.empty() && layer < layers_.size() && layers_[layer].window < 0;
      if (wanted) prefetch = cache_lines(layers_[layer], slots, member);
      stages.prefetch_during(wanted ? &prefetch : nullptr);
    };
    char *const sum = data<char>(residual), *const normed = data<char>(b.normed), *const qkv = data<char>(b.qkv);
    RopeArgs rope = rope_of_step;
    rope.q = qkv;
    rope.k = qkv + heads_ * width_ * size;
    rope.v = qkv + (heads_ + kv_heads_) * width_ * size;
    rope.q_stride = rope.k_stride = rope.v_stride = b.qkv.size(1);
    rope.q_heads = heads_;
    rope.kv_heads = kv_heads_;
    rope.head_dim = width_;
    rope.value_dim = value_width_;
    rope.k_slot = k_slot_;
    rope.v_slot = v_slot_;
    AttentionArgs attention = plan.args;
    attention.q = qkv;
    attention.out = data<void>(b.attended);
    attention.q_stride = b.qkv.size(1);
    attention.k_stride = k_slot_;
    attention.v_stride = v_slot_;
    float* const partials = b.partials.defined() ? b.partials.data_ptr<float>() : nullptr;
    const RopeArgs rope_of_all = rope;
    const auto [own, at_once] = shares(tokens, member.size);
    const int64_t begin = own ? tokens * member.index / member.size : 0;
    const int64_t end = own ? tokens * (member.index + 1) / member.size : tokens;
    const auto of_member = [&](const Tensor& rows) {
      return data<char>(rows) + (own ? member.index * at_once * rows.size(1) * size : 0);
    };
    char *const x = of_member(b.x), *const up = of_member(b.up), *const gated = of_member(b.gated);
    size_t next_kept = 0;
    for (size_t i = 0; i <= layers_.size(); ++i) {
      fetch_cache(i);
      const bool last = i == layers_.size(), keep = next_kept < captured.size() && captured[next_kept] == int64_t(i);
      if (own) member.run_unshared();
      for (int64_t first = begin; first < end; first += at_once) {
        stages.set_rows(std::min(at_once, end - first));
        const bool more = first + at_once < end;
        const auto of_rows = [&](char* rows, int64_t width) { return rows + first * width * size; };
        char *const sum_of = of_rows(sum, hidden_), *const normed_of = of_rows(normed, hidden_);
        if (i) {
          const Layer& layer = layers_[i - 1];
          stages.product(of_rows(data<char>(b.attended), heads_ * value_width_), layer.out, x, &layer.up);
          stages.norm(x, sum_of, layer.norm_between, normed_of, hidden_, eps_);
          stages.product(normed_of, layer.up, up, &layer.down);
          stages.silu_mul(up, gated, mlp_);
          stages.product(gated, layer.down, x, last ? nullptr : &layers_[i].qkv);
        }
        const void* norm = last ? kept_[2].back().data_ptr() : layers_[i].norm_before;
        char* const copy =
            keep ? of_rows(data<char>(kept), captured.size() * hidden_) + next_kept * hidden_ * size : nullptr;
        if (i) stages.norm(x, sum_of, norm, normed_of, hidden_, eps_, copy, captured.size() * hidden_);
        else stages.norm(sum_of, nullptr, norm, normed_of, hidden_, eps_);
        if (last) continue;
        const Layer& layer = layers_[i];
        stages.product(normed_of, layer.qkv, of_rows(qkv, b.qkv.size(1)), more && i ? &layers_[i - 1].out : &layer.out);
        rope.q = of_rows(static_cast<char*>(rope_of_all.q), rope.q_stride);
        rope.k = of_rows(static_cast<char*>(rope_of_all.k), rope.k_stride);
        rope.v = static_cast<const char*>(rope_of_all.v) + first * rope.v_stride * size;
        rope.positions = rope_of_all.positions + first;
        rope.slots = rope_of_all.slots + first;
        rope.k_pool = layer.k_pool;
        rope.v_pool = layer.v_pool;
        stages.rope(rope);
      }
      member.run_shared();
      if (last) break;
      next_kept += keep;
      const Layer& layer = layers_[i];
      attention.k_pool = layer.k_pool;
      attention.v_pool = layer.v_pool;
      attention.scale = layer.scale;
      attention.window = layer.window;
      attention.logit_cap = layer.logit_cap;
      stages.attention(attention, plan, partials);
    }
  }

  // Whether every member takes rows of its own through all but attention, and how many at once: where rows are many and
  // products fast, the way from one core's caches to another's takes longer than expanding all weights on each.
  // Otherwise members share the products of all rows.
  std::pair<bool, int64_t> shares(int64_t tokens, int64_t threads) const {
    constexpr int64_t LEAST = 128;
    const int64_t room = kernels().cache_bytes_for_rows[type_] / (2 * mlp_ * (type_ ? 2 : 4)),
                  each = (tokens + threads - 1) / threads;
    if (each < LEAST || layers_[0].qkv.scales || !room) return {false, tokens};
    const int64_t parts = (each + std::max(LEAST, room) - 1) / std::max(LEAST, room);
    return {true, (each + parts - 1) / parts};
  }

  // The slots that attention reads, those first that it reads first, as far as a shared cache has room for them. None
  // of few tokens, whose products wait for memory themselves.
  std::vector<int32_t> cached_slots(const AttentionArgs& a, int64_t requests, int64_t tokens) const {
    constexpr int64_t LEAST = 16, ROOM = 8 << 20;  // tokens, bytes
    const int64_t most = tokens < LEAST ? 0 : ROOM / (kv_heads_ * (width_ + value_width_) * (type_ ? 2 : 4));
    std::vector<int32_t> slots;
    for (int64_t r = requests - 1; r >= 0 && int64_t(slots.size()) < most; --r) {
      const int32_t* from = a.page_table + a.rows[r] * a.page_stride;
      slots.insert(slots.end(), from, from + std::min<int64_t>(a.kv_lens[r], most - slots.size()));
    }
    return slots;
  }

  // A member's share of them in a layer's cache.
  CachePrefetch cache_lines(const Layer& layer, const std::vector<int32_t>& slots, const TeamMember& member) const {
    const int64_t size = type_ ? 2 : 4, count = slots.size();
    const CachePrefetch::Pool keys{static_cast<const char*>(layer.k_pool), k_slot_ * size, kv_heads_ * width_ * size};
    const CachePrefetch::Pool values{static_cast<const char*>(layer.v_pool), v_slot_ * size,
                                     kv_heads_ * value_width_ * size};
    return {{keys, values}, slots.data() + count * member.index / member.size,
            slots.data() + count * (member.index + 1) / member.size};
  }

  template <typename P>
  static P* data(const Tensor& x) {
    return static_cast<P*>(x.data_ptr());
  }

  Buffers buffers_for(int64_t tokens, const Tensor& like, const AttentionPlan& plan) const {
    const auto room = [&](int64_t rows, int64_t width) { return at::empty({rows, width}, like.options()); };
    const auto [own, at_once] = shares(tokens, at::get_num_threads());
    const int64_t some = own ? at_once * at::get_num_threads() : at_once;
    Buffers b{room(tokens, hidden_), room(tokens, layers_[0].qkv.outputs), room(tokens, heads_ * value_width_),
              room(some, hidden_), room(some, 2 * mlp_), room(some, mlp_), {}, {}};
    if (plan.split(at::get_num_threads()))
      b.partials = at::empty({plan.partials_size()}, like.options().dtype(at::kFloat));
    if (layers_[0].qkv.scales)
      for (const Weight* w : {&layers_[0].qkv, &layers_[0].out, &layers_[0].down}) b.int8.reserve(tokens, w->depth);
    return b;
  }

  void read_pools() {
    const Tensors &k_pools = kept_[3], &v_pools = kept_[4];
    const Tensor &k = k_pools[0], &v = v_pools[0];
    TORCH_CHECK(k.dim() == 3 && v.dim() == 3 && v.size(1) == k.size(1) && k.size(0) == v.size(0),
                "pools are [slots, heads, width]");
    for (const Tensors& pools : {k_pools, v_pools})
      for (const Tensor& pool : pools) {
        const Tensor& first = pools[0];
        TORCH_CHECK(type_of(pool, "pools") == type_ && pool.sizes() == first.sizes() &&
                        pool.strides() == first.strides() && pool.stride(2) == 1 &&
                        (pool.size(1) == 1 || pool.stride(1) == pool.size(2)) && pool.size(2) % 16 == 0,
                    "the layers' pools must be alike, of the norms' type, with dense heads of a multiple of 16");
      }
    slots_ = k.size(0);
    kv_heads_ = k.size(1);
    width_ = k.size(2);
    value_width_ = v.size(2);
    k_slot_ = k.stride(0);
    v_slot_ = v.stride(0);
  }

  std::vector<Tensors> kept_;  // weights, scales, norms, pools of keys and of values: what the pointers point to
  Tensor cos_sin_;
  const float eps_;
  int type_;
  int64_t hidden_, mlp_, heads_, kv_heads_, width_, value_width_, slots_, k_slot_, v_slot_;
  std::vector<Layer> layers_;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(outrider, m) {
  m.class_<Decoder>("Decoder")
      .def(torch::init<Tensors, std::vector<int64_t>, Tensors, std::vector<int64_t>, Tensors, Tensors, Tensors, Tensor,
                       double, std::vector<double>, std::vector<int64_t>, std::vector<double>>())
      .def("forward", &Decoder::forward);
}

}  // namespace outrider
