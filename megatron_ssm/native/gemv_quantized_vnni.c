/* Products of one or two rows of x and a W of 8 or 4 bits, by AVX512_VNNI, on processors without AMX.

   W is read line by line, few rows at once, because memory delivers consecutive addresses fastest. The products of a line and a row of
   x are a register of integers. SUMS such registers, of LINES lines of some rows of W, are added up together: the sums of blocks are
   exact. They are multiplied by both scales and added up block by block. So the result of a row does not depend on the number of rows,
   and has the same bits as in gemm_quantized_vnni.c.

   8 bits are widened to 16. 4 bits become unsigned bytes by adding 8, because the processor multiplies four unsigned bytes by signed
   bytes at once. So x is 256 times a byte plus a byte, and 8 times its sum is subtracted. */
#include "quantized_vnni.h"

#ifdef HAS_INTRINSICS
enum {
  LINES = 4,           /* lines of a row that are added up at once */
  QUAD = SUMS / LINES, /* products of a row of W and a row of x that are computed at once */
  AHEAD = 8            /* rows of W of 8 bits by which it is prefetched; half as many of 4 bits */
};

TARGET_AVX512 void split_row(const int16_t *x, char *to, ptrdiff_t blocks) {
  for (ptrdiff_t k = 0; k < blocks; k += 2, to += PARTS * LINE) {
    __m512i offsets[2] = {_mm512_set1_epi8(OFFSET_4), _mm512_set1_epi8(OFFSET_4)};
    memset(to, 0, PARTS * LINE);
    for (int b = 0; b < 2 && k + b < blocks; b++) {
      __m512i left = _mm512_loadu_si512(x + (k + b) * BLOCK), right = _mm512_loadu_si512(x + (k + b) * BLOCK + BLOCK / 2);
      for (int upper = 0; upper < 2; upper++) {
        __m512i words = upper ? upper_columns(left, right) : lower_columns(left, right);
        char *place = to + upper * LINE + b * LINE / 2;
        _mm256_storeu_si256((__m256i *)place, _mm512_cvtepi16_epi8(high_byte(words)));
        _mm256_storeu_si256((__m256i *)(place + 2 * LINE), _mm512_cvtepi16_epi8(words));
      }
    }
    _mm512_storeu_si512(to + 4 * LINE, _mm512_sub_epi32(_mm512_setzero_si512(), line_sums(offsets, to, INT4)));
  }
}

/* The scales of four rows, of up to SCALES of the `left` blocks from rows[q] on. Those of block k are four floats, from
   scales_of(to, k) on. */
INLINE_FOR(TARGET_AVX512) void load_scales(const float *const rows[QUAD], ptrdiff_t left, float to[4][SCALES]) {
  __mmask16 mask = left < SCALES ? (__mmask16)((1u << left) - 1) : 0xffff;
  __m512i row[QUAD];
#pragma GCC unroll 4
  for (int q = 0; q < QUAD; q++) row[q] = _mm512_maskz_loadu_epi32(mask, rows[q]);
  transpose_4(row, row);
  for (int q = 0; q < QUAD; q++) _mm512_storeu_si512(to[q], row[q]);
}
INLINE const float *scales_of(const float scales[4][SCALES], ptrdiff_t block) { return scales[block % 4] + block % SCALES / 4 * 4; }

/* The sums of the products of up to LINES lines of QUAD / count rows of W, each at w[r], and of `count` rows of x. The `half`-th
   block of line j has four sums, from sums[half][4 j] on: the q-th one is that of row q / count of W and row q % count of x.
   Moves w and `ahead`, what is prefetched, on. left: how many blocks of the rows are left. count and weight_type are
   compile-time constants. */
INLINE_FOR(TARGET_AVX512) void add_lines(const char *w[QUAD], const char *x, ptrdiff_t x_stride, const char **ahead, ptrdiff_t left,
                                         float sums[2][SUMS], int count, int weight_type) {
  ptrdiff_t step = blocks_per_line(weight_type), each = bytes_per_block(weight_type);
  __m512i products[SUMS], halves[2];
#pragma GCC unroll 4
  for (int j = 0; j < LINES; j++, x += weight_type == INT8 ? 2 * LINE : PARTS * LINE)
#pragma GCC unroll 4
    for (int r = 0; r < QUAD / count; r++) {
      __m512i line[2], *own = products + QUAD * j + r * count;
      int is_line = left > j * step;
      if (is_line) {
        unpack_line(w[r], line, left - j * step > 1 ? 0xff : 0x0f, weight_type);
        fetch(*ahead, weight_type);
        w[r] += step * each, *ahead += step * each;
      }
#pragma GCC unroll 2
      for (int b = 0; b < count; b++)
        own[b] = is_line ? line_sums(line, x + b * x_stride, weight_type) : _mm512_setzero_si512();
    }
  sums_of_halves(products, halves);
  if (weight_type == INT8) halves[0] = _mm512_add_epi32(halves[0], halves[1]);
  for (int half = 0; half < step; half++) _mm512_storeu_ps(sums[half], _mm512_cvtepi32_ps(halves[half]));
}

