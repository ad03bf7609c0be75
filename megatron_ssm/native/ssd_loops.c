/* Mamba-2's recurrence by plain loops, and its gradient. See `ssd` in kernels/scan.py.

   A task is one head of one sequence. It computes one token after the other; the forward pass computes four tokens at a time, unless
   `one_by_one` is set. The forward pass computes up to WIDTH channels of the head at a time, and the backward pass PART. No two tasks
   write the same memory, except that all tasks of a thread use that thread's dB, dC and scratch. */
#include "ssd.h"

enum {
  WIDTH = 64,           /* channels at a time in the forward pass */
  TOKENS = 4,           /* tokens at a time in the forward pass */
  LANES = 16,           /* channels whose sums for TOKENS tokens stay in registers; half of them without AVX-512 */
  PART = 16, FOUR = 4,  /* channels at a time in the backward pass (PART in kernels.py), and side by side in a loop */
  STATES = 256,         /* the largest N */
  CHUNK = 16            /* tokens between two saved states (CHUNK in kernels.py) */
};

/* One token: h = decay * h + B dt_x^T and y += C^T h. The rows of h, (N, width), are `stride` apart; four at a time. */
INLINE void forward_token(float *h, ptrdiff_t stride, float decay, const float *dt_x, const float *B, const float *C,
                          float *y, ptrdiff_t N, ptrdiff_t width) {
  ptrdiff_t n = 0;
  for (; n + 4 <= N; n += 4, h += 4 * stride)
#pragma omp simd
    for (ptrdiff_t c = 0; c < width; c++) {
      float h0 = decay * h[c] + dt_x[c] * B[n], h1 = decay * h[stride + c] + dt_x[c] * B[n + 1];
      float h2 = decay * h[2 * stride + c] + dt_x[c] * B[n + 2], h3 = decay * h[3 * stride + c] + dt_x[c] * B[n + 3];
      h[c] = h0, h[stride + c] = h1, h[2 * stride + c] = h2, h[3 * stride + c] = h3;
      y[c] += (C[n] * h0 + C[n + 1] * h1) + (C[n + 2] * h2 + C[n + 3] * h3);
    }
  for (; n < N; n++, h += stride)
#pragma omp simd
    for (ptrdiff_t c = 0; c < width; c++) h[c] = decay * h[c] + dt_x[c] * B[n], y[c] += C[n] * h[c];
}

/* What TOKENS tokens, or the first of them alone, need of a head's inputs. decays[t]: that of the state from before the first
   token to after token t. */
typedef struct {
  float dt_x[TOKENS][WIDTH], y[TOKENS][WIDTH], B[TOKENS][STATES], C[TOKENS][STATES], decays[TOKENS];
} Tokens;

#define VECTOR_OF(LANES) __attribute__((vector_size((LANES) * sizeof(float)), aligned(sizeof(float)), may_alias))
typedef float Lanes VECTOR_OF(LANES);
typedef float HalfLanes VECTOR_OF(LANES / 2);

/* The products of C of token t with B of token s <= t, times the decay between them. */
INLINE void multiply_tokens(const Tokens *a, float products[TOKENS][TOKENS], ptrdiff_t N) {
  for (int t = 0; t < TOKENS; t++)
    for (int s = 0; s <= t; s++) {
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (ptrdiff_t n = 0; n < N; n++) sum += a->C[t][n] * a->B[s][n];
      products[t][s] = sum;
    }
}

/* TOKENS tokens of as many channels from c on as TYPE has elements, with the state h before them: y_t += decays[t] C_t^T h +
   the sum over s <= t of products[t][s] dt_x_s. Then h = decays[last] h + the sum over s of later[s] B_s dt_x_s^T. */
#define FORWARD_TOKENS(NAME, TYPE)                                                                                         \
  INLINE void NAME(Tokens *a, float *h, ptrdiff_t stride, const float products[TOKENS][TOKENS], const float *later,       \
                   ptrdiff_t N, ptrdiff_t c) {                                                                            \
    TYPE sums[TOKENS] = {0}, inputs[TOKENS];                                                                              \
    for (int t = 0; t < TOKENS; t++) inputs[t] = later[t] * *(const TYPE *)(a->dt_x[t] + c);                              \
    for (ptrdiff_t n = 0; n < N; n++) {                                                                                   \
      TYPE *row = (TYPE *)(h + n * stride + c), old = *row, new = a->decays[TOKENS - 1] * old;                            \
      _Pragma("GCC unroll 4")                                                                                             \
      for (int t = 0; t < TOKENS; t++) sums[t] += a->C[t][n] * old, new += a->B[t][n] * inputs[t];                        \
      *row = new;                                                                                                         \
    }                                                                                                                     \
    for (int t = 0; t < TOKENS; t++) {                                                                                    \
      TYPE *y = (TYPE *)(a->y[t] + c), sum = *y + a->decays[t] * sums[t];                                                 \
      for (int s = 0; s <= t; s++) sum += products[t][s] * *(const TYPE *)(a->dt_x[s] + c);                               \
      *y = sum;                                                                                                           \
    }                                                                                                                     \
  }
