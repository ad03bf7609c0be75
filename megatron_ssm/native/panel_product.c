/* y = x W^T + b for many rows of x by AVX2 or AVX-512, on processors without AMX.

   PANEL rows of W at a time are rearranged (panels.h). INT8 and INT4 matrices are multiplied as 16-bit integers by an x that is
   rounded as in rounded.c, which is faster than float32 and hardly less exact; FLOAT32 matrices in float32; BFLOAT16 matrices
   in bfloat16 where x is too and the processor has AVX512_BF16, otherwise in float32, or, by integer_panel_product, as integers
   (block_float.h). */
#include "panels.h"

#ifdef HAS_INTRINSICS
enum {
  VECTOR = 8, HALF = PANEL / 2,  /* words in a register; rows of W that are multiplied at once */
  FLOAT_ROWS = 6, INTEGER_ROWS = 4 /* rows of x that are multiplied at once: their sums stay in registers */
};

/* rows[i][j] becomes rows[j][i]. */
INLINE_FOR(TARGET_AVX2) void transpose(__m256 rows[VECTOR]) {
  __m256 t[VECTOR];
#pragma GCC unroll 4
  for (int i = 0; i < VECTOR; i += 2) {
    t[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < VECTOR; i += 4)
    for (int j = 0; j < 2; j++) {
      rows[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0x44);
      rows[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0xee);
    }
#pragma GCC unroll 4
  for (int i = 0; i < VECTOR / 2; i++) {
    t[i] = _mm256_permute2f128_ps(rows[i], rows[i + 4], 0x20);
    t[i + 4] = _mm256_permute2f128_ps(rows[i], rows[i + 4], 0x31);
  }
  for (int i = 0; i < VECTOR; i++) rows[i] = t[i];
}

/* VECTOR words of a row of W, from `word` on; beyond the row's last word there are zeros. */
INLINE_FOR(TARGET_AVX2) __m256 words_of(const Product *a, ptrdiff_t row, ptrdiff_t word, int weight_type) {
  const void *from = address_of(a, row, word);
  if (is_rounded(weight_type)) return (__m256)quarter_block(from, word / VECTOR % 4, weight_type);
  float rest[VECTOR] = {0};
  if (word + VECTOR > a->in) {
    if (word < a->in) memcpy(rest, from, bytes_of(a->in - word, weight_type));
    from = rest;
  }
  if (weight_type == FLOAT32) return _mm256_loadu_ps(from);
  return (__m256)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(from)), 16);
}

/* Puts VECTOR words of VECTOR rows, the `half`-th and those after it, side by side; they are the panel's words from k on. */
INLINE_FOR(TARGET_AVX2) void put_words(Panel *panel, ptrdiff_t k, ptrdiff_t half, __m256 rows[VECTOR]) {
  transpose(rows);
  for (int i = 0; i < VECTOR; i++) _mm256_store_ps((float *)panel->words + (k + i) * PANEL + half, rows[i]);
}

/* Rearranges the words `start` to `stop` of PANEL rows of W from `row` on; rows beyond the last are zeros. */
INLINE_FOR(TARGET_AVX2) void fill_each(const Product *a, Panel *panel, ptrdiff_t row, ptrdiff_t start, ptrdiff_t stop,
                                      int weight_type) {
  for (ptrdiff_t k = start; k < stop; k += VECTOR)
    for (ptrdiff_t half = 0; half < PANEL; half += VECTOR) {
      __m256 rows[VECTOR];
      for (int i = 0; i < VECTOR; i++)
        rows[i] = row + half + i < a->out ? words_of(a, row + half + i, k, weight_type) : _mm256_setzero_ps();
      put_words(panel, k - start, half, rows);
    }
  if (is_rounded(weight_type)) fill_scales(a, panel, row, start, stop);
}

/* As fill_each, for BFLOAT16 as integers. */
TARGET_AVX2 static void fill_rounded(const Product *a, Panel *panel, ptrdiff_t row, ptrdiff_t start, ptrdiff_t stop) {
  for (ptrdiff_t k = start; k < stop; k += PAIRS)
    for (ptrdiff_t half = 0; half < PANEL; half += VECTOR) {
      int16_t blocks[VECTOR][BLOCK];
      float *scales = panel->scales + (k - start) / PAIRS * PANEL + half;
      for (int i = 0; i < VECTOR; i++)
        if (row + half + i >= a->out) scales[i] = 0, memset(blocks[i], 0, sizeof blocks[i]);
        else round_block((const uint16_t *)address_of(a, row + half + i, k), a->in - 2 * k, blocks[i], &scales[i]);
      for (ptrdiff_t word = 0; word < PAIRS; word += VECTOR) {
        __m256 rows[VECTOR];
        for (int i = 0; i < VECTOR; i++) rows[i] = _mm256_loadu_ps((const float *)(blocks[i] + 2 * word));
        put_words(panel, k - start + word, half, rows);
      }
    }
}

