/* Formats on the wire, as in quantize.py: numbers into a slot of shared memory, and sums out of all slots. */
#ifndef FORMATS_H
#define FORMATS_H

#include <float.h>

#include "native.h"

enum { TILE = 512, BLOCK = 128 }; /* BLOCK as in quantize.py */
enum { FLOAT64 = 4, BYTES = 5 };  /* formats beside native.h's */
enum { SUM, MAX, GATHER };

/* Numbers of a type to be sent in a format, and where their sum goes. */
typedef struct {
  const void *in;
  void *out;
  ptrdiff_t numel;
  int type, format;
} Part;

INLINE float widened(uint16_t number, int type) {
  return type == FLOAT16 ? float_of_half(number) : float_of_bits((uint32_t)number << 16);
}
INLINE uint16_t narrowed(float x, int type) { return type == FLOAT16 ? half_of_float(x) : to_bfloat16(x); }

static ptrdiff_t encoded_bytes(ptrdiff_t numel, int format) {
  switch (format) {
    case FLOAT64: return 8 * numel;
    case FLOAT32: return 4 * numel;
    case INT8: return (numel + BLOCK - 1) / BLOCK * (BLOCK + 4);
    case BYTES: return numel;
    default: return 2 * numel;
  }
}

/* As many numbers as fit into some bytes. */
static ptrdiff_t capacity(ptrdiff_t bytes, int format) {
  return format == INT8 ? bytes / (BLOCK + 4) * BLOCK : bytes / encoded_bytes(1, format);
}

INLINE void to_int8(const float *x, ptrdiff_t count, char *to) { /* a block: its scale, then its integers */
  float padded[BLOCK];
  if (count < BLOCK) {
    memset(padded, 0, sizeof padded);
    memcpy(padded, x, 4 * count);
    x = padded;
  }
  uint32_t most = 0; /* bits without a sign are ordered as the numbers are, a NaN above all */
#pragma omp simd reduction(max : most)
  for (int i = 0; i < BLOCK; i++) {
    uint32_t bits = bits_of_float(x[i]) & 0x7fffffffu;
    most = bits > most ? bits : most;
  }
  const float largest = (float)((double)FLT_MAX / 127 * (1 - 0x1p-24)), magic = 0x1.8p23f;
  float scale = float_of_bits(most) / 127;
  if (most < 0x7f800000u) scale = scale < FLT_MIN ? FLT_MIN : scale > largest ? largest : scale;
  int8_t *integers = (int8_t *)to + 4;
  memcpy(to, &scale, 4);
#pragma omp simd
  for (int i = 0; i < BLOCK; i++) {
    float q = (x[i] / scale + magic) - magic; /* to the nearest, ties to even */
    q = q > 127 ? 127 : q < -127 ? -127 : q;
    integers[i] = (int8_t)(int32_t)(q == q ? q : 0);
  }
}

INLINE void of_int8(const char *from, ptrdiff_t count, float *x) {
  float scale;
  memcpy(&scale, from, 4);
  const int8_t *integers = (const int8_t *)from + 4;
#pragma omp simd
  for (ptrdiff_t i = 0; i < count; i++) x[i] = integers[i] * scale;
}

INLINE ptrdiff_t least(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }

/* `numel` numbers of a type, from the `first` on, into a slot. */
CLONES static void encode(const Part *part, ptrdiff_t first, ptrdiff_t numel, char *to, int ranks) {
  float tile[TILE], divisor = ranks;
  for (ptrdiff_t start = 0; start < numel; start += TILE) {
    ptrdiff_t count = least(TILE, numel - start);
    const float *x = (const float *)part->in + first + start;
    if (part->type != FLOAT32) {
      const uint16_t *narrow = (const uint16_t *)part->in + first + start;
#pragma omp simd
      for (ptrdiff_t i = 0; i < count; i++) tile[i] = widened(narrow[i], part->type);
      x = tile;
    }
    if (part->format == FLOAT32) {
      memcpy(to + 4 * start, x, 4 * count);
    } else if (part->format == INT8) {
      for (ptrdiff_t i = 0; i < count; i += BLOCK)
        to_int8(x + i, least(BLOCK, count - i), to + encoded_bytes(start + i, INT8));
    } else if (part->format == FLOAT16) {
      uint16_t *halves = (uint16_t *)to + start;
#pragma omp simd
      for (ptrdiff_t i = 0; i < count; i++) halves[i] = half_of_float(x[i] / divisor);
    } else {
      uint16_t *halves = (uint16_t *)to + start;
#pragma omp simd
      for (ptrdiff_t i = 0; i < count; i++) halves[i] = to_bfloat16(x[i]);
    }
  }
}

