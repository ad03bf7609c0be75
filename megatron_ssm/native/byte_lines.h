/* Lines of W of 8 or 4 bits, and their products with few rows of x by AVX512_VNNI: what rounded_rows.c and fewest_rounded_rows.c
   share. A line has 64 columns of 8 bits, or 128 of 4 bits. */
#ifndef BYTE_LINES_H
#define BYTE_LINES_H

#include "linear.h"

#ifdef HAS_INTRINSICS
enum {
  SUMS = 16,   /* registers that are added up at once */
  SCALES = 16, /* blocks whose scales are in a register */
  PARTS = 5,   /* registers of x that a line of 4 bits meets, as split_x writes it */
  OFFSET_4 = 8 /* of 4-bit integers of W */
};

INLINE ptrdiff_t blocks_per_line(int weight_type) { return weight_type == INT8 ? 1 : 2; }

INLINE_FOR(TARGET_AVX512) __m512i add_bytes(__m512i sum, __m512i words, __m512i x) {
  return (__m512i)add_word((__m512)sum, (__m512)words, (__m512)x, BYTE_QUADS);
}

/* A line of W as two registers; of 4 bits, the first has the columns of the lower bits. mask: of its words of 64 bits. */
INLINE_FOR(TARGET_AVX512) void unpack_line(const char *w, __m512i to[2], __mmask8 mask, int weight_type) {
  if (weight_type == INT8) {
    to[0] = half_block(w, 0, INT8), to[1] = half_block(w, 1, INT8);
    return;
  }
  __m512i words = _mm512_maskz_loadu_epi64(mask, w), lower = _mm512_set1_epi8(15), offset = _mm512_set1_epi8(OFFSET_4);
  to[0] = _mm512_ternarylogic_epi32(words, lower, offset, 0x6a); /* (words & lower) ^ offset */
  to[1] = _mm512_ternarylogic_epi32(_mm512_srli_epi16(words, 4), lower, offset, 0x6a);
}

/* The sums of the products of a line of W and of x in each lane. */
INLINE_FOR(TARGET_AVX512) __m512i line_sums(const __m512i w[2], const char *x, int weight_type) {
  __m512i first = _mm512_loadu_si512(x), second = _mm512_loadu_si512(x + LINE), zero = _mm512_setzero_si512();
  if (weight_type == INT8) return add_products(add_products(zero, w[0], first, 1), w[1], second, 1);
  __m512i high = add_bytes(add_bytes(zero, w[0], first), w[1], second);
  __m512i low = add_bytes(_mm512_loadu_si512(x + 4 * LINE), w[0], _mm512_loadu_si512(x + 2 * LINE));
  low = add_bytes(low, w[1], _mm512_loadu_si512(x + 3 * LINE));
  return _mm512_add_epi32(low, _mm512_slli_epi32(high, 8));
}
#endif

#endif
