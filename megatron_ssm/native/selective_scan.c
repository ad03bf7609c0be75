/* Mamba-1's selective scan with softplus(dt), D and the gate, and its gradient. See `selective_scan` in kernels/scan.py.

   A task is a block of channels of one sequence, or of all sequences. It computes one token after the other, and the states (N, WIDTH)
   of a sequence stay in the first-level cache. No two tasks write the same memory, except that all tasks of a thread add to that
   thread's dB and dC. */
#include "registers.h"

enum { WIDTH = 64, STATES = 256 }; /* channels per block; the largest N, and the largest chunk * N in the backward pass */

typedef struct {
  const void *x, *dt;        /* (batch, seq, channels), each with its own strides */
  const void *B, *C;         /* (batch, seq, N), or (batch, seq, heads, N), with strides */
  const void *z;             /* like x; NULL: no gate */
  const float *A_log, *D;    /* (channels, N); (channels) */
  const float *dt_bias;      /* (channels); NULL: dt is used as it is, without bias and softplus */
  const float *state;        /* (batch, N, channels), with a batch stride; NULL: zeros */
  void *y;                   /* (batch, seq, channels); may be x, if x has no gaps */
  float *next;               /* the final state, like state; may be state itself */
  float *saved;              /* the states before each chunk of tokens, (batch, chunks, N, channels), or NULL */
  const ptrdiff_t *strides;  /* see the indices below; their unit is one element */
  ptrdiff_t batch, seq, channels;
  ptrdiff_t heads;           /* Zamba's: equal parts of the channels, each with a B and C of its own */
  ptrdiff_t N, chunk;        /* chunk: tokens between two states in `saved` */
} Scan;

/* Indices into strides. x, dt, B, C, z: from sequence to sequence, followed by from token to token. STATE, NEXT: from
   sequence to sequence. HEAD: of B and C, from head to head; absent if there is one head. */
enum { X = 0, DT = 2, B_ = 4, C_ = 6, Z = 8, STATE = 10, NEXT = 11, HEAD = 12 };

/* The address of token t of sequence b in one of the tensors x, dt, B, C and z; `which` is its index into strides. */
INLINE const void *row(const Scan *a, const void *p, int which, ptrdiff_t b, ptrdiff_t t, int type) {
  return at(p, b * a->strides[which] + t * a->strides[which + 1], type);
}

/* dt of token t for a block of channels: softplus(dt + dt_bias), or dt itself if there is no dt_bias. */
INLINE void step_sizes(const Scan *a, ptrdiff_t b, ptrdiff_t t, ptrdiff_t first, ptrdiff_t width, float *dt, int type) {
  const void *raw = at(row(a, a->dt, DT, b, t, type), first, type);
  if (a->dt_bias) {
    const float *bias = a->dt_bias + first;
    float least = unknown(LEAST_EXPONENT);
#pragma omp simd
    for (ptrdiff_t c = 0; c < width; c++) dt[c] = softplus_(get(raw, c, type) + bias[c], least);
  } else {
#pragma omp simd
    for (ptrdiff_t c = 0; c < width; c++) dt[c] = get(raw, c, type);
  }
}

/* A = -exp(A_log) of the block, transposed to (N, width). A_log of the next block is prefetched. */
INLINE void load_A(const Scan *a, ptrdiff_t first, ptrdiff_t width, float A[STATES][WIDTH]) {
  float least = unknown(LEAST_EXPONENT), most = unknown(MOST_EXPONENT);
  const float *next = a->A_log + (first + WIDTH) * a->N;
  transpose_floats(a->A_log + first * a->N, width, a->N, A[0], WIDTH);
  for (ptrdiff_t n = 0; n < a->N; n++) {
    prefetch_elements(next + n * WIDTH, WIDTH, FLOAT32);
#pragma omp simd
    for (ptrdiff_t c = 0; c < width; c++) A[n][c] = -exp2_between(A[n][c] * LOG2E, least, most);
  }
}

/* The initial states of the block; those of the next one are prefetched. */
INLINE void load_state(const Scan *a, ptrdiff_t b, ptrdiff_t first, ptrdiff_t width, float h[STATES][WIDTH]) {
  for (ptrdiff_t n = 0; n < a->N; n++) {
    if (a->state) {
      const float *state = a->state + b * a->strides[STATE] + n * a->channels + first;
      prefetch_elements(state + WIDTH, WIDTH, FLOAT32);
      memcpy(h[n], state, width * sizeof(float));
    } else memset(h[n], 0, width * sizeof(float));
  }
}

