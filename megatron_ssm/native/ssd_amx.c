/* Mamba-2's recurrence by AMX, in chunks of tokens: the SSD form of its paper (section 6).

   Let c_t be the sum of dt A from a chunk's first token to token t, and h the state before the chunk. Then
     y_t = e^c_t C_t^T h + the sum over s <= t of (C_t^T B_s) e^(c_t - c_s) dt_s x_s + D x_t,
     h = e^c_last h + the sum over s of B_s (e^(c_last - c_s) dt_s x_s)^T.
   The sums are products of tiles of bfloat16 numbers, added up in float32. x, B, C, h and the factors of x_s are rounded to bfloat16
   for the products, as in the kernels of mamba-ssm. The summands of h are not, because their errors would add up: each is the sum of
   two bfloat16 numbers, with errors up to 2^-16. Inputs in float32 are only rounded if `may_round` allows it: as sums of three numbers
   they would take as long as one token after the other. Plain loops compute an x that is not finite: here, 0 times such an x_s would
   reach the tokens before it.

   C_t^T B_s is the same for all heads of a group. A task is some heads of a group of a sequence. */
#include "ssd.h"
#include "amx.h"

#ifdef HAS_TILES
enum {
  CHUNK = 32,   /* tokens: a tile's columns */
  WIDTH = 32,   /* channels at a time */
  STATES = 256, /* the largest N */
  PIECE = 4,    /* chunks for which the values that the heads share are computed at once */
  LEAST = 16,   /* tokens for which this is faster than token by token */
  SMALLEST_LOG = -10000, /* of a decay: e to it is 0 */
  PARTS = 2     /* bfloat16 numbers that stand for a number that is added to h */
};

_Static_assert((int)CHUNK == DEPTH && (int)WIDTH == DEPTH, "two tiles side by side have a column for each token or channel");

/* The values that the heads of a group share in a chunk. C: (tokens, N); B: (N, tokens); products: C_t^T B_s. */
typedef struct {
  uint16_t C[CHUNK * STATES], B[STATES * CHUNK];
  float products[CHUNK * CHUNK];
} Shared;

/* A task's memory: what heads share, and a chunk of one head. Arrays of uint32_t have the bfloat16 numbers of two rows, of
   which the first is even, side by side. */
typedef struct {
  Shared shared[PIECE];
  uint32_t pairs[STATES / 2 * CHUNK];                                      /* of B, while products are computed */
  uint32_t state[STATES / 2 * WIDTH];                                      /* h before the chunk */
  uint32_t x[CHUNK / 2 * WIDTH], scaled[PARTS][CHUNK / 2 * WIDTH];         /* x; times e^(c_last - c_s) dt_s */
  uint16_t factors[CHUNK * CHUNK];                                         /* (C_t^T B_s) e^(c_t - c_s) dt_s */
  float before[CHUNK * WIDTH], within[CHUNK * WIDTH];                      /* C_t^T h; the sum over s <= t */
  float decays[CHUNK], later[CHUNK];                                       /* e^c_t; e^(c_last - c_s) dt_s */
} Work;

/* 32 elements, in two vectors. */
typedef struct { __m512 low, high; } Row;

INLINE_FOR(TARGET_AMX) Row load_floats(const float *from) {
  return (Row){_mm512_loadu_ps(from), _mm512_loadu_ps(from + SIDE)};
}

INLINE_FOR(TARGET_AMX) Row widened(__m512i row) {
  __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(row));
  __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(row, 1));
  return (Row){(__m512)_mm512_slli_epi32(low, 16), (__m512)_mm512_slli_epi32(high, 16)};
}

INLINE_FOR(TARGET_AMX) __m512i narrowed(Row row) { return (__m512i)_mm512_cvtne2ps_pbh(row.high, row.low); }

/* WIDTH elements of an input in bfloat16, from `place` on; zeros unless the token is one of the `count` tokens from t on. */
INLINE_FOR(TARGET_AMX) __m512i load_input(const Ssd *a, const void *p, int which, ptrdiff_t b, ptrdiff_t t, ptrdiff_t i,
                                          ptrdiff_t count, ptrdiff_t place) {
  if (i >= count) return _mm512_setzero_si512();
  const void *from = row(a, p, which, b, t + i, place, a->type);
  return a->type == BFLOAT16 ? _mm512_loadu_si512(from) : narrowed(load_floats(from));
}

INLINE_FOR(TARGET_AMX) Row times(float factor, Row row) {
  __m512 all = _mm512_set1_ps(factor);
  return (Row){_mm512_mul_ps(all, row.low), _mm512_mul_ps(all, row.high)};
}

