/* The gated delta rule: S = exp(g) S; d = beta (v - S^T k); S = S + k d^T; y = S^T q. See `gated_delta` in kernels/gated_delta.py.

   A task is one value head of one sequence. It goes from token to token, or from chunk to chunk: with c the sums of g in a chunk,

       d_i = beta_i (v_i - exp(c_i) S^T k_i) - the sum over j < i of beta_i (k_i . k_j) exp(c_i - c_j) d_j
       y_i = exp(c_i) S^T q_i + the sum over j <= i of (q_i . k_j) exp(c_i - c_j) d_j
       S = exp(c_last) S + the sum over j of exp(c_last - c_j) k_j d_j^T

   Columns of S do not affect each other, so as many columns are computed at a time as stay in registers. */
#include <math.h>

#include "registers.h"
#include "ssd.h"

/* GCC warns that functions pass Lanes in another way with AVX-512; these functions are all inline. */
#pragma GCC diagnostic ignored "-Wpsabi"

enum {
  LARGEST = 256,        /* K */
  TOKENS = 16,          /* of a chunk */
  LANES = 16,           /* columns of S in a register; half of them without AVX-512 */
  COLUMNS = 4           /* registers of columns that a token reads together */
};
#define NORM_EPS 1e-6f /* added to the sum of squares of q and k */

typedef struct {
  const void *q, *k, *v;      /* (batch, seq, key heads, K) twice, (batch, seq, heads, V); no gaps within a token */
  const float *g, *beta;      /* (batch, seq, heads) */
  const float *state;         /* (batch, heads, K, V), with a batch stride; NULL: zeros */
  void *y;                    /* (batch, seq, heads, V) without gaps */
  float *next;                /* the final state, like state; may be state itself */
  const ptrdiff_t *strides;   /* from sequence to sequence, then from token to token, of q, k, v, and of g and beta; from
                                 sequence to sequence of state and next */
  ptrdiff_t seq, key_heads, heads, K, V;
  int type;                   /* of q, k, v and y */
  int one_by_one;             /* 1 if the result must have the same bits as one call per token */
} Delta;
enum { Q_ = 0, K_ = 2, V_ = 4, RATES = 6, STATE_ = 8, NEXT_ = 9 };

#define VECTOR_OF(LANES) __attribute__((vector_size((LANES) * sizeof(float)), aligned(sizeof(float)), may_alias))
typedef float Lanes VECTOR_OF(LANES);
typedef float HalfLanes VECTOR_OF(LANES / 2);

/* What a chunk of tokens, or the first of them alone, needs: keys and queries (TOKENS, K); both in columns; keys times what decays
   until the end, in columns; beta; g, and then exp(c_i); factors of d_j in d_i, and in y_i. */
typedef struct {
  float both[LARGEST][2 * TOKENS], later[LARGEST][TOKENS], keys[TOKENS * LARGEST], queries[TOKENS * LARGEST];
  float beta[TOKENS], decay[TOKENS], corrections[TOKENS][TOKENS], scores[TOKENS][TOKENS];
} Chunk;

/* `count` numbers, at most LANES, as float32, and back. */
INLINE void widen_numbers(const void *x, float *to, int count, int type) {
#pragma omp simd
  for (int l = 0; l < count; l++) to[l] = get(x, l, type);
}
INLINE void narrow_numbers(const float *x, void *to, int count, int type) {
#pragma omp simd
  for (int l = 0; l < count; l++) put(to, l, x[l], type);
}

/* to = x / sqrt(sum of squares + eps) * factor. */
INLINE void normalize(const void *x, float *to, ptrdiff_t size, float factor, int type) {
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (ptrdiff_t i = 0; i < size; i++) squares += get(x, i, type) * get(x, i, type);
  float scale = factor / sqrtf(squares + NORM_EPS);
#pragma omp simd
  for (ptrdiff_t i = 0; i < size; i++) to[i] = scale * get(x, i, type);
}

INLINE float dot(const float *x, const float *y, ptrdiff_t size) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (ptrdiff_t i = 0; i < size; i++) sum += x[i] * y[i];
  return sum;
}