/* Brings x, dt and z of token t to the first-level cache. The rows of consecutive tokens mostly lie in different pages, and the
   processor does not read ahead from page to page. */
INLINE void prefetch_token(const Scan *a, ptrdiff_t b, ptrdiff_t t, ptrdiff_t first, ptrdiff_t width, int type) {
  prefetch_to_first_level(at(row(a, a->x, X, b, t, type), first, type), width, type);
  prefetch_to_first_level(at(row(a, a->dt, DT, b, t, type), first, type), width, type);
  if (a->z) prefetch_to_first_level(at(row(a, a->z, Z, b, t, type), first, type), width, type);
}

/* One sequence of a block. may_grow: 1 if dt may be negative; a compile-time constant. */
INLINE void forward_block(const Scan *a, ptrdiff_t b, ptrdiff_t head, ptrdiff_t first, ptrdiff_t width,
                          const float A[STATES][WIDTH], int may_grow, int type) {
  float h[STATES][WIDTH], dt[WIDTH], dt_log2e[WIDTH], dt_x[WIDTH], y[WIDTH];
  float least = unknown(LEAST_EXPONENT), most = unknown(MOST_EXPONENT);
  load_state(a, b, first, width, h);
  ptrdiff_t chunks = a->chunk ? (a->seq + a->chunk - 1) / a->chunk : 0;
  ptrdiff_t of_head = a->heads > 1 ? head * a->strides[HEAD] : 0; /* where the head's B and C begin */
  for (ptrdiff_t t = 0; t < a->seq; t++) {
    if (a->saved && t % a->chunk == 0)
      for (ptrdiff_t n = 0; n < a->N; n++)
        memcpy(a->saved + ((b * chunks + t / a->chunk) * a->N + n) * a->channels + first, h[n], width * sizeof(float));
    if (t + 1 < a->seq) prefetch_token(a, b, t + 1, first, width, type);
    const void *x = at(row(a, a->x, X, b, t, type), first, type);
    step_sizes(a, b, t, first, width, dt, type);
    const float *D = a->D + first;
#pragma omp simd
    for (ptrdiff_t c = 0; c < width; c++) {
      float in = get(x, c, type);
      dt_log2e[c] = dt[c] * LOG2E, dt_x[c] = dt[c] * in, y[c] = D[c] * in;
    }
    const void *Bt = at(row(a, a->B, B_, b, t, type), of_head, type);
    const void *Ct = at(row(a, a->C, C_, b, t, type), of_head, type);
    for (ptrdiff_t n = 0; n < a->N; n++) {
      float Bn = get(Bt, n, type), Cn = get(Ct, n, type), *state = h[n];
#pragma omp simd
      for (ptrdiff_t c = 0; c < width; c++) {
        float exponent = dt_log2e[c] * A[n][c];
        float decay = may_grow ? exp2_between(exponent, least, most) : exp2_from(exponent, least);
        float new = decay * state[c] + dt_x[c] * Bn;
        state[c] = new, y[c] += Cn * new;
      }
    }
    void *out = at(a->y, (b * a->seq + t) * a->channels + first, type);
    if (a->z) {
      const void *z = at(row(a, a->z, Z, b, t, type), first, type);
#pragma omp simd
      for (ptrdiff_t c = 0; c < width; c++) {
        float gate = get(z, c, type);
        put(out, c, y[c] * gate * sigmoid_(gate, least), type);
      }
    } else {
#pragma omp simd
      for (ptrdiff_t c = 0; c < width; c++) put(out, c, y[c], type);
    }
  }
  for (ptrdiff_t n = 0; n < a->N; n++)
    memcpy(a->next + b * a->strides[NEXT] + n * a->channels + first, h[n], width * sizeof(float));
}

/* The sequences `start` to `stop` of a block, whose width is a compile-time constant if it is WIDTH: that is faster. With dt_bias,
   dt is positive, because it comes from softplus. */
