// All layers of a Llama-like decoder in one call, by one team of threads.
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <numeric>
#include <optional>

#include "read_rows.h"
#include "stages.h"

namespace outrider {
namespace {

using Tensors = std::vector<Tensor>;

struct Layer {
  Weight qkv, out, up, down;
  const void *norm_before, *norm_between;
  BeforeRotation before;
  void *k_pool, *v_pool;
  float scale, logit_cap;
  int64_t window;
};

struct Buffers {
  Tensor normed, qkv, attended, x, up, gated, partials;
  RoundedInput rounded;
};

// Weights and caches, checked once at construction.
class Decoder : public torch::CustomClassHolder {
 public:
  // counts: parts of each product, four products a layer (q|k|v, out, gate|up, down). weights, kinds, outputs: of all
  // parts; kinds as in packed_linear. norms: two a layer and the last one. head_norms: none, or two a layer, for each
  // head of queries and keys. biases: none, or of q|k|v in each layer. k_pools, v_pools: the caches of the layers
  // [slots, heads, width]. scales, windows, logit_caps: as in flat_attention, one a layer.
  Decoder(std::vector<int64_t> counts, Tensors weights, std::vector<int64_t> kinds, std::vector<int64_t> outputs,
          Tensors norms, Tensors head_norms, Tensors biases, Tensors k_pools, Tensors v_pools, Tensor cos_sin,
          double eps, std::vector<double> scales, std::vector<int64_t> windows, std::vector<double> logit_caps)
      : kept_{weights, norms, k_pools, v_pools, head_norms, biases}, cos_sin_(cos_sin), eps_(float(eps)) {
    const size_t layers = k_pools.size(), parts = std::accumulate(counts.begin(), counts.end(), int64_t(0));
    TORCH_CHECK(layers && counts.size() == 4 * layers && std::ranges::all_of(counts, [](int64_t n) { return n > 0; }) &&
                    weights.size() == parts && kinds.size() == parts && outputs.size() == parts &&
                    norms.size() == 2 * layers + 1 && (head_norms.empty() || head_norms.size() == 2 * layers) &&
                    (biases.empty() || biases.size() == layers) && v_pools.size() == layers &&
                    scales.size() == layers && windows.size() == layers && logit_caps.size() == layers,
                "a layer has four products, two norms, two pools, a scale, a window and a cap");
    std::vector<int64_t> sums, first{0};  // outputs and first part of each product
    for (const int64_t count : counts) {
      const auto from = outputs.begin() + first.back();
      sums.push_back(std::accumulate(from, from + count, int64_t(0)));
      first.push_back(first.back() + count);
    }
    type_ = type_of(norms[0], "norms");
    hidden_ = norms[0].numel();
    read_pools();
    const int64_t query = sums[0] - kv_heads_ * (width_ + value_width_);
    TORCH_CHECK(query > 0 && query % width_ == 0, "outputs of q|k|v are ", sums[0],
                ", which the pool's heads do not fit");
    heads_ = query / width_;
    mlp_ = sums[2] / 2;
    TORCH_CHECK(hidden_ % 16 == 0 && mlp_ % 16 == 0, "widths must be multiples of 16");
    TORCH_CHECK(cos_sin.dim() == 2 && cos_sin.is_contiguous() && cos_sin.size(1) % 32 == 0 &&
                    cos_sin.size(1) <= width_ &&
                    (cos_sin.scalar_type() == at::kFloat || cos_sin.scalar_type() == norms[0].scalar_type()),
                "cos_sin must be dense [positions, multiple of 32], float32 or of the norms' type");
    for (const Tensor& norm : norms)
      TORCH_CHECK(norm.scalar_type() == norms[0].scalar_type() && norm.is_contiguous() && norm.numel() == hidden_,
                  "norms must be dense, of one type and width");
    for (const Tensor& norm : head_norms) check_dense(norm, norms[0].scalar_type(), {width_}, "a norm of heads");
    for (const Tensor& bias : biases) check_dense(bias, norms[0].scalar_type(), {sums[0]}, "a bias");
    const int64_t depths[4] = {hidden_, heads_ * value_width_, hidden_, mlp_};
    const int64_t wanted[4] = {sums[0], hidden_, 2 * mlp_, hidden_};
    std::vector<Weight> products;
    for (size_t i = 0; i < 4 * layers; ++i) {
      TORCH_CHECK(sums[i] == wanted[i % 4], "weight ", i % 4, " of layer ", i / 4, " has ", sums[i],
                  " outputs, expected ", wanted[i % 4]);
      Weight w{{}, sums[i], depths[i % 4]};
      for (int64_t n = first[i]; n < first[i + 1]; ++n)
        w.parts.push_back(part_of(weights[n], kinds[n], outputs[n], w.depth, norms[0]));
      rounds_ = rounds_ || w.rounds();
      products.push_back(w);
    }
    const auto given = [](const Tensors& all, size_t i) { return all.empty() ? nullptr : all[i].data_ptr(); };
    for (size_t i = 0; i < layers; ++i)
      layers_.push_back({products[4 * i], products[4 * i + 1], products[4 * i + 2], products[4 * i + 3],
                         norms[2 * i].data_ptr(), norms[2 * i + 1].data_ptr(),
                         {given(biases, i), given(head_norms, 2 * i), given(head_norms, 2 * i + 1), eps_},
                         k_pools[i].data_ptr(), v_pools[i].data_ptr(), float(scales[i]), float(logit_caps[i]),
                         windows[i]});
  }

