/* Conversions: x of a product to integers, matrices to 8 or 4 bits, and such matrices to floating point. quantized.h describes their
   format; kernels/quantized_matrices.py is the twin in torch. */
#include <math.h>

#include "quantized.h"

/* LARGEST numbers of 16 bits: 127 * 256 + 127, so that each is the sum of 256 times a byte and a byte. */
enum { LARGEST_16 = 32639, LARGEST_8 = 127 };

/* A row of x, of `type`, in 16 bits. type is a compile-time constant. */
INLINE void round_to_16_bits(const void *x, int16_t *to, float *scales, ptrdiff_t blocks, int type) {
  for (ptrdiff_t k = 0; k < blocks; k++, to += BLOCK, x = at(x, BLOCK, type)) {
    float most = largest_size(x, type), inverse = most > 1e-30f ? LARGEST_16 / most : 0;
    scales[k] = most / LARGEST_16;
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) to[i] = (int16_t)(int32_t)__builtin_rintf(get(x, i, type) * inverse);
  }
}

CLONES void fill_16_bits(const Product *p, QuantizedX to) {
  ptrdiff_t blocks = p->in / BLOCK;
  for (ptrdiff_t b = 0; b < p->batch; b++, to.values += p->in, to.scales += blocks)
    if (p->type == FLOAT32) round_to_16_bits(x_row(p, b), to.values, to.scales, blocks, FLOAT32);
    else round_to_16_bits(x_row(p, b), to.values, to.scales, blocks, BFLOAT16);
}

QuantizedX x_in_16_bits(const Product *p) {
  int16_t *values = allocate(p->batch * (p->in * sizeof(int16_t) + p->in / BLOCK * sizeof(float)));
  QuantizedX x = {values, values ? (float *)(values + p->batch * p->in) : NULL};
  if (values) fill_16_bits(p, x);
  return x;
}

/* As round_to_16_bits, in 8 bits. */
INLINE void round_to_8_bits(const void *x, int8_t *to, float *scales, int32_t *sums, ptrdiff_t blocks, int type) {
  for (ptrdiff_t k = 0; k < blocks; k++, to += BLOCK, x = at(x, BLOCK, type)) {
    float most = largest_size(x, type), inverse = most > 1e-30f ? LARGEST_8 / most : 0;
    uint32_t sum = 0; /* may overflow where x is not finite */
    scales[k] = most / LARGEST_8;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < BLOCK; i++) {
      int32_t rounded = (int32_t)__builtin_rintf(get(x, i, type) * inverse);
      to[i] = (int8_t)rounded;
      sum += (uint32_t)rounded;
    }
    sums[k] = (int32_t)(-(uint32_t)OFFSET * sum);
  }
}

