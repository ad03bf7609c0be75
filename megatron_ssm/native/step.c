/* Takes tokens of each sequence of a batch through consecutive layers, by the kernels of the other files: one token to decode,
   several that may be taken back (speculative decoding), or a piece of a prompt. Python is only needed for all-reduces that
   are not done in shared memory. decoding/structs.py has the same structs. */
#include <math.h>

#include "step.h"

enum { MANY = 48 }; /* rows for which threads share fill_dt */

/* A layer and its cache. Void pointers are to tensors of `type`, except for those that decode has in Layers. */
typedef struct {
  Matrix in_proj, out_proj;
  Matrix x_proj, dt_proj; /* Mamba-1's: (rank + 2 N, channels), where each head has its columns; (channels, rank) */
  Sum inner, outer;                                         /* the all-reduces of x_proj (Mamba-1) and of out_proj */
  const void *norm, *in_bias, *out_bias, *conv, *conv_bias; /* biases are NULL if there are none */
  void *history;                                            /* (batch, taps - 1, channels of the convolution) */
  const float *A_log, *D, *dt_bias;
  float *state;                 /* (batch, N, channels), or Mamba-2's (batch, heads, N, channels / heads) */
  const void *gated_weight;     /* of Mamba-2's gated norm: (channels) */
  void *work;                   /* temporaries; their sizes are in mamba_in and mamba2_step */
  void *parameters;             /* Mamba-1's dt, B and C before the all-reduce: (rows, heads, rank + 2 N) */
  void *part;                   /* this rank's part of out_proj's sum: (rows, size) */
  float *dt;                    /* Mamba-2's: (rows, heads) */
  float *squares;               /* (rows, 1): the sum of squares of the only group, if ranks share it; otherwise NULL */
  float *wide_part;             /* `part` as float32, which is sent with squares; NULL without squares, and for FLOAT32 */
  float *next_state;            /* receives the state after the tokens: `state`, or a temporary if they are speculative */
  ptrdiff_t batch, tokens;      /* sequences, and tokens of each; rows = batch * tokens */
  ptrdiff_t size, channels, N, taps, history_stride, state_stride, next_stride;
  ptrdiff_t rank;               /* of Mamba-1's dt */
  ptrdiff_t heads, groups;      /* those of this rank; groups: Mamba-2's */
  ptrdiff_t group_channels;     /* channels per group of Mamba-2, on all ranks together */
  float least_dt, most_dt;      /* Mamba-2's limits of dt */
  float eps;                    /* of the layer's norm */
  float inner_eps;              /* of Mamba-2's gated norm, or of Falcon-Mamba's norms of dt, B and C; negative: none */
  int type, sum_type, mamba2;   /* sum_type: of the residual stream; mamba2: whether this is a Mamba-2 layer */
  int speculative;              /* whether `decode` leaves history and state as they are, and `keep_tokens` advances them */
} Layer;

/* Python checks before that there is a kernel for each product. */
static int project(const Layer *l, const Matrix *m, const void *bias, const void *x, void *y, ptrdiff_t rows, ptrdiff_t out,
                   ptrdiff_t in, int threads) {
  Product p = {m->values, m->scales, bias, x, y, rows, out, in, in, in, out, m->type, l->type, threads};
  return multiply(&p);
}

/* The product with the columns of a head in x_proj, or with its rows of dt_proj, which begin with element `first`. */
static int project_head(const Layer *l, const Matrix *m, ptrdiff_t first, const void *x, void *y, ptrdiff_t rows,
                        ptrdiff_t out, ptrdiff_t in, ptrdiff_t stride, ptrdiff_t x_stride, ptrdiff_t y_stride, int threads) {
  const void *weight = at(m->values, first, m->type);
  Product p = {weight, NULL, NULL, x, y, rows, out, in, stride, x_stride, y_stride, m->type, l->type, threads};
  return multiply(&p);
}

/* What mamba_in and mamba_out have in `work`, (rows, size + 5 channels). xz: x before the convolution and z, (rows, 2
   channels). x: after the convolution, dt: before dt_bias, scanned: the gated output, (rows, channels) each. */