/* Here, a->x has rows of 16-bit integers, or rows as split_row writes them; a->x_stride is in bytes. */

/* The products of QUAD / count rows of W from `row` on, of which those beyond the last are the last one, and `count` rows of x.
   x_scales: (blocks, QUAD). count and weight_type are compile-time constants. */
INLINE_FOR(TARGET_AVX512) __m128 multiply_quad(const Product *a, const float *x_scales, ptrdiff_t row, ptrdiff_t last, int count,
                                          int weight_type) {
  ptrdiff_t blocks = a->in / BLOCK, each = bytes_per_block(weight_type), step = blocks_per_line(weight_type);
  ptrdiff_t x_line = weight_type == INT8 ? 2 * LINE : PARTS * LINE;
  const char *w[QUAD], *x = a->x, *ahead = (const char *)a->weight + (row + AHEAD * each / BLOCK) * blocks * each;
  const float *scales[QUAD];
  float of_w[4][SCALES];
  __m128 sums = _mm_setzero_ps();
#pragma GCC unroll 4
  for (int q = 0; q < QUAD; q++) {
    ptrdiff_t own = row + q / count < last ? row + q / count : last;
    w[q / count] = (const char *)a->weight + own * blocks * each, scales[q] = a->scales + own * blocks;
  }
  for (ptrdiff_t k = 0; k < blocks; k += LINES * step, x += LINES * x_line) {
    float products[2][SUMS];
    if (k % SCALES == 0) {
      load_scales(scales, blocks - k, of_w);
#pragma GCC unroll 4
      for (int q = 0; q < QUAD; q++) scales[q] += SCALES;
    }
    add_lines(w, x, a->x_stride, &ahead, blocks - k, products, count, weight_type);
#pragma GCC unroll 8
    for (int i = 0; i < LINES * step; i++) {
      if (k + i == blocks) break;
      __m128 scale = _mm_mul_ps(_mm_loadu_ps(scales_of(of_w, k + i)), _mm_loadu_ps(x_scales + (k + i) * QUAD));
      sums = _mm_fmadd_ps(_mm_loadu_ps(products[i % step] + i / step * QUAD), scale, sums);
    }
  }
  return sums;
}

/* The rows `start` to `stop` of W. count and weight_type are compile-time constants. */
INLINE_FOR(TARGET_AVX512) void multiply_rows(const Product *a, const float *x_scales, ptrdiff_t start, ptrdiff_t stop, int count,
                                        int weight_type) {
  for (ptrdiff_t row = start; row < stop; row += QUAD / count) {
    float sums[QUAD];
    _mm_storeu_ps(sums, multiply_quad(a, x_scales, row, stop - 1, count, weight_type));
    for (int q = 0; q < QUAD && row + q / count < stop; q++) {
      float bias = a->bias ? get(a->bias, row + q / count, a->type) : 0;
      put(a->y, q % count * a->y_stride + row + q / count, sums[q] + bias, a->type);
    }
  }
}

TARGET_AVX512 static void multiply_share(const Product *given, const float *x_scales, ptrdiff_t start, ptrdiff_t stop) {
  const Product a = *given;
  if (a.weight_type == INT8 && a.batch == 1) multiply_rows(&a, x_scales, start, stop, 1, INT8);
  else if (a.weight_type == INT8) multiply_rows(&a, x_scales, start, stop, 2, INT8);
  else if (a.batch == 1) multiply_rows(&a, x_scales, start, stop, 1, INT4);
  else multiply_rows(&a, x_scales, start, stop, 2, INT4);
}

int gemv_quantized_vnni(const Product *p) {
  Product a = *p;
  ptrdiff_t blocks = a.in / BLOCK, share = (a.out + a.threads - 1) / a.threads;
  ptrdiff_t split_bytes = a.weight_type == INT4 ? bytes_of_split_row(blocks) : 0;
  QuantizedX x = x_in_16_bits(p);
  char *split = allocate(a.batch * split_bytes + blocks * QUAD * sizeof(float));
  if (x.values && split) {
    float *x_scales = (float *)(split + a.batch * split_bytes);
    for (ptrdiff_t k = 0; k < blocks; k++)
      for (ptrdiff_t q = 0; q < QUAD; q++) x_scales[k * QUAD + q] = x.scales[q % a.batch * blocks + k];
    a.x = x.values, a.x_stride = a.in * (ptrdiff_t)sizeof(int16_t);
    if (a.weight_type == INT4) {
      for (ptrdiff_t b = 0; b < a.batch; b++) split_row(x.values + b * a.in, split + b * split_bytes, blocks);
      a.x = split, a.x_stride = split_bytes;
    }
#pragma omp parallel for num_threads(a.threads) if (a.threads > 1)
    for (ptrdiff_t start = 0; start < a.out; start += share)
      multiply_share(&a, x_scales, start, start + share < a.out ? start + share : a.out);
  }
  int failed = !x.values || !split;
  free(split);
  free(x.values);
  return failed;
}
#endif
