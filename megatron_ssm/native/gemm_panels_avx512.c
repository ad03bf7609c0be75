/* Products of rows of x with a panel by AVX-512. FLOATS and INTEGER_PAIRS have the same bits as by AVX2 in gemm_panels_avx2.c. */
#include "panels.h"

#ifdef HAS_INTRINSICS
enum { VECTOR = PANEL / 2 }; /* words in a register */

/* A mask of the first `count` elements; of all for larger numbers, and of none for 0 and below. */
INLINE __mmask32 mask_of_first(ptrdiff_t count) { return count >= 32 ? ~0u : count > 0 ? (1u << count) - 1 : 0; }

/* VECTOR words of a row of W, from `word` on; beyond the row's last word there are zeros. weight_type is a compile-time
   constant. */
INLINE_FOR(TARGET_AVX512) __m512i words_of(const Panels *a, ptrdiff_t row, ptrdiff_t word, int weight_type) {
  const char *from = address_of(a, row, word);
  if (is_quantized(weight_type)) {
    if (a->kind == INTEGER_PAIRS) return half_block(from, word / VECTOR % 2, weight_type);
    __m512i offset = _mm512_set1_epi8((char)OFFSET);
    if (weight_type == INT8) return _mm512_xor_si512(_mm512_loadu_si512(from), offset);
    __m256i low = _mm512_cvtepi16_epi8(half_block(from, 0, INT4)), high = _mm512_cvtepi16_epi8(half_block(from, 1, INT4));
    return _mm512_xor_si512(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1), offset);
  }
  ptrdiff_t columns = a->p.in - word * columns_per_word(a->kind); /* that are left */
  return _mm512_maskz_loadu_epi16(mask_of_first(weight_type == FLOAT32 ? 2 * columns : columns), from);
}

/* As fill_avx512; weight_type is a compile-time constant. */
INLINE_FOR(TARGET_AVX512) void fill_each(const Panels *a, Panel *panel, ptrdiff_t row, ptrdiff_t start, ptrdiff_t stop,
                                       int weight_type) {
  for (ptrdiff_t k = start; k < stop; k += VECTOR)
    for (ptrdiff_t half = 0; half < PANEL; half += VECTOR) {
      __m512i rows[VECTOR];
#pragma GCC unroll 16
      for (int i = 0; i < VECTOR; i++)
        rows[i] = row + half + i < a->p.out ? words_of(a, row + half + i, k, weight_type) : _mm512_setzero_si512();
      transpose_16(rows);
      uint32_t *to = panel->words + (k - start) * PANEL + half;
#pragma GCC unroll 16
      for (int i = 0; i < VECTOR; i++) _mm512_store_si512(to + i * PANEL, rows[i]);
    }
  if (is_quantized(weight_type)) fill_scales(a, panel, row, start, stop);
}

TARGET_AVX512 void fill_avx512(const Panels *a, Panel *panel, ptrdiff_t row, ptrdiff_t start, ptrdiff_t stop) {
  if (a->p.weight_type == FLOAT32) fill_each(a, panel, row, start, stop, FLOAT32);
  else if (a->p.weight_type == BFLOAT16) fill_each(a, panel, row, start, stop, BFLOAT16);
  else if (a->p.weight_type == INT8) fill_each(a, panel, row, start, stop, INT8);
  else fill_each(a, panel, row, start, stop, INT4);
}

/* The sums of a row of x with the rows of a panel. */
typedef struct {
  __m512 low, high;
} Sums;

/* Adds to sums the products of `words` words of `count` rows of x, x_words apart, with those of a panel from w on, and prefetches
   what is `ahead`. count and kind are compile-time constants. */
INLINE_FOR(TARGET_AVX512) void add_words(const uint32_t *x, ptrdiff_t x_words, const uint32_t *w, ptrdiff_t words,
                                       const char *ahead, ptrdiff_t step, Sums *sums, int count, Words kind) {
#pragma GCC unroll 2
  for (ptrdiff_t k = 0; k < words; k++) {
    __builtin_prefetch(ahead + k * step, 0, 2);
    __m512 low = _mm512_load_ps(w + k * PANEL), high = _mm512_load_ps(w + k * PANEL + VECTOR);
#pragma GCC unroll 12
    for (int r = 0; r < count; r++) {
      __m512 word = (__m512)_mm512_set1_epi32((int)x[r * x_words + k]);
      sums[r].low = add_word(sums[r].low, low, word, kind);
      sums[r].high = add_word(sums[r].high, high, word, kind);
    }
  }
}