  // residual: [N, H], the embedded tokens; it becomes the sum of all layers. positions, slots: [N]. Further arguments
  // are as in flat_attention. captured: the layers before which the sum is kept, rising, none the first.
  // read: wanted rows of the output of the last norm, rising; none means all. For all further rows the last layer
  // computes only keys and values, and residual is then not the sum.
  // Returns the output of the last norm, [N, H] or only the rows read, and the kept sums [N, captured, H].
  std::tuple<Tensor, Tensor> forward(Tensor residual, Tensor positions, Tensor slots, Tensor qo_indptr, Tensor kv_lens,
                                     Tensor rows, Tensor page_table, bool causal,
                                     std::vector<int64_t> captured, std::optional<Tensor> read) const {
    const int64_t tokens = residual.size(0);
    TORCH_CHECK(residual.dim() == 2 && residual.is_contiguous() && residual.size(1) == hidden_ &&
                    type_of(residual, "residual") == type_,
                "residual must be dense [tokens, ", hidden_, "], of the norms' type, got ", residual.sizes());
    check_dense(positions, at::kLong, {tokens}, "positions");
    check_dense(slots, at::kLong, {tokens}, "slots");
    check_range(positions, 0, cos_sin_.size(0), "positions");
    check_range(slots, 0, slots_, "slots");
    for (size_t i = 0; i < captured.size(); ++i)
      TORCH_CHECK((i ? captured[i - 1] : 0) < captured[i] && captured[i] < int64_t(layers_.size()),
                  "layers to capture must rise within 1 .. ", layers_.size() - 1);
    const AttentionPlan plan = plan_attention(tokens, heads_, kv_heads_, width_, value_width_, qo_indptr, kv_lens, rows,
                                              page_table, causal);
    Buffers buffers = buffers_for(tokens, residual, plan);
    std::optional<ReadRows> few;
    if (read) {
      check_dense(*read, at::kLong, {read->numel()}, "read");
      check_range(*read, 0, tokens, "read");
      if (causal && read->numel() <= shares(tokens, at::get_num_threads()).second)
        few.emplace(plan.args, *read, qo_indptr, kv_lens, rows, page_table);
    }
    const Tensor kept = at::empty({tokens, int64_t(captured.size()), hidden_}, residual.options());
    const std::vector<int32_t> cached = cached_slots(plan.args, kv_lens.numel(), tokens);
    const Step step{residual, kept, plan, rope_of(buffers.qkv, positions, slots), captured, cached, buffers,
                    few ? &*few : nullptr};
    run_team([&](TeamMember& member) { Pass(*this, step, member).run(); });
    const Tensor normed = few ? buffers.normed.narrow(0, 0, read->numel()) : buffers.normed;
    return {read && !few ? normed.index_select(0, *read) : normed, kept};
  }

