/* The causal depthwise convolution with SiLU, and its gradient. One task: a block of channels (of one sequence). */
#include "kernels.h"

enum { WIDTH = 64, TAPS = 8 }; /* channels of a block; the longest kernel */

typedef struct {
  const void *x, *weight, *bias, *history; /* (batch, seq, channels), rows of `stride`; (channels, taps); ...; or NULL */
  void *y, *next;                          /* (batch, seq, channels); (batch, taps - 1, channels), may be history */
  ptrdiff_t batch, seq, channels, taps, batch_stride, stride, history_stride;
  int type;
} Conv;

/* The block's taps, tap by tap. */
INLINE void load_taps(const Conv *a, ptrdiff_t first, ptrdiff_t width, float taps[TAPS][WIDTH], int type) {
  for (ptrdiff_t k = 0; k < a->taps; k++)
    for (ptrdiff_t c = 0; c < width; c++) taps[k][c] = get(a->weight, (first + c) * a->taps + k, type);
}

/* The inputs before the block's first token, as numbers of the tensor's type. */
INLINE void load_history(const Conv *a, ptrdiff_t b, ptrdiff_t first, ptrdiff_t width, char *held, int type) {
  for (ptrdiff_t k = 0; k < a->taps - 1; k++) {
    char *row = at(held, k * WIDTH, type);
    ptrdiff_t bytes = at(NULL, width, type) - NULL;
    if (a->history) memcpy(row, at(a->history, b * a->history_stride + k * a->channels + first, type), bytes);
    else memset(row, 0, bytes);
  }
}

/* The inputs of token t (from -(taps - 1) on). */
INLINE const void *row_of(const Conv *a, ptrdiff_t b, ptrdiff_t first, const char *held, ptrdiff_t t, int type) {
  return t < 0 ? at(held, (t + a->taps - 1) * WIDTH, type)
               : at(a->x, b * a->batch_stride + t * a->stride + first, type);
}

/* acc = bias + sum over the taps: what SiLU is applied to at token t. */
INLINE void convolve(const Conv *a, ptrdiff_t b, ptrdiff_t first, ptrdiff_t width, const char *held, ptrdiff_t t,
                     float taps[TAPS][WIDTH], const float *bias, float *acc, int type) {
#pragma omp simd
  for (ptrdiff_t c = 0; c < width; c++) acc[c] = bias[c];
  for (ptrdiff_t k = 0; k < a->taps; k++) {
    const void *row = row_of(a, b, first, held, t - a->taps + 1 + k, type);
    const float *tap = taps[k];
#pragma omp simd
    for (ptrdiff_t c = 0; c < width; c++) acc[c] += tap[c] * get(row, c, type);
  }
}

INLINE void forward_block(const Conv *a, ptrdiff_t task, int type) {
  ptrdiff_t blocks = (a->channels + WIDTH - 1) / WIDTH, b = task / blocks, first = task % blocks * WIDTH;
  ptrdiff_t width = a->channels - first < WIDTH ? a->channels - first : WIDTH;
  float taps[TAPS][WIDTH], bias[WIDTH], acc[WIDTH];
  char held[(TAPS - 1) * WIDTH * 4];
  load_taps(a, first, width, taps, type);
  load_history(a, b, first, width, held, type);
  for (ptrdiff_t c = 0; c < width; c++) bias[c] = a->bias ? get(a->bias, first + c, type) : 0;
  for (ptrdiff_t t = 0; t < a->seq; t++) {
    convolve(a, b, first, width, held, t, taps, bias, acc, type);
    void *y = at(a->y, (b * a->seq + t) * a->channels + first, type);
#pragma omp simd
    for (ptrdiff_t c = 0; c < width; c++) put(y, c, acc[c] * sigmoid_(acc[c]), type);
  }
  if (a->next)
    for (ptrdiff_t k = 0; k < a->taps - 1; k++) {
      void *to = at(a->next, b * a->history_stride + k * a->channels + first, type);
      memmove(to, row_of(a, b, first, held, a->seq - a->taps + 1 + k, type), at(NULL, width, type) - NULL);
    }
}

CLONES static void forward_float32(const Conv *a, ptrdiff_t task) { forward_block(a, task, FLOAT32); }
CLONES static void forward_bfloat16(const Conv *a, ptrdiff_t task) { forward_block(a, task, BFLOAT16); }

/* See conv.py; `next` may be `history` itself. */
int causal_conv(const void *x, const void *weight, const void *bias, const void *history, void *y, void *next,
                ptrdiff_t batch, ptrdiff_t seq, ptrdiff_t channels, ptrdiff_t taps, ptrdiff_t batch_stride,
                ptrdiff_t stride, ptrdiff_t history_stride, int type, int threads) {
  Conv a = {x, weight, bias, history, y, next, batch, seq, channels, taps, batch_stride, stride, history_stride, type};
  ptrdiff_t tasks = batch * ((channels + WIDTH - 1) / WIDTH);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (ptrdiff_t task = 0; task < tasks; task++)
    if (type == FLOAT32) forward_float32(&a, task);
    else forward_bfloat16(&a, task);
  return 0;
}