FORWARD_TOKENS(forward_lanes, Lanes)
FORWARD_TOKENS(forward_half_lanes, HalfLanes)

/* As TOKENS calls of forward_token, up to rounding. width: a multiple of LANES. steps[t]: the decay of token t alone. */
INLINE void forward_chunk(Tokens *a, float *h, ptrdiff_t stride, const float *steps, ptrdiff_t N, ptrdiff_t width) {
  float products[TOKENS][TOKENS], later[TOKENS];
  multiply_tokens(a, products, N);
  for (int s = 0; s < TOKENS; s++) {
    float decay = 1;
    for (int t = s + 1; t < TOKENS; t++) decay *= steps[t], products[t][s] *= decay;
    later[s] = decay;
  }
  if (loop_level() == AVX512)
    for (ptrdiff_t c = 0; c < width; c += LANES) forward_lanes(a, h, stride, products, later, N, c);
  else
    for (ptrdiff_t c = 0; c < width; c += LANES / 2) forward_half_lanes(a, h, stride, products, later, N, c);
}

INLINE void forward_block(const Ssd *a, ptrdiff_t b, ptrdiff_t head, ptrdiff_t first, ptrdiff_t width, int type) {
  ptrdiff_t N = a->N, P = a->P, group = head / (a->heads / a->groups), chunks = (a->seq + CHUNK - 1) / CHUNK;
  float A = -exp_(a->A_log[head]), D = a->D[head], steps[TOKENS];
  float *h = own_state(a, b, head, first, width);
  Tokens k;
  for (ptrdiff_t t = 0, count; t < a->seq; t += count) {
    count = !a->one_by_one && width % LANES == 0 && t + TOKENS <= a->seq ? TOKENS : 1;
    if (a->saved && t % CHUNK == 0) {
      float *saved = a->saved + ((b * chunks + t / CHUNK) * a->heads + head) * N * P + first;
      for (ptrdiff_t n = 0; n < N; n++) memcpy(saved + n * P, h + n * P, width * sizeof(float));
    }
    for (ptrdiff_t i = 0; i < count; i++) {
      float dt = a->dt[(b * a->seq + t + i) * a->heads + head];
      const void *x = row(a, a->x, X, b, t + i, head * P + first, type);
      const void *B = row(a, a->B, B_, b, t + i, group * N, type), *C = row(a, a->C, C_, b, t + i, group * N, type);
      steps[i] = exp_(dt * A), k.decays[i] = i ? k.decays[i - 1] * steps[i] : steps[i];
#pragma omp simd
      for (ptrdiff_t c = 0; c < width; c++) k.dt_x[i][c] = dt * get(x, c, type), k.y[i][c] = D * get(x, c, type);
#pragma omp simd
      for (ptrdiff_t n = 0; n < N; n++) k.B[i][n] = get(B, n, type), k.C[i][n] = get(C, n, type);
    }
    if (count > 1) forward_chunk(&k, h, P, steps, N, width);
    else forward_token(h, P, steps[0], k.dt_x[0], k.B[0], k.C[0], k.y[0], N, width);
    for (ptrdiff_t i = 0; i < count; i++) {
      void *out = at(a->y, ((b * a->seq + t + i) * a->heads + head) * P + first, type);
#pragma omp simd
      for (ptrdiff_t c = 0; c < width; c++) put(out, c, k.y[i][c], type);
    }
  }
}

/* A width that is a compile-time constant is faster. */
INLINE void forward_task(const Ssd *a, ptrdiff_t task, int type) {
  ptrdiff_t first = 0, b = task / a->heads, head = task % a->heads;
  for (; first + WIDTH <= a->P; first += WIDTH) forward_block(a, b, head, first, WIDTH, type);
  if (a->P - first == WIDTH / 2) forward_block(a, b, head, first, WIDTH / 2, type);
  else if (first < a->P) forward_block(a, b, head, first, a->P - first, type);
}

CLONES static void forward_float32(const Ssd *a, ptrdiff_t task) { forward_task(a, task, FLOAT32); }
CLONES static void forward_bfloat16(const Ssd *a, ptrdiff_t task) { forward_task(a, task, BFLOAT16); }

int ssd_loops(const Ssd *a, int threads) {
  int flushes = !a->one_by_one && a->seq >= TOKENS;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (ptrdiff_t task = 0; task < a->batch * a->heads; task++) {
    unsigned before = flushes ? begin_flushing() : 0;
    if (a->type == FLOAT32) forward_float32(a, task);
    else forward_bfloat16(a, task);
    if (flushes) end_flushing(before);
  }
  return 0;
}

