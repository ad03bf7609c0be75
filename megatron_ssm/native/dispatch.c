/* The choice of kernels. It depends only on the instruction set, formats and shapes, so two starts of a program round alike.

   The folder, from the bottom up; no file uses a later one:
     native.h (sparsefusion), elementary.h   element types, compilation for several processors; exp, softplus
     kernels.h, registers.h                  prototypes; prefetches, memory, operations on registers
     product.h, instructions.c               a product, its kernels, and the instruction sets
     quantized.h, quantized.c                matrices of 8 and 4 bits, and x as integers
     gemv_FORMAT_INSTRUCTIONS.c              products of few rows of x: limited by the memory, which delivers W once
     gemm_FORMAT_INSTRUCTIONS.c              products of many rows: limited by the multiplications
     activate.c, attention.c, conv.c, norm.c     the other operations of a layer
     selective_scan.c, gated_delta.c, ssd.h, ssd_loops.c, ssd_amx.c   recurrences
     dispatch.c                              this file
     tape.h, experts.c, tape.c               whole layers, and whole tokens
   Python calls kernels through kernels.py and products.py.

   In a product of up to 16 rows of x, each row has the same bits as in a product of that row alone: all kernels for up to 16 rows of
   one format and one instruction set add up in the same order. */
#include "quantized.h"
#include "ssd.h"

#define BY(KERNEL) KERNEL, #KERNEL
enum { ANY = -1, QUANTIZED = -2, GAPS = 1 };
enum { TWO = 2 }; /* kernels of lines with this number support at most two rows */
#define MANY PTRDIFF_MAX

typedef struct {
  int weight, x;      /* the formats of W, and of x, bias and y. QUANTIZED: INT8 or INT4; ANY: FLOAT32 or BFLOAT16 */
  Instructions least; /* the instruction set that the kernel needs */
  ptrdiff_t rows;     /* the most rows of x */
  Kernel *kernel;
  const char *name;
  int columns;        /* the length of W's rows must be a multiple of it; 0: any length */
  int gaps;           /* GAPS: there may be gaps between the rows of W, and of y */
} Line;

/* A product uses the first line that fits.

   WITH_BF16, WITH_AVX512 and WITH_AVX2 were measured on a Zen 4 in interleaved repetitions, at the sizes of 130m models; the latter two
   as builds for processors without the rest. gemm becomes faster than gemv at 12 to 36 rows; up to 16 rows use the kernels that give
   the same bits. WITH_AMX was measured on a Xeon. For many rows by plain loops, torch is faster. */
static const Line TABLE[] = {
  /* W        x         needs        rows  kernel */
#ifdef HAS_TILES
  {FLOAT32,   FLOAT32,  WITH_AMX,    24,   BY(gemv_float_avx512), 1, GAPS},
  {FLOAT32,   FLOAT32,  WITH_AMX,    MANY, BY(gemm_bf16_amx)},           /* each number as the sum of three of bfloat16 */
  {BFLOAT16,  BFLOAT16, WITH_AMX,    TWO,  BY(gemv_bf16_amx), 32},
  {BFLOAT16,  BFLOAT16, WITH_AMX,    MANY, BY(gemm_bf16_amx), 32},
  {BFLOAT16,  ANY,      WITH_AMX,    24,   BY(gemv_float_avx512), 2, GAPS},
  {BFLOAT16,  ANY,      WITH_AMX,    MANY, BY(gemm_bf16_amx)},           /* x in bfloat16 */
  {QUANTIZED, ANY,      WITH_AMX,    TWO,  BY(gemv_quantized_amx)},      /* x in 16 bits */
  {QUANTIZED, ANY,      WITH_AMX,    24,   BY(gemm_quantized_amx)},
  {QUANTIZED, ANY,      WITH_AMX,    MANY, BY(gemm_bf16_amx)},           /* W and x in bfloat16 */
#endif
#ifdef HAS_INTRINSICS
  {FLOAT32,   FLOAT32,  WITH_AVX512, 24,   BY(gemv_float_avx512), 1, GAPS},
  {FLOAT32,   FLOAT32,  WITH_AVX2,   16,   BY(gemv_float_avx2), 1, GAPS},
  {FLOAT32,   FLOAT32,  WITH_AVX2,   MANY, BY(gemm_float_panels)},
  {BFLOAT16,  BFLOAT16, WITH_BF16,   24,   BY(gemv_float_avx512), 2, GAPS},
  {BFLOAT16,  BFLOAT16, WITH_BF16,   MANY, BY(gemm_bf16_panels)},
  {BFLOAT16,  ANY,      WITH_AVX512, 16,   BY(gemv_float_avx512), 2, GAPS},
  {BFLOAT16,  ANY,      WITH_AVX2,   16,   BY(gemv_float_avx2), 2, GAPS},
  {BFLOAT16,  ANY,      WITH_AVX2,   MANY, BY(gemm_int16_panels)},       /* W and x as integers, in blocks of 64 */
  {QUANTIZED, ANY,      WITH_VNNI,   TWO,  BY(gemv_quantized_vnni)},     /* x in 16 bits, unless the name says 8 */
  {QUANTIZED, ANY,      WITH_VNNI,   36,   BY(gemm_quantized_vnni)},
  {QUANTIZED, ANY,      WITH_VNNI,   MANY, BY(gemm_int8_panels)},
  {QUANTIZED, ANY,      WITH_AVX512, 36,   BY(gemv_quantized_avx512)},
  {QUANTIZED, ANY,      WITH_AVX2,   36,   BY(gemv_quantized_avx2)},
  {QUANTIZED, ANY,      WITH_AVX2,   MANY, BY(gemm_int16_panels)},
#endif
  {FLOAT32,   FLOAT32,  LOOPS,       16,   BY(gemv_float_loops), 1, GAPS},
  {BFLOAT16,  ANY,      LOOPS,       16,   BY(gemv_float_loops), 2, GAPS},
  {QUANTIZED, ANY,      LOOPS,       36,   BY(gemv_quantized_loops)},
};
enum { LINES = sizeof TABLE / sizeof *TABLE };

