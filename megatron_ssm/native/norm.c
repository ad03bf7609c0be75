/* RMS norms: of rows, and Mamba-2's gated one. See `RMSNorm` in layers.py and `Mamba2Mixer` in mamba2.py. */
#include <math.h>
#include <stdlib.h>

#include "kernels.h"

/* y = y * weight, after y = ... has been rounded: in this order torch and transformers compute norms, and where a norm is
   over few channels, logits show it. */
INLINE void scale_rounded(void *y, const void *weight, ptrdiff_t size, int type) {
#pragma omp simd
  for (ptrdiff_t i = 0; i < size; i++) put(y, i, get(y, i, type) * get(weight, i, type), type);
}

/* x / sqrt(mean(x^2) + eps) * weight (NULL: 1) */
INLINE void norm_row(const void *x, const void *weight, void *y, ptrdiff_t size, float eps, int type, int out) {
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (ptrdiff_t i = 0; i < size; i++) squares += get(x, i, type) * get(x, i, type);
  float scale = 1 / sqrtf(squares / size + eps);
#pragma omp simd
  for (ptrdiff_t i = 0; i < size; i++) put(y, i, get(x, i, type) * scale, out);
  if (weight) scale_rounded(y, weight, size, out);
}

CLONES static void rows_float32(const void *x, const void *weight, void *y, ptrdiff_t rows, ptrdiff_t size, float eps) {
  for (ptrdiff_t r = 0; r < rows; r++)
    norm_row(at(x, r * size, FLOAT32), weight, at(y, r * size, FLOAT32), size, eps, FLOAT32, FLOAT32);
}
CLONES static void rows_mixed(const void *x, const void *weight, void *y, ptrdiff_t rows, ptrdiff_t size, float eps) {
  for (ptrdiff_t r = 0; r < rows; r++)
    norm_row(at(x, r * size, FLOAT32), weight, at(y, r * size, BFLOAT16), size, eps, FLOAT32, BFLOAT16);
}
CLONES static void rows_bfloat16(const void *x, const void *weight, void *y, ptrdiff_t rows, ptrdiff_t size, float eps) {
  for (ptrdiff_t r = 0; r < rows; r++)
    norm_row(at(x, r * size, BFLOAT16), weight, at(y, r * size, BFLOAT16), size, eps, BFLOAT16, BFLOAT16);
}

/* x (rows, size) of `type`, weight and y of type `out`: the same, or FLOAT32 and BFLOAT16. */
int rms_norm(const void *x, const void *weight, void *y, ptrdiff_t rows, ptrdiff_t size, float eps, int type, int out) {
  if (type == BFLOAT16) rows_bfloat16(x, weight, y, rows, size, eps);
  else if (out == BFLOAT16) rows_mixed(x, weight, y, rows, size, eps);
  else rows_float32(x, weight, y, rows, size, eps);
  return 0;
}

/* y silu(z) over each of a row's groups of `size`: normalized and times weight where `normalize`; else times weight only,
   and the sums of squares (rows, groups) beside it. */
INLINE void gated_row(const void *y, const void *z, const void *weight, void *out, float *squares, ptrdiff_t groups,
                      ptrdiff_t size, float eps, int normalize, int type, float *gated) {
  for (ptrdiff_t group = 0; group < groups; group++) {
    ptrdiff_t first = group * size;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (ptrdiff_t i = 0; i < size; i++) {
      float gate = get(z, first + i, type), value = get(y, first + i, type) * gate * sigmoid_(gate);
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

/* y, out: (rows, groups * size); z: the same in rows of `pitch`; all of `type`. 1: no memory. */
int gated_norm(const void *y, const void *z, const void *weight, void *out, float *squares, ptrdiff_t rows,
               ptrdiff_t pitch, ptrdiff_t groups, ptrdiff_t size, float eps, int normalize, int type) {
  float *gated = malloc(size * sizeof(float));
  if (!gated) return 1;
  for (ptrdiff_t r = 0; r < rows; r++) {
    const void *gate = at(z, r * pitch, type), *from = at(y, r * groups * size, type);
    void *to = at(out, r * groups * size, type);
    float *sums = squares ? squares + r * groups : NULL;
    if (type == FLOAT32) gated_float32(from, gate, weight, to, sums, groups, size, eps, normalize, gated);
    else gated_bfloat16(from, gate, weight, to, sums, groups, size, eps, normalize, gated);
  }
  free(gated);
  return 0;
}
