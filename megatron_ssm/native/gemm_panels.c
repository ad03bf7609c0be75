/* Products of many rows of x with panels (panels.h), on processors without AMX: by AVX-512 if panels.h has a function for it, otherwise
   by AVX2. */
#include "panels.h"

#ifdef HAS_INTRINSICS
/* Sets the memory to prefetch while `words` words are multiplied: part `part` of `parts`, in the order of addresses, of the PANEL rows
   from `row` on; nothing after the last row. */
static void set_ahead(const Panels *a, Panel *panel, ptrdiff_t row, ptrdiff_t part, ptrdiff_t parts, ptrdiff_t words) {
  ptrdiff_t first = row < a->p.out ? row : a->p.out, last = row + PANEL < a->p.out ? row + PANEL : a->p.out;
  const char *start = address_of(a, first, 0);
  ptrdiff_t bytes = address_of(a, last, 0) - start;
  panel->ahead = start + bytes * part / parts;
  panel->step = bytes / parts / words + 1;
}

/* The functions for 1 to `most` rows of x. */
static AddRows *const *functions_for(Words kind, int *most) {
  int is_wide = instructions() >= (kind == FLOATS ? WITH_AVX512 : kind == BFLOAT16_PAIRS ? WITH_BF16 : WITH_VNNI);
  return is_wide ? add_rows_avx512(kind, most) : add_rows_avx2(kind, most);
}

/* All rows of x times PANEL rows of W from `row` on. */
TARGET_AVX2 static void multiply_panel(const Panels *a, Panel *panel, ptrdiff_t row) {
  int most, is_block_float = a->p.weight_type == BFLOAT16 && a->kind == INTEGER_PAIRS;
  Fill *fill = instructions() >= WITH_AVX512 && !is_block_float ? fill_avx512 : fill_avx2;
  AddRows *const *functions = functions_for(a->kind, &most);
  ptrdiff_t words = a->words, part = 0, parts = (words + PANEL_WORDS - 1) / PANEL_WORDS * ((a->p.batch + most - 1) / most);
  memset(panel->sums, 0, a->p.batch * PANEL * sizeof(float));
  for (ptrdiff_t start = 0; start < words; start += PANEL_WORDS) {
    ptrdiff_t stop = start + PANEL_WORDS < words ? start + PANEL_WORDS : words;
    fill(a, panel, row, start, stop);
    for (ptrdiff_t first = 0; first < a->p.batch; first += most) {
      ptrdiff_t count = a->p.batch - first < most ? a->p.batch - first : most;
      set_ahead(a, panel, row + PANEL, part++, parts, stop - start);
      if (most != WIDE_ROWS) prefetch_lines(panel->ahead, panel->ahead + (stop - start) * panel->step);
      for (ptrdiff_t r = first; stop == words && r < first + count; r++)
        __builtin_prefetch(at(a->p.y, r * a->p.out + row, a->p.type), 1);
      functions[count - 1](a, panel, first, start, stop);
    }
  }
  if (a->p.type == FLOAT32) write_panel(&a->p, panel->sums, PANEL, row, FLOAT32);
  else write_panel(&a->p, panel->sums, PANEL, row, BFLOAT16);
}

/* Each thread takes the next panel that is left. */
static int multiply_panels(const Panels *a) {
  int failed = 0, threads = a->p.threads;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(| : failed)
  {
    Panel *panel = allocate(sizeof *panel);
    failed = !panel;
#pragma omp for schedule(dynamic)
    for (ptrdiff_t row = 0; row < a->p.out; row += PANEL)
      if (!failed) multiply_panel(a, panel, row);
    free(panel);
  }
  return failed;
}

/* Rows of x as they are multiplied: as integers with their scales, or of bfloat16 with a zero where their number is odd. */
static void fill_x(const Panels *a, uint32_t *to, float *scales, int32_t *sums) {
  const Product *p = &a->p;
  if (a->kind == BYTE_QUADS) {
    x_in_8_bits(p, (int8_t *)to, scales, sums);
  } else if (is_quantized(p->weight_type)) {
    fill_16_bits(p, (QuantizedX){(int16_t *)to, scales});
  } else {
    for (ptrdiff_t r = 0; r < p->batch; r++, to += a->x_words, scales += a->blocks)
      if (a->kind == INTEGER_PAIRS) x_in_block_float(p, r, (int16_t *)to, scales);
      else to[a->x_words - 1] = 0, memcpy(to, x_row(p, r), bytes_of(p->in, BFLOAT16));
  }
}

/* By panels of words of this kind, X_ROWS rows of x at a time. */
static int multiply_as(const Product *p, Words kind) {
  int in_place = kind == FLOATS, failed = 0;
  ptrdiff_t passes = (p->batch + X_ROWS - 1) / X_ROWS, step = (p->batch + passes - 1) / passes;
  ptrdiff_t blocks = (p->in + BLOCK - 1) / BLOCK, each = columns_per_word(kind);
  ptrdiff_t words = has_blocks(kind) ? blocks * words_per_block(kind) : (p->in + each - 1) / each;
  ptrdiff_t x_words = in_place ? p->x_stride : words;
  uint32_t *copy = allocate(in_place ? LINE : step * (x_words + 2 * blocks) * sizeof(uint32_t));
  float *x_scales = (float *)copy + step * x_words;
  int32_t *x_sums = (int32_t *)x_scales + step * blocks;
  for (ptrdiff_t first = 0; first < p->batch && copy && !failed; first += step) {
    Product rows = rows_of(p, first, p->batch - first < step ? p->batch - first : step);
    Panels a = {rows, kind, words, blocks, in_place ? rows.x : copy, x_words, x_scales, x_sums};
    if (!in_place) fill_x(&a, copy, x_scales, x_sums);
    failed = multiply_panels(&a);
  }
  free(copy);
  return failed || !copy;
}

int gemm_float_panels(const Product *p) { return multiply_as(p, FLOATS); }
int gemm_bf16_panels(const Product *p) { return multiply_as(p, BFLOAT16_PAIRS); }
int gemm_int16_panels(const Product *p) { return multiply_as(p, INTEGER_PAIRS); }
int gemm_int8_panels(const Product *p) { return multiply_as(p, BYTE_QUADS); }
#endif
