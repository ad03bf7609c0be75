/* Products of several rows of x, up to whole prompts, by AMX, which multiplies tiles of 16 x 32 bfloat16 numbers.

   A tile of W is 16 rows of 32 columns. BFLOAT16 matrices are read without a copy; INT8 and INT4 matrices are widened, PANEL rows at a
   time, into a buffer that stays in the cache. x is rounded to bfloat16. A tile of x is 32 columns of 16 rows, in pairs of columns:
   (16 pairs, 16 rows, 2). Sums are float32.

   A FLOAT32 matrix and its x are not rounded: each number is the sum of three bfloat16 numbers, its parts of 8 bits. Of the
   nine products of the parts of two numbers, the six largest are added; the others are below 2^-23 of the product. Parts below
   1e-38 count as zeros, and infinite numbers give NaN. */
#include "amx.h"

#ifdef HAS_TILES
enum {
  PANEL = 2 * SIDE,             /* rows of W, and rows of x, whose four products are computed at once */
  PARTS = 3,                    /* of a float32 number */
  WIDTH = 256, SPLIT_WIDTH = 96, /* columns of W that are multiplied at a time: they stay in the first-level cache */
  BUFFER = PANEL * PARTS * SPLIT_WIDTH, /* bfloat16 numbers for such columns of PANEL rows, of any type */
  X_BYTES = 5 << 18             /* the bytes of tiles of x that stay in the cache: limits the rows of x at a time */
};

typedef struct {
  Product p;
  const uint32_t *tiles; /* the tiles of x, in the order of fill_each */
} Tiles;

/* The number of bfloat16 numbers that represent an element of W and of x. */
INLINE int parts_of(int weight_type) { return weight_type == FLOAT32 ? PARTS : 1; }

/* DEPTH elements of x as bfloat16. */
INLINE_FOR(TARGET_AMX) __m512i narrowed(const void *x, int type) {
  if (type == BFLOAT16) return _mm512_loadu_si512(x);
  const float *from = x;
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + SIDE), _mm512_loadu_ps(from));
}

/* DEPTH columns of SIDE rows of x from `first` on, zeros from row `count` on -> `parts` tiles, every second one. */
INLINE_FOR(TARGET_AMX) void fill_tile(const void *x, uint32_t *tiles, ptrdiff_t first, ptrdiff_t count, ptrdiff_t x_stride,
                                     int type, int parts) {
  __m512i rows[PARTS][SIDE], split_row[PARTS];
  for (int r = 0; r < SIDE; r++) {
    const void *from = at(x, (first + r) * x_stride, type);
    if (first + r >= count) split_row[0] = split_row[1] = split_row[2] = _mm512_setzero_si512();
    else if (parts > 1) split(_mm512_loadu_ps(from), _mm512_loadu_ps((const float *)from + SIDE), split_row, PARTS);
    else split_row[0] = narrowed(from, type);
    for (int p = 0; p < parts; p++) rows[p][r] = split_row[p];
  }
  for (int p = 0; p < parts; p++) {
    transpose_16(rows[p]);
    for (int r = 0; r < SIDE; r++) _mm512_store_si512(tiles + 2 * p * TILE + r * SIDE, rows[p][r]);
  }
}

/* The tiles of the rows `start` to `stop` of `count` rows of x; start is a multiple of PANEL. tiles: those of all rows, filled up
   with zeros to whole panels, in the order of their use: `width` columns of all rows at a time (the last time the rest), of
   these PANEL rows at a time, of these DEPTH columns, of these the parts, and of these two tiles. type and parts are
   compile-time constants. */
INLINE_FOR(TARGET_AMX) void fill_each(const void *x, uint32_t *tiles, ptrdiff_t start, ptrdiff_t stop, ptrdiff_t count,
                                     ptrdiff_t in, ptrdiff_t x_stride, int type, int parts) {
  ptrdiff_t width = parts > 1 ? SPLIT_WIDTH : WIDTH, panels = (count + PANEL - 1) / PANEL, left = in;
  for (ptrdiff_t k = 0; k < in; k += width, left -= width) {
    ptrdiff_t depth = (left < width ? left : width) / DEPTH;
    for (ptrdiff_t first = start; first < stop; first += PANEL)
      for (ptrdiff_t d = 0; d < depth; d++)
        for (int g = 0; g < 2; g++) {
          ptrdiff_t tile = (k / DEPTH * panels + first / PANEL * depth + d) * 2 * parts + g;
          fill_tile(at(x, k + d * DEPTH, type), tiles + tile * TILE, first + g * SIDE, count, x_stride, type, parts);
        }
  }
}

