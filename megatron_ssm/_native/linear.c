/* y = x W^T + b for a few rows of x, W (out, in) read once: at the memory's speed. See `kernels.linear`. */
#include <stdlib.h>

#include "kernels.h"

/* Rows of x at a time; sums of a row, side by side, and of a short row; int8 numbers that share a scale, and words of
   those; rows of W that stay in the cache while rows of x change; bytes to ask for in advance. */
enum { BATCH = 4, LANES = 64, FEW = 16, BLOCK = 64, BLOCK_WORDS = 16, ROWS = 16, AHEAD = 6144 };

typedef struct {
  const void *weight;    /* (out, in) of type `stored` */
  const float *scales;   /* (out, in / BLOCK) of INT8 */
  const void *bias;      /* (out) of `type`, or NULL */
  const float *x;        /* (batch, in) in rows of `pitch`: first the columns that are first in a word of W, then the second */
  void *y;               /* (batch, out) of `type` */
  ptrdiff_t batch, out, in, pitch;
  int type;
} Linear;

/* Columns of W in a word of 32 bits. */
INLINE ptrdiff_t columns(int stored) { return stored == INT8 ? 4 : stored == BFLOAT16 ? 2 : 1; }

/* 2^24 times the int8 in a word's byte: no shift to the right, and no sign to extend. */
INLINE float byte_of(uint32_t word, int place) { return (float)(int32_t)(word << (24 - 8 * place) & 0xff000000u); }

/* sums[b][i] += the product of some words of W and x, of which `count` is a row's: width is a constant but at the end.
   The rows of W stand one after the other in memory, so AHEAD leads into the next rows. */
INLINE void words(const uint32_t *w, float scale, const float *x, ptrdiff_t pitch, ptrdiff_t count, ptrdiff_t width,
                  int batch, int stored, float sums[BATCH][LANES]) {
  for (int b = 0; b < batch; b++, x += pitch)
#pragma omp simd
    for (ptrdiff_t i = 0; i < width; i++)
      if (stored == FLOAT32) sums[b][i] += float_of_bits(w[i]) * x[i];
      else if (stored == BFLOAT16)
        sums[b][i] += float_of_bits(w[i] << 16) * x[i] + float_of_bits(w[i] & 0xffff0000u) * x[count + i];
      else
        sums[b][i] += scale * (byte_of(w[i], 0) * x[i] + byte_of(w[i], 1) * x[count + i] +
                               byte_of(w[i], 2) * x[2 * count + i] + byte_of(w[i], 3) * x[3 * count + i]);
}

INLINE void row(const Linear *a, ptrdiff_t row, ptrdiff_t first, int batch, int stored, ptrdiff_t lanes) {
  ptrdiff_t count = a->in / columns(stored), i = 0;
  const uint32_t *w = (const uint32_t *)a->weight + row * count;
  const float *x = a->x + first * a->pitch, *scales = stored == INT8 ? a->scales + row * (a->in / BLOCK) : NULL;
  float sums[BATCH][LANES];
  memset(sums, 0, batch * sizeof sums[0]);
  for (; i + lanes <= count; i += lanes) {
    for (ptrdiff_t line = 0; line < lanes * 4; line += 64) __builtin_prefetch((const char *)(w + i) + line + AHEAD);
    words(w + i, stored == INT8 ? scales[i / BLOCK_WORDS] : 0, x + i, a->pitch, count, lanes, batch, stored, sums);
  }
  if (stored != INT8 && i < count) words(w + i, 0, x + i, a->pitch, count, count - i, batch, stored, sums);
  for (int b = 0; b < batch; b++) {
    float total = 0, bias = a->bias ? get(a->bias, row, a->type) : 0;
#pragma omp simd reduction(+ : total)
    for (ptrdiff_t i = 0; i < lanes; i++) total += sums[b][i];
    put(a->y, (first + b) * a->out + row, (stored == INT8 ? total * 0x1p-24f : total) + bias, a->type);
  }
}