typedef struct {
  void *normed, *xz, *x, *dt, *scanned;
} MambaWork;

INLINE MambaWork mamba_work(const Layer *l) {
  ptrdiff_t rows = l->batch * l->tokens, each = rows * l->channels;
  void *xz = at(l->work, rows * l->size, l->type), *x = at(xz, 2 * each, l->type), *dt = at(x, each, l->type);
  return (MambaWork){l->work, xz, x, dt, at(dt, each, l->type)};
}

/* Mamba-1 up to the all-reduce of x_proj: norm, in_proj, convolution, x_proj -> this rank's part of `parameters`. Advances
   history, unless the tokens are speculative. */
static int mamba_in(const Layer *l, const void *hidden, int threads) {
  ptrdiff_t tokens = l->tokens, rows = l->batch * tokens, channels = l->channels, width = l->rank + 2 * l->N;
  MambaWork w = mamba_work(l);
  rms_norm(hidden, l->norm, w.normed, rows, l->size, l->eps, l->sum_type, l->type, threads);
  int failed = project(l, &l->in_proj, l->in_bias, w.normed, w.xz, rows, 2 * channels, l->size, threads);
  causal_conv(w.xz, l->conv, l->conv_bias, l->history, w.x, l->speculative ? NULL : l->history, l->batch, tokens, channels,
              l->taps, 2 * tokens * channels, 2 * channels, l->history_stride, l->type, threads);
  ptrdiff_t per_head = channels / l->heads, type = l->type;
  for (ptrdiff_t h = 0; h < l->heads; h++)
    failed |= project_head(l, &l->x_proj, h * per_head, at(w.x, h * per_head, type),
                           at(l->parameters, h * width, type), rows, width, per_head, channels, channels,
                           l->heads * width, threads);
  return failed;
}

/* The scan of the first `tokens` tokens of `batch` sequences from sequence b on, from state to next; z may be NULL. */
static void mamba_scan(const Layer *l, void *parameters, ptrdiff_t b, ptrdiff_t batch, ptrdiff_t tokens, const void *z,
                       float *next, ptrdiff_t next_stride, int threads) {
  ptrdiff_t type = l->type, all = l->heads * (l->rank + 2 * l->N), each = l->tokens, first = b * each;
  ptrdiff_t channels = l->channels, own = first * channels;
  ptrdiff_t strides[] = {each * channels, channels, each * channels, channels, each * all, all, each * all, all,
                         2 * each * channels, 2 * channels, l->state_stride, next_stride, l->rank + 2 * l->N};
  MambaWork w = mamba_work(l);
  void *B = at(parameters, first * all + l->rank, type), *C = at(B, l->N, type);
  selective_scan(at(w.x, own, type), at(w.dt, own, type), l->A_log, B, C, l->D, z, l->dt_bias,
                 l->state + b * l->state_stride, at(w.scanned, own, type), next, NULL, strides, batch, tokens, channels,
                 l->heads, l->N, 0, type, threads);
}

/* Mamba-1 after the all-reduce of x_proj: Falcon-Mamba's norms of dt, B and C; dt_proj, scan, gate, out_proj -> part.
   Overwrites `parameters`, the sums; advances state, unless the tokens are speculative. */
static int mamba_out(const Layer *l, void *parameters, int threads) {
  ptrdiff_t rows = l->batch * l->tokens, channels = l->channels, rank = l->rank, N = l->N;
  ptrdiff_t width = rank + 2 * N, cuts[] = {0, rank, rank + N, width}, heads = l->heads, per_head = channels / heads;
  MambaWork w = mamba_work(l);
  if (l->inner_eps >= 0)
    for (ptrdiff_t b = 0; b < rows * heads; b++)
      for (int k = 0; k < 3; k++) {
        void *part = at(parameters, b * width + cuts[k], l->type);
        rms_norm(part, NULL, part, 1, cuts[k + 1] - cuts[k], l->inner_eps, l->type, l->type, 1);
      }
  int failed = 0;
  for (ptrdiff_t h = 0; h < heads; h++)
    failed |= project_head(l, &l->dt_proj, h * per_head * rank, at(parameters, h * width, l->type),
                           at(w.dt, h * per_head, l->type), rows, per_head, rank, rank, heads * width, channels, threads);
  mamba_scan(l, parameters, 0, l->batch, l->tokens, at(w.xz, channels, l->type), l->next_state, l->next_stride, threads);
  return failed | project(l, &l->out_proj, NULL, w.scanned, l->part, rows, l->size, channels, threads);
}

