/* Mamba-1's selective scan with its softplus, D and gate, and the gradient. See `selective_scan` in scan.py.

   One task: a block of channels of one sequence, token after token, its states (N, WIDTH) in the first-level cache. */
#include "kernels.h"

enum { WIDTH = 64, STATES = 256 }; /* channels of a block; the largest N, and chunk * N */

typedef struct {
  const void *x, *dt, *B, *C, *z;            /* (batch, seq, channels or N), each with its two strides; z may be NULL */
  const float *A_log, *D, *dt_bias, *state;  /* (channels, N); (channels); the same, or NULL: no softplus; or NULL */
  void *y;                                   /* (batch, seq, channels) */
  float *next, *saved;                       /* (batch, N, channels), may be state; (batch, chunks, N, channels) or NULL */
  const ptrdiff_t *strides; /* of x, dt, B, C, z: batch, token; then of state and next: batch; of B and C: head, if many */
  ptrdiff_t batch, seq, channels, heads, N, chunk; /* heads: equal parts of the channels, each with its own B and C */
} Scan;

enum { X = 0, DT = 2, B_ = 4, C_ = 6, Z = 8, STATE = 10, NEXT = 11, HEAD = 12 };

INLINE const void *row(const Scan *a, const void *p, int which, ptrdiff_t b, ptrdiff_t t, int type) {
  return at(p, b * a->strides[which] + t * a->strides[which + 1], type);
}

/* Token t's step sizes. */
INLINE void step_sizes(const Scan *a, ptrdiff_t b, ptrdiff_t t, ptrdiff_t first, ptrdiff_t width, float *dt, int type) {
  const void *raw = at(row(a, a->dt, DT, b, t, type), first, type);
  if (a->dt_bias) {
    const float *bias = a->dt_bias + first;
#pragma omp simd
    for (ptrdiff_t c = 0; c < width; c++) dt[c] = softplus_(get(raw, c, type) + bias[c]);
  } else {
#pragma omp simd
    for (ptrdiff_t c = 0; c < width; c++) dt[c] = get(raw, c, type);
  }
}

/* A = -exp(A_log) of the block, one row per state. */
INLINE void load_rates(const Scan *a, ptrdiff_t first, ptrdiff_t width, float A[STATES][WIDTH]) {
  const float *A_log = a->A_log + first * a->N;
  for (ptrdiff_t c = 0; c < width; c++)
    for (ptrdiff_t n = 0; n < a->N; n++) A[n][c] = A_log[c * a->N + n];
  for (ptrdiff_t n = 0; n < a->N; n++)
#pragma omp simd
    for (ptrdiff_t c = 0; c < width; c++) A[n][c] = -exp_(A[n][c]);
}

INLINE void load_state(const Scan *a, ptrdiff_t b, ptrdiff_t first, ptrdiff_t width, float h[STATES][WIDTH]) {
  for (ptrdiff_t n = 0; n < a->N; n++)
    for (ptrdiff_t c = 0; c < width; c++)
      h[n][c] = a->state ? a->state[b * a->strides[STATE] + n * a->channels + first + c] : 0;
}