/* Two rows side by side. */
INLINE_FOR(TARGET_AMX) void store_pairs(__m512i first, __m512i second, uint32_t *to) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                       36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(SIDE));
  _mm512_store_si512(to, _mm512_permutex2var_epi16(first, low, second));
  _mm512_store_si512(to + SIDE, _mm512_permutex2var_epi16(first, high, second));
}

/* The sums of 32 x 32 numbers are in tiles 0 to 3; `stride` is the distance of their rows in elements. */
INLINE_FOR(TARGET_AMX) void zero_sums(void) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}
INLINE_FOR(TARGET_AMX) void load_sums(const float *from, ptrdiff_t stride) {
  _tile_loadd(0, from, stride * 4);
  _tile_loadd(1, from + SIDE, stride * 4);
  _tile_loadd(2, from + SIDE * stride, stride * 4);
  _tile_loadd(3, from + SIDE * stride + SIDE, stride * 4);
}
INLINE_FOR(TARGET_AMX) void store_sums(float *to, ptrdiff_t stride) {
  _tile_stored(0, to, stride * 4);
  _tile_stored(1, to + SIDE, stride * 4);
  _tile_stored(2, to + SIDE * stride, stride * 4);
  _tile_stored(3, to + SIDE * stride + SIDE, stride * 4);
}

/* Adds the products of 32 rows of a, `stride` apart, of 32 columns, with 32 rows of b in pairs, of WIDTH columns each. Numbers of
   b have two parts if b_next is not 0: the second ones are b_next elements further. */
