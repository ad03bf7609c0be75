/* y = x W^T + b for a few rows of x, W (out, in) read once: at the memory's speed. See `kernels.linear`. */
#include <stdlib.h>
#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#endif

#include "kernels.h"

/* Rows of x at a time; sums of a row, side by side, and of a short row; int8 numbers that share a scale, and words of
   those; rows of W that stay in the cache while rows of x change; bytes to ask for in advance. */
enum { BATCH = 4, LANES = 64, FEW = 16, BLOCK = 64, BLOCK_WORDS = 16, ROWS = 16, AHEAD = 6144 };

typedef struct {
  const void *weight;    /* (out, in) of type `stored` */
  const float *scales;   /* (out, in / BLOCK) of INT8 */
  const void *bias;      /* (out) of `type`, or NULL */
  const float *x;        /* (batch, in) in rows of `pitch`: the columns that are first in a word of W, then the second, ... */
  void *y;               /* (batch, out) of `type`, in rows of `apart` */
  ptrdiff_t batch, out, in, line, pitch, apart; /* line: from a row of W to the next, `in` if it is dense */
  int type;
} Linear;

/* Columns of W in a word of 32 bits. */
INLINE ptrdiff_t columns(int stored) { return stored == INT8 ? 4 : stored == BFLOAT16 ? 2 : 1; }

/* 2^24 times the int8 in a word's byte: no shift to the right, and no sign to extend. x is 2^24 times smaller. */
INLINE float byte_of(uint32_t word, int place) { return (float)(int32_t)(word << (24 - 8 * place) & 0xff000000u); }

/* The product of a word of W, of which `count` are a row's, and x; of INT8 without its scale. */
INLINE float product(uint32_t word, const float *x, ptrdiff_t count, int stored) {
  if (stored == FLOAT32) return float_of_bits(word) * x[0];
  if (stored == BFLOAT16) return float_of_bits(word << 16) * x[0] + float_of_bits(word & 0xffff0000u) * x[count];
  return byte_of(word, 0) * x[0] + byte_of(word, 1) * x[count] + byte_of(word, 2) * x[2 * count] +
         byte_of(word, 3) * x[3 * count];
}

/* A row of W, and `batch` rows of x from `first` on: batch and lanes are constants. Rows of small numbers are short, and the
   processor falls behind at their ends unless asked for what comes next: they stand one after the other in memory. */
INLINE void row(const Linear *a, ptrdiff_t row, ptrdiff_t first, int batch, int stored, ptrdiff_t lanes) {
  ptrdiff_t count = a->in / columns(stored), i = 0;
  const uint32_t *w = (const uint32_t *)a->weight + row * (a->line / columns(stored));
  const float *x = a->x + first * a->pitch, *scales = stored == INT8 ? a->scales + row * (a->in / BLOCK) : NULL;
  float sums[BATCH][LANES];
  memset(sums, 0, batch * sizeof sums[0]);
  for (; i + lanes <= count; i += lanes) {
    for (ptrdiff_t line = 0; stored != FLOAT32 && line < lanes * 4; line += 64)
      __builtin_prefetch((const char *)(w + i) + line + AHEAD);
    for (int b = 0; b < batch; b++)
#pragma omp simd
      for (ptrdiff_t k = 0; k < lanes; k++)
        sums[b][k] += (stored == INT8 ? scales[i / BLOCK_WORDS] : 1) * product(w[i + k], x + b * a->pitch + i + k, count, stored);
  }
  for (int b = 0; b < batch; b++) {
    float total = 0, bias = a->bias ? get(a->bias, row, a->type) : 0;
#pragma omp simd reduction(+ : total)
    for (ptrdiff_t k = 0; k < lanes; k++) total += sums[b][k];
    for (ptrdiff_t k = i; k < count; k++) total += product(w[k], x + b * a->pitch + k, count, stored);
    put(a->y, (first + b) * a->apart + row, total + bias, a->type);
  }
}

/* Rows of W from `start` to `stop`, by one function for each number of rows of x: what it needs fits into the registers. */
typedef void Part(const Linear *, ptrdiff_t first, ptrdiff_t start, ptrdiff_t stop);
#define PART(NAME, BATCH, STORED, LANES)                                                              \
  CLONES static void NAME##BATCH(const Linear *given, ptrdiff_t first, ptrdiff_t start, ptrdiff_t stop) { \
    const Linear a = *given;                                                                          \
    for (ptrdiff_t r = start; r < stop; r++) row(&a, r, first, BATCH, STORED, LANES);                 \
  }
