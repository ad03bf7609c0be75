/* y = x W^T + b for one row of x and a W of bfloat16, on processors with AMX: bit for bit what AMX computes for that row among
   several, except below 1e-38, which AMX counts as 0. So a token's numbers do not depend on what is computed beside it. AMX
   itself takes longer for one row.

   The lanes of a vector are SIDE rows of W. Of each DEPTH columns, the products of the even ones and those of the odd ones are
   added up apart, one after the other, and then to the sum; Intel's manual says so of TDPBF16PS. */
#include "tiles.h"

#ifdef HAS_TILES
typedef struct {
  const char *weight; /* (out, in) of bfloat16 */
  const void *bias;   /* (out) of bfloat16, or NULL */
  const float *x;     /* (2, in / 2), the even columns first */
  void *y;            /* (out) of bfloat16 */
  ptrdiff_t out, in;
} OneRow;

/* SIDE rows of W from `row` on, each `bytes` long; those beyond the last are the last one. */
INLINE void rows_from(const OneRow *a, ptrdiff_t row, ptrdiff_t bytes, const char *rows[SIDE]) {
  for (ptrdiff_t r = 0; r < SIDE; r++) rows[r] = a->weight + (row + r < a->out ? row + r : a->out - 1) * bytes;
}

INLINE_FOR(TARGET_AMX) __m512 sums_of(const OneRow *a, ptrdiff_t row) {
  const float *even = a->x, *odd = even + a->in / 2;
  const char *rows[SIDE];
  __m512 sums = _mm512_setzero_ps();
  rows_from(a, row, a->in * 2, rows);
  const char *next = a->weight + (row + SIDE) * a->in * 2; /* the rows that are read after these, line by line */
  for (ptrdiff_t k = 0; k < a->in; k += DEPTH, even += SIDE, odd += SIDE) {
    __m512i pairs[SIDE];
    __m512 evens = _mm512_setzero_ps(), odds = evens;
    for (int r = 0; r < SIDE; r++) pairs[r] = _mm512_loadu_si512(rows[r] + k * 2);
    transpose_16(pairs);
    for (int j = 0; j < SIDE; j++, next += TILE_BYTES) {
      fetch_line(next);
      evens = _mm512_fmadd_ps((__m512)_mm512_slli_epi32(pairs[j], 16), _mm512_set1_ps(even[j]), evens);
      odds = _mm512_fmadd_ps(truncated((__m512)pairs[j]), _mm512_set1_ps(odd[j]), odds);
    }
    sums = _mm512_add_ps(sums, _mm512_add_ps(evens, odds));
  }
  return sums;
}

TARGET_AMX static void multiply_rows(const OneRow *a, ptrdiff_t start, ptrdiff_t stop) {
  for (ptrdiff_t row = start; row < stop; row += SIDE) {
    __m512 sums = sums_of(a, row);
    write_sums(&sums, 1, a->bias, a->y, row, 0, a->out, 1, BFLOAT16);
  }
}

void one_row(const void *weight, const void *bias, const float *x, void *y, ptrdiff_t out, ptrdiff_t in, int threads) {
  OneRow a = {weight, bias, x, y, out, in};
  ptrdiff_t panels = (out + SIDE - 1) / SIDE, share = (panels + threads - 1) / threads * SIDE;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (ptrdiff_t start = 0; start < out; start += share)
    multiply_rows(&a, start, start + share < out ? start + share : out);
}
#else
void one_row(const void *weight, const void *bias, const float *x, void *y, ptrdiff_t out, ptrdiff_t in, int threads) {}
#endif
