// Misuse of the tile unit's emulation, each in a fresh state: prints what it said, or "accepted".
#include "tile_unit.h"

#include <cstdio>

namespace unit = ISA::unit;

template <typename F>
void attempt(const char* what, const F& misuse) {
  unit::release();
  try {
    misuse();
    std::printf("%s: accepted\n", what);
  } catch (const std::logic_error& error) {
    std::printf("%s: %s\n", what, error.what());
  }
}

unit::Shapes shapes(int left_rows, int left_bytes, int right_rows, int right_bytes, int rows, int bytes) {
  unit::Shapes s;
  s.rows[0] = rows, s.row_bytes[0] = bytes;
  s.rows[1] = left_rows, s.row_bytes[1] = left_bytes;
  s.rows[2] = right_rows, s.row_bytes[2] = right_bytes;
  return s;
}

void multiply(const unit::Shapes& s) {
  alignas(64) static float memory[256];
  unit::configure(s);
  unit::zero<0>();
  unit::load<1>(memory, 64);
  unit::load<2>(memory, 64);
  unit::add_products<0, 1, 2>();
  unit::store<0>(memory, 64);
}

int main() {
  alignas(64) static float memory[300];
  const unit::Shapes fitting = shapes(3, 64, 16, 64, 3, 64);
  attempt("fitting shapes", [&] { multiply(fitting); });
  attempt("rows of the sums", [] { multiply(shapes(3, 64, 16, 64, 4, 64)); });
  attempt("pairs", [] { multiply(shapes(3, 60, 16, 64, 3, 64)); });
  attempt("columns", [] { multiply(shapes(3, 64, 16, 64, 3, 60)); });
  attempt("half a number", [] { multiply(shapes(3, 64, 16, 62, 3, 62)); });
  attempt("too many rows", [] { unit::configure(shapes(17, 64, 16, 64, 17, 64)); });
  attempt("rows of nothing", [] { unit::configure(shapes(3, 0, 16, 64, 3, 64)); });
  attempt("no configuration", [] { unit::zero<0>(); });
  attempt("no shape", [&] { unit::configure(fitting), unit::load<5>(memory, 64); });
  attempt("after the release", [&] { unit::configure(fitting), unit::release(), unit::load<0>(memory, 64); });
  attempt("address", [&] { unit::configure(fitting), unit::load<0>(memory + 1, 64); });
  attempt("stride", [&] { unit::configure(fitting), unit::store<0>(memory, 72); });
  attempt("palette", [&] {
    unit::Shapes s = fitting;
    s.palette = 2;
    unit::configure(s);
  });
}
