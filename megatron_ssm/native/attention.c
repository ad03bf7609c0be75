/* Attention of one token to the keys and values of its sequence: softmax(scale * q k^T) v. Up to MOST_HEADS query heads that use one
   key/value head read each key and value together. */
#include <math.h>

#include "registers.h"

/* GCC warns that functions pass Lanes in another way with AVX-512; these functions are all inline. */
#pragma GCC diagnostic ignored "-Wpsabi"

/* 16 numbers; on processors whose registers are smaller, several of them. */
typedef float Lanes __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t WideLanes __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2), may_alias));
typedef float HalfLanes __attribute__((vector_size(32)));
/* COLUMNS: vectors of values whose sums stay in registers. AHEAD: the distance of prefetches, in keys; there are gaps between them, so
   the processor does not prefetch by itself. */
enum { LANES = 16, COLUMNS = 4, AHEAD = 12 };

INLINE Lanes lanes(const void *x, ptrdiff_t i, int type) {
  if (type == FLOAT32) return *(const Lanes *)((const float *)x + i);
  return (Lanes)(__builtin_convertvector(*(const Halves *)((const uint16_t *)x + i), WideLanes) << 16);
}

INLINE float total(Lanes x) {
  union { Lanes whole; HalfLanes halves[2]; } parts = {x};
  HalfLanes eight = parts.halves[0] + parts.halves[1];
  float four[4];
  for (int i = 0; i < 4; i++) four[i] = eight[i] + eight[4 + i];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

/* scores (heads, keys) become exp(score - the largest of the head); totals: their sums. */
INLINE void exponentiate(float *scores, float *totals, int heads, ptrdiff_t keys) {
  for (int h = 0; h < heads; h++, scores += keys) {
    float most = -INFINITY, sum = 0;
#pragma omp simd reduction(max : most)
    for (ptrdiff_t j = 0; j < keys; j++) most = scores[j] > most ? scores[j] : most;
#pragma omp simd reduction(+ : sum)
    for (ptrdiff_t j = 0; j < keys; j++) sum += scores[j] = exp_(scores[j] - most);
    totals[h] = sum;
  }
}

/* The first `columns` * 16 numbers of the outputs: the sums of the values, each times its score. columns is a constant. */
INLINE void add_values(const void *v, ptrdiff_t stride, const float *scores, const float *totals, void *y, ptrdiff_t dim, int heads,
                       ptrdiff_t keys, int columns, int type) {
  Lanes out[MOST_HEADS][COLUMNS] = {0};
  for (ptrdiff_t j = 0; j < keys; j++) {
    prefetch_to_first_level(at((void *)v, (j + AHEAD) * stride, type), LANES * columns, type);
#pragma GCC unroll 4
    for (int c = 0; c < columns; c++) {
      Lanes value = lanes(v, j * stride + LANES * c, type);
#pragma GCC unroll 4
      for (int h = 0; h < heads; h++) out[h][c] += scores[h * keys + j] * value;
    }
  }
  for (int h = 0; h < heads; h++)
    for (int c = 0; c < columns; c++)
      for (int i = 0; i < LANES; i++) put(y, h * dim + LANES * c + i, out[h][c][i] / totals[h], type);
}

/* q, y: (heads, dim), side by side. heads and type are constants. */
INLINE void attend_together(const void *q, const void *k, const void *v, void *y, ptrdiff_t keys, ptrdiff_t dim, ptrdiff_t stride,
                            float scale, float *scores, int heads, int type) {
  float totals[MOST_HEADS];
  for (ptrdiff_t j = 0; j < keys; j++) {
    Lanes sums[MOST_HEADS] = {0};
    prefetch_to_first_level(at((void *)k, (j + AHEAD) * stride, type), dim, type);
    for (ptrdiff_t i = 0; i < dim; i += LANES) {
      Lanes key = lanes(k, j * stride + i, type);
#pragma GCC unroll 4
      for (int h = 0; h < heads; h++) sums[h] += lanes(q, h * dim + i, type) * key;
    }
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++) scores[h * keys + j] = scale * total(sums[h]);
  }
  exponentiate(scores, totals, heads, keys);
  ptrdiff_t first = 0;
  for (; first + COLUMNS * LANES <= dim; first += COLUMNS * LANES)
    add_values(at((void *)v, first, type), stride, scores, totals, at(y, first, type), dim, heads, keys, COLUMNS, type);
  for (; first < dim; first += LANES)
    add_values(at((void *)v, first, type), stride, scores, totals, at(y, first, type), dim, heads, keys, 1, type);
}

/* The same for any size of heads. */
INLINE void attend_alone(const void *q, const void *k, const void *v, void *y, ptrdiff_t keys, ptrdiff_t dim, ptrdiff_t stride,
                         float scale, float *scores, int type) {
  float sum, *out = scores + keys;
  for (ptrdiff_t j = 0; j < keys; j++) {
    sum = 0;
    for (ptrdiff_t i = 0; i < dim; i++) sum += get(q, i, type) * get(k, j * stride + i, type);
    scores[j] = scale * sum;
  }
  exponentiate(scores, &sum, 1, keys);
  for (ptrdiff_t i = 0; i < dim; i++) out[i] = 0;
  for (ptrdiff_t j = 0; j < keys; j++)
    for (ptrdiff_t i = 0; i < dim; i++) out[i] += scores[j] * get(v, j * stride + i, type);
  for (ptrdiff_t i = 0; i < dim; i++) put(y, i, out[i] / sum, type);
}

#define ATTEND_FOR(NAME, TYPE)                                                                                             \
  CLONES static void NAME(const void *q, const void *k, const void *v, void *y, ptrdiff_t keys, ptrdiff_t dim,             \
                          ptrdiff_t stride, float scale, float *scores, int heads) {                                       \
    if (dim % LANES) {                                                                                                     \
      for (int h = 0; h < heads; h++)                                                                                      \
        attend_alone(at((void *)q, h * dim, TYPE), k, v, at(y, h * dim, TYPE), keys, dim, stride, scale, scores, TYPE);    \
    } else if (heads == 1) attend_together(q, k, v, y, keys, dim, stride, scale, scores, 1, TYPE);                         \
    else if (heads == 2) attend_together(q, k, v, y, keys, dim, stride, scale, scores, 2, TYPE);                           \
    else if (heads == 3) attend_together(q, k, v, y, keys, dim, stride, scale, scores, 3, TYPE);                           \
    else attend_together(q, k, v, y, keys, dim, stride, scale, scores, 4, TYPE);                                           \
  }
ATTEND_FOR(attend_float, FLOAT32)
ATTEND_FOR(attend_bfloat16, BFLOAT16)

void attend_heads(const void *q, const void *k, const void *v, void *y, ptrdiff_t keys, ptrdiff_t dim, ptrdiff_t stride, float scale,
                  float *scores, int heads, int type) {
  if (type == FLOAT32) attend_float(q, k, v, y, keys, dim, stride, scale, scores, heads);
  else attend_bfloat16(q, k, v, y, keys, dim, stride, scale, scores, heads);
}
