// A block drafter (DSpark, DFlash) in two calls, each by one team of threads: what it remembers of the target's tokens,
// and a whole draft.
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <tuple>

#include "stages.h"

namespace outrider {
namespace {

using Tensors = std::vector<Tensor>;

void check_dense(const Tensor& x, at::ScalarType type, at::IntArrayRef sizes, const char* name) {
  TORCH_CHECK(x.scalar_type() == type && x.is_contiguous() && x.sizes() == sizes, name, " must be dense ", type, " ",
              sizes, ", got ", x.scalar_type(), " ", x.sizes());
}

struct Layer {
  Weight qkv, out, up, down;
  const void *norm_before, *norm_queries, *norm_keys, *norm_between;
  void *k_pool, *v_pool;
};

// Which queries belong to which request, and where in the cache they stand.
struct Places {
  Tensor positions, slots, indptr, kv_lens;

  Places(const Tensor& seq_lens, const Tensor& rows, const Tensor& page_table, int64_t queries) {
    const int64_t requests = rows.numel();
    TORCH_CHECK(seq_lens.scalar_type() == at::kLong && seq_lens.is_contiguous() && seq_lens.numel() == requests &&
                    rows.scalar_type() == at::kLong && rows.is_contiguous(),
                "seq_lens and rows must be dense int64, one per request");
    positions = at::empty({requests * queries}, seq_lens.options());
    slots = at::empty({requests * queries}, seq_lens.options());
    indptr = at::empty({requests + 1}, page_table.options());
    kv_lens = at::empty({requests}, page_table.options());
    indptr.data_ptr<int32_t>()[0] = 0;
    for (int64_t r = 0; r < requests; ++r) {
      const int64_t length = seq_lens.data_ptr<int64_t>()[r];
      const int32_t* from = slots_of(page_table, r, rows.data_ptr<int64_t>()[r], length, length + queries);
      for (int64_t i = 0; i < queries; ++i) {
        positions.data_ptr<int64_t>()[r * queries + i] = length + i;
        slots.data_ptr<int64_t>()[r * queries + i] = from[i];
      }
      indptr.data_ptr<int32_t>()[r + 1] = int32_t((r + 1) * queries);
      kv_lens.data_ptr<int32_t>()[r] = int32_t(length + queries);
    }
  }
};

// Everything that a draft writes on its way.
struct Buffers {
  Tensor residual, normed, qkv, seen, x, up, gated, partials, states, logits, latents, bias;
  Int8Input int8;
};

// What does not change from draft to draft; checked once, when it is made.
class BlockDrafter : public torch::CustomClassHolder {
 public:
  // weights, each beside its kind, scales (none: no numbers), outputs and depth as of weight_of: four a layer (q|k|v, out,
  // gate|up, down), the head, fc and the keys|values of all layers, with a Markov head W2.
  // norms: of each layer four (before attention, of queries, of keys, before the MLP), the last one, the context's.
  // mask: [1, d], embedded. w1: [V, r], none without a Markov head. sure: [d] and [V] float32, the confidence head's
  // weight of a hidden state and what it adds for the token before; empty without one. vocab: [V'], none for the identity.
  BlockDrafter(Tensors weights, std::vector<int64_t> kinds, Tensors scales, std::vector<int64_t> outputs,
               std::vector<int64_t> depths, Tensors norms, Tensors k_pools, Tensors v_pools, Tensor cos_sin, Tensor mask,
               std::optional<Tensor> w1, Tensors sure, std::optional<Tensor> vocab, int64_t first_row, double eps)
      : kept_{weights, scales, norms, k_pools, v_pools}, cos_sin_(cos_sin), mask_(mask), w1_(w1), sure_(sure),
        vocab_(vocab), first_row_(first_row), eps_(float(eps)), type_(type_of(mask, "mask")), hidden_(mask.size(-1)) {
    const size_t layers = k_pools.size(), products = 4 * layers + (w1 ? 4 : 3);
    TORCH_CHECK(layers && weights.size() == products && kinds.size() == products && scales.size() == products &&
                    outputs.size() == products && depths.size() == products && norms.size() == 4 * layers + 2 &&
                    v_pools.size() == layers,
                "expected ", products, " weights for ", layers, " layers, four norms and two pools each and two norms, got ",
                weights.size(), " weights and ", norms.size(), " norms");
    read_pools();
    heads_ = outputs[0] / width_ - 2 * kv_heads_;
    mlp_ = outputs[2] / 2;
    TORCH_CHECK(heads_ > 0 && outputs[0] == (heads_ + 2 * kv_heads_) * width_, "outputs of q|k|v are ", outputs[0],
                ", which the pool's heads do not fit");
    TORCH_CHECK(hidden_ % 16 == 0 && mlp_ % 16 == 0 && width_ % 32 == 0, "widths must be multiples of 16, of heads 32");
    check_dense(cos_sin, at::kFloat, {cos_sin.size(0), width_}, "cos_sin");
    for (size_t i = 0; i < norms.size(); ++i) {
      const bool of_heads = i < 4 * layers && (i % 4 == 1 || i % 4 == 2);
      check_dense(norms[i], mask.scalar_type(), {of_heads ? width_ : hidden_}, "a norm");
    }
    const int64_t deep[4] = {hidden_, heads_ * width_, hidden_, mlp_}, wide[4] = {outputs[0], hidden_, 2 * mlp_, hidden_};
    std::vector<Weight> all;
    for (size_t i = 0; i < products; ++i) {
      TORCH_CHECK(i >= 4 * layers || (outputs[i] == wide[i % 4] && depths[i] == deep[i % 4]), "weight ", i % 4,
                  " of layer ", i / 4, " is [", outputs[i], ", ", depths[i], "], expected [", wide[i % 4], ", ",
                  deep[i % 4], "]");
      all.push_back(weight_of(weights[i], kinds[i], scales[i], outputs[i], depths[i], mask));
    }
    for (size_t i = 0; i < layers; ++i) {
      const Weight* w = &all[4 * i];
      const Tensor* norm = &norms[4 * i];
      layers_.push_back({w[0], w[1], w[2], w[3], norm[0].data_ptr(), norm[1].data_ptr(), norm[2].data_ptr(),
                         norm[3].data_ptr(), k_pools[i].data_ptr(), v_pools[i].data_ptr()});
    }
    read_heads(all.data() + 4 * layers);
  }

