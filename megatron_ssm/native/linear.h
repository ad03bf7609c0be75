/* Few rows of x times a matrix: what linear.c, rounded.c and few_rows.c share. */
#ifndef LINEAR_H
#define LINEAR_H

#include "panels.h"

/* y = x W^T + b */
typedef struct {
  const void *weight;   /* (out, in) of the weight's type */
  const void *bias;     /* (out) of `type`, or NULL */
  const void *x;        /* (batch, in): see linear.c, rounded.c and few_rows.c */
  void *y;              /* (batch, out) of `type` */
  ptrdiff_t batch, out, in, weight_stride, x_stride, y_stride; /* strides between rows */
  int type;
  const float *scales, *x_scales; /* of INT8 and INT4: (out, blocks); of x in 16 bits, for few_rows.c (blocks, batch) */
} Linear;

#ifdef HAS_INTRINSICS
/* Multiplies the rows `start` to `stop` of W by all rows of x, by AVX-512. Where W is FLOAT32 or BFLOAT16 (which needs
   AVX512_BF16) x is of the same type. INT8 and INT4 need AVX512_VNNI; x_scales are followed by 8 more floats, which are
   read, but do not change the result. */
void multiply_few_rows(const Linear *a, int weight_type, ptrdiff_t start, ptrdiff_t stop);
#endif

#endif
