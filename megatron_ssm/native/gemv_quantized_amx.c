/* Products of one or two rows of x and a W of 8 or 4 bits by AVX512_VNNI, on processors with AMX. The results have the same bits as in
   gemm_quantized_amx.c, so the result of a token does not depend on the number of tokens. AMX itself would take longer for so few rows.

   x is rounded to 16 bits (quantized.h), as 256 times a byte plus a byte. W's numbers become unsigned bytes: 128 is added to those of 8
   bits and 8 to those of 4 bits, and that offset times the sum of x is subtracted. So the sums of a block are exact, like AMX's. */
#include "quantized_vnni.h"
#include "amx.h"

#ifdef HAS_TILES
enum {
  PARTS_8 = 3, /* registers of x that a line of 8 bits meets */
  MOST = 2     /* rows of x */
};

/* The sums in each lane of the products of a line of bytes without sign and of x, as split_row_8 writes it. */
INLINE_FOR(TARGET_AMX) __m512i byte_sums(__m512i w, const char *x) {
  __m512i high = add_bytes(_mm512_setzero_si512(), w, _mm512_loadu_si512(x));
  __m512i low = add_bytes(_mm512_loadu_si512(x + 2 * LINE), w, _mm512_loadu_si512(x + LINE));
  return _mm512_add_epi32(low, _mm512_slli_epi32(high, 8));
}

/* The three operands of a line of 8 bits as unsigned bytes: the higher bytes of x, the lower bytes, and the number to subtract. */
TARGET_AMX static void split_row_8(const int16_t *x, char *to, ptrdiff_t blocks) {
  for (ptrdiff_t k = 0; k < blocks; k++, x += BLOCK, to += PARTS_8 * LINE) {
    for (int half = 0; half < 2; half++) {
      __m512i words = _mm512_loadu_si512(x + half * BLOCK / 2);
      _mm256_storeu_si256((__m256i *)to + half, _mm512_cvtepi16_epi8(high_byte(words)));
      _mm256_storeu_si256((__m256i *)(to + LINE) + half, _mm512_cvtepi16_epi8(words));
    }
    _mm512_storeu_si512(to + 2 * LINE, _mm512_setzero_si512());
    __m512i sums = byte_sums(_mm512_set1_epi8((char)OFFSET), to);
    _mm512_storeu_si512(to + 2 * LINE, _mm512_sub_epi32(_mm512_setzero_si512(), sums));
  }
}

/* Here, a->x has rows as split_row or split_row_8 writes them; a->x_stride is in bytes. */

/* The products of SUMS rows of W from `row` on (the last row stands for rows beyond it) and the rows of x. Lanes are rows of W. The
   sum of a block is exact; it is multiplied by both scales and added to the sum of the blocks before it. */
INLINE_FOR(TARGET_AMX) void multiply_few(const Product *a, const float *x_scales, ptrdiff_t row, __m512 *sums, int weight_type) {
  ptrdiff_t blocks = a->in / BLOCK, each = bytes_per_block(weight_type), step = blocks_per_line(weight_type);
  ptrdiff_t parts = weight_type == INT8 ? PARTS_8 : PARTS;
  const char *w[SUMS], *x = a->x;
  const float *scales[SUMS];
  __m512i of_rows[SCALES];
  for (ptrdiff_t b = 0; b < a->batch; b++) sums[b] = _mm512_setzero_ps();
  for (ptrdiff_t r = 0; r < SUMS; r++) {
    ptrdiff_t own = row + r < a->out ? row + r : a->out - 1;
    w[r] = (const char *)a->weight + own * blocks * each, scales[r] = a->scales + own * blocks;
  }
  const char *next = (const char *)a->weight + (row + 2 * SUMS) * blocks * each; /* rows that are read later, line by line */
  for (ptrdiff_t k = 0; k < blocks; k += step, x += parts * LINE) {
    __mmask8 mask = blocks - k < step ? 0x0f : 0xff;
    if (k % SCALES == 0) transpose_scales(scales, k, blocks, of_rows);
    for (ptrdiff_t b = 0; b < a->batch; b++) {
      const char *own = x + b * a->x_stride;
      __m512i products[SUMS], halves[2];
#pragma GCC unroll 16
      for (int r = 0; r < SUMS; r++) {
        const char *line = w[r] + k * each;
        if (weight_type == INT4) {
          __m512i columns[2];
          unpack_line(line, columns, mask, INT4);
          products[r] = line_sums(columns, own, INT4);
        } else products[r] = byte_sums(without_sign(_mm512_loadu_si512(line)), own);
        if (b == 0) fetch_line(next), next += LINE;
      }
      sums_of_halves(products, halves);
      if (weight_type == INT8) halves[0] = _mm512_add_epi32(halves[0], halves[1]);
      for (int i = 0; i < step && k + i < blocks; i++) {
        __m512 scale = _mm512_mul_ps((__m512)of_rows[k % SCALES + i], _mm512_set1_ps(x_scales[b * blocks + k + i]));
        sums[b] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(halves[i]), scale, sums[b]);
      }
    }
  }
}

TARGET_AMX static void multiply_rows(const Product *a, const float *x_scales, ptrdiff_t start, ptrdiff_t stop) {
  for (ptrdiff_t row = start; row < stop; row += SUMS) {
    __m512 sums[MOST];
    if (a->weight_type == INT8) multiply_few(a, x_scales, row, sums, INT8);
    else multiply_few(a, x_scales, row, sums, INT4);
    if (a->type == FLOAT32) write_sums(a, sums, a->batch, row, 0, FLOAT32);
    else write_sums(a, sums, a->batch, row, 0, BFLOAT16);
  }
}

int gemv_quantized_amx(const Product *p) {
  Product a = *p;
  ptrdiff_t blocks = a.in / BLOCK, panels = (a.out + SUMS - 1) / SUMS, share = (panels + a.threads - 1) / a.threads * SUMS;
  QuantizedX x = x_in_16_bits(p);
  a.x_stride = a.weight_type == INT8 ? blocks * PARTS_8 * LINE : bytes_of_split_row(blocks);
  char *split = allocate(a.batch * a.x_stride);
  if (x.values && split) {
    for (ptrdiff_t b = 0; b < a.batch; b++) {
      if (a.weight_type == INT8) split_row_8(x.values + b * a.in, split + b * a.x_stride, blocks);
      else split_row(x.values + b * a.in, split + b * a.x_stride, blocks);
    }
    a.x = split;
#pragma omp parallel for num_threads(a.threads) if (a.threads > 1)
    for (ptrdiff_t start = 0; start < a.out; start += share)
      multiply_rows(&a, x.scales, start, start + share < a.out ? start + share : a.out);
  }
  int failed = !x.values || !split;
  free(split);
  free(x.values);
  return failed;
}
#endif
