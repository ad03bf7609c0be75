/* Decodes one token of each sequence of a batch through consecutive layers, by the kernels of the other files. Python is
   only needed for all-reduces that are not done in shared memory. decoding/native_step.py has the same structs. */
#include <math.h>

#include "kernels.h"

enum { NO_SUM = -1, NO_MEMORY = -2 };  /* results of `decode`, besides 0 and the codes of an all-reduce in shared memory */
enum { ONE_RANK, IN_C, IN_PYTHON };    /* who does an all-reduce */

/* A matrix (out, in), as `linear` takes it. */
typedef struct {
  const void *values;
  const float *scales; /* of INT8, otherwise NULL */
  ptrdiff_t type;
} Matrix;

/* An all-reduce. If it is done IN_C, then by `call`, which returns 0, or a code that Python must handle. */
typedef struct {
  int (*call)(void *channel, const void *parts, int count, int op);
  void *channel;
  const void *parts;
  void *total;    /* where the sum is afterwards */
  float *squares; /* where the sum of the squares is, which are sent along; NULL: there are none */
  int count, done_by;
} Sum;

/* A layer and its cache. Void pointers are to tensors of `type`, except for those that decode has in Layers. */
typedef struct {
  Matrix in_proj, out_proj;
  Sum inner, outer;                                         /* the all-reduces of x_proj (Mamba-1) and of out_proj */
  const void *norm, *in_bias, *out_bias, *conv, *conv_bias; /* biases are NULL if there are none */
  void *history;                                            /* (batch, taps - 1, channels of the convolution) */
  const float *A_log, *D, *dt_bias;
  float *state;                 /* (batch, N, channels), or Mamba-2's (batch, heads, N, channels / heads) */
  const void *x_proj, *dt_proj; /* Mamba-1's: (rank + 2 N, channels), where each head has its columns; (channels, rank) */
  const void *gated_weight;     /* of Mamba-2's gated norm: (channels) */
  void *work;                   /* temporaries; their sizes are in mamba_in and mamba2_step */
  void *parameters;             /* Mamba-1's dt, B and C before the all-reduce: (batch, heads, rank + 2 N) */
  void *part;                   /* this rank's part of out_proj's sum: (batch, size) */
  float *dt;                    /* Mamba-2's: (batch, heads) */
  float *squares;               /* (batch, 1): the sum of squares of the only group, if ranks share it; otherwise NULL */
  float *wide_part;             /* `part` as float32, which is sent with squares; NULL without squares, and for FLOAT32 */
  ptrdiff_t batch, size, channels, N, taps, history_stride, state_stride;
  ptrdiff_t rank;               /* of Mamba-1's dt */
  ptrdiff_t heads, groups;      /* those of this rank; groups: Mamba-2's */
  ptrdiff_t group_channels;     /* channels per group of Mamba-2, on all ranks together */
  float eps;                    /* of the layer's norm */
  float inner_eps;              /* of Mamba-2's gated norm, or of Falcon-Mamba's norms of dt, B and C; negative: none */
  int type, sum_type, mamba2;   /* sum_type: of the residual stream; mamba2: whether this is a Mamba-2 layer */
} Layer;

static int project(const Matrix *m, const void *bias, const void *x, void *y, ptrdiff_t batch, ptrdiff_t out, ptrdiff_t in,
                   int type, int threads) {
  return linear(m->values, m->scales, bias, x, y, batch, out, in, in, m->type, type, threads);
}

/* Mamba-1 up to the all-reduce of x_proj: norm, in_proj, convolution, x_proj -> this rank's part of `parameters`. Advances
   history. work: (batch, size + 5 channels), of which mamba_out reads x and z. */
static int mamba_in(const Layer *l, const void *hidden, int threads) {
  ptrdiff_t batch = l->batch, channels = l->channels, width = l->rank + 2 * l->N;
  void *normed = l->work, *xz = at(normed, batch * l->size, l->type), *x = at(xz, 2 * batch * channels, l->type);
  rms_norm(hidden, l->norm, normed, batch, l->size, l->eps, l->sum_type, l->type);
  int failed = project(&l->in_proj, l->in_bias, normed, xz, batch, 2 * channels, l->size, l->type, threads);
  causal_conv(xz, l->conv, l->conv_bias, l->history, x, l->history, batch, 1, channels, l->taps, 2 * channels,
              2 * channels, l->history_stride, l->type, threads);
  ptrdiff_t per_head = channels / l->heads, type = l->type;
  for (ptrdiff_t h = 0; h < l->heads; h++)
    failed |= strided_linear(at(l->x_proj, h * per_head, type), NULL, at(x, h * per_head, type),
                             at(l->parameters, h * width, type), batch, width, per_head, channels, channels,
                             l->heads * width, type, type, threads);
  return failed;
}

/* Mamba-1 after the all-reduce of x_proj: Falcon-Mamba's norms of dt, B and C; dt_proj, scan, gate, out_proj -> part.
   Overwrites `parameters`, the sums; advances state. */
