/* Matrices of 8 or 4 bits: (out, in), in blocks of BLOCK columns that share a float32 scale, (out, in / BLOCK).

   An INT8 block has a byte for each column. An INT4 block has 16 words of 16 bits; the p-th 4 bits of word j are column
   16 p + j, in two's complement. */
#ifndef ROUNDED_H
#define ROUNDED_H

#include "kernels.h"
#ifdef HAS_INTRINSICS
#include <immintrin.h>
#define INLINE_FOR(TARGET) static inline __attribute__((always_inline)) TARGET
#endif

enum { BLOCK = 64 }; /* as in products.py */

INLINE ptrdiff_t bytes_per_block(int weight_type) { return weight_type == INT8 ? BLOCK : BLOCK / 2; }

/* Column i of a block. */
INLINE int16_t column(const void *block, int i, int weight_type) {
  if (weight_type == INT8) return ((const int8_t *)block)[i];
  return (int16_t)(((const uint16_t *)block)[i % 16] << (12 - i / 16 * 4)) >> 12;
}

/* Consecutive blocks times their scales, in `type` (FLOAT32 or BFLOAT16). */
void widen_blocks(const char *values, const float *scales, void *to, ptrdiff_t blocks, int weight_type, int type);

/* `linear` by AMX for rows of x that are rounded to 16 bits, (batch, blocks, BLOCK), times x_scales, (batch, blocks). */
int byte_tiles(const void *values, const float *scales, const void *bias, const int16_t *x, const float *x_scales, void *y,
               ptrdiff_t batch, ptrdiff_t out, ptrdiff_t blocks, int weight_type, int type, int threads);

/* The largest absolute value of BLOCK elements; NaN if one is NaN, because the bits of absolute values have their order. */
INLINE float largest_size(const void *x, int type) {
  uint32_t most = 0;
#pragma omp simd reduction(max : most)
  for (int i = 0; i < BLOCK; i++) {
    uint32_t size = bits_of_float(get(x, i, type)) & 0x7fffffffu;
    most = size > most ? size : most;
  }
  return float_of_bits(most);
}

#endif
