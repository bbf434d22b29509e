// Torch operations: checks, work lists, threads. The headers have the arithmetic.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>

#include "kernels.h"
#include "ops.h"

namespace outrider {

int type_of(const Tensor& x, const char* name) {
  TORCH_CHECK(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16, name,
              " must be float32 or bfloat16, got ", x.scalar_type());
  return x.scalar_type() == at::kBFloat16;
}

// The last two dimensions [heads, width] must be dense, and width a multiple of the widest vector.
void check_heads(const Tensor& x, const char* name) {
  TORCH_CHECK(x.dim() == 3 && x.stride(2) == 1 && (x.size(1) == 1 || x.stride(1) == x.size(2)) && x.size(2) % 16 == 0,
              name, " must be [tokens, heads, multiple of 16] with dense heads, got sizes ", x.sizes(), " strides ",
              x.strides());
}

void check_index(const Tensor& x, at::ScalarType type, int64_t dim, const char* name) {
  TORCH_CHECK(x.scalar_type() == type && x.dim() == dim && x.stride(-1) == 1, name, " must be a dense ", type,
              " tensor of ", dim, " dimensions");
}

void check_dense(const Tensor& x, at::ScalarType type, at::IntArrayRef sizes, const char* name) {
  TORCH_CHECK(x.scalar_type() == type && x.is_contiguous() && x.sizes() == sizes, name, " must be dense ", type, " ",
              sizes, ", got ", x.scalar_type(), " ", x.sizes());
}

// Numbers that select rows of memory must lie in its range.
void check_range(const Tensor& x, int64_t least, int64_t limit, const char* name) {
  const int64_t* numbers = x.data_ptr<int64_t>();
  for (int64_t i = 0; i < x.numel(); ++i)
    TORCH_CHECK(least <= numbers[i] && numbers[i] < limit, name, "[", i, "] is ", numbers[i], ", outside ", least,
                " .. ", limit - 1);
}

int32_t* slots_of(const Tensor& page_table, int64_t request, int64_t row, int64_t first, int64_t end) {
  check_index(page_table, at::kInt, 2, "page_table");
  TORCH_CHECK(0 <= row && row < page_table.size(0) && 0 <= first && first <= end && end <= page_table.size(1),
              "request ", request, ": row ", row, " and positions ", first, " .. ", end - 1,
              " are not in the page table ", page_table.sizes());
  return page_table.data_ptr<int32_t>() + row * page_table.stride(0) + first;
}

namespace {

// The rows of a tile share the packing of their keys and values: a tile takes many, as long as all threads have tiles.
// `rows` are the rows of a KV head.
int64_t rows_of_tile(int64_t rows, int64_t kv_heads) {
  constexpr int64_t ENOUGH = 4;  // tiles of a thread
  int64_t most = TILE_ROWS;
  while (2 * most <= kernels().tile_rows && rows / (2 * most) * kv_heads >= ENOUGH * at::get_num_threads()) most *= 2;
  return most;
}

}  // namespace

AttentionPlan plan_attention(int64_t tokens, int64_t q_heads, int64_t kv_heads, int64_t head_dim, int64_t value_dim,
                             const Tensor& qo_indptr, const Tensor& kv_lens, const Tensor& rows,
                             const Tensor& page_table, bool causal) {
  check_index(qo_indptr, at::kInt, 1, "qo_indptr");
  check_index(kv_lens, at::kInt, 1, "kv_lens");
  check_index(rows, at::kLong, 1, "rows");
  check_index(page_table, at::kInt, 2, "page_table");
  check_range(rows, 0, page_table.size(0), "rows");
  const int64_t requests = kv_lens.size(0);
  TORCH_CHECK(qo_indptr.size(0) == requests + 1 && rows.size(0) == requests, "one row and one length per request");
  TORCH_CHECK(kv_heads > 0 && q_heads % kv_heads == 0, "query heads do not group onto the KV heads");
  AttentionPlan plan;
  AttentionArgs& a = plan.args;
  a = {};
  a.page_table = page_table.data_ptr<int32_t>();
  a.rows = rows.data_ptr<int64_t>();
  a.kv_lens = kv_lens.data_ptr<int32_t>();
  a.page_stride = page_table.stride(0);
  a.q_heads = q_heads;
  a.kv_heads = kv_heads;
  a.head_dim = head_dim;
  a.value_dim = value_dim;
  a.causal = causal;
  const int64_t group = q_heads / kv_heads;
  const int64_t tile_queries = std::max<int64_t>(1, rows_of_tile(tokens * group, kv_heads) / group);
  a.tile_rows = tile_queries * group;
  const int32_t* indptr = qo_indptr.data_ptr<int32_t>();
  TORCH_CHECK(indptr[0] == 0 && indptr[requests] == tokens, "qo_indptr must run from 0 to the rows of q");
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t length = a.kv_lens[r], count = indptr[r + 1] - indptr[r];
    TORCH_CHECK(0 <= count && count <= length && length <= page_table.size(1), "request ", r, ": q_len ", count,
                ", kv_len ", length, ", context ", page_table.size(1), " contradict each other");
    for (int64_t i = 0; i < count; i += tile_queries) {
      const int64_t queries = std::min(tile_queries, count - i), first = length - count + i;
      const Tile tile{r, indptr[r] + i, queries, first, causal ? first + queries : length};
      plan.tiles.push_back(tile);
      plan.offsets.push_back(plan.offsets.back() + kv_heads * chunks_of(tile));
      plan.multiplications += queries * q_heads * tile.end * (head_dim + value_dim);
    }
  }
  a.tiles = plan.tiles;
  // Reading the heads of a position together is faster. That counts if only one query uses each key.
  const int64_t enough = int64_t(plan.tiles.size()) == tokens ? 4 : 8;  // tiles of a thread, to keep all evenly busy
  a.heads_of_item = int64_t(plan.tiles.size()) >= enough * at::get_num_threads() ? kv_heads : 1;
  return plan;
}