TARGET_AMX static void fill_rows(const Product *p, uint32_t *tiles, ptrdiff_t start, ptrdiff_t stop) {
  if (p->weight_type == FLOAT32) fill_each(p->x, tiles, start, stop, p->batch, p->in, p->x_stride, FLOAT32, PARTS);
  else if (p->type == FLOAT32) fill_each(p->x, tiles, start, stop, p->batch, p->in, p->x_stride, FLOAT32, 1);
  else fill_each(p->x, tiles, start, stop, p->batch, p->in, p->x_stride, BFLOAT16, 1);
}

/* The tiles of all rows of x, by all threads. */
static void fill_tiles(const Product *p, uint32_t *tiles) {
  ptrdiff_t panels = (p->batch + PANEL - 1) / PANEL, share = (panels + p->threads - 1) / p->threads * PANEL;
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1)
  for (ptrdiff_t start = 0; start < p->batch; start += share)
    fill_rows(p, tiles, start, start + share < p->batch ? start + share : p->batch);
}

/* The address of the elements of W from `place` on; of INT8 and INT4, a multiple of BLOCK. */
INLINE const char *address_of(const Tiles *a, ptrdiff_t place) {
  if (!is_quantized(a->p.weight_type)) return at(a->p.weight, place, a->p.weight_type);
  return (const char *)a->p.weight + place / BLOCK * bytes_per_block(a->p.weight_type);
}

/* A chunk: the columns of a panel of W that are multiplied at a time. Meanwhile the next chunk is copied to a buffer, because
   other instructions cost no time beside AMX's, and the chunk after that is prefetched. Both are done unit by unit: DEPTH
   columns of a row, or a BLOCK. A whole panel of BFLOAT16 is not copied, but used where it is; it is prefetched instead. */
typedef struct {
  const char *from, *ahead;        /* its first element, and that of what is prefetched while it is copied */
  const float *scales;             /* of INT8 and INT4 */
  uint16_t *to;                    /* (PANEL, width), or of FLOAT32 (width / DEPTH, PARTS, PANEL, DEPTH); NULL: not copied */
  ptrdiff_t stride, blocks, width; /* bytes and blocks from row to row of W; columns */
  ptrdiff_t rows, units;           /* rows, and units of each */
  ptrdiff_t row, unit;             /* the unit that is copied next */
} Chunk;

/* The chunk of PANEL rows of W from `row` on, or fewer at the end, and the columns from `start` on; to: the buffer. */
INLINE Chunk chunk_at(const Tiles *a, ptrdiff_t row, ptrdiff_t start, uint16_t *to, int weight_type) {
  ptrdiff_t most = weight_type == FLOAT32 ? SPLIT_WIDTH : WIDTH, width = a->p.in - start < most ? a->p.in - start : most;
  ptrdiff_t rows = a->p.out - row < PANEL ? a->p.out - row : PANEL, first = row * a->p.in + start;
  ptrdiff_t ahead = start + width < a->p.in ? first + width : (row + PANEL) * a->p.in;
  ptrdiff_t unit = is_quantized(weight_type) ? BLOCK : DEPTH;
  if (weight_type == BFLOAT16 && rows == PANEL) to = NULL, ahead = first;
  if (rows < PANEL) memset(to, 0, width * parts_of(weight_type) * PANEL * sizeof(uint16_t));
  return (Chunk){address_of(a, first), address_of(a, ahead), is_quantized(weight_type) ? a->p.scales + first / BLOCK : NULL, to,
                 address_of(a, a->p.in) - (const char *)a->p.weight, a->p.in / BLOCK, width, rows, width / unit, 0, 0};
}

