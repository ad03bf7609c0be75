/* Numbers to float16 and back, times a factor, in a pass each. */
#include "native.h"

/* out = x * times. */
CLONES int fp16_encode(const float *x, ptrdiff_t numel, float times, uint16_t *out) {
#pragma omp simd
  for (ptrdiff_t i = 0; i < numel; i++) out[i] = half_of_float(x[i] * times);
  return 0;
}

/* out = halves * times. */
CLONES int fp16_decode(const uint16_t *halves, ptrdiff_t numel, float times, float *out) {
#pragma omp simd
  for (ptrdiff_t i = 0; i < numel; i++) out[i] = float_of_half(halves[i]) * times;
  return 0;
}

/* The largest magnitude's bits: those of infinity are above all finite ones, a NaN's above them. */
CLONES int fp16_largest(const uint16_t *halves, ptrdiff_t numel) {
  uint16_t most = 0;
#pragma omp simd reduction(max : most)
  for (ptrdiff_t i = 0; i < numel; i++) {
    uint16_t bits = halves[i] & 0x7fff;
    most = bits > most ? bits : most;
  }
  return most;
}
