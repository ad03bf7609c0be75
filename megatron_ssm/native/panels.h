/* Panels: PANEL rows of W, rearranged by panel_product.c, and their products with rows of x.

   A word has 32 bits: a float32 column, two columns of 16 bits, or four of 8. The words of all rows of a panel that meet the same word of
   x lie side by side. */
#ifndef PANELS_H
#define PANELS_H

#include "block_float.h"

#ifdef HAS_INTRINSICS
enum {
  OFFSET = 128,      /* of 8-bit integers of W */
  PANEL = 32,        /* rows: their words fill four registers of AVX2, or two of AVX-512 */
  PANEL_WORDS = 192, /* words of a row that are multiplied at a time: PANEL times so many stay in the first-level cache */
  X_ROWS = 256,      /* rows of x that are multiplied at a time: PANEL_WORDS words of each stay in the second-level cache */
  PAIRS = BLOCK / 2, QUADS = BLOCK / 4 /* words of a block of columns of 16 bits, and of 8 */
};

/* What words hold: a float32 number; two bfloat16 numbers; two 16-bit integers, or four 8-bit ones, in blocks with scales. */
typedef enum { FLOATS, BFLOAT16_PAIRS, INTEGER_PAIRS, BYTE_QUADS } Words;

INLINE int has_blocks(Words kind) { return kind == INTEGER_PAIRS || kind == BYTE_QUADS; }
INLINE ptrdiff_t columns_per_word(Words kind) { return kind == FLOATS ? 1 : kind == BYTE_QUADS ? 4 : 2; }
INLINE ptrdiff_t words_per_block(Words kind) { return kind == BYTE_QUADS ? QUADS : PAIRS; }

typedef struct {
  const char *values;
  const float *scales;     /* (out, in / BLOCK), of INT8 and INT4 */
  const void *bias;        /* (out) of `type`, or NULL */
  const uint32_t *x;       /* (batch, x_words) */
  const float *x_scales;   /* (batch, blocks) */
  const int32_t *x_sums;   /* (batch, blocks), of BYTE_QUADS: see integer_product.c */
  void *y;                 /* (batch, out) of `type` */
  ptrdiff_t batch, out, in, x_words;
  ptrdiff_t words, blocks; /* of a row of W; rows of integers are whole blocks */
  int type, weight_type;
  Words kind;
} Product;

/* Temporaries of a thread. */
typedef struct {
  uint32_t words[PANEL_WORDS * PANEL]; /* (PANEL_WORDS, PANEL): columns of W */
  float scales[PANEL_WORDS / QUADS * PANEL]; /* (blocks, PANEL) */
  float sums[X_ROWS * PANEL];    /* (rows of x, PANEL) */
  const char *ahead;             /* what is prefetched while words are multiplied, */
  ptrdiff_t step;                /* and how many bytes further with each word */
} Panel;

/* Rearranges the words `start` to `stop` of PANEL rows of W from `row` on, by AVX-512; rows beyond the last are zeros. */
void wide_fill(const Product *a, Panel *panel, ptrdiff_t row, ptrdiff_t start, ptrdiff_t stop);

/* The address of a word of a row of W; in blocks of INT8 and INT4, of its block. */
INLINE const char *address_of(const Product *a, ptrdiff_t row, ptrdiff_t word) {
  if (!is_rounded(a->weight_type)) return at(a->values, row * a->in + columns_per_word(a->kind) * word, a->weight_type);
  return a->values + (row * a->blocks + word / words_per_block(a->kind)) * bytes_per_block(a->weight_type);
}

/* The scales of the blocks of INT8 or INT4 that wide_fill, or its slower twin, rearranges. */
INLINE void fill_scales(const Product *a, Panel *panel, ptrdiff_t row, ptrdiff_t start, ptrdiff_t stop) {
  ptrdiff_t each = words_per_block(a->kind);
  float *scales = panel->scales;
  for (ptrdiff_t k = start; k < stop; k += each)
    for (ptrdiff_t r = 0; r < PANEL; r++)
      *scales++ = row + r < a->out ? a->scales[(row + r) * a->blocks + k / each] : 0;
}

/* Writes to y (batch, out) the sums (batch, side) of the rows of x and `side` rows of W, at most PANEL, from `row` on, plus the bias,
   NULL or (out). y and bias are of `type`. side and type are compile-time constants. */
INLINE void write_panel(const float *sums, int side, const void *bias, void *y, ptrdiff_t row, ptrdiff_t out, ptrdiff_t batch,
                        int type) {
  ptrdiff_t count = out - row < side ? out - row : side;
  float biases[PANEL] = {0};
  for (ptrdiff_t i = 0; bias && i < count; i++) biases[i] = get(bias, row + i, type);
  for (ptrdiff_t b = 0; b < batch; b++, sums += side) {
    void *to = at(y, b * out + row, type);
    if (count == side)
#pragma omp simd
      for (int i = 0; i < side; i++) put(to, i, sums[i] + biases[i], type);
    else
      for (ptrdiff_t i = 0; i < count; i++) put(to, i, sums[i] + biases[i], type);
  }
}

/* Adds the products of words `start` to `stop` of some rows of x from `first` on to their sums. There is one function for each
   number of rows. */
typedef void AddRows(const Product *, Panel *, ptrdiff_t first, ptrdiff_t start, ptrdiff_t stop);

/* sum plus the products of a register of words of W and of x. kind is a compile-time constant. (Assembly needs no target
   attributes of the instructions, so that the functions for FLOATS run on any processor with AVX-512.) */
INLINE_FOR(TARGET_AVX512) __m512 add_word(__m512 sum, __m512 words, __m512 x, Words kind) {
  if (kind == FLOATS) return _mm512_fmadd_ps(words, x, sum);
  if (kind == BFLOAT16_PAIRS) __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(words), "vm"(x));
  else if (kind == BYTE_QUADS) __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(words), "vm"(x));
  else __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(words), "vm"(x));
  return sum;
}

/* The functions for 1 to WIDE_ROWS rows of x by AVX-512. BFLOAT16_PAIRS need AVX512_BF16, integers AVX512_VNNI. */
enum { WIDE_ROWS = 12 };
AddRows *const *wide_functions(Words kind);

/* y (batch, out) = x W^T + b by panels, as words of this kind; other arguments as of tile_product. */
int multiply_by_panels(const void *values, const float *scales, const void *bias, const void *x, void *y, ptrdiff_t batch,
                       ptrdiff_t out, ptrdiff_t in, ptrdiff_t x_stride, int weight_type, int type, int threads, Words kind);
#endif

/* Each block of x (batch, in) in 8 bits -> to (batch, in), with its scale and its sum as in Product. */
void round_to_bytes(const void *x, int8_t *to, float *scales, int32_t *sums, ptrdiff_t batch, ptrdiff_t blocks,
                    ptrdiff_t x_stride, int type);

#endif