INLINE void forward_block(const Scan *a, ptrdiff_t b, ptrdiff_t head, ptrdiff_t first, ptrdiff_t width, int type) {
  float h[STATES][WIDTH], A[STATES][WIDTH], dt[WIDTH], rate[WIDTH], fed[WIDTH], y[WIDTH];
  load_rates(a, first, width, A);
  load_state(a, b, first, width, h);
  ptrdiff_t chunks = a->chunk ? (a->seq + a->chunk - 1) / a->chunk : 0, own = a->heads > 1 ? head * a->strides[HEAD] : 0;
  for (ptrdiff_t t = 0; t < a->seq; t++) {
    if (a->saved && t % a->chunk == 0)
      for (ptrdiff_t n = 0; n < a->N; n++)
        memcpy(a->saved + ((b * chunks + t / a->chunk) * a->N + n) * a->channels + first, h[n], width * sizeof(float));
    const void *x = at(row(a, a->x, X, b, t, type), first, type);
    step_sizes(a, b, t, first, width, dt, type);
    const float *D = a->D + first;
#pragma omp simd
    for (ptrdiff_t c = 0; c < width; c++) {
      float in = get(x, c, type);
      rate[c] = dt[c] * LOG2E, fed[c] = dt[c] * in, y[c] = D[c] * in;
    }
    const void *Bt = at(row(a, a->B, B_, b, t, type), own, type), *Ct = at(row(a, a->C, C_, b, t, type), own, type);
    for (ptrdiff_t n = 0; n < a->N; n++) {
      float Bn = get(Bt, n, type), Cn = get(Ct, n, type), *state = h[n];
#pragma omp simd
      for (ptrdiff_t c = 0; c < width; c++) {
        float new = exp2_(rate[c] * A[n][c]) * state[c] + fed[c] * Bn;
        state[c] = new, y[c] += Cn * new;
      }
    }
    void *out = at(a->y, (b * a->seq + t) * a->channels + first, type);
    if (a->z) {
      const void *z = at(row(a, a->z, Z, b, t, type), first, type);
#pragma omp simd
      for (ptrdiff_t c = 0; c < width; c++) {
        float gate = get(z, c, type);
        put(out, c, y[c] * gate * sigmoid_(gate), type);
      }
    } else {
#pragma omp simd
      for (ptrdiff_t c = 0; c < width; c++) put(out, c, y[c], type);
    }
  }
  for (ptrdiff_t n = 0; n < a->N; n++)
    memcpy(a->next + b * a->strides[NEXT] + n * a->channels + first, h[n], width * sizeof(float));
}

INLINE void forward_task(const Scan *a, ptrdiff_t task, int type) {
  ptrdiff_t size = a->channels / a->heads, blocks = (size + WIDTH - 1) / WIDTH, each = a->heads * blocks;
  ptrdiff_t b = task / each, head = task % each / blocks, start = task % blocks * WIDTH, first = head * size + start;
  if (size - start >= WIDTH) forward_block(a, b, head, first, WIDTH, type); /* a constant width is faster */
  else forward_block(a, b, head, first, size - start, type);
}

CLONES static void forward_float32(const Scan *a, ptrdiff_t task) { forward_task(a, task, FLOAT32); }
CLONES static void forward_bfloat16(const Scan *a, ptrdiff_t task) { forward_task(a, task, BFLOAT16); }

/* `saved` receives the states before each chunk of tokens, for the gradient. */
int selective_scan(const void *x, const void *dt, const float *A_log, const void *B, const void *C, const float *D,
                   const void *z, const float *dt_bias, const float *state, void *y, float *next, float *saved,
                   const ptrdiff_t *strides, ptrdiff_t batch, ptrdiff_t seq, ptrdiff_t channels, ptrdiff_t heads,
                   ptrdiff_t N, ptrdiff_t chunk, int type, int threads) {
  Scan a = {x, dt, B, C, z, A_log, D, dt_bias, state, y, next, saved, strides, batch, seq, channels, heads, N, chunk};
  ptrdiff_t tasks = batch * heads * ((channels / heads + WIDTH - 1) / WIDTH);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (ptrdiff_t task = 0; task < tasks; task++)
    if (type == FLOAT32) forward_float32(&a, task);
    else forward_bfloat16(&a, task);
  return 0;
}

/* The gradients. With g_t = dLoss/dh_t:  g_t = C_t dy_t + exp(dt_{t+1} A) g_{t+1}, from the final state's gradient on.
   dB, dC have a part per thread; dA_log, dD, ddt_bias one per sequence. */
