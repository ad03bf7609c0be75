/* Tiles of AMX, for all products that use them. A tile has 16 rows of 64 bytes. In the tile of sums, the rows are rows of W, and the
   columns of 4 bytes are rows of x. */
#ifndef AMX_H
#define AMX_H

#include "quantized.h"

#ifdef HAS_TILES
#define TARGET_AMX \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,amx-tile,amx-bf16,amx-int8")))

enum {
  SIDE = 16,           /* rows of a tile, and its columns of 4 bytes */
  DEPTH = 32,          /* its columns of bfloat16 numbers */
  TILE = SIDE * SIDE,  /* elements of 4 bytes in a tile */
  TILE_BYTES = 64      /* in a row */
};

/* The first 8 bits of the significands. */
INLINE_FOR(TARGET_AMX) __m512 truncated(__m512 x) {
  return (__m512)_mm512_and_si512((__m512i)x, _mm512_set1_epi32((int)0xffff0000u));
}

/* DEPTH float32 numbers as sums of `count` bfloat16 numbers: three are exact, two have errors up to 2^-16. */
INLINE_FOR(TARGET_AMX) void split(__m512 low, __m512 high, __m512i *parts, int count) {
  for (int p = 0; p < count; p++) {
    __m512 first_low = truncated(low), first_high = truncated(high);
    int is_last = p == count - 1;
    parts[p] = (__m512i)_mm512_cvtne2ps_pbh(is_last ? high : first_high, is_last ? low : first_low);
    low = _mm512_sub_ps(low, first_low), high = _mm512_sub_ps(high, first_high);
  }
}

/* Makes all eight tiles whole ones, until _tile_release. */
INLINE_FOR(TARGET_AMX) void configure_tiles(void) {
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } shapes = {.palette = 1};
  for (int t = 0; t < 8; t++) shapes.row_bytes[t] = TILE_BYTES, shapes.rows[t] = SIDE;
  _tile_loadconfig(&shapes);
}

/* Writes sums (count, SIDE) of rows of x from `first` on, up to the last, and SIDE rows of W from `row` on, plus the bias, to y. */
INLINE_FOR(TARGET_AMX) void write_sums(const Product *p, const __m512 *sums, ptrdiff_t count, ptrdiff_t row, ptrdiff_t first,
                                       int type) {
  ptrdiff_t columns = p->out - row < SIDE ? p->out - row : SIDE;
  float values[SIDE], biases[SIDE] = {0};
  for (ptrdiff_t i = 0; p->bias && i < columns; i++) biases[i] = get(p->bias, row + i, type);
  for (ptrdiff_t r = 0; r < count && first + r < p->batch; r++) {
    __m512 added = _mm512_add_ps(sums[r], _mm512_loadu_ps(biases));
    ptrdiff_t place = (first + r) * p->out + row;
    if (columns == SIDE && type == FLOAT32) _mm512_storeu_ps(at(p->y, place, type), added);
    else if (columns == SIDE) _mm256_storeu_si256(at(p->y, place, type), (__m256i)_mm512_cvtneps_pbh(added));
    else {
      _mm512_storeu_ps(values, added);
      for (ptrdiff_t i = 0; i < columns; i++) put(p->y, place + i, values[i], type);
    }
  }
}
#endif

#endif