Tensor flat_attention(const Tensor& q, const Tensor& k_pool, const Tensor& v_pool, const Tensor& qo_indptr,
                      const Tensor& kv_lens, const Tensor& rows, const Tensor& page_table, double scale, bool causal,
                      int64_t window, double logit_cap, const std::optional<Tensor>& sinks) {
  const int type = type_of(q, "q");
  TORCH_CHECK(k_pool.scalar_type() == q.scalar_type() && v_pool.scalar_type() == q.scalar_type(),
              "q, k_pool and v_pool must have one type");
  check_heads(q, "q");
  check_heads(k_pool, "k_pool");
  check_heads(v_pool, "v_pool");
  TORCH_CHECK(q.size(2) == k_pool.size(2) && v_pool.size(1) == k_pool.size(1), "heads of q and the pools do not match");
  Tensor out = at::empty({q.size(0), q.size(1), v_pool.size(2)}, q.options());
  AttentionPlan plan = plan_attention(q.size(0), q.size(1), k_pool.size(1), q.size(2), v_pool.size(2), qo_indptr,
                                      kv_lens, rows, page_table, causal);
  AttentionArgs& a = plan.args;
  a.q = q.data_ptr();
  a.k_pool = k_pool.data_ptr();
  a.v_pool = v_pool.data_ptr();
  a.out = out.data_ptr();
  a.q_stride = q.stride(0);
  a.k_stride = k_pool.stride(0);
  a.v_stride = v_pool.stride(0);
  a.scale = float(scale);
  a.window = window;
  a.logit_cap = float(logit_cap);
  if (sinks) {
    TORCH_CHECK(sinks->scalar_type() == at::kFloat && sinks->is_contiguous() && sinks->numel() == q.size(1),
                "sinks must be float32, dense and as many as query heads");
    a.sinks = sinks->data_ptr<float>();
  }
  const int64_t* offsets = plan.offsets.data();
  std::atomic<int64_t> next{0};
  if (plan.split(at::get_num_threads())) {
    const Tensor partials = at::empty({plan.partials_size()}, q.options().dtype(at::kFloat));
    float* room = partials.data_ptr<float>();
    on_every_thread(offsets[plan.tiles.size()], [&] { kernels().attention[type](a, next, room, offsets); });
    next = 0;
    on_every_thread(plan.items(), [&] { kernels().merge[type](a, next, room, offsets); });
  } else {
    on_every_thread(plan.items(), [&] { kernels().attention[type](a, next, nullptr, offsets); }, plan.multiplications);
  }
  return out;
}

