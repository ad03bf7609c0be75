/* Prefetches, memory, and operations on the registers of AVX2 and AVX-512. */
#ifndef REGISTERS_H
#define REGISTERS_H

#include <stdlib.h>

#include "kernels.h"
#ifdef HAS_INTRINSICS
#include <immintrin.h>
#endif

enum { LINE = 64 }; /* bytes of a cache line, and of the largest registers */

/* Prefetches the memory between two addresses to the second-level cache. */
INLINE void prefetch_lines(const char *start, const char *end) {
  for (; start < end; start += LINE) __builtin_prefetch(start, 0, 2);
}

/* Prefetches `count` elements to the first-level cache. */
INLINE void prefetch_to_first_level(const void *start, ptrdiff_t count, int type) {
  const char *line = start, *end = line + bytes_of(count, type);
  for (; line < end; line += LINE) __builtin_prefetch(line, 0, 3);
}

#ifdef HAS_INTRINSICS
/* Prefetches a line to the second-level cache. The compiler cannot move this instruction next to the loads, which would then wait. */
INLINE void fetch_line(const char *line) { __asm__ volatile("prefetcht1 %0" : : "m"(*line)); }
#endif

/* As prefetch_lines, for `count` elements. */
INLINE void prefetch_elements(const void *start, ptrdiff_t count, int type) {
  prefetch_lines(start, (const char *)start + bytes_of(count, type));
}

/* to[j * stride + i] = from[i * columns + j]: a matrix (rows, columns), four by four as far as possible. */
INLINE void transpose_floats(const float *from, ptrdiff_t rows, ptrdiff_t columns, float *to, ptrdiff_t stride) {
  ptrdiff_t done = 0;
#ifdef HAS_INTRINSICS
  if (columns % 4 == 0)
    for (; done + 4 <= rows; done += 4)
      for (ptrdiff_t j = 0; j < columns; j += 4) {
        const float *corner = from + done * columns + j;
        __m128 a = _mm_loadu_ps(corner), b = _mm_loadu_ps(corner + columns);
        __m128 c = _mm_loadu_ps(corner + 2 * columns), d = _mm_loadu_ps(corner + 3 * columns);
        _MM_TRANSPOSE4_PS(a, b, c, d);
        _mm_storeu_ps(to + j * stride + done, a), _mm_storeu_ps(to + (j + 1) * stride + done, b);
        _mm_storeu_ps(to + (j + 2) * stride + done, c), _mm_storeu_ps(to + (j + 3) * stride + done, d);
      }
#endif
  for (; done < rows; done++)
    for (ptrdiff_t j = 0; j < columns; j++) to[j * stride + done] = from[done * columns + j];
}

/* Memory of at least `bytes` bytes, aligned to a line, for `free`; NULL if it cannot be allocated. */
INLINE void *allocate(size_t bytes) { return aligned_alloc(LINE, (bytes + LINE - 1) / LINE * LINE); }

#ifdef HAS_INTRINSICS
#define INLINE_FOR(TARGET) static inline __attribute__((always_inline)) TARGET

/* The sum of the elements. */
INLINE_FOR(TARGET_AVX2) float added_up(__m256 x) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/* Of the 4 x 4 words in each 128 bits of four registers, word j of rows[i] becomes word i of to[j]. rows and to may be the same. */
INLINE_FOR(TARGET_AVX512) void transpose_4(const __m512i rows[4], __m512i to[4]) {
  __m512i t[4];
  for (int i = 0; i < 4; i += 2) {
    t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int j = 0; j < 2; j++) {
    to[2 * j] = _mm512_unpacklo_epi64(t[j], t[j + 2]);
    to[2 * j + 1] = _mm512_unpackhi_epi64(t[j], t[j + 2]);
  }
}

/* rows[i][j] becomes rows[j][i], of 16 words each: of 4 x 4 words in each 128 bits, then of 128-bit parts. */
INLINE_FOR(TARGET_AVX512) void transpose_16(__m512i rows[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 4) transpose_4(rows + i, rows + i);
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; i++) {
    rows[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

/* The content of a word: a float32 number; two bfloat16 numbers; two 16-bit integers, or four 8-bit integers, in blocks with scales. */
typedef enum { FLOATS, BFLOAT16_PAIRS, INTEGER_PAIRS, BYTE_QUADS } Words;

/* sum plus the products of a register of words of W and of x. kind is a compile-time constant. (Assembly needs no target
   attributes of the instructions, so that the functions for FLOATS run on any processor with AVX-512.) */
INLINE_FOR(TARGET_AVX512) __m512 add_word(__m512 sum, __m512 words, __m512 x, Words kind) {
  if (kind == FLOATS) return _mm512_fmadd_ps(words, x, sum);
  if (kind == BFLOAT16_PAIRS) __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(words), "vm"(x));
  else if (kind == BYTE_QUADS) __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(words), "vm"(x));
  else __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(words), "vm"(x));
  return sum;
}

/* sum plus the products of 32 columns, in pairs. has_vnni: whether the processor has AVX512_VNNI, whose instruction for it
   needs no target attribute here. */
INLINE_FOR(TARGET_AVX512) __m512i add_products(__m512i sum, __m512i columns, __m512i x, int has_vnni) {
  if (!has_vnni) return _mm512_add_epi32(sum, _mm512_madd_epi16(columns, x));
  __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(columns), "v"(x));
  return sum;
}

#endif

#endif