INLINE_FOR(TARGET_AVX512) void add_floats(const Panels *a, Panel *panel, ptrdiff_t first, ptrdiff_t start, ptrdiff_t stop,
                                        int count, Words kind) {
  float *to = panel->sums + first * PANEL;
  Sums sums[WIDE_ROWS];
#pragma GCC unroll 12
  for (int r = 0; r < count; r++)
    sums[r].low = _mm512_load_ps(to + r * PANEL), sums[r].high = _mm512_load_ps(to + r * PANEL + VECTOR);
  add_words(a->x + first * a->x_words + start, a->x_words, panel->words, stop - start, panel->ahead, panel->step, sums, count,
            kind);
#pragma GCC unroll 12
  for (int r = 0; r < count; r++)
    _mm512_store_ps(to + r * PANEL, sums[r].low), _mm512_store_ps(to + r * PANEL + VECTOR, sums[r].high);
}

/* Adds VECTOR integers times the scales of a block of rows of W and of one of x. */
INLINE_FOR(TARGET_AVX512) void add_scaled(float *to, __m512 integers, const float *scales, float x_scale) {
  __m512 scale = _mm512_mul_ps(_mm512_set1_ps(x_scale), _mm512_load_ps(scales));
  _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_cvtepi32_ps((__m512i)integers), scale, _mm512_load_ps(to)));
}

INLINE_FOR(TARGET_AVX512) void add_integers(const Panels *a, Panel *panel, ptrdiff_t first, ptrdiff_t start, ptrdiff_t stop,
                                          int count, Words kind) {
  ptrdiff_t each = words_per_block(kind), block = first * a->blocks + start / each;
  const uint32_t *x = a->x + first * a->x_words, *w = panel->words;
  const float *scales = panel->scales;
  const char *ahead = panel->ahead;
  for (; start < stop; start += each, block++, w += each * PANEL, scales += PANEL, ahead += each * panel->step) {
    float *to = panel->sums + first * PANEL;
    Sums sums[WIDE_ROWS];
#pragma GCC unroll 12
    for (int r = 0; r < count; r++)
      sums[r].low = sums[r].high = (__m512)_mm512_set1_epi32(kind == BYTE_QUADS ? a->x_sums[r * a->blocks + block] : 0);
    add_words(x + start, a->x_words, w, each, ahead, panel->step, sums, count, kind);
#pragma GCC unroll 12
    for (int r = 0; r < count; r++, to += PANEL) {
      float x_scale = a->x_scales[r * a->blocks + block];
      add_scaled(to, sums[r].low, scales, x_scale);
      add_scaled(to + VECTOR, sums[r].high, scales + VECTOR, x_scale);
    }
  }
}

#define ADD_ROWS(NAME, COUNT, ADD, KIND)                                                                                      \
  TARGET_AVX512 static void NAME##COUNT(const Panels *a, Panel *panel, ptrdiff_t first, ptrdiff_t start, ptrdiff_t stop) { \
    ADD(a, panel, first, start, stop, COUNT, KIND);                                                                           \
  }
#define FOR_EACH_COUNT(NAME, ADD, KIND)                                                                                   \
  ADD_ROWS(NAME, 1, ADD, KIND) ADD_ROWS(NAME, 2, ADD, KIND) ADD_ROWS(NAME, 3, ADD, KIND) ADD_ROWS(NAME, 4, ADD, KIND)     \
  ADD_ROWS(NAME, 5, ADD, KIND) ADD_ROWS(NAME, 6, ADD, KIND) ADD_ROWS(NAME, 7, ADD, KIND) ADD_ROWS(NAME, 8, ADD, KIND)     \
  ADD_ROWS(NAME, 9, ADD, KIND) ADD_ROWS(NAME, 10, ADD, KIND) ADD_ROWS(NAME, 11, ADD, KIND) ADD_ROWS(NAME, 12, ADD, KIND)  \
  static AddRows *const NAME[] = {NAME##1, NAME##2, NAME##3, NAME##4, NAME##5, NAME##6,                                   \
                                  NAME##7, NAME##8, NAME##9, NAME##10, NAME##11, NAME##12};
FOR_EACH_COUNT(floats, add_floats, FLOATS)
FOR_EACH_COUNT(bfloat16_pairs, add_floats, BFLOAT16_PAIRS)
FOR_EACH_COUNT(integer_pairs, add_integers, INTEGER_PAIRS)
FOR_EACH_COUNT(byte_quads, add_integers, BYTE_QUADS)

AddRows *const *add_rows_avx512(Words kind, int *most) {
  *most = WIDE_ROWS;
  return kind == FLOATS ? floats : kind == BFLOAT16_PAIRS ? bfloat16_pairs : kind == INTEGER_PAIRS ? integer_pairs : byte_quads;
}
#endif
