/* RMSNorm, and Mamba-2's gated RMSNorm. See `RMSNorm` in parallel/layers.py and `Mamba2Mixer` in layers/mamba2.py. */
#include <math.h>
#include <stdlib.h>

#include "kernels.h"

/* y *= weight, after y was rounded to its dtype. torch and transformers round in this order, and with a norm over few channels the
   order is visible in the logits. */
INLINE void scale_rounded(void *y, const void *weight, ptrdiff_t size, int type) {
#pragma omp simd
  for (ptrdiff_t i = 0; i < size; i++) put(y, i, get(y, i, type) * get(weight, i, type), type);
}

/* y = x scale (offset + weight); see `norm_row`. */
INLINE void scaled_row(const void *x, const void *weight, void *y, ptrdiff_t size, float scale, float offset, int x_type, int type) {
  if (weight && offset) {
#pragma omp simd
    for (ptrdiff_t i = 0; i < size; i++) put(y, i, get(x, i, x_type) * scale * (offset + get(weight, i, type)), type);
    return;
  }
#pragma omp simd
  for (ptrdiff_t i = 0; i < size; i++) put(y, i, get(x, i, x_type) * scale, type);
  if (weight) scale_rounded(y, weight, size, type);
}

/* y = x / sqrt(mean(x^2) + eps) * (offset + weight); weight NULL: without it. y may be x if their dtypes are the same. With an
   offset, y is rounded once. */
INLINE void norm_row(const void *x, const void *weight, void *y, ptrdiff_t size, float eps, float offset, int x_type, int type) {
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (ptrdiff_t i = 0; i < size; i++) squares += get(x, i, x_type) * get(x, i, x_type);
  scaled_row(x, weight, y, size, 1 / sqrtf(squares / size + eps), offset, x_type, type);
}

CLONES static void rows_float32(const void *x, const void *weight, void *y, ptrdiff_t rows, ptrdiff_t size, float eps,
                                float offset) {
  for (ptrdiff_t r = 0; r < rows; r++)
    norm_row(at(x, r * size, FLOAT32), weight, at(y, r * size, FLOAT32), size, eps, offset, FLOAT32, FLOAT32);
}
CLONES static void rows_mixed(const void *x, const void *weight, void *y, ptrdiff_t rows, ptrdiff_t size, float eps,
                              float offset) {
  for (ptrdiff_t r = 0; r < rows; r++)
    norm_row(at(x, r * size, FLOAT32), weight, at(y, r * size, BFLOAT16), size, eps, offset, FLOAT32, BFLOAT16);
}
CLONES static void rows_bfloat16(const void *x, const void *weight, void *y, ptrdiff_t rows, ptrdiff_t size, float eps,
                                 float offset) {
  for (ptrdiff_t r = 0; r < rows; r++)
    norm_row(at(x, r * size, BFLOAT16), weight, at(y, r * size, BFLOAT16), size, eps, offset, BFLOAT16, BFLOAT16);
}

static void norm_rows(const void *x, const void *weight, void *y, ptrdiff_t rows, ptrdiff_t size, float eps, float offset,
                      int x_type, int type) {
  if (x_type == BFLOAT16) rows_bfloat16(x, weight, y, rows, size, eps, offset);
  else if (type == BFLOAT16) rows_mixed(x, weight, y, rows, size, eps, offset);
  else rows_float32(x, weight, y, rows, size, eps, offset);
}

/* x and y: (rows, size). weight, (size), and y are of `type`; x is of the same type, or FLOAT32 where `type` is BFLOAT16. */
int rms_norm(const void *x, const void *weight, void *y, ptrdiff_t rows, ptrdiff_t size, float eps, float offset, int x_type,
             int type, int threads) {
  ptrdiff_t share = rows_per_thread(rows, size, threads);
  if (share == rows) {
    norm_rows(x, weight, y, rows, size, eps, offset, x_type, type);
    return 0;
  }
#pragma omp parallel for num_threads(threads)
  for (ptrdiff_t first = 0; first < rows; first += share) {
    ptrdiff_t count = rows - first < share ? rows - first : share;
    norm_rows(at(x, first * size, x_type), weight, at(y, first * size, type), count, size, eps, offset, x_type,
              type);
  }
  return 0;
}

/* One row of a norm whose scale is known; x and y are of `type`. */
CLONES void scale_row(const void *x, const void *weight, void *y, ptrdiff_t size, float scale, float offset, int type) {
  if (type == FLOAT32) scaled_row(x, weight, y, size, scale, offset, FLOAT32, FLOAT32);
  else scaled_row(x, weight, y, size, scale, offset, BFLOAT16, BFLOAT16);
}

/* out = y silu(z) * weight of one row, normalized over each group of `size` channels before the product with the weight if
   `normalize`; otherwise the sum of squares of each group is stored in `squares`. `gated` has room for one group. */
