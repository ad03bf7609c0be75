/* Few rows of x times a matrix of floating-point numbers: what linear.c and few_rows.c share. */
#ifndef LINEAR_H
#define LINEAR_H

#include "panels.h"

/* y = x W^T + b */
typedef struct {
  const void *weight;   /* (out, in) of the weight's type */
  const void *bias;     /* (out) of `type`, or NULL */
  const void *x;        /* (batch, in): float32, for W of BFLOAT16 in planes (linear.c); or BFLOAT16_PAIRS (few_rows.c) */
  void *y;              /* (batch, out) of `type` */
  ptrdiff_t batch, out, in, weight_stride, x_stride, y_stride; /* strides between rows */
  int type;
} Linear;

#ifdef HAS_INTRINSICS
/* Multiplies the rows `start` to `stop` of W by all rows of x, by AVX-512. kind: FLOATS, or with AVX512_BF16 BFLOAT16_PAIRS; W
   and x are both of this kind. */
void multiply_few_rows(const Linear *a, Words kind, ptrdiff_t start, ptrdiff_t stop);
#endif

#endif