  // Writes keys and values of target features [N, m * d] at `slots` of every layer's pools; these skip the input norm.
  void observe(Tensor features, Tensor positions, Tensor slots) const {
    const int64_t tokens = features.size(0);
    check_dense(features, mask_.scalar_type(), {tokens, fc_.depth}, "features");
    check_dense(positions, at::kLong, {tokens}, "positions");
    check_dense(slots, at::kLong, {tokens}, "slots");
    check_range(positions, 0, cos_sin_.size(0), "positions");
    check_range(slots, 0, slots_, "slots");
    const Tensor context = room(tokens, hidden_), kv = room(tokens, keys_values_.outputs);
    Int8Input int8;
    for (const Weight* w : {&fc_, &keys_values_}) int8.reserve(tokens, w->scales ? w->depth : 0);
    run_team([&](Member& member) {
      const Stages stages(member, type_, tokens, int8);
      stages.product(features.data_ptr(), fc_, context.data_ptr(), &keys_values_);
      stages.norm(context.data_ptr(), nullptr, kept_[2].back().data_ptr(), context.data_ptr(), hidden_, eps_);
      stages.product(context.data_ptr(), keys_values_, kv.data_ptr(), nullptr);
      for (size_t i = 0; i < layers_.size(); ++i) {
        RopeArgs rope = rope_of(kv, positions, slots);
        char* const k = static_cast<char*>(kv.data_ptr()) + 2 * i * kv_heads_ * width_ * size();
        rope.q = rope.k = k;
        rope.v = k + kv_heads_ * width_ * size();
        rotate(member, rope, layers_[i], tokens);
      }
    });
  }