/* What mamba2_step has in `work`, (rows, size + width + mixed + 2 channels). projected: in_proj's output, per row `width` =
   channels + mixed + heads elements: z, the input of the convolution, and dt. xBC: after the convolution, `mixed` = channels
   + 2 groups N elements: x, B and C. scanned, gated: `channels` elements. */
typedef struct {
  void *normed, *projected, *xBC, *scanned, *gated;
  ptrdiff_t mixed, width;
} Mamba2Work;

INLINE Mamba2Work mamba2_work(const Layer *l) {
  ptrdiff_t rows = l->batch * l->tokens, mixed = l->channels + 2 * l->groups * l->N, width = l->channels + mixed + l->heads;
  void *projected = at(l->work, rows * l->size, l->type), *xBC = at(projected, rows * width, l->type);
  void *scanned = at(xBC, rows * mixed, l->type);
  return (Mamba2Work){l->work, projected, xBC, scanned, at(scanned, rows * l->channels, l->type), mixed, width};
}

/* As mamba_scan. For one token, or tokens one by one, ssd allocates no memory, so it cannot fail. */
static int mamba2_scan(const Layer *l, ptrdiff_t b, ptrdiff_t batch, ptrdiff_t tokens, float *next, ptrdiff_t next_stride,
                        int threads) {
  Mamba2Work w = mamba2_work(l);
  ptrdiff_t mixed = w.mixed, step = l->tokens * mixed, first = b * l->tokens, type = l->type;
  ptrdiff_t strides[] = {step, mixed, step, mixed, step, mixed, l->state_stride, next_stride};
  void *x = at(w.xBC, first * mixed, type), *B = at(x, l->channels, type), *C = at(B, l->groups * l->N, type);
  return ssd(x, l->dt + first * l->heads, l->A_log, B, C, l->D, l->state + b * l->state_stride,
             at(w.scanned, first * l->channels, type), next, NULL, strides, batch, tokens, l->heads,
             l->channels / l->heads, l->groups, l->N, type, l->speculative, is_quantized(l->out_proj.type), threads);
}

/* Mamba-2's dt. */
static void fill_dt(const Layer *l, Mamba2Work w, int threads) {
  ptrdiff_t rows = l->batch * l->tokens, heads = l->heads, first = l->channels + w.mixed;
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows >= MANY)
  for (ptrdiff_t b = 0; b < rows; b++)
    for (ptrdiff_t h = 0; h < heads; h++) {
      float dt = softplus_(get(w.projected, b * w.width + first + h, l->type) + l->dt_bias[h], LEAST_EXPONENT);
      l->dt[b * heads + h] = dt < l->least_dt ? l->least_dt : dt > l->most_dt ? l->most_dt : dt; /* NaN stays */
    }
}

/* Mamba-2 up to the all-reduce of out_proj -> part. Advances history and state, unless the tokens are speculative. With
   `squares`, out_proj is applied to values that are not normalized yet, and `squares` receives their sums of squares. */
