/* y = x W^T + b for several rows of x and a W of 8 or 4 bits, by AVX512_VNNI, on processors without AMX.

   A panel is SIDE rows of W, whose words of four bytes are transposed: lanes are rows of W, and a word of x is multiplied by all of
   them. The processor multiplies unsigned bytes by signed bytes, so 128 is added to W's numbers of 8 bits and 8 to those of 4 bits, and
   that offset times the sum of x is subtracted. x is rounded to 16 bits (quantized.h), as 256 times a byte plus a byte. So the sums of a
   block are exact integers. They are multiplied by both scales and added up block by block. So the result of a row does not depend on
   the number of rows, and has the same bits as in gemv_quantized_vnni.c. */
#include "quantized_vnni.h"

#ifdef HAS_INTRINSICS
enum {
  SIDE = 16,         /* rows of W in a panel */
  WORDS = BLOCK / 4, /* of a block */
  PART = 16,         /* bytes of each row of W that are transposed at a time */
  FETCHES = 8,       /* places that are prefetched while one or two rows of x are multiplied: one for every other word of W */
  MOST = 64          /* rows of x whose sums stay in the cache */
};

typedef struct {
  uint32_t high[WORDS], low[WORDS]; /* four bytes each, in the order of W's */
} Block; /* a block of a row of x */

typedef struct {
  Product p;                  /* of up to MOST rows of x */
  const Block *x;             /* (batch, blocks) */
  const float *x_scales;      /* (batch, blocks) */
  const int32_t *corrections; /* (batch, blocks): minus OFFSET, or OFFSET_4, times the sum of a block of x */
  ptrdiff_t blocks;
} Panels;

/* Splits a row of x into bytes. */
TARGET_AVX512 static void split_bytes(const int16_t *x, Block *to, int32_t *corrections, ptrdiff_t blocks, int weight_type) {
  const __m512i ones = _mm512_set1_epi16(1);
  for (ptrdiff_t k = 0; k < blocks; k++, x += BLOCK, to++) {
    __m512i left = _mm512_loadu_si512(x), right = _mm512_loadu_si512(x + BLOCK / 2);
    __m512i sums = _mm512_add_epi32(_mm512_madd_epi16(left, ones), _mm512_madd_epi16(right, ones));
    corrections[k] = -(weight_type == INT8 ? OFFSET : OFFSET_4) * _mm512_reduce_add_epi32(sums);
    if (weight_type == INT4) {
      __m512i lower = lower_columns(left, right);
      right = upper_columns(left, right), left = lower;
    }
    _mm512_storeu_si512(to->high, lower_bytes(high_byte(left), high_byte(right)));
    _mm512_storeu_si512(to->low, lower_bytes(left, right));
  }
}

/* sum plus the products of words of W and a word of x. The instruction itself broadcasts it. An instruction of its own would fill
   one more of the processor's registers, of which there are too few then to transpose the next block at the same time. */
INLINE_FOR(TARGET_AVX512) __m512i add_broadcast(__m512i sum, __m512i words, const uint32_t *x) {
  __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(words), "m"(*x));
  return sum;
}

/* Adds the products of a block of SIDE rows of W with one of each of `count` rows of x, from `row` on, to their sums, and
   prefetches FETCHES places that are `step` bytes apart, from `ahead` on. count and weight_type are compile-time constants. */
