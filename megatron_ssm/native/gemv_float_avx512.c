/* Products of few rows of x and a matrix of the same type, or of bfloat16, by AVX-512; if both are bfloat16, by AVX512_BF16 on
   processors that have it. One row of x is multiplied by one row of W after the other, because memory delivers consecutive addresses
   fastest; but long rows of W are read faster several at once, if they are prefetched. Several rows of x are multiplied by several rows
   of W at once, which share the loads of x. Each dot product is one register of partial sums, so the result of a row does not depend on
   the number of rows. */
#include "product.h"

#ifdef HAS_INTRINSICS
enum {
  TOGETHER = 8, /* rows of x that are multiplied at once */
  SUMS = 16,    /* registers that are added up at once */
  ROWS = 16,    /* the most rows of W that stay in the cache while the rows of x change, and by which W is prefetched */
  WIDENED = 16, /* instead of a type: W is of BFLOAT16, and x of FLOAT32, or of BFLOAT16 without AVX512_BF16 */
  ALL = -1,     /* elements of a register, as a mask */
  PAIR = 2,     /* up to PAIR rows of x are multiplied by one, two or AT_ONCE rows of W at once; more, by as many as SUMS allows */
  AT_ONCE = 4,  /* rows of W, if they are long, on processors without AMX */
  LONG = 6144,  /* bytes of a long row of W */
  SMALL = 24576 /* bytes of x that stay in the first-level cache: it is loaded once for several rows of W. From the second-level cache
                   it is faster if each instruction loads x again */
};

INLINE int type_of_weight(int kind) { return kind == WIDENED ? BFLOAT16 : kind; }

/* Bytes of a row of x that meet a line of W. */
INLINE ptrdiff_t bytes_of_x(int kind) { return kind == WIDENED ? 2 * LINE : LINE; }

/* What a line of W meets in a row of x, of which `count` columns are left: those columns, and zeros; of WIDENED, first the even
   columns, then the odd ones. */
INLINE void pack_line(const void *x, char *to, ptrdiff_t count, int kind, int type) {
  enum { WORDS = LINE / 4 };
  ptrdiff_t columns = kind == FLOAT32 ? WORDS : 2 * WORDS, own = count < columns ? count : columns;
  if (own < columns) memset(to, 0, bytes_of_x(kind));
  if (kind != WIDENED) memcpy(to, x, bytes_of(own, kind));
  else
    for (int i = 0; i < own; i++) ((float *)to)[i % 2 * WORDS + i / 2] = get(x, i, type);
}

/* The rows of x are multiplied in groups of almost equal sizes: the number of groups, and the first row of a group. */
INLINE ptrdiff_t groups_of(const Product *a) { return (a->batch + TOGETHER - 1) / TOGETHER; }
INLINE ptrdiff_t first_of(const Product *a, ptrdiff_t group) { return group * a->batch / groups_of(a); }

/* x (batch, in) -> to; of each group (lines of W, rows of x, bytes_of_x): what is multiplied together lies side by side. */
static void pack(const Product *a, char *to, int kind) {
  ptrdiff_t columns = LINE / (ptrdiff_t)bytes_of(1, type_of_weight(kind));
  for (ptrdiff_t group = 0; group < groups_of(a); group++) {
    ptrdiff_t first = first_of(a, group), after = first_of(a, group + 1);
    for (ptrdiff_t i = 0; i < a->in; i += columns)
      for (ptrdiff_t b = first; b < after; b++, to += bytes_of_x(kind)) {
        const void *x = at(a->x, b * a->x_stride + i, a->type);
        if (kind == FLOAT32) pack_line(x, to, a->in - i, FLOAT32, FLOAT32);
        else if (kind == BFLOAT16) pack_line(x, to, a->in - i, BFLOAT16, BFLOAT16);
        else if (a->type == FLOAT32) pack_line(x, to, a->in - i, WIDENED, FLOAT32);
        else pack_line(x, to, a->in - i, WIDENED, BFLOAT16);
      }
  }
}

/* The 16-bit elements with `mask`; if these are ALL, it is a plain load. */
INLINE_FOR(TARGET_AVX512) __m512 load_masked(const char *w, __mmask32 mask) {
  return mask == (__mmask32)ALL ? _mm512_loadu_ps(w) : (__m512)_mm512_maskz_loadu_epi16(mask, w);
}

/* sum plus the products of a line of W, words, and what it meets of a row of x: `first`, which was loaded from x, and for WIDENED
   also the line after it. */
