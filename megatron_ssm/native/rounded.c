/* y = x W^T + b for few rows of x and a W of 8 or 4 bits, and such a W in floating point. See ops/rounded_matrices.py.

   In a product, each block of x is rounded to 16 bits with a scale of its own. So the products of a block are integers, and
   their sums are exact: 64 * 32639 * 128 < 2^31. Rounding x adds at most 1/65278 of the largest element of its block. */
#include "linear.h"

enum {
  BATCH = 4,     /* rows of x that are multiplied at once */
  ROWS = 16,     /* rows of W that stay in the cache while the rows of x change */
  AHEAD = 3072,  /* bytes by which W is prefetched */
  MOST_FOR_BYTES = 24, /* rows of x up to which AMX's products of bytes are fastest (products.py) */
  LARGEST = 32639   /* 127 * 256 + 127: such a number is the sum of 256 times a byte and a byte */
};

typedef struct {
  const void *values;             /* (out, in) of 8 or 4 bits */
  const float *scales;            /* (out, in / BLOCK) */
  const void *bias;               /* (out) of `type`, or NULL */
  const int16_t *x;               /* (batch, in) */
  const float *x_scales;          /* (batch, in / BLOCK) */
  void *y;                        /* (batch, out) of `type` */
  ptrdiff_t batch, out, in;
  int type;
} Rounded;

/* One row of W times `batch` rows of x, from `first` on. batch and weight_type are compile-time constants. */
INLINE void multiply_plain(const Rounded *a, ptrdiff_t row, ptrdiff_t first, int batch, int weight_type) {
  ptrdiff_t blocks = a->in / BLOCK;
  const char *w = (const char *)a->values + row * blocks * bytes_per_block(weight_type);
  float sums[BATCH] = {0};
  for (ptrdiff_t k = 0; k < blocks; k++, w += bytes_per_block(weight_type)) {
    int16_t columns[BLOCK];
    for (int i = 0; i < BLOCK; i++) columns[i] = column(w, i, weight_type);
    for (int b = 0; b < batch; b++) {
      const int16_t *x = a->x + (first + b) * a->in + k * BLOCK;
      int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int i = 0; i < BLOCK; i++) sum += columns[i] * x[i];
      sums[b] += a->scales[row * blocks + k] * a->x_scales[(first + b) * blocks + k] * sum;
    }
  }
  for (int b = 0; b < batch; b++)
    put(a->y, (first + b) * a->out + row, sums[b] + (a->bias ? get(a->bias, row, a->type) : 0), a->type);
}

#ifdef HAS_INTRINSICS
/* As multiply_plain. With AVX512_VNNI rounded_rows.c and byte_panels.c are faster. */
INLINE_FOR(TARGET_AVX512) void multiply_avx512(const Rounded *a, ptrdiff_t row, ptrdiff_t first, int batch,
                                               int weight_type) {
  ptrdiff_t blocks = a->in / BLOCK;
  const char *w = (const char *)a->values + row * blocks * bytes_per_block(weight_type);
  const float *scales = a->scales + row * blocks, *x_scales = a->x_scales + first * blocks;
  const int16_t *x = a->x + first * a->in;
  __m512 sums[BATCH];
  for (int b = 0; b < batch; b++) sums[b] = _mm512_setzero_ps();
  for (ptrdiff_t k = 0; k < blocks; k++, w += bytes_per_block(weight_type)) {
    __builtin_prefetch(w + AHEAD);
    __m512i low = half_block(w, 0, weight_type), high = half_block(w, 1, weight_type);
    __m512 scale = _mm512_set1_ps(scales[k]);
    for (int b = 0; b < batch; b++) {
      const int16_t *columns = x + b * a->in + k * BLOCK;
      __m512i sum = add_products(_mm512_setzero_si512(), low, _mm512_loadu_si512(columns), 0);
      sum = add_products(sum, high, _mm512_loadu_si512(columns + 32), 0);
      __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(x_scales[b * blocks + k]));
      sums[b] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), both, sums[b]);
    }
  }
  for (int b = 0; b < batch; b++)
    put(a->y, (first + b) * a->out + row,
        _mm512_reduce_add_ps(sums[b]) + (a->bias ? get(a->bias, row, a->type) : 0), a->type);
}