 private:
  // The state of a step, which all members share. rope: of all rows. cached: slots with keys and values to prefetch.
  struct Step {
    const Tensor &residual, &kept;
    const AttentionPlan& plan;
    const RopeArgs rope;
    const std::vector<int64_t>& captured;
    const std::vector<int32_t>& cached;
    Buffers& buffers;
    const ReadRows* read;  // null: all rows
  };

  // A member's share of a step. Between two attentions a row needs no other row (the rest of a layer, the norm, the
  // start of the next layer), so a member may take its own rows, `at_once_` at a time.
  class Pass {
   public:
    Pass(const Decoder& decoder, const Step& step, TeamMember& member)
        : d(decoder), step_(step), b(step.buffers), member_(member), size_(d.type_ ? 2 : 4),
          stages_(member, d.type_, step.residual.size(0), b.rounded) {
      const int64_t tokens = step.residual.size(0);
      std::tie(own_rows_, at_once_) = d.shares(tokens, member.size);
      begin_ = own_rows_ ? tokens * member.index / member.size : 0;
      end_ = own_rows_ ? tokens * (member.index + 1) / member.size : tokens;
      x_ = own_part(b.x);
      up_ = own_part(b.up);
      gated_ = own_part(b.gated);
    }

    void run() {
      const size_t layers = d.layers_.size();
      for (size_t i = 0; i <= layers; ++i) {
        prefetch_cache(i);
        if (own_rows_) member_.run_unshared();
        for (int64_t first = begin_; first < end_; first += at_once_) {
          stages_.set_rows(std::min(at_once_, end_ - first));
          if (i) finish_layer(i - 1, first);
          normalise(i, first);
          if (i < layers) begin_layer(i, first);
        }
        member_.run_shared();
        captured_ += captures(i);
        if (i == layers) break;
        const bool few = step_.read && i + 1 == layers;
        if (few) keep_read_rows();
        attend(d.layers_[i], few ? step_.read->plan : step_.plan, few ? step_.read->partials : b.partials);
      }
    }

   private:
    char* own_part(const Tensor& rows) const {
      return data(rows) + (own_rows_ ? member_.index * at_once_ * rows.size(1) * size_ : 0);
    }
    char* at(const Tensor& rows, int64_t first) const { return data(rows) + first * rows.stride(0) * size_; }
    bool captures(size_t i) const {
      return captured_ < step_.captured.size() && step_.captured[captured_] == int64_t(i);
    }

    // From here to the layer's attention, products prefetch its keys and values.
    void prefetch_cache(size_t i) {
      const bool wanted = !step_.cached.empty() && i < d.layers_.size() && d.layers_[i].window < 0;
      if (wanted) prefetch_ = d.cache_lines(d.layers_[i], step_.cached, member_);
      stages_.prefetch_during(wanted ? &prefetch_ : nullptr);
    }

    // Computes the output of attention, and the MLP.
    void finish_layer(size_t i, int64_t first) {
      const Layer& layer = d.layers_[i];
      char* const normed = at(b.normed, first);
      stages_.product(at(b.attended, first), layer.out, x_, &layer.up);
      stages_.norm(x_, at(step_.residual, first), layer.norm_between, normed, d.hidden_, d.eps_);
      stages_.product(normed, layer.up, up_, &layer.down);
      stages_.silu_mul(up_, gated_, d.mlp_);
      stages_.product(gated_, layer.down, x_, i + 1 == d.layers_.size() ? nullptr : &d.layers_[i + 1].qkv);
    }

    // Computes the norm before layer i, or the last one; keeps captured sums of the layers so far.
    void normalise(size_t i, int64_t first) {
      const bool last = i == d.layers_.size();
      const void* weight = last ? d.kept_[1].back().data_ptr() : d.layers_[i].norm_before;
      char *const sum = at(step_.residual, first), *const normed = at(b.normed, first);
      const int64_t stride = step_.captured.size() * d.hidden_;
      char* const copy = captures(i) ? at(step_.kept, first) + captured_ * d.hidden_ * size_ : nullptr;
      if (i) stages_.norm(x_, sum, weight, normed, d.hidden_, d.eps_, copy, stride);
      else stages_.norm(sum, nullptr, weight, normed, d.hidden_, d.eps_);
    }

