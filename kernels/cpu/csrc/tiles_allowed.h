// Permission to use the processor's tile unit.
#pragma once
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

// Asks Linux for the tile registers for all threads of the process. Linux gives them only on request, and may refuse
// even if the processor has them (an old kernel, a sandbox).
inline bool tiles_allowed() {
  constexpr unsigned LEAF = 7, NEEDED = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE, AMX-INT8
  unsigned a, b, c, d;
  if (!__get_cpuid_count(LEAF, 0, &a, &b, &c, &d) || (d & NEEDED) != NEEDED) return false;
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