  // A draft of gamma tokens for each of R requests: tokens [R, gamma], confidence [R, gamma] and, where that is wanted and
  // a request is not greedy, the distribution each token was drawn from, [R, gamma, V']; rows of greedy requests are not
  // written there. embedded: [R, d], of the anchors [R]. noise: [R, gamma], the key of each draw's.
  std::tuple<Tensor, std::optional<Tensor>, Tensor> propose(
      Tensor anchors, Tensor embedded, Tensor seq_lens, Tensor rows, Tensor page_table, Tensor temperatures,
      std::optional<Tensor> top_ks, std::optional<Tensor> top_ps, std::optional<Tensor> min_ps, Tensor noise,
      int64_t gamma, bool wants_probs) const {
    const int64_t requests = rows.numel(), queries = gamma + first_row_, tokens = requests * queries;
    check_dense(embedded, mask_.scalar_type(), {requests, hidden_}, "embedded");
    check_dense(anchors, at::kLong, {requests}, "anchors");
    check_dense(noise, at::kLong, {requests, gamma}, "noise");
    if (w1_) check_range(anchors, 0, w1_->size(0), "anchors");
    const Places places(seq_lens, rows, page_table, queries);
    check_range(places.positions, 0, cos_sin_.size(0), "positions");
    check_range(places.slots, 0, slots_, "slots");
    AttentionPlan plan = plan_attention(tokens, heads_, kv_heads_, width_, width_, places.indptr, places.kv_lens, rows,
                                        page_table, false);
    plan.args.scale = float(1 / std::sqrt(double(width_)));
    plan.args.window = -1;
    Buffers b = buffers_for(requests, gamma, plan);
    for (int64_t i = 0; i < tokens; ++i) {
      const char* from = i % queries ? data(mask_) : data(embedded) + i / queries * hidden_ * size();
      std::memcpy(data(b.residual) + i * hidden_ * size(), from, hidden_ * size());
    }
    ChooseArgs choose{};
    choose.rules = rules_of(temperatures, top_ks, top_ps, min_ps, requests);
    const auto* heat = choose.rules.temperatures;
    const bool sampled = std::any_of(heat, heat + requests, [](float t) { return t > 0; });
    std::optional<Tensor> probs;
    if (sampled && wants_probs) probs = at::empty({requests, gamma, head_.outputs}, noise.options().dtype(at::kFloat));
    const Tensor drawn = at::empty({requests, gamma}, noise.options());
    const Tensor confidence = at::empty({requests, gamma}, noise.options().dtype(at::kFloat));
    choose.keys = noise.data_ptr<int64_t>();
    choose.probs = probs ? probs->data_ptr<float>() : nullptr;
    choose.tokens = drawn.data_ptr<int64_t>();
    choose.confidence = confidence.data_ptr<float>();
    run_team([&](Member& member) {
      block(member, places, plan, requests, queries, b);
      draw(member, choose, anchors.data_ptr<int64_t>(), requests, gamma, sampled ? 32 : 4, b);
    });
    return {drawn, probs, confidence};
  }

 private:
  // Normed hidden states [R, gamma, d] of each request's anchor and the masks behind it.
  void block(Member& member, const Places& places, const AttentionPlan& plan, int64_t requests, int64_t queries,
             Buffers& b) const {
    const int64_t tokens = requests * queries, drafted = queries - first_row_;
    const Stages stages(member, type_, tokens, b.int8);
    char *const sum = data(b.residual), *const normed = data(b.normed), *const x = data(b.x), *const qkv = data(b.qkv);
    RopeArgs rope = rope_of(b.qkv, places.positions, places.slots);
    rope.q = qkv;
    rope.q_heads = heads_;
    rope.k = qkv + heads_ * width_ * size();
    rope.v = qkv + (heads_ + kv_heads_) * width_ * size();
    AttentionArgs attention = plan.args;
    attention.q = qkv;
    attention.out = b.seen.data_ptr();
    attention.q_stride = b.qkv.size(1);
    attention.k_stride = attention.v_stride = kv_heads_ * width_;
    float* const partials = b.partials.defined() ? b.partials.data_ptr<float>() : nullptr;
    for (size_t i = 0; i < layers_.size(); ++i) {
      const Layer& layer = layers_[i];
      if (i == 0) stages.norm(sum, nullptr, layer.norm_before, normed, hidden_, eps_);
      else stages.norm(x, sum, layer.norm_before, normed, hidden_, eps_);
      stages.product(normed, layer.qkv, qkv, &layer.out);
      rotate(member, rope, layer, tokens);
      attention.k_pool = layer.k_pool;
      attention.v_pool = layer.v_pool;
      stages.attention(attention, plan, partials);
      stages.product(b.seen.data_ptr(), layer.out, x, &layer.up);
      stages.norm(x, sum, layer.norm_between, normed, hidden_, eps_);
      stages.product(normed, layer.up, b.up.data_ptr(), &layer.down);
      stages.silu_mul(b.up.data_ptr(), b.gated.data_ptr(), mlp_);
      stages.product(b.gated.data_ptr(), layer.down, x, i + 1 < layers_.size() ? &layers_[i + 1].qkv : &head_);
    }
    const auto finish = [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const int64_t from = (r * queries + first_row_) * hidden_ * size();
        kernels().norm[type_](x + from, sum + from, kept_[2][4 * layers_.size()].data_ptr(),
                              data(b.states) + r * drafted * hidden_ * size(), hidden_, eps_, 0, drafted);
      }
    };
    member.ranges(SMALL, requests, finish, requests * drafted * hidden_ * NUMBER);
  }

