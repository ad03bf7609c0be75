/* Matrices of 8 or 4 bits: (out, in), in blocks of BLOCK columns that share a float32 scale, (out, in / BLOCK).

   An INT8 block has a byte for each column. An INT4 block has 16 words of 16 bits; the p-th 4 bits of word j are column
   16 p + j, in two's complement. */
#ifndef QUANTIZED_H
#define QUANTIZED_H

#include "product.h"

enum { BLOCK = 64 }; /* as in products.py */

INLINE ptrdiff_t bytes_per_block(int weight_type) { return weight_type == INT8 ? BLOCK : BLOCK / 2; }

/* Column i of a block. */
INLINE int16_t column(const void *block, int i, int weight_type) {
  if (weight_type == INT8) return ((const int8_t *)block)[i];
  return (int16_t)(((const uint16_t *)block)[i % 16] << (12 - i / 16 * 4)) >> 12;
}

/* x of a product in 16 bits, (batch, in), in blocks with scales, (batch, in / BLOCK). In memory for `free`; values is NULL if there
   is none. So the products of a block are integers, whose sums are exact: 64 * 32639 * 128 < 2^31. Rounding x adds at most 1/65278 of
   the largest element of its block. Where x is not finite, the scale is not either; numbers below 1e-30 become 0. */
typedef struct {
  int16_t *values;
  float *scales;
} QuantizedX;
QuantizedX x_in_16_bits(const Product *p);
void fill_16_bits(const Product *p, QuantizedX to);

/* The same in 8 bits -> to, scales, and sums: -OFFSET times the sum of each block. Rounding adds at most 1/254 of a block's largest
   element. */
void x_in_8_bits(const Product *p, int8_t *to, float *scales, int32_t *sums);

/* The offset that makes 8-bit integers of W unsigned, for instructions that multiply unsigned bytes by signed bytes. */
enum { OFFSET = 128 };

#ifdef HAS_INTRINSICS
/* Columns 16 `quarter` to 16 `quarter` + 15 of a block. */
INLINE_FOR(TARGET_AVX2) __m256i quarter_block(const char *block, int quarter, int weight_type) {
  if (weight_type == INT8) return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)block + quarter));
  __m256i words = _mm256_loadu_si256((const __m256i *)block);
  return _mm256_srai_epi16(_mm256_slli_epi16(words, 12 - 4 * quarter), 12);
}

/* Columns 32 `half` to 32 `half` + 31 of a block. */
INLINE_FOR(TARGET_AVX512) __m512i half_block(const char *block, int half, int weight_type) {
  if (weight_type == INT8) return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)block + half));
  __m512i words = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)block));
  __m512i shifts = half ? _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 0)
                        : _mm512_inserti64x4(_mm512_set1_epi16(8), _mm256_set1_epi16(12), 0);
  return _mm512_srai_epi16(_mm512_sllv_epi16(words, shifts), 12);
}

INLINE_FOR(TARGET_AVX512_BF16) __m512 scaled(__m256i columns, __m512 scale) {
  return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(columns)), scale);
}

/* A block times its scale in BFLOAT16, by an instruction that rounds 32 numbers. */
INLINE_FOR(TARGET_AVX512_BF16) void widen_block(const char *block, float scale, uint16_t *to, int weight_type) {
  __m512 factor = _mm512_set1_ps(scale);
  for (int half = 0; half < 2; half++) {
    __m512i columns = half_block(block, half, weight_type);
    __m512 low = scaled(_mm512_castsi512_si256(columns), factor), high = scaled(_mm512_extracti64x4_epi64(columns, 1), factor);
    _mm512_storeu_si512(to + 32 * half, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
}

/* The high byte of each 16-bit number: 256 times it plus the number's lower byte, which counts as signed, is the number. */
INLINE_FOR(TARGET_AVX512) __m512i high_byte(__m512i number) {
  return _mm512_srai_epi16(_mm512_add_epi16(number, _mm512_set1_epi16(128)), 8);
}

/* The lower bytes of 16-bit numbers in two registers. */
INLINE_FOR(TARGET_AVX512) __m512i lower_bytes(__m512i first, __m512i second) {
  __m512i low = _mm512_castsi256_si512(_mm512_cvtepi16_epi8(first));
  return _mm512_inserti64x4(low, _mm512_cvtepi16_epi8(second), 1);
}

/* Of a block of x, of 16 bits in two registers, the columns that the lower 4 bits of an INT4 block's bytes meet, in their order:
   those from `first` on alternate with those that are half a block further. The upper bits meet those 16 columns further. */
INLINE_FOR(TARGET_AVX512) __m512i columns_from(int first, __m512i left, __m512i right) {
  int16_t columns[BLOCK / 2];
  for (int i = 0; i < BLOCK / 2; i++) columns[i] = (int16_t)(first + i / 2 + i % 2 * (BLOCK / 2));
  return _mm512_permutex2var_epi16(left, _mm512_loadu_si512(columns), right);
}
INLINE_FOR(TARGET_AVX512) __m512i lower_columns(__m512i left, __m512i right) { return columns_from(0, left, right); }
INLINE_FOR(TARGET_AVX512) __m512i upper_columns(__m512i left, __m512i right) { return columns_from(BLOCK / 4, left, right); }

#endif

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
