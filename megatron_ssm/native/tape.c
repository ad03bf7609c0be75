/* Runs a tape, for one token of each sequence of a batch, several tokens that may be rejected, or a piece of a prompt. Python is only
   needed where the tape stops, and for all-reduces outside shared memory. */
#include <math.h>

#include "tape.h"

enum { MANY = 48 }; /* the least number of rows for which several threads compute step sizes and conversions */

/* Products */

/* The product of x and the matrix of o, from element `first` on. n: out, in. */
static Product product(const Tape *t, const Op *o, ptrdiff_t first, const void *x, void *y) {
  const Matrix *m = &o->matrix;
  return (Product){.weight = first ? at(m->values, first, (int)m->type) : m->values, .scales = m->scales, .bias = o->bias,
                   .x = x, .y = y, .batch = tape_rows(t), .out = o->n[0], .in = o->n[1], .weight_stride = o->n[1],
                   .x_stride = o->x.stride, .y_stride = o->n[0], .weight_type = (int)m->type, .type = o->type,
                   .threads = t->threads};
}

/* y = x W^T + bias. */
static int matmul(const Tape *t, const Op *o, void *y) {
  Product p = product(t, o, 0, row(t, &o->x, 0, o->type), y);
  return multiply(&p);
}

/* A product for each head, which has its own rows or columns of W. n: out, in, heads; the elements of W, and the columns of x and of y,
   between two heads; the elements between two rows of W. */
static int head_matmuls(const Tape *t, const Op *o) {
  int failed = 0, type = o->type;
  for (ptrdiff_t h = 0; h < o->n[2]; h++) {
    const void *x = at(row(t, &o->x, 0, type), h * o->n[4], type);
    Product p = product(t, o, h * o->n[3], x, at(row(t, &o->y, 0, type), h * o->n[5], type));
    p.weight_stride = o->n[6], p.y_stride = o->y.stride;
    failed |= multiply(&p);
  }
  return failed;
}

CLONES static void widen_rows(const void *from, float *to, ptrdiff_t start, ptrdiff_t stop) {
#pragma omp simd
  for (ptrdiff_t i = start; i < stop; i++) to[i] = get(from, i, BFLOAT16);
}

/* The logits of the head, as float32; -inf beyond this rank's part of the vocabulary. n: out, in, width of the logits. y: a
   temporary, unless the product is the logits. */
static int head_logits(const Tape *t, const Op *o) {
  ptrdiff_t rows = tape_rows(t), out = o->n[0], width = o->n[2];
  if (o->type == FLOAT32 && out == width) return matmul(t, o, t->logits);
  if (out && matmul(t, o, row(t, &o->y, 0, o->type))) return 1;
#pragma omp parallel for num_threads(t->threads) if (t->threads > 1 && rows > 1)
  for (ptrdiff_t r = 0; r < rows; r++) {
    float *to = t->logits + r * width;
    if (o->type == FLOAT32) memcpy(to, row(t, &o->y, r, FLOAT32), out * sizeof(float));
    else widen_rows(row(t, &o->y, r, o->type), to, 0, out);
    for (ptrdiff_t i = out; i < width; i++) to[i] = -INFINITY;
  }
  return 0;
}

/* Rows of numbers */

/* The embeddings of this rank's ids; zeros for the ids of other ranks. n: the first id, ids, size. */
static void embed(const Tape *t, const Op *o) {
  const Matrix *m = &o->matrix;
  ptrdiff_t first = o->n[0], ids = o->n[1], size = o->n[2];
  for (ptrdiff_t r = 0; r < tape_rows(t); r++) {
    ptrdiff_t id = t->ids[r] - first, block = id * (size / BLOCK);
    void *to = row(t, &o->y, r, o->type);
    if (id < 0 || id >= ids) memset(to, 0, bytes_of(size, o->type));
    else if (!is_quantized(m->type)) memcpy(to, at(m->values, id * size, o->type), bytes_of(size, o->type));
    else
      widen((const char *)m->values + block * bytes_per_block(m->type), m->scales + block, to, 1, size, m->type, o->type, 1);
  }
}

