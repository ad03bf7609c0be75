/* Few rows of x times a W of 8 or 4 bits, by AVX512_VNNI. W is read line by line: 64 columns of 8 bits, or 128 of 4 bits. x is
   rounded to 16 bits (rounded.c), and so the products of a line are sums of integers, which are exact. Each dot product is one
   register of partial sums, so a row's numbers do not depend on what is computed beside it.

   8 bits are widened to 16. 4 bits become bytes without sign, 8 more than the numbers they stand for, because the processor
   multiplies such bytes by bytes with sign, four at once. So x is 256 times a byte plus a byte, and 8 times its sum is taken
   off. In both, a lane of a register has columns of one block. For the fewest rows of x, processors with AMX have a function of
   their own, which adds as byte_tiles.c does; there 8 bits become bytes without sign as well, 128 more than the numbers. */
#include "linear.h"

#ifdef HAS_INTRINSICS
enum {
  TOGETHER = 8,   /* rows of x that are multiplied at once */
  SUMS = 16,      /* registers that are added up at once */
  ROWS = 16,      /* rows of W that stay in the cache while the rows of x change, and by which W is prefetched */
  AT_ONCE = 4,    /* rows of W that meet a row of x at once, which saves loads of x */
  SCALES = 16,    /* blocks whose scales are in a register */
  PARTS = 5,      /* registers of x that a line of 4 bits meets */
  PARTS_8 = 3,    /* the same for 8 bits that become bytes without sign */
  OFFSET_4 = 8
};

INLINE ptrdiff_t blocks_per_line(int weight_type) { return weight_type == INT8 ? 1 : 2; }

ptrdiff_t bytes_of_x_row(ptrdiff_t blocks, int weight_type) {
  return weight_type == INT8 ? blocks * BLOCK * (ptrdiff_t)sizeof(int16_t) : (blocks + 1) / 2 * PARTS * LINE;
}

INLINE_FOR(TARGET_AVX512) __m512i add_bytes(__m512i sum, __m512i words, __m512i x) {
  return (__m512i)add_word((__m512)sum, (__m512)words, (__m512)x, BYTE_QUADS);
}

/* A line of W as two registers; of 4 bits, the first has the columns of the lower bits. mask: of its words of 64 bits. */
INLINE_FOR(TARGET_AVX512) void unpack_line(const char *w, __m512i to[2], __mmask8 mask, int weight_type) {
  if (weight_type == INT8) {
    to[0] = half_block(w, 0, INT8), to[1] = half_block(w, 1, INT8);
    return;
  }
  __m512i words = _mm512_maskz_loadu_epi64(mask, w), lower = _mm512_set1_epi8(15), offset = _mm512_set1_epi8(OFFSET_4);
  to[0] = _mm512_ternarylogic_epi32(words, lower, offset, 0x6a); /* (words & lower) ^ offset */
  to[1] = _mm512_ternarylogic_epi32(_mm512_srli_epi16(words, 4), lower, offset, 0x6a);
}

/* The sums of the products of a line of W and of x in each lane. */
INLINE_FOR(TARGET_AVX512) __m512i line_sums(const __m512i w[2], const char *x, int weight_type) {
  __m512i first = _mm512_loadu_si512(x), second = _mm512_loadu_si512(x + LINE), zero = _mm512_setzero_si512();
  if (weight_type == INT8) return add_products(add_products(zero, w[0], first, 1), w[1], second, 1);
  __m512i high = add_bytes(add_bytes(zero, w[0], first), w[1], second);
  __m512i low = add_bytes(_mm512_loadu_si512(x + 4 * LINE), w[0], _mm512_loadu_si512(x + 2 * LINE));
  low = add_bytes(low, w[1], _mm512_loadu_si512(x + 3 * LINE));
  return _mm512_add_epi32(low, _mm512_slli_epi32(high, 8));
}

