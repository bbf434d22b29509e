// Checks the tile unit: its products and attention, on two threads at once, must have the bits of its emulation.
// proof.py runs this in a process of its own, since a wrong shape would be an illegal instruction. Exits with 0 if the
// bits are equal, 1 if not, 2 if the processor or the system gives no tiles.
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

// Memory that ends at the end of a page; the next page is unmapped.
uint8_t* guarded(int64_t bytes) {
  const int64_t page = sysconf(_SC_PAGESIZE), pages = (bytes + page - 1) / page;
  void* start = mmap(nullptr, (pages + 1) * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED || mprotect(static_cast<uint8_t*>(start) + pages * page, page, PROT_NONE)) {
    std::perror("guarded memory");
    std::exit(1);
  }
  return static_cast<uint8_t*>(start) + pages * page - bytes;
}

std::mt19937 generator;

// Numbers of ordinary size, and some so small that their products are denormal.
uint16_t random_bf16() {
  const float number = std::normal_distribution<float>()(generator) * (generator() % 16 ? 1.f : 1e-20f);
  uint32_t bits;
  std::memcpy(&bits, &number, 4);
  return bits >> 16;
}

// Compares both products, each by two threads that share the panels.
bool same(const LinearArgs& a, Function<const LinearArgs&, int64_t, int64_t> (&implementations)[2]) {
  const int64_t items = a.panels * ((a.rows + a.row_group - 1) / a.row_group), bytes = a.rows * a.outputs * 2;
  uint8_t* outs[2];
  for (int i : {0, 1}) {
    LinearArgs mine = a;
    mine.out = outs[i] = guarded(bytes);
    std::thread other([&] { implementations[i](mine, 0, items / 2); });
    implementations[i](mine, items / 2, items);
    other.join();
  }
  return std::memcmp(outs[0], outs[1], bytes) == 0;
}

bool check(int64_t rows, int64_t depth, int64_t outputs) {
  const int64_t panels = (outputs + PANEL - 1) / PANEL;
  auto* x = reinterpret_cast<uint16_t*>(guarded(rows * depth * 2));
  auto* bias = reinterpret_cast<float*>(guarded(panels * PANEL * 4));
  std::vector<uint16_t> weight(outputs * depth);
  for (int64_t i = 0; i < rows * depth; ++i) x[i] = random_bf16();
  for (uint16_t& w : weight) w = random_bf16();
  for (int64_t i = 0; i < panels * PANEL; ++i) bias[i] = float(i % 7);
  uint8_t* packed = guarded(panels * PANEL * depth * 2);
  amx_emulated::kernels.pack(weight.data(), packed, outputs, depth, 0, panels);
  const LinearArgs a{x, packed, rows % 2 ? bias : nullptr, nullptr, depth, rows, 96, depth, outputs, panels, outputs};
  Function<const LinearArgs&, int64_t, int64_t> linear[] = {amx::kernels.linear, amx_emulated::kernels.linear};
  bool fine = same(a, linear);
  for (int kind = 0; kind < BLOCK_KINDS; ++kind) {
    const BlockFormat& format = FORMATS[kind];
    const int64_t spans = depth / (BLOCK * format.span);
    if (depth % (BLOCK * format.span)) continue;
    std::vector<uint8_t> raw(outputs * spans * format.file);
    for (uint8_t& byte : raw) byte = 0x10 + generator() % 0x20;  // a small number wherever a scale may be
    LinearArgs blocks = a;
    blocks.packed = packed = guarded(panels * PANEL * spans * format.bytes());
    amx_emulated::kernels.pack_blocks[kind](raw.data(), packed, outputs, depth, 0, panels);
    Function<const LinearArgs&, int64_t, int64_t> both[] = {amx::kernels.block_linear[1][kind],
                                                            amx_emulated::kernels.block_linear[1][kind]};
    fine = same(blocks, both) && fine;
    const int64_t row = rounded_bytes(depth, rounds_wide(kind));
    uint8_t* rounded = guarded(rows * row);  // any bytes are codes; all scales are one small number
    for (int64_t i = 0; i < rows * row; ++i) rounded[i] = 0x20 + generator() % 8;
    blocks.x = rounded, blocks.x_stride = row;
    amx_emulated::kernels.pack_int_blocks[kind](raw.data(), packed, outputs, depth, 0, panels);
    Function<const LinearArgs&, int64_t, int64_t> integers[] = {amx::kernels.int_block_linear[1][kind],
                                                                amx_emulated::kernels.int_block_linear[1][kind]};
    fine = same(blocks, integers) && fine;
  }
  if (!fine) std::fprintf(stderr, "%ld rows of %ld by %ld outputs differ\n", rows, depth, outputs);
  return fine;
}

template <typename T>
T* guarded_of(int64_t numbers) {
  return reinterpret_cast<T*>(guarded(numbers * int64_t(sizeof(T))));
}

// Compares both attentions of the last `queries` of `length` tokens, each by two threads.
bool check_attention(int64_t queries, int64_t length) {
  constexpr int64_t HEADS = 6, KV_HEADS = 2, DIM = 64, VALUE_DIM = 48,
                    SIZES[] = {HEADS * DIM, KV_HEADS * DIM, KV_HEADS * VALUE_DIM};
  auto* q = guarded_of<uint16_t>(queries * SIZES[0]);
  auto* k = guarded_of<uint16_t>(length * SIZES[1]);
  auto* v = guarded_of<uint16_t>(length * SIZES[2]);
  for (int64_t i = 0; i < queries * SIZES[0]; ++i) q[i] = random_bf16();
  for (int64_t i = 0; i < length * SIZES[1]; ++i) k[i] = random_bf16();
  for (int64_t i = 0; i < length * SIZES[2]; ++i) v[i] = random_bf16();
  auto* slots = guarded_of<int32_t>(length);
  for (int64_t i = 0; i < length; ++i) slots[i] = length - 1 - i;
  const int64_t row = 0, at_once = TILE_ROWS / (HEADS / KV_HEADS);
  std::vector<Tile> tiles;
  for (int64_t i = 0; i < queries; i += at_once) {
    const int64_t some = std::min(at_once, queries - i), position = length - queries + i;
    tiles.push_back({0, i, some, position, position + some});
  }
  const int64_t bytes = queries * HEADS * VALUE_DIM * 2;
  uint8_t* outs[2];
  decltype(TileKernels::attention) both[] = {amx::kernels.attention, amx_emulated::kernels.attention};
  for (int i : {0, 1}) {
    AttentionArgs a{q, k, v, outs[i] = guarded(bytes), slots, &row, nullptr, SIZES[0], SIZES[1], SIZES[2], length,
                    HEADS, KV_HEADS, DIM, VALUE_DIM, -1, TILE_ROWS, 1, 0.125f, 0.f, true, tiles};
    std::atomic<int64_t> next{0};
    std::thread other([&] { both[i](a, next, nullptr, nullptr); });
    both[i](a, next, nullptr, nullptr);
    other.join();
  }
  const bool fine = std::memcmp(outs[0], outs[1], bytes) == 0;
  if (!fine) std::fprintf(stderr, "attention of %ld queries over %ld differs\n", queries, length);
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
    for (auto [depth, outputs] : {std::pair<int64_t, int64_t>{256, 192}, {768, 80}, {70, 100}, {2, 1}})
      fine = check(rows, depth, outputs) && fine;
  for (auto [queries, length] : {std::pair<int64_t, int64_t>{1, 1}, {1, 300}, {3, 70}, {10, 270}, {100, 340}})
    fine = check_attention(queries, length) && fine;
  return fine ? 0 : 1;
}
