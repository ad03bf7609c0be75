/* Few rows of x times a matrix of their type, or of float32 times one of bfloat16, by AVX-512. W is read row by row,
   or few rows at once, because consecutive addresses are what memory delivers fastest. Each dot product is one register of partial
   sums, so a row's numbers do not depend on what is computed beside it. */
#include "linear.h"

#ifdef HAS_INTRINSICS
enum {
  TOGETHER = 8, /* rows of x that are multiplied at once */
  SUMS = 16,    /* registers that are added up at once */
  ROWS = 16,    /* rows of W that stay in the cache while the rows of x change, and by which W is prefetched */
  WIDENED = 16, /* instead of a type: W is of BFLOAT16, and x of FLOAT32, in two planes (linear.c) */
  ALL = -1,     /* elements of a register, as a mask */
  UNAIDED = 2,  /* rows of x up to which the processor's own prefetching is fastest, on processors without AMX, */
  LONG = 6144,  /* unless the rows of W have so many bytes; */
  AT_ONCE = 4   /* then so many of them at once are fastest */
};

INLINE int type_of_weight(int kind) { return kind == WIDENED ? BFLOAT16 : kind; }
INLINE int type_of_x(int kind) { return kind == WIDENED ? FLOAT32 : kind; }

/* The 16-bit elements with `mask`; if these are ALL, it is a plain load. */
INLINE_FOR(TARGET_AVX512) __m512 load_masked(const char *x, __mmask32 mask) {
  return mask == (__mmask32)ALL ? _mm512_loadu_ps(x) : (__m512)_mm512_maskz_loadu_epi16(mask, x);
}

/* sum plus the products of a register of words of W and of the words of x with `mask`; bytes: between the planes of x. */
INLINE_FOR(TARGET_AVX512) __m512 add_words(__m512 sum, __m512 words, const char *x, ptrdiff_t bytes, __mmask32 mask, int kind) {
  __m512 first = load_masked(x, mask);
  if (kind != WIDENED) return add_word(sum, words, first, kind == FLOAT32 ? FLOATS : BFLOAT16_PAIRS);
  __m512i pairs = (__m512i)words;
  sum = _mm512_fmadd_ps((__m512)_mm512_slli_epi32(pairs, 16), first, sum);
  pairs = _mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000u));
  return _mm512_fmadd_ps((__m512)pairs, load_masked(x + bytes, mask), sum);
}

/* Partial sums of `rows` rows of W, w, times `count` rows of x from `first` on: sums (rows, count). ahead: what is prefetched, a row
   for each of w, or NULL. rows, count and kind are compile-time constants. */
INLINE_FOR(TARGET_AVX512) void multiply_lines(const Linear *a, const char *const w[], const char *const ahead[], ptrdiff_t first,
                                            __m512 *sums, int rows, int count, int kind) {
  ptrdiff_t bytes = bytes_of(a->in, type_of_weight(kind)), x_bytes = bytes_of(a->x_stride, type_of_x(kind)), i = 0;
  const char *x = (const char *)a->x + first * x_bytes;
#pragma GCC unroll 16
  for (int s = 0; s < rows * count; s++) sums[s] = _mm512_setzero_ps();
  for (; i + LINE <= bytes; i += LINE) {
    __m512 words[SUMS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
      if (ahead) __builtin_prefetch(ahead[r] + i, 0, 2);
      words[r] = _mm512_loadu_ps(w[r] + i);
    }
#pragma GCC unroll 8
    for (int b = 0; b < count; b++)
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++)
        sums[r * count + b] = add_words(sums[r * count + b], words[r], x + b * x_bytes + i, bytes, (__mmask32)ALL, kind);
  }
  __mmask32 mask = (1u << (bytes - i) / 2) - 1; /* of the columns that are left */
  if (!mask) return;
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) {
    __m512 words = load_masked(w[r] + i, mask);
#pragma GCC unroll 8
    for (int b = 0; b < count; b++)
      sums[r * count + b] = add_words(sums[r * count + b], words, x + b * x_bytes + i, bytes, mask, kind);
  }
}

/* The rows `start` to `stop` of W times `count` rows of x from `first` on, `at_once` rows of W at a time. ahead: rows of W that are
   prefetched, beginning with row `next`. at_once, count and kind are compile-time constants. */
