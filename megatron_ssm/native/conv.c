/* The causal depthwise convolution followed by SiLU, and its gradient. See `causal_conv` in kernels/convolution.py.

   A task of the forward pass is a block of WIDTH channels of one sequence. A task of the backward pass is a block of channels of all
   sequences, because it sums the gradients of weight and bias. No two tasks write the same memory. */
#include "registers.h"

enum {
  WIDTH = 64,     /* channels per block */
  TAPS = 8,       /* of the longest kernel (LONGEST_KERNEL in kernels.py) */
  USUAL_TAPS = 4  /* of the kernel that has a loop of its own */
};

typedef struct {
  const void *x;        /* (batch, seq, channels), with batch_stride and token_stride */
  const void *weight;   /* (channels, taps) */
  const void *bias;     /* (channels), or NULL */
  const void *history;  /* (batch, taps - 1, channels), with history_stride between sequences; NULL: zeros */
  void *y;              /* (batch, seq, channels) */
  void *next;           /* like history: the inputs that precede the next token; may be history itself; or NULL */
  ptrdiff_t batch, seq, channels, taps, batch_stride, token_stride, history_stride;
  int type;
} Conv;

/* The weights of the block's channels, transposed to (taps, width), and their biases. The weights of the next block are
   prefetched. */
INLINE void load_weights(const Conv *a, ptrdiff_t first, ptrdiff_t width, float taps[TAPS][WIDTH], float *bias, int type) {
  const void *weight = at(a->weight, first * a->taps, type);
  prefetch_elements(at(weight, WIDTH * a->taps, type), WIDTH * a->taps, type);
  if (type == FLOAT32) transpose_floats(weight, width, a->taps, taps[0], WIDTH);
  for (ptrdiff_t k = 0; type != FLOAT32 && k < a->taps; k++)
    for (ptrdiff_t c = 0; c < width; c++) taps[k][c] = get(weight, c * a->taps + k, type);
  memset(bias, 0, width * sizeof(float));
  if (a->bias)
#pragma omp simd
    for (ptrdiff_t c = 0; c < width; c++) bias[c] = get(a->bias, first + c, type);
}

/* Copies the inputs before the block's first token, because `next` may overwrite them; their dtype stays. Those of the next
   block are prefetched. */
INLINE void load_history(const Conv *a, ptrdiff_t b, ptrdiff_t first, ptrdiff_t width, char *past, int type) {
  for (ptrdiff_t k = 0; k < a->taps - 1; k++) {
    char *row = at(past, k * WIDTH, type);
    size_t bytes = bytes_of(width, type);
    if (a->history) {
      const void *history = at(a->history, b * a->history_stride + k * a->channels + first, type);
      prefetch_elements(at(history, WIDTH, type), WIDTH, type);
      memcpy(row, history, bytes);
    } else memset(row, 0, bytes);
  }
}

/* The block's inputs at token t >= -(taps - 1); those of negative t are in `past`. */
INLINE const void *input_row(const Conv *a, ptrdiff_t b, ptrdiff_t first, const char *past, ptrdiff_t t, int type) {
  return t < 0 ? at(past, (t + a->taps - 1) * WIDTH, type)
               : at(a->x, b * a->batch_stride + t * a->token_stride + first, type);
}

/* sum = bias + the sum over the taps at token t, before SiLU. */
INLINE void convolve(const Conv *a, ptrdiff_t b, ptrdiff_t first, ptrdiff_t width, const char *past, ptrdiff_t t,
                     float taps[TAPS][WIDTH], const float *bias, float *sum, int type) {
  if (a->taps == USUAL_TAPS) { /* without storing the sum in between */
    const void *rows[USUAL_TAPS];
    for (int k = 0; k < USUAL_TAPS; k++) rows[k] = input_row(a, b, first, past, t - USUAL_TAPS + 1 + k, type);
#pragma omp simd
    for (ptrdiff_t c = 0; c < width; c++) {
      float total = bias[c];
      for (int k = 0; k < USUAL_TAPS; k++) total += taps[k][c] * get(rows[k], c, type);
      sum[c] = total;
    }
    return;
  }
#pragma omp simd
  for (ptrdiff_t c = 0; c < width; c++) sum[c] = bias[c];
  for (ptrdiff_t k = 0; k < a->taps; k++) {
    const void *row = input_row(a, b, first, past, t - a->taps + 1 + k, type);
    const float *tap = taps[k];
#pragma omp simd
    for (ptrdiff_t c = 0; c < width; c++) sum[c] += tap[c] * get(row, c, type);
  }
}

