/* y = x W^T + b for few rows of x. W, (out, in), is read from memory once, and this determines the time: float32 or bfloat16
   here, 8 or 4 bits in rounded.c. See `linear` in products.py. */
#include <stdlib.h>
#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#endif

#include "linear.h"

enum {
  BATCH = 4,                   /* rows of x that are multiplied at once */
  LANES = 64, FEW_LANES = 16,  /* partial sums of a dot product, which are added at its end; of a short one */
  ROWS = 16,                   /* rows of W that stay in the cache while the rows of x change */
  AHEAD = 3072                 /* bytes by which W is prefetched */
};

/* W is read in words of 32 bits, of 1 or 2 columns. x is unpacked accordingly ("planes"): first the columns that come first
   in their word, then those that come second. So consecutive words meet consecutive elements of x. */

/* Columns of W in a 32-bit word. */
INLINE ptrdiff_t columns_in_word(int weight_type) { return weight_type == BFLOAT16 ? 2 : 1; }

/* The product of a word of W and x, whose planes have `count` elements. */
INLINE float product(uint32_t word, const float *x, ptrdiff_t count, int weight_type) {
  if (weight_type == FLOAT32) return float_of_bits(word) * x[0];
  return float_of_bits(word << 16) * x[0] + float_of_bits(word & 0xffff0000u) * x[count];
}

/* One row of W times `batch` rows of x, from `first` on. batch, weight_type and lanes are compile-time constants. The
   hardware's own prefetching is too late on some processors, and stops at the ends of short rows; so what follows in memory
   is prefetched here. (A prefetch beyond the end of W has no effect.) */
INLINE void multiply_row(const Linear *a, ptrdiff_t row, ptrdiff_t first, int batch, int weight_type, ptrdiff_t lanes) {
  ptrdiff_t count = a->in / columns_in_word(weight_type), i = 0;
  const uint32_t *w = (const uint32_t *)a->weight + row * (a->weight_stride / columns_in_word(weight_type));
  const float *x = (const float *)a->x + first * a->x_stride;
  float sums[BATCH][LANES];
  memset(sums, 0, batch * sizeof sums[0]);
  for (; i + lanes <= count; i += lanes) {
    for (ptrdiff_t line = 0; line < lanes * 4; line += 64)
      __builtin_prefetch((const char *)(w + i) + line + AHEAD);
    for (int b = 0; b < batch; b++)
#pragma omp simd
      for (ptrdiff_t k = 0; k < lanes; k++)
        sums[b][k] += product(w[i + k], x + b * a->x_stride + i + k, count, weight_type);
  }
  for (int b = 0; b < batch; b++) {
    float total = 0, bias = a->bias ? get(a->bias, row, a->type) : 0;
#pragma omp simd reduction(+ : total)
    for (ptrdiff_t k = 0; k < lanes; k++) total += sums[b][k];
    for (ptrdiff_t k = i; k < count; k++)
      total += product(w[k], x + b * a->x_stride + k, count, weight_type);
    put(a->y, (first + b) * a->y_stride + row, total + bias, a->type);
  }
}

#ifdef HAS_INTRINSICS
enum { VECTOR = 8, SUMS = 8 }; /* words in a register; registers of sums */

/* As multiply_row for `rows` rows of W, by AVX2; a dot product has `vectors` registers of partial sums. Each is added up in
   the same order for any numbers of rows. FLOAT32 and short rows are read and multiplied fastest as several rows at once,
   with one vector each, which share the loads of x and prefetch the rows that follow them; long rows of BFLOAT16 one by one. */