/* y = f x in another type. n: size. */
INLINE void convert_row(const void *x, void *y, ptrdiff_t size, float factor, int from, int type) {
#pragma omp simd
  for (ptrdiff_t i = 0; i < size; i++) put(y, i, factor * get(x, i, from), type);
}
CLONES static void convert_any(const void *x, void *y, ptrdiff_t size, float factor, int from, int type) {
  if (from == FLOAT32 && type == FLOAT32) convert_row(x, y, size, factor, FLOAT32, FLOAT32);
  else if (from == FLOAT32) convert_row(x, y, size, factor, FLOAT32, BFLOAT16);
  else if (type == FLOAT32) convert_row(x, y, size, factor, BFLOAT16, FLOAT32);
  else convert_row(x, y, size, factor, BFLOAT16, BFLOAT16);
}

/* y = x + f z. n: size. */
INLINE void add_row(const void *x, const void *z, void *y, ptrdiff_t size, float factor, int x_type, int z_type) {
#pragma omp simd
  for (ptrdiff_t i = 0; i < size; i++) put(y, i, get(x, i, x_type) + factor * get(z, i, z_type), x_type);
}
CLONES static void add_any(const void *x, const void *z, void *y, ptrdiff_t size, float factor, int x_type, int z_type) {
  if (x_type == FLOAT32 && z_type == FLOAT32) add_row(x, z, y, size, factor, FLOAT32, FLOAT32);
  else if (x_type == FLOAT32) add_row(x, z, y, size, factor, FLOAT32, BFLOAT16);
  else if (z_type == FLOAT32) add_row(x, z, y, size, factor, BFLOAT16, FLOAT32);
  else add_row(x, z, y, size, factor, BFLOAT16, BFLOAT16);
}

/* [x | z] -> y: one after the other in each row. n: the columns of both. */
static void concat(const Tape *t, const Op *o) {
  for (ptrdiff_t r = 0; r < tape_rows(t); r++) {
    char *y = row(t, &o->y, r, o->type);
    memcpy(y, row(t, &o->x, r, o->type), bytes_of(o->n[0], o->type));
    memcpy(y + bytes_of(o->n[0], o->type), row(t, &o->z, r, o->type), bytes_of(o->n[1], o->type));
  }
}

/* y = x + f0 * (f1 * sum + bias), rounded at each step as torch rounds; without x if flag is set. bias, weight: two biases, or NULL.
   squares: the sums of squares that normalize the sum, which then is FLOAT32; or NULL. */
INLINE void residual_row(const Op *o, const void *x, const void *sum, const float *squares, void *y, ptrdiff_t size, int type,
                         int sum_type) {
  float scale = squares ? 1 / sqrtf(*squares / o->n[1] + o->f[2]) : 1;
#pragma omp simd
  for (ptrdiff_t i = 0; i < size; i++) {
    float added = squares ? rounded(scale * ((const float *)sum)[i], type) : get(sum, i, type);
    added = rounded(o->f[1] * added, type);
    if (o->bias) added = rounded(added + get(o->bias, i, type), type);
    if (o->weight) added = rounded(added + get(o->weight, i, type), type);
    put(y, i, (o->flag ? 0 : get(x, i, sum_type)) + rounded(o->f[0] * added, type), sum_type);
  }
}
CLONES static void residual_any(const Op *o, const void *x, const void *sum, const float *squares, void *y) {
  if (o->type == FLOAT32) residual_row(o, x, sum, squares, y, o->n[0], FLOAT32, FLOAT32);
  else if (o->from_type == FLOAT32) residual_row(o, x, sum, squares, y, o->n[0], BFLOAT16, FLOAT32);
  else residual_row(o, x, sum, squares, y, o->n[0], BFLOAT16, BFLOAT16);
}

/* n: size, channels of a group of the gated norm. x and y are of from_type. */
static void residual(const Tape *t, const Op *o) {
  const Sum *sum = &t->sums[o->sum];
  ptrdiff_t rows = tape_rows(t), share = rows_per_thread(rows, o->n[0], t->threads);
#pragma omp parallel for num_threads(t->threads) if (share < rows)
  for (ptrdiff_t start = 0; start < rows; start += share)
    for (ptrdiff_t r = start; r < rows && r < start + share; r++)
      residual_any(o, row(t, &o->x, r, o->from_type), at(sum->total, r * o->n[0], sum->squares ? FLOAT32 : o->type),
                   sum->squares ? sum->squares + r : NULL, row(t, &o->y, r, o->from_type));
}