INLINE void forward_block(const Conv *a, ptrdiff_t task, int type) {
  ptrdiff_t blocks = (a->channels + WIDTH - 1) / WIDTH, b = task / blocks, first = task % blocks * WIDTH;
  ptrdiff_t width = a->channels - first < WIDTH ? a->channels - first : WIDTH;
  float taps[TAPS][WIDTH], bias[WIDTH], sum[WIDTH], least = unknown(LEAST_EXPONENT);
  _Alignas(float) char past[(TAPS - 1) * WIDTH * 4];
  load_weights(a, first, width, taps, bias, type);
  load_history(a, b, first, width, past, type);
  for (ptrdiff_t t = 0; t < a->seq; t++) {
    convolve(a, b, first, width, past, t, taps, bias, sum, type);
    void *y = at(a->y, (b * a->seq + t) * a->channels + first, type);
#pragma omp simd
    for (ptrdiff_t c = 0; c < width; c++) put(y, c, sum[c] * sigmoid_(sum[c], least), type);
  }
  if (a->next)
    for (ptrdiff_t k = 0; k < a->taps - 1; k++) {
      void *to = at(a->next, b * a->history_stride + k * a->channels + first, type);
      memmove(to, input_row(a, b, first, past, a->seq - a->taps + 1 + k, type), bytes_of(width, type));
    }
}

CLONES static void forward_float32(const Conv *a, ptrdiff_t task) { forward_block(a, task, FLOAT32); }
CLONES static void forward_bfloat16(const Conv *a, ptrdiff_t task) { forward_block(a, task, BFLOAT16); }

int causal_conv(const void *x, const void *weight, const void *bias, const void *history, void *y, void *next,
                ptrdiff_t batch, ptrdiff_t seq, ptrdiff_t channels, ptrdiff_t taps, ptrdiff_t batch_stride,
                ptrdiff_t token_stride, ptrdiff_t history_stride, int type, int threads) {
  Conv a = {x, weight, bias, history, y, next, batch, seq, channels, taps, batch_stride, token_stride, history_stride, type};
  ptrdiff_t tasks = batch * ((channels + WIDTH - 1) / WIDTH);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (ptrdiff_t task = 0; task < tasks; task++)
    if (type == FLOAT32) forward_float32(&a, task);
    else forward_bfloat16(&a, task);
  return 0;
}

/* The gradients of a float32 convolution. In: dy, that of y, (batch, seq, channels), and dnext, that of `next`,
   (batch, taps - 1, channels) or NULL. Out: dx, dweight (channels, taps), and, unless NULL, dhistory and dbias.
   The sums before SiLU are computed again. */
typedef struct {
  Conv a;
  const float *dy, *dnext;
  float *dx, *dhistory, *dweight, *dbias;
} ConvGradient;

/* dx of token s, from the gradients dsum of the sums at the tokens s to s + taps - 1, as far as there are such tokens. dsum
   is a ring buffer: token t is at t % TAPS. A negative s is a token of the history. */