typedef struct {
  Scan a;
  const float *dout;                          /* (batch, seq, channels), of y */
  float *adjoint;                             /* (batch, N, channels): of the final state; becomes the first state's */
  float *dx, *ddt, *dz;                       /* (batch, seq, channels) */
  float *dA_log, *dD, *ddt_bias;              /* (batch, channels, N), (batch, channels) twice */
  float *dB, *dC;                             /* (threads, batch, seq, N), zero before */
} ScanGradient;

INLINE void backward_block(const ScanGradient *g, ptrdiff_t b, ptrdiff_t first, ptrdiff_t width, float *dB, float *dC) {
  const Scan *a = &g->a;
  ptrdiff_t N = a->N, chunks = (a->seq + a->chunk - 1) / a->chunk;
  float h[STATES + 1][WIDTH], decay[STATES][WIDTH], steps[STATES][WIDTH], output[STATES][WIDTH], adjoint[STATES][WIDTH];
  float dA[STATES][WIDTH], dD[WIDTH] = {0}, dbias[WIDTH] = {0}, fed[WIDTH], rate[WIDTH], dy[WIDTH], din[WIDTH], dstep[WIDTH];
  float A[STATES][WIDTH];
  load_rates(a, first, width, A);
  memset(dA, 0, N * sizeof dA[0]);
  for (ptrdiff_t n = 0; n < N; n++)
    memcpy(adjoint[n], g->adjoint + (b * N + n) * a->channels + first, width * sizeof(float));
  const float *D = a->D + first;
  for (ptrdiff_t chunk = chunks - 1; chunk >= 0; chunk--) {
    ptrdiff_t start = chunk * a->chunk, length = a->seq - start < a->chunk ? a->seq - start : a->chunk;
    const float *entering = a->saved + (b * chunks + chunk) * N * a->channels + first; /* rows of `channels` */
    for (ptrdiff_t i = 0; i < length; i++) { /* the states again */
      const float *x = (const float *)row(a, a->x, X, b, start + i, FLOAT32) + first;
      const float *Bt = row(a, a->B, B_, b, start + i, FLOAT32), *Ct = row(a, a->C, C_, b, start + i, FLOAT32);
      float *dt = steps[i], *y = output[i];
      step_sizes(a, b, start + i, first, width, dt, FLOAT32);
#pragma omp simd
      for (ptrdiff_t c = 0; c < width; c++) rate[c] = dt[c] * LOG2E, fed[c] = dt[c] * x[c], y[c] = D[c] * x[c];
      for (ptrdiff_t n = 0; n < N; n++) {
        const float *before = i ? h[(i - 1) * N + n] : entering + n * a->channels;
        float *after = h[i * N + n], *keep = decay[i * N + n];
#pragma omp simd
        for (ptrdiff_t c = 0; c < width; c++) {
          keep[c] = exp2_(rate[c] * A[n][c]);
          after[c] = keep[c] * before[c] + fed[c] * Bt[n], y[c] += Ct[n] * after[c];
        }
      }
    }
    for (ptrdiff_t i = length - 1; i >= 0; i--) {
      ptrdiff_t t = start + i, place = (b * a->seq + t) * a->channels + first;
      const float *x = (const float *)row(a, a->x, X, b, t, FLOAT32) + first, *dt = steps[i], *dout = g->dout + place;
      const float *Bt = row(a, a->B, B_, b, t, FLOAT32), *Ct = row(a, a->C, C_, b, t, FLOAT32);
      if (a->z) {
        const float *z = (const float *)row(a, a->z, Z, b, t, FLOAT32) + first, *y = output[i];
        float *dz = g->dz + place;
#pragma omp simd
        for (ptrdiff_t c = 0; c < width; c++) {
          float s = sigmoid_(z[c]);
          dy[c] = dout[c] * z[c] * s, dz[c] = dout[c] * y[c] * s * (1 + z[c] * (1 - s));
        }
      } else {
        memcpy(dy, dout, width * sizeof(float));
      }
#pragma omp simd
      for (ptrdiff_t c = 0; c < width; c++) fed[c] = dt[c] * x[c], dD[c] += dy[c] * x[c], din[c] = 0, dstep[c] = 0;
      for (ptrdiff_t n = 0; n < N; n++) {
        const float *before = i ? h[(i - 1) * N + n] : entering + n * a->channels;
        const float *after = h[i * N + n], *keep = decay[i * N + n];
        float *g_n = adjoint[n], *dA_n = dA[n], sum_B = 0, sum_C = 0;
#pragma omp simd reduction(+ : sum_B, sum_C)
        for (ptrdiff_t c = 0; c < width; c++) {
          float here = g_n[c] + Ct[n] * dy[c], exponent = here * before[c] * keep[c]; /* of h_t, of dt A */
          sum_C += after[c] * dy[c], sum_B += here * fed[c], din[c] += here * Bt[n];
          dA_n[c] += exponent * dt[c], dstep[c] += exponent * A[n][c], g_n[c] = here * keep[c];
        }
        dB[(b * a->seq + t) * N + n] += sum_B, dC[(b * a->seq + t) * N + n] += sum_C;
      }
      float *dx = g->dx + place, *ddt = g->ddt + place;
#pragma omp simd
      for (ptrdiff_t c = 0; c < width; c++) dx[c] = D[c] * dy[c] + din[c] * dt[c], dstep[c] += din[c] * x[c];
      if (a->dt_bias) {
        const float *raw = (const float *)row(a, a->dt, DT, b, t, FLOAT32) + first, *bias = a->dt_bias + first;
#pragma omp simd
        for (ptrdiff_t c = 0; c < width; c++) dstep[c] *= sigmoid_(raw[c] + bias[c]), dbias[c] += dstep[c];
      }
      memcpy(ddt, dstep, width * sizeof(float));
    }
  }
  for (ptrdiff_t n = 0; n < N; n++) {
    memcpy(g->adjoint + (b * N + n) * a->channels + first, adjoint[n], width * sizeof(float));
    for (ptrdiff_t c = 0; c < width; c++) g->dA_log[(b * a->channels + first + c) * N + n] = dA[n][c] * A[n][c];
  }
  memcpy(g->dD + b * a->channels + first, dD, width * sizeof(float));
  if (g->ddt_bias) memcpy(g->ddt_bias + b * a->channels + first, dbias, width * sizeof(float));
}