/* n: size, activation. f: the factor of x. flag: 1 if it is gated. */
static void activate(const Tape *t, const Op *o) {
  ptrdiff_t rows = tape_rows(t), share = rows_per_thread(rows, 8 * o->n[0], t->threads);
#pragma omp parallel for num_threads(t->threads) if (share < rows)
  for (ptrdiff_t start = 0; start < rows; start += share)
    for (ptrdiff_t r = start; r < rows && r < start + share; r++)
      activate_any(row(t, &o->x, r, o->type), row(t, &o->z, r, o->type), row(t, &o->y, r, o->type), o->n[0], o->f[0],
                   (int)o->n[1], o->flag, o->type);
}

/* y = sigmoid(z) x, each rounded; z: one number. n: size. */
CLONES static void score_row(const void *x, float score, void *y, ptrdiff_t size, int type) {
  if (type == FLOAT32)
#pragma omp simd
    for (ptrdiff_t i = 0; i < size; i++) put(y, i, score * get(x, i, FLOAT32), FLOAT32);
  else
#pragma omp simd
    for (ptrdiff_t i = 0; i < size; i++) put(y, i, score * get(x, i, BFLOAT16), BFLOAT16);
}
static void score(const Tape *t, const Op *o) {
  for (ptrdiff_t r = 0; r < tape_rows(t); r++) {
    float z = sigmoid_(get(row(t, &o->z, r, o->type), 0, o->type), LEAST_EXPONENT);
    score_row(row(t, &o->x, r, o->type), rounded(z, o->type), row(t, &o->y, r, o->type), o->n[0], o->type);
  }
}

/* Recurrences */

/* The number of sequences from b on that are neighbours in the cache. */
static ptrdiff_t neighbours(const Tape *t, ptrdiff_t b) {
  ptrdiff_t count = 1;
  while (b + count < t->batch && t->sequences[b + count] == t->sequences[b] + count) count++;
  return count;
}

/* x -> y, (rows, channels). n: channels, taps. bias: may be NULL. */
static void conv(const Tape *t, const Op *o) {
  const Slot *s = &t->slots[o->slot];
  for (ptrdiff_t b = 0, count; b < t->batch; b += count) {
    count = neighbours(t, b);
    void *history = at(s->data, t->sequences[b] * s->stride, o->type);
    causal_conv(row(t, &o->x, b * t->tokens, o->type), o->weight, o->bias, history,
                row(t, &o->y, b * t->tokens, o->type), t->speculative ? NULL : history, count, t->tokens, o->n[0], o->n[1],
                t->tokens * o->x.stride, o->x.stride, s->stride, o->type, t->threads);
  }
}

/* Advances the inputs of a convolution by the first `count` tokens of sequence b. */
static void advance_conv(const Tape *t, const Op *o, ptrdiff_t b, ptrdiff_t count) {
  const Slot *s = &t->slots[o->slot];
  void *history = at(s->data, t->sequences[b] * s->stride, o->type);
  ptrdiff_t channels = o->n[0];
  for (ptrdiff_t k = 0; k < o->n[1] - 1; k++) {
    ptrdiff_t token = k + count - (o->n[1] - 1); /* negative: in the history */
    const void *from = token < 0 ? at(history, (k + count) * channels, o->type)
                                 : row(t, &o->x, b * t->tokens + token, o->type);
    memmove(at(history, k * channels, o->type), from, bytes_of(channels, o->type));
  }
}

/* y = softplus(x + dt_bias) as float32, clamped to [f0, f1] in prompts. n: heads. */
static void step_sizes(const Tape *t, const Op *o) {
  ptrdiff_t rows = tape_rows(t), heads = o->n[0];
  float least = t->prompt ? o->f[0] : -INFINITY, most = t->prompt ? o->f[1] : INFINITY;
#pragma omp parallel for num_threads(t->threads) if (t->threads > 1 && rows >= MANY)
  for (ptrdiff_t r = 0; r < rows; r++)
    for (ptrdiff_t h = 0; h < heads; h++) {
      float dt = softplus_(get(row(t, &o->x, r, o->type), h, o->type) + o->dt_bias[h], LEAST_EXPONENT);
      ((float *)row(t, &o->y, r, FLOAT32))[h] = dt < least ? least : dt > most ? most : dt; /* NaN stays */
    }
}

/* The addresses of the state of sequence b before and after the tokens. */
typedef struct {
  float *state, *next;
  ptrdiff_t next_stride;
} States;