/* Copies the next unit, if there is one. */
INLINE_FOR(TARGET_AMX) void copy_unit(Chunk *c, int weight_type) {
  if (c->row == c->rows) return;
  ptrdiff_t bytes = is_quantized(weight_type) ? bytes_per_block(weight_type) : (ptrdiff_t)bytes_of(DEPTH, weight_type);
  ptrdiff_t place = c->row * c->stride + c->unit * bytes;
  const char *from = c->from + place, *ahead = c->ahead + place;
  fetch_line(ahead);
  if (weight_type == FLOAT32) {
    __m512i parts[PARTS];
    fetch_line(ahead + LINE);
    split(_mm512_loadu_ps(from), _mm512_loadu_ps(from + LINE), parts, PARTS);
    for (int p = 0; p < PARTS; p++) _mm512_store_si512(c->to + ((c->unit * PARTS + p) * PANEL + c->row) * DEPTH, parts[p]);
  } else if (is_quantized(weight_type)) {
    widen_block(from, c->scales[c->row * c->blocks + c->unit], c->to + c->row * c->width + c->unit * BLOCK, weight_type);
  } else if (c->to) {
    _mm512_storeu_si512(c->to + c->row * c->width + c->unit * DEPTH, _mm512_loadu_si512(from));
  }
  if (++c->unit == c->units) c->unit = 0, c->row++;
}

/* Prefetches lines to the first-level cache, and returns the address after them. */
INLINE const uint32_t *fetch_to_first_level(const uint32_t *lines, int count) {
  for (int i = 0; i < count; i++, lines += SIDE) __asm__ volatile("prefetcht0 %0" : : "m"(*lines));
  return lines;
}

/* Adds the product of tile W with tile 7 to tile SUM, and fetches lines of x meanwhile. The products of a step, 24 of parts or
   4, fetch the 2 * parts tiles of x of the next step. */
#define ADD_PRODUCT(SUM, W)                                    \
  do {                                                         \
    _tile_dpbf16ps(SUM, W, 7);                                 \
    ahead = fetch_to_first_level(ahead, parts > 1 ? 4 : 8);    \
  } while (0)

/* Adds the products of SIDE rows of W, whose parts are the tiles 4 to 6, with SIDE rows of x to the tile SUM. The tile is loaded
   just before its first product, and stored just after its last one, so that the products of the other sums hide it. */
#define ADD_PRODUCTS(SUM, X)                                                \
  do {                                                                      \
    if (k == 0 && is_first) _tile_zero(SUM);                                \
    else if (k == 0) _tile_loadd(SUM, sums + SUM * TILE, SIDE * 4);         \
    for (ptrdiff_t u = 0; u < units; u++) copy_unit(next, weight_type);     \
    _tile_loadd(7, X, SIDE * 4);                                            \
    ADD_PRODUCT(SUM, 4);                                                    \
    if (parts > 1) {                                                        \
      ADD_PRODUCT(SUM, 5);                                                  \
      ADD_PRODUCT(SUM, 6);                                                  \
      _tile_loadd(7, X + 2 * TILE, SIDE * 4);                               \
      ADD_PRODUCT(SUM, 4);                                                  \
      ADD_PRODUCT(SUM, 5);                                                  \
      _tile_loadd(7, X + 4 * TILE, SIDE * 4);                               \
      ADD_PRODUCT(SUM, 4);                                                  \
    }                                                                       \
    if (k == depth - 1) _tile_stored(SUM, sums + SUM * TILE, SIDE * 4);     \
  } while (0)

/* Adds the products of PANEL rows of W with one or two groups of rows of x, `depth` tiles deep, to their sums: (2 groups of x,
   2 of W, SIDE rows of W, SIDE rows of x). is_first: the sums count as zeros. Copies `units` units of the next chunk with each tile
   of sums. Tiles of W have rows `stride` bytes apart; those of FLOAT32 are (depth, PARTS, PANEL, DEPTH). */
