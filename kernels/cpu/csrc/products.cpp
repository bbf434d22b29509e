// Torch operations of the matrix products: checks and threads. linear.h, blocks.h and int_blocks.h have the arithmetic.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>

#include "weight_memory.h"

namespace outrider {

// weight [outputs, depth] -> panels, a flat tensor of the same type for packed_linear alone.
Tensor pack_linear(const Tensor& weight) {
  const int type = type_of(weight, "weight");
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous() && weight.size(1) % 2 == 0,
              "weight must be dense [outputs, even depth], got ", weight.sizes());
  const int64_t panels = (weight.size(0) + PANEL - 1) / PANEL;
  Tensor packed = empty_weight(panels * PANEL * weight.size(1), weight.options());
  at::parallel_for(0, panels, 8, [&](int64_t begin, int64_t end) {
    kernels().pack[type](weight.data_ptr(), packed.data_ptr(), weight.size(0), weight.size(1), begin, end);
  });
  return packed;
}

// Multiplies x by packed weights of any layout, by `function`; rounded: the rows of x as rounded bytes.
Tensor multiply(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t outputs,
                Function<const LinearArgs&, int64_t, int64_t> function, const std::optional<Tensor>& rounded = {}) {
  const int64_t depth = x.size(-1), panels = (outputs + PANEL - 1) / PANEL;
  if (bias) check_dense(*bias, at::kFloat, {panels * PANEL}, "bias, padded to whole panels,");
  auto sizes = x.sizes().vec();
  sizes.back() = outputs;
  Tensor out = at::empty(sizes, x.options());
  const LinearArgs a{rounded ? rounded->data_ptr() : x.data_ptr(), packed.data_ptr(),
                     bias ? bias->data_ptr<float>() : nullptr, out.data_ptr(), rounded ? rounded->size(1) : depth,
                     x.numel() / depth, even_row_group(x.numel() / depth, panels, at::get_num_threads()), depth,
                     outputs, panels, outputs};
  in_ranges(panels * ((a.rows + a.row_group - 1) / a.row_group),
            [&](int64_t begin, int64_t end) { function(a, begin, end); }, a.rows * depth * outputs);
  return out;
}

// The kind's number without ROUNDED.
int64_t plain_kind(int64_t kind) {
  const int64_t plain = kind & ~ROUNDED;
  TORCH_CHECK(0 <= plain && plain < BLOCK_KINDS, "there is no kind ", kind, " of blocks");
  return plain;
}

const BlockFormat& format_of(const Tensor& raw, int64_t kind) {
  const BlockFormat& format = FORMATS[plain_kind(kind)];
  TORCH_CHECK(raw.scalar_type() == at::kByte && raw.dim() == 2 && raw.is_contiguous() && raw.size(1) % format.file == 0,
              "blocks must be dense bytes [outputs, multiple of ", format.file, "], got ", raw.sizes());
  return format;
}

// raw [outputs, bytes of a row], the blocks of the checkpoint -> the same numbers in panels for packed_linear of the
// same kind alone.
Tensor pack_blocks(const Tensor& raw, int64_t kind) {
  const BlockFormat& format = format_of(raw, kind);
  const int64_t outputs = raw.size(0), panels = (outputs + PANEL - 1) / PANEL, spans = raw.size(1) / format.file;
  Tensor packed = empty_weight(panels * PANEL * spans * format.bytes(), raw.options());
  const auto& functions = kind & ROUNDED ? kernels().pack_int_blocks : kernels().pack_blocks;
  at::parallel_for(0, panels, 8, [&](int64_t begin, int64_t end) {
    functions[plain_kind(kind)](raw.data_ptr<uint8_t>(), packed.data_ptr<uint8_t>(), outputs,
                                spans * format.span * BLOCK, begin, end);
  });
  return packed;
}

// x [..., depth] as rows of bytes for integer products [rows, bytes], in blocks of 256 (wide) or 32.
Tensor round_rows(const Tensor& x, bool wide) {
  const int type = type_of(x, "x");
  const int64_t depth = x.size(-1), rows = x.numel() / depth;
  Tensor out = at::empty({rows, rounded_bytes(depth, wide)}, x.options().dtype(at::kByte));
  at::parallel_for(0, rows, grain(depth), [&](int64_t begin, int64_t end) {
    kernels().round_rows[type][wide](x.data_ptr(), out.data_ptr(), depth, begin, end);
  });
  return out;
}

// packed: blocks of this kind or, if it is negative, panels of pack_linear.
Tensor packed_linear(const Tensor& x, const Tensor& packed, int64_t kind, const std::optional<Tensor>& bias,
                     int64_t outputs) {
  const int type = type_of(x, "x");
  const int64_t depth = x.size(-1), numbers = (outputs + PANEL - 1) / PANEL * PANEL * depth;
  if (kind < 0) {
    TORCH_CHECK(x.is_contiguous() && packed.scalar_type() == x.scalar_type() && packed.numel() == numbers,
                "x must be dense and match the packed weight in type and depth");
    return multiply(x, packed, bias, outputs, kernels().linear[type]);
  }
  const int64_t plain = plain_kind(kind), covered = FORMATS[plain].span * BLOCK;
  TORCH_CHECK(x.is_contiguous() && packed.scalar_type() == at::kByte && depth > 0 && depth % covered == 0 &&
                  packed.numel() == numbers / covered * FORMATS[plain].bytes(),
              "x must be dense and match the packed blocks in depth");
  if (!(kind & ROUNDED)) return multiply(x, packed, bias, outputs, kernels().block_linear[type][plain]);
  return multiply(x, packed, bias, outputs, int_block_product(type, plain, x.numel() / depth),
                  round_rows(x, rounds_wide(plain)));
}

// raw: as in pack_blocks. Returns its `rows` [N] as bf16 [N, depth].
Tensor expand_rows(const Tensor& raw, const Tensor& rows, int64_t kind) {
  const BlockFormat& format = format_of(raw, kind);
  check_index(rows, at::kLong, 1, "rows");
  check_range(rows, 0, raw.size(0), "rows");
  const int64_t depth = raw.size(1) / format.file * format.span * BLOCK;
  Tensor out = at::empty({rows.size(0), depth}, raw.options().dtype(at::kBFloat16));
  at::parallel_for(0, rows.size(0), grain(depth), [&](int64_t begin, int64_t end) {
    kernels().expand_rows[kind](raw.data_ptr<uint8_t>(), rows.data_ptr<int64_t>(), out.data_ptr(), depth, begin, end);
  });
  return out;
}

TORCH_LIBRARY_FRAGMENT(outrider, m) {
  m.def("pack_linear(Tensor weight) -> Tensor");
  m.def("packed_linear(Tensor x, Tensor packed, int kind, Tensor? bias, int outputs) -> Tensor");
  m.def("pack_blocks(Tensor raw, int kind) -> Tensor");
  m.def("expand_rows(Tensor raw, Tensor rows, int kind) -> Tensor");
}

TORCH_LIBRARY_IMPL(outrider, CPU, m) {
  m.impl("pack_linear", pack_linear);
  m.impl("packed_linear", packed_linear);
  m.impl("pack_blocks", pack_blocks);
  m.impl("expand_rows", expand_rows);
}

}  // namespace outrider