INLINE const void *token_of(const Delta *a, const void *p, int which, ptrdiff_t b, ptrdiff_t t, ptrdiff_t place, int type) {
  return at(p, b * a->strides[which] + t * a->strides[which + 1] + place, type);
}

/* Normalizes q and k of `count` tokens from t on. */
INLINE void read_tokens(const Delta *a, Chunk *c, ptrdiff_t b, ptrdiff_t head, ptrdiff_t t, int count, int type) {
  ptrdiff_t K = a->K, key_head = head / (a->heads / a->key_heads);
  for (int i = 0; i < count; i++) {
    normalize(token_of(a, a->k, K_, b, t + i, key_head * K, type), c->keys + i * K, K, 1, type);
    normalize(token_of(a, a->q, Q_, b, t + i, key_head * K, type), c->queries + i * K, K, 1 / sqrtf(K), type);
    c->beta[i] = *(const float *)token_of(a, a->beta, RATES, b, t + i, head, FLOAT32);
    c->decay[i] = *(const float *)token_of(a, a->g, RATES, b, t + i, head, FLOAT32);
  }
}

/* sums[i] = S^T of row `first` + i of `both`, for ROWS rows and two registers of columns. */
#define RECALL(NAME, TYPE, ROWS)                                                                                           \
  INLINE void NAME(const Chunk *c, const float *S, ptrdiff_t V, ptrdiff_t K, int first, TYPE sums[][2], int wide) {        \
    TYPE found[ROWS][2] = {0};                                                                                            \
    const int lanes = sizeof(TYPE) / sizeof(float);                                                                       \
    for (ptrdiff_t n = 0; n < K; n++) {                                                                                   \
      TYPE one = *(const TYPE *)(S + n * V), two = one;                                                                   \
      if (wide) two = *(const TYPE *)(S + n * V + lanes);                                                                 \
      _Pragma("GCC unroll 8")                                                                                             \
      for (int i = 0; i < ROWS; i++) {                                                                                    \
        found[i][0] += c->both[n][first + i] * one;                                                                       \
        if (wide) found[i][1] += c->both[n][first + i] * two;                                                             \
      }                                                                                                                   \
    }                                                                                                                     \
    for (int i = 0; i < ROWS; i++) sums[first + i][0] = found[i][0], sums[first + i][1] = found[i][1];                    \
  }
RECALL(recall_lanes, Lanes, 8)
RECALL(recall_half_lanes, HalfLanes, 4)

/* The products of each key, and then of each query, with each key. */
INLINE void multiply_tokens(const Chunk *c, float products[2 * TOKENS][TOKENS], ptrdiff_t K) {
  if (loop_level() == AVX512) {
    Lanes found[2 * TOKENS][2];
    for (int first = 0; first < 2 * TOKENS; first += 8) recall_lanes(c, c->both[0], 2 * TOKENS, K, first, found, 0);
    for (int i = 0; i < 2 * TOKENS; i++) *(Lanes *)products[i] = found[i][0];
  } else {
    HalfLanes found[2 * TOKENS][2];
    for (int first = 0; first < 2 * TOKENS; first += 4) recall_half_lanes(c, c->both[0], 2 * TOKENS, K, first, found, 1);
    for (int i = 0; i < 2 * TOKENS; i++)
      *(HalfLanes *)products[i] = found[i][0], *(HalfLanes *)(products[i] + LANES / 2) = found[i][1];
  }
}