INLINE States states_of(const Tape *t, const Op *o, ptrdiff_t b) {
  const Slot *s = &t->slots[o->slot];
  float *state = (float *)s->data + t->sequences[b] * s->stride;
  if (!t->speculative) return (States){state, state, s->stride};
  return (States){state, (float *)s->next + b * s->next_stride, s->next_stride};
}

/* Mamba-2's recurrence for the first `tokens` tokens of `batch` sequences from b on. x: [x | B | C], z: dt as float32. n: heads,
   channels of a head, groups, N. flag: may_round. */
static int scan_ssd(const Tape *t, const Op *o, ptrdiff_t b, ptrdiff_t batch, ptrdiff_t tokens, States s) {
  ptrdiff_t stride = o->x.stride, step = t->tokens * stride, first = b * t->tokens, heads = o->n[0];
  ptrdiff_t strides[] = {step, stride, step, stride, step, stride, t->slots[o->slot].stride, s.next_stride};
  void *x = row(t, &o->x, first, o->type), *B = at(x, heads * o->n[1], o->type), *C = at(B, o->n[2] * o->n[3], o->type);
  return ssd(x, row(t, &o->z, first, FLOAT32), o->A_log, B, C, o->D, s.state, row(t, &o->y, first, o->type), s.next, NULL,
             strides, batch, tokens, heads, o->n[1], o->n[2], o->n[3], o->type, t->speculative, o->flag, t->threads);
}

/* Mamba-1's recurrence. x: the output of the convolution, z: dt, sum: [dt | B | C] of each head. n: channels, heads, rank of dt, N, and
   the view of the gate (offset, first, stride). */
static void scan_selective(const Tape *t, const Op *o, ptrdiff_t b, ptrdiff_t batch, ptrdiff_t tokens, States s, int gated) {
  ptrdiff_t channels = o->n[0], heads = o->n[1], rank = o->n[2], N = o->n[3], width = rank + 2 * N, type = o->type;
  ptrdiff_t first = b * t->tokens, each = t->tokens;
  View gate = {o->n[4], o->n[5], o->n[6]};
  void *parameters = at(t->sums[o->sum].total, first * heads * width, type);
  void *B = at(parameters, rank, type), *C = at(B, N, type);
  ptrdiff_t strides[] = {each * o->x.stride, o->x.stride, each * o->z.stride, o->z.stride, each * heads * width,
                         heads * width, each * heads * width, heads * width, each * gate.stride, gate.stride,
                         t->slots[o->slot].stride, s.next_stride, width};
  selective_scan(row(t, &o->x, first, type), row(t, &o->z, first, type), o->A_log, B, C, o->D,
                 gated ? row(t, &gate, first, type) : NULL, o->dt_bias, s.state, row(t, &o->y, first, type), s.next, NULL,
                 strides, batch, tokens, channels, heads, N, 0, type, t->threads);
}

/* The gated delta rule. x: [q | k | v], z: [beta | g] as float32. n: key heads, heads, K, V. */
static int scan_delta(const Tape *t, const Op *o, ptrdiff_t b, ptrdiff_t batch, ptrdiff_t tokens, States s) {
  ptrdiff_t stride = o->x.stride, step = t->tokens * stride, first = b * t->tokens, keys = o->n[0] * o->n[2];
  ptrdiff_t rates = o->z.stride, strides[] = {step, stride, step, stride, step, stride, t->tokens * rates, rates,
                                              t->slots[o->slot].stride, s.next_stride};
  void *q = row(t, &o->x, first, o->type), *k = at(q, keys, o->type);
  const float *beta = row(t, &o->z, first, FLOAT32);
  return gated_delta(q, k, at(k, keys, o->type), beta + o->n[1], beta, s.state, row(t, &o->y, first, o->type), s.next, strides,
                     batch, tokens, o->n[0], o->n[1], o->n[2], o->n[3], o->type, t->speculative, t->threads);
}

/* x: [b | a], y: [beta | g] as float32. n: heads. f: the factor of sigmoid(b). */
static void rates(const Tape *t, const Op *o) {
  for (ptrdiff_t r = 0; r < tape_rows(t); r++)
    delta_rates(row(t, &o->x, r, o->type), o->A_log, o->dt_bias, row(t, &o->y, r, FLOAT32), o->n[0], o->f[0], o->type);
}