INLINE void gated_row(const void *y, const void *z, const void *weight, void *out, float *squares, ptrdiff_t groups,
                      ptrdiff_t size, float eps, int normalize, int type, float *gated) {
  for (ptrdiff_t group = 0; group < groups; group++) {
    ptrdiff_t first = group * size;
    float sum = 0, least = unknown(LEAST_EXPONENT);
#pragma omp simd reduction(+ : sum)
    for (ptrdiff_t i = 0; i < size; i++) {
      float gate = get(z, first + i, type), value = get(y, first + i, type) * gate * sigmoid_(gate, least);
      gated[i] = value, sum += value * value;
    }
    float scale = normalize ? 1 / sqrtf(sum / size + eps) : 1;
#pragma omp simd
    for (ptrdiff_t i = 0; i < size; i++) put(out, first + i, gated[i] * scale, type);
    scale_rounded(at(out, first, type), at(weight, first, type), size, type);
    if (!normalize) squares[group] = sum;
  }
}

CLONES static void gated_float32(const void *y, const void *z, const void *weight, void *out, float *squares,
                                 ptrdiff_t groups, ptrdiff_t size, float eps, int normalize, float *gated) {
  gated_row(y, z, weight, out, squares, groups, size, eps, normalize, FLOAT32, gated);
}
CLONES static void gated_bfloat16(const void *y, const void *z, const void *weight, void *out, float *squares,
                                  ptrdiff_t groups, ptrdiff_t size, float eps, int normalize, float *gated) {
  gated_row(y, z, weight, out, squares, groups, size, eps, normalize, BFLOAT16, gated);
}

/* y, out: (rows, groups * size); z: the same shape, with z_stride between rows; weight: (groups * size); all of `type`.
   squares: (rows, groups), or NULL if `normalize`. */
int gated_norm(const void *y, const void *z, const void *weight, void *out, float *squares, ptrdiff_t rows,
               ptrdiff_t z_stride, ptrdiff_t groups, ptrdiff_t size, float eps, int normalize, int type, int threads) {
  ptrdiff_t share = rows_per_thread(rows, groups * size, threads);
  int failed = 0;
  if (!rows) return 0;
#pragma omp parallel for num_threads(threads) if (share < rows) reduction(| : failed)
  for (ptrdiff_t first = 0; first < rows; first += share) {
    float *gated = malloc(size * sizeof(float));
    failed |= !gated;
    for (ptrdiff_t r = first; gated && r < rows && r < first + share; r++) {
      const void *z_row = at(z, r * z_stride, type), *y_row = at(y, r * groups * size, type);
      void *out_row = at(out, r * groups * size, type);
      float *squares_row = squares ? squares + r * groups : NULL;
      if (type == FLOAT32) gated_float32(y_row, z_row, weight, out_row, squares_row, groups, size, eps, normalize, gated);
      else gated_bfloat16(y_row, z_row, weight, out_row, squares_row, groups, size, eps, normalize, gated);
    }
    free(gated);
  }
  return failed;
}

/* out = norm(y) * weight * silu(z) of one row, normalized over each head; weight: (size). */
INLINE void norm_gated_row(const void *y, const void *z, const void *weight, void *out, ptrdiff_t heads, ptrdiff_t size, float eps,
                           int type) {
  float least = unknown(LEAST_EXPONENT);
  for (ptrdiff_t head = 0; head < heads; head++) {
    ptrdiff_t first = head * size;
    norm_row(at(y, first, type), weight, at(out, first, type), size, eps, 0, type, type);
#pragma omp simd
    for (ptrdiff_t i = first; i < first + size; i++) {
      float gate = get(z, i, type);
      put(out, i, get(out, i, type) * gate * sigmoid_(gate, least), type);
    }
  }
}
CLONES static void norm_gated_float32(const void *y, const void *z, const void *weight, void *out, ptrdiff_t heads, ptrdiff_t size,
                                      float eps) {
  norm_gated_row(y, z, weight, out, heads, size, eps, FLOAT32);
}
CLONES static void norm_gated_bfloat16(const void *y, const void *z, const void *weight, void *out, ptrdiff_t heads,
                                       ptrdiff_t size, float eps) {
  norm_gated_row(y, z, weight, out, heads, size, eps, BFLOAT16);
}

/* The norm of a gated delta net. y, out: (rows, heads * size); z: the same shape, with z_stride between rows; all of `type`. */
int norm_gated(const void *y, const void *z, const void *weight, void *out, ptrdiff_t rows, ptrdiff_t z_stride, ptrdiff_t heads,
               ptrdiff_t size, float eps, int type, int threads) {
  ptrdiff_t share = rows_per_thread(rows, heads * size, threads);
  if (!rows) return 0;
#pragma omp parallel for num_threads(threads) if (share < rows)
  for (ptrdiff_t first = 0; first < rows; first += share)
    for (ptrdiff_t r = first; r < rows && r < first + share; r++) {
      const void *z_row = at(z, r * z_stride, type), *y_row = at(y, r * heads * size, type);
      void *out_row = at(out, r * heads * size, type);
      if (type == FLOAT32) norm_gated_float32(y_row, z_row, weight, out_row, heads, size, eps);
      else norm_gated_bfloat16(y_row, z_row, weight, out_row, heads, size, eps);
    }
  return 0;
}
