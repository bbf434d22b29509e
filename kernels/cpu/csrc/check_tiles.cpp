// A program that asks whether the tile unit works here as the kernels expect: products by it, on two threads at once,
// have the bits of those by its emulation. proof.py runs it in a process of its own, since a wrong shape would be an
// illegal instruction. Exits with 0 if they have, 1 if not, 2 if the processor or the system gives no tiles.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <utility>

#include "kernels.h"
#include "tiles_allowed.h"

namespace {

// Memory that ends where a page ends, with nothing behind it.
uint8_t* before_a_guard(int64_t bytes) {
  const int64_t page = sysconf(_SC_PAGESIZE), pages = (bytes + page - 1) / page;
  void* start = mmap(nullptr, (pages + 1) * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED || mprotect(static_cast<uint8_t*>(start) + pages * page, page, PROT_NONE)) {
    std::perror("guarded memory");
    std::exit(1);
  }
  return static_cast<uint8_t*>(start) + pages * page - bytes;
}

std::mt19937 generator;

// Numbers of ordinary size, and some so small that products of them are denormal.
uint16_t random_bf16() {
  const float number = std::normal_distribution<float>()(generator) * (generator() % 16 ? 1.f : 1e-20f);
  uint32_t bits;
  std::memcpy(&bits, &number, 4);
  return bits >> 16;
}

// The product of both implementations, each by two threads that share the panels.
bool same(const LinearArgs& a, Function<const LinearArgs&, int64_t, int64_t> (&implementations)[2]) {
  const int64_t items = a.panels * ((a.rows + a.row_group - 1) / a.row_group), bytes = a.rows * a.outputs * 2;
  uint8_t* outs[2];
  for (int i : {0, 1}) {
    LinearArgs mine = a;
    mine.out = outs[i] = before_a_guard(bytes);
    std::thread other([&] { implementations[i](mine, 0, items / 2); });
    implementations[i](mine, items / 2, items);
    other.join();
  }
  return std::memcmp(outs[0], outs[1], bytes) == 0;
}

bool check(int64_t rows, int64_t depth, int64_t outputs) {
  const int64_t panels = (outputs + PANEL - 1) / PANEL;
  auto* x = reinterpret_cast<uint16_t*>(before_a_guard(rows * depth * 2));
  auto* bias = reinterpret_cast<float*>(before_a_guard(panels * PANEL * 4));
  std::vector<uint16_t> weight(outputs * depth);
  for (int64_t i = 0; i < rows * depth; ++i) x[i] = random_bf16();
  for (uint16_t& w : weight) w = random_bf16();
  for (int64_t i = 0; i < panels * PANEL; ++i) bias[i] = float(i % 7);
  uint8_t* packed = before_a_guard(panels * PANEL * depth * 2);
  amx_emulated::kernels.pack(weight.data(), packed, outputs, depth, 0, panels);
  const LinearArgs a{x, packed, rows % 2 ? bias : nullptr, nullptr, depth, rows, 96, depth, outputs, panels};
  Function<const LinearArgs&, int64_t, int64_t> linear[] = {amx::kernels.linear, amx_emulated::kernels.linear};
  bool fine = same(a, linear);
  for (int kind = 0; kind < BLOCK_KINDS; ++kind) {
    const BlockFormat& format = FORMATS[kind];
    const int64_t spans = depth / (BLOCK * format.span);
    if (depth % (BLOCK * format.span)) continue;
    std::vector<uint8_t> raw(outputs * spans * format.file);
    for (uint8_t& byte : raw) byte = 0x10 + generator() % 0x20;  // a small number wherever a scale may be
    LinearArgs blocks = a;
    blocks.packed = packed = before_a_guard(panels * PANEL * spans * format.bytes());
    amx_emulated::kernels.pack_blocks[kind](raw.data(), packed, outputs, depth, 0, panels);
    Function<const LinearArgs&, int64_t, int64_t> both[] = {amx::kernels.block_linear[1][kind],
                                                            amx_emulated::kernels.block_linear[1][kind]};
    fine = same(blocks, both) && fine;
  }
  if (!fine) std::fprintf(stderr, "%ld rows of %ld by %ld outputs differ\n", rows, depth, outputs);
  return fine;
}

}  // namespace

int main() {
  if (!tiles_allowed()) {
    std::fprintf(stderr, "no tile unit may be used here\n");
    return 2;
  }
  bool fine = true;
  for (int64_t rows : {1, 5, 16, 17, 33, 100})
    for (auto [depth, outputs] : {std::pair<int64_t, int64_t>{256, 192}, {70, 100}, {2, 1}})
      fine = check(rows, depth, outputs) && fine;
  return fine ? 0 : 1;
}