Tensor rms_norm(const Tensor& x, const std::optional<Tensor>& residual, const Tensor& weight, double eps) {
  const int type = type_of(x, "x");
  const int64_t width = x.size(-1);
  TORCH_CHECK(x.is_contiguous() && width % 16 == 0, "x must be dense with a last dimension that 16 divides");
  TORCH_CHECK(weight.scalar_type() == x.scalar_type() && weight.is_contiguous() && weight.numel() == width,
              "weight must be dense, of x's type and width");
  TORCH_CHECK(!residual || (residual->scalar_type() == x.scalar_type() && residual->is_contiguous() &&
                            residual->sizes() == x.sizes()),
              "residual must be like x");
  Tensor out = at::empty(x.sizes(), x.options());
  void* rest = residual ? residual->data_ptr() : nullptr;
  at::parallel_for(0, x.numel() / width, grain(width), [&](int64_t begin, int64_t end) {
    kernels().norm[type](x.data_ptr(), rest, weight.data_ptr(), out.data_ptr(), width, float(eps), begin, end);
  });
  return out;
}

Tensor silu_mul(const Tensor& x) {
  const int type = type_of(x, "x");
  const int64_t width = x.size(-1) / 2;
  TORCH_CHECK(x.is_contiguous() && x.size(-1) % 32 == 0, "x must be dense with a last dimension that 32 divides");
  auto sizes = x.sizes().vec();
  sizes.back() = width;
  Tensor out = at::empty(sizes, x.options());
  at::parallel_for(0, out.numel() / width, grain(width), [&](int64_t begin, int64_t end) {
    kernels().silu_mul[type](x.data_ptr(), out.data_ptr(), width, begin, end);
  });
  return out;
}

void rope(Tensor q, Tensor k, const std::optional<Tensor>& v, const Tensor& positions, const Tensor& cos_sin,
          std::optional<Tensor> k_pool, std::optional<Tensor> v_pool, const std::optional<Tensor>& slots) {
  const int type = type_of(q, "q");
  check_heads(q, "q");
  check_heads(k, "k");
  check_index(positions, at::kLong, 1, "positions");
  check_index(cos_sin, cos_sin.scalar_type(), 2, "cos_sin");
  const bool wide_cache = cos_sin.scalar_type() == at::kFloat;
  const int64_t tokens = q.size(0);
  TORCH_CHECK(k.scalar_type() == q.scalar_type() && k.size(0) == tokens && k.size(2) == q.size(2) &&
                  positions.size(0) == tokens,
              "q, k and positions must have one type and one length");
  TORCH_CHECK((wide_cache || cos_sin.scalar_type() == q.scalar_type()) && cos_sin.is_contiguous() &&
                  cos_sin.size(1) % 32 == 0 && cos_sin.size(1) <= q.size(2),
              "cos_sin must be dense [positions, multiple of 32], float32 or of q's type");
  check_range(positions, 0, cos_sin.size(0), "positions");
  RopeArgs a{q.data_ptr(), k.data_ptr(), nullptr, cos_sin.data_ptr(), nullptr, nullptr,
             positions.data_ptr<int64_t>(), nullptr, q.stride(0), k.stride(0), 0, 0, 0,
             q.size(1), k.size(1), q.size(2), 0, cos_sin.size(1), wide_cache};
  if (k_pool) {
    TORCH_CHECK(v && v_pool && slots, "v, k_pool, v_pool and slots go together");
    for (const Tensor& x : {*v, *k_pool, *v_pool}) {
      check_heads(x, "v, k_pool and v_pool");
      TORCH_CHECK(x.scalar_type() == q.scalar_type() && x.size(1) == k.size(1), "k, v and pools must match");
    }
    check_index(*slots, at::kLong, 1, "slots");
    TORCH_CHECK(v->size(0) == tokens && slots->size(0) == tokens && k_pool->size(2) == k.size(2) &&
                    v_pool->size(2) == v->size(2),
                "k, v, pools and slots must match");
    check_range(*slots, 0, std::min(k_pool->size(0), v_pool->size(0)), "slots");
    a.v = v->data_ptr();
    a.k_pool = k_pool->data_ptr();
    a.v_pool = v_pool->data_ptr();
    a.slots = slots->data_ptr<int64_t>();
    a.v_stride = v->stride(0);
    a.k_slot = k_pool->stride(0);
    a.v_slot = v_pool->stride(0);
    a.value_dim = v->size(2);
  }
  at::parallel_for(0, tokens, grain((a.q_heads + a.kv_heads) * a.head_dim),
                   [&](int64_t begin, int64_t end) { kernels().rope[type](a, begin, end); });
}

