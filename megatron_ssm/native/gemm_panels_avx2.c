/* Panels by AVX2.

   FLOAT32 matrices are multiplied in float32. INT8 and INT4 matrices are multiplied as 16-bit integers by an x that is rounded to 16
   bits, which is faster than float32 and hardly less exact. BFLOAT16 matrices are multiplied as integers as well, in block floating
   point: the numbers of a block of BLOCK columns are 16-bit integers times a power of two.

   So products of bfloat16 matrices are sums of integers, which are exact. The integers of W have W_BITS bits, and are at most 255 * 2^4
   because a bfloat16 number has 8 significant bits; the integers of x are at most 2^X_BITS, and 64 * 4080 * 8192 < 2^31. Scales are
   powers of two, so bfloat16 elements of W are exact down to 2^-4 of the largest in their block, and elements of x down to 2^-5;
   smaller elements have errors up to 2^-12 and 2^-13 of the largest. Rows are padded with zeros. */
#include "panels.h"

#ifdef HAS_INTRINSICS
enum {
  VECTOR = 8, HALF = PANEL / 2,  /* words in a register; rows of W that are multiplied at once */
  FLOAT_ROWS = 6, INTEGER_ROWS = 4, /* rows of x that are multiplied at once: their sums stay in registers */
  W_BITS = 12, X_BITS = 13
};

/* The power of two that makes sizes up to `most`, of which these are the bits, integers of so many bits. Writes its inverse,
   by which the integers are multiplied: NaN if `most` is not finite. Sizes below 2^-127 become 0. */
INLINE float factor_for(uint32_t most, int bits, float *scale) {
  int32_t exponent = (int32_t)(most >> 23) - (bits - 1);
  exponent = exponent < 1 ? 1 : exponent;
  *scale = most < 0xffu << 23 ? float_of_bits((uint32_t)exponent << 23) : __builtin_nanf("");
  return float_of_bits((254u - (uint32_t)exponent) << 23);
}

/* The bits of the largest absolute value of BLOCK bfloat16 numbers, as a float32 number. */
INLINE_FOR(TARGET_AVX2) uint32_t largest_bits(const uint16_t *block) {
  __m256i most = _mm256_setzero_si256(), sizes = _mm256_set1_epi16(0x7fff);
  for (int i = 0; i < BLOCK; i += 16)
    most = _mm256_max_epu16(most, _mm256_and_si256(_mm256_loadu_si256((const void *)(block + i)), sizes));
  __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  __m128i least = _mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1))); /* there is no such instruction for most */
  return (uint32_t)(uint16_t)~_mm_cvtsi128_si32(least) << 16;
}

/* The first `columns` of a row of W, at most BLOCK of them. */
INLINE_FOR(TARGET_AVX2) void round_block(const uint16_t *from, ptrdiff_t columns, int16_t *to, float *scale) {
  uint16_t rest[BLOCK];
  if (columns < BLOCK) {
    memset(rest, 0, sizeof rest);
    from = memcpy(rest, from, columns * sizeof *rest);
  }
  __m256 factor = _mm256_set1_ps(factor_for(largest_bits(from), W_BITS, scale));
  for (int i = 0; i < BLOCK; i += 16) { /* packing restores the order that unpacking changes */
    __m256i words = _mm256_loadu_si256((const void *)(from + i)), zero = _mm256_setzero_si256();
    __m256 low = (__m256)_mm256_unpacklo_epi16(zero, words), high = (__m256)_mm256_unpackhi_epi16(zero, words);
    low = _mm256_mul_ps(low, factor), high = _mm256_mul_ps(high, factor);
    _mm256_storeu_si256((void *)(to + i), _mm256_packs_epi32(_mm256_cvtps_epi32(low), _mm256_cvtps_epi32(high)));
  }
}

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
INLINE_FOR(TARGET_AVX2) __m256 words_of(const Panels *a, ptrdiff_t row, ptrdiff_t word, int weight_type) {
  const void *from = address_of(a, row, word);
  if (is_quantized(weight_type)) return (__m256)quarter_block(from, word / VECTOR % 4, weight_type);
  float rest[VECTOR] = {0};
  if (word + VECTOR > a->p.in) {
    if (word < a->p.in) memcpy(rest, from, bytes_of(a->p.in - word, FLOAT32));
    from = rest;
  }
  return _mm256_loadu_ps(from);
}

/* Puts VECTOR words of VECTOR rows, the `half`-th and those after it, side by side; they are the panel's words from k on. */
INLINE_FOR(TARGET_AVX2) void put_words(Panel *panel, ptrdiff_t k, ptrdiff_t half, __m256 rows[VECTOR]) {
  transpose(rows);
  for (int i = 0; i < VECTOR; i++) _mm256_store_ps((float *)panel->words + (k + i) * PANEL + half, rows[i]);
}

/* Rearranges the words `start` to `stop` of PANEL rows of W from `row` on; rows beyond the last are zeros. */
INLINE_FOR(TARGET_AVX2) void fill_each(const Panels *a, Panel *panel, ptrdiff_t row, ptrdiff_t start, ptrdiff_t stop,
                                      int weight_type) {
  for (ptrdiff_t k = start; k < stop; k += VECTOR)
    for (ptrdiff_t half = 0; half < PANEL; half += VECTOR) {
      __m256 rows[VECTOR];
      for (int i = 0; i < VECTOR; i++)
        rows[i] = row + half + i < a->p.out ? words_of(a, row + half + i, k, weight_type) : _mm256_setzero_ps();
      put_words(panel, k - start, half, rows);
    }
  if (is_quantized(weight_type)) fill_scales(a, panel, row, start, stop);
}

