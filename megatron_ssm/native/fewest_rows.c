/* y = x W^T + b for 1 to FEWEST rows of x and a W of bfloat16, on processors with AMX: bit for bit what AMX computes for a row,
   except below 1e-38, which AMX counts as 0. So a token's numbers do not depend on what is computed beside it. AMX itself takes
   longer for so few rows.

   The lanes of a vector are SIDE rows of W. Of each DEPTH columns, the products of the even ones and those of the odd ones are
   added up apart, one after the other, and then to the sum; Intel's manual says so of TDPBF16PS. */
#include "tiles.h"

#ifdef HAS_TILES
typedef struct {
  const char *weight; /* (out, in) of bfloat16 */
  const void *bias;   /* (out) of bfloat16, or NULL */
  const float *x;     /* (batch, 2, in / 2), the even columns first */
  void *y;            /* (batch, out) of bfloat16 */
  ptrdiff_t batch, out, in;
} Product;

/* SIDE rows of W from `row` on, of which those beyond the last are the last one, times the rows of x, of which there are
   `count`, a compile-time constant: lanes are rows of W. */
INLINE_FOR(TARGET_AMX) void multiply(const Product *a, ptrdiff_t row, __m512 *sums, int count) {
  const char *rows[SIDE], *next = a->weight + (row + SIDE) * a->in * 2; /* what is read after these rows, line by line */
  const float *even = a->x, *odd = even + a->in / 2;
  for (ptrdiff_t r = 0; r < SIDE; r++) rows[r] = a->weight + (row + r < a->out ? row + r : a->out - 1) * a->in * 2;
  for (int c = 0; c < count; c++) sums[c] = _mm512_setzero_ps();
  for (ptrdiff_t k = 0; k < a->in; k += DEPTH, even += SIDE, odd += SIDE) {
    __m512i pairs[SIDE];
    __m512 evens[FEWEST], odds[FEWEST];
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
    __m512 sums[FEWEST];
    if (a->batch == 1) multiply(a, row, sums, 1);
    else multiply(a, row, sums, 2);
    write_sums(sums, a->batch, a->bias, a->y, row, 0, a->out, a->batch, BFLOAT16);
  }
}

void fewest_rows(const void *weight, const void *bias, const float *x, void *y, ptrdiff_t batch, ptrdiff_t out, ptrdiff_t in,
                 int threads) {
  Product a = {weight, bias, x, y, batch, out, in};
  ptrdiff_t panels = (out + SIDE - 1) / SIDE, share = (panels + threads - 1) / threads * SIDE;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (ptrdiff_t start = 0; start < out; start += share)
    multiply_rows(&a, start, start + share < out ? start + share : out);
}
#else
void fewest_rows(const void *weight, const void *bias, const float *x, void *y, ptrdiff_t batch, ptrdiff_t out, ptrdiff_t in,
                 int threads) {}
#endif