/* The rest of a chunk, from what `read_tokens` has written. */
INLINE void prepare_chunk(const Delta *a, Chunk *c) {
  ptrdiff_t K = a->K;
  float sums[TOKENS], to_end[TOKENS], products[2 * TOKENS][TOKENS], sum = 0;
  transpose_floats(c->keys, TOKENS, K, c->both[0], 2 * TOKENS);
  transpose_floats(c->queries, TOKENS, K, c->both[0] + TOKENS, 2 * TOKENS);
  multiply_tokens(c, products, K);
  for (int i = 0; i < TOKENS; i++) sums[i] = sum += c->decay[i];
#pragma omp simd
  for (int i = 0; i < TOKENS; i++) to_end[i] = exp_(sum - sums[i]), c->decay[i] = exp_(sums[i]);
  for (int i = 0; i < TOKENS; i++)
#pragma omp simd
    for (int j = 0; j < TOKENS; j++) { /* of later tokens j > i nothing is used */
      float between = exp_(sums[i] - sums[j]);
      c->scores[i][j] = between * products[TOKENS + i][j];
      c->corrections[i][j] = c->beta[i] * between * products[i][j];
    }
  for (ptrdiff_t n = 0; n < K; n++)
#pragma omp simd
    for (int i = 0; i < TOKENS; i++) c->later[n][i] = to_end[i] * c->both[n][i];
}

/* A chunk of TOKENS tokens for one or two (`wide`) registers of columns of S. v, y: (TOKENS, stride). */
#define CHUNK_OF(NAME, TYPE, RECALL_ROWS, ROWS)                                                                            \
  INLINE void NAME(const Chunk *c, float *S, ptrdiff_t V, ptrdiff_t K, const void *v, ptrdiff_t v_stride, void *y,         \
                   ptrdiff_t y_stride, int wide, int type) {                                                               \
    const int lanes = sizeof(TYPE) / sizeof(float), registers = wide ? 2 : 1;                                             \
    TYPE sums[2 * TOKENS][2], d[TOKENS][2];                                                                               \
    for (int first = 0; first < 2 * TOKENS; first += ROWS) RECALL_ROWS(c, S, V, K, first, sums, wide);                    \
    for (int r = 0; r < registers; r++) {                                                                                 \
      for (int i = 0; i < TOKENS; i++) {                                                                                  \
        float numbers[LANES];                                                                                             \
        widen_numbers(at((void *)v, i * v_stride + r * lanes, type), numbers, lanes, type);                               \
        TYPE even = c->beta[i] * (*(TYPE *)numbers - c->decay[i] * sums[i][r]), odd = {0};                                           \
        for (int j = 0; j + 1 < i; j += 2)                                                                                \
          even -= c->corrections[i][j] * d[j][r], odd -= c->corrections[i][j + 1] * d[j + 1][r];                          \
        if (i % 2) even -= c->corrections[i][i - 1] * d[i - 1][r];                                                        \
        d[i][r] = even + odd;                                                                                             \
      }                                                                                                                   \
      for (int i = 0; i < TOKENS; i++) {                                                                                  \
        TYPE out = c->decay[i] * sums[TOKENS + i][r];                                                                     \
        for (int j = 0; j <= i; j++) out += c->scores[i][j] * d[j][r];                                                    \
        narrow_numbers((float *)&out, at(y, i * y_stride + r * lanes, type), lanes, type);                               \
      }                                                                                                                   \
      for (ptrdiff_t n = 0; n < K; n++) {                                                                                 \
        TYPE *row = (TYPE *)(S + n * V + r * lanes), new = c->decay[TOKENS - 1] * *row;                                   \
        _Pragma("GCC unroll 16")                                                                                          \
        for (int j = 0; j < TOKENS; j++) new += c->later[n][j] * d[j][r];                                                 \
        *row = new;                                                                                                       \
      }                                                                                                                   \
    }                                                                                                                     \
  }
CHUNK_OF(chunk_of_lanes, Lanes, recall_lanes, 8)
CHUNK_OF(chunk_of_half_lanes, HalfLanes, recall_half_lanes, 4)

