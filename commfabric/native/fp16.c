/* Converts float32 gradients to float16 and back, multiplied by a factor, in one pass each (gradients/half_precision.py). */
#include "native.h"

/* out = x * factor, rounded to float16. */
CLONES int fp16_encode(const float *x, ptrdiff_t numel, float factor, uint16_t *out) {
#pragma omp simd
  for (ptrdiff_t i = 0; i < numel; i++) out[i] = half_of_float(x[i] * factor);
  return 0;
}

/* out = x * factor, where x is float16. */
CLONES int fp16_decode(const uint16_t *x, ptrdiff_t numel, float factor, float *out) {
#pragma omp simd
  for (ptrdiff_t i = 0; i < numel; i++) out[i] = float_of_half(x[i]) * factor;
  return 0;
}

/* The bits of the largest magnitude in x. Without the sign, the bits of float16 are ordered like the values; infinity is
   above all finite values and NaN above infinity, so the result is finite if and only if all of x is. */
CLONES int fp16_largest(const uint16_t *x, ptrdiff_t numel) {
  uint16_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (ptrdiff_t i = 0; i < numel; i++) {
    uint16_t bits = x[i] & 0x7fff;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}
