// The tile unit of a processor (AMX): eight registers of up to 16 rows of 64 bytes, and products of bf16 pairs or
// signed bytes on them.
// The processor and an emulation in software, for tests and machines without tiles, have the same bits. The emulation
// also rejects input on which a processor faults (a shape that does not fit is an illegal instruction) or is far slower
// (rows not aligned to 64 bytes).
#pragma once
#include <cstdint>
#if defined(EMULATE_TILES)
#include <immintrin.h>

#include <cstring>
#include <stdexcept>
#include <string>
#endif

namespace ISA::unit {

constexpr int REGISTERS = 8, HEIGHT = 16, ROW_BYTES = 64;

struct Shapes {  // the operand of LDTILECFG
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// load: rows `stride` bytes apart. add_products: sums[m][n] += a[m][k] * b[k][n] over pairs k (TDPBF16PS).
// add_integers: the same, exactly, over groups of four signed bytes (TDPBSSD).
#if !defined(EMULATE_TILES)

// Assembly, since the intrinsics of gcc 12 take only literals and do not declare that a load reads memory.
inline void configure(const Shapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
inline void release() { asm volatile("tilerelease"); }
template <int T>
inline void zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
inline void load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
inline void store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
template <int SUMS, int A, int B>
inline void add_products() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(A), "i"(B));
}
template <int SUMS, int A, int B>
inline void add_integers() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(A), "i"(B));
}

#else

struct Register {
  alignas(64) uint8_t bytes[HEIGHT][ROW_BYTES];
};
struct State {
  bool configured = false;
  Shapes shapes;
  Register registers[REGISTERS];
};
inline thread_local State state;

[[noreturn]] inline void fail(const std::string& what) { throw std::logic_error("tile unit: " + what); }
inline std::string name(int t) { return "register " + std::to_string(t); }

inline void configure(const Shapes& shapes) {
  if (shapes.palette != 1 || shapes.start_row != 0) fail("palette 1 and row 0 are expected");
  for (uint8_t byte : shapes.reserved)
    if (byte != 0) fail("reserved bytes of the shapes must be 0");
  for (int t = 0; t < 16; ++t) {
    const int rows = shapes.rows[t], bytes = shapes.row_bytes[t];
    if (rows > HEIGHT || bytes > ROW_BYTES || (rows == 0) != (bytes == 0) || (t >= REGISTERS && rows > 0))
      fail(name(t) + " cannot have " + std::to_string(rows) + " rows of " + std::to_string(bytes) + " bytes");
  }
  state = {true, shapes, {}};
}
inline void release() { state = {}; }

template <int T>
inline Register& used() {
  static_assert(0 <= T && T < REGISTERS);
  if (!state.configured || state.shapes.rows[T] == 0) fail(name(T) + " has no shape");
  return state.registers[T];
}
template <int T>
inline void zero() {
  used<T>() = {};
}
inline void check_rows(const void* first, int64_t stride, int rows, int bytes) {
  for (int r = 0; r < rows; ++r)
    if ((reinterpret_cast<uintptr_t>(first) + r * stride) % 64 + bytes > 64) fail("rows must lie in 64 aligned bytes");
}
template <int T>
inline void load(const void* from, int64_t stride) {
  Register& to = used<T>() = {};
  check_rows(from, stride, state.shapes.rows[T], state.shapes.row_bytes[T]);
  for (int r = 0; r < state.shapes.rows[T]; ++r)
    std::memcpy(to.bytes[r], static_cast<const uint8_t*>(from) + r * stride, state.shapes.row_bytes[T]);
}
template <int T>
inline void store(void* to, int64_t stride) {
  const Register& from = used<T>();
  check_rows(to, stride, state.shapes.rows[T], state.shapes.row_bytes[T]);
  for (int r = 0; r < state.shapes.rows[T]; ++r)
    std::memcpy(static_cast<uint8_t*>(to) + r * stride, from.bytes[r], state.shapes.row_bytes[T]);
}

