// Compiled with -DISA=amx for the processor's tile unit, and with -DISA=amx_emulated for its emulation in software.
#include "int_tiles.h"
#include "tile_attention.h"
#include "tile_blocks.h"
#include "tiles.h"

namespace ISA {

template <std::size_t... KIND>
constexpr TileKernels all_kinds(std::index_sequence<KIND...>) {
  return {attention<bf16, TileProducts>,
          merge<bf16, TileProducts>,
          pack<bf16, HALF>,
          tile_linear,
          {pack_blocks<BlockKind(KIND), CodePlanes<BlockKind(KIND)>>...},
          {{float_block_linear<BlockKind(KIND)>...}, {tile_block_linear<BlockKind(KIND)>...}},
          {pack_int_blocks<BlockKind(KIND)>...},
          {{int_tile_linear<float, BlockKind(KIND)>...}, {int_tile_linear<bf16, BlockKind(KIND)>...}}};
}

extern constinit const TileKernels kernels = all_kinds(std::make_index_sequence<BLOCK_KINDS>());

}  // namespace ISA