INLINE_FOR(TARGET_AMX) void add_product(const uint16_t *a, ptrdiff_t stride, const uint32_t *b, ptrdiff_t b_next) {
  __asm__ volatile("" ::: "memory"); /* stores must precede the loads of tiles */
  _tile_loadd(4, a, stride * 2);
  _tile_loadd(5, a + SIDE * stride, stride * 2);
  for (int i = 0; i < (b_next ? PARTS : 1); i++, b += b_next) {
    _tile_loadd(6, b, WIDTH * 4);
    _tile_loadd(7, b + SIDE, WIDTH * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

/* B of SIDE pairs of states from n on: as it is multiplied by C, and with its states as rows. */
INLINE_FOR(TARGET_AMX) void fill_B(const Ssd *a, Work *w, Shared *shared, ptrdiff_t b, ptrdiff_t group, ptrdiff_t t,
                                   ptrdiff_t count, ptrdiff_t n) {
  const __m512i even = _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26, 24, 22,
                                        20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odd = _mm512_add_epi16(even, _mm512_set1_epi16(1));
  __m512i rows[2][SIDE];
  for (int i = 0; i < CHUNK; i++) rows[i / SIDE][i % SIDE] = load_input(a, a->B, B_, b, t, i, count, group * a->N + n);
  transpose_16(rows[0]);
  transpose_16(rows[1]);
  for (int j = 0; j < SIDE; j++) {
    uint32_t *pairs = w->pairs + (n / 2 + j) * CHUNK;
    uint16_t *states = shared->B + (n + 2 * j) * CHUNK;
    _mm512_store_si512(pairs, rows[0][j]);
    _mm512_store_si512(pairs + SIDE, rows[1][j]);
    _mm512_store_si512(states, _mm512_permutex2var_epi16(rows[0][j], even, rows[1][j]));
    _mm512_store_si512(states + CHUNK, _mm512_permutex2var_epi16(rows[0][j], odd, rows[1][j]));
  }
}

/* Computes the values that the heads of a group share, for the `count` tokens from t on. */
INLINE_FOR(TARGET_AMX) void fill_shared(const Ssd *a, Work *w, Shared *shared, ptrdiff_t b, ptrdiff_t group, ptrdiff_t t,
                                        ptrdiff_t count) {
  ptrdiff_t N = a->N;
  for (int i = 0; i < CHUNK; i++)
    for (ptrdiff_t n = 0; n < N; n += DEPTH)
      _mm512_store_si512(shared->C + i * N + n, load_input(a, a->C, C_, b, t, i, count, group * N + n));
  zero_sums();
  for (ptrdiff_t n = 0; n < N; n += DEPTH) {
    fill_B(a, w, shared, b, group, t, count, n);
    add_product(shared->C + n, N, w->pairs + n / 2 * CHUNK, 0);
  }
  store_sums(shared->products, CHUNK);
}

/* The factors of a head's chunk; returns e^c_last. After `count` tokens, dt counts as 0. */
INLINE_FOR(TARGET_AMX) float fill_factors(const Ssd *a, Work *w, const Shared *shared, ptrdiff_t b, ptrdiff_t head,
                                          ptrdiff_t t, ptrdiff_t count) {
  float A = -exp_(a->A_log[head]), dt[CHUNK];
  double logs[CHUNK], sum = 0; /* differences of large numbers are exact enough in double */
  for (ptrdiff_t i = 0; i < CHUNK; i++) {
    dt[i] = i < count ? a->dt[(b * a->seq + t + i) * a->heads + head] : 0;
    float step = dt[i] * A;
    logs[i] = sum += step < SMALLEST_LOG ? SMALLEST_LOG : step;
  }
#pragma omp simd
  for (int i = 0; i < CHUNK; i++)
    w->decays[i] = exp_((float)logs[i]), w->later[i] = exp_((float)(sum - logs[i])) * dt[i];
  for (int i = 0; i < CHUNK; i++) {
    float values[CHUNK];
#pragma omp simd
    for (int s = 0; s < CHUNK; s++) {
      float value = shared->products[i * CHUNK + s] * exp_((float)(logs[i] - logs[s])) * dt[s];
      values[s] = s <= i ? value : 0;
    }
    _mm512_store_si512(w->factors + i * CHUNK, narrowed(load_floats(values)));
  }
  return w->decays[CHUNK - 1];
}

/* x of WIDTH channels from `place` on, as it is and scaled. */
INLINE_FOR(TARGET_AMX) void fill_x(const Ssd *a, Work *w, ptrdiff_t b, ptrdiff_t t, ptrdiff_t count, ptrdiff_t place) {
  __m512i own[2], scaled[2][PARTS];
  for (int i = 0; i < CHUNK; i++) {
    own[i % 2] = load_input(a, a->x, X, b, t, i, count, place);
    Row values = times(w->later[i], widened(own[i % 2]));
    split(values.low, values.high, scaled[i % 2], PARTS);
    if (i % 2 == 0) continue;
    store_pairs(own[0], own[1], w->x + i / 2 * WIDTH);
    for (int p = 0; p < PARTS; p++) store_pairs(scaled[0][p], scaled[1][p], w->scaled[p] + i / 2 * WIDTH);
  }
}

/* WIDTH channels of the state h, whose rows are `stride` apart, in bfloat16; h is multiplied by `decay`. */
INLINE_FOR(TARGET_AMX) void fill_state(Work *w, float *h, ptrdiff_t stride, float decay, ptrdiff_t N) {
  __m512i rows[2];
  for (ptrdiff_t n = 0; n < N; n++, h += stride) {
    Row values = load_floats(h), later = times(decay, values);
    rows[n % 2] = narrowed(values);
    _mm512_storeu_ps(h, later.low);
    _mm512_storeu_ps(h + SIDE, later.high);
    if (n % 2) store_pairs(rows[0], rows[1], w->state + n / 2 * WIDTH);
  }
}

/* y of `count` tokens and WIDTH channels of a head from c on. */
INLINE_FOR(TARGET_AMX) void write_y(const Ssd *a, const Work *w, ptrdiff_t b, ptrdiff_t head, ptrdiff_t t, ptrdiff_t count,
                                    ptrdiff_t c) {
  for (ptrdiff_t i = 0; i < count; i++) {
    const void *x = row(a, a->x, X, b, t + i, head * a->P + c, a->type);
    Row skipped = times(a->D[head], a->type == BFLOAT16 ? widened(_mm512_loadu_si512(x)) : load_floats(x));
    Row before = times(w->decays[i], load_floats(w->before + i * WIDTH)), within = load_floats(w->within + i * WIDTH);
    __m512 low = _mm512_add_ps(_mm512_add_ps(skipped.low, before.low), within.low);
    __m512 high = _mm512_add_ps(_mm512_add_ps(skipped.high, before.high), within.high);
    void *to = at(a->y, ((b * a->seq + t + i) * a->heads + head) * a->P + c, a->type);
    if (a->type == BFLOAT16) _mm512_storeu_si512(to, narrowed((Row){low, high}));
    else _mm512_storeu_ps(to, low), _mm512_storeu_ps((float *)to + SIDE, high);
  }
}

/* Rows of x and y are far apart. */
INLINE_FOR(TARGET_AMX) void prefetch_rows(const Ssd *a, ptrdiff_t b, ptrdiff_t head, ptrdiff_t t, ptrdiff_t count) {
  for (ptrdiff_t i = 0; i < count; i++)
    for (ptrdiff_t c = 0; c < a->P; c += a->type == BFLOAT16 ? WIDTH : SIDE) { /* a cache line */
      __builtin_prefetch(row(a, a->x, X, b, t + i, head * a->P + c, a->type));
      __builtin_prefetch(at(a->y, ((b * a->seq + t + i) * a->heads + head) * a->P + c, a->type), 1);
    }
}

/* The `count` tokens from t on of a head. */
INLINE_FOR(TARGET_AMX) void forward_chunk(const Ssd *a, Work *w, const Shared *shared, ptrdiff_t b, ptrdiff_t head,
                                          ptrdiff_t t, ptrdiff_t count) {
  prefetch_rows(a, b, head, t, count);
  float decay = fill_factors(a, w, shared, b, head, t, count);
  for (ptrdiff_t c = 0; c < a->P; c += WIDTH) {
    float *h = a->next + b * a->strides[NEXT] + head * a->N * a->P + c;
    fill_x(a, w, b, t, count, head * a->P + c);
    fill_state(w, h, a->P, decay, a->N);
    zero_sums();
    for (ptrdiff_t n = 0; n < a->N; n += DEPTH)
      add_product(shared->C + n, a->N, w->state + n / 2 * WIDTH, 0);
    store_sums(w->before, WIDTH);
    zero_sums();
    add_product(w->factors, CHUNK, w->x, 0);
    store_sums(w->within, WIDTH);
    write_y(a, w, b, head, t, count, c);
    for (ptrdiff_t n = 0; n < a->N; n += DEPTH) {
      load_sums(h + n * a->P, a->P);
      add_product(shared->B + n * CHUNK, CHUNK, w->scaled[0], CHUNK / 2 * WIDTH);
      store_sums(h + n * a->P, a->P);
    }
  }
}

/* Heads `first` to `last` of a group of sequence b. */
TARGET_AMX static void forward_heads(const Ssd *a, Work *w, ptrdiff_t b, ptrdiff_t group, ptrdiff_t first, ptrdiff_t last) {
  configure_tiles();
  unsigned before = begin_flushing();
  for (ptrdiff_t head = first; head < last; head++) own_state(a, b, head, 0, a->P);
  for (ptrdiff_t start = 0; start < a->seq; start += PIECE * CHUNK) {
    ptrdiff_t stop = a->seq < start + PIECE * CHUNK ? a->seq : start + PIECE * CHUNK;
    for (ptrdiff_t t = start; t < stop; t += CHUNK)
      fill_shared(a, w, &w->shared[(t - start) / CHUNK], b, group, t, stop - t < CHUNK ? stop - t : CHUNK);
    for (ptrdiff_t head = first; head < last; head++)
      for (ptrdiff_t t = start; t < stop; t += CHUNK)
        forward_chunk(a, w, &w->shared[(t - start) / CHUNK], b, head, t, stop - t < CHUNK ? stop - t : CHUNK);
  }
  end_flushing(before);
  _tile_release();
}

/* 1 if no element of x is infinite or NaN in bfloat16, in the tokens `first` to `last` of the concatenated sequences. */
TARGET_AMX static int are_finite(const Ssd *a, ptrdiff_t first, ptrdiff_t last) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  for (ptrdiff_t t = first; t < last; t++)
    for (ptrdiff_t c = 0; c < a->heads * a->P; c += WIDTH) {
      __m512i x = load_input(a, a->x, X, t / a->seq, t % a->seq, 0, 1, c);
      if (_mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponent), exponent)) return 0;
    }
  return 1;
}