// One fused sum, from 0, of the products of the lower halves of the pairs, and one of the upper halves; adds both
// together.
__attribute__((noinline)) inline void add_row(const uint32_t* a, const uint32_t (*b)[16], int pairs, float* sums) {
  const auto number = [](uint32_t bits) { return __builtin_bit_cast(float, bits); };
  float lower[16] = {}, upper[16] = {};
  for (int k = 0; k < pairs; ++k)
    for (int n = 0; n < 16; ++n) {
      lower[n] = __builtin_fmaf(number(a[k] << 16), number(b[k][n] << 16), lower[n]);
      upper[n] = __builtin_fmaf(number(a[k] & 0xffff0000), number(b[k][n] & 0xffff0000), upper[n]);
    }
  for (int n = 0; n < 16; ++n) sums[n] += lower[n] + upper[n];
}

template <int SUMS, int A, int B>
inline void check_shapes() {
  static_assert(SUMS != A && SUMS != B && A != B);
  const Shapes& s = state.shapes;
  if (s.rows[SUMS] != s.rows[A] || s.row_bytes[A] != s.rows[B] * 4 || s.row_bytes[SUMS] != s.row_bytes[B] ||
      s.row_bytes[SUMS] % 4 != 0)
    fail("the shapes of " + name(SUMS) + " += " + name(A) + " x " + name(B) + " do not fit");
}

template <int SUMS, int A, int B>
inline void add_products() {
  Register &sums = used<SUMS>(), &a = used<A>(), &b = used<B>();
  check_shapes<SUMS, A, B>();
  const Shapes& s = state.shapes;
  const unsigned before = _mm_getcsr();
  _mm_setcsr(0x9fc0);  // to nearest, reads and writes denormals as 0, no traps
  for (int m = 0; m < s.rows[A]; ++m) {
    uint32_t pairs[16], right[16][16];
    float row[16];
    std::memcpy(pairs, a.bytes[m], ROW_BYTES);
    std::memcpy(right, b.bytes, sizeof right);
    std::memcpy(row, sums.bytes[m], ROW_BYTES);
    add_row(pairs, right, s.rows[B], row);
    std::memcpy(sums.bytes[m], row, ROW_BYTES);
  }
  _mm_setcsr(before);
}

template <int SUMS, int A, int B>
inline void add_integers() {
  Register &sums = used<SUMS>(), &a = used<A>(), &b = used<B>();
  check_shapes<SUMS, A, B>();
  const Shapes& s = state.shapes;
  for (int m = 0; m < s.rows[A]; ++m)
    for (int k = 0; k < s.row_bytes[A]; ++k)
      for (int n = 0; n < s.row_bytes[SUMS] / 4; ++n) {
        int32_t sum;
        std::memcpy(&sum, sums.bytes[m] + 4 * n, 4);
        sum += int8_t(a.bytes[m][k]) * int8_t(b.bytes[k / 4][4 * n + k % 4]);
        std::memcpy(sums.bytes[m] + 4 * n, &sum, 4);
      }
}

#endif

// Holds the registers during its lifetime. Before and after, the thread's further code (oneDNN) may use them, and a
// context switch need not save them.
class Session {
 public:
  // Registers 0 .. 3: sums [rows][columns]; 4, 5: left sides [rows][depth bytes]; 6, 7: right sides of the same depth.
  void shape(int rows, int columns = HEIGHT, int depth = ROW_BYTES) {
    if (rows == rows_ && columns == columns_) return;
    Shapes shapes;
    for (int t = 0; t < REGISTERS; ++t) {
      shapes.row_bytes[t] = t == 4 || t == 5 ? depth : 4 * columns;
      shapes.rows[t] = t < 6 ? rows : depth / 4;
    }
    configure(shapes);
    rows_ = rows, columns_ = columns;
  }
  ~Session() { release(); }

 private:
  int rows_ = 0, columns_ = 0;
};

}  // namespace ISA::unit
