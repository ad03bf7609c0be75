/* y = x W^T + b by AMX's instruction for bytes, for several rows of x and a W of 8 or 4 bits.

   x is rounded to 16 bits in blocks (quantized.h), as 256 high + low with two bytes. A tile of W is a block of 16 rows. A tile of x is a
   block of ROWS rows, first their high bytes and then their low bytes, in words of 4 columns: (words, 2 ROWS, 4). So the sums are
   exact integers. Blocks of INT8 are read without a copy; 16 rows of INT4 become bytes in a buffer, with permuted columns, and x is
   permuted in the same way. */
#include "amx.h"

#ifdef HAS_TILES
enum { ROWS = SIDE / 2, HALF = BLOCK / 2 };

typedef struct {
  uint8_t bytes[SIDE * TILE_BYTES];
  float scales[SIDE]; /* of ROWS rows; the others keep blocks aligned */
} Block; /* a block of ROWS rows of x */

typedef struct {
  Product p;
  const Block *x; /* (groups of ROWS rows, blocks) */
  ptrdiff_t blocks;
} Tiles;

/* Block k of the rows of x from `first` on; rows beyond the last are zeros. x: (batch, in) of 16 bits. */
TARGET_AMX static void fill_block(const int16_t *x, const float *x_scales, Block *to, ptrdiff_t first, ptrdiff_t k,
                                  ptrdiff_t batch, ptrdiff_t blocks, int weight_type) {
  __m512i bytes[SIDE];
  for (ptrdiff_t r = 0; r < ROWS; r++) {
    ptrdiff_t place = (first + r) * blocks + k;
    bytes[r] = bytes[ROWS + r] = _mm512_setzero_si512();
    to->scales[r] = 0;
    if (first + r >= batch) continue;
    __m512i left = _mm512_loadu_si512(x + place * BLOCK), right = _mm512_loadu_si512(x + place * BLOCK + HALF);
    if (weight_type == INT4) {
      __m512i lower = lower_columns(left, right);
      right = upper_columns(left, right), left = lower;
    }
    bytes[r] = lower_bytes(high_byte(left), high_byte(right)), bytes[ROWS + r] = lower_bytes(left, right);
    to->scales[r] = x_scales[place];
  }
  transpose_16(bytes);
  for (int word = 0; word < SIDE; word++) _mm512_storeu_si512(to->bytes + word * TILE_BYTES, bytes[word]);
}

/* SIDE rows of W from `row` on as bytes -> buffer (blocks, SIDE, BLOCK); rows beyond the last are zeros. */
TARGET_AMX static void fill_buffer(const Tiles *a, ptrdiff_t row, uint8_t *buffer) {
  const __m512i values = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1));
  ptrdiff_t bytes = bytes_per_block(a->p.weight_type);
  for (ptrdiff_t k = 0; k < a->blocks; k++)
    for (ptrdiff_t r = 0; r < SIDE; r++, buffer += BLOCK) {
      const char *block = (const char *)a->p.weight + ((row + r) * a->blocks + k) * bytes;
      __m512i columns = _mm512_setzero_si512();
      if (row + r < a->p.out && a->p.weight_type == INT8) columns = _mm512_loadu_si512(block);
      else if (row + r < a->p.out) {
        __m256i pairs = _mm256_loadu_si256((const __m256i *)block);
        columns = _mm512_inserti64x4(_mm512_castsi256_si512(pairs), _mm256_srli_epi16(pairs, 4), 1);
        columns = _mm512_shuffle_epi8(values, _mm512_and_si512(columns, _mm512_set1_epi8(15)));
      }
      _mm512_storeu_si512(buffer, columns);
    }
}

/* Two tiles' rows: the ROWS sums of the first and those of the second, which are 256 times the high bytes' plus the low ones'. */
INLINE_FOR(TARGET_AMX) __m512i whole_sums(const int32_t *first, const int32_t *second) {
  __m512i one = _mm512_loadu_si512(first), two = _mm512_loadu_si512(second);
  __m512i high = _mm512_shuffle_i64x2(one, two, 0x44), low = _mm512_shuffle_i64x2(one, two, 0xee);
  return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
}

/* SIDE rows of W from `row` on, whose blocks are `next` bytes apart and their rows `stride`, times the ROWS rows of x from
   `first` on. next_rows: W's lines to prefetch, as many as are multiplied, or NULL. A vector has the sums of two rows of W. */