/* Numbers `start` to `start` + `count` of a slot: they themselves, or a tile of them. */
INLINE const float *decoded(const char *from, int format, ptrdiff_t start, ptrdiff_t count, float *tile) {
  if (format == FLOAT32) return (const float *)from + start;
  const uint16_t *halves = (const uint16_t *)from + start;
  if (format == INT8) {
    for (ptrdiff_t i = 0; i < count; i += BLOCK)
      of_int8(from + encoded_bytes(start + i, INT8), least(BLOCK, count - i), tile + i);
  } else if (format == FLOAT16) {
#pragma omp simd
    for (ptrdiff_t i = 0; i < count; i++) tile[i] = float_of_half(halves[i]);
  } else {
#pragma omp simd
    for (ptrdiff_t i = 0; i < count; i++) tile[i] = widened(halves[i], BFLOAT16);
  }
  /* Products are numbers in memory before they are added: no compiler may fuse the two, which would round once. */
  __asm__ volatile("" : : "r"(tile) : "memory");
  return tile;
}

/* A sum of decoded numbers as Cast.rounded and Cast.restore leave it. */
INLINE void finish(float *total, ptrdiff_t count, int format, int ranks) {
  const float limit = 65504, slack = limit * (1 + ranks * 0x1p-10f), factor = ranks;
  if (format == FLOAT16) {
#pragma omp simd
    for (ptrdiff_t i = 0; i < count; i++) {
      float x = total[i], inside = x > limit ? limit : x < -limit ? -limit : x;
      total[i] = float_of_half(half_of_float(x > slack || x < -slack ? x : inside)) * factor;
    }
  } else if (format == BFLOAT16) {
#pragma omp simd
    for (ptrdiff_t i = 0; i < count; i++) total[i] = widened(to_bfloat16(total[i]), BFLOAT16);
  }
}

#define LARGER(a, b) ((b) > (a) || (b) != (b) ? (b) : (a)) /* a NaN is the largest */

/* The sum (or maximum) over slots, `stride` bytes apart, of `numel` numbers each, into the part's from `first` on. */
CLONES static void add_floats(const Part *part, ptrdiff_t first, ptrdiff_t numel, const char *from, ptrdiff_t stride,
                              int ranks, int op) {
  float tile[TILE], other[TILE], narrow_total[TILE];
  for (ptrdiff_t start = 0; start < numel; start += TILE) {
    ptrdiff_t count = least(TILE, numel - start);
    float *total = part->type == FLOAT32 ? (float *)part->out + first + start : narrow_total;
    const float *a = decoded(from, part->format, start, count, tile);
    for (int rank = 1; rank < ranks; rank++, a = total) {
      const float *b = decoded(from + rank * stride, part->format, start, count, other);
      if (op == MAX) {
#pragma omp simd
        for (ptrdiff_t i = 0; i < count; i++) total[i] = LARGER(a[i], b[i]);
      } else {
#pragma omp simd
        for (ptrdiff_t i = 0; i < count; i++) total[i] = a[i] + b[i];
      }
    }
    finish(total, count, part->format, ranks);
    if (part->type == FLOAT32) continue;
    uint16_t *narrow = (uint16_t *)part->out + first + start;
#pragma omp simd
    for (ptrdiff_t i = 0; i < count; i++) narrow[i] = narrowed(total[i], part->type);
  }
}

CLONES static void add_doubles(double *total, ptrdiff_t numel, const char *from, ptrdiff_t stride, int ranks, int op) {
  const double *a = (const double *)from;
  for (int rank = 1; rank < ranks; rank++, a = total) {
    const double *b = (const double *)(from + rank * stride);
    if (op == MAX) {
#pragma omp simd
      for (ptrdiff_t i = 0; i < numel; i++) total[i] = LARGER(a[i], b[i]);
    } else {
#pragma omp simd
      for (ptrdiff_t i = 0; i < numel; i++) total[i] = a[i] + b[i];
    }
  }
}

#endif
