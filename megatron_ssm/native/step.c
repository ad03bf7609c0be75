/* One token through layers that follow one another: the same kernels as otherwise, without Python between. */
#include <math.h>

#include "kernels.h"

enum { NO_SUM = -1, NO_MEMORY = -2 };  /* what `decode` returns beside 0 and a Sum's own codes */
enum { ONE_RANK, IN_C, IN_PYTHON };

/* A matrix (out, in) as `linear` takes it. */
typedef struct {
  const void *values;
  const float *scales;
  ptrdiff_t stored;
} Matrix;

/* An all-reduce, IN_C by `call`, which gives 0 or a code that Python deals with; where the sum lies then. */
typedef struct {
  int (*call)(void *channel, const void *parts, int count, int op);
  void *channel;
  const void *parts;
  void *total;
  float *squares; /* beside it, or NULL */
  int count, by;
} Sum;

/* A layer and its cache. Of `type` where a pointer has none; x, which layers add to, is of `wide`, (batch, size). */
typedef struct {
  Matrix in_proj, out_proj;
  Sum inner, outer;                                         /* of x_proj (Mamba-1), of out_proj */
  const void *norm, *in_bias, *out_bias, *conv, *conv_bias; /* biases NULL if there are none */
  void *history;                                            /* (batch, taps - 1, convolved channels) */
  const float *A_log, *D, *dt_bias;
  float *state;                                             /* (batch, N, channels) or (batch, heads, N, channels / heads) */
  const void *x_proj, *dt_proj; /* Mamba-1's: (rank + 2 N, channels), each head its columns; (channels, rank) */
  const void *gated;                                        /* Mamba-2's norm: (channels) */
  void *work, *parameters, *part;                           /* room; (batch, heads, rank + 2 N); (batch, size) */
  float *dt, *squares, *exact;                              /* (batch, heads); (batch, 1) or NULL; part as float32 or NULL */
  ptrdiff_t batch, size, channels, N, taps, history_stride, state_stride;
  ptrdiff_t rank;                                           /* Mamba-1's, of dt */
  ptrdiff_t heads, groups, group_channels;                  /* here, the last two Mamba-2's; channels of a group, anywhere */
  float eps, inner_eps;                                     /* of the norm of x; of those inside (-1: there are none) */
  int type, wide, mamba2;
} Layer;

static int project(const Matrix *m, const void *bias, const void *x, void *y, ptrdiff_t batch, ptrdiff_t out, ptrdiff_t in,
                   int type, int threads) {
  return linear(m->values, m->scales, bias, x, y, batch, out, in, in, m->stored, type, threads);
}

/* Mamba-1 up to x_proj: norm, in_proj, convolution, x_proj -> parameters, of which this rank has its part; work (batch,
   size + 5 channels) keeps x and z for mamba_out. `history` advances. */
static int mamba_in(const Layer *l, const void *hidden, int threads) {
  ptrdiff_t batch = l->batch, channels = l->channels, width = l->rank + 2 * l->N;
  void *normed = l->work, *xz = at(normed, batch * l->size, l->type), *x = at(xz, 2 * batch * channels, l->type);
  rms_norm(hidden, l->norm, normed, batch, l->size, l->eps, l->wide, l->type);
  int failed = project(&l->in_proj, l->in_bias, normed, xz, batch, 2 * channels, l->size, l->type, threads);
  causal_conv(xz, l->conv, l->conv_bias, l->history, x, l->history, batch, 1, channels, l->taps, 2 * channels,
              2 * channels, l->history_stride, l->type, threads);
  ptrdiff_t own = channels / l->heads, type = l->type;
  for (ptrdiff_t h = 0; h < l->heads; h++)
    failed |= linear_of(at(l->x_proj, h * own, type), NULL, NULL, at(x, h * own, type), at(l->parameters, h * width, type),
                        batch, width, own, channels, channels, l->heads * width, type, type, threads);
  return failed;
}

/* Mamba-1 from the summed parameters (dt, B, C) on, which are overwritten: dt_proj, scan, gate, out_proj -> part. */
static int mamba_out(const Layer *l, void *parameters, int threads) {
  ptrdiff_t batch = l->batch, channels = l->channels, rank = l->rank, N = l->N, each = batch * channels;
  ptrdiff_t width = rank + 2 * N, cuts[] = {0, rank, rank + N, width}, heads = l->heads, own = channels / heads;
  void *xz = at(l->work, batch * l->size, l->type), *x = at(xz, 2 * each, l->type), *dt = at(x, each, l->type);
  void *scanned = at(dt, each, l->type);
  if (l->inner_eps >= 0)
    for (ptrdiff_t b = 0; b < batch * heads; b++)
      for (int k = 0; k < 3; k++) {
        void *part = at(parameters, b * width + cuts[k], l->type);
        rms_norm(part, NULL, part, 1, cuts[k + 1] - cuts[k], l->inner_eps, l->type, l->type);
      }
  ptrdiff_t all = heads * width;
  ptrdiff_t strides[] = {channels, 0, channels, 0, all, 0, all, 0, 2 * channels, 0, l->state_stride, l->state_stride, width};
  int failed = 0;
  for (ptrdiff_t h = 0; h < heads; h++)
    failed |= linear_of(at(l->dt_proj, h * own * rank, l->type), NULL, NULL, at(parameters, h * width, l->type),
                        at(dt, h * own, l->type), batch, own, rank, rank, all, channels, l->type, l->type, threads);
  selective_scan(x, dt, l->A_log, at(parameters, rank, l->type), at(parameters, rank + N, l->type), l->D,
                 at(xz, channels, l->type), l->dt_bias, l->state, scanned, l->state, NULL, strides, batch, 1, channels,
                 heads, N, 0, l->type, threads);
  return failed | project(&l->out_proj, NULL, scanned, l->part, batch, l->size, channels, l->type, threads);
}