/* One token for `registers` registers of columns of S: `c` has its k, q, beta, and exp(g) in decay. score: q . k. */
#define TOKEN_OF(NAME, TYPE)                                                                                               \
  INLINE void NAME(const Chunk *c, float *S, ptrdiff_t V, ptrdiff_t K, const void *v, void *y, float score, int registers, \
                   int type) {                                                                                            \
    const int lanes = sizeof(TYPE) / sizeof(float);                                                                       \
    TYPE recalled[COLUMNS] = {0}, read[COLUMNS] = {0}, d[COLUMNS];                                                        \
    for (ptrdiff_t n = 0; n < K; n++) {                                                                                   \
      _Pragma("GCC unroll 4")                                                                                             \
      for (int r = 0; r < registers; r++) {                                                                               \
        TYPE row = *(const TYPE *)(S + n * V + r * lanes);                                                                \
        recalled[r] += c->keys[n] * row, read[r] += c->queries[n] * row;                                            \
      }                                                                                                                   \
    }                                                                                                                     \
    for (int r = 0; r < registers; r++) {                                                                                 \
      float numbers[LANES];                                                                                               \
      widen_numbers(at((void *)v, r * lanes, type), numbers, lanes, type);                                                \
      d[r] = c->beta[0] * (*(TYPE *)numbers - c->decay[0] * recalled[r]);                                                 \
      TYPE out = c->decay[0] * read[r] + score * d[r];                                                                    \
      narrow_numbers((float *)&out, at(y, r * lanes, type), lanes, type);                                                 \
    }                                                                                                                     \
    for (ptrdiff_t n = 0; n < K; n++) {                                                                                   \
      _Pragma("GCC unroll 4")                                                                                             \
      for (int r = 0; r < registers; r++) {                                                                               \
        TYPE *row = (TYPE *)(S + n * V + r * lanes);                                                                      \
        *row = c->decay[0] * *row + c->keys[n] * d[r];                                                                 \
      }                                                                                                                   \
    }                                                                                                                     \
  }
TOKEN_OF(token_of_lanes, Lanes)
TOKEN_OF(token_of_half_lanes, HalfLanes)

/* The same for the columns from `first` on, one by one. */
INLINE void token_of_columns(const Chunk *c, float *S, ptrdiff_t V, ptrdiff_t K, const void *v, void *y, float score,
                             ptrdiff_t first, int type) {
  for (ptrdiff_t i = first; i < V; i++) {
    float recalled = 0, read = 0;
    for (ptrdiff_t n = 0; n < K; n++) recalled += c->keys[n] * S[n * V + i], read += c->queries[n] * S[n * V + i];
    float d = c->beta[0] * (get(v, i, type) - c->decay[0] * recalled);
    put(y, i, c->decay[0] * read + score * d, type);
    for (ptrdiff_t n = 0; n < K; n++) S[n * V + i] = c->decay[0] * S[n * V + i] + c->keys[n] * d;
  }
}

INLINE void one_token(const Delta *a, Chunk *c, float *S, ptrdiff_t b, ptrdiff_t head, ptrdiff_t t, int type) {
  ptrdiff_t V = a->V, K = a->K, first = 0;
  const void *v = token_of(a, a->v, V_, b, t, head * V, type);
  void *y = at(a->y, ((b * a->seq + t) * a->heads + head) * V, type);
  read_tokens(a, c, b, head, t, 1, type);
  c->decay[0] = exp_(c->decay[0]);
  float score = dot(c->queries, c->keys, K);
  if (loop_level() == AVX512) {
    for (; first + COLUMNS * LANES <= V; first += COLUMNS * LANES)
      token_of_lanes(c, S + first, V, K, at(v, first, type), at(y, first, type), score, COLUMNS, type);
    for (; first + LANES <= V; first += LANES)
      token_of_lanes(c, S + first, V, K, at(v, first, type), at(y, first, type), score, 1, type);
  } else {
    for (; first + COLUMNS * LANES / 2 <= V; first += COLUMNS * LANES / 2)
      token_of_half_lanes(c, S + first, V, K, at(v, first, type), at(y, first, type), score, COLUMNS, type);
    for (; first + LANES / 2 <= V; first += LANES / 2)
      token_of_half_lanes(c, S + first, V, K, at(v, first, type), at(y, first, type), score, 1, type);
  }
  token_of_columns(c, S, V, K, v, y, score, first, type);
}