/* As multiply_plain. */
INLINE_FOR(TARGET_AVX2) void multiply_avx2(const Rounded *a, ptrdiff_t row, ptrdiff_t first, int batch, int weight_type) {
  ptrdiff_t blocks = a->in / BLOCK;
  const char *w = (const char *)a->values + row * blocks * bytes_per_block(weight_type);
  const float *scales = a->scales + row * blocks, *x_scales = a->x_scales + first * blocks;
  const int16_t *x = a->x + first * a->in;
  __m256 sums[BATCH];
  for (int b = 0; b < batch; b++) sums[b] = _mm256_setzero_ps();
  for (ptrdiff_t k = 0; k < blocks; k++, w += bytes_per_block(weight_type)) {
    __builtin_prefetch(w + AHEAD);
    __m256i quarters[4];
    for (int q = 0; q < 4; q++) quarters[q] = quarter_block(w, q, weight_type);
    __m256 scale = _mm256_set1_ps(scales[k]);
    for (int b = 0; b < batch; b++) {
      const __m256i *columns = (const __m256i *)(x + b * a->in + k * BLOCK);
      __m256i sum = _mm256_madd_epi16(quarters[0], _mm256_loadu_si256(columns));
      for (int q = 1; q < 4; q++)
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(quarters[q], _mm256_loadu_si256(columns + q)));
      __m256 both = _mm256_mul_ps(scale, _mm256_set1_ps(x_scales[b * blocks + k]));
      sums[b] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), both, sums[b]);
    }
  }
  for (int b = 0; b < batch; b++)
    put(a->y, (first + b) * a->out + row, added_up(sums[b]) + (a->bias ? get(a->bias, row, a->type) : 0), a->type);
}
#endif

/* Multiplies the rows `start` to `stop` of W. There is one function for each number of rows of x, whose sums stay in
   registers. */
typedef void MultiplyRows(const Rounded *, ptrdiff_t first, ptrdiff_t start, ptrdiff_t stop);
#define MULTIPLY_ROWS(NAME, TARGET, BATCH, WEIGHT_TYPE)                                                          \
  TARGET static void NAME##_##WEIGHT_TYPE##_##BATCH(const Rounded *given, ptrdiff_t first, ptrdiff_t start,      \
                                                    ptrdiff_t stop) {                                            \
    const Rounded a = *given;                                                                                    \
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

/* The functions for 1 to BATCH rows of x. */
static MultiplyRows *const *functions_for(int weight_type) {
#ifdef HAS_INTRINSICS
  if (level() == AVX512) return weight_type == INT8 ? avx512_INT8 : avx512_INT4;
  if (level() == AVX2) return weight_type == INT8 ? avx2_INT8 : avx2_INT4;
#endif
  return weight_type == INT8 ? plain_INT8 : plain_INT4;
}

/* A row of x in 16 bits. Where x is not finite, the scale is not either; numbers below 1e-30 become 0. */
INLINE void round_row(const void *x, int16_t *to, float *scales, ptrdiff_t in, int type) {
  for (ptrdiff_t k = 0; k < in / BLOCK; k++, to += BLOCK, x = at(x, BLOCK, type)) {
    float most = largest_size(x, type), inverse = most > 1e-30f ? LARGEST / most : 0;
    scales[k] = most / LARGEST;
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) to[i] = (int16_t)(int32_t)__builtin_rintf(get(x, i, type) * inverse);
  }
}

CLONES void round_to_16_bits(const void *x, int16_t *to, float *scales, ptrdiff_t batch, ptrdiff_t in, ptrdiff_t x_stride,
                             int type) {
  for (ptrdiff_t b = 0; b < batch; b++, to += in, scales += in / BLOCK, x = at(x, x_stride, type))
    if (type == FLOAT32) round_row(x, to, scales, in, FLOAT32);
    else round_row(x, to, scales, in, BFLOAT16);
}

/* Multiplies the rows `start` to `stop` of W by all rows of x: if these are more than BATCH, ROWS rows of W at a time, which
   stay in the cache. */
static void multiply_rows(const Rounded *a, MultiplyRows *const *functions, ptrdiff_t start, ptrdiff_t stop) {
  ptrdiff_t step = a->batch > BATCH ? ROWS : stop - start;
  for (; start < stop; start += step)
    for (ptrdiff_t first = 0; first < a->batch; first += BATCH) {
      ptrdiff_t left = a->batch - first, end = start + step;
      functions[left < BATCH ? left - 1 : BATCH - 1](a, first, start, end < stop ? end : stop);
    }
}

