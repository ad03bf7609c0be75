/* Matrices of 8 or 4 bits: (out, in), in blocks of BLOCK columns that share a float32 scale, (out, in / BLOCK).

   An INT8 block has a byte for each column. An INT4 block has 16 words of 16 bits; the p-th 4 bits of word j are column
   16 p + j, in two's complement. */
#ifndef ROUNDED_H
#define ROUNDED_H

#include <stdlib.h>

#include "blocks.h"
#ifdef HAS_INTRINSICS
#define INLINE_FOR(TARGET) static inline __attribute__((always_inline)) TARGET
#endif

enum { BLOCK = 64 }; /* as in products.py */

/* Memory of at least so many bytes that begins with a line, for `free`; NULL if there is none. */
INLINE void *allocate(size_t bytes) { return aligned_alloc(LINE, (bytes + LINE - 1) / LINE * LINE); }

INLINE ptrdiff_t bytes_per_block(int weight_type) { return weight_type == INT8 ? BLOCK : BLOCK / 2; }

/* Column i of a block. */
INLINE int16_t column(const void *block, int i, int weight_type) {
  if (weight_type == INT8) return ((const int8_t *)block)[i];
  return (int16_t)(((const uint16_t *)block)[i % 16] << (12 - i / 16 * 4)) >> 12;
}

/* Each block of x (batch, in) in 16 bits -> to (batch, in), with its scale -> scales (batch, in / BLOCK). */
void round_to_16_bits(const void *x, int16_t *to, float *scales, ptrdiff_t batch, ptrdiff_t in, ptrdiff_t x_stride, int type);

enum { FEWEST = 2 };

/* `linear` by a processor with AMX for up to FEWEST rows of x, with weight, bias and y of BFLOAT16. x is float32, of each row
   first its even columns, then its odd ones; `in` is a multiple of 32. */
void fewest_rows(const void *weight, const void *bias, const float *x, void *y, ptrdiff_t batch, ptrdiff_t out, ptrdiff_t in,
                 int threads);

#ifdef HAS_INTRINSICS
/* `linear` by AMX for rows of x that are rounded to 16 bits, (batch, blocks, BLOCK), times x_scales, (batch, blocks). */
int byte_tiles(const void *values, const float *scales, const void *bias, const int16_t *x, const float *x_scales, void *y,
               ptrdiff_t batch, ptrdiff_t out, ptrdiff_t blocks, int weight_type, int type, int threads);

/* The same by AVX512_VNNI. */
int byte_panels(const void *values, const float *scales, const void *bias, const int16_t *x, const float *x_scales, void *y,
                ptrdiff_t batch, ptrdiff_t out, ptrdiff_t blocks, int weight_type, int type, int threads);

/* The sum of the elements. */
INLINE_FOR(TARGET_AVX2) float added_up(__m256 x) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

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

/* Of the 4 x 4 words in each 128 bits of four registers, word j of rows[i] becomes word i of to[j]. rows and to may be the same. */
INLINE_FOR(TARGET_AVX512) void transpose_4(const __m512i rows[4], __m512i to[4]) {
  __m512i t[4];
  for (int i = 0; i < 4; i += 2) {
    t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int j = 0; j < 2; j++) {
    to[2 * j] = _mm512_unpacklo_epi64(t[j], t[j + 2]);
    to[2 * j + 1] = _mm512_unpackhi_epi64(t[j], t[j + 2]);
  }
}

/* rows[i][j] becomes rows[j][i], of 16 words each: of 4 x 4 words in each 128 bits, then of 128-bit parts. */
INLINE_FOR(TARGET_AVX512) void transpose_16(__m512i rows[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 4) transpose_4(rows + i, rows + i);
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; i++) {
    rows[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
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

/* sum plus the products of 32 columns, in pairs. has_vnni: whether the processor has AVX512_VNNI, whose instruction for it
   needs no target attribute here. */
INLINE_FOR(TARGET_AVX512) __m512i add_products(__m512i sum, __m512i columns, __m512i x, int has_vnni) {
  if (!has_vnni) return _mm512_add_epi32(sum, _mm512_madd_epi16(columns, x));
  __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(columns), "v"(x));
  return sum;
}

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
