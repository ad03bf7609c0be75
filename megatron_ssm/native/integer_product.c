/* y = x W^T + b for many rows of x and a W of 8 or 4 bits, with x rounded to 8 bits, by the instruction that adds products of
   unsigned and signed bytes (AVX512_VNNI). The products themselves are those of panels.

   W is used as w + OFFSET, which is unsigned; the sum of (w + OFFSET) x over a block minus OFFSET times the sum of x is exact.
   x has a scale for each block of a row, max(abs(x)) / 127, so rounding adds at most 1/254 of a block's largest element. */
#include "panels.h"

#ifdef HAS_INTRINSICS
enum { LARGEST = 127 };

/* A row of x in 8 bits. sums: -OFFSET times the sum of each block. Where x is not finite, the scale is not either; numbers below
   1e-30 become 0. */
INLINE void round_row(const void *x, int8_t *to, float *scales, int32_t *sums, ptrdiff_t blocks, int type) {
  for (ptrdiff_t k = 0; k < blocks; k++, to += BLOCK, x = at(x, BLOCK, type)) {
    float most = largest_size(x, type), inverse = most > 1e-30f ? LARGEST / most : 0;
    uint32_t sum = 0; /* may overflow where x is not finite */
    scales[k] = most / LARGEST;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < BLOCK; i++) {
      int32_t rounded = (int32_t)__builtin_rintf(get(x, i, type) * inverse);
      to[i] = (int8_t)rounded;
      sum += (uint32_t)rounded;
    }
    sums[k] = (int32_t)(-(uint32_t)OFFSET * sum);
  }
}

CLONES void round_to_bytes(const void *x, int8_t *to, float *scales, int32_t *sums, ptrdiff_t batch, ptrdiff_t blocks,
                           ptrdiff_t x_stride, int type) {
  for (ptrdiff_t b = 0; b < batch; b++, to += blocks * BLOCK, scales += blocks, sums += blocks, x = at(x, x_stride, type))
    if (type == FLOAT32) round_row(x, to, scales, sums, blocks, FLOAT32);
    else round_row(x, to, scales, sums, blocks, BFLOAT16);
}

/* As tile_product, for INT8 and INT4; `in` is a multiple of BLOCK. */
int integer_product(const void *values, const float *scales, const void *bias, const void *x, void *y, ptrdiff_t batch,
                    ptrdiff_t out, ptrdiff_t in, ptrdiff_t x_stride, int weight_type, int type, int threads) {
  return multiply_by_panels(values, scales, bias, x, y, batch, out, in, x_stride, weight_type, type, threads, BYTE_QUADS);
}
#else
int integer_product(const void *values, const float *scales, const void *bias, const void *x, void *y, ptrdiff_t batch,
                    ptrdiff_t out, ptrdiff_t in, ptrdiff_t x_stride, int weight_type, int type, int threads) {
  return 1;
}
#endif

int has_integer_products(void) { return has_avx512_vnni(); }
