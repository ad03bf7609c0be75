/* Shared by all kernels: compilation for several processors, and conversion between the element types of torch's tensors.

   Loops are written so that GCC vectorizes them (#pragma omp simd). CLONES compiles a function once for each level of
   x86-64, and the dynamic linker picks the best one for the processor. It needs GCC 12 and glibc; otherwise loops are compiled
   for the lowest level only. GCC would compile a parallel region for that level, too, so a parallel loop is written in a
   function without CLONES that calls the cloned one block by block. */
#ifndef NATIVE_H
#define NATIVE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* NO_CLONES, NO_INTRINSICS: do without them. ONE_LEVEL: the whole library is for the level of -march, as the tests build it. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__) && !defined(NO_CLONES) && \
    !defined(ONE_LEVEL)
#define HAS_CLONES
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif
#if defined(__x86_64__) && (__GNUC__ >= 11 || __clang_major__ >= 12) && !defined(NO_INTRINSICS)
#define HAS_INTRINSICS /* of x86 up to AMX, in functions with these attributes */
#define TARGET_AVX2 __attribute__((target("avx2,fma")))
#define TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))
#define TARGET_AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")))
#endif
#ifdef _OPENMP
#include <omp.h>
#define THREAD omp_get_thread_num()
#else
#define THREAD 0
#endif
#define INLINE static inline __attribute__((always_inline))

/* Instruction sets of x86. */
enum { BASELINE, AVX2, AVX512 };

/* That of functions without attributes. */
INLINE int compiled_level(void) {
#if defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
  return AVX512;
#elif defined(__AVX2__) && defined(__FMA__)
  return AVX2;
#else
  return BASELINE;
#endif
}

/* That of functions with intrinsics: this processor's, unless ONE_LEVEL. */
INLINE int level(void) {
#if defined(HAS_INTRINSICS) && !defined(ONE_LEVEL)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return BASELINE;
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl")
             ? AVX512 : AVX2;
#else
  return compiled_level();
#endif
}

/* That of plain loops: of their clones for this processor, or else the compiler's. */
INLINE int loop_level(void) {
#ifdef HAS_CLONES
  return level();
#else
  return compiled_level();
#endif
}

/* Whether functions with intrinsics may use instructions beyond the level. */
#if defined(HAS_INTRINSICS) && !defined(ONE_LEVEL)
INLINE int has_avx512_bf16(void) { return level() == AVX512 && __builtin_cpu_supports("avx512bf16"); }
INLINE int has_avx512_vnni(void) { return level() == AVX512 && __builtin_cpu_supports("avx512vnni"); }
#else
INLINE int has_avx512_bf16(void) { return 0; }
INLINE int has_avx512_vnni(void) { return 0; }
#endif

/* Element types of tensors; the Python modules that call the kernels have the same numbers. */
enum { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, FLOAT16 = 3, INT4 = 4 /* two in a byte */ };

INLINE float float_of_bits(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
INLINE uint32_t bits_of_float(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

INLINE uint16_t to_bfloat16(float x) { /* rounds to nearest, ties to even; NaN stays NaN */
  uint32_t bits = bits_of_float(x);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return x == x ? rounded : 0x7fc0;
}

/* float32 -> float16, rounded to nearest, ties to even; NaN stays NaN, and what rounds to 65536 or more becomes infinite.
   All three results are computed and one is picked, so that the loop has no branches. Adding 0.5 to a number below 2^-14
   leaves its float16 bits (a subnormal) in the lowest bits of the sum. */
INLINE uint16_t half_of_float(float x) {
  const uint32_t smallest = 113u << 23, beyond = 143u << 23, magic = 126u << 23; /* 2^-14, 2^16, 0.5 */
  uint32_t sign = bits_of_float(x) & 0x80000000u, bits = bits_of_float(x) ^ sign;
  uint32_t normal = (bits - (112u << 23) + 0xfff + ((bits >> 13) & 1)) >> 13;
  uint32_t subnormal = bits_of_float(float_of_bits(bits) + float_of_bits(magic)) - magic;
  uint32_t special = bits > 0x7f800000u ? 0x7e00 : 0x7c00;
  uint32_t half = bits >= beyond ? special : bits < smallest ? subnormal : normal;
  return half | sign >> 16;
}

/* float16 -> float32, which is exact. */
INLINE float float_of_half(uint16_t half) {
  uint32_t bits = (uint32_t)(half & 0x7fff) << 13, exponent = bits & 0x0f800000u;
  uint32_t normal = bits + (112u << 23), special = bits + (224u << 23);
  uint32_t subnormal = bits_of_float(float_of_bits(bits + (113u << 23)) - float_of_bits(113u << 23));
  uint32_t magnitude = exponent == 0x0f800000u ? special : exponent ? normal : subnormal;
  return float_of_bits(magnitude | (uint32_t)(half & 0x8000) << 16);
}

/* Reads element i of a tensor of `type`, FLOAT32 or BFLOAT16. */
INLINE float get(const void *p, ptrdiff_t i, int type) {
  return type == FLOAT32 ? ((const float *)p)[i] : float_of_bits((uint32_t)((const uint16_t *)p)[i] << 16);
}
/* Writes element i. */
INLINE void put(void *p, ptrdiff_t i, float x, int type) {
  if (type == FLOAT32) ((float *)p)[i] = x;
  else ((uint16_t *)p)[i] = to_bfloat16(x);
}
/* Rounds x to `type`. */
INLINE float rounded(float x, int type) {
  return type == FLOAT32 ? x : float_of_bits((uint32_t)to_bfloat16(x) << 16);
}
/* The address of element i. */
INLINE void *at(const void *p, ptrdiff_t i, int type) { return (char *)p + i * (type == FLOAT32 ? 4 : 2); }

#endif
