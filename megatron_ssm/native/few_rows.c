/* Few rows of x times a matrix by AVX-512. W is read row by row, because consecutive addresses are what memory delivers
   fastest. Each dot product is one register of partial sums, so a row's numbers do not depend on what is computed beside it. */
#include "linear.h"

#ifdef HAS_INTRINSICS
enum {
  TOGETHER = 8, /* rows of x that are multiplied at once */
  SUMS = 16,    /* registers that are added up at once */
  ROWS = 16,    /* rows of W that stay in the cache while the rows of x change, and by which W is prefetched */
  UNAIDED = 2   /* rows of x up to which the processor's own prefetching is fastest */
};

/* The sums of the lanes of each register. */
INLINE_FOR(TARGET_AVX512) __m512 sums_of_lanes(__m512 v[SUMS]) {
  for (int i = 0; i < 8; i++)
    v[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
  for (int i = 0; i < 4; i++) {
    __m512d even = (__m512d)v[2 * i], odd = (__m512d)v[2 * i + 1];
    v[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(even, odd), (__m512)_mm512_unpackhi_pd(even, odd));
  }
  for (int count = 2; count; count /= 2)
    for (int i = 0; i < count; i++)
      v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x88),
                           _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xdd));
  return v[0];
}

/* Partial sums of a row of W, of so many bytes, times `count` rows of x, x_bytes apart. ahead: what is prefetched, or NULL. count
   and kind are compile-time constants. */
INLINE_FOR(TARGET_AVX512) void multiply_row(const char *w, const char *x, ptrdiff_t bytes, ptrdiff_t x_bytes, const char *ahead,
                                          __m512 *sums, int count, Words kind) {
  __m512 each[TOGETHER];
  ptrdiff_t i = 0;
#pragma GCC unroll 8
  for (int b = 0; b < count; b++) each[b] = _mm512_setzero_ps();
  for (; i + LINE <= bytes; i += LINE) {
    if (count > UNAIDED) __builtin_prefetch(ahead + i, 0, 2);
    __m512 words = _mm512_loadu_ps(w + i);
#pragma GCC unroll 8
    for (int b = 0; b < count; b++) each[b] = add_word(each[b], words, _mm512_loadu_ps(x + b * x_bytes + i), kind);
  }
  __mmask32 mask = (1u << (bytes - i) / 2) - 1; /* of the columns that are left */
  if (mask) {
    __m512 words = (__m512)_mm512_maskz_loadu_epi16(mask, w + i);
#pragma GCC unroll 8
    for (int b = 0; b < count; b++)
      each[b] = add_word(each[b], words, (__m512)_mm512_maskz_loadu_epi16(mask, x + b * x_bytes + i), kind);
  }
#pragma GCC unroll 8
  for (int b = 0; b < count; b++) sums[b] = each[b];
}

/* The rows `start` to `stop` of W times `count` rows of x from `first` on. ahead: rows of W that are prefetched, beginning with
   row `next`. */
INLINE_FOR(TARGET_AVX512) void multiply_rows(const Linear *a, ptrdiff_t first, ptrdiff_t start, ptrdiff_t stop, ptrdiff_t next,
                                           ptrdiff_t ahead, int count, Words kind) {
  ptrdiff_t size = kind == FLOATS ? 4 : 2, stride = a->weight_stride * size, bytes = a->in * size;
  const char *w = (const char *)a->weight, *x = (const char *)a->x + first * a->x_stride * size;
  for (ptrdiff_t row = start; row < stop; row += SUMS / count) {
    __m512 sums[SUMS];
    float totals[SUMS];
#pragma GCC unroll 16
    for (int s = 0; s < SUMS; s++) sums[s] = _mm512_setzero_ps();
#pragma GCC unroll 16
    for (int r = 0; r < SUMS / count; r++) {
      ptrdiff_t own = row + r < stop ? row + r : stop - 1, done = own - start;
      multiply_row(w + own * stride, x, bytes, a->x_stride * size, w + (done < ahead ? next + done : own) * stride,
                   sums + r * count, count, kind);
    }
    _mm512_storeu_ps(totals, sums_of_lanes(sums));
    for (int r = 0; r < SUMS / count && row + r < stop; r++) {
      float bias = a->bias ? get(a->bias, row + r, a->type) : 0;
      for (int b = 0; b < count; b++)
        put(a->y, (first + b) * a->y_stride + row + r, totals[r * count + b] + bias, a->type);
    }
  }
}

typedef void MultiplyRows(const Linear *, ptrdiff_t first, ptrdiff_t start, ptrdiff_t stop, ptrdiff_t next, ptrdiff_t ahead);
#define MULTIPLY_ROWS(NAME, COUNT, KIND)                                                                        \
  TARGET_AVX512 static void NAME##COUNT(const Linear *given, ptrdiff_t first, ptrdiff_t start, ptrdiff_t stop, \
                                        ptrdiff_t next, ptrdiff_t ahead) {                                      \
    const Linear a = *given;                                                                                    \
    multiply_rows(&a, first, start, stop, next, ahead, COUNT, KIND);                                            \
  }
#define FOR_EACH_COUNT(NAME, KIND)                                                                              \
  MULTIPLY_ROWS(NAME, 1, KIND) MULTIPLY_ROWS(NAME, 2, KIND) MULTIPLY_ROWS(NAME, 3, KIND)                        \
  MULTIPLY_ROWS(NAME, 4, KIND) MULTIPLY_ROWS(NAME, 5, KIND) MULTIPLY_ROWS(NAME, 6, KIND)                        \
  MULTIPLY_ROWS(NAME, 7, KIND) MULTIPLY_ROWS(NAME, 8, KIND)                                                     \
  static MultiplyRows *const NAME[] = {NAME##1, NAME##2, NAME##3, NAME##4, NAME##5, NAME##6, NAME##7, NAME##8};
FOR_EACH_COUNT(floats, FLOATS)
FOR_EACH_COUNT(bfloat16_pairs, BFLOAT16_PAIRS)

void multiply_few_rows(const Linear *a, Words kind, ptrdiff_t start, ptrdiff_t stop) {
  MultiplyRows *const *functions = kind == FLOATS ? floats : bfloat16_pairs;
  ptrdiff_t groups = (a->batch + TOGETHER - 1) / TOGETHER, ahead = (ROWS + groups - 1) / groups;
  for (; start < stop; start += ROWS)
    for (ptrdiff_t group = 0, first = 0; group < groups; group++) { /* groups of almost equal sizes; each prefetches its part */
      ptrdiff_t end = start + ROWS < stop ? start + ROWS : stop, after = (group + 1) * a->batch / groups;
      functions[after - first - 1](a, first, start, end, start + ROWS + group * ahead, ahead);
      first = after;
    }
}
#endif