/* 1 if a line has these formats, and a kernel that this processor can run. */
static int applies(const Line *l, int weight_type, int type) {
  int has_weight = l->weight == QUANTIZED ? is_quantized(weight_type) : l->weight == weight_type;
  int has_x = l->x == ANY ? type == FLOAT32 || type == BFLOAT16 : l->x == type;
  return has_weight && has_x && instructions() >= l->least;
}

/* 1 if the kernel of a line supports a W of this layout, for some number of rows of x. */
static int takes(const Line *l, int weight_type, int type, ptrdiff_t in, int has_gaps) {
  ptrdiff_t columns = l->weight == QUANTIZED ? BLOCK : l->columns ? l->columns : 1;
  return applies(l, weight_type, type) && in > 0 && in % columns == 0 && (l->gaps || !has_gaps);
}

static const Line *line_for(int weight_type, int type, ptrdiff_t batch, ptrdiff_t in, int has_gaps) {
  for (const Line *l = TABLE; l < TABLE + LINES; l++)
    if (batch <= l->rows && takes(l, weight_type, type, in, has_gaps)) return l;
  return NULL;
}

static int run(const Line *l, const Product *p) {
  if (!l) return NO_KERNEL;
  return p->batch && p->out ? l->kernel(p) : 0;
}

static int has_gaps(const Product *p) { return p->weight_stride != p->in || p->y_stride != p->out; }

int multiply(const Product *p) { return run(line_for(p->weight_type, p->type, p->batch, p->in, has_gaps(p)), p); }

/* The functions that Python calls */

/* A product without gaps. kernel: the name of a kernel, which may then have more rows than in the table; or NULL. */
int linear(const void *weight, const float *scales, const void *bias, const void *x, void *y, ptrdiff_t batch, ptrdiff_t out,
           ptrdiff_t in, int weight_type, int type, int threads, const char *kernel) {
  Product p = {weight, scales, bias, x, y, batch, out, in, in, in, out, weight_type, type, threads};
  if (!kernel) return multiply(&p);
  for (const Line *l = TABLE; l < TABLE + LINES; l++)
    if (!strcmp(l->name, kernel) && takes(l, weight_type, type, in, 0) && (l->rows > TWO || batch <= TWO)) return run(l, &p);
  return NO_KERNEL;
}

/* 1 if the table has a kernel for `batch` rows of x. */
int has_kernel(int weight_type, int type, ptrdiff_t batch, ptrdiff_t in, int gaps) {
  return line_for(weight_type, type, batch, in, gaps) != NULL;
}

/* Writes the number of rows and the name (less than 32 bytes) of line `index` of the table if it applies. Returns 0 after the last
   line, otherwise 1. */
int kernel_line(int index, int weight_type, int type, ptrdiff_t *rows, char *name) {
  if (index >= LINES) return 0;
  *rows = 0;
  if (applies(&TABLE[index], weight_type, type)) *rows = TABLE[index].rows, strcpy(name, TABLE[index].name);
  return 1;
}

/* Mamba-2's recurrence. See `ssd` in kernels/scan.py. */
int ssd(const void *x, const float *dt, const float *A_log, const void *B, const void *C, const float *D, const float *state,
        void *y, float *next, float *saved, const ptrdiff_t *strides, ptrdiff_t batch, ptrdiff_t seq, ptrdiff_t heads,
        ptrdiff_t P, ptrdiff_t groups, ptrdiff_t N, int type, int one_by_one, int may_round, int threads) {
  Ssd a = {x, B, C, dt, A_log, D, state, y, next, saved, strides, batch, seq, heads, P, groups, N, type, one_by_one, may_round};
#ifdef HAS_TILES
  if (instructions() == WITH_AMX && fits_ssd_amx(&a, threads)) return ssd_amx(&a, threads);
#endif
  return ssd_loops(&a, threads);
}