static int mamba2_step(const Layer *l, const void *hidden, int threads) {
  ptrdiff_t rows = l->batch * l->tokens, channels = l->channels, groups = l->groups;
  Mamba2Work w = mamba2_work(l);
  rms_norm(hidden, l->norm, w.normed, rows, l->size, l->eps, l->sum_type, l->type, threads);
  int failed = project(l, &l->in_proj, l->in_bias, w.normed, w.projected, rows, w.width, l->size, threads);
  causal_conv(at(w.projected, channels, l->type), l->conv, l->conv_bias, l->history, w.xBC,
              l->speculative ? NULL : l->history, l->batch, l->tokens, w.mixed, l->taps, l->tokens * w.width, w.width,
              l->history_stride, l->type, threads);
  fill_dt(l, w, threads);
  failed |= mamba2_scan(l, 0, l->batch, l->tokens, l->next_state, l->next_stride, threads);
  failed |= gated_norm(w.scanned, w.projected, l->gated_weight, w.gated, l->squares, rows, w.width, groups,
                       channels / groups, l->inner_eps, !l->squares, l->type, threads);
  failed |= project(l, &l->out_proj, NULL, w.gated, l->part, rows, l->size, channels, threads);
  if (l->wide_part)
    for (ptrdiff_t i = 0; i < rows * l->size; i++) l->wide_part[i] = get(l->part, i, l->type);
  return failed;
}

/* Advances the history of sequence b by the first `count` tokens of `inputs`, whose rows are `stride` apart. */
static void advance_history(const Layer *l, const void *inputs, ptrdiff_t stride, ptrdiff_t channels, ptrdiff_t b,
                            ptrdiff_t count) {
  void *history = at(l->history, b * l->history_stride, l->type);
  for (ptrdiff_t k = 0; k < l->taps - 1; k++) {
    ptrdiff_t t = k + count - (l->taps - 1); /* negative: in the history */
    const void *row = t < 0 ? at(history, (k + count) * channels, l->type)
                            : at(inputs, (b * l->tokens + t) * stride, l->type);
    memmove(at(history, k * channels, l->type), row, bytes_of(channels, l->type));
  }
}

/* Advances history and state of a layer by the first counts[b] tokens of sequence b, after a speculative `decode`. */
static void keep_tokens_of(const Layer *l, const ptrdiff_t *counts, int threads) {
  for (ptrdiff_t b = 0; b < l->batch; b++) {
    float *state = l->state + b * l->state_stride;
    if (l->mamba2) {
      Mamba2Work w = mamba2_work(l);
      mamba2_scan(l, b, 1, counts[b], state, 0, threads);
      advance_history(l, at(w.projected, l->channels, l->type), w.width, w.mixed, b, counts[b]);
    } else {
      MambaWork w = mamba_work(l);
      mamba_scan(l, l->inner.total, b, 1, counts[b], NULL, state, 0, threads);
      advance_history(l, w.xz, 2 * l->channels, l->channels, b, counts[b]);
    }
  }
}

/* total = x + sum + out_proj's bias of the rows `start` to `stop`, rounded after each addition as torch would. squares: the sums
   of squares that normalize `sum`, which is FLOAT32 then; NULL: `sum` is of `type`. */
INLINE void add(const Layer *l, const void *x, void *total, ptrdiff_t start, ptrdiff_t stop, int type, int sum_type) {
  const void *sum = l->outer.total;
  const float *squares = l->outer.squares;
  for (ptrdiff_t b = start; b < stop; b++) {
    float scale = squares ? 1 / sqrtf(squares[b] / l->group_channels + l->inner_eps) : 1;
    ptrdiff_t first = b * l->size;
#pragma omp simd
    for (ptrdiff_t i = 0; i < l->size; i++) {
      float added = squares ? rounded(scale * ((const float *)sum)[first + i], type) : get(sum, first + i, type);
      if (l->out_bias) added = rounded(added + get(l->out_bias, i, type), type);
      put(total, first + i, get(x, first + i, sum_type) + added, sum_type);
    }
  }
}

CLONES static void add_float32(const Layer *l, const void *x, void *total, ptrdiff_t start, ptrdiff_t stop) {
  add(l, x, total, start, stop, FLOAT32, FLOAT32);
}
CLONES static void add_mixed(const Layer *l, const void *x, void *total, ptrdiff_t start, ptrdiff_t stop) {
  add(l, x, total, start, stop, BFLOAT16, FLOAT32);
}
CLONES static void add_bfloat16(const Layer *l, const void *x, void *total, ptrdiff_t start, ptrdiff_t stop) {
  add(l, x, total, start, stop, BFLOAT16, BFLOAT16);
}

