/* For kernels that go from block to block: reading ahead, and matrices whose columns become rows. */
#ifndef BLOCKS_H
#define BLOCKS_H

#include "kernels.h"
#ifdef HAS_INTRINSICS
#include <immintrin.h>
#endif

enum { LINE = 64 }; /* bytes of a cache line, and of the largest registers */

/* Brings what is between two addresses to the second-level cache. */
INLINE void prefetch_lines(const char *start, const char *end) {
  for (; start < end; start += LINE) __builtin_prefetch(start, 0, 2);
}

/* Brings `count` elements to the first-level cache. */
INLINE void prefetch_to_first_level(const void *start, ptrdiff_t count, int type) {
  const char *line = start, *end = line + bytes_of(count, type);
  for (; line < end; line += LINE) __builtin_prefetch(line, 0, 3);
}

#ifdef HAS_INTRINSICS
/* Brings a line to the second-level cache. The compiler cannot move it to the loads, which would then wait for it. */
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

#endif
