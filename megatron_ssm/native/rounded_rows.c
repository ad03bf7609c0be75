/* Few rows of x times a W of 8 or 4 bits, by AVX512_VNNI. W is read line by line: 64 columns of 8 bits, or 128 of 4 bits. x is
   rounded to 16 bits (rounded.c), and so the products of a line are sums of integers, which are exact. Each dot product is one
   register of partial sums, so a row's numbers do not depend on what is computed beside it.

   8 bits are widened to 16. 4 bits become bytes without sign, 8 more than the numbers they stand for, because the processor
   multiplies such bytes by bytes with sign, four at once. So x is 256 times a byte plus a byte, and 8 times its sum is taken
   off. In both, a lane of a register has columns of one block. */
#include "byte_lines.h"

#ifdef HAS_INTRINSICS
enum {
  TOGETHER = 8,   /* rows of x that are multiplied at once */
  ROWS = 16,      /* rows of W that stay in the cache while the rows of x change, and by which W is prefetched */
  AT_ONCE = 4     /* rows of W that meet a row of x at once, which saves loads of x */
};

ptrdiff_t bytes_of_x_row(ptrdiff_t blocks, int weight_type) {
  return weight_type == INT8 ? blocks * BLOCK * (ptrdiff_t)sizeof(int16_t) : (blocks + 1) / 2 * PARTS * LINE;
}

/* What the lines of 4 bits meet in a row of x, of 16 bits: the higher bytes for the lower and the upper 4 bits of W, the lower
   bytes for both, and what is taken off. Beyond the last block there are zeros. */
TARGET_AVX512 static void split_row(const int16_t *x, char *to, ptrdiff_t blocks) {
  int16_t columns[BLOCK / 2]; /* of a block, that meet the lower 4 bits of W; the upper ones meet those 16 columns further */
  for (int i = 0; i < BLOCK / 2; i++) columns[i] = (int16_t)(i / 2 + i % 2 * 32);
  __m512i lower = _mm512_loadu_si512(columns), zero = _mm512_setzero_si512();
  for (ptrdiff_t k = 0; k < blocks; k += 2, to += PARTS * LINE) {
    __m512i offsets[2] = {_mm512_set1_epi8(OFFSET_4), _mm512_set1_epi8(OFFSET_4)};
    memset(to, 0, PARTS * LINE);
    for (int b = 0; b < 2 && k + b < blocks; b++) {
      __m512i left = _mm512_loadu_si512(x + (k + b) * BLOCK), right = _mm512_loadu_si512(x + (k + b) * BLOCK + BLOCK / 2);
      for (int upper = 0; upper < 2; upper++) {
        __m512i chosen = _mm512_add_epi16(lower, _mm512_set1_epi16((int16_t)(16 * upper)));
        __m512i words = _mm512_permutex2var_epi16(left, chosen, right);
        char *place = to + upper * LINE + b * LINE / 2;
        _mm256_storeu_si256((__m256i *)place, _mm512_cvtepi16_epi8(high_byte(words)));
        _mm256_storeu_si256((__m256i *)(place + 2 * LINE), _mm512_cvtepi16_epi8(words));
      }
    }
    _mm512_storeu_si512(to + 4 * LINE, _mm512_sub_epi32(zero, line_sums(offsets, to, INT4)));
  }
}

void split_x(const int16_t *x, char *to, ptrdiff_t batch, ptrdiff_t blocks) {
  for (ptrdiff_t b = 0; b < batch; b++, x += blocks * BLOCK, to += bytes_of_x_row(blocks, INT4)) split_row(x, to, blocks);
}

/* Partial sums of `rows` rows of W from `row` on, of which `last` is the last, times `count` rows of x from `first` on. rows,
   count and weight_type are compile-time constants. */