CLONES static void backward_task(const ScanGradient *g, ptrdiff_t task, float *dB, float *dC) {
  ptrdiff_t channels = g->a.channels, blocks = (channels + WIDTH - 1) / WIDTH, first = task % blocks * WIDTH;
  if (channels - first >= WIDTH) backward_block(g, task / blocks, first, WIDTH, dB, dC);
  else backward_block(g, task / blocks, first, channels - first, dB, dC);
}

int selective_scan_backward(const float *x, const float *dt, const float *A_log, const float *B, const float *C,
                            const float *D, const float *z, const float *dt_bias, float *saved, const float *dout,
                            float *adjoint, float *dx, float *ddt, float *dA_log, float *dB, float *dC, float *dD,
                            float *dz, float *ddt_bias, const ptrdiff_t *strides, ptrdiff_t batch, ptrdiff_t seq,
                            ptrdiff_t channels, ptrdiff_t N, ptrdiff_t chunk, int threads) {
  Scan a = {x, dt, B, C, z, A_log, D, dt_bias, NULL, NULL, NULL, saved, strides, batch, seq, channels, 1, N, chunk};
  ScanGradient g = {a, dout, adjoint, dx, ddt, dz, dA_log, dD, ddt_bias, dB, dC};
  ptrdiff_t blocks = (channels + WIDTH - 1) / WIDTH, part = batch * seq * N;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (ptrdiff_t task = 0; task < batch * blocks; task++) {
    ptrdiff_t thread = THREAD;
    backward_task(&g, task, dB + thread * part, dC + thread * part);
  }
  return 0;
}
