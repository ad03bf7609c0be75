/* y = x W^T + b by AMX, which multiplies tiles of 16 x 32 bfloat16 numbers: for several rows of x, up to whole prompts.

   A tile of W is 16 rows of 32 columns. BFLOAT16 matrices are read where they are; PANEL rows of INT8 and INT4 matrices at a
   time are widened into a buffer that stays in the cache. x is rounded to bfloat16. A tile of x is 32 columns of 16 rows, in
   pairs of columns: (16 pairs, 16 rows, 2). Sums are float32.

   A FLOAT32 matrix and its x are not rounded: each number is the sum of three bfloat16 numbers, its parts of 8 bits. Of the
   nine products of two numbers' parts, the six largest are added; the others are below 2^-23 of the product. Parts below
   1e-38 count as zeros, and infinite numbers give NaN. */
#include "tiles.h"

#ifdef HAS_TILES
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
  PANEL = 2 * SIDE,             /* rows of W, and rows of x, whose four products are computed at once */
  PARTS = 3,                    /* of a float32 number */
  WIDTH = 256, SPLIT_WIDTH = 128, /* columns of a panel that are multiplied at a time: they stay in the first-level cache */
  X_BYTES = 5 << 18,            /* rows of x are multiplied so many at a time that their tiles stay in the cache */
  AMX = 1 << 22 | 1 << 24 | 1 << 25, /* in EDX of CPUID 7: bfloat16, tiles, bytes */
  XTILEDATA = 18, REQUEST = 0x1023    /* Linux: the component of the processor's state, and arch_prctl's request for it */
};

typedef struct {
  const char *values;    /* (out, in) of weight_type */
  const float *scales;   /* of INT8 and INT4 */
  const void *bias;      /* (out) of `type`, or NULL */
  const uint32_t *tiles; /* those of x: (groups of SIDE rows, in / DEPTH, parts, TILE) */
  void *y;               /* (batch, out) of `type` */
  ptrdiff_t batch, out, in;
  int type, weight_type;
} Product;

/* How many bfloat16 numbers stand for an element of W and of x. */
INLINE int parts_of(int weight_type) { return weight_type == FLOAT32 ? PARTS : 1; }

/* DEPTH elements of x as bfloat16. */
INLINE_FOR(TARGET_AMX) __m512i narrowed(const void *x, int type) {
  if (type == BFLOAT16) return _mm512_loadu_si512(x);
  const float *from = x;
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + SIDE), _mm512_loadu_ps(from));
}

/* The tiles of `count` rows of x, filled up with zeros to whole panels. type and parts are compile-time constants. */
INLINE_FOR(TARGET_AMX) void fill_each(const void *x, uint32_t *tiles, ptrdiff_t count, ptrdiff_t in, ptrdiff_t x_stride,
                                     int type, int parts) {
  for (ptrdiff_t first = 0; first < (count + PANEL - 1) / PANEL * PANEL; first += SIDE)
    for (ptrdiff_t k = 0; k < in; k += DEPTH, tiles += parts * TILE) {
      __m512i rows[PARTS][SIDE], split_row[PARTS];
      for (int r = 0; r < SIDE; r++) {
        const void *from = at(x, (first + r) * x_stride + k, type);
        if (first + r >= count) split_row[0] = split_row[1] = split_row[2] = _mm512_setzero_si512();
        else if (parts > 1) split(_mm512_loadu_ps(from), _mm512_loadu_ps((const float *)from + SIDE), split_row, PARTS);
        else split_row[0] = narrowed(from, type);
        for (int p = 0; p < parts; p++) rows[p][r] = split_row[p];
      }
      for (int p = 0; p < parts; p++) {
        transpose_16(rows[p]);
        for (int r = 0; r < SIDE; r++) _mm512_store_si512(tiles + p * TILE + r * SIDE, rows[p][r]);
      }
    }
}

TARGET_AMX static void fill_tiles(const void *x, uint32_t *tiles, ptrdiff_t count, ptrdiff_t in, ptrdiff_t x_stride,
                                  int type, int parts) {
  if (parts > 1) fill_each(x, tiles, count, in, x_stride, FLOAT32, PARTS);
  else if (type == FLOAT32) fill_each(x, tiles, count, in, x_stride, FLOAT32, 1);
  else fill_each(x, tiles, count, in, x_stride, BFLOAT16, 1);
}