/* The sums in each lane of the products of a line of bytes without sign and of x, as split_row_8 writes it. */
INLINE_FOR(TARGET_AVX512) __m512i byte_sums(__m512i w, const char *x) {
  __m512i high = add_bytes(_mm512_setzero_si512(), w, _mm512_loadu_si512(x));
  __m512i low = add_bytes(_mm512_loadu_si512(x + 2 * LINE), w, _mm512_loadu_si512(x + LINE));
  return _mm512_add_epi32(low, _mm512_slli_epi32(high, 8));
}

/* What the lines of 4 bits meet in a row of x, of 16 bits: the higher bytes for the lower and the upper 4 bits of W, the lower
   bytes for both, and what is taken off. Beyond the last block there are zeros. */
TARGET_AVX512 static void split_row(const int16_t *x, char *to, ptrdiff_t blocks) {
  int16_t columns[BLOCK / 2]; /* of a block, that meet the lower 4 bits of W; the upper ones meet those 16 columns further */
  for (int i = 0; i < BLOCK / 2; i++) columns[i] = (int16_t)(i / 2 + i % 2 * 32);
  __m512i lower = _mm512_loadu_si512(columns), zero = _mm512_setzero_si512();
  for (ptrdiff_t k = 0; k < blocks; k += 2, to += PARTS * LINE) {
    __m512i offsets[2] = {_mm512_set1_epi8(OFFSET_4), _mm512_set1_epi8(OFFSET_4)};
    memset(to, 0, PARTS * LINE);
    for (int b = 0; b < 2 && k + b < blocks; b++) {
      __m512i left = _mm512_loadu_si512(x + (k + b) * BLOCK), right = _mm512_loadu_si512(x + (k + b) * BLOCK + BLOCK / 2);
      for (int upper = 0; upper < 2; upper++) {
        __m512i chosen = _mm512_add_epi16(lower, _mm512_set1_epi16((int16_t)(16 * upper)));
        __m512i words = _mm512_permutex2var_epi16(left, chosen, right);
        __m512i high = _mm512_srai_epi16(_mm512_add_epi16(words, _mm512_set1_epi16(128)), 8);
        char *place = to + upper * LINE + b * LINE / 2;
        _mm256_storeu_si256((__m256i *)place, _mm512_cvtepi16_epi8(high));
        _mm256_storeu_si256((__m256i *)(place + 2 * LINE), _mm512_cvtepi16_epi8(words));
      }
    }
    _mm512_storeu_si512(to + 4 * LINE, _mm512_sub_epi32(zero, line_sums(offsets, to, INT4)));
  }
}

void split_x(const int16_t *x, char *to, ptrdiff_t batch, ptrdiff_t blocks) {
  for (ptrdiff_t b = 0; b < batch; b++, x += blocks * BLOCK, to += bytes_of_x_row(blocks, INT4)) split_row(x, to, blocks);
}

/* Partial sums of `rows` rows of W from `row` on, of which `last` is the last, times `count` rows of x from `first` on. rows,
   count and weight_type are compile-time constants. */
