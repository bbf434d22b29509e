// Compiled once per instruction set, with -DISA=<namespace> and that set's flags.
#include "attention.h"
#include "blocks.h"
#include "draw_drafts.h"
#include "elementwise.h"
#include "gated_delta.h"
#include "int_blocks.h"
#include "linear.h"
#include "sampling.h"

namespace ISA {

template <std::size_t... KIND>
constexpr Kernels table(std::index_sequence<KIND...>) {
  return {
      {attention<float, VectorProducts>, attention<bf16, VectorProducts>},
      {merge<float, VectorProducts>, merge<bf16, VectorProducts>},
      {norm<float>, norm<bf16>},
      {silu_mul<float>, silu_mul<bf16>},
      {add_bias<float>, add_bias<bf16>},
      {rope<float>, rope<bf16>},
      {pack<float>, pack<bf16>},
      {linear<float>, linear<bf16>},
      {pack_blocks<BlockKind(KIND)>...},
      {{block_linear<float, BlockKind(KIND)>...}, {block_linear<bf16, BlockKind(KIND)>...}},
      {expand_rows<BlockKind(KIND)>...},
      {{round_rows<float, NarrowBlock>, round_rows<float, WideBlock>},
       {round_rows<bf16, NarrowBlock>, round_rows<bf16, WideBlock>}},
      {pack_int_blocks<BlockKind(KIND)>...},
      {{int_block_linear<float, BlockKind(KIND)>...}, {int_block_linear<bf16, BlockKind(KIND)>...}},
      {{int_block_linear<float, BlockKind(KIND)>...}, {int_block_linear<bf16, BlockKind(KIND)>...}},
      1,
      {target_probs<float>, target_probs<bf16>},
      {argmax<float>, argmax<bf16>},
      {draw_tokens<float>, draw_tokens<bf16>},
      gumbel_argmax,
      accept_sampled,
      {draw_drafts<float>, draw_drafts<bf16>},
      {likeliest<float>, likeliest<bf16>},
      {convolve_blocks<float>, convolve_blocks<bf16>},
      {convolve<float>, convolve<bf16>},
      {delta_inputs<float>, delta_inputs<bf16>},
      {gated_delta<float>, gated_delta<bf16>},
      replay_delta,
      W == 16 ? 4 * TILE_ROWS : TILE_ROWS,  // fits the second cache
      {0, 0},
  };
}
extern const Kernels kernels = table(std::make_index_sequence<BLOCK_KINDS>());

}  // namespace ISA
