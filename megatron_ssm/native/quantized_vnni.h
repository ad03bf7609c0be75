/* Lines of W of 8 or 4 bits, and their products with few rows of x by AVX512_VNNI, for gemv_quantized_vnni.c, gemm_quantized_vnni.c and
   gemv_quantized_amx.c. A line has 64 columns of 8 bits, or 128 of 4 bits. */
#ifndef QUANTIZED_VNNI_H
#define QUANTIZED_VNNI_H

#include "quantized.h"

#ifdef HAS_INTRINSICS
enum {
  SUMS = 16,   /* registers that are added up at once */
  SCALES = 16, /* blocks whose scales are in a register */
  PARTS = 5,   /* registers of x that a line of 4 bits meets, as split_row writes it */
  OFFSET_4 = 8 /* of 4-bit integers of W */
};

INLINE ptrdiff_t blocks_per_line(int weight_type) { return weight_type == INT8 ? 1 : 2; }

/* Prefetches a line of W, on processors without AMX: to the second-level cache, or to the first one, which has space for the
   short rows of 4 bits. */
INLINE void fetch(const char *line, int weight_type) {
  if (weight_type == INT8) fetch_line(line);
  else __asm__ volatile("prefetcht0 %0" : : "m"(*line));
}

INLINE_FOR(TARGET_AVX512) __m512i add_bytes(__m512i sum, __m512i words, __m512i x) {
  return (__m512i)add_word((__m512)sum, (__m512)words, (__m512)x, BYTE_QUADS);
}

/* Bytes without sign: 8 bits, or the lower or the upper 4 bits of each byte, which are OFFSET or OFFSET_4 more then. */
INLINE_FOR(TARGET_AVX512) __m512i without_sign(__m512i bytes) {
  return _mm512_xor_si512(bytes, _mm512_set1_epi8((char)OFFSET));
}
INLINE_FOR(TARGET_AVX512) __m512i lower_bits(__m512i bytes) { /* (bytes & 15) ^ OFFSET_4 */
  return _mm512_ternarylogic_epi32(bytes, _mm512_set1_epi8(15), _mm512_set1_epi8(OFFSET_4), 0x6a);
}
INLINE_FOR(TARGET_AVX512) __m512i upper_bits(__m512i bytes) { return lower_bits(_mm512_srli_epi16(bytes, 4)); }

/* A line of W as two registers; of 4 bits, the first has the columns of the lower bits. mask: of its words of 64 bits. */
INLINE_FOR(TARGET_AVX512) void unpack_line(const char *w, __m512i to[2], __mmask8 mask, int weight_type) {
  if (weight_type == INT8) {
    to[0] = half_block(w, 0, INT8), to[1] = half_block(w, 1, INT8);
    return;
  }
  __m512i bytes = _mm512_maskz_loadu_epi64(mask, w);
  to[0] = lower_bits(bytes), to[1] = upper_bits(bytes);
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

/* The operands of lines of 4 bits in a row of x of 16 bits: for each two blocks, the higher bytes for the lower and the upper 4 bits of
   W, the lower bytes for both, and the number to subtract; zeros beyond the last block. */
void split_row(const int16_t *x, char *to, ptrdiff_t blocks);
INLINE ptrdiff_t bytes_of_split_row(ptrdiff_t blocks) { return (blocks + 1) / 2 * PARTS * LINE; }

/* The scales of 16 rows of W, of SCALES of their `blocks` blocks from k on: (SCALES, rows). Beyond the last block there are zeros. */
INLINE_FOR(TARGET_AVX512) void transpose_scales(const float *const rows[16], ptrdiff_t k, ptrdiff_t blocks, __m512i to[SCALES]) {
  __mmask16 mask = blocks - k < SCALES ? (__mmask16)((1u << (blocks - k)) - 1) : 0xffff;
  for (int r = 0; r < 16; r++) to[r] = _mm512_maskz_loadu_epi32(mask, rows[r] + k);
  transpose_16(to);
}

/* The sums of the lanes of SUMS registers, apart for the lower and the upper half of the lanes: a lane for each register. */
INLINE_FOR(TARGET_AVX512) void sums_of_halves(__m512i v[SUMS], __m512i to[2]) {
  for (int i = 0; i < 8; i++)
    v[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]));
  for (int i = 0; i < 4; i++)
    v[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_epi64(v[2 * i], v[2 * i + 1]));
  for (int i = 0; i < 2; i++)
    v[i] = _mm512_add_epi32(_mm512_shuffle_i32x4(v[2 * i], v[2 * i + 1], 0x88),
                            _mm512_shuffle_i32x4(v[2 * i], v[2 * i + 1], 0xdd));
  to[0] = _mm512_shuffle_i32x4(v[0], v[1], 0x88), to[1] = _mm512_shuffle_i32x4(v[0], v[1], 0xdd);
}
#endif

#endif
