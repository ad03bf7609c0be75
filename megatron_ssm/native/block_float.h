/* Block floating point: the numbers of a block of BLOCK columns as 16-bit integers times a power of two.

   So products of bfloat16 matrices become sums of integers, which are exact: W's have W_BITS bits, and are at most 255 * 2^4
   because a bfloat16 number has 8 significant bits; those of x are at most 2^X_BITS, and 64 * 4080 * 8192 < 2^31. As the
   scales are powers of two, bfloat16 elements of W are exact down to 2^-4 of the largest in their block, those of x down to
   2^-5; the others have errors up to 2^-12 and 2^-13 of the largest. Beyond a row's last column there are zeros. */
#ifndef BLOCK_FLOAT_H
#define BLOCK_FLOAT_H

#include "rounded.h"

#ifdef HAS_INTRINSICS
enum { W_BITS = 12, X_BITS = 13 };

/* The power of two that makes sizes up to `most`, of which these are the bits, integers of so many bits. Writes its inverse,
   by which the integers are multiplied: NaN if `most` is not finite. Sizes below 2^-127 become 0. */
INLINE float factor_for(uint32_t most, int bits, float *scale) {
  int32_t exponent = (int32_t)(most >> 23) - (bits - 1);
  exponent = exponent < 1 ? 1 : exponent;
  *scale = most < 0xffu << 23 ? float_of_bits((uint32_t)exponent << 23) : __builtin_nanf("");
  return float_of_bits((254u - (uint32_t)exponent) << 23);
}

/* The bits of the largest absolute value of BLOCK bfloat16 numbers, as a float32 number. */
INLINE_FOR(TARGET_AVX2) uint32_t largest_bits(const uint16_t *block) {
  __m256i most = _mm256_setzero_si256(), sizes = _mm256_set1_epi16(0x7fff);
  for (int i = 0; i < BLOCK; i += 16)
    most = _mm256_max_epu16(most, _mm256_and_si256(_mm256_loadu_si256((const void *)(block + i)), sizes));
  __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  __m128i least = _mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1))); /* there is no such instruction for most */
  return (uint32_t)(uint16_t)~_mm_cvtsi128_si32(least) << 16;
}

/* The first `columns` of a row of W, at most BLOCK of them. */
INLINE_FOR(TARGET_AVX2) void round_block(const uint16_t *from, ptrdiff_t columns, int16_t *to, float *scale) {
  uint16_t rest[BLOCK];
  if (columns < BLOCK) {
    memset(rest, 0, sizeof rest);
    from = memcpy(rest, from, columns * sizeof *rest);
  }
  __m256 factor = _mm256_set1_ps(factor_for(largest_bits(from), W_BITS, scale));
  for (int i = 0; i < BLOCK; i += 16) { /* packing restores the order that unpacking changes */
    __m256i words = _mm256_loadu_si256((const void *)(from + i)), zero = _mm256_setzero_si256();
    __m256 low = (__m256)_mm256_unpacklo_epi16(zero, words), high = (__m256)_mm256_unpackhi_epi16(zero, words);
    low = _mm256_mul_ps(low, factor), high = _mm256_mul_ps(high, factor);
    _mm256_storeu_si256((void *)(to + i), _mm256_packs_epi32(_mm256_cvtps_epi32(low), _mm256_cvtps_epi32(high)));
  }
}

/* A row of x: `in` columns of `type` -> whole blocks, with a scale each. */
INLINE_FOR(TARGET_AVX2) void round_x_row(const void *x, int16_t *to, float *scales, ptrdiff_t in, int type) {
  for (; in > 0; in -= BLOCK, to += BLOCK, x = at(x, BLOCK, type)) {
    float block[BLOCK] = {0};
    ptrdiff_t columns = in < BLOCK ? in : BLOCK;
    for (ptrdiff_t i = 0; i < columns; i++) block[i] = get(x, i, type);
    float factor = factor_for(bits_of_float(largest_size(block, FLOAT32)), X_BITS, scales++);
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) to[i] = (int16_t)(int32_t)__builtin_rintf(block[i] * factor);
  }
}
#endif

#endif