/* One loop for each number of rows of x: what it needs fits into the registers. */
INLINE void part(const Linear *a, ptrdiff_t start, ptrdiff_t stop, int stored, ptrdiff_t lanes) {
  ptrdiff_t rows = a->batch > BATCH ? ROWS : stop - start;
  for (; start < stop; start += rows)
    for (ptrdiff_t first = 0, end = start + rows < stop ? start + rows : stop; first < a->batch; first += BATCH)
      switch (a->batch - first) {
        case 1: for (ptrdiff_t r = start; r < end; r++) row(a, r, first, 1, stored, lanes); break;
        case 2: for (ptrdiff_t r = start; r < end; r++) row(a, r, first, 2, stored, lanes); break;
        case 3: for (ptrdiff_t r = start; r < end; r++) row(a, r, first, 3, stored, lanes); break;
        default: for (ptrdiff_t r = start; r < end; r++) row(a, r, first, BATCH, stored, lanes);
      }
}

typedef void Part(const Linear *, ptrdiff_t, ptrdiff_t);
CLONES static void long_float32(const Linear *a, ptrdiff_t start, ptrdiff_t stop) { part(a, start, stop, FLOAT32, LANES); }
CLONES static void short_float32(const Linear *a, ptrdiff_t start, ptrdiff_t stop) { part(a, start, stop, FLOAT32, FEW); }
CLONES static void long_bfloat16(const Linear *a, ptrdiff_t start, ptrdiff_t stop) { part(a, start, stop, BFLOAT16, LANES); }
CLONES static void short_bfloat16(const Linear *a, ptrdiff_t start, ptrdiff_t stop) { part(a, start, stop, BFLOAT16, FEW / 2); }
CLONES static void long_int8(const Linear *a, ptrdiff_t start, ptrdiff_t stop) { part(a, start, stop, INT8, BLOCK_WORDS); }

static Part *part_of(int stored, ptrdiff_t in) {
  if (stored == INT8) return long_int8;
  if (stored == BFLOAT16) return in < 4 * LANES ? short_bfloat16 : long_bfloat16;
  return in < 2 * LANES ? short_float32 : long_float32;
}

INLINE void apart(const void *x, float *to, ptrdiff_t in, int type, int parts) {
  for (int k = 0; k < parts; k++, to += in / parts)
#pragma omp simd
    for (ptrdiff_t i = 0; i < in / parts; i++) to[i] = get(x, parts * i + k, type);
}

/* Rows of x as float32, columns apart as in `Linear`. */
CLONES static void unpack(const void *x, float *to, ptrdiff_t batch, ptrdiff_t in, ptrdiff_t pitch, int type, int stored) {
  for (ptrdiff_t b = 0; b < batch; b++, to += in, x = at(x, pitch, type))
    if (stored == FLOAT32) apart(x, to, in, BFLOAT16, 1);
    else if (stored == BFLOAT16 && type == FLOAT32) apart(x, to, in, FLOAT32, 2);
    else if (stored == BFLOAT16) apart(x, to, in, BFLOAT16, 2);
    else if (type == FLOAT32) apart(x, to, in, FLOAT32, 4);
    else apart(x, to, in, BFLOAT16, 4);
}

/* x: rows of `pitch`. stored: the weight's type (in even if BFLOAT16, a multiple of BLOCK if INT8); type: of x, bias and y. 1: no memory. */
int linear(const void *weight, const float *scales, const void *bias, const void *x, void *y, ptrdiff_t batch,
           ptrdiff_t out, ptrdiff_t in, ptrdiff_t pitch, int stored, int type, int threads) {
  float *unpacked = NULL;
  if (!out) return 0;
  if (stored != FLOAT32 || type != FLOAT32) {
    if (!(unpacked = malloc(batch * in * sizeof(float)))) return 1;
    unpack(x, unpacked, batch, in, pitch, type, stored);
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
