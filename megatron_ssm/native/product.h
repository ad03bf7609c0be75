/* y = x W^T + b: the struct that describes a product, and the kernels that compute it. The table in dispatch.c chooses the kernel. */
#ifndef PRODUCT_H
#define PRODUCT_H

#include "registers.h"

/* Strides are from row to row, in elements. Only the kernels with GAPS in the table support gaps between the rows of W and of y; the
   others need weight_stride == in and y_stride == out. */
typedef struct {
  const void *weight;  /* (out, in) of weight_type */
  const float *scales; /* of INT8 and INT4: (out, in / BLOCK), see quantized.h; otherwise NULL */
  const void *bias;    /* (out) of `type`, or NULL */
  const void *x;       /* (batch, in) of `type` */
  void *y;             /* (batch, out) of `type` */
  ptrdiff_t batch, out, in, weight_stride, x_stride, y_stride;
  int weight_type, type, threads;
} Product;

/* Instruction sets. Each includes the ones before it: every x86 processor with AVX512_BF16 has AVX512_VNNI, and so on. */
typedef enum { LOOPS, WITH_AVX2, WITH_AVX512, WITH_VNNI, WITH_BF16, WITH_AMX } Instructions;

/* The instruction set of this processor that this library may use (instructions.c). */
Instructions instructions(void);

/* A product by the kernel of the table. Returns 0; 1 if there was no memory; NO_KERNEL, before it reads anything, if C has none for
   this processor and this product. */
enum { NO_KERNEL = 2 };
int multiply(const Product *p);

/* The kernels return 0, or 1 if there was no memory. A "gemv" is for few rows of x, and reads W from memory once; a "gemm" is for
   many. The order in which a kernel adds up an output does not depend on `batch`. */
typedef int Kernel(const Product *p);
Kernel gemv_float_loops, gemv_quantized_loops;
#ifdef HAS_INTRINSICS
Kernel gemv_float_avx2, gemv_float_avx512;
Kernel gemv_quantized_avx2, gemv_quantized_avx512, gemv_quantized_vnni, gemm_quantized_vnni;
Kernel gemm_float_panels, gemm_bf16_panels, gemm_int16_panels, gemm_int8_panels;
#if defined(__linux__)
#define HAS_TILES
Kernel gemv_bf16_amx, gemv_quantized_amx, gemm_quantized_amx, gemm_bf16_amx;
#endif
#endif

/* The address of row r of x, and of y. */
INLINE const void *x_row(const Product *p, ptrdiff_t r) { return at(p->x, r * p->x_stride, p->type); }
INLINE void *y_row(const Product *p, ptrdiff_t r) { return at(p->y, r * p->y_stride, p->type); }

/* Rows of x from `first` on, `count` of them. */
INLINE Product rows_of(const Product *p, ptrdiff_t first, ptrdiff_t count) {
  Product part = *p;
  part.x = x_row(p, first), part.y = y_row(p, first), part.batch = count;
  return part;
}

/* Writes to y the sums (batch, side) of the rows of x and `side` rows of W, at most MOST_SIDE, from `row` on, plus the bias. side and
   type are compile-time constants. */
enum { MOST_SIDE = 32 };
INLINE void write_panel(const Product *p, const float *sums, int side, ptrdiff_t row, int type) {
  ptrdiff_t count = p->out - row < side ? p->out - row : side;
  float biases[MOST_SIDE] = {0};
  for (ptrdiff_t i = 0; p->bias && i < count; i++) biases[i] = get(p->bias, row + i, type);
  for (ptrdiff_t b = 0; b < p->batch; b++, sums += side) {
    void *to = at(p->y, b * p->out + row, type);
    if (count == side)
#pragma omp simd
      for (int i = 0; i < side; i++) put(to, i, sums[i] + biases[i], type);
    else
      for (ptrdiff_t i = 0; i < count; i++) put(to, i, sums[i] + biases[i], type);
  }
}

#endif
