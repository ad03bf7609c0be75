/* The functions that kernels.py calls, for those that call one another. */
#ifndef KERNELS_H
#define KERNELS_H

#include "elementary.h"

int linear(const void *weight, const float *scales, const void *bias, const void *x, void *y, ptrdiff_t batch,
           ptrdiff_t out, ptrdiff_t in, ptrdiff_t pitch, int stored, int type, int threads);
int linear_of(const void *weight, const float *scales, const void *bias, const void *x, void *y, ptrdiff_t batch,
              ptrdiff_t out, ptrdiff_t in, ptrdiff_t line, ptrdiff_t pitch, ptrdiff_t apart, int stored, int type,
              int threads);
int causal_conv(const void *x, const void *weight, const void *bias, const void *history, void *y, void *next,
                ptrdiff_t batch, ptrdiff_t seq, ptrdiff_t channels, ptrdiff_t taps, ptrdiff_t batch_stride,
                ptrdiff_t stride, ptrdiff_t history_stride, int type, int threads);
int selective_scan(const void *x, const void *dt, const float *A_log, const void *B, const void *C, const float *D,
                   const void *z, const float *dt_bias, const float *state, void *y, float *next, float *saved,
                   const ptrdiff_t *strides, ptrdiff_t batch, ptrdiff_t seq, ptrdiff_t channels, ptrdiff_t heads,
                   ptrdiff_t N, ptrdiff_t chunk, int type, int threads);
int ssd(const void *x, const float *dt, const float *A_log, const void *B, const void *C, const float *D,
        const float *state, void *y, float *next, float *saved, const ptrdiff_t *strides, ptrdiff_t batch, ptrdiff_t seq,
        ptrdiff_t heads, ptrdiff_t P, ptrdiff_t groups, ptrdiff_t N, int type, int threads);
int rms_norm(const void *x, const void *weight, void *y, ptrdiff_t rows, ptrdiff_t size, float eps, int type, int out);
int gated_norm(const void *y, const void *z, const void *weight, void *out, float *squares, ptrdiff_t rows,
               ptrdiff_t pitch, ptrdiff_t groups, ptrdiff_t size, float eps, int normalize, int type);

#endif