static int recurrence(const Tape *t, const Op *o) {
  int failed = 0;
  for (ptrdiff_t b = 0, count; b < t->batch; b += count) {
    count = neighbours(t, b);
    if (o->kind == SSD) failed |= scan_ssd(t, o, b, count, t->tokens, states_of(t, o, b));
    else if (o->kind == GATED_DELTA) failed |= scan_delta(t, o, b, count, t->tokens, states_of(t, o, b));
    else scan_selective(t, o, b, count, t->tokens, states_of(t, o, b), 1);
  }
  return failed;
}

/* The norms of dt, of B and of C in the sum of x_proj, in place. n: heads, rank of dt, N. f: eps. weight: (width) for all three, or
   NULL. */
static void inner_norms(const Tape *t, const Op *o) {
  ptrdiff_t rank = o->n[1], N = o->n[2], width = rank + 2 * N, cuts[] = {0, rank, rank + N, width};
  for (ptrdiff_t i = 0; i < tape_rows(t) * o->n[0]; i++)
    for (int k = 0; k < 3; k++) {
      void *part = at(t->sums[o->sum].total, i * width + cuts[k], o->type);
      const void *weight = o->weight ? at((void *)o->weight, cuts[k], o->type) : NULL;
      rms_norm(part, weight, part, 1, cuts[k + 1] - cuts[k], o->f[0], 0, o->type, o->type, 1);
    }
}

/* y = the sum of the squares of x. n: size. */
CLONES static float squares_of(const void *x, ptrdiff_t size, int type) {
  float sum = 0;
  if (type == FLOAT32) {
#pragma omp simd reduction(+ : sum)
    for (ptrdiff_t i = 0; i < size; i++) sum += get(x, i, FLOAT32) * get(x, i, FLOAT32);
  } else {
#pragma omp simd reduction(+ : sum)
    for (ptrdiff_t i = 0; i < size; i++) sum += get(x, i, BFLOAT16) * get(x, i, BFLOAT16);
  }
  return sum;
}

/* A norm over numbers on all ranks, in place for this rank's x. n: size of x, the column of the sum with the squares, the width of the
   sum, the count of the numbers. f: eps, offset. */
static void whole_norm(const Tape *t, const Op *o) {
  const float *squares = t->sums[o->sum].total;
  for (ptrdiff_t r = 0; r < tape_rows(t); r++) {
    void *x = row(t, &o->x, r, o->type);
    float scale = 1 / sqrtf(squares[r * o->n[2] + o->n[1]] / o->n[3] + o->f[0]);
    scale_row(x, o->weight, x, o->n[0], scale, o->f[1], o->type);
  }
}

/* Attention */

/* Rotates the heads of x in place: elements i and i + size/2 of the first `size` of each. weight: (positions, size) of `type`,
   cosines and then sines. n: heads, head_dim, size. */
INLINE void rotate_row(void *x, const void *table, ptrdiff_t heads, ptrdiff_t dim, ptrdiff_t size, int type) {
  ptrdiff_t half = size / 2;
  for (ptrdiff_t h = 0; h < heads; h++)
#pragma omp simd
    for (ptrdiff_t i = 0; i < half; i++) {
      float c = get(table, i, type), s = get(table, half + i, type);
      float a = get(x, h * dim + i, type), b = get(x, h * dim + half + i, type);
      put(x, h * dim + i, a * c - b * s, type);
      put(x, h * dim + half + i, b * c + a * s, type);
    }
}

INLINE ptrdiff_t position(const Tape *t, ptrdiff_t r) { return t->lengths[t->sequences[r / t->tokens]] + r % t->tokens; }

static void rotate(const Tape *t, const Op *o) {
  for (ptrdiff_t r = 0; r < tape_rows(t); r++) {
    const void *table = at(o->weight, position(t, r) * o->n[2], o->type);
    void *x = row(t, &o->x, r, o->type);
    if (o->type == FLOAT32) rotate_row(x, table, o->n[0], o->n[1], o->n[2], FLOAT32);
    else rotate_row(x, table, o->n[0], o->n[1], o->n[2], BFLOAT16);
  }
}