static int mamba_out(const Layer *l, void *parameters, int threads) {
  ptrdiff_t batch = l->batch, channels = l->channels, rank = l->rank, N = l->N, each = batch * channels;
  ptrdiff_t width = rank + 2 * N, cuts[] = {0, rank, rank + N, width}, heads = l->heads, per_head = channels / heads;
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
    failed |= strided_linear(at(l->dt_proj, h * per_head * rank, l->type), NULL, at(parameters, h * width, l->type),
                             at(dt, h * per_head, l->type), batch, per_head, rank, rank, all, channels, l->type, l->type,
                             threads);
  selective_scan(x, dt, l->A_log, at(parameters, rank, l->type), at(parameters, rank + N, l->type), l->D,
                 at(xz, channels, l->type), l->dt_bias, l->state, scanned, l->state, NULL, strides, batch, 1, channels,
                 heads, N, 0, l->type, threads);
  return failed | project(&l->out_proj, NULL, scanned, l->part, batch, l->size, channels, l->type, threads);
}

/* Mamba-2 up to the all-reduce of out_proj -> part. Advances history and state. With `squares`, out_proj is applied to
   values that are not normalized yet, and `squares` receives this rank's sums of squares. work: (batch, size + width + mixed
   + 2 channels), where mixed = channels + 2 groups N are x, B and C, and width = channels + mixed + heads is in_proj's. */
static int mamba2_step(const Layer *l, const void *hidden, int threads) {
  ptrdiff_t batch = l->batch, channels = l->channels, heads = l->heads, groups = l->groups, N = l->N;
  ptrdiff_t mixed = channels + 2 * groups * N, width = channels + mixed + heads;
  void *normed = l->work, *projected = at(normed, batch * l->size, l->type), *xBC = at(projected, batch * width, l->type);
  void *scanned = at(xBC, batch * mixed, l->type), *gated = at(scanned, batch * channels, l->type);
  rms_norm(hidden, l->norm, normed, batch, l->size, l->eps, l->sum_type, l->type);
  int failed = project(&l->in_proj, l->in_bias, normed, projected, batch, width, l->size, l->type, threads);
  causal_conv(at(projected, channels, l->type), l->conv, l->conv_bias, l->history, xBC, l->history, batch, 1, mixed,
              l->taps, width, width, l->history_stride, l->type, threads);
  for (ptrdiff_t b = 0; b < batch; b++)
    for (ptrdiff_t h = 0; h < heads; h++)
      l->dt[b * heads + h] = softplus_(get(projected, b * width + channels + mixed + h, l->type) + l->dt_bias[h]);
  ptrdiff_t strides[] = {mixed, 0, mixed, 0, mixed, 0, l->state_stride, l->state_stride};
  ssd(xBC, l->dt, l->A_log, at(xBC, channels, l->type), at(xBC, channels + groups * N, l->type), l->D, l->state, scanned,
      l->state, NULL, strides, batch, 1, heads, channels / heads, groups, N, l->type, threads);
  failed |= gated_norm(scanned, projected, l->gated_weight, gated, l->squares, batch, width, groups, channels / groups,
                       l->inner_eps, !l->squares, l->type);
  failed |= project(&l->out_proj, NULL, gated, l->part, batch, l->size, channels, l->type, threads);
  if (l->wide_part)
    for (ptrdiff_t i = 0; i < batch * l->size; i++) l->wide_part[i] = get(l->part, i, l->type);
  return failed;
}

/* total = x + sum + out_proj's bias, rounded after each addition as torch would. squares: the sums of squares that normalize
   `sum`, which is FLOAT32 then; NULL: `sum` is of `type`. */
INLINE void add(const Layer *l, const void *x, const void *sum, const float *squares, void *total, int type, int sum_type) {
  for (ptrdiff_t b = 0; b < l->batch; b++) {
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

CLONES static void add_float32(const Layer *l, const void *x, const void *sum, const float *squares, void *total) {
  add(l, x, sum, squares, total, FLOAT32, FLOAT32);
}
CLONES static void add_mixed(const Layer *l, const void *x, const void *sum, const float *squares, void *total) {
  add(l, x, sum, squares, total, BFLOAT16, FLOAT32);
}
CLONES static void add_bfloat16(const Layer *l, const void *x, const void *sum, const float *squares, void *total) {
  add(l, x, sum, squares, total, BFLOAT16, BFLOAT16);
}

/* Adds what a layer gives to the residual stream x; both x and total are of sum_type, and may be the same. */
static void add_residual(const Layer *l, const void *x, void *total) {
  const void *sum = l->outer.total;
  const float *squares = l->outer.squares;
  if (l->type == FLOAT32) add_float32(l, x, sum, squares, total);
  else if (l->sum_type == FLOAT32) add_mixed(l, x, sum, squares, total);
  else add_bfloat16(l, x, sum, squares, total);
}

/* Consecutive layers and how far they are. x, given and total are (batch, size) of sum_type. */
typedef struct {
  const Layer *layers;
  const void *x;     /* what the first layer adds to */
  const void *given; /* what the first layer reads */
  void *total;       /* the result */
  ptrdiff_t count, layer, begun; /* layers; the current one; how many of its all-reduces were begun */
} Layers;

static int all_reduce(const Sum *sum) {
  return sum->done_by == IN_PYTHON ? NO_SUM : sum->done_by == IN_C ? sum->call(sum->channel, sum->parts, sum->count, 0) : 0;
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
    add_residual(l, x, s->total);
  }
  return 0;
}
