/* y = x W^T + b by AMX, which multiplies tiles of 16 x 32 bfloat16 numbers: for several rows of x, up to whole prompts.

   A tile of W is 16 rows of 32 columns. BFLOAT16 matrices are read where they are; PANEL rows of INT8 and INT4 matrices at a
   time are widened into a buffer that stays in the cache. x is rounded to bfloat16. A tile of x is 32 columns of 16 rows, in
   pairs of columns: (16 pairs, 16 rows, 2). Sums are float32. */
#include <stdlib.h>

#include "rounded.h"

#if defined(HAS_INTRINSICS) && defined(HAS_CLONES)
#define HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

#ifdef HAS_TILES
#define TARGET_AMX __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,amx-tile,amx-bf16")))

enum {
  SIDE = 16,                    /* rows of a tile */
  DEPTH = 32,                   /* columns of W in a tile */
  PANEL = 2 * SIDE,             /* rows of W, and rows of x, whose four products are computed at once */
  TILE = SIDE * SIDE,           /* elements of 4 bytes in a tile */
  NARROW = 256,                 /* see multiply_panel */
  X_BYTES = 1 << 20,            /* rows of x are multiplied so many at a time that their tiles stay in the cache */
  ALIGNMENT = 64,
  XTILEDATA = 18, REQUEST = 0x1023 /* Linux: the component of the processor's state, and arch_prctl's request for it */
};

typedef struct {
  const char *values;    /* (out, in) of weight_type */
  const float *scales;   /* of INT8 and INT4 */
  const void *bias;      /* (out) of `type`, or NULL */
  const uint32_t *tiles; /* those of x: (groups of SIDE rows, in / DEPTH, TILE) */
  void *y;               /* (batch, out) of `type` */
  ptrdiff_t batch, out, in;
  int type, weight_type;
} Product;