INLINE_FOR(TARGET_AVX512) void multiply_lines(const Linear *a, ptrdiff_t row, ptrdiff_t last, ptrdiff_t first, __m512 *sums,
                                              int rows, int count, int weight_type) {
  ptrdiff_t blocks = a->in / BLOCK, each = bytes_per_block(weight_type), bytes = blocks * each;
  ptrdiff_t x_bytes = a->x_stride, step = blocks_per_line(weight_type);
  const char *w[AT_ONCE], *x = (const char *)a->x + first * x_bytes;
  const float *scales[AT_ONCE], *x_scales = a->x_scales + first * blocks;
#pragma GCC unroll 4
  for (int r = 0; r < rows; r++) {
    ptrdiff_t own = row + r < last ? row + r : last;
    w[r] = (const char *)a->weight + own * bytes, scales[r] = a->scales + own * blocks;
  }
#pragma GCC unroll 8
  for (int s = 0; s < rows * count; s++) sums[s] = _mm512_setzero_ps();
  for (ptrdiff_t start = 0; start < blocks; start += SCALES) {
    ptrdiff_t stop = start + SCALES < blocks ? start + SCALES : blocks;
    __mmask16 mask = (__mmask16)((1u << (stop - start)) - 1);
    __m512i lanes = _mm512_setzero_si512(); /* where each lane's block has its scale */
    if (weight_type == INT4) lanes = _mm512_inserti64x4(lanes, _mm256_set1_epi32(1), 1);
    __m512 both[TOGETHER];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
      for (int b = 0; b < count; b++)
        both[r * count + b] = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, scales[r] + start),
                                            _mm512_maskz_loadu_ps(mask, x_scales + b * blocks + start));
    for (ptrdiff_t k = start; k < stop; k += step, x += weight_type == INT8 ? 2 * LINE : PARTS * LINE) {
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++) {
        __m512i line[2];
        unpack_line(w[r] + k * each, line, blocks - k > 1 ? 0xff : 0x0f, weight_type);
        __builtin_prefetch(w[r] + k * each + ROWS * bytes, 0, 2);
#pragma GCC unroll 8
        for (int b = 0; b < count; b++) {
          __m512 scale = _mm512_permutexvar_ps(lanes, both[r * count + b]);
          __m512 products = _mm512_cvtepi32_ps(line_sums(line, x + b * x_bytes, weight_type));
          sums[r * count + b] = _mm512_fmadd_ps(products, scale, sums[r * count + b]);
        }
      }
      lanes = _mm512_add_epi32(lanes, _mm512_set1_epi32((int)step));
    }
  }
}

/* The rows `start` to `stop` of W times `count` rows of x from `first` on. */
INLINE_FOR(TARGET_AVX512) void multiply_rows(const Linear *a, ptrdiff_t first, ptrdiff_t start, ptrdiff_t stop, int count,
                                             int weight_type) {
  const int rows = SUMS / count, at_once = count == 1 ? AT_ONCE : count == 2 ? AT_ONCE / 2 : 1;
  for (ptrdiff_t row = start; row < stop; row += rows) {
    __m512 sums[SUMS];
    float totals[SUMS];
#pragma GCC unroll 16
    for (int s = rows * count; s < SUMS; s++) sums[s] = _mm512_setzero_ps();
#pragma GCC unroll 16
    for (int r = 0; r < rows; r += at_once)
      multiply_lines(a, row + r, stop - 1, first, sums + r * count, at_once, count, weight_type);
    _mm512_storeu_ps(totals, sums_of_lanes(sums));
    for (int r = 0; r < rows && row + r < stop; r++) {
      float bias = a->bias ? get(a->bias, row + r, a->type) : 0;
      for (int b = 0; b < count; b++)
        put(a->y, (first + b) * a->y_stride + row + r, totals[r * count + b] + bias, a->type);
    }
  }
}

typedef void MultiplyRows(const Linear *, ptrdiff_t first, ptrdiff_t start, ptrdiff_t stop);
#define MULTIPLY_ROWS(TYPE, COUNT)                                                                                  \
  TARGET_AVX512 static void TYPE##_##COUNT(const Linear *given, ptrdiff_t first, ptrdiff_t start, ptrdiff_t stop) { \
    const Linear a = *given;                                                                                        \
    multiply_rows(&a, first, start, stop, COUNT, TYPE);                                                             \
  }
#define FOR_EACH_COUNT(TYPE)                                                                  \
  MULTIPLY_ROWS(TYPE, 1) MULTIPLY_ROWS(TYPE, 2) MULTIPLY_ROWS(TYPE, 3) MULTIPLY_ROWS(TYPE, 4) \
  MULTIPLY_ROWS(TYPE, 5) MULTIPLY_ROWS(TYPE, 6) MULTIPLY_ROWS(TYPE, 7) MULTIPLY_ROWS(TYPE, 8) \
  static MultiplyRows *const for_##TYPE[] = {TYPE##_1, TYPE##_2, TYPE##_3, TYPE##_4,          \
                                             TYPE##_5, TYPE##_6, TYPE##_7, TYPE##_8};
FOR_EACH_COUNT(INT8)
FOR_EACH_COUNT(INT4)

void multiply_rounded_rows(const Linear *a, int weight_type, ptrdiff_t start, ptrdiff_t stop) {
  MultiplyRows *const *functions = weight_type == INT8 ? for_INT8 : for_INT4;
  ptrdiff_t groups = (a->batch + TOGETHER - 1) / TOGETHER;
  for (; start < stop; start += ROWS)
    for (ptrdiff_t group = 0, first = 0; group < groups; group++) { /* groups of almost equal sizes */
      ptrdiff_t after = (group + 1) * a->batch / groups;
      functions[after - first - 1](a, first, start, start + ROWS < stop ? start + ROWS : stop);
      first = after;
    }
}
#endif