/* Stores x, n[0] numbers of each token, at its position. */
static void append(const Tape *t, const Op *o) {
  const Slot *s = &t->slots[o->slot];
  for (ptrdiff_t r = 0; r < tape_rows(t); r++)
    memcpy(at(s->data, t->sequences[r / t->tokens] * s->stride + position(t, r) * o->n[0], o->type),
           row(t, &o->x, r, o->type), bytes_of(o->n[0], o->type));
}

/* x: the queries. slot: the slot of the keys; the next one has the values. n: heads, key/value heads, head_dim. f: scale. */
static int attend(const Tape *t, const Op *o) {
  const Slot *keys = &t->slots[o->slot], *values = keys + 1;
  ptrdiff_t rows = tape_rows(t), heads = o->n[0], kv_heads = o->n[1], shared = heads / kv_heads, dim = o->n[2], stride = kv_heads * dim;
  ptrdiff_t longest = 0, work = 0;
  for (ptrdiff_t r = 0; r < rows; r++) {
    ptrdiff_t count = position(t, r) + 1;
    longest = count > longest ? count : longest, work += count;
  }
  int failed = 0, several = t->threads > 1 && work * heads * dim >= 1 << 15;
  ptrdiff_t together = shared < MOST_HEADS ? shared : MOST_HEADS; /* heads of a task; fewer, so that each thread has one */
  while (several && together > 1 && rows * kv_heads * ((shared + together - 1) / together) < t->threads) together--;
  ptrdiff_t parts = (shared + together - 1) / together;
#pragma omp parallel for num_threads(t->threads) if (several) reduction(| : failed)
  for (ptrdiff_t task = 0; task < rows * kv_heads * parts; task++) {
    ptrdiff_t r = task / (kv_heads * parts), kv = task / parts % kv_heads, part = task % parts * together;
    ptrdiff_t h = kv * shared + part, count = shared - part < together ? shared - part : together;
    ptrdiff_t sequence = t->sequences[r / t->tokens];
    float *scores = malloc((together * longest + dim) * sizeof(float));
    if (scores)
      attend_heads(at(row(t, &o->x, r, o->type), h * dim, o->type), at(keys->data, sequence * keys->stride + kv * dim, o->type),
                   at(values->data, sequence * values->stride + kv * dim, o->type),
                   at(row(t, &o->y, r, o->type), h * dim, o->type), position(t, r) + 1, dim, stride, o->f[0], scores,
                   (int)count, o->type);
    failed |= !scores;
    free(scores);
  }
  return failed;
}

/* The tape */

static int all_reduce(const Sum *s) {
  return s->done_by == IN_PYTHON ? SUM_IN_PYTHON : s->done_by == IN_C ? s->call(s->channel, s->parts, s->count, 0) : 0;
}