/* Mamba-2: everything before out_proj's all-reduce -> part, this rank's; where `squares` is given, of what is not
   normalized, and the sums of squares. work: (batch, size + wide + mixed + 2 channels) with mixed = channels + 2 groups N,
   wide = channels + mixed + heads. */
static int mamba2_step(const Layer *l, const void *hidden, int threads) {
  ptrdiff_t batch = l->batch, channels = l->channels, heads = l->heads, groups = l->groups, N = l->N;
  ptrdiff_t mixed = channels + 2 * groups * N, wide = channels + mixed + heads;
  void *normed = l->work, *projected = at(normed, batch * l->size, l->type), *xBC = at(projected, batch * wide, l->type);
  void *scanned = at(xBC, batch * mixed, l->type), *gated = at(scanned, batch * channels, l->type);
  rms_norm(hidden, l->norm, normed, batch, l->size, l->eps, l->wide, l->type);
  int failed = project(&l->in_proj, l->in_bias, normed, projected, batch, wide, l->size, l->type, threads);
  causal_conv(at(projected, channels, l->type), l->conv, l->conv_bias, l->history, xBC, l->history, batch, 1, mixed,
              l->taps, wide, wide, l->history_stride, l->type, threads);
  for (ptrdiff_t b = 0; b < batch; b++)
    for (ptrdiff_t h = 0; h < heads; h++)
      l->dt[b * heads + h] = softplus_(get(projected, b * wide + channels + mixed + h, l->type) + l->dt_bias[h]);
  ptrdiff_t strides[] = {mixed, 0, mixed, 0, mixed, 0, l->state_stride, l->state_stride};
  ssd(xBC, l->dt, l->A_log, at(xBC, channels, l->type), at(xBC, channels + groups * N, l->type), l->D, l->state, scanned,
      l->state, NULL, strides, batch, 1, heads, channels / heads, groups, N, l->type, threads);
  failed |= gated_norm(scanned, projected, l->gated, gated, l->squares, batch, wide, groups, channels / groups,
                       l->inner_eps, !l->squares, l->type);
  failed |= project(&l->out_proj, NULL, gated, l->part, batch, l->size, channels, l->type, threads);
  if (l->exact)
    for (ptrdiff_t i = 0; i < batch * l->size; i++) l->exact[i] = get(l->part, i, l->type);
  return failed;
}

/* total = x + y + out_proj's bias, rounded as it would be one after the other. */
INLINE void add(const Layer *l, const void *x, const void *y, const float *squares, void *total, int type, int wide) {
  for (ptrdiff_t b = 0; b < l->batch; b++) {
    float scale = squares ? 1 / sqrtf(squares[b] / l->group_channels + l->inner_eps) : 1;
    ptrdiff_t first = b * l->size;
#pragma omp simd
    for (ptrdiff_t i = 0; i < l->size; i++) {
      float part = squares ? rounded(scale * ((const float *)y)[first + i], type) : get(y, first + i, type);
      if (l->out_bias) part = rounded(part + get(l->out_bias, i, type), type);
      put(total, first + i, get(x, first + i, wide) + part, wide);
    }
  }
}

CLONES static void add_float32(const Layer *l, const void *x, const void *y, const float *squares, void *total) {
  add(l, x, y, squares, total, FLOAT32, FLOAT32);
}
CLONES static void add_mixed(const Layer *l, const void *x, const void *y, const float *squares, void *total) {
  add(l, x, y, squares, total, BFLOAT16, FLOAT32);
}
CLONES static void add_bfloat16(const Layer *l, const void *x, const void *y, const float *squares, void *total) {
  add(l, x, y, squares, total, BFLOAT16, BFLOAT16);
}

/* What a layer adds: x -> total, of `wide`; it may be x. The outer sum is of `type`; or with squares FLOAT32, and still to
   be normalized by them. */
static void layer_end(const Layer *l, const void *x, void *total) {
  const void *y = l->outer.total;
  const float *squares = l->outer.squares;
  if (l->type == FLOAT32) add_float32(l, x, y, squares, total);
  else if (l->wide == FLOAT32) add_mixed(l, x, y, squares, total);
  else add_bfloat16(l, x, y, squares, total);
}

/* Layers in a row. x, what the first one adds to and what it reads (`given`), and total, of `wide`: (batch, size). How far
   they are: in `layer`, of which so many sums have begun. */
typedef struct {
  const Layer *layers;
  const void *x, *given;
  void *total;
  ptrdiff_t count, layer, begun;
} Layers;

static int add_up(const Sum *sum) {
  return sum->by == IN_PYTHON ? NO_SUM : sum->by == IN_C ? sum->call(sum->channel, sum->parts, sum->count, 0) : 0;
}

/* Take the token on, to the end (0) or to a sum that is not done yet (its code): called again, after that sum. */
int decode(Layers *s, int threads) {
  for (; s->layer < s->count; s->layer++, s->begun = 0) {
    const Layer *l = &s->layers[s->layer];
    const void *x = s->layer ? s->total : s->x, *given = s->layer ? s->total : s->given;
    int code;
    if (s->begun == 0) {
      s->begun = 1;
      if (!l->mamba2) {
        if (mamba_in(l, given, threads)) return NO_MEMORY;
        if ((code = add_up(&l->inner))) return code;
      }
    }
    if (s->begun == 1) {
      s->begun = 2;
      if (l->mamba2 ? mamba2_step(l, given, threads) : mamba_out(l, l->inner.total, threads)) return NO_MEMORY;
      if ((code = add_up(&l->outer))) return code;
    }
    layer_end(l, x, s->total);
  }
  return 0;
}