INLINE void forward_sequences(const Scan *a, ptrdiff_t start, ptrdiff_t stop, ptrdiff_t block, int type) {
  ptrdiff_t size = a->channels / a->heads, blocks = (size + WIDTH - 1) / WIDTH, head = block / blocks;
  ptrdiff_t first = block % blocks * WIDTH, width = size - first < WIDTH ? size - first : WIDTH;
  float A[STATES][WIDTH];
  first += head * size;
  load_A(a, first, width, A);
  for (ptrdiff_t b = start; b < stop; b++)
    if (width == WIDTH && a->dt_bias) forward_block(a, b, head, first, WIDTH, A, 0, type);
    else if (width == WIDTH) forward_block(a, b, head, first, WIDTH, A, 1, type);
    else forward_block(a, b, head, first, width, A, 1, type);
}

CLONES static void forward_float32(const Scan *a, ptrdiff_t start, ptrdiff_t stop, ptrdiff_t block) {
  forward_sequences(a, start, stop, block, FLOAT32);
}
CLONES static void forward_bfloat16(const Scan *a, ptrdiff_t start, ptrdiff_t stop, ptrdiff_t block) {
  forward_sequences(a, start, stop, block, BFLOAT16);
}

int selective_scan(const void *x, const void *dt, const float *A_log, const void *B, const void *C, const float *D,
                   const void *z, const float *dt_bias, const float *state, void *y, float *next, float *saved,
                   const ptrdiff_t *strides, ptrdiff_t batch, ptrdiff_t seq, ptrdiff_t channels, ptrdiff_t heads,
                   ptrdiff_t N, ptrdiff_t chunk, int type, int threads) {
  Scan a = {x, dt, B, C, z, A_log, D, dt_bias, state, y, next, saved, strides, batch, seq, channels, heads, N, chunk};
  ptrdiff_t blocks = heads * ((channels / heads + WIDTH - 1) / WIDTH);
  /* 1 if a task has all sequences of a block, so that A is computed once. */
  int together = threads == 1 || blocks >= 4 * threads;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (ptrdiff_t task = 0; task < (together ? blocks : blocks * batch); task++) {
    ptrdiff_t start = together ? 0 : task / blocks, stop = together ? batch : start + 1;
    if (type == FLOAT32) forward_float32(&a, start, stop, task % blocks);
    else forward_bfloat16(&a, start, stop, task % blocks);
  }
  return 0;
}

/* The states that a block of tokens passes to other blocks, float32; see parallel/summaries.py. Forward: the final state from zeros,
   and the sum of dt over the tokens. In reverse: the gradient of the initial state that comes from the outputs; there, x is
   the gradient of the outputs, and B is C. `next` receives the result, y the sums (batch, channels), or is NULL. */
INLINE void carry_block(const Scan *a, ptrdiff_t b, ptrdiff_t first, ptrdiff_t width, int reverse) {
  float h[STATES][WIDTH], A[STATES][WIDTH], dt[WIDTH], dt_log2e[WIDTH], in[WIDTH], sum[WIDTH] = {0};
  float least = unknown(LEAST_EXPONENT), most = unknown(MOST_EXPONENT);
  load_A(a, first, width, A);
  memset(h, 0, a->N * sizeof h[0]);
  for (ptrdiff_t step = 0; step < a->seq; step++) {
    ptrdiff_t t = reverse ? a->seq - 1 - step : step;
    const float *x = (const float *)row(a, a->x, X, b, t, FLOAT32) + first;
    const float *Bt = row(a, a->B, B_, b, t, FLOAT32);
    step_sizes(a, b, t, first, width, dt, FLOAT32);
#pragma omp simd
    for (ptrdiff_t c = 0; c < width; c++) dt_log2e[c] = dt[c] * LOG2E, in[c] = reverse ? x[c] : dt[c] * x[c], sum[c] += dt[c];
    if (reverse && a->z) {
      const float *z = (const float *)row(a, a->z, Z, b, t, FLOAT32) + first;
#pragma omp simd
      for (ptrdiff_t c = 0; c < width; c++) in[c] *= z[c] * sigmoid_(z[c], least);
    }
    for (ptrdiff_t n = 0; n < a->N; n++) {
      float Bn = Bt[n], *state = h[n];
#pragma omp simd
      for (ptrdiff_t c = 0; c < width; c++) {
        float decay = exp2_between(dt_log2e[c] * A[n][c], least, most);
        state[c] = reverse ? decay * (state[c] + in[c] * Bn) : decay * state[c] + in[c] * Bn;
      }
    }
  }
  for (ptrdiff_t n = 0; n < a->N; n++)
    memcpy(a->next + (b * a->N + n) * a->channels + first, h[n], width * sizeof(float));
  if (a->y) memcpy((float *)a->y + b * a->channels + first, sum, width * sizeof(float));
}

