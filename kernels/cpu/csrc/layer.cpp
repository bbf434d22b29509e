// One layer of a Llama-like decoder in one call: otherwise ten operations with Python between them, which costs as much
// as a third of the arithmetic when one token is decoded.
#include <torch/library.h>

#include "ops.h"

namespace outrider {
namespace {

// weights: four, q|k|v, out, gate|up, down. Codes of int8_linear beside their scales; or, without scales, each what its
// kind says: blocks of block_linear or, where that is negative, panels of packed_linear.
// x: what the layer before put out; none for the first layer, whose input is the residual alone.
Tensor decoder_layer(const std::optional<Tensor>& x, const Tensor& residual, const Tensor& positions,
                     const Tensor& cos_sin, const Tensor& k_pool, const Tensor& v_pool, const Tensor& slots,
                     const Tensor& qo_indptr, const Tensor& kv_lens, const Tensor& rows, const Tensor& page_table,
                     at::TensorList weights, at::IntArrayRef kinds, at::TensorList scales, at::TensorList norms,
                     at::IntArrayRef outputs, double eps, double scale, bool causal, int64_t window,
                     double logit_cap) {
  TORCH_CHECK(weights.size() == 4 && kinds.size() == 4 && outputs.size() == 4 &&
                  (scales.empty() || scales.size() == 4) && norms.size() == 2,
              "a layer has four products and two norms");
  TORCH_CHECK(k_pool.dim() == 3 && v_pool.dim() == 3 && residual.dim() == 2,
              "pools are [slots, heads, width], rows [N, H]");
  const auto multiply = [&](const Tensor& input, int which) {
    if (kinds[which] >= 0) return block_linear(input, weights[which], kinds[which], std::nullopt, outputs[which]);
    if (scales.empty()) return packed_linear(input, weights[which], std::nullopt, outputs[which]);
    return int8_linear(input, weights[which], scales[which], std::nullopt, outputs[which]);
  };
  const int64_t tokens = residual.size(0), heads = k_pool.size(1), width = k_pool.size(2), value_width = v_pool.size(2);
  const int64_t query = outputs[0] - heads * (width + value_width);
  TORCH_CHECK(query > 0 && query % width == 0, "outputs of q|k|v are ", outputs[0],
              ", which the pool's heads do not fit");
  const Tensor qkv = multiply(x ? rms_norm(*x, residual, norms[0], eps) : rms_norm(residual, {}, norms[0], eps), 0);
  const Tensor q = qkv.as_strided({tokens, query / width, width}, {outputs[0], width, 1}, 0);
  const Tensor k = qkv.as_strided({tokens, heads, width}, {outputs[0], width, 1}, query);
  const Tensor v = qkv.as_strided({tokens, heads, value_width}, {outputs[0], value_width, 1}, query + heads * width);
  rope(q, k, v, positions, cos_sin, k_pool, v_pool, slots);
  const Tensor seen =
      flat_attention(q, k_pool, v_pool, qo_indptr, kv_lens, rows, page_table, scale, causal, window, logit_cap);
  const Tensor attended = multiply(seen.view({tokens, seen.size(1) * seen.size(2)}), 1);
  return multiply(silu_mul(multiply(rms_norm(attended, residual, norms[1], eps), 2)), 3);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(outrider, m) {
  m.def(
      "decoder_layer(Tensor? x, Tensor(a!) residual, Tensor positions, Tensor cos_sin, Tensor(b!) k_pool, "
      "Tensor(c!) v_pool, Tensor slots, Tensor qo_indptr, Tensor kv_lens, Tensor rows, Tensor page_table, "
      "Tensor[] weights, int[] kinds, Tensor[] scales, Tensor[] norms, int[] outputs, float eps, float scale, bool "
      "causal, "
      "int window, float logit_cap) -> Tensor");
}

TORCH_LIBRARY_IMPL(outrider, CPU, m) { m.impl("decoder_layer", decoder_layer); }

}  // namespace outrider
