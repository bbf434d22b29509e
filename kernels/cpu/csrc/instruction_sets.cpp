// The table of functions for the arithmetic of all operations: one instruction set, since bits and packed weights
// differ between sets.
#include <torch/library.h>

#include <algorithm>
#include <string>

#include "ops.h"
#include "tiles_allowed.h"

namespace outrider {
namespace {

constexpr int64_t ROWS_FOR_TILES = 17;  // of integer products; below that vectors are as fast

struct InstructionSet {
  std::string name;
  Kernels kernels;
};

// many_rows: integer products use tiles from this many rows on; `rest` takes fewer rows only if it lays weights out
// alike.
Kernels with_tiles(Kernels rest, const TileKernels& tiles, int64_t many_rows) {
  rest.attention[1] = tiles.attention;
  rest.merge[1] = tiles.merge;
  rest.pack[1] = tiles.pack;
  rest.linear[1] = tiles.linear;
  std::copy_n(tiles.pack_blocks, BLOCK_KINDS, rest.pack_blocks);
  rest.tile_rows = 4 * TILE_ROWS;
  rest.cache_bytes_for_rows[1] = 2 << 20;
  std::copy_n(tiles.pack_int_blocks, BLOCK_KINDS, rest.pack_int_blocks);
  rest.many_rows = many_rows;
  for (int type : {0, 1}) {
    std::copy_n(tiles.block_linear[type], BLOCK_KINDS, rest.block_linear[type]);
    std::copy_n(tiles.int_block_linear[type], BLOCK_KINDS, rest.int_blocks_many_rows[type]);
  }
  return rest;
}

// Instruction sets that this processor runs, the default first. Tiles are never the default: see proof.py.
const std::vector<InstructionSet>& instruction_sets() {
  static const std::vector<InstructionSet> all = [] {
    __builtin_cpu_init();
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const bool narrow = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
    const bool middle = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("f16c");
    std::vector<InstructionSet> runs;
    if (wide && narrow) runs.push_back({"avx512bf16", avx512bf16::kernels});
    if (wide) runs.push_back({"avx512", avx512::kernels});
    if (middle && __builtin_cpu_supports("avxvnni")) runs.push_back({"avxvnni", avxvnni::kernels});
    if (middle) runs.push_back({"avx2", avx2::kernels});
    runs.push_back({"scalar", scalar::kernels});
#if defined(WITH_AMX)
    if (wide && narrow && tiles_allowed()) runs.push_back({"amx", with_tiles(avx512bf16::kernels, amx::kernels, ROWS_FOR_TILES)});
#endif
    if (middle) runs.push_back({"amx_emulated", with_tiles(runs.front().kernels, amx_emulated::kernels, 0)});
    return runs;
  }();
  return all;
}

std::atomic<const InstructionSet*> chosen{nullptr};

const InstructionSet& current() {
  if (const InstructionSet* known = chosen.load(std::memory_order_relaxed)) return *known;
  const InstructionSet& first = instruction_sets().front();
  chosen = &first;
  return first;
}

std::string instruction_set() { return current().name; }

std::vector<std::string> names() {
  std::vector<std::string> names;
  for (const InstructionSet& set : instruction_sets()) names.push_back(set.name);
  return names;
}

// Must run before the first packing: each instruction set packs weights in its own way.
void use_instruction_set(const std::string& name) {
  const auto& all = instruction_sets();
  const auto found = std::find_if(all.begin(), all.end(), [&](const InstructionSet& set) { return set.name == name; });
  TORCH_CHECK(found != all.end(), "this processor does not run the instruction set ", name, ", only ", names());
  chosen = &*found;
}

}  // namespace

const Kernels& kernels() { return current().kernels; }

TORCH_LIBRARY_FRAGMENT(outrider, m) {
  m.def("instruction_set() -> str", instruction_set);
  m.def("instruction_sets() -> str[]", names);
  m.def("use_instruction_set(str name) -> ()", use_instruction_set);
}

}  // namespace outrider