    // Computes queries, keys and values, rotates them and writes them to the cache.
    void begin_layer(size_t i, int64_t first) {
      const Layer& layer = d.layers_[i];
      const bool more = first + at_once_ < end_;
      stages_.product(at(b.normed, first), layer.qkv, at(b.qkv, first), more && i ? &d.layers_[i - 1].out : &layer.out);
      const int64_t skipped = first * b.qkv.size(1) * size_;
      RopeArgs rope = step_.rope;
      rope.q = static_cast<char*>(rope.q) + skipped;
      rope.k = static_cast<char*>(rope.k) + skipped;
      rope.v = static_cast<const char*>(rope.v) + skipped;
      rope.positions += first;
      rope.slots += first;
      rope.k_pool = layer.k_pool;
      rope.v_pool = layer.v_pool;
      stages_.rope(rope, layer.before);
    }

    // Drops all rows but the ones to be read.
    void keep_read_rows() {
      const std::vector<int64_t>& numbers = step_.read->numbers;
      member_.run_once([&] {
        for (const Tensor& rows : {b.qkv, step_.residual})
          for (size_t i = 0; i < numbers.size(); ++i)
            std::memmove(at(rows, i), at(rows, numbers[i]), rows.size(1) * size_);
      });
      own_rows_ = false;
      begin_ = 0;
      end_ = at_once_ = numbers.size();
      x_ = data(b.x);
      up_ = data(b.up);
      gated_ = data(b.gated);
    }

    void attend(const Layer& layer, const AttentionPlan& plan, const Tensor& partials) {
      AttentionArgs a = plan.args;
      a.q = data(b.qkv);
      a.out = data(b.attended);
      a.q_stride = b.qkv.size(1);
      a.k_stride = d.k_slot_;
      a.v_stride = d.v_slot_;
      a.k_pool = layer.k_pool;
      a.v_pool = layer.v_pool;
      a.scale = layer.scale;
      a.window = layer.window;
      a.logit_cap = layer.logit_cap;
      stages_.attention(a, plan, partials.defined() ? partials.data_ptr<float>() : nullptr);
    }

    const Decoder& d;
    const Step& step_;
    Buffers& b;
    TeamMember& member_;
    const int64_t size_;  // bytes of a number
    Stages stages_;
    bool own_rows_ = false;
    int64_t at_once_ = 0, begin_ = 0, end_ = 0;  // rows of this member
    char *x_, *up_, *gated_;
    size_t captured_ = 0;  // sums kept so far
    CachePrefetch prefetch_{};
  };

  RopeArgs rope_of(const Tensor& qkv, const Tensor& positions, const Tensor& slots) const {
    const int64_t size = type_ ? 2 : 4;
    RopeArgs rope{};
    rope.q = data(qkv);
    rope.k = data(qkv) + heads_ * width_ * size;
    rope.v = data(qkv) + (heads_ + kv_heads_) * width_ * size;
    rope.cos_sin = cos_sin_.data_ptr();
    rope.positions = positions.data_ptr<int64_t>();
    rope.slots = slots.data_ptr<int64_t>();
    rope.q_stride = rope.k_stride = rope.v_stride = qkv.size(1);
    rope.k_slot = k_slot_;
    rope.v_slot = v_slot_;
    rope.q_heads = heads_;
    rope.kv_heads = kv_heads_;
    rope.head_dim = width_;
    rope.value_dim = value_width_;
    rope.rotary_dim = cos_sin_.size(1);
    rope.wide_cache = cos_sin_.scalar_type() == at::kFloat;
    return rope;
  }