CLONES static void carry_task(const Scan *a, ptrdiff_t task, int reverse) {
  ptrdiff_t blocks = (a->channels + WIDTH - 1) / WIDTH, b = task / blocks, first = task % blocks * WIDTH;
  ptrdiff_t width = a->channels - first;
  if (reverse) carry_block(a, b, first, width < WIDTH ? width : WIDTH, 1);
  else carry_block(a, b, first, width < WIDTH ? width : WIDTH, 0);
}

int selective_carry(const float *x, const float *dt, const float *A_log, const float *B, const float *z,
                    const float *dt_bias, float *next, float *sums, const ptrdiff_t *strides, ptrdiff_t batch,
                    ptrdiff_t seq, ptrdiff_t channels, ptrdiff_t N, int reverse, int threads) {
  Scan a = {x, dt, B, NULL, z, A_log, NULL, dt_bias, NULL, sums, next, NULL, strides, batch, seq, channels, 1, N, 0};
  ptrdiff_t tasks = batch * ((channels + WIDTH - 1) / WIDTH);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (ptrdiff_t task = 0; task < tasks; task++) carry_task(&a, task, reverse);
  return 0;
}

/* The gradients of float32 inputs with one head. With g_t = dLoss/dh_t:  g_t = C_t dy_t + exp(dt_{t+1} A) g_{t+1}, which
   begins with the gradient of the final state. Each chunk's states are computed again from the state before it. Each thread
   adds up a dB and a dC of its own; dA_log, dD and ddt_bias are per sequence; the caller adds them all up. */
typedef struct {
  Scan a;
  const float *dout;             /* (batch, seq, channels): the gradient of y */
  float *adjoint;                /* (batch, N, channels). In: the gradient of the final state; out: of the initial one */
  float *dx, *ddt, *dz;          /* (batch, seq, channels) */
  float *dA_log, *dD, *ddt_bias; /* (batch, channels, N); (batch, channels); (batch, channels), or NULL */
  float *dB, *dC;                /* (threads, batch, seq, N), zeros at first */
} ScanGradient;