TARGET_AVX2 static void fill(const Product *a, Panel *panel, ptrdiff_t row, ptrdiff_t start, ptrdiff_t stop) {
  int as_integers = a->weight_type == BFLOAT16 && a->kind == INTEGER_PAIRS;
  if (level() == AVX512 && !as_integers) wide_fill(a, panel, row, start, stop);
  else if (a->weight_type == FLOAT32) fill_each(a, panel, row, start, stop, FLOAT32);
  else if (a->weight_type == INT8) fill_each(a, panel, row, start, stop, INT8);
  else if (a->weight_type == INT4) fill_each(a, panel, row, start, stop, INT4);
  else if (as_integers) fill_rounded(a, panel, row, start, stop);
  else fill_each(a, panel, row, start, stop, BFLOAT16);
}

/* Adds to HALF sums of `count` rows of x, PANEL apart, the products of `words` words of x, x_words apart, with those of HALF
   rows of the panel. count is a compile-time constant. (Without the pragmas GCC would keep the sums in memory.) */
INLINE_FOR(TARGET_AVX2) void add_floats(const float *x, ptrdiff_t x_words, const float *w, ptrdiff_t words, float *sums,
                                       int count) {
  __m256 low[FLOAT_ROWS], high[FLOAT_ROWS];
#pragma GCC unroll 8
  for (int r = 0; r < count; r++) {
    low[r] = _mm256_load_ps(sums + r * PANEL);
    high[r] = _mm256_load_ps(sums + r * PANEL + VECTOR);
  }
#pragma GCC unroll 4
  for (ptrdiff_t k = 0; k < words; k++, w += PANEL) {
    __m256 w_low = _mm256_load_ps(w), w_high = _mm256_load_ps(w + VECTOR);
#pragma GCC unroll 8
    for (int r = 0; r < count; r++) {
      __m256 word = _mm256_broadcast_ss(x + r * x_words + k);
      low[r] = _mm256_fmadd_ps(w_low, word, low[r]);
      high[r] = _mm256_fmadd_ps(w_high, word, high[r]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < count; r++) {
    _mm256_store_ps(sums + r * PANEL, low[r]);
    _mm256_store_ps(sums + r * PANEL + VECTOR, high[r]);
  }
}

/* sum plus a times b, in pairs of 16-bit integers. (GCC would copy the sums from register to register.) */
INLINE_FOR(TARGET_AVX2) void add_pairs(__m256i *sum, __m256i a, __m256i b) {
  __m256i products = _mm256_madd_epi16(a, b);
  __asm__("vpaddd %1, %0, %0" : "+x"(*sum) : "x"(products));
}

/* Adds VECTOR integers times their scales to sums. */
INLINE_FOR(TARGET_AVX2) void add_scaled(float *sum, __m256i integers, __m256 scale) {
  _mm256_store_ps(sum, _mm256_fmadd_ps(_mm256_cvtepi32_ps(integers), scale, _mm256_load_ps(sum)));
}

/* As add_floats, for integers. scales, x_scales: those of the first row and word; those of x are from row to row `blocks`
   apart. */
INLINE_FOR(TARGET_AVX2) void add_integers(const uint32_t *x, ptrdiff_t x_words, const float *x_scales, ptrdiff_t blocks,
                                         const uint32_t *w, const float *scales, ptrdiff_t words, float *sums, int count) {
  for (ptrdiff_t block = 0; block < words / PAIRS; block++, scales += PANEL, x += PAIRS) {
    __m256i low[INTEGER_ROWS], high[INTEGER_ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < count; r++) low[r] = high[r] = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (ptrdiff_t k = 0; k < PAIRS; k++, w += PANEL) {
      __m256i w_low = _mm256_load_si256((const __m256i *)w), w_high = _mm256_load_si256((const __m256i *)(w + VECTOR));
#pragma GCC unroll 8
      for (int r = 0; r < count; r++) {
        __m256i word = _mm256_set1_epi32((int)x[r * x_words + k]);
        add_pairs(&low[r], w_low, word);
        add_pairs(&high[r], w_high, word);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < count; r++) {
      __m256 scale = _mm256_broadcast_ss(x_scales + r * blocks + block);
      add_scaled(sums + r * PANEL, low[r], _mm256_mul_ps(scale, _mm256_load_ps(scales)));
      add_scaled(sums + r * PANEL + VECTOR, high[r], _mm256_mul_ps(scale, _mm256_load_ps(scales + VECTOR)));
    }
  }
}

/* Adds the products of words `start` to `stop` of `count` rows of x from `first` on to their sums. */
INLINE_FOR(TARGET_AVX2) void add_rows(const Product *a, Panel *panel, ptrdiff_t first, ptrdiff_t start, ptrdiff_t stop,
                                     int count, int integers) {
  const uint32_t *x = a->x + first * a->x_words + start, *w = panel->words;
  const float *x_scales = a->x_scales + first * a->blocks + start / PAIRS, *scales = panel->scales;
  float *sums = panel->sums + first * PANEL;
  for (int half = 0; half < PANEL; half += HALF, w += HALF, scales += HALF, sums += HALF)
    if (!integers) add_floats((const float *)x, a->x_words, (const float *)w, stop - start, sums, count);
    else add_integers(x, a->x_words, x_scales, a->blocks, w, scales, stop - start, sums, count);
}

#define ADD_ROWS(NAME, COUNT, INTEGERS)                                                                                     \
  TARGET_AVX2 static void NAME##COUNT(const Product *a, Panel *panel, ptrdiff_t first, ptrdiff_t start, ptrdiff_t stop) { \
    add_rows(a, panel, first, start, stop, COUNT, INTEGERS);                                                              \
  }
ADD_ROWS(floats_, 1, 0) ADD_ROWS(floats_, 2, 0) ADD_ROWS(floats_, 3, 0)
ADD_ROWS(floats_, 4, 0) ADD_ROWS(floats_, 5, 0) ADD_ROWS(floats_, 6, 0)
ADD_ROWS(integers_, 1, 1) ADD_ROWS(integers_, 2, 1) ADD_ROWS(integers_, 3, 1) ADD_ROWS(integers_, 4, 1)
static AddRows *const floats[FLOAT_ROWS] = {floats_1, floats_2, floats_3, floats_4, floats_5, floats_6};
static AddRows *const integers[INTEGER_ROWS] = {integers_1, integers_2, integers_3, integers_4};

/* Determines what is prefetched while `words` words are multiplied: of the PANEL rows from `row` on, the part-th of `parts` in the
   order of the addresses. After the last row there is nothing. */
static void set_ahead(const Product *a, Panel *panel, ptrdiff_t row, ptrdiff_t part, ptrdiff_t parts, ptrdiff_t words) {
  ptrdiff_t first = row < a->out ? row : a->out, last = row + PANEL < a->out ? row + PANEL : a->out;
  const char *start = address_of(a, first, 0);
  ptrdiff_t bytes = address_of(a, last, 0) - start;
  panel->ahead = start + bytes * part / parts;
  panel->step = bytes / parts / words + 1;
}

/* The functions for 1 to `most` rows of x. */
static AddRows *const *functions_for(Words kind, int *most) {
  *most = WIDE_ROWS;
  if (kind == FLOATS ? level() == AVX512 : kind != INTEGER_PAIRS || has_avx512_vnni()) return wide_functions(kind);
  *most = kind == FLOATS ? FLOAT_ROWS : INTEGER_ROWS;
  return kind == FLOATS ? floats : integers;
}

/* All rows of x times PANEL rows of W from `row` on. */
TARGET_AVX2 static void multiply_panel(const Product *a, Panel *panel, ptrdiff_t row) {
  int most;
  AddRows *const *functions = functions_for(a->kind, &most);
  ptrdiff_t words = a->words, part = 0, parts = (words + PANEL_WORDS - 1) / PANEL_WORDS * ((a->batch + most - 1) / most);
  memset(panel->sums, 0, a->batch * PANEL * sizeof(float));
  for (ptrdiff_t start = 0; start < words; start += PANEL_WORDS) {
    ptrdiff_t stop = start + PANEL_WORDS < words ? start + PANEL_WORDS : words;
    fill(a, panel, row, start, stop);
    for (ptrdiff_t first = 0; first < a->batch; first += most) {
      ptrdiff_t count = a->batch - first < most ? a->batch - first : most;
      set_ahead(a, panel, row + PANEL, part++, parts, stop - start);
      if (most != WIDE_ROWS) prefetch_lines(panel->ahead, panel->ahead + (stop - start) * panel->step);
      for (ptrdiff_t r = first; stop == words && r < first + count; r++)
        __builtin_prefetch(at(a->y, r * a->out + row, a->type), 1);
      functions[count - 1](a, panel, first, start, stop);
    }
  }
  if (a->type == FLOAT32) write_panel(panel->sums, PANEL, a->bias, a->y, row, a->out, a->batch, FLOAT32);
  else write_panel(panel->sums, PANEL, a->bias, a->y, row, a->out, a->batch, BFLOAT16);
}

/* Each thread takes the next panel that is left. */
static int multiply(const Product *a, int threads) {
  int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(| : failed)
  {
    Panel *panel = allocate(sizeof *panel);
    failed = !panel;
#pragma omp for schedule(dynamic)
    for (ptrdiff_t row = 0; row < a->out; row += PANEL)
      if (!failed) multiply_panel(a, panel, row);
    free(panel);
  }
  return failed;
}

/* Rows of x as they are multiplied: without gaps as float32 or bfloat16, or as integers with their scales. */
TARGET_AVX2 static void fill_x(const Product *a, const void *x, uint32_t *to, float *scales, int32_t *sums,
                               ptrdiff_t x_stride) {
  if (a->kind == BYTE_QUADS) {
    round_to_bytes(x, (int8_t *)to, scales, sums, a->batch, a->blocks, x_stride, a->type);
    return;
  }
  if (is_rounded(a->weight_type)) {
    round_to_16_bits(x, (int16_t *)to, scales, a->batch, a->in, x_stride, a->type);
    return;
  }
  for (ptrdiff_t r = 0; r < a->batch; r++, x = at(x, x_stride, a->type), to += a->x_words, scales += a->blocks)
    if (a->kind == BFLOAT16_PAIRS) to[a->x_words - 1] = 0, memcpy(to, x, bytes_of(a->in, BFLOAT16));
    else if (a->kind == FLOATS)
#pragma omp simd
      for (ptrdiff_t i = 0; i < a->in; i++) ((float *)to)[i] = get(x, i, BFLOAT16);
    else if (a->type == FLOAT32) round_x_row(x, (int16_t *)to, scales, a->in, FLOAT32);
    else round_x_row(x, (int16_t *)to, scales, a->in, BFLOAT16);
}

int multiply_by_panels(const void *values, const float *scales, const void *bias, const void *x, void *y, ptrdiff_t batch,
                       ptrdiff_t out, ptrdiff_t in, ptrdiff_t x_stride, int weight_type, int type, int threads, Words kind) {
  int in_place = kind == FLOATS && type == FLOAT32, failed = 0;
  ptrdiff_t passes = (batch + X_ROWS - 1) / X_ROWS, step = passes ? (batch + passes - 1) / passes : 1;
  ptrdiff_t blocks = (in + BLOCK - 1) / BLOCK, each = columns_per_word(kind);
  ptrdiff_t words = has_blocks(kind) ? blocks * words_per_block(kind) : (in + each - 1) / each;
  ptrdiff_t x_words = in_place ? x_stride : words;
  uint32_t *copy = allocate(in_place ? LINE : step * (x_words + 2 * blocks) * sizeof(uint32_t));
  float *x_scales = (float *)copy + step * x_words;
  int32_t *x_sums = (int32_t *)x_scales + step * blocks;
  for (ptrdiff_t first = 0; first < batch && copy && !failed; first += step) {
    ptrdiff_t count = batch - first < step ? batch - first : step;
    const void *rows = at(x, first * x_stride, type);
    Product a = {values, scales, bias, in_place ? rows : copy, x_scales, x_sums, at(y, first * out, type), count, out, in,
                 x_words, words, blocks, type, weight_type, kind};
    if (!in_place) fill_x(&a, rows, copy, x_scales, x_sums, x_stride);
    failed = multiply(&a, threads);
  }
  free(copy);
  return failed || !copy;
}

int has_panel_products(void) { return level() >= AVX2; }

/* As tile_product. `in` is a multiple of BLOCK for INT8 and INT4. */
int panel_product(const void *values, const float *scales, const void *bias, const void *x, void *y, ptrdiff_t batch,
                  ptrdiff_t out, ptrdiff_t in, ptrdiff_t x_stride, int weight_type, int type, int threads) {
  int in_pairs = weight_type == BFLOAT16 && type == BFLOAT16 && has_avx512_bf16();
  return multiply_by_panels(values, scales, bias, x, y, batch, out, in, x_stride, weight_type, type, threads,
                            is_rounded(weight_type) ? INTEGER_PAIRS : in_pairs ? BFLOAT16_PAIRS : FLOATS);
}

/* The same with a BFLOAT16 matrix as integers too. */
int integer_panel_product(const void *values, const float *scales, const void *bias, const void *x, void *y, ptrdiff_t batch,
                          ptrdiff_t out, ptrdiff_t in, ptrdiff_t x_stride, int weight_type, int type, int threads) {
  return multiply_by_panels(values, scales, bias, x, y, batch, out, in, x_stride, weight_type, type, threads,
                            weight_type == FLOAT32 ? FLOATS : INTEGER_PAIRS);
}
#else
int has_panel_products(void) { return 0; }

int panel_product(const void *values, const float *scales, const void *bias, const void *x, void *y, ptrdiff_t batch,
                  ptrdiff_t out, ptrdiff_t in, ptrdiff_t x_stride, int weight_type, int type, int threads) {
  return 1;
}

int integer_panel_product(const void *values, const float *scales, const void *bias, const void *x, void *y, ptrdiff_t batch,
                          ptrdiff_t out, ptrdiff_t in, ptrdiff_t x_stride, int weight_type, int type, int threads) {
  return 1;
}
#endif