  // Says whether members take their own rows between attentions, and how many at once. With many rows and fast
  // products, moving rows between cores' caches takes longer than expanding all weights on each core. Otherwise members
  // share the products of all rows.
  std::pair<bool, int64_t> shares(int64_t tokens, int64_t threads) const {
    constexpr int64_t LEAST = 128;
    const int64_t room = kernels().cache_bytes_for_rows[type_] / (2 * mlp_ * (type_ ? 2 : 4)),
                  each = (tokens + threads - 1) / threads;
    if (each < LEAST || rounds_ || !room) return {false, tokens};
    const int64_t parts = (each + std::max(LEAST, room) - 1) / std::max(LEAST, room);
    return {true, (each + parts - 1) / parts};
  }

  // Slots in attention's order, as many as fit a shared cache. With few tokens none: their products are memory-bound
  // already.
  std::vector<int32_t> cached_slots(const AttentionArgs& a, int64_t requests, int64_t tokens) const {
    constexpr int64_t ROOM = 8 << 20;  // bytes
    const int64_t least = rounds_ ? 4 : 16, slot = kv_heads_ * (width_ + value_width_) * (type_ ? 2 : 4);
    const int64_t most = tokens < least ? 0 : ROOM / slot;
    std::vector<int32_t> slots;
    for (int64_t r = requests - 1; r >= 0 && int64_t(slots.size()) < most; --r) {
      const int32_t* from = a.page_table + a.rows[r] * a.page_stride;
      slots.insert(slots.end(), from, from + std::min<int64_t>(a.kv_lens[r], most - slots.size()));
    }
    return slots;
  }

  // A member's share of the slots, in the cache of a layer.
  CachePrefetch cache_lines(const Layer& layer, const std::vector<int32_t>& slots, const TeamMember& member) const {
    const int64_t size = type_ ? 2 : 4, count = slots.size();
    const CachePrefetch::Pool keys{static_cast<const char*>(layer.k_pool), k_slot_ * size, kv_heads_ * width_ * size};
    const CachePrefetch::Pool values{static_cast<const char*>(layer.v_pool), v_slot_ * size,
                                     kv_heads_ * value_width_ * size};
    return {{keys, values}, slots.data() + count * member.index / member.size,
            slots.data() + count * (member.index + 1) / member.size};
  }

  Buffers buffers_for(int64_t tokens, const Tensor& like, const AttentionPlan& plan) const {
    const auto room = [&](int64_t rows, int64_t width) { return at::empty({rows, width}, like.options()); };
    const auto [own, at_once] = shares(tokens, at::get_num_threads());
    const int64_t some = own ? at_once * at::get_num_threads() : at_once;
    Buffers b{room(tokens, hidden_), room(tokens, layers_[0].qkv.outputs), room(tokens, heads_ * value_width_),
              room(some, hidden_), room(some, 2 * mlp_), room(some, mlp_), {}, {}};
    if (plan.split(at::get_num_threads()))
      b.partials = at::empty({plan.partials_size()}, like.options().dtype(at::kFloat));
    if (!rounds_) return b;
    for (const Layer& layer : layers_)
      for (const Weight* w : {&layer.qkv, &layer.out, &layer.up, &layer.down}) b.rounded.reserve(tokens, *w);
    return b;
  }

  void read_pools() {
    const Tensors &k_pools = kept_[2], &v_pools = kept_[3];
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

  std::vector<Tensors> kept_;  // weights, norms, pools, head norms, biases: keeps pointers valid
  Tensor cos_sin_;
  const float eps_;
  int type_;
  bool rounds_ = false;  // whether a product rounds its input for all rows at once
  int64_t hidden_, mlp_, heads_, kv_heads_, width_, value_width_, slots_, k_slot_, v_slot_;
  std::vector<Layer> layers_;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(outrider, m) {
  m.class_<Decoder>("Decoder")
      .def(torch::init<std::vector<int64_t>, Tensors, std::vector<int64_t>, std::vector<int64_t>, Tensors, Tensors,
                       Tensors, Tensors, Tensors, Tensor, double, std::vector<double>, std::vector<int64_t>,
                       std::vector<double>>())
      .def("forward", &Decoder::forward);
}

}  // namespace outrider