INLINE_FOR(TARGET_AMX) void multiply_tiles(const char *w, ptrdiff_t stride, const uint32_t *x, float *sums, ptrdiff_t depth,
                                           int is_first, int groups, Chunk *next, ptrdiff_t units, int weight_type) {
  const int parts = parts_of(weight_type);
  const uint32_t *ahead = x + 2 * parts * TILE;
  __asm__ volatile("" ::: "memory"); /* stores must precede the loads of tiles */
  for (ptrdiff_t k = 0; k < depth; k++, w += (parts > 1 ? PARTS * PANEL : 1) * LINE, x += 2 * parts * TILE) {
    const char *second = w + SIDE * stride;
    _tile_loadd(4, w, stride);
    if (parts > 1) _tile_loadd(5, w + PANEL * LINE, LINE);
    if (parts > 1) _tile_loadd(6, w + 2 * PANEL * LINE, LINE);
    ADD_PRODUCTS(0, x);
    if (groups > 1) ADD_PRODUCTS(2, x + TILE);
    _tile_loadd(4, second, stride);
    if (parts > 1) _tile_loadd(5, second + PANEL * LINE, LINE);
    if (parts > 1) _tile_loadd(6, second + 2 * PANEL * LINE, LINE);
    ADD_PRODUCTS(1, x);
    if (groups > 1) ADD_PRODUCTS(3, x + TILE);
  }
}

/* Writes a tile of sums: the products of the rows of W from `row` on with the rows of x from `first` on. */
INLINE_FOR(TARGET_AMX) void write_tile(const Tiles *a, const float *sums, ptrdiff_t row, ptrdiff_t first, int type) {
  __m512i rows[SIDE];
  for (int r = 0; r < SIDE; r++) rows[r] = _mm512_loadu_si512(sums + r * SIDE);
  transpose_16(rows);
  write_sums(&a->p, (__m512 *)rows, SIDE, row, first, type);
}

/* Prefetches the memory for the products of the rows of W from `row` on and the rows of x from `first` on. */
INLINE void prefetch_y(const Tiles *a, ptrdiff_t row, ptrdiff_t first, int type) {
  for (ptrdiff_t r = first; r < first + PANEL && r < a->p.batch; r++) {
    const char *line = at(a->p.y, r * a->p.out + row, type);
    __builtin_prefetch(line, 1);
    if (type == FLOAT32) __builtin_prefetch(line + 64, 1);
  }
}

/* Writes the sums of PANEL rows of W from `row` on with PANEL rows of x from `first` on. */
INLINE_FOR(TARGET_AMX) void write_tiles(const Tiles *a, const float *sums, ptrdiff_t row, ptrdiff_t first) {
  for (int t = 0; t < 4; t++) {
    ptrdiff_t r = row + t % 2 * SIDE, f = first + t / 2 * SIDE;
    if (r >= a->p.out || f >= a->p.batch) continue;
    if (a->p.type == FLOAT32) write_tile(a, sums + t * TILE, r, f, FLOAT32);
    else write_tile(a, sums + t * TILE, r, f, BFLOAT16);
  }
}

/* Multiplies a chunk with all rows of x, whose sums are (batch / PANEL, 4 * TILE), and copies the next one. */
INLINE_FOR(TARGET_AMX) void multiply_chunk(const Tiles *a, const Chunk *c, ptrdiff_t row, ptrdiff_t start, Chunk *next,
                                           float *sums, int weight_type) {
  ptrdiff_t panels = (a->p.batch + PANEL - 1) / PANEL, parts = parts_of(weight_type), depth = c->width / DEPTH;
  ptrdiff_t times = panels * depth * 4, units = (next->rows * next->units + times - 1) / times;
  ptrdiff_t stride = parts > 1 ? LINE : c->to ? c->width * 2 : c->stride;
  const char *w = c->to ? (const char *)c->to : c->from;
  for (ptrdiff_t p = 0; p < panels; p++, sums += 4 * TILE) {
    const uint32_t *x = a->tiles + (start / DEPTH * panels + p * depth) * 2 * parts * TILE;
    int groups = a->p.batch - p * PANEL > SIDE ? 2 : 1;
    if (!start) prefetch_y(a, row, p * PANEL, a->p.type);
    multiply_tiles(w, stride, x, sums, depth, !start, groups, next, units, weight_type);
    if (start + c->width == a->p.in) write_tiles(a, sums, row, p * PANEL);
  }
  while (next->row < next->rows) copy_unit(next, weight_type); /* some rows of x have one group only */
}