Rules rules_of(const Tensor& temperatures, const std::optional<Tensor>& top_ks, const std::optional<Tensor>& top_ps,
               const std::optional<Tensor>& min_ps, int64_t rows) {
  for (const auto& rule : {std::make_optional(temperatures), top_ks, top_ps, min_ps})
    TORCH_CHECK(!rule || (rule->is_contiguous() && rule->numel() == rows), "every rule needs one value per row");
  return {temperatures.data_ptr<float>(), top_ks ? top_ks->data_ptr<int64_t>() : nullptr,
          top_ps ? top_ps->data_ptr<float>() : nullptr, min_ps ? min_ps->data_ptr<float>() : nullptr};
}

Tensor target_probs(const Tensor& logits, const Tensor& temperatures, const std::optional<Tensor>& top_ks,
                    const std::optional<Tensor>& top_ps, const std::optional<Tensor>& min_ps) {
  const int type = type_of(logits, "logits");
  TORCH_CHECK(logits.dim() == 2 && logits.stride(1) == 1 && logits.size(1) < INT32_MAX, "logits must be [rows, vocab]");
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  Tensor out = at::empty({rows, vocab}, logits.options().dtype(at::kFloat));
  const ProbsArgs a{logits.data_ptr(), out.data_ptr<float>(), rules_of(temperatures, top_ks, top_ps, min_ps, rows),
                    rows, vocab, logits.stride(0)};
  std::atomic<int64_t> next{0};
  on_every_thread(rows, [&] { kernels().target_probs[type](a, next); });
  return out;
}

Tensor argmax(const Tensor& x) {
  const int type = type_of(x, "x");
  TORCH_CHECK(x.dim() == 2 && x.stride(1) == 1 && x.size(1) > 0, "x must be [rows, columns]");
  Tensor out = at::empty({x.size(0)}, x.options().dtype(at::kLong));
  at::parallel_for(0, x.size(0), grain(x.size(1)), [&](int64_t begin, int64_t end) {
    kernels().argmax[type](x.data_ptr(), out.data_ptr<int64_t>(), x.size(1), x.stride(0), begin, end);
  });
  return out;
}