INLINE_FOR(TARGET_AVX512) __m512 add_words(__m512 sum, __m512 words, __m512 first, const char *x, int kind) {
  if (kind != WIDENED) return add_word(sum, words, first, kind == FLOAT32 ? FLOATS : BFLOAT16_PAIRS);
  __m512i pairs = (__m512i)words;
  sum = _mm512_fmadd_ps((__m512)_mm512_slli_epi32(pairs, 16), first, sum);
  pairs = _mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000u));
  return _mm512_fmadd_ps((__m512)pairs, _mm512_load_ps(x + LINE), sum);
}

/* Adds the products of a line of each of `rows` rows of W, or of its elements with `mask`, and of `count` rows of x to their sums.
   is_small: see SMALL. */
INLINE_FOR(TARGET_AVX512) void add_line(const char *const w[], ptrdiff_t i, const char *x, __m512 *sums, __mmask32 mask, int is_small,
                                      int rows, int count, int kind) {
  __m512 words[SUMS];
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) words[r] = load_masked(w[r] + i, mask);
#pragma GCC unroll 8
  for (int b = 0; b < count; b++, x += bytes_of_x(kind)) {
    __m512 first = _mm512_load_ps(x);
    if (is_small) __asm__("" : "+v"(first)); /* keeps it in a register */
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) sums[r * count + b] = add_words(sums[r * count + b], words[r], first, x, kind);
  }
}

/* Partial sums of `rows` rows of W, w, times `count` rows of x from `first` on. Writes the first `rows` columns of
   to (count, SUMS / count). ahead: what is prefetched, a row for each of w, or NULL. is_small, rows, count and kind are
   compile-time constants. */
INLINE_FOR(TARGET_AVX512) void multiply_lines(const Product *a, const char *const w[], const char *const ahead[], ptrdiff_t first,
                                            __m512 *to, int is_small, int rows, int count, int kind) {
  ptrdiff_t bytes = bytes_of(a->in, type_of_weight(kind)), step = count * bytes_of_x(kind), i = 0;
  const char *x = (const char *)a->x + first * ((bytes + LINE - 1) / LINE) * bytes_of_x(kind);
  __m512 sums[SUMS]; /* not `to`, so that they stay in registers */
#pragma GCC unroll 16
  for (int s = 0; s < rows * count; s++) sums[s] = _mm512_setzero_ps();
  for (; i + LINE <= bytes; i += LINE, x += step) {
#pragma GCC unroll 8
    for (int r = 0; ahead && r < rows; r++) __builtin_prefetch(ahead[r] + i, 0, 2);
    add_line(w, i, x, sums, (__mmask32)ALL, is_small, rows, count, kind);
  }
  if (i < bytes) add_line(w, i, x, sums, (1u << (bytes - i) / 2) - 1, is_small, rows, count, kind);
#pragma GCC unroll 16
  for (int s = 0; s < rows * count; s++) to[s % count * (SUMS / count) + s / count] = sums[s];
}

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

/* Writes sums (count, SUMS / count), of rows of x from `first` on and rows of W from `row` on, plus the bias. Those of BFLOAT16 are
   rounded together. count and type are compile-time constants. */
INLINE_FOR(TARGET_AVX512) void write_sums(const Product *a, __m512 sums, ptrdiff_t first, ptrdiff_t row, ptrdiff_t stop, int count,
                                          int type) {
  ptrdiff_t rows = SUMS / count, left = stop - row < rows ? stop - row : rows;
  float totals[SUMS];
  uint16_t rounded[SUMS];
  _mm512_storeu_ps(totals, sums);
  for (ptrdiff_t r = 0; a->bias && r < left; r++)
    for (int b = 0; b < count; b++) totals[b * rows + r] += get(a->bias, row + r, type);
  if (type == BFLOAT16)
#pragma omp simd
    for (int s = 0; s < SUMS; s++) put(rounded, s, totals[s], BFLOAT16);
  for (int b = 0; b < count; b++) {
    void *to = at(a->y, (first + b) * a->y_stride + row, type);
    if (type == FLOAT32)
      for (ptrdiff_t r = 0; r < left; r++) put(to, r, totals[b * rows + r], FLOAT32);
    else if (left == rows) memcpy(to, rounded + b * rows, bytes_of(SUMS / count, BFLOAT16)); /* of constant size: fast */
    else memcpy(to, rounded + b * rows, bytes_of(left, BFLOAT16));
  }
}

/* The rows `start` to `stop` of W times `count` rows of x from `first` on, `at_once` rows of W at a time. ahead: how many
   rows of W are prefetched, from row `next` on, if is_aided. is_small, at_once, count and kind are compile-time constants. */