CLONES void x_in_8_bits(const Product *p, int8_t *to, float *scales, int32_t *sums) {
  ptrdiff_t blocks = p->in / BLOCK;
  for (ptrdiff_t b = 0; b < p->batch; b++, to += p->in, scales += blocks, sums += blocks)
    if (p->type == FLOAT32) round_to_8_bits(x_row(p, b), to, scales, sums, blocks, FLOAT32);
    else round_to_8_bits(x_row(p, b), to, scales, sums, blocks, BFLOAT16);
}

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
  if (type == BFLOAT16 && instructions() >= WITH_BF16) {
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

/* The largest size of a block's numbers; infinite if one of them is not finite. */
INLINE float largest(const float *x) {
  float most = 0;
#pragma omp simd reduction(max : most)
  for (int i = 0; i < BLOCK; i++) {
    float size = __builtin_isfinite(x[i]) ? __builtin_fabsf(x[i]) : INFINITY;
    most = size > most ? size : most;
  }
  return most;
}

/* A block in 8 bits; returns its scale. Where a number is not finite, the scale is not either. */
INLINE float quantize_to_8_bits(const float *x, int8_t *to) {
  float most = largest(x);
  float scale = most / 127, divisor = scale > 0 ? scale : 1;
#pragma omp simd
  for (int i = 0; i < BLOCK; i++) {
    float rounded = __builtin_rintf(x[i] / divisor);
    to[i] = (int8_t)(int32_t)(rounded > 127 ? 127 : rounded < -127 ? -127 : rounded);
  }
  return most < INFINITY ? scale : NAN;
}

/* In 4 bits: of the scales for which the extreme number becomes -8, -7.5, -6.9 or -6.3, that with the least sum of squared
   errors. */
INLINE float quantize_to_4_bits(const float *x, uint16_t *to) {
  static const float DIVISORS[] = {8, 7.5f, 6.9f, 6.3f};
  float most = largest(x), extreme = 0, best = INFINITY, chosen = 0;
  for (int i = BLOCK - 1; i >= 0; i--) extreme = __builtin_fabsf(x[i]) == most ? x[i] : extreme;
  for (int d = 0; d < 4; d++) {
    float scale = extreme / -DIVISORS[d], divisor = scale != 0 ? scale : 1, error = 0;
#pragma omp simd reduction(+ : error)
    for (int i = 0; i < BLOCK; i++) {
      float rounded = __builtin_rintf(x[i] / divisor);
      rounded = rounded > 7 ? 7 : rounded < -8 ? -8 : rounded;
      float difference = rounded * scale - x[i];
      error += difference * difference;
    }
    if (d == 0 || !(error >= best)) best = error, chosen = scale; /* the first one also where errors are infinite */
  }
  int32_t integers[BLOCK];
  float divisor = chosen != 0 ? chosen : 1;
#pragma omp simd
  for (int i = 0; i < BLOCK; i++) {
    float rounded = __builtin_rintf(x[i] / divisor);
    integers[i] = (int32_t)(rounded > 7 ? 7 : rounded < -8 ? -8 : rounded);
  }
#pragma omp simd
  for (int j = 0; j < 16; j++) {
    int32_t low = (integers[j] & 15) | (integers[16 + j] & 15) << 4, high = (integers[32 + j] & 15) | (integers[48 + j] & 15) << 4;
    to[j] = (uint16_t)(low | high << 8);
  }
  return most < INFINITY ? chosen : NAN;
}

INLINE void quantize_row(const void *x, char *values, float *scales, ptrdiff_t blocks, int type, int weight_type) {
  for (ptrdiff_t k = 0; k < blocks; k++, x = at((void *)x, BLOCK, type), values += bytes_per_block(weight_type)) {
    float numbers[BLOCK];
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) numbers[i] = get(x, i, type);
    if (weight_type == INT8) scales[k] = quantize_to_8_bits(numbers, (int8_t *)values);
    else scales[k] = quantize_to_4_bits(numbers, (uint16_t *)values);
  }
}
CLONES static void quantize_any(const void *x, char *values, float *scales, ptrdiff_t blocks, int type, int weight_type) {
  if (type == FLOAT32 && weight_type == INT8) quantize_row(x, values, scales, blocks, FLOAT32, INT8);
  else if (type == FLOAT32) quantize_row(x, values, scales, blocks, FLOAT32, INT4);
  else if (weight_type == INT8) quantize_row(x, values, scales, blocks, BFLOAT16, INT8);
  else quantize_row(x, values, scales, blocks, BFLOAT16, INT4);
}

/* A matrix (out, in) of `type`, whose rows are `stride` elements apart -> values and scales of weight_type. */
void quantize(const void *matrix, char *values, float *scales, ptrdiff_t out, ptrdiff_t in, ptrdiff_t stride, int type,
              int weight_type, int threads) {
  ptrdiff_t blocks = in / BLOCK;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (ptrdiff_t r = 0; r < out; r++)
    quantize_any(at((void *)matrix, r * stride, type), values + r * blocks * bytes_per_block(weight_type),
                 scales + r * blocks, blocks, type, weight_type);
}