INLINE_FOR(TARGET_AMX) void multiply_rows(const Tiles *a, const uint8_t *w, ptrdiff_t next, ptrdiff_t stride,
                                          ptrdiff_t row, ptrdiff_t first, const char *next_rows, int type) {
  const Block *x = a->x + first / ROWS * a->blocks;
  const float *scales[SIDE];
  __m512 pairs[ROWS];
  int lines = a->p.weight_type == INT8 ? 2 : 1;
  for (int r = 0; r < SIDE; r++) scales[r] = a->p.scales + (row + r < a->p.out ? row + r : row) * a->blocks;
  for (int r = 0; r < ROWS; r++) pairs[r] = _mm512_setzero_ps();
  for (ptrdiff_t k = 0; k < a->blocks; k++, w += next, x++) {
    int32_t products[TILE];
    _tile_zero(0);
    _tile_loadd(1, w, stride);
    _tile_loadd(2, x->bytes, TILE_BYTES);
    _tile_dpbssd(0, 1, 2);
    _tile_stored(0, products, TILE_BYTES);
    __m512 x_scales = _mm512_broadcast_f32x8(_mm256_loadu_ps(x->scales));
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      __m512 own = _mm512_mask_broadcastss_ps(_mm512_set1_ps(scales[2 * r][k]), 0xff00, _mm_load_ss(&scales[2 * r + 1][k]));
      __m512i sums = whole_sums(products + 2 * r * SIDE, products + (2 * r + 1) * SIDE);
      pairs[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), _mm512_mul_ps(own, x_scales), pairs[r]);
      for (int line = 0; next_rows && line < lines; line++, next_rows += TILE_BYTES) fetch_line(next_rows);
    }
  }
  __m512i rows[SIDE];
  for (int r = 0; r < ROWS; r++) {
    rows[2 * r] = _mm512_castsi256_si512(_mm512_castsi512_si256((__m512i)pairs[r]));
    rows[2 * r + 1] = _mm512_castsi256_si512(_mm512_extracti64x4_epi64((__m512i)pairs[r], 1));
  }
  transpose_16(rows);
  write_sums(&a->p, (__m512 *)rows, ROWS, row, first, type);
}

TARGET_AMX static void multiply_panels(const Tiles *a, ptrdiff_t start, ptrdiff_t stop, uint8_t *buffer) {
  configure_tiles();
  for (ptrdiff_t row = start; row < stop; row += SIDE) {
    ptrdiff_t in = a->blocks * BLOCK;
    int is_copy = a->p.weight_type == INT4 || row + SIDE > a->p.out;
    const uint8_t *w = is_copy ? buffer : (const uint8_t *)a->p.weight + row * in;
    if (is_copy) fill_buffer(a, row, buffer);
    for (ptrdiff_t first = 0; first < a->p.batch; first += ROWS) {
      ptrdiff_t next = is_copy ? SIDE * BLOCK : BLOCK, stride = is_copy ? BLOCK : in;
      const char *next_rows = first ? NULL : (const char *)a->p.weight + (row + SIDE) * a->blocks * bytes_per_block(a->p.weight_type);
      if (a->p.type == FLOAT32) multiply_rows(a, w, next, stride, row, first, next_rows, FLOAT32);
      else multiply_rows(a, w, next, stride, row, first, next_rows, BFLOAT16);
    }
  }
  _tile_release();
}

int gemm_quantized_amx(const Product *p) {
  ptrdiff_t blocks = p->in / BLOCK, panels = (p->out + SIDE - 1) / SIDE, share = (panels + p->threads - 1) / p->threads * SIDE;
  QuantizedX x = x_in_16_bits(p);
  Block *tiles = allocate((p->batch + ROWS - 1) / ROWS * blocks * sizeof(Block));
  int failed = !x.values || !tiles;
  for (ptrdiff_t first = 0; !failed && first < p->batch; first += ROWS)
    for (ptrdiff_t k = 0; k < blocks; k++)
      fill_block(x.values, x.scales, tiles + first / ROWS * blocks + k, first, k, p->batch, blocks, p->weight_type);
  Tiles a = {*p, tiles, blocks};
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1) reduction(| : failed)
  for (ptrdiff_t start = 0; start < p->out; start += share) {
    uint8_t *buffer = failed ? NULL : allocate(blocks * SIDE * BLOCK);
    if (buffer) multiply_panels(&a, start, start + share < p->out ? start + share : p->out, buffer);
    failed |= !buffer;
    free(buffer);
  }
  free(tiles);
  free(x.values);
  return failed;
}
#endif