/* dB, dC: (batch, seq, N), the sums of the thread. */
INLINE void backward_block(const ScanGradient *g, ptrdiff_t b, ptrdiff_t first, ptrdiff_t width, float *dB, float *dC) {
  const Scan *a = &g->a;
  ptrdiff_t N = a->N, chunks = (a->seq + a->chunk - 1) / a->chunk;
  float h[STATES][WIDTH], decays[STATES][WIDTH], dts[STATES][WIDTH], outputs[STATES][WIDTH]; /* of the chunk's tokens */
  float A[STATES][WIDTH], dA[STATES][WIDTH], adjoint[STATES][WIDTH], dD[WIDTH] = {0}, dbias[WIDTH] = {0};
  float dt_x[WIDTH], dt_log2e[WIDTH], dy[WIDTH]; /* dy: before the gate */
  float d_dt_x[WIDTH], d_dt[WIDTH];              /* the gradients of dt x and of dt */
  float least = unknown(LEAST_EXPONENT), most = unknown(MOST_EXPONENT);
  load_A(a, first, width, A);
  memset(dA, 0, N * sizeof dA[0]);
  for (ptrdiff_t n = 0; n < N; n++)
    memcpy(adjoint[n], g->adjoint + (b * N + n) * a->channels + first, width * sizeof(float));
  const float *D = a->D + first;
  for (ptrdiff_t chunk = chunks - 1; chunk >= 0; chunk--) {
    ptrdiff_t start = chunk * a->chunk, length = a->seq - start < a->chunk ? a->seq - start : a->chunk;
    const float *entering = a->saved + (b * chunks + chunk) * N * a->channels + first; /* rows of `channels` */
    for (ptrdiff_t i = 0; i < length; i++) { /* compute the chunk's states again */
      const float *x = (const float *)row(a, a->x, X, b, start + i, FLOAT32) + first;
      const float *Bt = row(a, a->B, B_, b, start + i, FLOAT32), *Ct = row(a, a->C, C_, b, start + i, FLOAT32);
      float *dt = dts[i], *y = outputs[i];
      step_sizes(a, b, start + i, first, width, dt, FLOAT32);
#pragma omp simd
      for (ptrdiff_t c = 0; c < width; c++) dt_log2e[c] = dt[c] * LOG2E, dt_x[c] = dt[c] * x[c], y[c] = D[c] * x[c];
      for (ptrdiff_t n = 0; n < N; n++) {
        const float *before = i ? h[(i - 1) * N + n] : entering + n * a->channels;
        float *after = h[i * N + n], *decay = decays[i * N + n];
#pragma omp simd
        for (ptrdiff_t c = 0; c < width; c++) {
          decay[c] = exp2_between(dt_log2e[c] * A[n][c], least, most);
          after[c] = decay[c] * before[c] + dt_x[c] * Bt[n], y[c] += Ct[n] * after[c];
        }
      }
    }
    for (ptrdiff_t i = length - 1; i >= 0; i--) {
      ptrdiff_t t = start + i, place = (b * a->seq + t) * a->channels + first;
      const float *x = (const float *)row(a, a->x, X, b, t, FLOAT32) + first, *dt = dts[i], *dout = g->dout + place;
      const float *Bt = row(a, a->B, B_, b, t, FLOAT32), *Ct = row(a, a->C, C_, b, t, FLOAT32);
      if (a->z) {
        const float *z = (const float *)row(a, a->z, Z, b, t, FLOAT32) + first, *y = outputs[i];
        float *dz = g->dz + place;
#pragma omp simd
        for (ptrdiff_t c = 0; c < width; c++) {
          float s = sigmoid_(z[c], least);
          dy[c] = dout[c] * z[c] * s, dz[c] = dout[c] * y[c] * s * (1 + z[c] * (1 - s));
        }
      } else {
        memcpy(dy, dout, width * sizeof(float));
      }
#pragma omp simd
      for (ptrdiff_t c = 0; c < width; c++) dt_x[c] = dt[c] * x[c], dD[c] += dy[c] * x[c], d_dt_x[c] = 0, d_dt[c] = 0;
      for (ptrdiff_t n = 0; n < N; n++) {
        const float *before = i ? h[(i - 1) * N + n] : entering + n * a->channels;
        const float *after = h[i * N + n], *decay = decays[i * N + n];
        float *g_n = adjoint[n], *dA_n = dA[n], sum_B = 0, sum_C = 0;
#pragma omp simd reduction(+ : sum_B, sum_C)
        for (ptrdiff_t c = 0; c < width; c++) {
          float dh = g_n[c] + Ct[n] * dy[c], d_dt_A = dh * before[c] * decay[c]; /* the gradients of h_t and of dt A */
          sum_C += after[c] * dy[c], sum_B += dh * dt_x[c], d_dt_x[c] += dh * Bt[n];
          dA_n[c] += d_dt_A * dt[c], d_dt[c] += d_dt_A * A[n][c], g_n[c] = dh * decay[c];
        }
        dB[(b * a->seq + t) * N + n] += sum_B, dC[(b * a->seq + t) * N + n] += sum_C;
      }
      float *dx = g->dx + place, *ddt = g->ddt + place;
#pragma omp simd
      for (ptrdiff_t c = 0; c < width; c++) dx[c] = D[c] * dy[c] + d_dt_x[c] * dt[c], d_dt[c] += d_dt_x[c] * x[c];
      if (a->dt_bias) {
        const float *raw = (const float *)row(a, a->dt, DT, b, t, FLOAT32) + first, *bias = a->dt_bias + first;
#pragma omp simd
        for (ptrdiff_t c = 0; c < width; c++) d_dt[c] *= sigmoid_(raw[c] + bias[c], least), dbias[c] += d_dt[c];
      } /* sigmoid: the derivative of softplus */
      memcpy(ddt, d_dt, width * sizeof(float));
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
