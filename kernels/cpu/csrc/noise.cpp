// Random numbers of streams, and tokens drawn with them. See kernels/noise.py.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>

#include "ops.h"

namespace {

// SplitMix64's finaliser.
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

uint64_t number(uint64_t key, int64_t index) { return mix(key + GOLDEN * (uint64_t(index) + 1)); }

// In (0, 1): the middles of 2^52 equal parts.
double uniform(uint64_t bits) { return double((bits >> 11) | 1) * 0x1p-53; }

}  // namespace

double exponential_noise(uint64_t key, int64_t token) {
  int exponent;
  double x = std::frexp(1 - uniform(number(key, token)), &exponent);
  if (x < 0.7071067811865476) {
    x *= 2;
    --exponent;
  }
  const double s = (x - 1) / (x + 1), z = s * s;  // log x = 2 artanh s
  double series = 2. / 21;
  for (int i = 19; i > 0; i -= 2) series = series * z + 2. / i;
  return -(exponent * 0.6931471805599453 + s * series);
}

namespace outrider {
namespace {

const int64_t* integers(const Tensor& x, at::IntArrayRef sizes, const char* name) {
  check_dense(x, at::kLong, sizes, name);
  return x.data_ptr<int64_t>();
}

Tensor streams(const Tensor& seeds, const Tensor& positions, int64_t purpose) {
  Tensor out = at::empty(seeds.sizes(), seeds.options());
  const auto *seed = integers(seeds, seeds.sizes(), "seeds"),
             *position = integers(positions, seeds.sizes(), "positions");
  for (int64_t i = 0; i < seeds.numel(); ++i)
    out.data_ptr<int64_t>()[i] =
        mix(mix(uint64_t(seed[i]) + GOLDEN * uint64_t(purpose)) + GOLDEN * uint64_t(position[i]));
  return out;
}

Tensor substreams(const Tensor& keys, int64_t count) {
  const int64_t* key = integers(keys, {keys.numel()}, "keys");
  Tensor out = at::empty({keys.numel(), count}, keys.options());
  for (int64_t i = 0; i < out.numel(); ++i) out.data_ptr<int64_t>()[i] = number(key[i / count], i % count);
  return out;
}

Tensor uniforms(const Tensor& keys, int64_t count) {
  const int64_t* key = integers(keys, {keys.numel()}, "keys");
  Tensor out = at::empty({keys.numel(), count}, keys.options().dtype(at::kDouble));
  for (int64_t i = 0; i < out.numel(); ++i) out.data_ptr<double>()[i] = uniform(number(key[i / count], i % count));
  return out;
}

// The noise of tokens 0 .. count - 1 in each stream.
Tensor exponentials(const Tensor& keys, int64_t count) {
  const int64_t* key = integers(keys, {keys.numel()}, "keys");
  Tensor out = at::empty({keys.numel(), count}, keys.options().dtype(at::kDouble));
  for (int64_t i = 0; i < out.numel(); ++i) out.data_ptr<double>()[i] = exponential_noise(key[i / count], i % count);
  return out;
}

Tensor gumbel_argmax(const Tensor& weights, const Tensor& keys, const std::optional<Tensor>& tokens) {
  TORCH_CHECK(weights.scalar_type() == at::kFloat && weights.dim() == 2 && weights.is_contiguous(),
              "weights must be dense float32 [rows, columns]");
  const int64_t rows = weights.size(0), columns = weights.size(1);
  const int64_t *key = integers(keys, {rows}, "keys"),
                *token = tokens ? integers(*tokens, {columns}, "tokens") : nullptr;
  Tensor out = at::empty({rows}, keys.options());
  at::parallel_for(0, rows, grain(columns), [&](int64_t begin, int64_t end) {
    kernels().gumbel_argmax(weights.data_ptr<float>(), key, token, out.data_ptr<int64_t>(), columns, begin, end);
  });
  return out;
}

// The token of the largest log p + Gumbel noise in each of the given rows of the logits.
Tensor draw_tokens(const Tensor& logits, const Tensor& rows, const Tensor& temperatures,
                   const std::optional<Tensor>& top_ks, const std::optional<Tensor>& top_ps,
                   const std::optional<Tensor>& min_ps, const Tensor& keys) {
  const int type = type_of(logits, "logits");
  TORCH_CHECK(logits.dim() == 2 && logits.stride(1) == 1 && logits.size(1) > 0 && logits.size(1) < INT32_MAX,
              "logits must be [rows, vocab]");
  const int64_t count = rows.numel();
  check_range(rows, 0, logits.size(0), "rows");
  Tensor out = at::empty({count}, keys.options());
  const DrawArgs a{logits.data_ptr(), integers(rows, {count}, "rows"), integers(keys, {count}, "keys"),
                   out.data_ptr<int64_t>(), rules_of(temperatures, top_ks, top_ps, min_ps, count), count,
                   logits.size(1), logits.stride(0)};
  std::atomic<int64_t> next{0};
  on_every_thread(count, [&] { kernels().draw_tokens[type](a, next); });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(outrider, m) {
  m.def("streams(Tensor seeds, Tensor positions, int purpose) -> Tensor");
  m.def("substreams(Tensor keys, int count) -> Tensor");
  m.def("uniforms(Tensor keys, int count) -> Tensor");
  m.def("exponentials(Tensor keys, int count) -> Tensor");
  m.def("gumbel_argmax(Tensor weights, Tensor keys, Tensor? tokens) -> Tensor");
  m.def("draw_tokens(Tensor logits, Tensor rows, Tensor temperatures, Tensor? top_ks, Tensor? top_ps, Tensor? min_ps, "
        "Tensor keys) -> Tensor");
}

TORCH_LIBRARY_IMPL(outrider, CPU, m) {
  m.impl("streams", streams);
  m.impl("substreams", substreams);
  m.impl("uniforms", uniforms);
  m.impl("exponentials", exponentials);
  m.impl("gumbel_argmax", gumbel_argmax);
  m.impl("draw_tokens", draw_tokens);
}

}  // namespace outrider