INLINE_FOR(TARGET_AVX512) void add_block(const Panels *a, const __m512i w[WORDS], ptrdiff_t row, ptrdiff_t k, __m512 scales,
                                         __m512 *sums, const char *ahead, ptrdiff_t step, int count, int weight_type) {
  __m512i high[2], low[2];
  const Block *x = a->x + row * a->blocks + k;
  const float *x_scales = a->x_scales + row * a->blocks + k;
#pragma GCC unroll 2
  for (int b = 0; b < count; b++)
    high[b] = _mm512_setzero_si512(), low[b] = _mm512_set1_epi32(a->corrections[(row + b) * a->blocks + k]);
#pragma GCC unroll 16
  for (int i = 0; i < WORDS; i++) {
    if (i % 2 == 0) fetch(ahead + i / 2 * step, weight_type);
#pragma GCC unroll 2
    for (int b = 0; b < count; b++) {
      high[b] = add_broadcast(high[b], w[i], x[b * a->blocks].high + i);
      low[b] = add_broadcast(low[b], w[i], x[b * a->blocks].low + i);
    }
  }
#pragma GCC unroll 2
  for (int b = 0; b < count; b++) {
    __m512i products = _mm512_add_epi32(low[b], _mm512_slli_epi32(high[b], 8));
    __m512 scale = _mm512_mul_ps(scales, _mm512_set1_ps(x_scales[b * a->blocks]));
    sums[row + b] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products), scale, sums[row + b]);
  }
}

/* Transposes PART bytes at `place` of each of SIDE rows of W: word i of each row -> to[i]. First, the i-th 128 bits of register r
   are those of row r + 4 i; then, words are transposed in each 128 bits. */
INLINE_FOR(TARGET_AVX512) void transpose_part(const char *const rows[SIDE], ptrdiff_t place, __m512i to[PART / 4]) {
  __m512i four[4];
#pragma GCC unroll 4
  for (int r = 0; r < 4; r++) {
    four[r] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(rows[r] + place)));
#pragma GCC unroll 4
    for (int i = 1; i < 4; i++) {
      __m128i part = _mm_loadu_si128((const __m128i *)(rows[r + 4 * i] + place));
      four[r] = _mm512_mask_broadcast_i32x4(four[r], (__mmask16)(0xf << 4 * i), part);
    }
  }
  transpose_4(four, to);
}

/* SIDE rows of W that are being transposed. */
typedef struct {
  const char *rows[SIDE];
  ptrdiff_t place, bytes; /* the transposed bytes, and all bytes, of each row */
  __m512i lines[2][SIDE]; /* two transposed lines: word i of all rows */
} Transposed;

/* Transposes the next part. The check, which callers make too, lets GCC write code that is 3 to 5 % faster for 3 and 4 rows of x. */
INLINE_FOR(TARGET_AVX512) void transpose_next(Transposed *w) {
  if (w->place >= w->bytes) return;
  transpose_part(w->rows, w->place, &w->lines[w->place / LINE % 2][w->place % LINE / 4]);
  w->place += PART;
}

/* Block k of SIDE rows of W times all rows of x, of which two at a time share the loads of W. Between these, W is transposed up to
   byte `stop` of its rows; the processor does both at the same time. Of the SIDE blocks from `ahead` on, every line is prefetched;
   of 8 bits every other one, if there are only one or two rows of x, as may be left after MOST rows. */
INLINE_FOR(TARGET_AVX512) void add_blocks(const Panels *a, Transposed *w, ptrdiff_t stop, const __m512i words[WORDS],
                                          ptrdiff_t k, __m512 scales, __m512 *sums, const char *ahead, int weight_type) {
  ptrdiff_t step = SIDE * bytes_per_block(weight_type) / ((a->p.batch + 1) / 2 * FETCHES), row = 0;
  for (; row + 2 <= a->p.batch; row += 2, ahead += FETCHES * step) {
    add_block(a, words, row, k, scales, sums, ahead, step, 2, weight_type);
    if (w->place < stop) transpose_next(w);
  }
  if (row < a->p.batch) add_block(a, words, row, k, scales, sums, ahead, step, 1, weight_type);
  while (w->place < stop) transpose_next(w);
}

/* The words of the `half`-th block of transposed lines; those of 8 bits have only one. */
INLINE_FOR(TARGET_AVX512) void unpack_words(const __m512i lines[SIDE], __m512i to[WORDS], int half, int weight_type) {
#pragma GCC unroll 8
  for (int i = 0; i < WORDS / 2; i++)
    if (weight_type == INT8) {
      to[i] = without_sign(lines[i]), to[WORDS / 2 + i] = without_sign(lines[WORDS / 2 + i]);
    } else {
      __m512i line = lines[half * WORDS / 2 + i];
      to[i] = lower_bits(line), to[WORDS / 2 + i] = upper_bits(line);
    }
}

