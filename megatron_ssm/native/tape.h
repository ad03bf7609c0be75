/* A tape: the operations that a model applies to the tokens of a call, on buffers in one arena. layers/tape_operations.py has the same
   structs. */
#ifndef TAPE_H
#define TAPE_H

#include "quantized.h"

/* Results of `run_tape`, besides 0 and the codes of an all-reduce in shared memory. */
enum { SUM_IN_PYTHON = -1, NO_MEMORY = -2, UNUSUAL = -3, STOPPED = -4 };
enum { ONE_RANK, IN_C, IN_PYTHON }; /* the ways to compute an all-reduce */

enum {
  EMBED, SUM, CONVERT, CONCAT, NORM, MATMUL, HEAD_MATMULS, LOGITS, CONV, STEP_SIZES, SSD, SELECTIVE_SCAN, INNER_NORMS,
  GATED_NORM, ADD, RESIDUAL, ACTIVATE, ROTATE, APPEND, ATTEND, HEAD_NORMS, DELTA_RATES, GATED_DELTA, NORM_GATED, SQUARES,
  WHOLE_NORM, SCORE, ROUTE, EXPERTS, STOP
};

/* A matrix (out, in), as in `linear`. */
typedef struct {
  const void *values;
  const float *scales; /* the scales of INT8 and INT4, otherwise NULL */
  ptrdiff_t type;
} Matrix;

/* An all-reduce. IN_C, `call` computes it; it returns 0, or a code that Python must handle. */
typedef struct {
  int (*call)(void *channel, const void *parts, int count, int op);
  void *channel;
  const void *parts;
  void *total;    /* the sum */
  float *squares; /* the sum of the exact columns in the same message, or NULL */
  int count, done_by;
} Sum;

/* Columns of a buffer. The buffer of `rows` rows begins at arena + rows * offset. */
typedef struct {
  ptrdiff_t offset, first, stride; /* bytes per row; the first column; the columns from row to row */
} View;

/* An operation. The function of each kind describes n and f. */
typedef struct {
  int kind, type, from_type, flag; /* type: the dtype of y and weights; from_type: the dtype of x, if it may differ */
  View x, y, z;
  Matrix matrix, down;
  const void *weight, *bias;
  const float *A_log, *D, *dt_bias;
  ptrdiff_t slot, sum, n[8];
  float f[3];
} Op;

/* A tensor of the cache: sequence i begins at data + i * stride elements. A speculative call writes the state after its tokens to
   `next`, and does not change `data`. */
typedef struct {
  void *data, *next;
  ptrdiff_t stride, next_stride;
} Slot;

typedef struct {
  const Op *ops;
  ptrdiff_t from, to, at;       /* the range of operations of this call, and the next operation */
  char *arena;
  Sum *sums;
  const Slot *slots;
  const int64_t *sequences;     /* (batch): the rows of the cache */
  int64_t *lengths;             /* (rows of the cache): the number of tokens that were read */
  const int64_t *ids;           /* (batch, tokens) */
  float *logits;                /* (rows, width of the head) */
  ptrdiff_t batch, tokens, vocabulary;
  int speculative, prompt;      /* 1 if tokens may be rejected; 1 if they are part of a prompt */
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