// Verifies the drafts [R, gamma] of the `requests` [M] in rows of probs: how many each keeps, and the token after them.
std::tuple<Tensor, Tensor> accept_sampled(const Tensor& probs, const Tensor& requests, const Tensor& first_rows,
                                          const Tensor& verify_lens, const Tensor& tokens, const Tensor& uniforms,
                                          const std::optional<Tensor>& q, const std::optional<Tensor>& vocab,
                                          const Tensor& keys, bool by_block) {
  TORCH_CHECK(probs.dim() == 2 && probs.size(1) > 0 && tokens.dim() == 2, "probs and tokens must be matrices");
  const int64_t count = requests.numel(), all = tokens.size(0), gamma = tokens.size(1), width = probs.size(1);
  const int64_t columns = vocab ? vocab->numel() : width;
  check_dense(probs, at::kFloat, probs.sizes(), "probs");
  check_dense(requests, at::kLong, {count}, "requests");
  check_dense(first_rows, at::kLong, {all}, "first_rows");
  check_dense(verify_lens, at::kLong, {all}, "verify_lens");
  check_dense(tokens, at::kLong, {all, gamma}, "tokens");
  check_dense(uniforms, at::kDouble, {all, gamma}, "uniforms");
  check_dense(keys, at::kLong, {all}, "keys");
  if (q) check_dense(*q, at::kFloat, {all, gamma, columns}, "q");
  if (vocab) {
    check_dense(*vocab, at::kLong, {columns}, "vocab");
    check_range(*vocab, 0, width, "vocab");
  }
  check_range(requests, 0, all, "requests");
  check_range(verify_lens, 0, gamma + 1, "verify_lens");
  Tensor kept = at::empty({count}, requests.options()), last = at::empty({count}, requests.options());
  const AcceptArgs a{probs.data_ptr<float>(), q ? q->data_ptr<float>() : nullptr, requests.data_ptr<int64_t>(),
                     first_rows.data_ptr<int64_t>(), verify_lens.data_ptr<int64_t>(), tokens.data_ptr<int64_t>(),
                     vocab ? vocab->data_ptr<int64_t>() : nullptr, keys.data_ptr<int64_t>(),
                     uniforms.data_ptr<double>(), kept.data_ptr<int64_t>(), last.data_ptr<int64_t>(),
                     count, gamma, width, columns, by_block};
  for (int64_t i = 0; i < count; ++i) {
    const int64_t r = a.requests[i], length = a.lens[r];
    TORCH_CHECK(a.first_rows[r] >= 0 && a.first_rows[r] + length < probs.size(0), "probs must have a row per token");
    for (int64_t k = 0; k < length; ++k) {
      const int64_t token = a.tokens[r * gamma + k];
      TORCH_CHECK(token >= 0 && token < width, "verified tokens must be tokens of probs");
    }
  }
  std::atomic<int64_t> next{0};
  on_every_thread(count, [&] { kernels().accept_sampled(a, next); });
  return {kept, last};
}

TORCH_LIBRARY(outrider, m) {
  m.def("flat_attention(Tensor q, Tensor k_pool, Tensor v_pool, Tensor qo_indptr, Tensor kv_lens, Tensor rows, "
        "Tensor page_table, float scale, bool causal, int window, float logit_cap, Tensor? sinks=None) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor(a!)? residual, Tensor weight, float eps) -> Tensor");
  m.def("silu_mul(Tensor x) -> Tensor");
  m.def("rope(Tensor(a!) q, Tensor(b!) k, Tensor? v, Tensor positions, Tensor cos_sin, Tensor(c!)? k_pool, "
        "Tensor(d!)? v_pool, Tensor? slots) -> ()");
  m.def("target_probs(Tensor logits, Tensor temperatures, Tensor? top_ks, Tensor? top_ps, Tensor? min_ps) -> Tensor");
  m.def("argmax(Tensor x) -> Tensor");
  m.def("accept_sampled(Tensor probs, Tensor requests, Tensor first_rows, Tensor verify_lens, Tensor tokens, "
        "Tensor uniforms, Tensor? q, Tensor? vocab, Tensor keys, bool by_block) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(outrider, CPU, m) {
  m.impl("flat_attention", flat_attention);
  m.impl("rms_norm", rms_norm);
  m.impl("silu_mul", silu_mul);
  m.impl("rope", rope);
  m.impl("target_probs", target_probs);
  m.impl("argmax", argmax);
  m.impl("accept_sampled", accept_sampled);
}

}  // namespace outrider
