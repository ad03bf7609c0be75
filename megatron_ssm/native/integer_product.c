/* y = x W^T + b for many rows of x and a W of 8 or 4 bits, with x rounded to 8 bits, by the instruction that adds products of
   unsigned and signed bytes (AVX512_VNNI).

   W is used as w + 128, which is unsigned; the sum of (w + 128) x over a block minus 128 times the sum of x is exact. x has a
   scale for each block of a row, max(abs(x)) / 127, so rounding adds at most 1/254 of a block's largest element. */
#include "rounded.h"

enum {
  PANEL = 32,         /* rows of W that are rearranged at a time, and stay in the cache while the rows of x change */
  VECTOR = 16,        /* rows of W in a vector of sums */
  VECTORS = PANEL / VECTOR,
  TOKENS = 4,         /* rows of x that are multiplied at once */
  WORDS = BLOCK / 4,  /* words of a block: 4 columns each */
  LARGEST = 127,
  OFFSET = 128
};

/* For each block, and rows of W beyond the last are zeros:
   words: (WORDS, PANEL), where a word holds w + OFFSET of 4 columns of a row; scales: (PANEL). */
typedef struct {
  uint32_t *words;
  float *scales;
} Panel;

typedef struct {
  const char *values;
  const float *scales;
  const void *bias;       /* (out) of `type`, or NULL */
  const int8_t *x;        /* (batch, in) */
  const float *x_scales;  /* (batch, blocks) */
  const int32_t *x_sums;  /* (batch, blocks): -OFFSET times the sum of a block of x */
  void *y;                /* (batch, out) of `type` */
  ptrdiff_t batch, out, blocks;
  int type, weight_type;
} Product;

/* A row of x in 8 bits. Where x is not finite, the scale is not either; numbers below 1e-30 become 0. */
INLINE void round_row(const void *x, int8_t *to, float *scales, int32_t *sums, ptrdiff_t blocks, int type) {
  for (ptrdiff_t k = 0; k < blocks; k++, to += BLOCK, x = at(x, BLOCK, type)) {
    float most = largest_size(x, type), inverse = most > 1e-30f ? LARGEST / most : 0;
    int32_t sum = 0;
    scales[k] = most / LARGEST;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < BLOCK; i++) {
      int32_t rounded = (int32_t)__builtin_rintf(get(x, i, type) * inverse);
      to[i] = (int8_t)rounded;
      sum += rounded;
    }
    sums[k] = -OFFSET * sum;
  }
}

CLONES static void round_rows(const void *x, int8_t *to, float *scales, int32_t *sums, ptrdiff_t batch, ptrdiff_t blocks,
                              int type) {
  for (ptrdiff_t b = 0; b < batch; b++, to += blocks * BLOCK, scales += blocks, sums += blocks) {
    if (type == FLOAT32) round_row(x, to, scales, sums, blocks, FLOAT32);
    else round_row(x, to, scales, sums, blocks, BFLOAT16);
    x = at(x, blocks * BLOCK, type);
  }
}

/* Rearranges the rows of W from `first` on. */
INLINE void fill_panel(const Product *a, ptrdiff_t first, Panel panel, int weight_type) {
  for (ptrdiff_t k = 0; k < a->blocks; k++, panel.words += WORDS * PANEL, panel.scales += PANEL)
    for (ptrdiff_t r = 0; r < PANEL; r++) {
      ptrdiff_t block = (first + r) * a->blocks + k;
      uint8_t columns[BLOCK];
      uint32_t words[WORDS];
      memset(columns, OFFSET, BLOCK);
      if (first + r < a->out)
        for (int i = 0; i < BLOCK; i++)
          columns[i] = column(a->values + block * bytes_per_block(weight_type), i, weight_type) + OFFSET;
      memcpy(words, columns, BLOCK);
      for (int i = 0; i < WORDS; i++) panel.words[i * PANEL + r] = words[i];
      panel.scales[r] = first + r < a->out ? a->scales[block] : 0;
    }
}

CLONES static void fill(const Product *a, ptrdiff_t first, Panel panel) {
  if (a->weight_type == INT8) fill_panel(a, first, panel, INT8);
  else fill_panel(a, first, panel, INT4);
}

/* sums (TOKENS, PANEL): the products of `count` rows of x, from `token` on, with the rows of a panel. */
CLONES static void multiply_plain(const Product *a, Panel panel, ptrdiff_t token, int count, float *sums) {
  for (int t = 0; t < count; t++) {
    const int8_t *x = a->x + (token + t) * a->blocks * BLOCK;
    for (int r = 0; r < PANEL; r++) sums[t * PANEL + r] = 0;
    for (ptrdiff_t k = 0; k < a->blocks; k++) {
      int32_t total[PANEL];
      const uint8_t *bytes = (const uint8_t *)(panel.words + k * WORDS * PANEL);
      for (int r = 0; r < PANEL; r++) total[r] = a->x_sums[(token + t) * a->blocks + k];
      for (int i = 0; i < WORDS; i++)
#pragma omp simd
        for (int r = 0; r < PANEL; r++)
          for (int j = 0; j < 4; j++) total[r] += bytes[(i * PANEL + r) * 4 + j] * x[k * BLOCK + i * 4 + j];
      for (int r = 0; r < PANEL; r++)
        sums[t * PANEL + r] += total[r] * (panel.scales[k * PANEL + r] * a->x_scales[(token + t) * a->blocks + k]);
    }
  }
}