INLINE_FOR(TARGET_AVX2) void multiply_avx2(const Linear *a, ptrdiff_t row, ptrdiff_t first, int rows, int batch, int vectors,
                                          int weight_type) {
  ptrdiff_t count = a->in / columns_in_word(weight_type), i = 0;
  ptrdiff_t stride = a->weight_stride / columns_in_word(weight_type);
  ptrdiff_t ahead = vectors == 1 ? rows * stride : AHEAD / (ptrdiff_t)sizeof(uint32_t);
  const uint32_t *w = (const uint32_t *)a->weight + row * stride;
  const float *x = (const float *)a->x + first * a->x_stride;
  const __m256i upper = _mm256_set1_epi32((int)0xffff0000u);
  __m256 sums[SUMS];
#pragma GCC unroll 8
  for (int s = 0; s < rows * batch * vectors; s++) sums[s] = _mm256_setzero_ps();
  for (; i + vectors * VECTOR <= count; i += vectors * VECTOR)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++)
#pragma GCC unroll 4
      for (int b = 0; b < batch; b++) {
        const float *columns = x + b * a->x_stride + i + v * VECTOR;
        __m256 x_even = _mm256_loadu_ps(columns);
        __m256 x_odd = weight_type == FLOAT32 ? x_even : _mm256_loadu_ps(columns + count);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
          const uint32_t *from = w + r * stride + i + v * VECTOR;
          if (b == 0 && v % 2 == 0) __builtin_prefetch(from + ahead);
          __m256i words = _mm256_loadu_si256((const __m256i *)from);
          __m256 *sum = &sums[(r * batch + b) * vectors + v];
          __m256 even = weight_type == FLOAT32 ? (__m256)words : (__m256)_mm256_slli_epi32(words, 16);
          *sum = _mm256_fmadd_ps(even, x_even, *sum);
          if (weight_type == FLOAT32) continue;
          *sum = _mm256_fmadd_ps((__m256)_mm256_and_si256(words, upper), x_odd, *sum);
        }
      }
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int b = 0; b < batch; b++) {
      __m256 sum = sums[(r * batch + b) * vectors];
      for (int v = 1; v < vectors; v++) sum = _mm256_add_ps(sum, sums[(r * batch + b) * vectors + v]);
      float total = added_up(sum);
      if (a->bias) total += get(a->bias, row + r, a->type);
      for (ptrdiff_t k = i; k < count; k++)
        total += product(w[r * stride + k], x + b * a->x_stride + k, count, weight_type);
      put(a->y, (first + b) * a->y_stride + row + r, total, a->type);
    }
}
#endif

/* Multiplies the rows `start` to `stop` of W. There is one function for each number of rows of x, whose sums stay in
   registers. */
typedef void MultiplyRows(const Linear *, ptrdiff_t first, ptrdiff_t start, ptrdiff_t stop);
#define MULTIPLY_ROWS(NAME, BATCH, WEIGHT_TYPE, LANES)                                                    \
  CLONES static void NAME##BATCH(const Linear *given, ptrdiff_t first, ptrdiff_t start, ptrdiff_t stop) { \
    const Linear a = *given;                                                                              \
    for (ptrdiff_t r = start; r < stop; r++) multiply_row(&a, r, first, BATCH, WEIGHT_TYPE, LANES);       \
  }
#define FOR_EACH_BATCH(NAME, WEIGHT_TYPE, LANES)                                              \
  MULTIPLY_ROWS(NAME, 1, WEIGHT_TYPE, LANES) MULTIPLY_ROWS(NAME, 2, WEIGHT_TYPE, LANES)       \
  MULTIPLY_ROWS(NAME, 3, WEIGHT_TYPE, LANES) MULTIPLY_ROWS(NAME, 4, WEIGHT_TYPE, LANES)       \
  static MultiplyRows *const NAME[] = {NAME##1, NAME##2, NAME##3, NAME##4};
FOR_EACH_BATCH(long_float32_, FLOAT32, LANES)
FOR_EACH_BATCH(short_float32_, FLOAT32, FEW_LANES)
FOR_EACH_BATCH(long_bfloat16_, BFLOAT16, LANES)
FOR_EACH_BATCH(short_bfloat16_, BFLOAT16, FEW_LANES / 2)

#ifdef HAS_INTRINSICS
/* With one vector, as many rows of W as their sums fit into the registers; with more, one row, by at most two rows of x. */
#define MULTIPLY_ROWS_AVX2(NAME, BATCH, WEIGHT_TYPE, VECTORS)                                                     \
  TARGET_AVX2 static void NAME##BATCH(const Linear *given, ptrdiff_t first, ptrdiff_t r, ptrdiff_t stop) {        \
    enum { TOGETHER = VECTORS == 1 ? SUMS / BATCH : 1, SOME = VECTORS == 1 || BATCH < 2 ? BATCH : 2 };            \
    enum { REST = BATCH - SOME };                                                                                 \
    const Linear a = *given;                                                                                      \
    for (; r + TOGETHER <= stop; r += TOGETHER) {                                                                 \
      multiply_avx2(&a, r, first, TOGETHER, SOME, VECTORS, WEIGHT_TYPE);                                          \
      if (REST) multiply_avx2(&a, r, first + SOME, TOGETHER, REST, VECTORS, WEIGHT_TYPE);                         \
    }                                                                                                             \
    for (; r < stop; r++) multiply_avx2(&a, r, first, 1, SOME, VECTORS, WEIGHT_TYPE); /* left with one vector */  \
  }