/* The gradients of a float32 convolution: from dy (batch, seq, channels) and dnext (batch, taps - 1, channels; may be
   NULL) to dx, dhistory, dweight (channels, taps) and dbias. The pre-activations are computed again. */
typedef struct {
  Conv a;
  const float *dy, *dnext;
  float *dx, *dhistory, *dweight, *dbias;
} ConvGradient;

/* dx of token s from da of tokens s to s + taps - 1 (those there are), which lie in a ring. */
INLINE void input_gradient(const ConvGradient *g, ptrdiff_t b, ptrdiff_t first, ptrdiff_t width, ptrdiff_t s,
                           float taps[TAPS][WIDTH], float ring[TAPS][WIDTH]) {
  const Conv *a = &g->a;
  ptrdiff_t history = a->taps - 1;
  if (s < 0 && !g->dhistory) return;
  float *dx = s < 0 ? g->dhistory + (b * history + s + history) * a->channels + first
                    : g->dx + (b * a->seq + s) * a->channels + first;
  const float *after = NULL; /* the token's own gradient as a part of `next` */
  if (g->dnext && s >= a->seq - history) after = g->dnext + (b * history + s - a->seq + history) * a->channels + first;
#pragma omp simd
  for (ptrdiff_t c = 0; c < width; c++) dx[c] = after ? after[c] : 0;
  for (ptrdiff_t t = s < 0 ? 0 : s; t < s + a->taps && t < a->seq; t++) {
    const float *tap = taps[a->taps - 1 - (t - s)], *da = ring[t % TAPS];
#pragma omp simd
    for (ptrdiff_t c = 0; c < width; c++) dx[c] += tap[c] * da[c];
  }
}

CLONES static void backward_block(const ConvGradient *g, ptrdiff_t task) {
  const Conv *a = &g->a;
  ptrdiff_t first = task * WIDTH, width = a->channels - first < WIDTH ? a->channels - first : WIDTH;
  float taps[TAPS][WIDTH], bias[WIDTH], acc[WIDTH], ring[TAPS][WIDTH], dbias[WIDTH] = {0}, dtaps[TAPS][WIDTH] = {{0}};
  char held[(TAPS - 1) * WIDTH * 4];
  load_taps(a, first, width, taps, FLOAT32);
  for (ptrdiff_t c = 0; c < width; c++) bias[c] = a->bias ? get(a->bias, first + c, FLOAT32) : 0;
  for (ptrdiff_t b = 0; b < a->batch; b++) {
    load_history(a, b, first, width, held, FLOAT32);
    for (ptrdiff_t t = 0; t < a->seq; t++) {
      convolve(a, b, first, width, held, t, taps, bias, acc, FLOAT32);
      const float *dy = g->dy + (b * a->seq + t) * a->channels + first;
      float *da = ring[t % TAPS];
#pragma omp simd
      for (ptrdiff_t c = 0; c < width; c++) {
        float s = sigmoid_(acc[c]);
        da[c] = dy[c] * s * (1 + acc[c] * (1 - s));
        dbias[c] += da[c];
      }
      for (ptrdiff_t k = 0; k < a->taps; k++) {
        const float *row = row_of(a, b, first, held, t - a->taps + 1 + k, FLOAT32);
        float *dtap = dtaps[k];
#pragma omp simd
        for (ptrdiff_t c = 0; c < width; c++) dtap[c] += da[c] * row[c];
      }
      input_gradient(g, b, first, width, t - a->taps + 1, taps, ring);
    }
    for (ptrdiff_t s = a->seq - a->taps + 1; s < a->seq; s++) input_gradient(g, b, first, width, s, taps, ring);
  }
  for (ptrdiff_t k = 0; k < a->taps; k++)
    for (ptrdiff_t c = 0; c < width; c++) g->dweight[(first + c) * a->taps + k] = dtaps[k][c];
  for (ptrdiff_t c = 0; g->dbias && c < width; c++) g->dbias[first + c] = dbias[c];
}

int causal_conv_backward(const float *x, const float *weight, const float *bias, const float *history, const float *dy,
                         const float *dnext, float *dx, float *dhistory, float *dweight, float *dbias, ptrdiff_t batch,
                         ptrdiff_t seq, ptrdiff_t channels, ptrdiff_t taps, ptrdiff_t batch_stride, ptrdiff_t stride,
                         ptrdiff_t history_stride, int threads) {
  Conv a = {x, weight, bias, history, NULL, NULL, batch, seq, channels, taps, batch_stride, stride, history_stride, 0};
  ConvGradient g = {a, dy, dnext, dx, dhistory, dweight, dbias};
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (ptrdiff_t task = 0; task < (channels + WIDTH - 1) / WIDTH; task++) backward_block(&g, task);
  return 0;
}
