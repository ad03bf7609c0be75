/* Wire formats in C: encode the elements of a tensor into a slot of shared memory, and add up the slots of all ranks.

   The results have the same bits as those of collectives/wire_formats.py with the algorithm one_shot. The layout of int8
   differs: here the scale of each block of 128 precedes the block. */
#ifndef FORMATS_H
#define FORMATS_H

#include <float.h>

#include "native.h"

enum { TILE = 512, BLOCK = 128 }; /* elements decoded at a time; elements that share a scale in int8 */
enum { FLOAT64 = 4, BYTES = 5 };  /* in addition to the element types in native.h */
enum { SUM, MAX, GATHER };        /* operations */

/* A tensor of a rank: its elements are sent in `format`, and the result of the operation is written to `out`. `type` is
   the type of the elements of both; BYTES in an all-gather. `in` and `out` may be the same memory. */
typedef struct {
  const void *in;
  void *out;
  ptrdiff_t numel;
  int type, format;
} Part;

/* Conversion between float32 and a 16-bit type. */
INLINE float float_of_16_bits(uint16_t x, int type) {
  return type == FLOAT16 ? float_of_half(x) : float_of_bits((uint32_t)x << 16);
}
INLINE uint16_t float_to_16_bits(float x, int type) { return type == FLOAT16 ? half_of_float(x) : to_bfloat16(x); }

INLINE ptrdiff_t smaller(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }

/* The bytes of `numel` elements in a format; a started block of int8 is sent whole. */
static ptrdiff_t encoded_bytes(ptrdiff_t numel, int format) {
  switch (format) {
    case FLOAT64: return 8 * numel;
    case FLOAT32: return 4 * numel;
    case INT8: return (numel + BLOCK - 1) / BLOCK * (BLOCK + 4);
    case BYTES: return numel;
    default: return 2 * numel;
  }
}

/* How many elements fit into `bytes`; whole blocks for int8. */
static ptrdiff_t capacity(ptrdiff_t bytes, int format) {
  return format == INT8 ? bytes / (BLOCK + 4) * BLOCK : bytes / encoded_bytes(1, format);
}

/* Encodes one block of at most BLOCK elements: its scale, then BLOCK integers. */
INLINE void encode_int8_block(const float *x, ptrdiff_t count, char *to) {
  float padded[BLOCK];
  if (count < BLOCK) {
    memset(padded, 0, sizeof padded);
    memcpy(padded, x, 4 * count);
    x = padded;
  }
  uint32_t largest_bits = 0; /* without the sign, bits are ordered like the values, and NaN is the largest */
#pragma omp simd reduction(max : largest_bits)
  for (int i = 0; i < BLOCK; i++) {
    uint32_t bits = bits_of_float(x[i]) & 0x7fffffffu;
    largest_bits = bits > largest_bits ? bits : largest_bits;
  }
  const float largest_scale = (float)((double)FLT_MAX / 127 * (1 - 0x1p-24)), magic = 0x1.8p23f;
  float scale = float_of_bits(largest_bits) / 127;
  if (largest_bits < 0x7f800000u) scale = scale < FLT_MIN ? FLT_MIN : scale > largest_scale ? largest_scale : scale;
  int8_t *integers = (int8_t *)to + 4;
  memcpy(to, &scale, 4);
#pragma omp simd
  for (int i = 0; i < BLOCK; i++) {
    float q = (x[i] / scale + magic) - magic; /* rounds to the nearest integer, ties to even */
    q = q > 127 ? 127 : q < -127 ? -127 : q;
    integers[i] = (int8_t)(int32_t)(q == q ? q : 0);
  }
}

/* Decodes the first `count` elements of a block. */
INLINE void decode_int8_block(const char *from, ptrdiff_t count, float *x) {
  float scale;
  memcpy(&scale, from, 4);
  const int8_t *integers = (const int8_t *)from + 4;
#pragma omp simd
  for (ptrdiff_t i = 0; i < count; i++) x[i] = integers[i] * scale;
}

/* Encodes `numel` elements of a part, starting with element `first`, into a slot. float16 is divided by the number of
   ranks. For the types float32, bfloat16 and float16. */
