/* Products of few rows of x and a W of 8 or 4 bits, by plain loops, AVX2, or AVX-512 without VNNI. x is rounded to 16 bits
   (quantized.h). */
#include "quantized.h"

enum {
  BATCH = 4,     /* rows of x that are multiplied at once */
  ROWS = 16,     /* rows of W that stay in the cache while the rows of x change */
  AHEAD = 3072   /* bytes by which W is prefetched */
};

/* A product, and its x in 16 bits: (batch, in), with scales (batch, in / BLOCK). */
typedef struct {
  Product p;
  const int16_t *x;
  const float *x_scales;
} Quantized;

/* One row of W times `batch` rows of x, from `first` on. batch and weight_type are compile-time constants. */
INLINE void multiply_plain(const Quantized *a, ptrdiff_t row, ptrdiff_t first, int batch, int weight_type) {
  ptrdiff_t blocks = a->p.in / BLOCK;
  const char *w = (const char *)a->p.weight + row * blocks * bytes_per_block(weight_type);
  float sums[BATCH] = {0};
  for (ptrdiff_t k = 0; k < blocks; k++, w += bytes_per_block(weight_type)) {
    int16_t columns[BLOCK];
    for (int i = 0; i < BLOCK; i++) columns[i] = column(w, i, weight_type);
    for (int b = 0; b < batch; b++) {
      const int16_t *x = a->x + (first + b) * a->p.in + k * BLOCK;
      int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int i = 0; i < BLOCK; i++) sum += columns[i] * x[i];
      sums[b] += a->p.scales[row * blocks + k] * a->x_scales[(first + b) * blocks + k] * sum;
    }
  }
  for (int b = 0; b < batch; b++)
    put(a->p.y, (first + b) * a->p.out + row, sums[b] + (a->p.bias ? get(a->p.bias, row, a->p.type) : 0), a->p.type);
}

#ifdef HAS_INTRINSICS
/* As multiply_plain. With AVX512_VNNI, gemv_quantized_vnni.c is faster. */
INLINE_FOR(TARGET_AVX512) void multiply_avx512(const Quantized *a, ptrdiff_t row, ptrdiff_t first, int batch,
                                               int weight_type) {
  ptrdiff_t blocks = a->p.in / BLOCK;
  const char *w = (const char *)a->p.weight + row * blocks * bytes_per_block(weight_type);
  const float *scales = a->p.scales + row * blocks, *x_scales = a->x_scales + first * blocks;
  const int16_t *x = a->x + first * a->p.in;
  __m512 sums[BATCH];
  for (int b = 0; b < batch; b++) sums[b] = _mm512_setzero_ps();
  for (ptrdiff_t k = 0; k < blocks; k++, w += bytes_per_block(weight_type)) {
    __builtin_prefetch(w + AHEAD);
    __m512i low = half_block(w, 0, weight_type), high = half_block(w, 1, weight_type);
    __m512 scale = _mm512_set1_ps(scales[k]);
    for (int b = 0; b < batch; b++) {
      const int16_t *columns = x + b * a->p.in + k * BLOCK;
      __m512i sum = add_products(_mm512_setzero_si512(), low, _mm512_loadu_si512(columns), 0);
      sum = add_products(sum, high, _mm512_loadu_si512(columns + 32), 0);
      __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(x_scales[b * blocks + k]));
      sums[b] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), both, sums[b]);
    }
  }
  for (int b = 0; b < batch; b++)
    put(a->p.y, (first + b) * a->p.out + row,
        _mm512_reduce_add_ps(sums[b]) + (a->p.bias ? get(a->p.bias, row, a->p.type) : 0), a->p.type);
}

/* As multiply_plain. */
INLINE_FOR(TARGET_AVX2) void multiply_avx2(const Quantized *a, ptrdiff_t row, ptrdiff_t first, int batch, int weight_type) {
  ptrdiff_t blocks = a->p.in / BLOCK;
  const char *w = (const char *)a->p.weight + row * blocks * bytes_per_block(weight_type);
  const float *scales = a->p.scales + row * blocks, *x_scales = a->x_scales + first * blocks;
  const int16_t *x = a->x + first * a->p.in;
  __m256 sums[BATCH];
  for (int b = 0; b < batch; b++) sums[b] = _mm256_setzero_ps();
  for (ptrdiff_t k = 0; k < blocks; k++, w += bytes_per_block(weight_type)) {
    __builtin_prefetch(w + AHEAD);
    __m256i quarters[4];
    for (int q = 0; q < 4; q++) quarters[q] = quarter_block(w, q, weight_type);
    __m256 scale = _mm256_set1_ps(scales[k]);
    for (int b = 0; b < batch; b++) {
      const __m256i *columns = (const __m256i *)(x + b * a->p.in + k * BLOCK);
      __m256i sum = _mm256_madd_epi16(quarters[0], _mm256_loadu_si256(columns));
      for (int q = 1; q < 4; q++)
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(quarters[q], _mm256_loadu_si256(columns + q)));
      __m256 both = _mm256_mul_ps(scale, _mm256_set1_ps(x_scales[b * blocks + k]));
      sums[b] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), both, sums[b]);
    }
  }
  for (int b = 0; b < batch; b++)
    put(a->p.y, (first + b) * a->p.out + row, added_up(sums[b]) + (a->p.bias ? get(a->p.bias, row, a->p.type) : 0), a->p.type);
}
#endif

