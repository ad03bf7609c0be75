/* y = x W^T + b for a few rows of x, W (out, in) read once: at the memory's speed. See `kernels.linear`. */
#include <stdlib.h>

#include "kernels.h"

/* Rows of x at a time; sums of a row, side by side, and of a short row; int8 numbers that share a scale; bytes to ask for
   in advance. */
enum { BATCH = 4, LANES = 64, FEW = 16, BLOCK = 64, AHEAD = 6144 };

typedef struct {
  const void *weight;    /* (out, in) of type `stored` */
  const float *scales;   /* (out, in / BLOCK) of INT8 */
  const void *bias;      /* (out) of `type`, or NULL */
  const float *x;        /* (batch, in) in rows of `pitch`; of BFLOAT16 weights: the even columns, then the odd ones */
  void *y;               /* (batch, out) of `type` */
  ptrdiff_t batch, out, in, pitch;
  int type;
} Linear;

/* sums[b][i] += w[i] x[b][i] for some columns (pairs of columns of BFLOAT16): width is a constant but at the end.
   The rows of W stand one after the other in memory, so AHEAD leads into the next rows. */
INLINE void columns(const char *w, float scale, const float *x, ptrdiff_t pitch, ptrdiff_t half, ptrdiff_t width, int batch,
                    int stored, float sums[BATCH][LANES]) {
  if (stored == BFLOAT16) { /* two numbers are read as one 32-bit integer: its lower half is the even column */
    const uint32_t *pairs = (const uint32_t *)w;
    for (int b = 0; b < batch; b++)
#pragma omp simd
      for (ptrdiff_t i = 0; i < width; i++)
        sums[b][i] += float_of_bits(pairs[i] << 16) * x[b * pitch + i] +
                      float_of_bits(pairs[i] & 0xffff0000u) * x[b * pitch + half + i];
  } else {
    for (int b = 0; b < batch; b++)
#pragma omp simd
      for (ptrdiff_t i = 0; i < width; i++)
        sums[b][i] += (stored == INT8 ? scale * ((const int8_t *)w)[i] : ((const float *)w)[i]) * x[b * pitch + i];
  }
}

INLINE void row(const Linear *a, ptrdiff_t row, ptrdiff_t first, int batch, int stored, ptrdiff_t lanes) {
  ptrdiff_t size = stored == INT8 ? 1 : 4, count = stored == BFLOAT16 ? a->in / 2 : a->in, i = 0;
  const char *w = (const char *)a->weight + row * count * size;
  const float *x = a->x + first * a->pitch, *scales = stored == INT8 ? a->scales + row * (a->in / BLOCK) : NULL;
  float sums[BATCH][LANES];
  memset(sums, 0, batch * sizeof sums[0]);
  for (; i + lanes <= count; i += lanes) {
    for (ptrdiff_t line = 0; line < lanes * size; line += 64) __builtin_prefetch(w + i * size + line + AHEAD);
    columns(w + i * size, scales ? scales[i / BLOCK] : 0, x + i, a->pitch, a->in / 2, lanes, batch, stored, sums);
  }
  if (i < count) columns(w + i * size, 0, x + i, a->pitch, a->in / 2, count - i, batch, stored, sums);
  for (int b = 0; b < batch; b++) {
    float total = a->bias ? get(a->bias, row, a->type) : 0;
#pragma omp simd reduction(+ : total)
    for (ptrdiff_t i = 0; i < lanes; i++) total += sums[b][i];
    put(a->y, (first + b) * a->out + row, total, a->type);
  }
}

INLINE void part(const Linear *a, ptrdiff_t start, ptrdiff_t stop, int stored, ptrdiff_t lanes) {
  for (ptrdiff_t r = start; r < stop; r++) {
    ptrdiff_t first = 0;
    for (; first + BATCH <= a->batch; first += BATCH) row(a, r, first, BATCH, stored, lanes);
    switch (a->batch - first) {
      case 1: row(a, r, first, 1, stored, lanes); break;
      case 2: row(a, r, first, 2, stored, lanes); break;
      case 3: row(a, r, first, 3, stored, lanes);
    }
  }
}

typedef void Part(const Linear *, ptrdiff_t, ptrdiff_t);
CLONES static void long_float32(const Linear *a, ptrdiff_t start, ptrdiff_t stop) { part(a, start, stop, FLOAT32, LANES); }
CLONES static void short_float32(const Linear *a, ptrdiff_t start, ptrdiff_t stop) { part(a, start, stop, FLOAT32, FEW); }
CLONES static void long_bfloat16(const Linear *a, ptrdiff_t start, ptrdiff_t stop) { part(a, start, stop, BFLOAT16, LANES); }
CLONES static void short_bfloat16(const Linear *a, ptrdiff_t start, ptrdiff_t stop) { part(a, start, stop, BFLOAT16, FEW / 2); }
CLONES static void long_int8(const Linear *a, ptrdiff_t start, ptrdiff_t stop) { part(a, start, stop, INT8, LANES); }

static Part *part_of(int stored, ptrdiff_t in) {
  if (stored == INT8) return long_int8;
  if (stored == BFLOAT16) return in < 4 * LANES ? short_bfloat16 : long_bfloat16;
  return in < 2 * LANES ? short_float32 : long_float32;
}

/* Rows of x as float32, `apart`: their even columns, then their odd ones. */
CLONES static void unpack(const void *x, float *to, ptrdiff_t batch, ptrdiff_t in, ptrdiff_t pitch, int type, int apart) {
  ptrdiff_t half = in / 2;
  for (ptrdiff_t b = 0; b < batch; b++, to += in, x = at(x, pitch, type))
    if (apart && type == FLOAT32)
#pragma omp simd
      for (ptrdiff_t i = 0; i < half; i++) to[i] = get(x, 2 * i, FLOAT32), to[half + i] = get(x, 2 * i + 1, FLOAT32);
    else if (apart)
#pragma omp simd
      for (ptrdiff_t i = 0; i < half; i++) to[i] = get(x, 2 * i, BFLOAT16), to[half + i] = get(x, 2 * i + 1, BFLOAT16);
    else
#pragma omp simd
      for (ptrdiff_t i = 0; i < in; i++) to[i] = get(x, i, BFLOAT16);
}

/* x: rows of `pitch`. stored: the weight's type (in even if BFLOAT16, a multiple of BLOCK if INT8); type: of x, bias and y. 1: no memory. */
int linear(const void *weight, const float *scales, const void *bias, const void *x, void *y, ptrdiff_t batch,
           ptrdiff_t out, ptrdiff_t in, ptrdiff_t pitch, int stored, int type, int threads) {
  float *unpacked = NULL;
  if (!out) return 0;
  if (stored == BFLOAT16 || type != FLOAT32) {
    if (!(unpacked = malloc(batch * in * sizeof(float)))) return 1;
    unpack(x, unpacked, batch, in, pitch, type, stored == BFLOAT16);
  }
  Linear a = {weight, scales, bias, unpacked ? unpacked : x, y, batch, out, in, unpacked ? in : pitch, type};
  Part *part = part_of(stored, in);
  ptrdiff_t share = (out + threads - 1) / threads;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (ptrdiff_t start = 0; start < out; start += share) {
    ptrdiff_t stop = start + share < out ? start + share : out;
    part(&a, start, stop);
  }
  free(unpacked);
  return 0;
}