/* The products of the rows `row` to `end` of W. buffers: two of BUFFER elements. */
INLINE_FOR(TARGET_AMX) void multiply_chunks(const Tiles *a, ptrdiff_t row, ptrdiff_t end, uint16_t *buffers, float *sums,
                                           int weight_type) {
  Chunk chunk = chunk_at(a, row, 0, buffers, weight_type);
  while (chunk.row < chunk.rows) copy_unit(&chunk, weight_type);
  for (ptrdiff_t start = 0, count = 1; row < end; count++) {
    ptrdiff_t stop = start + chunk.width, next_start = stop < a->p.in ? stop : 0, next_row = next_start ? row : row + PANEL;
    Chunk next = {0};
    if (next_row < end) next = chunk_at(a, next_row, next_start, buffers + count % 2 * BUFFER, weight_type);
    multiply_chunk(a, &chunk, row, start, &next, sums, weight_type);
    chunk = next, row = next_row, start = next_start;
  }
}

TARGET_AMX static void multiply_panels(const Tiles *a, ptrdiff_t start, ptrdiff_t stop, uint16_t *buffers, float *sums) {
  configure_tiles();
  switch (a->p.weight_type) {
    case FLOAT32: multiply_chunks(a, start, stop, buffers, sums, FLOAT32); break;
    case BFLOAT16: multiply_chunks(a, start, stop, buffers, sums, BFLOAT16); break;
    case INT8: multiply_chunks(a, start, stop, buffers, sums, INT8); break;
    default: multiply_chunks(a, start, stop, buffers, sums, INT4);
  }
  _tile_release();
}

/* The panels of W in equal shares. */
static int multiply_shares(const Tiles *a) {
  int failed = 0, threads = a->p.threads;
  ptrdiff_t panels = (a->p.out + PANEL - 1) / PANEL, share = (panels + threads - 1) / threads * PANEL;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(| : failed)
  for (ptrdiff_t start = 0; start < a->p.out; start += share) {
    size_t buffer_bytes = 2 * BUFFER * sizeof(uint16_t);
    uint16_t *buffers = allocate(buffer_bytes + (a->p.batch + PANEL - 1) / PANEL * 4 * TILE * sizeof(float));
    float *sums = (float *)((char *)buffers + buffer_bytes);
    if (buffers) multiply_panels(a, start, start + share < a->p.out ? start + share : a->p.out, buffers, sums);
    else failed = 1;
    free(buffers);
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

/* The product with a FLOAT32 or BFLOAT16 matrix whose rows are not whole tiles. */
static int multiply_padded(const Product *p) {
  Product a = *p;
  a.in = a.weight_stride = a.x_stride = (p->in + DEPTH - 1) / DEPTH * DEPTH;
  void *w = padded_rows(p->weight, p->out, p->in, p->in, a.in, p->weight_type);
  void *x = padded_rows(p->x, p->batch, p->in, p->x_stride, a.in, p->type);
  a.weight = w, a.x = x;
  int failed = !w || !x || gemm_bf16_amx(&a);
  free(w);
  free(x);
  return failed;
}

/* `type` is FLOAT32 for FLOAT32 matrices. */
int gemm_bf16_amx(const Product *p) {
  if (p->in % DEPTH) return multiply_padded(p);
  ptrdiff_t row_bytes = parts_of(p->weight_type) * p->in * sizeof(uint16_t), most = X_BYTES / row_bytes / PANEL * PANEL;
  ptrdiff_t passes = most ? (p->batch + most - 1) / most : (p->batch + PANEL - 1) / PANEL;
  ptrdiff_t step = ((p->batch + passes - 1) / passes + PANEL - 1) / PANEL * PANEL; /* equal shares */
  uint32_t *tiles = allocate(step * row_bytes);
  int failed = !tiles;
  for (ptrdiff_t first = 0; first < p->batch && !failed; first += step) {
    Tiles a = {rows_of(p, first, p->batch - first < step ? p->batch - first : step), tiles};
    fill_tiles(&a.p, tiles);
    failed = multiply_shares(&a);
  }
  free(tiles);
  return failed;
}
#endif