/* The gradients of float32 inputs, by the same recurrence as in selective_scan.c. Here a head's states are transposed to
   (P, N): the sums over P that dB and dC need are then sums of vectors, not sums across a vector. */
typedef struct {
  Ssd a;
  const float *dout;   /* (batch, seq, heads, P): the gradient of y */
  float *adjoint;      /* (batch, heads, N, P). In: the gradient of the final state; out: of the initial one */
  float *dx, *ddt;     /* (batch, seq, heads, P); (batch, seq, heads), zeros at first */
  float *dA_log, *dD;  /* (batch, heads) twice, zeros at first: the caller adds up the sequences */
} SsdGradient;

/* From (N, width), whose rows are `stride` apart, to (width, N) without gaps; and back. */
INLINE void transpose(const float *from, ptrdiff_t stride, float *to, ptrdiff_t N, ptrdiff_t width) {
  for (ptrdiff_t n = 0; n < N; n++)
    for (ptrdiff_t c = 0; c < width; c++) to[c * N + n] = from[n * stride + c];
}
INLINE void transpose_back(const float *from, float *to, ptrdiff_t stride, ptrdiff_t N, ptrdiff_t width) {
  for (ptrdiff_t n = 0; n < N; n++)
    for (ptrdiff_t c = 0; c < width; c++) to[n * stride + c] = from[c * N + n];
}

/* One token of `count` channels, 1 or FOUR, a compile-time constant. g is the gradient of the state after the token, except
   for what flows through this token's y, and is turned into the same of the token before. With dh = g + C dy:
   dB += sum over channels of dh dt_x; dC += sum over channels of (state after) dy; d_dt_x = sum over N of dh B.
   Returns the sum of dh * (state before), which is the gradient of `decay`. */
INLINE float backward_token(float *g, const float *before, const float *after, const float *B, const float *C, float *dB,
                            float *dC, const float *dy, const float *dt_x, float *d_dt_x, float decay, ptrdiff_t N,
                            int count) {
  float ddecay = 0, s0 = 0, s1 = 0, s2 = 0, s3 = 0;
  ptrdiff_t one = count > 1 ? N : 0, two = count > 1 ? 2 * N : 0, three = count > 1 ? 3 * N : 0;
#pragma omp simd reduction(+ : ddecay, s0, s1, s2, s3)
  for (ptrdiff_t n = 0; n < N; n++) {
    float g0 = g[n] + C[n] * dy[0], b = g0 * dt_x[0], c = after[n] * dy[0];
    s0 += g0 * B[n], ddecay += g0 * before[n];
    if (count > 1) {
      float g1 = g[one + n] + C[n] * dy[1], g2 = g[two + n] + C[n] * dy[2], g3 = g[three + n] + C[n] * dy[3];
      b += g1 * dt_x[1] + g2 * dt_x[2] + g3 * dt_x[3];
      c += after[one + n] * dy[1] + after[two + n] * dy[2] + after[three + n] * dy[3];
      s1 += g1 * B[n], s2 += g2 * B[n], s3 += g3 * B[n];
      ddecay += g1 * before[one + n] + g2 * before[two + n] + g3 * before[three + n];
      g[one + n] = g1 * decay, g[two + n] = g2 * decay, g[three + n] = g3 * decay;
    }
    g[n] = g0 * decay, dB[n] += b, dC[n] += c;
  }
  d_dt_x[0] = s0;
  if (count > 1) d_dt_x[1] = s1, d_dt_x[2] = s2, d_dt_x[3] = s3;
  return ddecay;
}

/* dB, dC: (batch, seq, groups, N), those of the thread. scratch: (CHUNK + 2, PART, N), for the adjoint, the state before a
   chunk and the state after each of its tokens. */
