/* The kernels of all operations but products. `type` is the dtype of tensors whose pointers are void. Strides and sizes are numbers of
   elements, never of bytes. A kernel returns 0, or 1 if it could not allocate memory. */
#ifndef KERNELS_H
#define KERNELS_H

#include "elementary.h"

INLINE size_t bytes_of(ptrdiff_t count, int type) { return count * (type == FLOAT32 ? 4 : 2); }

/* 1 if a matrix has 8 or 4 bits, in blocks with scales (quantized.h). */
INLINE int is_quantized(ptrdiff_t weight_type) { return weight_type == INT8 || weight_type == INT4; }

/* The number of rows of `size` elements for one thread: all `rows` if there are so few elements that starting threads takes longer. */
INLINE ptrdiff_t rows_per_thread(ptrdiff_t rows, ptrdiff_t size, int threads) {
  return rows * size < 1 << 15 ? rows : (rows + threads - 1) / threads;
}

int causal_conv(const void *x, const void *weight, const void *bias, const void *history, void *y, void *next,
                ptrdiff_t batch, ptrdiff_t seq, ptrdiff_t channels, ptrdiff_t taps, ptrdiff_t batch_stride,
                ptrdiff_t token_stride, ptrdiff_t history_stride, int type, int threads);
int selective_scan(const void *x, const void *dt, const float *A_log, const void *B, const void *C, const float *D,
                   const void *z, const float *dt_bias, const float *state, void *y, float *next, float *saved,
                   const ptrdiff_t *strides, ptrdiff_t batch, ptrdiff_t seq, ptrdiff_t channels, ptrdiff_t heads,
                   ptrdiff_t N, ptrdiff_t chunk, int type, int threads);
int ssd(const void *x, const float *dt, const float *A_log, const void *B, const void *C, const float *D,
        const float *state, void *y, float *next, float *saved, const ptrdiff_t *strides, ptrdiff_t batch, ptrdiff_t seq,
        ptrdiff_t heads, ptrdiff_t P, ptrdiff_t groups, ptrdiff_t N, int type, int one_by_one, int may_round, int threads);
int gated_delta(const void *q, const void *k, const void *v, const float *g, const float *beta, const float *state, void *y,
                float *next, const ptrdiff_t *strides, ptrdiff_t batch, ptrdiff_t seq, ptrdiff_t key_heads, ptrdiff_t heads,
                ptrdiff_t K, ptrdiff_t V, int type, int one_by_one, int threads);
void delta_rates(const void *gates, const float *A_log, const float *dt_bias, float *rates, ptrdiff_t heads, float most, int type);
int norm_gated(const void *y, const void *z, const void *weight, void *out, ptrdiff_t rows, ptrdiff_t z_stride, ptrdiff_t heads,
               ptrdiff_t size, float eps, int type, int threads);
void scale_row(const void *x, const void *weight, void *y, ptrdiff_t size, float scale, float offset, int type);
int rms_norm(const void *x, const void *weight, void *y, ptrdiff_t rows, ptrdiff_t size, float eps, float offset, int x_type,
             int type, int threads);
int widen(const void *values, const float *scales, void *to, ptrdiff_t out, ptrdiff_t in, int weight_type, int type,
          int threads);
int gated_norm(const void *y, const void *z, const void *weight, void *out, float *squares, ptrdiff_t rows,
               ptrdiff_t z_stride, ptrdiff_t groups, ptrdiff_t size, float eps, int normalize, int type, int threads);
/* y = activation(f x) z of a row, or activation(f x) if it is not gated. y may be x. */
void activate_any(const void *x, const void *z, void *y, ptrdiff_t size, float f, int activation, int gated, int type);

enum { MOST_HEADS = 4 }; /* the most heads that attend together */
/* y = softmax(scale * q k^T) v of `heads` query heads that use one key/value head; scores: heads * keys + dim numbers. */
void attend_heads(const void *q, const void *k, const void *v, void *y, ptrdiff_t keys, ptrdiff_t dim, ptrdiff_t stride,
                  float scale, float *scores, int heads, int type);

#endif