/* `linear` with a W of INT8 or INT4; `in` is a multiple of BLOCK. */
int rounded_linear(const void *values, const float *scales, const void *bias, const void *x, void *y, ptrdiff_t batch,
                   ptrdiff_t out, ptrdiff_t in, ptrdiff_t x_stride, int weight_type, int type, int threads) {
  if (!out || !batch) return 0;
  if (batch > MOST_FOR_BYTES && has_tile_products())
    return tile_product(values, scales, bias, x, y, batch, out, in, x_stride, weight_type, type, threads);
  ptrdiff_t blocks = in / BLOCK;
  size_t bytes = batch * in * sizeof(int16_t) + batch * blocks * sizeof(float);
  int16_t *rounded_x = allocate(bytes);
  if (!rounded_x) return 1;
  float *x_scales = (float *)(rounded_x + batch * in);
  round_to_16_bits(x, rounded_x, x_scales, batch, in, x_stride, type);
#ifdef HAS_INTRINSICS
  if (has_tile_products() || has_avx512_vnni()) {
    Linear a = {values, bias, rounded_x, y, batch, out, in, in, in, out, type, scales, x_scales};
    int failed, has_tiles = has_tile_products();
    if (batch <= FEWEST) failed = (has_tiles ? fewest_rounded_rows : rounded_rows)(a, weight_type, threads);
    else failed = (has_tiles ? byte_tiles : byte_panels)(values, scales, bias, rounded_x, x_scales, y, batch, out, blocks,
                                                         weight_type, type, threads);
    free(rounded_x);
    return failed;
  }
#endif
  Rounded a = {values, scales, bias, rounded_x, x_scales, y, batch, out, in, type};
  MultiplyRows *const *functions = functions_for(weight_type);
  ptrdiff_t share = (out + threads - 1) / threads;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (ptrdiff_t start = 0; start < out; start += share) {
    ptrdiff_t stop = start + share < out ? start + share : out;
    multiply_rows(&a, functions, start, stop);
  }
  free(rounded_x);
  return 0;
}

/* Widening */

INLINE void widen_each(const char *values, const float *scales, void *to, ptrdiff_t blocks, int weight_type, int type) {
  for (ptrdiff_t k = 0; k < blocks; k++, values += bytes_per_block(weight_type), to = at(to, BLOCK, type))
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) put(to, i, column(values, i, weight_type) * scales[k], type);
}

CLONES static void widen_plain(const char *values, const float *scales, void *to, ptrdiff_t blocks, int weight_type,
                               int type) {
  if (weight_type == INT8 && type == FLOAT32) widen_each(values, scales, to, blocks, INT8, FLOAT32);
  else if (weight_type == INT8) widen_each(values, scales, to, blocks, INT8, BFLOAT16);
  else if (type == FLOAT32) widen_each(values, scales, to, blocks, INT4, FLOAT32);
  else widen_each(values, scales, to, blocks, INT4, BFLOAT16);
}

#ifdef HAS_INTRINSICS
INLINE_FOR(TARGET_AVX512_BF16) void widen_each_to_bfloat16(const char *values, const float *scales, uint16_t *to,
                                                             ptrdiff_t blocks, int weight_type) {
  for (ptrdiff_t k = 0; k < blocks; k++, values += bytes_per_block(weight_type), to += BLOCK)
    widen_block(values, scales[k], to, weight_type);
}

TARGET_AVX512_BF16 static void widen_to_bfloat16(const char *values, const float *scales, void *to, ptrdiff_t blocks,
                                                 int weight_type) {
  if (weight_type == INT8) widen_each_to_bfloat16(values, scales, to, blocks, INT8);
  else widen_each_to_bfloat16(values, scales, to, blocks, INT4);
}
#endif

/* Consecutive blocks times their scales, in `type` (FLOAT32 or BFLOAT16). */
static void widen_blocks(const char *values, const float *scales, void *to, ptrdiff_t blocks, int weight_type, int type) {
#ifdef HAS_INTRINSICS
  if (type == BFLOAT16 && has_avx512_bf16()) {
    widen_to_bfloat16(values, scales, to, blocks, weight_type);
    return;
  }
#endif
  widen_plain(values, scales, to, blocks, weight_type, type);
}

/* W times its scales, in `type` (FLOAT32 or BFLOAT16): to (out, in). */
int widen(const void *values, const float *scales, void *to, ptrdiff_t out, ptrdiff_t in, int weight_type, int type,
          int threads) {
  if (!out) return 0;
  ptrdiff_t row = in / BLOCK, share = (out + threads - 1) / threads;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (ptrdiff_t start = 0; start < out; start += share) {
    ptrdiff_t first = start * row, blocks = (start + share < out ? share : out - start) * row;
    widen_blocks((const char *)values + first * bytes_per_block(weight_type), scales + first, at(to, first * BLOCK, type), blocks,
                 weight_type, type);
  }
  return 0;
}