static int run(Tape *t, const Op *o) {
  ptrdiff_t rows = tape_rows(t);
  switch (o->kind) {
    case EMBED: embed(t, o); return 0;
    case CONVERT:
#pragma omp parallel for num_threads(t->threads) if (t->threads > 1 && rows >= MANY)
      for (ptrdiff_t r = 0; r < rows; r++)
        convert_any(row(t, &o->x, r, o->from_type), row(t, &o->y, r, o->type), o->n[0], o->f[0], o->from_type, o->type);
      return 0;
    case CONCAT: concat(t, o); return 0;
    case NORM:
      return rms_norm(row(t, &o->x, 0, o->from_type), o->weight, row(t, &o->y, 0, o->type), rows, o->n[0], o->f[0],
                      o->f[1], o->from_type, o->type, t->threads);
    case MATMUL: return matmul(t, o, row(t, &o->y, 0, o->type));
    case HEAD_MATMULS: return head_matmuls(t, o);
    case LOGITS: return head_logits(t, o);
    case CONV: conv(t, o); return 0;
    case STEP_SIZES: step_sizes(t, o); return 0;
    case SSD:
    case SELECTIVE_SCAN:
    case GATED_DELTA: return recurrence(t, o);
    case DELTA_RATES: rates(t, o); return 0;
    case NORM_GATED: /* x: the recurrence's output, z: the gate. n: heads, size of a head */
      return norm_gated(row(t, &o->x, 0, o->type), row(t, &o->z, 0, o->type), o->weight, row(t, &o->y, 0, o->type), rows,
                        o->z.stride, o->n[0], o->n[1], o->f[0], o->type, t->threads);
    case SQUARES:
      for (ptrdiff_t r = 0; r < rows; r++)
        *(float *)row(t, &o->y, r, FLOAT32) = squares_of(row(t, &o->x, r, o->type), o->n[0], o->type);
      return 0;
    case WHOLE_NORM: whole_norm(t, o); return 0;
    case HEAD_NORMS: /* in place. n: heads, size of a head */
      for (ptrdiff_t r = 0; r < rows; r++) {
        void *x = row(t, &o->x, r, o->type);
        rms_norm(x, o->weight, x, o->n[0], o->n[1], o->f[0], o->f[1], o->type, o->type, 1);
      }
      return 0;
    case INNER_NORMS: inner_norms(t, o); return 0;
    case GATED_NORM: /* x: the scan's output, z: the gate. n: groups, size of a group, 1 + the offset of the sums of squares, or 0 */
      return gated_norm(row(t, &o->x, 0, o->type), row(t, &o->z, 0, o->type), o->weight, row(t, &o->y, 0, o->type),
                        o->n[2] ? (float *)(t->arena + rows * (o->n[2] - 1)) : NULL, rows, o->z.stride, o->n[0], o->n[1],
                        o->f[0], !o->n[2], o->type, t->threads);
    case ADD: /* x is of from_type, and so is y */
      for (ptrdiff_t r = 0; r < rows; r++)
        add_any(row(t, &o->x, r, o->from_type), row(t, &o->z, r, o->type), row(t, &o->y, r, o->from_type), o->n[0], o->f[0],
                o->from_type, o->type);
      return 0;
    case RESIDUAL: residual(t, o); return 0;
    case ACTIVATE: activate(t, o); return 0;
    case SCORE: score(t, o); return 0;
    case ROUTE: route(t, o); return 0;
    case EXPERTS: return experts(t, o);
    case ROTATE: rotate(t, o); return 0;
    case APPEND: append(t, o); return 0;
    case ATTEND: return attend(t, o);
  }
  return 0;
}

/* Runs the operations from `at` on. Returns 0 at the end, or a code: Python must compute a sum or the function of a STOP, and call
   again. Returns UNUSUAL, before anything changes, for an id outside the vocabulary and for the first token of a sequence, unless the
   tokens are part of a prompt. After NO_MEMORY the states are invalid. */
int run_tape(Tape *t) {
  ptrdiff_t rows = tape_rows(t);
  if (t->at == t->from && !t->prompt) {
    for (ptrdiff_t b = 0; b < t->batch; b++)
      if (t->lengths[t->sequences[b]] <= 0) return UNUSUAL;
    for (ptrdiff_t r = 0; t->ids && r < rows; r++)
      if (t->ids[r] < 0 || t->ids[r] >= t->vocabulary) return UNUSUAL;
  }
  while (t->at < t->to) {
    const Op *o = &t->ops[t->at++];
    if (o->kind == STOP) return STOPPED;
    int code = o->kind == SUM ? all_reduce(&t->sums[o->sum]) : run(t, o) ? NO_MEMORY : 0;
    if (code) return code;
  }
  if (!t->speculative && !t->prompt)
    for (ptrdiff_t b = 0; b < t->batch; b++) t->lengths[t->sequences[b]] += t->tokens;
  return 0;
}

/* After a speculative run: advances the states by the first counts[b] >= 1 tokens of sequence b. */
int keep_tokens(const Tape *t, const ptrdiff_t *counts) {
  int failed = 0;
  for (ptrdiff_t i = t->from; i < t->to; i++) {
    const Op *o = &t->ops[i];
    int has_state = o->kind == CONV || o->kind == SSD || o->kind == SELECTIVE_SCAN || o->kind == GATED_DELTA;
    for (ptrdiff_t b = 0; b < t->batch && has_state; b++) {
      if (o->kind == CONV) { advance_conv(t, o, b, counts[b]); continue; }
      const Slot *s = &t->slots[o->slot];
      float *state = (float *)s->data + t->sequences[b] * s->stride;
      if (o->kind == SSD) failed |= scan_ssd(t, o, b, 1, counts[b], (States){state, state, s->stride});
      else if (o->kind == GATED_DELTA) failed |= scan_delta(t, o, b, 1, counts[b], (States){state, state, s->stride});
      else scan_selective(t, o, b, 1, counts[b], (States){state, state, s->stride}, 0);
    }
  }
  return failed ? NO_MEMORY : 0;
}
