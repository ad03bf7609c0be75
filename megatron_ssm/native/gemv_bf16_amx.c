/* Products of one or two rows of x and a W, both of bfloat16, on processors with AMX. The results have the same bits as AMX's, except
   below 1e-38, which AMX counts as 0. So the result of a token does not depend on the number of tokens. AMX itself would take longer
   for so few rows.

   The lanes of a vector are SIDE rows of W. In each DEPTH columns, the products of even columns and the products of odd columns are
   added up separately, one after the other, and then added to the sum, as TDPBF16PS does by Intel's manual. */
#include "amx.h"

#ifdef HAS_TILES
enum { MOST = 2 }; /* rows of x */

/* Here, a->x is float32, (batch, 2, in / 2): the even columns first. `in` is a multiple of DEPTH. */

/* The products of SIDE rows of W from `row` on (the last row stands for rows beyond it) and the `count` rows of x, a compile-time
   constant. Lanes are rows of W. */
INLINE_FOR(TARGET_AMX) void multiply_panel(const Product *a, ptrdiff_t row, __m512 *sums, int count) {
  const char *rows[SIDE], *next = (const char *)a->weight + (row + SIDE) * a->in * 2; /* the rows after these, to be prefetched */
  const float *even = a->x, *odd = even + a->in / 2;
  for (ptrdiff_t r = 0; r < SIDE; r++) rows[r] = (const char *)a->weight + (row + r < a->out ? row + r : a->out - 1) * a->in * 2;
  for (int c = 0; c < count; c++) sums[c] = _mm512_setzero_ps();
  for (ptrdiff_t k = 0; k < a->in; k += DEPTH, even += SIDE, odd += SIDE) {
    __m512i pairs[SIDE];
    __m512 evens[MOST], odds[MOST];
    for (int c = 0; c < count; c++) evens[c] = odds[c] = _mm512_setzero_ps();
    for (int r = 0; r < SIDE; r++) pairs[r] = _mm512_loadu_si512(rows[r] + k * 2);
    transpose_16(pairs);
#pragma GCC unroll 16
    for (int j = 0; j < SIDE; j++, next += TILE_BYTES) {
      __m512 first = (__m512)_mm512_slli_epi32(pairs[j], 16), second = truncated((__m512)pairs[j]);
      fetch_line(next);
#pragma GCC unroll 2
      for (int c = 0; c < count; c++) {
        evens[c] = _mm512_fmadd_ps(first, _mm512_set1_ps(even[c * a->in + j]), evens[c]);
        odds[c] = _mm512_fmadd_ps(second, _mm512_set1_ps(odd[c * a->in + j]), odds[c]);
      }
    }
    for (int c = 0; c < count; c++) sums[c] = _mm512_add_ps(sums[c], _mm512_add_ps(evens[c], odds[c]));
  }
}

TARGET_AMX static void multiply_rows(const Product *a, ptrdiff_t start, ptrdiff_t stop) {
  for (ptrdiff_t row = start; row < stop; row += SIDE) {
    __m512 sums[MOST];
    if (a->batch == 1) multiply_panel(a, row, sums, 1);
    else multiply_panel(a, row, sums, 2);
    write_sums(a, sums, a->batch, row, 0, BFLOAT16);
  }
}

int gemv_bf16_amx(const Product *p) {
  Product a = *p;
  ptrdiff_t panels = (a.out + SIDE - 1) / SIDE, share = (panels + a.threads - 1) / a.threads * SIDE;
  float *planes = allocate(a.batch * a.in * sizeof(float));
  if (!planes) return 1;
  for (ptrdiff_t b = 0; b < a.batch; b++)
    for (ptrdiff_t i = 0; i < a.in; i++) planes[b * a.in + i % 2 * (a.in / 2) + i / 2] = get(x_row(p, b), i, BFLOAT16);
  a.x = planes;
#pragma omp parallel for num_threads(a.threads) if (a.threads > 1)
  for (ptrdiff_t start = 0; start < a.out; start += share)
    multiply_rows(&a, start, start + share < a.out ? start + share : a.out);
  free(planes);
  return 0;
}
#endif