INLINE_FOR(TARGET_AVX512) void multiply_each(const Linear *a, ptrdiff_t first, ptrdiff_t start, ptrdiff_t stop, ptrdiff_t next,
                                           ptrdiff_t ahead, int is_aided, int at_once, int count, int kind) {
  ptrdiff_t bytes = bytes_of(a->weight_stride, type_of_weight(kind));
  for (ptrdiff_t row = start; row < stop; row += SUMS / count) {
    __m512 sums[SUMS];
    float totals[SUMS];
#pragma GCC unroll 16
    for (int s = SUMS / count * count; s < SUMS; s++) sums[s] = _mm512_setzero_ps();
#pragma GCC unroll 16
    for (int r = 0; r < SUMS / count; r += at_once) {
      const char *w[SUMS], *prefetched[SUMS];
#pragma GCC unroll 8
      for (int i = 0; i < at_once; i++) {
        ptrdiff_t own = row + r + i < stop ? row + r + i : stop - 1, done = own - start;
        w[i] = (const char *)a->weight + own * bytes;
        prefetched[i] = (const char *)a->weight + (done < ahead ? next + done : own) * bytes;
      }
      multiply_lines(a, w, is_aided ? prefetched : NULL, first, sums + r * count, at_once, count, kind);
    }
    _mm512_storeu_ps(totals, sums_of_lanes(sums));
    for (int r = 0; r < SUMS / count && row + r < stop; r++) {
      float bias = a->bias ? get(a->bias, row + r, a->type) : 0;
      for (int b = 0; b < count; b++)
        put(a->y, (first + b) * a->y_stride + row + r, totals[r * count + b] + bias, a->type);
    }
  }
}

/* Few rows of x meet one row of W after the other, more of them several at once, which saves loads of x. */
INLINE_FOR(TARGET_AVX512) void multiply_rows(const Linear *a, ptrdiff_t first, ptrdiff_t start, ptrdiff_t stop, ptrdiff_t next,
                                           ptrdiff_t ahead, int count, int kind) {
  int has_tiles = has_tile_products(), is_long = !has_tiles && bytes_of(a->in, type_of_weight(kind)) >= LONG;
  if (count > UNAIDED) multiply_each(a, first, start, stop, next, ahead, 1, SUMS / count, count, kind);
  else if (is_long) multiply_each(a, first, start, stop, next, ahead, 1, AT_ONCE, count, kind);
  else multiply_each(a, first, start, stop, next, ahead, has_tiles, 1, count, kind);
}

typedef void MultiplyRows(const Linear *, ptrdiff_t first, ptrdiff_t start, ptrdiff_t stop, ptrdiff_t next, ptrdiff_t ahead);
#define MULTIPLY_ROWS(TYPE, COUNT)                                                                                   \
  TARGET_AVX512 static void TYPE##_##COUNT(const Linear *given, ptrdiff_t first, ptrdiff_t start, ptrdiff_t stop, \
                                           ptrdiff_t next, ptrdiff_t ahead) {                                      \
    const Linear a = *given;                                                                                       \
    multiply_rows(&a, first, start, stop, next, ahead, COUNT, TYPE);                                               \
  }
#define FOR_EACH_COUNT(TYPE)                                                                                       \
  MULTIPLY_ROWS(TYPE, 1) MULTIPLY_ROWS(TYPE, 2) MULTIPLY_ROWS(TYPE, 3) MULTIPLY_ROWS(TYPE, 4)                      \
  MULTIPLY_ROWS(TYPE, 5) MULTIPLY_ROWS(TYPE, 6) MULTIPLY_ROWS(TYPE, 7) MULTIPLY_ROWS(TYPE, 8)                      \
  static MultiplyRows *const for_##TYPE[] = {TYPE##_1, TYPE##_2, TYPE##_3, TYPE##_4,                               \
                                             TYPE##_5, TYPE##_6, TYPE##_7, TYPE##_8};
FOR_EACH_COUNT(FLOAT32)
FOR_EACH_COUNT(BFLOAT16)
FOR_EACH_COUNT(WIDENED)

void multiply_few_rows(const Linear *a, int weight_type, ptrdiff_t start, ptrdiff_t stop) {
  MultiplyRows *const *functions = weight_type == FLOAT32 ? for_FLOAT32 : a->type == FLOAT32 ? for_WIDENED : for_BFLOAT16;
  ptrdiff_t groups = (a->batch + TOGETHER - 1) / TOGETHER, ahead = (ROWS + groups - 1) / groups;
  for (; start < stop; start += ROWS)
    for (ptrdiff_t group = 0, first = 0; group < groups; group++) { /* groups of almost equal sizes; each prefetches its part */
      ptrdiff_t end = start + ROWS < stop ? start + ROWS : stop, after = (group + 1) * a->batch / groups;
      functions[after - first - 1](a, first, start, end, start + ROWS + group * ahead, ahead);
      first = after;
    }
}
#endif
