/* Few rows of x times a matrix: what linear.c, rounded.c, few_rows.c, rounded_rows.c and fewest_rounded_rows.c share. */
#ifndef LINEAR_H
#define LINEAR_H

#include "panels.h"

/* y = x W^T + b. Strides are from row to row, in elements; x_stride in rounded_rows.c and fewest_rounded_rows.c is in bytes. */
typedef struct {
  const void *weight;   /* (out, in) of the weight's type */
  const void *bias;     /* (out) of `type`, or NULL */
  const void *x;        /* (batch, in); later as the file that multiplies rearranges it */
  void *y;              /* (batch, out) of `type` */
  ptrdiff_t batch, out, in, weight_stride, x_stride, y_stride;
  int type;
  const float *scales, *x_scales; /* of INT8 and INT4: (out, blocks); of x (batch, blocks), but see rounded_rows.c */
} Linear;

#ifdef HAS_INTRINSICS
/* `linear` by AVX-512: both of FLOAT32; W of BFLOAT16 and x of FLOAT32; or both of BFLOAT16, by AVX512_BF16. Returns whether
   there was no memory. */
int few_rows(Linear a, int weight_type, int threads);

/* `linear` for INT8 and INT4 and up to FEWEST rows of x of 16 bits, by AVX512_VNNI: bit for bit as byte_panels. Returns whether
   there was no memory. */
int rounded_rows(Linear a, int weight_type, int threads);

/* The same on processors with AMX: bit for bit as byte_tiles. */
int fewest_rounded_rows(Linear a, int weight_type, int threads);

/* What the lines of 4 bits meet in a row of x, of 16 bits: for each two blocks the higher bytes for the lower and the upper 4
   bits of W, the lower bytes for both, and what is taken off. Beyond the last block there are zeros. */
void split_row(const int16_t *x, char *to, ptrdiff_t blocks);
ptrdiff_t bytes_of_split_row(ptrdiff_t blocks);
#endif

#endif
