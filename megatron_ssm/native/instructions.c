/* The instruction set of this processor that the kernels may use. */
#include "product.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#endif
#ifdef HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>

enum {
  AMX_BITS = 1 << 22 | 1 << 24 | 1 << 25, /* in EDX of CPUID 7: bfloat16, tiles, bytes */
  XTILEDATA = 18, REQUEST = 0x1023         /* Linux: the component of the processor's state, and arch_prctl's request for it */
};

/* 1 if this processor has AMX and Linux grants the process its use, which the process must request. */
static int has_amx(void) {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & AMX_BITS) == AMX_BITS && !syscall(SYS_arch_prctl, REQUEST, XTILEDATA);
}
#else
static int has_amx(void) { return 0; }
#endif

static Instructions find_instructions(void) {
#ifdef HAS_INTRINSICS
  if (level() == BASELINE) return LOOPS;
  if (level() == AVX2) return WITH_AVX2;
  if (!has_avx512_vnni()) return WITH_AVX512;
  if (!has_avx512_bf16()) return WITH_VNNI;
  return has_amx() ? WITH_AMX : WITH_BF16;
#else
  return LOOPS;
#endif
}

/* Found once, because CPUID takes long in a virtual machine. Threads that find it at the same time find the same. */
Instructions instructions(void) {
  static int known = -1;
  if (known < 0) known = find_instructions();
  return known;
}

/* 1 if this processor has instructions for products of a 16-bit type, AVX512_BF16 or AVX512_FP16. On
   processors other than x86's the answer is always yes, which leaves the choice to torch. */
int has_products_of(int type) {
#if defined(__x86_64__) && defined(__GNUC__)
  static int answers[2]; /* 1: no, 2: yes */
  int *answer = &answers[type == BFLOAT16];
  if (!*answer) {
    unsigned a, b, c, d;
    int is_known = __get_cpuid_count(7, type == BFLOAT16, &a, &b, &c, &d);
    *answer = 1 + (is_known && (type == BFLOAT16 ? a >> 5 & 1 : d >> 23 & 1));
  }
  return *answer - 1;
#else
  (void)type;
  return 1;
#endif
}