/* As fill_each, for BFLOAT16. */
TARGET_AVX2 static void fill_block_float(const Panels *a, Panel *panel, ptrdiff_t row, ptrdiff_t start, ptrdiff_t stop) {
  for (ptrdiff_t k = start; k < stop; k += PAIRS)
    for (ptrdiff_t half = 0; half < PANEL; half += VECTOR) {
      int16_t blocks[VECTOR][BLOCK];
      float *scales = panel->scales + (k - start) / PAIRS * PANEL + half;
      for (int i = 0; i < VECTOR; i++)
        if (row + half + i >= a->p.out) scales[i] = 0, memset(blocks[i], 0, sizeof blocks[i]);
        else round_block((const uint16_t *)address_of(a, row + half + i, k), a->p.in - 2 * k, blocks[i], &scales[i]);
      for (ptrdiff_t word = 0; word < PAIRS; word += VECTOR) {
        __m256 rows[VECTOR];
        for (int i = 0; i < VECTOR; i++) rows[i] = _mm256_loadu_ps((const float *)(blocks[i] + 2 * word));
        put_words(panel, k - start + word, half, rows);
      }
    }
}

TARGET_AVX2 void fill_avx2(const Panels *a, Panel *panel, ptrdiff_t row, ptrdiff_t start, ptrdiff_t stop) {
  if (a->p.weight_type == FLOAT32) fill_each(a, panel, row, start, stop, FLOAT32);
  else if (a->p.weight_type == INT8) fill_each(a, panel, row, start, stop, INT8);
  else if (a->p.weight_type == INT4) fill_each(a, panel, row, start, stop, INT4);
  else fill_block_float(a, panel, row, start, stop);
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
INLINE_FOR(TARGET_AVX2) void add_rows(const Panels *a, Panel *panel, ptrdiff_t first, ptrdiff_t start, ptrdiff_t stop,
                                     int count, int integers) {
  const uint32_t *x = a->x + first * a->x_words + start, *w = panel->words;
  const float *x_scales = a->x_scales + first * a->blocks + start / PAIRS, *scales = panel->scales;
  float *sums = panel->sums + first * PANEL;
  for (int half = 0; half < PANEL; half += HALF, w += HALF, scales += HALF, sums += HALF)
    if (!integers) add_floats((const float *)x, a->x_words, (const float *)w, stop - start, sums, count);
    else add_integers(x, a->x_words, x_scales, a->blocks, w, scales, stop - start, sums, count);
}

#define ADD_ROWS(NAME, COUNT, INTEGERS)                                                                                     \
  TARGET_AVX2 static void NAME##COUNT(const Panels *a, Panel *panel, ptrdiff_t first, ptrdiff_t start, ptrdiff_t stop) { \
    add_rows(a, panel, first, start, stop, COUNT, INTEGERS);                                                              \
  }
ADD_ROWS(floats_, 1, 0) ADD_ROWS(floats_, 2, 0) ADD_ROWS(floats_, 3, 0)
ADD_ROWS(floats_, 4, 0) ADD_ROWS(floats_, 5, 0) ADD_ROWS(floats_, 6, 0)
ADD_ROWS(integers_, 1, 1) ADD_ROWS(integers_, 2, 1) ADD_ROWS(integers_, 3, 1) ADD_ROWS(integers_, 4, 1)
static AddRows *const floats[FLOAT_ROWS] = {floats_1, floats_2, floats_3, floats_4, floats_5, floats_6};
static AddRows *const integers[INTEGER_ROWS] = {integers_1, integers_2, integers_3, integers_4};

AddRows *const *add_rows_avx2(Words kind, int *most) {
  *most = kind == FLOATS ? FLOAT_ROWS : INTEGER_ROWS;
  return kind == FLOATS ? floats : integers;
}

/* A row of x: `in` columns of `type` -> whole blocks, with a scale each. type is a compile-time constant. */
INLINE_FOR(TARGET_AVX2) void round_x_row(const void *x, int16_t *to, float *scales, ptrdiff_t in, int type) {
  for (; in > 0; in -= BLOCK, to += BLOCK, x = at(x, BLOCK, type)) {
    float block[BLOCK] = {0};
    ptrdiff_t columns = in < BLOCK ? in : BLOCK;
    for (ptrdiff_t i = 0; i < columns; i++) block[i] = get(x, i, type);
    float factor = factor_for(bits_of_float(largest_size(block, FLOAT32)), X_BITS, scales++);
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) to[i] = (int16_t)(int32_t)__builtin_rintf(block[i] * factor);
  }
}

TARGET_AVX2 void x_in_block_float(const Product *p, ptrdiff_t row, int16_t *to, float *scales) {
  if (p->type == FLOAT32) round_x_row(x_row(p, row), to, scales, p->in, FLOAT32);
  else round_x_row(x_row(p, row), to, scales, p->in, BFLOAT16);
}
#endif