INLINE_FOR(TARGET_AVX512) void multiply_lines(const Linear *a, ptrdiff_t row, ptrdiff_t last, ptrdiff_t first, __m512 *sums,
                                              int rows, int count, int weight_type) {
  ptrdiff_t blocks = a->in / BLOCK, each = bytes_per_block(weight_type), bytes = blocks * each;
  ptrdiff_t x_bytes = a->x_stride, step = blocks_per_line(weight_type);
  const char *w[AT_ONCE], *x = (const char *)a->x + first * x_bytes;
  const float *scales[AT_ONCE], *x_scales = a->x_scales + first * blocks;
#pragma GCC unroll 4
  for (int r = 0; r < rows; r++) {
    ptrdiff_t own = row + r < last ? row + r : last;
    w[r] = (const char *)a->weight + own * bytes, scales[r] = a->scales + own * blocks;
  }
#pragma GCC unroll 8
  for (int s = 0; s < rows * count; s++) sums[s] = _mm512_setzero_ps();
  for (ptrdiff_t start = 0; start < blocks; start += SCALES) {
    ptrdiff_t stop = start + SCALES < blocks ? start + SCALES : blocks;
    __mmask16 mask = (__mmask16)((1u << (stop - start)) - 1);
    __m512i lanes = _mm512_setzero_si512(); /* where each lane's block has its scale */
    if (weight_type == INT4) lanes = _mm512_inserti64x4(lanes, _mm256_set1_epi32(1), 1);
    __m512 both[TOGETHER];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
      for (int b = 0; b < count; b++)
        both[r * count + b] = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, scales[r] + start),
                                            _mm512_maskz_loadu_ps(mask, x_scales + b * blocks + start));
    for (ptrdiff_t k = start; k < stop; k += step, x += weight_type == INT8 ? 2 * LINE : PARTS * LINE) {
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++) {
        __m512i line[2];
        unpack_line(w[r] + k * each, line, blocks - k > 1 ? 0xff : 0x0f, weight_type);
        __builtin_prefetch(w[r] + k * each + ROWS * bytes, 0, 2);
#pragma GCC unroll 8
        for (int b = 0; b < count; b++) {
          __m512 scale = _mm512_permutexvar_ps(lanes, both[r * count + b]);
          __m512 products = _mm512_cvtepi32_ps(line_sums(line, x + b * x_bytes, weight_type));
          sums[r * count + b] = _mm512_fmadd_ps(products, scale, sums[r * count + b]);
        }
      }
      lanes = _mm512_add_epi32(lanes, _mm512_set1_epi32((int)step));
    }
  }
}

/* The rows `start` to `stop` of W times `count` rows of x from `first` on. */
INLINE_FOR(TARGET_AVX512) void multiply_rows(const Linear *a, ptrdiff_t first, ptrdiff_t start, ptrdiff_t stop, int count,
                                             int weight_type) {
  const int rows = SUMS / count, at_once = count == 1 ? AT_ONCE : count == 2 ? AT_ONCE / 2 : 1;
  for (ptrdiff_t row = start; row < stop; row += rows) {
    __m512 sums[SUMS];
    float totals[SUMS];
#pragma GCC unroll 16
    for (int s = rows * count; s < SUMS; s++) sums[s] = _mm512_setzero_ps();
#pragma GCC unroll 16
    for (int r = 0; r < rows; r += at_once)
      multiply_lines(a, row + r, stop - 1, first, sums + r * count, at_once, count, weight_type);
    _mm512_storeu_ps(totals, sums_of_lanes(sums));
    for (int r = 0; r < rows && row + r < stop; r++) {
      float bias = a->bias ? get(a->bias, row + r, a->type) : 0;
      for (int b = 0; b < count; b++)
        put(a->y, (first + b) * a->y_stride + row + r, totals[r * count + b] + bias, a->type);
    }
  }
}

/* What the lines of 8 bits meet as bytes without sign: the higher bytes of x, the lower ones, and what is taken off. */
TARGET_AVX512 static void split_row_8(const int16_t *x, char *to, ptrdiff_t blocks) {
  for (ptrdiff_t k = 0; k < blocks; k++, x += BLOCK, to += PARTS_8 * LINE) {
    for (int half = 0; half < 2; half++) {
      __m512i words = _mm512_loadu_si512(x + half * BLOCK / 2);
      __m512i high = _mm512_srai_epi16(_mm512_add_epi16(words, _mm512_set1_epi16(128)), 8);
      _mm256_storeu_si256((__m256i *)to + half, _mm512_cvtepi16_epi8(high));
      _mm256_storeu_si256((__m256i *)(to + LINE) + half, _mm512_cvtepi16_epi8(words));
    }
    _mm512_storeu_si512(to + 2 * LINE, _mm512_setzero_si512());
    __m512i sums = byte_sums(_mm512_set1_epi8((char)OFFSET), to);
    _mm512_storeu_si512(to + 2 * LINE, _mm512_sub_epi32(_mm512_setzero_si512(), sums));
  }
}