INLINE_FOR(TARGET_AVX512) void multiply_each(const Product *a, ptrdiff_t first, ptrdiff_t start, ptrdiff_t stop, ptrdiff_t next,
                                           ptrdiff_t ahead, int is_aided, int is_small, int at_once, int count, int kind) {
  ptrdiff_t bytes = bytes_of(a->weight_stride, type_of_weight(kind));
  for (ptrdiff_t row = start; row < stop; row += SUMS / count) {
    __m512 sums[SUMS];
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
      multiply_lines(a, w, is_aided ? prefetched : NULL, first, sums + r, is_small, at_once, count, kind);
    }
    __m512 totals = sums_of_lanes(sums);
    if (kind != FLOAT32 && a->type == BFLOAT16) write_sums(a, totals, first, row, stop, count, BFLOAT16);
    else write_sums(a, totals, first, row, stop, count, FLOAT32);
  }
}

/* Chooses the number of rows of W that are multiplied at once, and enables the prefetch of later rows. */
INLINE_FOR(TARGET_AVX512) void multiply_rows(const Product *a, ptrdiff_t first, ptrdiff_t start, ptrdiff_t stop, ptrdiff_t next,
                                           ptrdiff_t ahead, int count, int kind) {
  if (count > PAIR && bytes_of(count * a->in, a->type) <= SMALL)
    multiply_each(a, first, start, stop, next, ahead, 1, 1, SUMS / count, count, kind);
  else if (count > PAIR) multiply_each(a, first, start, stop, next, ahead, 1, 0, SUMS / count, count, kind);
  else if (instructions() == WITH_AMX) multiply_each(a, first, start, stop, next, ahead, 1, 0, 1, count, kind);
  else if (bytes_of(a->in, type_of_weight(kind)) >= LONG)
    multiply_each(a, first, start, stop, next, ahead, 1, 0, AT_ONCE, count, kind);
  else multiply_each(a, first, start, stop, next, ahead, count == PAIR, 0, count, count, kind);
}

typedef void MultiplyRows(const Product *, ptrdiff_t first, ptrdiff_t start, ptrdiff_t stop, ptrdiff_t next, ptrdiff_t ahead);
#define MULTIPLY_ROWS(TYPE, COUNT)                                                                                   \
  TARGET_AVX512 static void TYPE##_##COUNT(const Product *given, ptrdiff_t first, ptrdiff_t start, ptrdiff_t stop, \
                                           ptrdiff_t next, ptrdiff_t ahead) {                                      \
    const Product a = *given;                                                                                       \
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

/* The number of rows of W that the groups multiply in turn: whole passes of each group, whose sizes differ by one at most. */
static ptrdiff_t rows_in_turn(const Product *a) {
  ptrdiff_t groups = groups_of(a), least = a->batch / groups, most = (a->batch + groups - 1) / groups, rows = ROWS;
  while (rows % (SUMS / least) || rows % (SUMS / most)) rows--;
  return rows;
}

/* Multiplies the rows `start` to `stop` of W by all rows of x. Each group prefetches its part. */
static void multiply_share(const Product *a, MultiplyRows *const *functions, ptrdiff_t start, ptrdiff_t stop) {
  ptrdiff_t groups = groups_of(a), rows = rows_in_turn(a), ahead = (rows + groups - 1) / groups;
  for (; start < stop; start += rows)
    for (ptrdiff_t group = 0; group < groups; group++) {
      ptrdiff_t end = start + rows < stop ? start + rows : stop;
      ptrdiff_t first = first_of(a, group), count = first_of(a, group + 1) - first;
      functions[count - 1](a, first, start, end, start + rows + group * ahead, ahead);
    }
}

int gemv_float_avx512(const Product *p) {
  Product a = *p;
  int in_pairs = a.type == BFLOAT16 && instructions() >= WITH_BF16;
  int kind = a.weight_type == FLOAT32 || in_pairs ? a.weight_type : WIDENED;
  MultiplyRows *const *functions = kind == FLOAT32 ? for_FLOAT32 : kind == WIDENED ? for_WIDENED : for_BFLOAT16;
  ptrdiff_t lines = (bytes_of(a.in, a.weight_type) + LINE - 1) / LINE, share = (a.out + a.threads - 1) / a.threads;
  char *packed = allocate(lines * a.batch * bytes_of_x(kind));
  if (!packed) return 1;
  pack(&a, packed, kind);
  a.x = packed;
#pragma omp parallel for num_threads(a.threads) if (a.threads > 1)
  for (ptrdiff_t start = 0; start < a.out; start += share)
    multiply_share(&a, functions, start, start + share < a.out ? start + share : a.out);
  free(packed);
  return 0;
}
#endif