/* SIDE rows of W from `row` on, of which those beyond the last are the last one. weight_type is a compile-time constant. */
INLINE_FOR(TARGET_AVX512) void multiply_panel(const Panels *a, ptrdiff_t row, __m512 *sums, int weight_type) {
  ptrdiff_t each = bytes_per_block(weight_type), step = blocks_per_line(weight_type);
  Transposed w;
  const float *scales[SIDE];
  const char *ahead = (const char *)a->p.weight + (row + SIDE) * a->blocks * each; /* the next panel, in the order of its addresses */
  __m512i of_rows[SCALES];
  w.place = 0, w.bytes = a->blocks * each;
  for (ptrdiff_t b = 0; b < a->p.batch; b++) sums[b] = _mm512_setzero_ps();
  for (ptrdiff_t r = 0; r < SIDE; r++) {
    ptrdiff_t place = (row + r < a->p.out ? row + r : a->p.out - 1) * a->blocks;
    w.rows[r] = (const char *)a->p.weight + place * each, scales[r] = a->p.scales + place;
  }
  for (ptrdiff_t p = 0; p < each; p += PART) transpose_next(&w);
  for (ptrdiff_t k = 0; k < a->blocks; k++, ahead += SIDE * each) {
    __m512i words[WORDS];
    if (k % SCALES == 0) transpose_scales(scales, k, a->blocks, of_rows);
    unpack_words(w.lines[k / step % 2], words, k % step, weight_type);
    ptrdiff_t next = (k + 2) * each;
    add_blocks(a, &w, next < w.bytes ? next : w.bytes, words, k, (__m512)of_rows[k % SCALES], sums, ahead, weight_type);
  }
}

TARGET_AVX512 static void multiply_panels(const Panels *a, ptrdiff_t start, ptrdiff_t stop) {
  __m512 sums[MOST];
  for (ptrdiff_t row = start; row < stop; row += SIDE) {
    if (a->p.weight_type == INT8) multiply_panel(a, row, sums, INT8);
    else multiply_panel(a, row, sums, INT4);
    if (a->p.type == FLOAT32) write_panel(&a->p, (float *)sums, SIDE, row, FLOAT32);
    else write_panel(&a->p, (float *)sums, SIDE, row, BFLOAT16);
  }
}

/* split, corrections: temporaries for MOST rows of x. */
static void multiply_all(const Product *p, QuantizedX x, Block *split, int32_t *corrections) {
  ptrdiff_t blocks = p->in / BLOCK, panels = (p->out + SIDE - 1) / SIDE, share = (panels + p->threads - 1) / p->threads * SIDE;
  for (ptrdiff_t first = 0; first < p->batch; first += MOST) {
    ptrdiff_t place = first * blocks, count = p->batch - first < MOST ? p->batch - first : MOST;
    for (ptrdiff_t b = 0; b < count; b++)
      split_bytes(x.values + (place + b * blocks) * BLOCK, split + b * blocks, corrections + b * blocks, blocks, p->weight_type);
    Panels a = {rows_of(p, first, count), split, x.scales + place, corrections, blocks};
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1)
    for (ptrdiff_t start = 0; start < p->out; start += share)
      multiply_panels(&a, start, start + share < p->out ? start + share : p->out);
  }
}

int gemm_quantized_vnni(const Product *p) {
  ptrdiff_t blocks = p->in / BLOCK, most = p->batch < MOST ? p->batch : MOST;
  QuantizedX x = x_in_16_bits(p);
  Block *split = allocate(most * blocks * (sizeof(Block) + sizeof(int32_t)));
  int failed = !x.values || !split;
  if (!failed) multiply_all(p, x, split, (int32_t *)(split + most * blocks));
  free(split);
  free(x.values);
  return failed;
}
#endif