CLONES static void encode(const Part *part, ptrdiff_t first, ptrdiff_t numel, char *to, int ranks) {
  float tile[TILE], divisor = ranks;
  for (ptrdiff_t start = 0; start < numel; start += TILE) {
    ptrdiff_t count = smaller(TILE, numel - start);
    const float *x = (const float *)part->in + first + start;
    if (part->type != FLOAT32) {
      const uint16_t *narrow = (const uint16_t *)part->in + first + start;
#pragma omp simd
      for (ptrdiff_t i = 0; i < count; i++) tile[i] = float_of_16_bits(narrow[i], part->type);
      x = tile;
    }
    if (part->format == FLOAT32) {
      memcpy(to + 4 * start, x, 4 * count);
    } else if (part->format == INT8) {
      for (ptrdiff_t i = 0; i < count; i += BLOCK)
        encode_int8_block(x + i, smaller(BLOCK, count - i), to + encoded_bytes(start + i, INT8));
    } else if (part->format == FLOAT16) {
      uint16_t *encoded = (uint16_t *)to + start;
#pragma omp simd
      for (ptrdiff_t i = 0; i < count; i++) encoded[i] = half_of_float(x[i] / divisor);
    } else {
      uint16_t *encoded = (uint16_t *)to + start;
#pragma omp simd
      for (ptrdiff_t i = 0; i < count; i++) encoded[i] = to_bfloat16(x[i]);
    }
  }
}

/* Elements `start` to `start + count` of a slot as float32: in place if they are sent as such, else decoded into `tile`. */
INLINE const float *decoded(const char *from, int format, ptrdiff_t start, ptrdiff_t count, float *tile) {
  if (format == FLOAT32) return (const float *)from + start;
  const uint16_t *encoded = (const uint16_t *)from + start;
  if (format == INT8) {
    for (ptrdiff_t i = 0; i < count; i += BLOCK)
      decode_int8_block(from + encoded_bytes(start + i, INT8), smaller(BLOCK, count - i), tile + i);
  } else if (format == FLOAT16) {
#pragma omp simd
    for (ptrdiff_t i = 0; i < count; i++) tile[i] = float_of_half(encoded[i]);
  } else {
#pragma omp simd
    for (ptrdiff_t i = 0; i < count; i++) tile[i] = float_of_16_bits(encoded[i], BFLOAT16);
  }
  /* Forces the products of int8 into memory before they are added. Otherwise the compiler could fuse a product and a sum
     (FMA), which rounds once instead of twice, and the bits would differ from torch's. */
  __asm__ volatile("" : : "r"(tile) : "memory");
  return tile;
}

/* Rounds a sum of decoded values to the format and restores its scale, as `Cast.rounded` and `Cast.restore` do. */
INLINE void finish_sum(float *total, ptrdiff_t count, int format, int ranks) {
  const float limit = 65504, slack = limit * (1 + ranks * 0x1p-10f), factor = ranks;
  if (format == FLOAT16) {
#pragma omp simd
    for (ptrdiff_t i = 0; i < count; i++) {
      float x = total[i], clamped = x > limit ? limit : x < -limit ? -limit : x;
      total[i] = float_of_half(half_of_float(x > slack || x < -slack ? x : clamped)) * factor;
    }
  } else if (format == BFLOAT16) {
#pragma omp simd
    for (ptrdiff_t i = 0; i < count; i++) total[i] = float_of_16_bits(to_bfloat16(total[i]), BFLOAT16);
  }
}

#define LARGER(a, b) ((b) > (a) || (b) != (b) ? (b) : (a)) /* NaN counts as the largest */

/* Adds up (or takes the maximum of) `numel` elements over the ranks, in rank order, and writes the result to the part from
   element `first` on. `from` is the slot of rank 0; that of rank r is r * stride bytes behind it. */
CLONES static void reduce_floats(const Part *part, ptrdiff_t first, ptrdiff_t numel, const char *from, ptrdiff_t stride,
                                 int ranks, int op) {
  float tile[TILE], other[TILE], narrow_total[TILE];
  for (ptrdiff_t start = 0; start < numel; start += TILE) {
    ptrdiff_t count = smaller(TILE, numel - start);
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
    finish_sum(total, count, part->format, ranks);
    if (part->type == FLOAT32) continue;
    uint16_t *narrow = (uint16_t *)part->out + first + start;
#pragma omp simd
    for (ptrdiff_t i = 0; i < count; i++) narrow[i] = float_to_16_bits(total[i], part->type);
  }
}

/* The same for float64, which is sent unchanged. */
CLONES static void reduce_doubles(double *total, ptrdiff_t numel, const char *from, ptrdiff_t stride, int ranks, int op) {
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
