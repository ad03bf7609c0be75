/* Products of few rows of x and a matrix of float32 or bfloat16, by plain loops or AVX2. W is read from memory once, which determines
   the time. */
#include "product.h"

enum {
  BATCH = 4,                   /* rows of x that are multiplied at once */
  LANES = 64, FEW_LANES = 16,  /* partial sums of a dot product, which are added at its end; of a short one */
  ROWS = 16,                   /* rows of W that stay in the cache while the rows of x change */
  AHEAD = 3072                 /* bytes by which W is prefetched */
};

/* W is read in words of 32 bits, with 1 or 2 columns. x is unpacked into "planes": the first columns of all words, then the second
   columns. So consecutive words are multiplied by consecutive elements of x. */

/* Columns of W in a 32-bit word. */
INLINE ptrdiff_t columns_in_word(int weight_type) { return weight_type == BFLOAT16 ? 2 : 1; }

/* The product of a word of W and x, whose planes have `count` elements. */
INLINE float product(uint32_t word, const float *x, ptrdiff_t count, int weight_type) {
  if (weight_type == FLOAT32) return float_of_bits(word) * x[0];
  return float_of_bits(word << 16) * x[0] + float_of_bits(word & 0xffff0000u) * x[count];
}

/* Here, a->x is float32, in planes if W is of BFLOAT16. */

/* One row of W times `batch` rows of x, from `first` on. batch, weight_type and lanes are compile-time constants. The
   hardware's own prefetching is too late on some processors, and stops at the ends of short rows; so what follows in memory
   is prefetched here. (A prefetch beyond the end of W has no effect.) */
INLINE void multiply_row(const Product *a, ptrdiff_t row, ptrdiff_t first, int batch, int weight_type, ptrdiff_t lanes) {
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
INLINE_FOR(TARGET_AVX2) void multiply_avx2(const Product *a, ptrdiff_t row, ptrdiff_t first, int rows, int batch, int vectors,
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
typedef void MultiplyRows(const Product *, ptrdiff_t first, ptrdiff_t start, ptrdiff_t stop);
#define MULTIPLY_ROWS(NAME, BATCH, WEIGHT_TYPE, LANES)                                                    \
  CLONES static void NAME##BATCH(const Product *given, ptrdiff_t first, ptrdiff_t start, ptrdiff_t stop) { \
    const Product a = *given;                                                                              \
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
  TARGET_AVX2 static void NAME##BATCH(const Product *given, ptrdiff_t first, ptrdiff_t r, ptrdiff_t stop) {        \
    enum { TOGETHER = VECTORS == 1 ? SUMS / BATCH : 1, SOME = VECTORS == 1 || BATCH < 2 ? BATCH : 2 };            \
    enum { REST = BATCH - SOME };                                                                                 \
    const Product a = *given;                                                                                      \
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

/* Multiplies the rows `start` to `stop` of W by all rows of x: if these are more than BATCH, ROWS rows of W at a time, which
   stay in the cache. */
static void multiply_rows(const Product *a, MultiplyRows *const *functions, ptrdiff_t start, ptrdiff_t stop) {
  ptrdiff_t step = a->batch > BATCH ? ROWS : stop - start;
  for (; start < stop; start += step)
    for (ptrdiff_t first = 0; first < a->batch; first += BATCH) {
      ptrdiff_t left = a->batch - first, end = start + step;
      functions[left < BATCH ? left - 1 : BATCH - 1](a, first, start, end < stop ? end : stop);
    }
}

/* A row of x as float32, in planes. */
INLINE void unpack_row(const void *x, float *to, ptrdiff_t in, int type) {
  for (int k = 0; k < 2; k++, to += in / 2)
#pragma omp simd
    for (ptrdiff_t i = 0; i < in / 2; i++) to[i] = get(x, 2 * i + k, type);
}

CLONES static void unpack(const Product *p, float *to) {
  for (ptrdiff_t b = 0; b < p->batch; b++, to += p->in)
    if (p->type == FLOAT32) unpack_row(x_row(p, b), to, p->in, FLOAT32);
    else unpack_row(x_row(p, b), to, p->in, BFLOAT16);
}

/* functions: the functions for 1 to BATCH rows of x. */
static int multiply_by(const Product *p, MultiplyRows *const *functions) {
  Product a = *p;
  float *unpacked = NULL;
  if (a.weight_type == BFLOAT16) {
    if (!(unpacked = allocate(a.batch * a.in * sizeof(float)))) return 1;
    unpack(p, unpacked);
    a.x = unpacked, a.x_stride = a.in;
  }
  ptrdiff_t share = (a.out + a.threads - 1) / a.threads;
#pragma omp parallel for num_threads(a.threads) if (a.threads > 1)
  for (ptrdiff_t start = 0; start < a.out; start += share)
    multiply_rows(&a, functions, start, start + share < a.out ? start + share : a.out);
  free(unpacked);
  return 0;
}

/* 1 if the rows of W are short. */
static int is_short(const Product *p) { return p->in < 2 * LANES * columns_in_word(p->weight_type); }

int gemv_float_loops(const Product *p) {
  if (p->weight_type == FLOAT32) return multiply_by(p, is_short(p) ? short_float32_ : long_float32_);
  return multiply_by(p, is_short(p) ? short_bfloat16_ : long_bfloat16_);
}

#ifdef HAS_INTRINSICS
int gemv_float_avx2(const Product *p) {
  if (p->weight_type == FLOAT32) return multiply_by(p, avx2_float32_);
  return multiply_by(p, is_short(p) ? short_avx2_bfloat16_ : avx2_bfloat16_);
}
#endif