/* The tiles of sums from memory, where they are (2 groups of x, 2 of W, SIDE rows of W, SIDE rows of x); at first zeros. */
INLINE_FOR(TARGET_AMX) void load_sums(const float *sums, int is_first) {
  if (is_first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, SIDE * 4);
    _tile_loadd(1, sums + TILE, SIDE * 4);
    _tile_loadd(2, sums + 2 * TILE, SIDE * 4);
    _tile_loadd(3, sums + 3 * TILE, SIDE * 4);
  }
}

/* Adds the products of PANEL rows of W, `stride` bytes apart, with one or two groups of rows of x, whose tiles are `second`
   elements apart; depth: how many tiles deep. */
INLINE_FOR(TARGET_AMX) void multiply_tiles(const char *w, ptrdiff_t stride, const uint32_t *x, ptrdiff_t second,
                                           ptrdiff_t depth, int groups) {
  for (ptrdiff_t k = 0; k < depth; k++, w += DEPTH * 2, x += TILE) {
    _tile_loadd(4, w, stride);
    _tile_loadd(6, x, SIDE * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, w + SIDE * stride, stride);
    _tile_dpbf16ps(1, 5, 6);
    if (groups < 2) continue;
    _tile_loadd(7, x + second, SIDE * 4);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
}

/* The same for float32 numbers. W and x are (depth, parts, rows, DEPTH). */
INLINE_FOR(TARGET_AMX) void multiply_parts(const uint16_t *w, const uint32_t *x, ptrdiff_t second, ptrdiff_t depth,
                                           int groups) {
  for (ptrdiff_t k = 0; k < depth; k++, x += PARTS * TILE)
    for (int i = 0; i < PARTS; i++, w += PANEL * DEPTH) {
      _tile_loadd(4, w, DEPTH * 2);
      _tile_loadd(5, w + SIDE * DEPTH, DEPTH * 2);
      for (int j = 0; j < PARTS - i; j++) {
        _tile_loadd(6, x + j * TILE, SIDE * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if (groups < 2) continue;
        _tile_loadd(7, x + second + j * TILE, SIDE * 4);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
}

INLINE_FOR(TARGET_AMX) void store_sums(float *sums) {
  _tile_stored(0, sums, SIDE * 4);
  _tile_stored(1, sums + TILE, SIDE * 4);
  _tile_stored(2, sums + 2 * TILE, SIDE * 4);
  _tile_stored(3, sums + 3 * TILE, SIDE * 4);
}

/* Writes a tile of sums: the products of the rows of W from `row` on with the rows of x from `first` on. */
INLINE_FOR(TARGET_AMX) void write_tile(const Product *a, const float *sums, ptrdiff_t row, ptrdiff_t first, int type) {
  __m512i rows[SIDE];
  for (int r = 0; r < SIDE; r++) rows[r] = _mm512_loadu_si512(sums + r * SIDE);
  transpose_16(rows);
  write_sums((__m512 *)rows, SIDE, a->bias, a->y, row, first, a->out, a->batch, type);
}

/* The address of the elements of W from `place` on; of INT8 and INT4, a multiple of BLOCK. */
INLINE const char *address_of(const Product *a, ptrdiff_t place) {
  if (!is_rounded(a->weight_type)) return at(a->values, place, a->weight_type);
  return a->values + place / BLOCK * bytes_per_block(a->weight_type);
}

/* Prefetches what is multiplied next: `width` columns from `start` on of the panel at `row`, or after its last column the first
   columns of the next panel. A call prefetches some rows only, which depend on `first`, the rows of x that are multiplied
   meanwhile; the calls for all rows of x prefetch all rows of the panel. */
static void prefetch_next(const Product *a, ptrdiff_t row, ptrdiff_t first, ptrdiff_t start, ptrdiff_t width) {
  if (start >= a->in) start = 0, row += PANEL;
  ptrdiff_t times = (a->batch + PANEL - 1) / PANEL, share = (PANEL + times - 1) / times, from = row + first / PANEL * share;
  ptrdiff_t stop = start + width < a->in ? start + width : a->in, next = row + PANEL < a->out ? row + PANEL : a->out;
  for (ptrdiff_t r = from; r < from + share && r < next; r++)
    prefetch_lines(address_of(a, r * a->in + start), address_of(a, r * a->in + stop));
}

/* Prefetches what the products of the rows of W from `row` on with the rows of x from `first` on are written to. */
INLINE void prefetch_y(const Product *a, ptrdiff_t row, ptrdiff_t first, int type) {
  for (ptrdiff_t r = first; r < first + PANEL && r < a->batch; r++) {
    const char *line = at(a->y, r * a->out + row, type);
    __builtin_prefetch(line, 1);
    if (type == FLOAT32) __builtin_prefetch(line + 64, 1);
  }
}

/* Columns `start` to `stop` of `rows` rows of W from `row` on, with zeros up to PANEL rows -> buffer (PANEL, stop - start)
   in bfloat16, or (columns / DEPTH, PARTS, PANEL, DEPTH) for float32. */
static void fill_buffer(const Product *a, ptrdiff_t row, ptrdiff_t rows, ptrdiff_t start, ptrdiff_t stop, uint16_t *buffer) {
  ptrdiff_t width = stop - start;
  memset(buffer + rows * width, 0, (PANEL - rows) * width * 2);
  for (ptrdiff_t r = 0; r < rows; r++) {
    ptrdiff_t place = (row + r) * a->in + start;
    const char *from = address_of(a, place);
    uint16_t *to = buffer + r * width;
    if (a->weight_type == BFLOAT16) memcpy(to, from, width * 2);
    else widen_blocks(from, a->scales + place / BLOCK, to, width / BLOCK, a->weight_type, BFLOAT16);
  }
}

TARGET_AMX static void fill_parts(const Product *a, ptrdiff_t row, ptrdiff_t rows, ptrdiff_t start, ptrdiff_t stop,
                                  uint16_t *buffer) {
  if (rows < PANEL) memset(buffer, 0, (stop - start) * PARTS * PANEL * 2);
  for (; start < stop; start += DEPTH, buffer += PARTS * PANEL * DEPTH)
    for (ptrdiff_t r = 0; r < rows; r++) {
      const float *from = (const float *)a->values + (row + r) * a->in + start;
      __m512i parts[PARTS];
      split(_mm512_loadu_ps(from), _mm512_loadu_ps(from + SIDE), parts, PARTS);
      for (int p = 0; p < PARTS; p++) _mm512_store_si512(buffer + (p * PANEL + r) * DEPTH, parts[p]);
    }
}

/* All rows of x times PANEL rows of W from `row` on, `width` columns at a time. buffer: for the rows of W that cannot be used
   where they are. sums: (batch / PANEL, 4 * TILE). */
INLINE_FOR(TARGET_AMX) void multiply_panel(const Product *a, ptrdiff_t row, uint16_t *buffer, float *sums, int type) {
  ptrdiff_t rows = a->out - row < PANEL ? a->out - row : PANEL, depth = a->in / DEPTH, parts = parts_of(a->weight_type);
  ptrdiff_t width = parts > 1 ? SPLIT_WIDTH : WIDTH, group = depth * parts * TILE;
  int is_copy = a->weight_type != BFLOAT16 || rows < PANEL;
  for (ptrdiff_t start = 0; start < a->in; start += width) {
    ptrdiff_t stop = start + width < a->in ? start + width : a->in, steps = (stop - start) / DEPTH;
    ptrdiff_t stride = (is_copy ? stop - start : a->in) * 2;
    const char *w = is_copy ? (const char *)buffer : a->values + row * stride + start * 2;
    if (parts > 1) fill_parts(a, row, rows, start, stop, buffer);
    else if (is_copy) fill_buffer(a, row, rows, start, stop, buffer);
    for (ptrdiff_t first = 0; first < a->batch; first += PANEL) {
      const uint32_t *x = a->tiles + first / SIDE * group + start / DEPTH * parts * TILE;
      float *own = sums + first / PANEL * 4 * TILE;
      int groups = a->batch - first > SIDE ? 2 : 1;
      prefetch_next(a, row, first, stop, width);
      if (!start) prefetch_y(a, row, first, type);
      load_sums(own, !start);
      if (parts > 1) multiply_parts(buffer, x, group, steps, groups);
      else multiply_tiles(w, stride, x, group, steps, groups);
      store_sums(own);
      for (int t = 0; stop == a->in && t < 2 * groups; t++)
        if (row + t % 2 * SIDE < a->out) write_tile(a, own + t * TILE, row + t % 2 * SIDE, first + t / 2 * SIDE, type);
    }
  }
}

TARGET_AMX static void multiply_panels(const Product *a, ptrdiff_t start, ptrdiff_t stop, uint16_t *buffer,
                                       float *sums) {
  configure_tiles();
  for (ptrdiff_t row = start; row < stop; row += PANEL)
    if (a->type == FLOAT32) multiply_panel(a, row, buffer, sums, FLOAT32);
    else multiply_panel(a, row, buffer, sums, BFLOAT16);
  _tile_release();
}

/* The panels of W in equal shares. */
static int multiply(const Product *a, int threads) {
  int failed = 0;
  ptrdiff_t panels = (a->out + PANEL - 1) / PANEL, share = (panels + threads - 1) / threads * PANEL;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(| : failed)
  for (ptrdiff_t start = 0; start < a->out; start += share) {
    size_t buffer_bytes = PARTS * PANEL * WIDTH * sizeof(uint16_t);
    uint16_t *buffer = allocate(buffer_bytes + (a->batch + PANEL - 1) / PANEL * 4 * TILE * sizeof(float));
    float *sums = (float *)((char *)buffer + buffer_bytes);
    if (buffer) multiply_panels(a, start, start + share < a->out ? start + share : a->out, buffer, sums);
    else failed = 1;
    free(buffer);
  }
  return failed;
}

/* Rows of `in` elements, from row to row `stride` apart -> rows of `padded` elements, filled up with zeros; NULL on failure. */
static void *padded_rows(const void *rows, ptrdiff_t count, ptrdiff_t in, ptrdiff_t stride, ptrdiff_t padded, int type) {
  size_t bytes = bytes_of(in, type), row_bytes = bytes_of(padded, type);
  char *to = allocate(count * row_bytes);
  for (ptrdiff_t r = 0; to && r < count; r++) {
    memcpy(to + r * row_bytes, at(rows, r * stride, type), bytes);
    memset(to + r * row_bytes + bytes, 0, row_bytes - bytes);
  }
  return to;
}

/* The product of FLOAT32 or BFLOAT16 matrices whose rows are not whole tiles. */
static int padded_product(const void *values, const void *bias, const void *x, void *y, ptrdiff_t batch, ptrdiff_t out,
                          ptrdiff_t in, ptrdiff_t x_stride, int weight_type, int type, int threads) {
  ptrdiff_t padded = (in + DEPTH - 1) / DEPTH * DEPTH;
  void *w = padded_rows(values, out, in, in, padded, weight_type), *rows = padded_rows(x, batch, in, x_stride, padded, type);
  int failed = !w || !rows || tile_product(w, NULL, bias, rows, y, batch, out, padded, padded, weight_type, type, threads);
  free(w);
  free(rows);
  return failed;
}

/* `type` is FLOAT32 for FLOAT32 matrices. */
int tile_product(const void *values, const float *scales, const void *bias, const void *x, void *y, ptrdiff_t batch,
                 ptrdiff_t out, ptrdiff_t in, ptrdiff_t x_stride, int weight_type, int type, int threads) {
  if (in % DEPTH) return padded_product(values, bias, x, y, batch, out, in, x_stride, weight_type, type, threads);
  ptrdiff_t row_bytes = parts_of(weight_type) * in * sizeof(uint16_t), most = X_BYTES / row_bytes / PANEL * PANEL;
  ptrdiff_t passes = most ? (batch + most - 1) / most : (batch + PANEL - 1) / PANEL;
  ptrdiff_t step = passes ? ((batch + passes - 1) / passes + PANEL - 1) / PANEL * PANEL : PANEL; /* equal shares */
  uint32_t *tiles = allocate(step * row_bytes);
  int failed = !tiles;
  for (ptrdiff_t first = 0; first < batch && !failed; first += step) {
    ptrdiff_t count = batch - first < step ? batch - first : step;
    fill_tiles(at(x, first * x_stride, type), tiles, count, in, x_stride, type, parts_of(weight_type));
    Product a = {values, scales, bias, tiles, at(y, first * out, type), count, out, in, type, weight_type};
    failed = multiply(&a, threads);
  }
  free(tiles);
  return failed;
}

/* Whether this processor has AMX, and Linux lets this process use it, for which the process must ask. */
int has_tile_products(void) {
  static int known = -1;
  unsigned a, b, c, d;
  if (known < 0)
    known = has_avx512_bf16() && has_avx512_vnni() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & AMX) == AMX &&
            !syscall(SYS_arch_prctl, REQUEST, XTILEDATA);
  return known;
}
#else
int tile_product(const void *values, const float *scales, const void *bias, const void *x, void *y, ptrdiff_t batch,
                 ptrdiff_t out, ptrdiff_t in, ptrdiff_t x_stride, int weight_type, int type, int threads) {
  return 1;
}

int has_tile_products(void) { return 0; }
#endif