  // The tokens of a draft from its hidden states, position after position where each depends on the one before.
  void draw(Member& member, ChooseArgs a, const int64_t* anchors, int64_t requests, int64_t gamma, int64_t work,
            Buffers& b) const {
    const Stages all(member, type_, requests * gamma, b.int8), each(member, type_, requests, b.int8);
    all.product(b.states.data_ptr(), head_, b.logits.data_ptr(), w1_ ? &w2_ : nullptr);
    a.logits = b.logits.data_ptr();
    a.states = b.states.data_ptr();
    a.vocab = vocab_ ? vocab_->data_ptr<int64_t>() : nullptr;
    a.columns = head_.outputs;
    a.width = hidden_;
    a.rows = requests * gamma;
    a.stride = 1;
    a.rows_per_request = gamma;
    if (!w1_) return all.choose(a, work);
    if (!sure_.empty()) {
      a.state_weight = sure_[0].data_ptr<float>();
      a.token_weight = sure_[1].data_ptr<float>();
    }
    a.bias = b.bias.data_ptr();
    a.rows = requests;
    a.rows_per_request = 1;
    a.stride = gamma;
    a.previous = anchors;
    a.previous_stride = 1;
    const int64_t bytes = w1_->size(1) * size();
    for (int64_t step = 0; step < gamma; ++step) {
      member.alone(SAMPLING, [&] {
        for (int64_t r = 0; r < requests; ++r)
          std::memcpy(data(b.latents) + r * bytes, data(*w1_) + a.previous[r * a.previous_stride] * bytes, bytes);
      });
      each.product(b.latents.data_ptr(), w2_, b.bias.data_ptr(), nullptr);
      each.choose(a, work);
      a.previous = a.tokens;
      a.previous_stride = gamma;
      a.logits = static_cast<const char*>(a.logits) + a.columns * size();
      a.states = static_cast<const char*>(a.states) + a.width * size();
      if (a.probs) a.probs += a.columns;
      ++a.keys, ++a.tokens, ++a.confidence;
    }
  }

  // Norms and rotates each head of queries (if there are any) and keys, and writes keys and values to the layer's pools.
  void rotate(Member& member, RopeArgs rope, const Layer& layer, int64_t tokens) const {
    rope.k_pool = layer.k_pool;
    rope.v_pool = layer.v_pool;
    const auto share = [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        char *const q = static_cast<char*>(rope.q) + n * rope.q_stride * size();
        char *const k = static_cast<char*>(rope.k) + n * rope.k_stride * size();
        kernels().norm[type_](q, nullptr, layer.norm_queries, q, width_, eps_, 0, rope.q_heads);
        kernels().norm[type_](k, nullptr, layer.norm_keys, k, width_, eps_, 0, rope.kv_heads);
      }
      kernels().rope[type_](rope, begin, end);
    };
    member.ranges(SMALL, tokens, share, tokens * (rope.q_heads + rope.kv_heads) * width_ * 2 * NUMBER);
  }

  // Of keys and values in rows of a matrix, and no queries; where in a row they are is left open.
  RopeArgs rope_of(const Tensor& matrix, const Tensor& positions, const Tensor& slots) const {
    RopeArgs rope{};
    rope.cos_sin = cos_sin_.data_ptr();
    rope.positions = positions.data_ptr<int64_t>();
    rope.slots = slots.data_ptr<int64_t>();
    rope.q_stride = rope.k_stride = rope.v_stride = matrix.size(1);
    rope.k_slot = rope.v_slot = kv_heads_ * width_;
    rope.kv_heads = kv_heads_;
    rope.head_dim = rope.value_dim = rope.rotary_dim = width_;
    rope.wide_cache = true;
    return rope;
  }

