/* y = x W^T + b for one row of x, on processors with AMX: bit for bit what AMX computes for that row among several, except
   below 1e-38, which AMX counts as 0. So a token's numbers do not depend on what is computed beside it. AMX itself takes longer
   for one row.

   The lanes of a vector are SIDE rows of W. BFLOAT16: of each DEPTH columns, the products of the even ones and those of the odd
   ones are added up apart, one after the other, and then to the sum; Intel's manual says so of TDPBF16PS. INT8, INT4: see
   byte_tiles.c. */
#include "tiles.h"

#ifdef HAS_TILES
enum { AHEAD = 12 * TILE_BYTES }; /* by how many bytes of each row W is prefetched */

typedef struct {
  const char *values;    /* (out, in) of weight_type */
  const float *scales;   /* (out, in / BLOCK) of INT8 and INT4 */
  const void *bias;      /* (out) of `type`, or NULL */
  const void *x;         /* BFLOAT16: (2, in / 2) of float32, the even columns first; otherwise (in) of 16 bits */
  const float *x_scales; /* (in / BLOCK) of INT8 and INT4 */
  void *y;               /* (out) of `type` */
  ptrdiff_t out, in;
  int type, weight_type;
} OneRow;

/* SIDE rows of W from `row` on, each `bytes` long; those beyond the last are the last one. */
INLINE void rows_from(const OneRow *a, ptrdiff_t row, ptrdiff_t bytes, const char *rows[SIDE]) {
  for (ptrdiff_t r = 0; r < SIDE; r++) rows[r] = a->values + (row + r < a->out ? row + r : a->out - 1) * bytes;
}

/* Prefetches what is read AHEAD bytes after `place` in a row; at its end, in the row that is SIDE rows below. */
INLINE void prefetch(const char *row, ptrdiff_t place, ptrdiff_t row_bytes) {
  place += AHEAD;
  __builtin_prefetch(row + (place < row_bytes ? place : place + (SIDE - 1) * row_bytes));
}

INLINE_FOR(TARGET_AMX) __m512 bfloat16_sums(const OneRow *a, ptrdiff_t row) {
  const float *even = a->x, *odd = even + a->in / 2;
  const char *rows[SIDE];
  __m512 sums = _mm512_setzero_ps();
  rows_from(a, row, a->in * 2, rows);
  for (ptrdiff_t k = 0; k < a->in; k += DEPTH, even += SIDE, odd += SIDE) {
    __m512i pairs[SIDE];
    __m512 evens = _mm512_setzero_ps(), odds = evens;
    for (int r = 0; r < SIDE; r++) {
      prefetch(rows[r], k * 2, a->in * 2);
      pairs[r] = _mm512_loadu_si512(rows[r] + k * 2);
    }
    transpose_16(pairs);
    for (int j = 0; j < SIDE; j++) {
      evens = _mm512_fmadd_ps((__m512)_mm512_slli_epi32(pairs[j], 16), _mm512_set1_ps(even[j]), evens);
      odds = _mm512_fmadd_ps(truncated((__m512)pairs[j]), _mm512_set1_ps(odd[j]), odds);
    }
    sums = _mm512_add_ps(sums, _mm512_add_ps(evens, odds));
  }
  return sums;
}

/* The sums of the lanes of each vector. */
INLINE_FOR(TARGET_AMX) __m512i sums_of_lanes(__m512i v[SIDE]) {
  for (int i = 0; i < 8; i++)
    v[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]));
  for (int i = 0; i < 4; i++)
    v[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_epi64(v[2 * i], v[2 * i + 1]));
  for (int count = 2; count; count /= 2)
    for (int i = 0; i < count; i++)
      v[i] = _mm512_add_epi32(_mm512_shuffle_i32x4(v[2 * i], v[2 * i + 1], 0x88),
                              _mm512_shuffle_i32x4(v[2 * i], v[2 * i + 1], 0xdd));
  return v[0];
}

/* The scales of SIDE rows of W from `row` on, of SIDE blocks from k on: (blocks, rows). */
INLINE_FOR(TARGET_AMX) void load_scales(const OneRow *a, ptrdiff_t row, ptrdiff_t k, ptrdiff_t blocks, __m512i scales[SIDE]) {
  __mmask16 mask = blocks - k < SIDE ? (1 << (blocks - k)) - 1 : 0xffff;
  for (ptrdiff_t r = 0; r < SIDE; r++)
    scales[r] = _mm512_maskz_loadu_epi32(mask, a->scales + (row + r < a->out ? row + r : a->out - 1) * blocks + k);
  transpose_16(scales);
}

INLINE_FOR(TARGET_AMX) __m512 rounded_sums(const OneRow *a, ptrdiff_t row, int weight_type) {
  ptrdiff_t blocks = a->in / BLOCK, bytes = bytes_per_block(weight_type);
  const int16_t *x = a->x;
  const char *rows[SIDE];
  __m512i scales[SIDE], products[SIDE];
  __m512 sums = _mm512_setzero_ps();
  rows_from(a, row, blocks * bytes, rows);
  for (ptrdiff_t k = 0; k < blocks; k++, x += BLOCK) {
    __m512i left = _mm512_loadu_si512(x), right = _mm512_loadu_si512(x + BLOCK / 2);
    if (k % SIDE == 0) load_scales(a, row, k, blocks, scales);
    for (int r = 0; r < SIDE; r++) {
      const char *block = rows[r] + k * bytes;
      prefetch(rows[r], k * bytes, blocks * bytes);
      products[r] = add_products(_mm512_setzero_si512(), half_block(block, 0, weight_type), left, 1);
      products[r] = add_products(products[r], half_block(block, 1, weight_type), right, 1);
    }
    __m512 both = _mm512_mul_ps((__m512)scales[k % SIDE], _mm512_set1_ps(a->x_scales[k]));
    sums = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums_of_lanes(products)), both, sums);
  }
  return sums;
}

TARGET_AMX static void multiply_rows(const OneRow *a, ptrdiff_t start, ptrdiff_t stop) {
  for (ptrdiff_t row = start; row < stop; row += SIDE) {
    __m512 sums = a->weight_type == BFLOAT16 ? bfloat16_sums(a, row)
                  : a->weight_type == INT8   ? rounded_sums(a, row, INT8)
                                             : rounded_sums(a, row, INT4);
    if (a->type == FLOAT32) write_sums(&sums, 1, a->bias, a->y, row, 0, a->out, 1, FLOAT32);
    else write_sums(&sums, 1, a->bias, a->y, row, 0, a->out, 1, BFLOAT16);
  }
}

void one_row(const void *values, const float *scales, const void *bias, const void *x, const float *x_scales, void *y,
             ptrdiff_t out, ptrdiff_t in, int weight_type, int type, int threads) {
  OneRow a = {values, scales, bias, x, x_scales, y, out, in, type, weight_type};
  ptrdiff_t panels = (out + SIDE - 1) / SIDE, share = (panels + threads - 1) / threads * SIDE;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (ptrdiff_t start = 0; start < out; start += share)
    multiply_rows(&a, start, start + share < out ? start + share : out);
}
#else
void one_row(const void *values, const float *scales, const void *bias, const void *x, const float *x_scales, void *y,
             ptrdiff_t out, ptrdiff_t in, int weight_type, int type, int threads) {}
#endif