INLINE void backward_block(const SsdGradient *g, ptrdiff_t b, ptrdiff_t head, ptrdiff_t first, ptrdiff_t width,
                           float *dB, float *dC, float *scratch, ptrdiff_t N) {
  const Ssd *a = &g->a;
  ptrdiff_t P = a->P, group = head / (a->heads / a->groups), chunks = (a->seq + CHUNK - 1) / CHUNK, size = width * N;
  float dt_x[PART], d_dt_x[PART], A = -exp_(a->A_log[head]), D = a->D[head], dA = 0, dD = 0;
  float *adjoint = scratch, *h = scratch + size, *final = g->adjoint + (b * a->heads + head) * N * P + first;
  transpose(final, P, adjoint, N, width);
  for (ptrdiff_t chunk = chunks - 1; chunk >= 0; chunk--) {
    ptrdiff_t start = chunk * CHUNK, length = a->seq - start < CHUNK ? a->seq - start : CHUNK;
    transpose(a->saved + ((b * chunks + chunk) * a->heads + head) * N * P + first, P, h, N, width);
    for (ptrdiff_t i = 0; i < length; i++) { /* h + i * size: the state before token start + i */
      float dt = a->dt[(b * a->seq + start + i) * a->heads + head], decay = exp_(dt * A);
      const float *x = row(a, a->x, X, b, start + i, head * P + first, FLOAT32);
      const float *B = row(a, a->B, B_, b, start + i, group * N, FLOAT32), *before = h + i * size;
      float *after = h + (i + 1) * size;
      for (ptrdiff_t c = 0; c < width; c++)
#pragma omp simd
        for (ptrdiff_t n = 0; n < N; n++) after[c * N + n] = decay * before[c * N + n] + dt * x[c] * B[n];
    }
    for (ptrdiff_t i = length - 1; i >= 0; i--) {
      ptrdiff_t t = start + i, place = (b * a->seq + t) * a->heads + head, c = 0;
      float dt = a->dt[place], decay = exp_(dt * A), ddecay = 0, d_dt = 0, *dx = g->dx + place * P + first;
      const float *x = row(a, a->x, X, b, t, head * P + first, FLOAT32), *dy = g->dout + place * P + first;
      const float *B = row(a, a->B, B_, b, t, group * N, FLOAT32), *C = row(a, a->C, C_, b, t, group * N, FLOAT32);
      const float *before = h + i * size, *after = before + size;
      ptrdiff_t shared = ((b * a->seq + t) * a->groups + group) * N; /* the group's place in dB and dC */
      for (ptrdiff_t k = 0; k < width; k++) dt_x[k] = dt * x[k];
      for (; c + FOUR <= width; c += FOUR)
        ddecay += backward_token(adjoint + c * N, before + c * N, after + c * N, B, C, dB + shared, dC + shared, dy + c,
                                 dt_x + c, d_dt_x + c, decay, N, FOUR);
      for (; c < width; c++)
        ddecay += backward_token(adjoint + c * N, before + c * N, after + c * N, B, C, dB + shared, dC + shared, dy + c,
                                 dt_x + c, d_dt_x + c, decay, N, 1);
      for (ptrdiff_t k = 0; k < width; k++) dx[k] = D * dy[k] + d_dt_x[k] * dt, d_dt += d_dt_x[k] * x[k], dD += dy[k] * x[k];
      float d_dt_A = ddecay * decay;
      dA += d_dt_A * dt, g->ddt[place] += d_dt + d_dt_A * A;
    }
  }
  transpose_back(adjoint, final, P, N, width);
  g->dA_log[b * a->heads + head] += dA * A, g->dD[b * a->heads + head] += dD;
}

CLONES static void backward_task(const SsdGradient *g, ptrdiff_t task, float *dB, float *dC, float *scratch) {
  ptrdiff_t P = g->a.P, N = g->a.N, b = task / g->a.heads, head = task % g->a.heads;
  for (ptrdiff_t first = 0; first < P; first += PART) {
    ptrdiff_t width = P - first < PART ? P - first : PART;
    /* An N that is a compile-time constant is faster. */
    if (width == PART && N == 64) backward_block(g, b, head, first, PART, dB, dC, scratch, 64);
    else if (width == PART && N == 128) backward_block(g, b, head, first, PART, dB, dC, scratch, 128);
    else backward_block(g, b, head, first, width, dB, dC, scratch, N);
  }
}

/* dB, dC: (threads, batch, seq, groups, N), zeros at first, which the caller adds up over the threads; scratch: (threads,
   CHUNK + 2, PART, N). */
int ssd_backward(const float *x, const float *dt, const float *A_log, const float *B, const float *C, const float *D,
                 float *saved, const float *dout, float *adjoint, float *dx, float *ddt, float *dA_log, float *dB,
                 float *dC, float *dD, float *scratch, const ptrdiff_t *strides, ptrdiff_t batch, ptrdiff_t seq,
                 ptrdiff_t heads, ptrdiff_t P, ptrdiff_t groups, ptrdiff_t N, int threads) {
  Ssd a = {x, B, C, dt, A_log, D, NULL, NULL, NULL, saved, strides, batch, seq, heads, P, groups, N};
  SsdGradient g = {a, dout, adjoint, dx, ddt, dA_log, dD};
  ptrdiff_t part = batch * seq * groups * N;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (ptrdiff_t task = 0; task < batch * heads; task++) {
    ptrdiff_t thread = THREAD;
    backward_task(&g, task, dB + thread * part, dC + thread * part, scratch + thread * (CHUNK + 2) * PART * N);
  }
  return 0;
}