INLINE void one_chunk(const Delta *a, Chunk *c, float *S, ptrdiff_t b, ptrdiff_t head, ptrdiff_t t, int type) {
  ptrdiff_t V = a->V, K = a->K, first = 0, v_stride = a->strides[V_ + 1], y_stride = a->heads * V;
  const void *v = token_of(a, a->v, V_, b, t, head * V, type);
  void *y = at(a->y, ((b * a->seq + t) * a->heads + head) * V, type);
  read_tokens(a, c, b, head, t, TOKENS, type);
  prepare_chunk(a, c);
  if (loop_level() == AVX512) {
    for (; first + 2 * LANES <= V; first += 2 * LANES)
      chunk_of_lanes(c, S + first, V, K, at(v, first, type), v_stride, at(y, first, type), y_stride, 1, type);
    for (; first < V; first += LANES)
      chunk_of_lanes(c, S + first, V, K, at(v, first, type), v_stride, at(y, first, type), y_stride, 0, type);
  } else
    for (; first < V; first += LANES)
      chunk_of_half_lanes(c, S + first, V, K, at(v, first, type), v_stride, at(y, first, type), y_stride, 1, type);
}

INLINE void all_tokens(const Delta *a, Chunk *c, ptrdiff_t b, ptrdiff_t head, int type) {
  ptrdiff_t size = a->K * a->V;
  float *S = a->next + b * a->strides[NEXT_] + head * size;
  const float *state = a->state ? a->state + b * a->strides[STATE_] + head * size : NULL;
  if (!state) memset(S, 0, size * sizeof(float));
  else if (state != S) memcpy(S, state, size * sizeof(float));
  for (ptrdiff_t t = 0; t < a->seq;) {
    if (!a->one_by_one && a->V % LANES == 0 && t + TOKENS <= a->seq) one_chunk(a, c, S, b, head, t, type), t += TOKENS;
    else one_token(a, c, S, b, head, t++, type);
  }
}

CLONES static void tokens_float(const Delta *a, Chunk *c, ptrdiff_t b, ptrdiff_t head) { all_tokens(a, c, b, head, FLOAT32); }
CLONES static void tokens_bfloat16(const Delta *a, Chunk *c, ptrdiff_t b, ptrdiff_t head) { all_tokens(a, c, b, head, BFLOAT16); }

int gated_delta(const void *q, const void *k, const void *v, const float *g, const float *beta, const float *state, void *y,
                float *next, const ptrdiff_t *strides, ptrdiff_t batch, ptrdiff_t seq, ptrdiff_t key_heads, ptrdiff_t heads,
                ptrdiff_t K, ptrdiff_t V, int type, int one_by_one, int threads) {
  Delta a = {q, k, v, g, beta, state, y, next, strides, seq, key_heads, heads, K, V, type, one_by_one};
  int failed = 0, several = threads > 1 && batch * seq * heads * K * V >= 1 << 15;
#pragma omp parallel num_threads(threads) if (several) reduction(| : failed)
  {
    Chunk *c = allocate(sizeof(Chunk));
    unsigned before = begin_flushing();
    failed |= !c;
#pragma omp for schedule(static)
    for (ptrdiff_t task = 0; task < batch * heads; task++) {
      if (!c) continue;
      if (type == FLOAT32) tokens_float(&a, c, task / heads, task % heads);
      else tokens_bfloat16(&a, c, task / heads, task % heads);
    }
    end_flushing(before);
    free(c);
  }
  return failed;
}

/* [b | a] of one token -> [beta | g] = [most sigmoid(b) | -exp(A_log) softplus(a + dt_bias)]. */
CLONES static void rates_of(const void *gates, const float *A_log, const float *dt_bias, float *rates, ptrdiff_t heads, float most,
                            int type) {
  for (ptrdiff_t h = 0; h < heads; h++) {
    rates[h] = most * sigmoid_(get(gates, h, type), LEAST_EXPONENT);
    rates[heads + h] = -exp_(A_log[h]) * softplus_(get(gates, heads + h, type) + dt_bias[h], LEAST_EXPONENT);
  }
}

void delta_rates(const void *gates, const float *A_log, const float *dt_bias, float *rates, ptrdiff_t heads, float most, int type) {
  rates_of(gates, A_log, dt_bias, rates, heads, most, type);
}
