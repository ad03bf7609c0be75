/* Describes a library: the digest of the sources it was built from, and the instruction set that its kernels use. */
#include "native.h"

#ifndef SOURCES
#define SOURCES ""
#endif

const char *native_sources(void) { return SOURCES; }

/* The instruction set of the clones that run on this processor (see CLONES), or else of the whole library. */
const char *native_variant(void) {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__) && !defined(NO_CLONES)
  __builtin_cpu_init();
  return __builtin_cpu_supports("x86-64-v4") ? "AVX-512" : __builtin_cpu_supports("x86-64-v3") ? "AVX2" : "SSE2";
#elif defined(__AVX512F__)
  return "AVX-512";
#elif defined(__AVX2__)
  return "AVX2";
#elif defined(__x86_64__)
  return "SSE2";
#else
  return "plain";
#endif
}
