/* Panels: PANEL rows of W, rearranged by gemm_panels_avx2.c or gemm_panels_avx512.c, and their products with rows of x.

   A word has 32 bits: a float32 column, two columns of 16 bits, or four of 8. The words of all rows of a panel that are multiplied by
   the same word of x are adjacent in memory. */
#ifndef PANELS_H
#define PANELS_H

#include "quantized.h"

#ifdef HAS_INTRINSICS
enum {
  PANEL = 32,        /* rows: their words fill four registers of AVX2, or two of AVX-512 */
  PANEL_WORDS = 192, /* words of a row that are multiplied at a time: PANEL rows of them stay in the first-level cache */
  X_ROWS = 256,      /* rows of x that are multiplied at a time: PANEL_WORDS words of each stay in the second-level cache */
  PAIRS = BLOCK / 2, QUADS = BLOCK / 4 /* words of a block of columns of 16 bits, and of 8 */
};

INLINE int has_blocks(Words kind) { return kind == INTEGER_PAIRS || kind == BYTE_QUADS; }
INLINE ptrdiff_t columns_per_word(Words kind) { return kind == FLOATS ? 1 : kind == BYTE_QUADS ? 4 : 2; }
INLINE ptrdiff_t words_per_block(Words kind) { return kind == BYTE_QUADS ? QUADS : PAIRS; }

typedef struct {
  Product p;
  Words kind;
  ptrdiff_t words, blocks; /* of a row of W; rows of integers are whole blocks */
  const uint32_t *x;       /* (batch, x_words) */
  ptrdiff_t x_words;
  const float *x_scales;   /* (batch, blocks) */
  const int32_t *x_sums;   /* (batch, blocks), of BYTE_QUADS: see x_in_8_bits in quantized.h */
} Panels;

/* Temporaries of a thread. */
typedef struct {
  uint32_t words[PANEL_WORDS * PANEL]; /* (PANEL_WORDS, PANEL): columns of W */
  float scales[PANEL_WORDS / QUADS * PANEL]; /* (blocks, PANEL) */
  float sums[X_ROWS * PANEL];    /* (rows of x, PANEL) */
  const char *ahead;             /* the address to prefetch while words are multiplied, */
  ptrdiff_t step;                /* and its increment for each word, in bytes */
} Panel;

/* The address of a word of a row of W; in blocks of INT8 and INT4, of its block. */
INLINE const char *address_of(const Panels *a, ptrdiff_t row, ptrdiff_t word) {
  int type = a->p.weight_type;
  if (!is_quantized(type)) return at(a->p.weight, row * a->p.in + columns_per_word(a->kind) * word, type);
  return (const char *)a->p.weight + (row * a->blocks + word / words_per_block(a->kind)) * bytes_per_block(type);
}

/* The scales of the blocks of INT8 or INT4 that are rearranged. */
INLINE void fill_scales(const Panels *a, Panel *panel, ptrdiff_t row, ptrdiff_t start, ptrdiff_t stop) {
  ptrdiff_t each = words_per_block(a->kind);
  float *scales = panel->scales;
  for (ptrdiff_t k = start; k < stop; k += each)
    for (ptrdiff_t r = 0; r < PANEL; r++)
      *scales++ = row + r < a->p.out ? a->p.scales[(row + r) * a->blocks + k / each] : 0;
}

/* Rearranges the words `start` to `stop` of PANEL rows of W from `row` on; rows beyond the last are zeros. That by AVX-512 does not
   take BFLOAT16 as INTEGER_PAIRS. */
typedef void Fill(const Panels *, Panel *, ptrdiff_t row, ptrdiff_t start, ptrdiff_t stop);
Fill fill_avx2, fill_avx512;

/* Adds the products of words `start` to `stop` of some rows of x from `first` on to their sums. There is one function for each
   number of rows: those for 1 to `most` rows, which is at most WIDE_ROWS. By AVX2 there are FLOATS and INTEGER_PAIRS; by AVX-512,
   BFLOAT16_PAIRS need AVX512_BF16, integers AVX512_VNNI. FLOATS and INTEGER_PAIRS have the same bits by both. */
typedef void AddRows(const Panels *, Panel *, ptrdiff_t first, ptrdiff_t start, ptrdiff_t stop);
enum { WIDE_ROWS = 12 };
AddRows *const *add_rows_avx2(Words kind, int *most);
AddRows *const *add_rows_avx512(Words kind, int *most);

/* A row of x as 16-bit integers, in blocks with a power of two each. */
void x_in_block_float(const Product *p, ptrdiff_t row, int16_t *to, float *scales);
#endif

#endif