#ifdef HAS_INTRINSICS
/* As multiply_plain; `count` is a compile-time constant. */
INLINE_FOR(TARGET_AVX512_VNNI) void multiply_tokens(const Product *a, Panel panel, ptrdiff_t token, int count, float *sums) {
  const int8_t *x = a->x + token * a->blocks * BLOCK;
  __m512 added[TOKENS][VECTORS];
  for (int t = 0; t < count; t++)
    for (int v = 0; v < VECTORS; v++) added[t][v] = _mm512_setzero_ps();
  for (ptrdiff_t k = 0; k < a->blocks; k++) {
    const uint32_t *words = panel.words + k * WORDS * PANEL;
    __m512i total[TOKENS][VECTORS];
    for (int t = 0; t < count; t++)
      for (int v = 0; v < VECTORS; v++) total[t][v] = _mm512_set1_epi32(a->x_sums[(token + t) * a->blocks + k]);
    for (int i = 0; i < WORDS; i++)
      for (int t = 0; t < count; t++) {
        int32_t word;
        memcpy(&word, x + (t * a->blocks + k) * BLOCK + i * 4, 4);
        for (int v = 0; v < VECTORS; v++)
          total[t][v] = _mm512_dpbusd_epi32(total[t][v], _mm512_load_si512(words + i * PANEL + v * VECTOR),
                                            _mm512_set1_epi32(word));
      }
    for (int t = 0; t < count; t++)
      for (int v = 0; v < VECTORS; v++) {
        __m512 scale = _mm512_mul_ps(_mm512_load_ps(panel.scales + k * PANEL + v * VECTOR),
                                     _mm512_set1_ps(a->x_scales[(token + t) * a->blocks + k]));
        added[t][v] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total[t][v]), scale, added[t][v]);
      }
  }
  for (int t = 0; t < count; t++)
    for (int v = 0; v < VECTORS; v++) _mm512_storeu_ps(sums + t * PANEL + v * VECTOR, added[t][v]);
}

TARGET_AVX512_VNNI static void multiply_vnni(const Product *a, Panel panel, ptrdiff_t token, int count, float *sums) {
  if (count == 4) multiply_tokens(a, panel, token, 4, sums);
  else if (count == 3) multiply_tokens(a, panel, token, 3, sums);
  else if (count == 2) multiply_tokens(a, panel, token, 2, sums);
  else multiply_tokens(a, panel, token, 1, sums);
}
#endif

/* All rows of x times the rows of W from `first` on -> y. */
static void multiply_panel(const Product *a, Panel panel, ptrdiff_t first) {
  ptrdiff_t rows = a->out - first < PANEL ? a->out - first : PANEL;
  float sums[TOKENS * PANEL];
  for (ptrdiff_t token = 0; token < a->batch; token += TOKENS) {
    int count = a->batch - token < TOKENS ? a->batch - token : TOKENS;
#ifdef HAS_INTRINSICS
    if (has_avx512_vnni()) multiply_vnni(a, panel, token, count, sums);
    else
#endif
      multiply_plain(a, panel, token, count, sums);
    for (int t = 0; t < count; t++)
      for (ptrdiff_t r = 0; r < rows; r++)
        put(a->y, (token + t) * a->out + first + r,
            sums[t * PANEL + r] + (a->bias ? get(a->bias, first + r, a->type) : 0), a->type);
  }
}

/* Panel by panel; each thread takes the next one that is left. */
static int multiply(const Product *a, int threads) {
  int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(| : failed)
  {
    Panel panel = {allocate(4 * a->blocks * WORDS * PANEL), allocate(4 * a->blocks * PANEL)};
    failed = !panel.words || !panel.scales;
#pragma omp for schedule(dynamic)
    for (ptrdiff_t first = 0; first < a->out; first += PANEL) {
      if (failed) continue;
      fill(a, first, panel);
      multiply_panel(a, panel, first);
    }
    free(panel.words);
    free(panel.scales);
  }
  return failed;
}

/* x and y have no gaps; `in` is a multiple of BLOCK, `type` is that of x, bias and y. */
int integer_product(const char *values, const float *scales, const void *bias, const void *x, void *y, ptrdiff_t batch,
                    ptrdiff_t out, ptrdiff_t in, int weight_type, int type, int threads) {
  ptrdiff_t blocks = in / BLOCK;
  if (!out || !batch) return 0;
  int8_t *rounded_x = allocate(batch * blocks * (BLOCK + 2 * 4));
  if (!rounded_x) return 1;
  float *x_scales = (float *)(rounded_x + batch * in);
  int32_t *x_sums = (int32_t *)(x_scales + batch * blocks);
  round_rows(x, rounded_x, x_scales, x_sums, batch, blocks, type);
  Product a = {values, scales, bias, rounded_x, x_scales, x_sums, y, batch, out, blocks, type, weight_type};
  int failed = multiply(&a, threads);
  free(rounded_x);
  return failed;
}

/* Whether this processor has the instructions that make integer_product worth using. */
int has_integer_products(void) { return has_avx512_vnni(); }