/* The sums of the lanes of 16 registers, apart for the lower and the upper half of the lanes: of 16 lanes each. */
INLINE_FOR(TARGET_AVX512) void sums_of_halves(__m512i v[SUMS], __m512i to[2]) {
  for (int i = 0; i < 8; i++)
    v[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]));
  for (int i = 0; i < 4; i++)
    v[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_epi64(v[2 * i], v[2 * i + 1]));
  for (int i = 0; i < 2; i++)
    v[i] = _mm512_add_epi32(_mm512_shuffle_i32x4(v[2 * i], v[2 * i + 1], 0x88),
                            _mm512_shuffle_i32x4(v[2 * i], v[2 * i + 1], 0xdd));
  to[0] = _mm512_shuffle_i32x4(v[0], v[1], 0x88), to[1] = _mm512_shuffle_i32x4(v[0], v[1], 0xdd);
}

/* The scales of SUMS rows of W, of SCALES blocks from k on: (blocks, rows). */
INLINE_FOR(TARGET_AVX512) void load_scales(const float *const rows[SUMS], ptrdiff_t k, ptrdiff_t blocks, __m512i to[SCALES]) {
  __mmask16 mask = blocks - k < SCALES ? (__mmask16)((1u << (blocks - k)) - 1) : 0xffff;
  for (int r = 0; r < SUMS; r++) to[r] = _mm512_maskz_loadu_epi32(mask, rows[r] + k);
  transpose_16(to);
}

/* SUMS rows of W from `row` on, of which those beyond the last are the last one, times the rows of x: lanes are rows of W. A
   block's sum is exact; times both scales, it is added to those of the blocks before it. */
INLINE_FOR(TARGET_AVX512) void multiply_fewest(const Linear *a, ptrdiff_t row, __m512 *sums, int weight_type) {
  ptrdiff_t blocks = a->in / BLOCK, each = bytes_per_block(weight_type), step = blocks_per_line(weight_type);
  ptrdiff_t parts = weight_type == INT8 ? PARTS_8 : PARTS;
  const char *w[SUMS], *x = a->x;
  const float *scales[SUMS];
  __m512i of_rows[SCALES];
  for (ptrdiff_t b = 0; b < a->batch; b++) sums[b] = _mm512_setzero_ps();
  for (ptrdiff_t r = 0; r < SUMS; r++) {
    ptrdiff_t own = row + r < a->out ? row + r : a->out - 1;
    w[r] = (const char *)a->weight + own * blocks * each, scales[r] = a->scales + own * blocks;
  }
  const char *next = (const char *)a->weight + (row + 2 * SUMS) * blocks * each; /* rows that are read later, line by line */
  for (ptrdiff_t k = 0; k < blocks; k += step, x += parts * LINE) {
    __mmask8 mask = blocks - k < step ? 0x0f : 0xff;
    if (k % SCALES == 0) load_scales(scales, k, blocks, of_rows);
    for (ptrdiff_t b = 0; b < a->batch; b++) {
      const char *own = x + b * a->x_stride;
      __m512i products[SUMS], halves[2];
#pragma GCC unroll 16
      for (int r = 0; r < SUMS; r++) {
        const char *line = w[r] + k * each;
        if (weight_type == INT4) {
          __m512i columns[2];
          unpack_line(line, columns, mask, INT4);
          products[r] = line_sums(columns, own, INT4);
        } else products[r] = byte_sums(_mm512_xor_si512(_mm512_loadu_si512(line), _mm512_set1_epi8((char)OFFSET)), own);
        if (b == 0) fetch_line(next), next += LINE;
      }
      sums_of_halves(products, halves);
      if (weight_type == INT8) halves[0] = _mm512_add_epi32(halves[0], halves[1]);
      for (int i = 0; i < step && k + i < blocks; i++) {
        __m512 scale = _mm512_mul_ps((__m512)of_rows[k % SCALES + i], _mm512_set1_ps(a->x_scales[b * blocks + k + i]));
        sums[b] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(halves[i]), scale, sums[b]);
      }
    }
  }
}