  Buffers buffers_for(int64_t requests, int64_t gamma, const AttentionPlan& plan) const {
    const int64_t drafted = requests * gamma, tokens = requests * (gamma + first_row_);
    Buffers b{room(tokens, hidden_), room(tokens, hidden_), room(tokens, layers_[0].qkv.outputs),
              room(tokens, heads_ * width_), room(tokens, hidden_), room(tokens, 2 * mlp_), room(tokens, mlp_), {},
              room(drafted, hidden_), room(drafted, head_.outputs), {}, {}, {}};
    if (plan.split(at::get_num_threads())) b.partials = at::empty({plan.room()}, cos_sin_.options());
    if (w1_) b.latents = room(requests, w2_.depth), b.bias = room(requests, w2_.outputs);
    for (const Weight* w : {&layers_[0].qkv, &layers_[0].out, &layers_[0].down})
      b.int8.reserve(tokens, w->scales ? w->depth : 0);
    b.int8.reserve(drafted, head_.scales ? head_.depth : 0);
    b.int8.reserve(requests, w1_ && w2_.scales ? w2_.depth : 0);
    return b;
  }

  void read_pools() {
    for (const Tensors& pools : {kept_[3], kept_[4]})
      for (const Tensor& pool : pools) check_dense(pool, mask_.scalar_type(), kept_[3][0].sizes(), "a pool");
    TORCH_CHECK(kept_[3][0].dim() == 3, "pools are [slots, heads, width]");
    slots_ = kept_[3][0].size(0);
    kv_heads_ = kept_[3][0].size(1);
    width_ = kept_[3][0].size(2);
  }

  // weights: the head, fc, the keys|values of all layers and perhaps W2.
  void read_heads(const Weight* weights) {
    head_ = weights[0];
    fc_ = weights[1];
    keys_values_ = weights[2];
    TORCH_CHECK(head_.depth == hidden_ && fc_.outputs == hidden_ && keys_values_.depth == hidden_ &&
                    keys_values_.outputs == 2 * int64_t(layers_.size()) * kv_heads_ * width_,
                "the head, fc or the projections of keys and values do not fit the hidden size ", hidden_);
    if (vocab_) check_dense(*vocab_, at::kLong, {head_.outputs}, "vocab");
    TORCH_CHECK(sure_.empty() || (w1_ && sure_.size() == 2), "a confidence head needs two weights and a Markov head");
    if (!w1_) return;
    w2_ = weights[3];
    check_dense(*w1_, mask_.scalar_type(), {w1_->size(0), w2_.depth}, "w1");
    TORCH_CHECK(w2_.outputs == head_.outputs, "W2 has ", w2_.outputs, " outputs, the head ", head_.outputs);
    if (vocab_) check_range(*vocab_, 0, w1_->size(0), "vocab");
    else TORCH_CHECK(head_.outputs <= w1_->size(0), "the head has more outputs than w1 rows");
    if (sure_.empty()) return;
    check_dense(sure_[0], at::kFloat, {hidden_}, "the confidence's weight");
    check_dense(sure_[1], at::kFloat, {w1_->size(0)}, "the confidence of tokens");
  }

  Tensor room(int64_t rows, int64_t columns) const { return at::empty({rows, columns}, mask_.options()); }
  static char* data(const Tensor& x) { return static_cast<char*>(x.data_ptr()); }
  int64_t size() const { return type_ ? 2 : 4; }  // bytes of a number

  std::vector<Tensors> kept_;  // weights, scales, norms, pools of keys and of values: what the pointers point to
  Tensor cos_sin_, mask_;
  std::optional<Tensor> w1_;
  Tensors sure_;
  std::optional<Tensor> vocab_;
  const int64_t first_row_;
  const float eps_;
  const int type_;
  const int64_t hidden_;
  int64_t heads_, kv_heads_, width_, mlp_, slots_;
  std::vector<Layer> layers_;
  Weight head_, fc_, keys_values_, w2_;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(outrider, m) {
  m.class_<BlockDrafter>("BlockDrafter")
      .def(torch::init<Tensors, std::vector<int64_t>, Tensors, std::vector<int64_t>, std::vector<int64_t>, Tensors,
                       Tensors, Tensors, Tensor, Tensor, std::optional<Tensor>, Tensors, std::optional<Tensor>, int64_t,
                       double>())
      .def("observe", &BlockDrafter::observe)
      .def("propose", &BlockDrafter::propose);
}

}  // namespace outrider