/* Adds what a layer gives to the residual stream x; both x and total are of sum_type, and may be the same. */
static void add_residual(const Layer *l, const void *x, void *total, int threads) {
  ptrdiff_t rows = l->batch * l->tokens, share = rows_per_thread(rows, l->size, threads); /* there are rows */
#pragma omp parallel for num_threads(threads) if (share < rows)
  for (ptrdiff_t start = 0; start < rows; start += share) {
    ptrdiff_t stop = start + share < rows ? start + share : rows;
    if (l->type == FLOAT32) add_float32(l, x, total, start, stop);
    else if (l->sum_type == FLOAT32) add_mixed(l, x, total, start, stop);
    else add_bfloat16(l, x, total, start, stop);
  }
}

/* The final norm and the language-model head. Void pointers are to tensors of the last layer's `type`. */
typedef struct {
  Matrix matrix; /* (width, size) */
  const void *norm;
  void *normed; /* a temporary: (rows, size) */
  void *logits; /* (rows, width) */
  float *wide;  /* the logits as float32; NULL if `logits` are */
  ptrdiff_t width;
  float eps;
} Head;

/* Consecutive layers and how far they are. x, given and total are (rows, size) of sum_type. */
struct Layers {
  const Layer *layers;
  const Head *head;  /* what comes after the last layer; NULL: nothing */
  const void *x;     /* what the first layer adds to */
  const void *given; /* what the first layer reads */
  void *total;       /* the result */
  ptrdiff_t count, layer, begun; /* layers; the current one; how many of its all-reduces were begun */
};

CLONES static void widen_logits(const void *logits, float *wide, ptrdiff_t start, ptrdiff_t stop) {
#pragma omp simd
  for (ptrdiff_t i = start; i < stop; i++) wide[i] = get(logits, i, BFLOAT16);
}

static int compute_logits(const Head *h, const Layer *last, const void *total, int threads) {
  ptrdiff_t rows = last->batch * last->tokens, count = rows * h->width, share = (count + threads - 1) / threads;
  rms_norm(total, h->norm, h->normed, rows, last->size, h->eps, last->sum_type, last->type, threads);
  if (project(last, &h->matrix, NULL, h->normed, h->logits, rows, h->width, last->size, threads)) return NO_MEMORY;
  if (h->wide) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (ptrdiff_t start = 0; start < count; start += share)
      widen_logits(h->logits, h->wide, start, start + share < count ? start + share : count);
  }
  return 0;
}

/* Goes on to the end, and returns 0; or to an all-reduce that Python must finish, and returns its code. Afterwards Python
   calls it again. After NO_MEMORY the caches are invalid. */
int decode(Layers *s, int threads) {
  for (; s->layer < s->count; s->layer++, s->begun = 0) {
    const Layer *l = &s->layers[s->layer];
    const void *x = s->layer ? s->total : s->x, *given = s->layer ? s->total : s->given;
    int code;
    if (s->begun == 0) {
      s->begun = 1;
      if (!l->mamba2) {
        if (mamba_in(l, given, threads)) return NO_MEMORY;
        if ((code = all_reduce(&l->inner))) return code;
      }
    }
    if (s->begun == 1) {
      s->begun = 2;
      if (l->mamba2 ? mamba2_step(l, given, threads) : mamba_out(l, l->inner.total, threads)) return NO_MEMORY;
      if ((code = all_reduce(&l->outer))) return code;
    }
    add_residual(l, x, s->total, threads);
  }
  return s->head ? compute_logits(s->head, &s->layers[s->count - 1], s->total, threads) : 0;
}

/* After a speculative `decode`: advances the caches of all layers by the first counts[b] >= 1 tokens of sequence b. */
int keep_tokens(const Layers *s, const ptrdiff_t *counts, int threads) {
  for (ptrdiff_t i = 0; i < s->count; i++) keep_tokens_of(&s->layers[i], counts, threads);
  return 0;
}
