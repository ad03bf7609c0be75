/* What step.c and tokens.c share. decoding/structs.py has the same structs. */
#ifndef STEP_H
#define STEP_H

#include "quantized.h"

enum { NO_SUM = -1, NO_MEMORY = -2 };  /* results of `decode`, besides 0 and the codes of an all-reduce in shared memory */
enum { UNUSUAL = -3 };                 /* another one of `decode_tokens` */
enum { ONE_RANK, IN_C, IN_PYTHON };    /* who does an all-reduce */

/* A matrix (out, in), as in Product. */
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
  float *squares; /* where the sum of the squares is, which are sent along; NULL: there are none */
  int count, done_by;
} Sum;

/* 0, or a code for Python, which then finishes the all-reduce. */
INLINE int all_reduce(const Sum *sum) {
  return sum->done_by == IN_PYTHON ? NO_SUM : sum->done_by == IN_C ? sum->call(sum->channel, sum->parts, sum->count, 0) : 0;
}

typedef struct Layers Layers; /* consecutive layers and how far they are (step.c) */
int decode(Layers *s, int threads);

#endif