/* Multiplies the rows `start` to `stop` of W. There is one function for each number of rows of x, whose sums stay in
   registers. */
typedef void MultiplyRows(const Quantized *, ptrdiff_t first, ptrdiff_t start, ptrdiff_t stop);
#define MULTIPLY_ROWS(NAME, TARGET, BATCH, WEIGHT_TYPE)                                                          \
  TARGET static void NAME##_##WEIGHT_TYPE##_##BATCH(const Quantized *given, ptrdiff_t first, ptrdiff_t start,    \
                                                    ptrdiff_t stop) {                                            \
    const Quantized a = *given;                                                                                  \
    for (ptrdiff_t r = start; r < stop; r++) multiply_##NAME(&a, r, first, BATCH, WEIGHT_TYPE);                  \
  }
#define FOR_EACH_BATCH(NAME, TARGET, WEIGHT_TYPE)                                                                \
  MULTIPLY_ROWS(NAME, TARGET, 1, WEIGHT_TYPE) MULTIPLY_ROWS(NAME, TARGET, 2, WEIGHT_TYPE)                        \
  MULTIPLY_ROWS(NAME, TARGET, 3, WEIGHT_TYPE) MULTIPLY_ROWS(NAME, TARGET, 4, WEIGHT_TYPE)                        \
  static MultiplyRows *const NAME##_##WEIGHT_TYPE[] = {NAME##_##WEIGHT_TYPE##_1, NAME##_##WEIGHT_TYPE##_2,       \
                                                       NAME##_##WEIGHT_TYPE##_3, NAME##_##WEIGHT_TYPE##_4};
FOR_EACH_BATCH(plain, CLONES, INT8)
FOR_EACH_BATCH(plain, CLONES, INT4)
#ifdef HAS_INTRINSICS
FOR_EACH_BATCH(avx2, TARGET_AVX2, INT8)
FOR_EACH_BATCH(avx2, TARGET_AVX2, INT4)
FOR_EACH_BATCH(avx512, TARGET_AVX512, INT8)
FOR_EACH_BATCH(avx512, TARGET_AVX512, INT4)
#endif

/* Multiplies the rows `start` to `stop` of W by all rows of x: if these are more than BATCH, ROWS rows of W at a time, which
   stay in the cache. */
static void multiply_rows(const Quantized *a, MultiplyRows *const *functions, ptrdiff_t start, ptrdiff_t stop) {
  ptrdiff_t step = a->p.batch > BATCH ? ROWS : stop - start;
  for (; start < stop; start += step)
    for (ptrdiff_t first = 0; first < a->p.batch; first += BATCH) {
      ptrdiff_t left = a->p.batch - first, end = start + step;
      functions[left < BATCH ? left - 1 : BATCH - 1](a, first, start, end < stop ? end : stop);
    }
}

/* functions: the functions for 1 to BATCH rows of x. */
static int multiply_by(const Product *p, MultiplyRows *const *functions) {
  QuantizedX x = x_in_16_bits(p);
  if (!x.values) return 1;
  Quantized a = {*p, x.values, x.scales};
  ptrdiff_t share = (p->out + p->threads - 1) / p->threads;
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1)
  for (ptrdiff_t start = 0; start < p->out; start += share)
    multiply_rows(&a, functions, start, start + share < p->out ? start + share : p->out);
  free(x.values);
  return 0;
}

int gemv_quantized_loops(const Product *p) { return multiply_by(p, p->weight_type == INT8 ? plain_INT8 : plain_INT4); }
#ifdef HAS_INTRINSICS
int gemv_quantized_avx2(const Product *p) { return multiply_by(p, p->weight_type == INT8 ? avx2_INT8 : avx2_INT4); }
int gemv_quantized_avx512(const Product *p) { return multiply_by(p, p->weight_type == INT8 ? avx512_INT8 : avx512_INT4); }
#endif