#define PARTS(NAME, STORED, LANES) \
  PART(NAME, 1, STORED, LANES) PART(NAME, 2, STORED, LANES) PART(NAME, 3, STORED, LANES) PART(NAME, 4, STORED, LANES) \
  static Part *const NAME[] = {NAME##1, NAME##2, NAME##3, NAME##4};
PARTS(long_float32_, FLOAT32, LANES)
PARTS(short_float32_, FLOAT32, FEW)
PARTS(long_bfloat16_, BFLOAT16, LANES)
PARTS(short_bfloat16_, BFLOAT16, FEW / 2)
PARTS(int8_, INT8, BLOCK_WORDS)

static Part *const *parts_of(int stored, ptrdiff_t in) {
  if (stored == INT8) return int8_;
  if (stored == BFLOAT16) return in < 4 * LANES ? short_bfloat16_ : long_bfloat16_;
  return in < 2 * LANES ? short_float32_ : long_float32_;
}

/* A few rows of W at a time, for they stay in the cache while rows of x change; all of them if there are few of x. */
static void rows(const Linear *a, Part *const *parts, ptrdiff_t start, ptrdiff_t stop) {
  ptrdiff_t step = a->batch > BATCH ? ROWS : stop - start;
  for (; start < stop; start += step)
    for (ptrdiff_t first = 0; first < a->batch; first += BATCH) {
      ptrdiff_t left = a->batch - first, end = start + step;
      parts[left < BATCH ? left - 1 : BATCH - 1](a, first, start, end < stop ? end : stop);
    }
}

INLINE void apart(const void *x, float *to, ptrdiff_t in, int type, int parts) {
  for (int k = 0; k < parts; k++, to += in / parts)
#pragma omp simd
    for (ptrdiff_t i = 0; i < in / parts; i++) to[i] = get(x, parts * i + k, type) * (parts == 4 ? 0x1p-24f : 1);
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

/* x: rows of `pitch`, W and y of `line` and `apart`. stored: the weight's type (in and line even if BFLOAT16; in a multiple of
   BLOCK, and line, if INT8); type: of x, bias and y. 1: no memory. */
int linear_of(const void *weight, const float *scales, const void *bias, const void *x, void *y, ptrdiff_t batch,
              ptrdiff_t out, ptrdiff_t in, ptrdiff_t line, ptrdiff_t pitch, ptrdiff_t apart, int stored, int type,
              int threads) {
  float *unpacked = NULL;
  if (!out) return 0;
  if (stored != FLOAT32 || type != FLOAT32) {
    if (!(unpacked = malloc(batch * in * sizeof(float)))) return 1;
    unpack(x, unpacked, batch, in, pitch, type, stored);
  }
  Linear a = {weight, scales, bias, unpacked ? unpacked : x, y, batch, out, in, line, unpacked ? in : pitch, apart, type};
  Part *const *parts = parts_of(stored, in);
  ptrdiff_t share = (out + threads - 1) / threads;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (ptrdiff_t start = 0; start < out; start += share) {
    ptrdiff_t stop = start + share < out ? start + share : out;
    rows(&a, parts, start, stop);
  }
  free(unpacked);
  return 0;
}

/* Of dense W and y. */
int linear(const void *weight, const float *scales, const void *bias, const void *x, void *y, ptrdiff_t batch,
           ptrdiff_t out, ptrdiff_t in, ptrdiff_t pitch, int stored, int type, int threads) {
  return linear_of(weight, scales, bias, x, y, batch, out, in, in, pitch, out, stored, type, threads);
}

/* Whether the processor has instructions that multiply numbers of a 16-bit type: AVX512_BF16, AVX512_FP16. Of other
   processors than x86's, torch knows best. */
int multiplies(int type) {
#if defined(__x86_64__) && defined(__GNUC__)
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, type == BFLOAT16, &a, &b, &c, &d)) return 0;
  return type == BFLOAT16 ? a >> 5 & 1 : d >> 23 & 1;
#else
  return 1;
#endif
}