TARGET_AVX512 static void multiply_fewest_rows(const Linear *a, ptrdiff_t start, ptrdiff_t stop, int weight_type) {
  for (ptrdiff_t row = start; row < stop; row += SUMS) {
    __m512 sums[FEWEST];
    float totals[SUMS];
    if (weight_type == INT8) multiply_fewest(a, row, sums, INT8);
    else multiply_fewest(a, row, sums, INT4);
    for (ptrdiff_t b = 0; b < a->batch; b++) {
      _mm512_storeu_ps(totals, sums[b]);
      for (ptrdiff_t r = 0; r < SUMS && row + r < stop; r++)
        put(a->y, b * a->out + row + r, totals[r] + (a->bias ? get(a->bias, row + r, a->type) : 0), a->type);
    }
  }
}

int fewest_rounded_rows(Linear a, int weight_type, int threads) {
  ptrdiff_t blocks = a.in / BLOCK, panels = (a.out + SUMS - 1) / SUMS, share = (panels + threads - 1) / threads * SUMS;
  const int16_t *x = a.x;
  a.x_stride = weight_type == INT8 ? blocks * PARTS_8 * LINE : bytes_of_x_row(blocks, INT4);
  char *split = allocate(a.batch * a.x_stride);
  if (!split) return 1;
  for (ptrdiff_t b = 0; b < a.batch; b++, x += a.in) {
    if (weight_type == INT8) split_row_8(x, split + b * a.x_stride, blocks);
    else split_row(x, split + b * a.x_stride, blocks);
  }
  a.x = split;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (ptrdiff_t start = 0; start < a.out; start += share)
    multiply_fewest_rows(&a, start, start + share < a.out ? start + share : a.out, weight_type);
  free(split);
  return 0;
}

typedef void MultiplyRows(const Linear *, ptrdiff_t first, ptrdiff_t start, ptrdiff_t stop);
#define MULTIPLY_ROWS(TYPE, COUNT)                                                                                  \
  TARGET_AVX512 static void TYPE##_##COUNT(const Linear *given, ptrdiff_t first, ptrdiff_t start, ptrdiff_t stop) { \
    const Linear a = *given;                                                                                        \
    multiply_rows(&a, first, start, stop, COUNT, TYPE);                                                             \
  }
#define FOR_EACH_COUNT(TYPE)                                                                  \
  MULTIPLY_ROWS(TYPE, 1) MULTIPLY_ROWS(TYPE, 2) MULTIPLY_ROWS(TYPE, 3) MULTIPLY_ROWS(TYPE, 4) \
  MULTIPLY_ROWS(TYPE, 5) MULTIPLY_ROWS(TYPE, 6) MULTIPLY_ROWS(TYPE, 7) MULTIPLY_ROWS(TYPE, 8) \
  static MultiplyRows *const for_##TYPE[] = {TYPE##_1, TYPE##_2, TYPE##_3, TYPE##_4,          \
                                             TYPE##_5, TYPE##_6, TYPE##_7, TYPE##_8};
FOR_EACH_COUNT(INT8)
FOR_EACH_COUNT(INT4)

void multiply_rounded_rows(const Linear *a, int weight_type, ptrdiff_t start, ptrdiff_t stop) {
  MultiplyRows *const *functions = weight_type == INT8 ? for_INT8 : for_INT4;
  ptrdiff_t groups = (a->batch + TOGETHER - 1) / TOGETHER;
  for (; start < stop; start += ROWS)
    for (ptrdiff_t group = 0, first = 0; group < groups; group++) { /* groups of almost equal sizes */
      ptrdiff_t after = (group + 1) * a->batch / groups;
      functions[after - first - 1](a, first, start, start + ROWS < stop ? start + ROWS : stop);
      first = after;
    }
}
#endif
