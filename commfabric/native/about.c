/* Describes a library: the digest of the sources it was built from, and the instruction set of its kernels. */
#include "native.h"

#ifndef SOURCES
#define SOURCES ""
#endif

const char *native_sources(void) { return SOURCES; }

/* The instruction set of its plain loops: without function clones, only products use a larger one. */
const char *native_variant(void) {
#ifdef __x86_64__
  return loop_level() == AVX512 ? "AVX-512" : loop_level() == AVX2 ? "AVX2" : "SSE2";
#else
  return "plain";
#endif
}