/* rows[i][j] becomes rows[j][i]: of 4 x 4 elements in each 128 bits, then of 128-bit parts. */
INLINE_FOR(TARGET_AMX) void transpose(__m512i rows[SIDE]) {
  __m512i t[SIDE];
  for (int i = 0; i < SIDE; i += 2) {
    t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < SIDE; i += 4)
    for (int j = 0; j < 2; j++) {
      rows[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      rows[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
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

/* DEPTH elements of x as bfloat16. */
INLINE_FOR(TARGET_AMX) __m512i narrowed(const void *x, int type) {
  if (type == BFLOAT16) return _mm512_loadu_si512(x);
  const float *from = x;
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + SIDE), _mm512_loadu_ps(from));
}

/* The tiles of `count` rows of x, filled up with zeros to whole panels. */
TARGET_AMX static void fill_tiles(const void *x, uint32_t *tiles, ptrdiff_t count, ptrdiff_t in, ptrdiff_t x_stride,
                                  int type) {
  for (ptrdiff_t first = 0; first < (count + PANEL - 1) / PANEL * PANEL; first += SIDE)
    for (ptrdiff_t k = 0; k < in; k += DEPTH, tiles += TILE) {
      __m512i rows[SIDE];
      for (int r = 0; r < SIDE; r++)
        rows[r] = first + r < count ? narrowed(at(x, (first + r) * x_stride + k, type), type) : _mm512_setzero_si512();
      transpose(rows);
      for (int r = 0; r < SIDE; r++) _mm512_store_si512(tiles + r * SIDE, rows[r]);
    }
}

INLINE_FOR(TARGET_AMX) void zero_tiles(void) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

/* Adds the products of PANEL rows of W, `stride` bytes apart, with one or two groups of rows of x, whose tiles are `second`
   elements apart; depth: how many tiles deep. ahead: the distance in bytes of what is prefetched, or 0. */
INLINE_FOR(TARGET_AMX) void multiply_tiles(const char *w, ptrdiff_t stride, const uint32_t *x, ptrdiff_t second,
                                           ptrdiff_t depth, int groups, ptrdiff_t ahead) {
  for (ptrdiff_t k = 0; k < depth; k++, w += DEPTH * 2, x += TILE) {
    for (int r = 0; ahead && r < PANEL; r++) __builtin_prefetch(w + ahead + r * stride);
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

/* sums (2 groups of x, 2 of W, SIDE rows of W, SIDE rows of x) */
INLINE_FOR(TARGET_AMX) void store_tiles(float *sums) {
  _tile_stored(0, sums, SIDE * 4);
  _tile_stored(1, sums + TILE, SIDE * 4);
  _tile_stored(2, sums + 2 * TILE, SIDE * 4);
  _tile_stored(3, sums + 3 * TILE, SIDE * 4);
}

/* Writes a tile of sums: the products of the rows of W from `row` on with the rows of x from `first` on. */
INLINE_FOR(TARGET_AMX) void write_tile(const Product *a, const float *sums, ptrdiff_t row, ptrdiff_t first, int type) {
  ptrdiff_t columns = a->out - row < SIDE ? a->out - row : SIDE;
  __m512i rows[SIDE];
  float values[SIDE], bias[SIDE] = {0};
  if (a->bias)
    for (ptrdiff_t i = 0; i < columns; i++) bias[i] = get(a->bias, row + i, type);
  for (int r = 0; r < SIDE; r++) rows[r] = _mm512_loadu_si512(sums + r * SIDE);
  transpose(rows);
  for (int r = 0; r < SIDE && first + r < a->batch; r++) {
    __m512 added = _mm512_add_ps((__m512)rows[r], _mm512_loadu_ps(bias));
    ptrdiff_t place = (first + r) * a->out + row;
    if (columns == SIDE && type == FLOAT32) _mm512_storeu_ps(at(a->y, place, type), added);
    else if (columns == SIDE) _mm256_storeu_si256(at(a->y, place, type), (__m256i)_mm512_cvtneps_pbh(added));
    else {
      _mm512_storeu_ps(values, added);
      for (ptrdiff_t i = 0; i < columns; i++) put(a->y, place + i, values[i], type);
    }
  }
}

/* Columns `start` to `stop` of `rows` rows of W from `row` on, as bfloat16 and with zeros up to PANEL rows -> buffer (PANEL,
   stop - start). Prefetches the same columns of the next panel. */
static void fill_buffer(const Product *a, ptrdiff_t row, ptrdiff_t rows, ptrdiff_t start, ptrdiff_t stop, uint16_t *buffer) {
  ptrdiff_t width = stop - start;
  for (ptrdiff_t r = 0; r < rows; r++) {
    ptrdiff_t place = (row + r) * a->in + start, block = place / BLOCK, bytes = bytes_per_block(a->weight_type);
    const char *blocks = a->values + block * bytes;
    if (a->weight_type == BFLOAT16) {
      memcpy(buffer + r * width, at(a->values, place, BFLOAT16), width * 2);
      continue;
    }
    for (ptrdiff_t i = 0; i < width / BLOCK * bytes; i += 64) __builtin_prefetch(blocks + PANEL * a->in / BLOCK * bytes + i);
    widen_blocks(blocks, a->scales + block, buffer + r * width, width / BLOCK, a->weight_type, BFLOAT16);
  }
  memset(buffer + rows * width, 0, (PANEL - rows) * width * 2);
}

/* All rows of x times PANEL rows of W from `row` on. buffer: (PANEL, in), for rows of W that cannot be used where they are.
   Few rows of x use it only once, so then the buffer has NARROW columns at a time, which stay in the first-level cache. */
INLINE_FOR(TARGET_AMX) void multiply_panel(const Product *a, ptrdiff_t row, uint16_t *buffer, int type) {
  ptrdiff_t rows = a->out - row < PANEL ? a->out - row : PANEL, depth = a->in / DEPTH;
  int is_copy = a->weight_type != BFLOAT16 || rows < PANEL, is_few = a->batch <= PANEL;
  ptrdiff_t width = is_copy && is_few ? NARROW : a->in, stride = (is_copy ? width : a->in) * 2;
  ptrdiff_t ahead = !is_copy && is_few && row + 2 * PANEL <= a->out ? PANEL * stride : 0;
  float sums[4 * TILE] __attribute__((aligned(ALIGNMENT)));
  for (ptrdiff_t first = 0; first < a->batch; first += PANEL) {
    const uint32_t *x = a->tiles + first / SIDE * depth * TILE;
    int groups = a->batch - first > SIDE ? 2 : 1;
    zero_tiles();
    for (ptrdiff_t start = 0; start < a->in; start += width) {
      ptrdiff_t stop = start + width < a->in ? start + width : a->in;
      if (is_copy && (is_few || !first)) fill_buffer(a, row, rows, start, stop, buffer);
      const char *w = is_copy ? (const char *)buffer : a->values + row * stride;
      multiply_tiles(w, is_copy ? (stop - start) * 2 : stride, x + start / DEPTH * TILE, depth * TILE,
                     (stop - start) / DEPTH, groups, ahead);
    }
    store_tiles(sums);
    for (int t = 0; t < 2 * groups; t++)
      if (row + t % 2 * SIDE < a->out) write_tile(a, sums + t * TILE, row + t % 2 * SIDE, first + t / 2 * SIDE, type);
  }
}

TARGET_AMX static void multiply_panels(const Product *a, ptrdiff_t start, ptrdiff_t stop, uint16_t *buffer) {
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } shapes = {.palette = 1};
  for (int t = 0; t < 8; t++) shapes.row_bytes[t] = DEPTH * 2, shapes.rows[t] = SIDE;
  _tile_loadconfig(&shapes);
  for (ptrdiff_t row = start; row < stop; row += PANEL)
    if (a->type == FLOAT32) multiply_panel(a, row, buffer, FLOAT32);
    else multiply_panel(a, row, buffer, BFLOAT16);
  _tile_release();
}

static void *allocate(size_t bytes) { return aligned_alloc(ALIGNMENT, (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT); }

/* The panels of W in equal shares. */
static int multiply(const Product *a, int threads) {
  int failed = 0;
  ptrdiff_t panels = (a->out + PANEL - 1) / PANEL, share = (panels + threads - 1) / threads * PANEL;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(| : failed)
  for (ptrdiff_t start = 0; start < a->out; start += share) {
    uint16_t *buffer = allocate(PANEL * a->in * sizeof(uint16_t));
    if (buffer) multiply_panels(a, start, start + share < a->out ? start + share : a->out, buffer);
    else failed = 1;
    free(buffer);
  }
  return failed;
}

int tile_product(const void *values, const float *scales, const void *bias, const void *x, void *y, ptrdiff_t batch,
                 ptrdiff_t out, ptrdiff_t in, ptrdiff_t x_stride, int weight_type, int type, int threads) {
  ptrdiff_t most = X_BYTES / (in * 2) / PANEL * PANEL, step = most > PANEL ? most : PANEL;
  ptrdiff_t rows = batch < step ? (batch + PANEL - 1) / PANEL * PANEL : step;
  uint32_t *tiles = allocate(rows * in * sizeof(uint16_t));
  int failed = !tiles;
  for (ptrdiff_t first = 0; first < batch && !failed; first += step) {
    ptrdiff_t count = batch - first < step ? batch - first : step;
    fill_tiles(at(x, first * x_stride, type), tiles, count, in, x_stride, type);
    Product a = {values, scales, bias, tiles, at(y, first * out, type), count, out, in, type, weight_type};
    failed = multiply(&a, threads);
  }
  free(tiles);
  return failed;
}

/* Whether this processor has AMX, and Linux lets this process use it, for which the process must ask. */
int has_tile_products(void) {
  static int known = -1;
  if (known < 0)
    known = has_avx512_bf16() && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
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