static int is_finite(const Ssd *a, int threads) {
  ptrdiff_t tokens = a->batch * a->seq, share = (tokens + threads - 1) / threads;
  int finite = 1;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(& : finite)
  for (ptrdiff_t first = 0; first < tokens; first += share)
    finite &= are_finite(a, first, first + share < tokens ? first + share : tokens);
  return finite;
}

int fits_ssd_amx(const Ssd *a, int threads) {
  int fits = a->batch && a->seq >= LEAST && a->P % WIDTH == 0 && a->N % DEPTH == 0 && a->N <= STATES;
  int is_allowed = a->type == BFLOAT16 || a->may_round;
  return fits && is_allowed && !a->saved && !a->one_by_one && is_finite(a, threads);
}

int ssd_amx(const Ssd *a, int threads) {
  int failed = 0;
  ptrdiff_t heads = a->heads / a->groups, groups = a->batch * a->groups;
  ptrdiff_t wanted = groups % threads == 0 ? 1 : threads < heads ? threads : heads, share = (heads + wanted - 1) / wanted;
  ptrdiff_t shares = (heads + share - 1) / share;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(| : failed)
  for (ptrdiff_t task = 0; task < groups * shares; task++) {
    ptrdiff_t sequence = task / shares / a->groups, group = task / shares % a->groups, first = task % shares * share;
    ptrdiff_t last = first + share < heads ? first + share : heads;
    Work *w = allocate(sizeof(Work));
    if (w) forward_heads(a, w, sequence, group, group * heads + first, group * heads + last);
    else failed = 1;
    free(w);
  }
  return failed;
}
#endif
