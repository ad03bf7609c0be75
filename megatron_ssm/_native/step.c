/* One token of a mixer, in as few calls as its all-reduces allow: the same kernels as otherwise, without Python between. */
#include "kernels.h"

/* A matrix (out, in) as `linear` takes it. */
typedef struct {
  const void *values;
  const float *scales;
  ptrdiff_t stored;
} Matrix;

/* Mamba-1 up to x_proj: in_proj, convolution, x_proj. hidden (batch, size) -> parameters (batch, width), of which this
   rank has its part; work (batch, 5 channels) keeps x and z for mamba_out. `history` (batch, taps - 1, channels) advances. */
int mamba_in(const void *hidden, const Matrix *in_proj, const void *in_bias, const void *conv, const void *conv_bias,
             void *history, const void *x_proj, void *work, void *parameters, ptrdiff_t batch, ptrdiff_t size,
             ptrdiff_t channels, ptrdiff_t taps, ptrdiff_t width, ptrdiff_t history_stride, int type, int threads) {
  void *xz = work, *x = at(work, 2 * batch * channels, type);
  int failed = linear(in_proj->values, in_proj->scales, in_bias, hidden, xz, batch, 2 * channels, size, size,
                      in_proj->stored, type, threads);
  causal_conv(xz, conv, conv_bias, history, x, history, batch, 1, channels, taps, 2 * channels, 2 * channels,
              history_stride, type, threads);
  return failed | linear(x_proj, NULL, NULL, x, parameters, batch, width, channels, channels, type, type, threads);
}

/* Mamba-1 from the summed parameters (dt, B, C) on: dt_proj, scan, gate, out_proj -> y (batch, size), this rank's part. */
int mamba_out(const void *parameters, void *work, const void *dt_proj, const float *dt_bias, const float *A_log,
              const float *D, float *state, const Matrix *out_proj, void *y, ptrdiff_t batch, ptrdiff_t size,
              ptrdiff_t channels, ptrdiff_t rank, ptrdiff_t N, ptrdiff_t state_stride, int type, int threads) {
  ptrdiff_t width = rank + 2 * N, each = batch * channels;
  void *z = at(work, channels, type), *x = at(work, 2 * each, type), *dt = at(work, 3 * each, type);
  void *scanned = at(work, 4 * each, type);
  ptrdiff_t strides[] = {channels, 0, channels, 0, width, 0, width, 0, 2 * channels, 0, state_stride, state_stride};
  int failed = linear(dt_proj, NULL, NULL, parameters, dt, batch, channels, rank, width, type, type, threads);
  selective_scan(x, dt, A_log, at(parameters, rank, type), at(parameters, rank + N, type), D, z, dt_bias, state, scanned,
                 state, NULL, strides, batch, 1, channels, N, 0, type, threads);
  return failed | linear(out_proj->values, out_proj->scales, NULL, scanned, y, batch, size, channels, channels,
                         out_proj->stored, type, threads);
}

/* Mamba-2: everything before out_proj's all-reduce. hidden (batch, size) -> y (batch, size), this rank's part; where
   `squares` (batch, groups) is given, of what is not normalized, and the sums of squares. work (batch, wide + mixed + 2 *
   inner) with inner = heads * P, mixed = inner + 2 * groups * N, wide = inner + mixed + heads; dt (batch, heads). */
int mamba2_step(const void *hidden, const Matrix *in_proj, const void *in_bias, const void *conv, const void *conv_bias,
                void *history, const float *dt_bias, const float *A_log, const float *D, float *state, const void *norm,
                const Matrix *out_proj, void *y, float *squares, void *work, float *dt, ptrdiff_t batch, ptrdiff_t size,
                ptrdiff_t heads, ptrdiff_t P, ptrdiff_t groups, ptrdiff_t N, ptrdiff_t taps, ptrdiff_t history_stride,
                ptrdiff_t state_stride, float eps, int type, int threads) {
  ptrdiff_t inner = heads * P, mixed = inner + 2 * groups * N, wide = inner + mixed + heads;
  void *projected = work, *xBC = at(work, batch * wide, type), *scanned = at(xBC, batch * mixed, type);
  void *normed = at(scanned, batch * inner, type);
  int failed = linear(in_proj->values, in_proj->scales, in_bias, hidden, projected, batch, wide, size, size,
                      in_proj->stored, type, threads);
  causal_conv(at(projected, inner, type), conv, conv_bias, history, xBC, history, batch, 1, mixed, taps, wide, wide,
              history_stride, type, threads);
  for (ptrdiff_t b = 0; b < batch; b++)
    for (ptrdiff_t h = 0; h < heads; h++)
      dt[b * heads + h] = softplus_(get(projected, b * wide + inner + mixed + h, type) + dt_bias[h]);
  ptrdiff_t strides[] = {mixed, 0, mixed, 0, mixed, 0, state_stride, state_stride};
  ssd(xBC, dt, A_log, at(xBC, inner, type), at(xBC, inner + groups * N, type), D, state, scanned, state, NULL, strides,
      batch, 1, heads, P, groups, N, type, threads);
  failed |= gated_norm(scanned, projected, norm, normed, squares, batch, wide, groups, inner / groups, eps, !squares, type);
  return failed | linear(out_proj->values, out_proj->scales, NULL, normed, y, batch, size, inner, inner,
                         out_proj->stored, type, threads);
}