#define FOR_EACH_BATCH_AVX2(NAME, WEIGHT_TYPE, VECTORS)                                               \
  MULTIPLY_ROWS_AVX2(NAME, 1, WEIGHT_TYPE, VECTORS) MULTIPLY_ROWS_AVX2(NAME, 2, WEIGHT_TYPE, VECTORS) \
  MULTIPLY_ROWS_AVX2(NAME, 3, WEIGHT_TYPE, VECTORS) MULTIPLY_ROWS_AVX2(NAME, 4, WEIGHT_TYPE, VECTORS) \
  static MultiplyRows *const NAME[] = {NAME##1, NAME##2, NAME##3, NAME##4};
FOR_EACH_BATCH_AVX2(avx2_float32_, FLOAT32, 1)
FOR_EACH_BATCH_AVX2(avx2_bfloat16_, BFLOAT16, 4)
FOR_EACH_BATCH_AVX2(short_avx2_bfloat16_, BFLOAT16, 1)
#endif

/* The functions for 1 to BATCH rows of x. */
static MultiplyRows *const *functions_for(int weight_type, ptrdiff_t in) {
  int is_short = in < 2 * LANES * columns_in_word(weight_type);
#ifdef HAS_INTRINSICS
  if (level() >= AVX2 && loop_level() != AVX512)
    return weight_type == FLOAT32 ? avx2_float32_ : is_short ? short_avx2_bfloat16_ : avx2_bfloat16_;
#endif
  if (is_short) return weight_type == BFLOAT16 ? short_bfloat16_ : short_float32_;
  return weight_type == BFLOAT16 ? long_bfloat16_ : long_float32_;
}

/* Multiplies the rows `start` to `stop` of W by all rows of x: if these are more than BATCH, ROWS rows of W at a time, which
   stay in the cache. */
static void multiply_rows(const Linear *a, MultiplyRows *const *functions, ptrdiff_t start, ptrdiff_t stop) {
  ptrdiff_t step = a->batch > BATCH ? ROWS : stop - start;
  for (; start < stop; start += step)
    for (ptrdiff_t first = 0; first < a->batch; first += BATCH) {
      ptrdiff_t left = a->batch - first, end = start + step;
      functions[left < BATCH ? left - 1 : BATCH - 1](a, first, start, end < stop ? end : stop);
    }
}

/* Whether few_rows.c multiplies W and x of these types. */
static int is_for_few_rows(int weight_type, int type) {
#ifdef HAS_INTRINSICS
  return type == BFLOAT16 ? weight_type == BFLOAT16 && has_avx512_bf16() : level() == AVX512;
#else
  return 0;
#endif
}

/* A row of x as float32 in planes. */
INLINE void unpack_row(const void *x, float *to, ptrdiff_t in, int type, int planes) {
  for (int k = 0; k < planes; k++, to += in / planes)
#pragma omp simd
    for (ptrdiff_t i = 0; i < in / planes; i++) to[i] = get(x, planes * i + k, type);
}

CLONES static void unpack(const void *x, float *to, ptrdiff_t batch, ptrdiff_t in, ptrdiff_t x_stride, int type,
                          int weight_type) {
  for (ptrdiff_t b = 0; b < batch; b++, to += in, x = at(x, x_stride, type))
    if (weight_type == FLOAT32) unpack_row(x, to, in, BFLOAT16, 1);
    else if (type == FLOAT32) unpack_row(x, to, in, FLOAT32, 2);
    else unpack_row(x, to, in, BFLOAT16, 2);
}

/* `linear` with gaps between the rows of W and y. `type` is that of x, bias and y. `in` and weight_stride are even for
   BFLOAT16 weights. */
int strided_linear(const void *weight, const void *bias, const void *x, void *y, ptrdiff_t batch, ptrdiff_t out,
                   ptrdiff_t in, ptrdiff_t weight_stride, ptrdiff_t x_stride, ptrdiff_t y_stride, int weight_type, int type,
                   int threads) {
  float *unpacked = NULL;
  if (!out || !batch) return 0;
  int has_gaps = weight_stride != in || y_stride != out;
  int by_tiles = weight_type == BFLOAT16 && type == BFLOAT16 && in % 32 == 0 && !has_gaps && has_tile_products();
  if (by_tiles && batch > FEWEST)
    return tile_product(weight, NULL, bias, x, y, batch, out, in, x_stride, weight_type, type, threads);
  Linear a = {weight, bias, x, y, batch, out, in, weight_stride, x_stride, y_stride, type};
#ifdef HAS_INTRINSICS
  if (!by_tiles && is_for_few_rows(weight_type, type)) return few_rows(a, weight_type, threads);
#endif
  if (weight_type != type || type == BFLOAT16) {
    if (!(unpacked = malloc(batch * in * sizeof(float)))) return 1;
    unpack(x, unpacked, batch, in, x_stride, type, weight_type);
  }
  if (by_tiles) {
    fewest_rows(weight, bias, unpacked, y, batch, out, in, threads);
    free(unpacked);
    return 0;
  }
  if (unpacked) a.x = unpacked, a.x_stride = in;
  MultiplyRows *const *functions = functions_for(weight_type, in);
  ptrdiff_t share = (out + threads - 1) / threads;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (ptrdiff_t start = 0; start < out; start += share) {
    ptrdiff_t stop = start + share < out ? start + share : out;
    multiply_rows(&a, functions, start, stop);
  }
  free(unpacked);
  return 0;
}

int linear(const void *weight, const float *scales, const void *bias, const void *x, void *y, ptrdiff_t batch,
           ptrdiff_t out, ptrdiff_t in, ptrdiff_t x_stride, int weight_type, int type, int threads) {
  if (is_rounded(weight_type))
    return rounded_linear(weight, scales, bias, x, y, batch, out, in, x_stride, weight_type, type, threads);
  return strided_linear(weight, bias, x, y, batch, out, in, in, x_stride, out, weight_type, type, threads);
}

/* Whether few_rows.c multiplies matrices of this type by rows of the same type. */
int has_few_rows_of(int type) { return is_for_few_rows(type, type); }

/* Whether this processor multiplies numbers of a 16-bit type by instructions of their own: AVX512_BF16 or AVX512_FP16. On
   processors other than x86's the answer is always yes, which leaves the choice to torch. */
int has_products_of(int type) {
#if defined(__x86_64__) && defined(__GNUC__)
  static int answers[2]; /* 1: no, 2: yes. CPUID takes long in a virtual machine, so it is asked once */
  int *answer = &answers[type == BFLOAT16];
  if (!*answer) {
    unsigned a, b, c, d;
    int is_known = __get_cpuid_count(7, type == BFLOAT16, &a, &b, &c, &d);
    *answer = 1 + (is_known && (type == BFLOAT16 ? a >> 5 & 1 : d >> 23 & 1));
  }
  return *answer - 1;
#else
  (void)type;
  return 1;
#endif
}
