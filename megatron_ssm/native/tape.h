/* A tape: what a model does with the tokens of a call, as a list of operations on numbered buffers. tape/operations.py has the same
   structs; docs/architecture.md shows a tape. */
#ifndef TAPE_H
#define TAPE_H

#include "quantized.h"

/* Results of `run_tape`, besides 0 and the codes of an all-reduce in shared memory. */
enum { SUM_IN_PYTHON = -1, NO_MEMORY = -2, UNUSUAL = -3, STOPPED = -4 };
enum { ONE_RANK, IN_C, IN_PYTHON }; /* who does an all-reduce */

enum {
  EMBED, SUM, CONVERT, CONCAT, NORM, MATMUL, HEAD_MATMULS, LOGITS, CONV, STEP_SIZES, SSD, SELECTIVE_SCAN, INNER_NORMS,
  GATED_NORM, ADD, RESIDUAL, ACTIVATE, ROTATE, APPEND, ATTEND, HEAD_NORMS, DELTA_RATES, GATED_DELTA, NORM_GATED, SQUARES,
  WHOLE_NORM, SCORE, ROUTE, EXPERTS, STOP
};

/* A matrix (out, in), as `linear` takes it. */
typedef struct {
  const void *values;
  const float *scales; /* of INT8 and INT4, otherwise NULL */
  ptrdiff_t type;
} Matrix;

/* An all-reduce. If it is done IN_C, then by `call`, which returns 0, or a code that Python must handle. */
typedef struct {
  int (*call)(void *channel, const void *parts, int count, int op);
  void *channel;
  const void *parts;
  void *total;    /* where the sum is afterwards */
  float *squares; /* where the sum of the exact columns is, which are sent along; NULL: there are none */
  int count, done_by;
} Sum;

/* Columns of a buffer, for every row. The buffer of `rows` rows begins at arena + rows * offset. */
typedef struct {
  ptrdiff_t offset, first, stride; /* bytes; columns; columns from row to row */
} View;

/* An operation. What n and f are is said where it is done. */
typedef struct {
  int kind, type, from_type, flag; /* type: of y and of weights; from_type: of x, where it may differ */
  View x, y, z;
  Matrix matrix, down;
  const void *weight, *bias;
  const float *A_log, *D, *dt_bias;
  ptrdiff_t slot, sum, n[8];
  float f[3];
} Op;

/* A tensor of the cache: sequence i is at data + i * stride elements. next: as data, where a speculative call leaves the state
   after its tokens; `data` stays as it is. */
typedef struct {
  void *data, *next;
  ptrdiff_t stride, next_stride;
} Slot;

typedef struct {
  const Op *ops;
  ptrdiff_t from, to, at;       /* the operations of this call, and the next one */
  char *arena;
  Sum *sums;
  const Slot *slots;
  const int64_t *sequences;     /* (batch): rows of the cache */
  int64_t *lengths;             /* by row of the cache: how many tokens were read */
  const int64_t *ids;           /* (batch, tokens) */
  float *logits;                /* (rows, width of the head) */
  ptrdiff_t batch, tokens, vocabulary;
  int speculative, prompt;      /* whether tokens may be taken back; whether they are part of a prompt */
  int threads;
} Tape;

INLINE ptrdiff_t tape_rows(const Tape *t) { return t->batch * t->tokens; }

/* Row r of a view. */
INLINE void *row(const Tape *t, const View *v, ptrdiff_t r, int type) {
  return at(t->arena + tape_rows(t) * v->offset, v->first + r * v->stride, type);
}

/* Routed experts (experts.c). */
enum { MOST_EXPERTS = 1024 }; /* as in builder.py */
void route(const Tape *t, const Op *o);
int experts(const Tape *t, const Op *o);

#endif