INLINE void input_gradient(const ConvGradient *g, ptrdiff_t b, ptrdiff_t first, ptrdiff_t width, ptrdiff_t s,
                           float taps[TAPS][WIDTH], float dsum[TAPS][WIDTH]) {
  const Conv *a = &g->a;
  ptrdiff_t history = a->taps - 1;
  if (s < 0 && !g->dhistory) return;
  float *dx = s < 0 ? g->dhistory + (b * history + s + history) * a->channels + first
                    : g->dx + (b * a->seq + s) * a->channels + first;
  const float *through_next = NULL; /* the last taps - 1 inputs are also in `next` */
  if (g->dnext && s >= a->seq - history)
    through_next = g->dnext + (b * history + s - a->seq + history) * a->channels + first;
#pragma omp simd
  for (ptrdiff_t c = 0; c < width; c++) dx[c] = through_next ? through_next[c] : 0;
  for (ptrdiff_t t = s < 0 ? 0 : s; t < s + a->taps && t < a->seq; t++) {
    const float *tap = taps[a->taps - 1 - (t - s)], *dsum_t = dsum[t % TAPS];
#pragma omp simd
    for (ptrdiff_t c = 0; c < width; c++) dx[c] += tap[c] * dsum_t[c];
  }
}

CLONES static void backward_block(const ConvGradient *g, ptrdiff_t task) {
  const Conv *a = &g->a;
  ptrdiff_t first = task * WIDTH, width = a->channels - first < WIDTH ? a->channels - first : WIDTH;
  float taps[TAPS][WIDTH], bias[WIDTH], sum[WIDTH], dsum[TAPS][WIDTH], dbias[WIDTH] = {0}, dtaps[TAPS][WIDTH] = {{0}};
  float least = unknown(LEAST_EXPONENT);
  _Alignas(float) char past[(TAPS - 1) * WIDTH * 4];
  load_weights(a, first, width, taps, bias, FLOAT32);
  for (ptrdiff_t b = 0; b < a->batch; b++) {
    load_history(a, b, first, width, past, FLOAT32);
    for (ptrdiff_t t = 0; t < a->seq; t++) {
      convolve(a, b, first, width, past, t, taps, bias, sum, FLOAT32);
      const float *dy = g->dy + (b * a->seq + t) * a->channels + first;
      float *dsum_t = dsum[t % TAPS];
#pragma omp simd
      for (ptrdiff_t c = 0; c < width; c++) {
        float s = sigmoid_(sum[c], least);
        dsum_t[c] = dy[c] * s * (1 + sum[c] * (1 - s)); /* the derivative of SiLU */
        dbias[c] += dsum_t[c];
      }
      for (ptrdiff_t k = 0; k < a->taps; k++) {
        const float *row = input_row(a, b, first, past, t - a->taps + 1 + k, FLOAT32);
        float *dtap = dtaps[k];
#pragma omp simd
        for (ptrdiff_t c = 0; c < width; c++) dtap[c] += dsum_t[c] * row[c];
      }
      input_gradient(g, b, first, width, t - a->taps + 1, taps, dsum); /* the last token that it depends on is t */
    }
    for (ptrdiff_t s = a->seq - a->taps + 1; s < a->seq; s++) input_gradient(g, b, first, width, s, taps, dsum);
  }
  for (ptrdiff_t k = 0; k < a->taps; k++)
    for (ptrdiff_t c = 0; c < width; c++) g->dweight[(first + c) * a->taps + k] = dtaps[k][c];
  for (ptrdiff_t c = 0; g->dbias && c < width; c++) g->dbias[first + c] = dbias[c];
}

int causal_conv_backward(const float *x, const float *weight, const float *bias, const float *history, const float *dy,
                         const float *dnext, float *dx, float *dhistory, float *dweight, float *dbias, ptrdiff_t batch,
                         ptrdiff_t seq, ptrdiff_t channels, ptrdiff_t taps, ptrdiff_t batch_stride,
                         ptrdiff_t token_stride, ptrdiff_t history_stride, int threads) {
  Conv a = {x, weight, bias, history, NULL, NULL, batch, seq, channels, taps, batch_stride, token_stride, history_stride,
            FLOAT32};
  ConvGradient g = {a, dy, dnext, dx, dhistory, dweight, dbias};
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (ptrdiff_t task = 0; task < (channels + WIDTH - 1) / WIDTH; task++) backward_block(&g, task);
  return 0;
}
