/* Sums and gathers between the ranks of one machine, in memory that they share.

   Every rank has a desk (a counter and a header) and two slots there. A message goes in pieces. For piece n a rank writes
   its part, in the format on the wire, into its slot n & 1 and then sets its counter to n; when all counters are at n or
   beyond, it reads all slots and adds them up in rank order. One such meeting per piece is enough: who writes piece n + 2
   has met all others at n + 1, so they have read n. Nobody blocks for good: a function returns NOT_YET after TICK of
   waiting, and `shared_memory_proceed` goes on from there. */
#include "formats.h"

#include <sched.h>
#include <stdatomic.h>
#include <time.h>

enum { SLOT = 256 << 10, PAGE = 4096, LINE = 128 };
enum { DONE, NOT_YET, LEFT, MISMATCH, BUSY, GONE }; /* what functions return */
enum { HERE, MISSING, CLOSED, FAILED };             /* what `shared_memory_peer` returns; two of them stand in `left` */
enum { TICK = 20000000, DROWSY = 100000000, NAP = 50000 }; /* nanoseconds: until NOT_YET; of yielding; of a sleep */

typedef struct {
  uint64_t kind, bytes, beside; /* operation and formats; bytes of the two parts */
} Header;

typedef struct {
  _Alignas(LINE) _Atomic uint64_t posted; /* the last piece that lies ready */
  _Atomic int left;
  Header headers[2];
} Desk;

/* One rank's private side. */
typedef struct {
  Desk *desks;
  char *slots;
  int rank, ranks, spins;
  uint64_t piece;
  Part parts[2]; /* the operation under way */
  int count, op, busy, waiting, met;
  Header header;
  ptrdiff_t done[2], taken[2], offset[2]; /* numbers before this piece, in it, and where they lie in a slot */
  int64_t entered, since;                 /* when waiting began: in this C call, for this piece; 0: it did not */
  int64_t *report;                        /* who differs, their header, the own one; the piece waited for */
} Channel;

/* Pieces */

static char *slot(const Channel *c, int rank) { return c->slots + (2 * (ptrdiff_t)rank + (c->piece & 1)) * SLOT; }

static void write_part(const Channel *c, int k) {
  const Part *part = &c->parts[k];
  char *to = slot(c, c->rank) + c->offset[k];
  ptrdiff_t size = part->format == BYTES ? 1 : part->format == FLOAT64 ? 8 : 0;
  if (part->format == FLOAT32 && part->type == FLOAT32) size = 4;
  if (size) memcpy(to, (const char *)part->in + c->done[k] * size, c->taken[k] * size);
  else encode(part, c->done[k], c->taken[k], to, c->ranks);
}

static void read_part(const Channel *c, int k) {
  const Part *part = &c->parts[k];
  const char *from = slot(c, 0) + c->offset[k];
  ptrdiff_t stride = 2 * SLOT, first = c->done[k], numel = c->taken[k];
  if (part->format == BYTES)
    for (int rank = 0; rank < c->ranks; rank++)
      memcpy((char *)part->out + rank * part->numel + first, from + rank * stride, numel);
  else if (part->format == FLOAT64) add_doubles((double *)part->out + first, numel, from, stride, c->ranks, c->op);
  else add_floats(part, first, numel, from, stride, c->ranks, c->op);
}

/* Put as much as fits into this rank's slot, and say so. */
static void write_piece(Channel *c) {
  Desk *desk = &c->desks[c->rank];
  ptrdiff_t used = 0;
  c->piece++;
  for (int k = 0; k < c->count; k++) {
    int format = c->parts[k].format;
    c->offset[k] = used;
    c->taken[k] = least(c->parts[k].numel - c->done[k], capacity(SLOT - used, format));
    used = least(SLOT, (used + encoded_bytes(c->taken[k], format) + 63) / 64 * 64);
    if (c->taken[k]) write_part(c, k);
  }
  desk->headers[c->piece & 1] = c->header;
  atomic_store_explicit(&desk->posted, c->piece, memory_order_release);
  c->waiting = 1, c->met = 0, c->since = 0;
}

static void read_piece(Channel *c) {
  for (int k = 0; k < c->count; k++) {
    if (c->taken[k]) read_part(c, k);
    c->done[k] += c->taken[k];
  }
  c->waiting = 0;
}

/* Waiting */

INLINE void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static int64_t now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * (int64_t)1000000000 + time.tv_nsec;
}

static int has_posted(const Channel *c, int rank) {
  return atomic_load_explicit(&c->desks[rank].posted, memory_order_acquire) >= c->piece;
}

/* Give the processor away for a moment; NOT_YET when Python's turn has come. */
static int rest(Channel *c) {
  int64_t time = now();
  if (!c->entered) c->entered = time;
  if (!c->since) c->since = time;
  c->report[7] = c->piece;
  if (time - c->entered > TICK) return NOT_YET;
  struct timespec nap = {0, NAP};
  if (time - c->since > DROWSY) nanosleep(&nap, NULL);
  else sched_yield();
  return DONE;
}

/* Wait until a rank has posted this piece, and check that it does what this rank does. */
static int meet(Channel *c, int rank) {
  for (int tries = 0; !has_posted(c, rank); tries += tries < c->spins) {
    if (tries < c->spins) {
      relax();
      continue;
    }
    if (atomic_load_explicit(&c->desks[rank].left, memory_order_acquire) && !has_posted(c, rank)) return LEFT;
    if (rest(c)) return NOT_YET;
  }
  Header theirs = c->desks[rank].headers[c->piece & 1], own = c->header;
  if (theirs.kind == own.kind && theirs.bytes == own.bytes && theirs.beside == own.beside) return DONE;
  int64_t report[] = {rank, theirs.kind, theirs.bytes, theirs.beside, own.kind, own.bytes, own.beside};
  memcpy(c->report, report, sizeof report);
  return MISMATCH;
}

/* Go on with what returned NOT_YET or LEFT. */
int shared_memory_proceed(Channel *c) {
  if (!c) return GONE;
  c->entered = 0;
  while (c->done[0] < c->parts[0].numel || (c->count > 1 && c->done[1] < c->parts[1].numel)) {
    if (!c->waiting) write_piece(c);
    for (; c->met < c->ranks; c->met++) {
      int code = meet(c, c->met);
      if (code) return code;
    }
    read_piece(c);
  }
  c->busy = 0;
  return DONE;
}

/* Operations */

/* The sum (or maximum) over the ranks of one part, or of two that travel together. */
int shared_memory_reduce(Channel *c, const Part *parts, int count, int op) {
  if (!c) return GONE;
  if (c->busy) return BUSY;
  c->busy = 1, c->count = count, c->op = op, c->waiting = 0;
  c->header = (Header){op | count << 4 | parts[0].format << 8, encoded_bytes(parts[0].numel, parts[0].format), 0};
  for (int k = 0; k < count; k++) c->parts[k] = parts[k], c->done[k] = 0;
  if (count > 1) {
    c->header.kind |= parts[1].format << 12;
    c->header.beside = encoded_bytes(parts[1].numel, parts[1].format);
  }
  return shared_memory_proceed(c);
}

/* The sum of float32. */
int shared_memory_sum(Channel *c, const void *in, void *out, ptrdiff_t numel) {
  return shared_memory_reduce(c, &(Part){in, out, numel, FLOAT32, FLOAT32}, 1, SUM);
}

/* `bytes` of every rank, one after the other. */
int shared_memory_gather(Channel *c, const void *in, void *out, ptrdiff_t bytes) {
  return shared_memory_reduce(c, &(Part){in, out, bytes, BYTES, BYTES}, 1, GATHER);
}

/* Connections */

static ptrdiff_t desk_bytes(int ranks) { return (ranks * sizeof(Desk) + PAGE - 1) / PAGE * PAGE; }

int shared_memory_bytes(int ranks) { return desk_bytes(ranks) + (ptrdiff_t)ranks * 2 * SLOT; }

int shared_memory_channel(void) { return sizeof(Channel); }

/* Start in memory that is all zeros, or that others have started in; report: room for 8 numbers. */
int shared_memory_attach(Channel *c, char *memory, int rank, int ranks, int spins, int64_t *report) {
  memset(c, 0, sizeof *c);
  c->desks = (Desk *)memory, c->slots = memory + desk_bytes(ranks);
  c->rank = rank, c->ranks = ranks, c->spins = spins, c->report = report;
  return DONE;
}

/* Whether a rank has posted the piece that this one waits for, and if not, whether it ever will. */
int shared_memory_peer(Channel *c, int rank) {
  if (!c) return HERE;
  int left = atomic_load_explicit(&c->desks[rank].left, memory_order_acquire);
  return has_posted(c, rank) ? HERE : left ? left : MISSING;
}

/* Tell the others that this rank comes no more: `how` is CLOSED or FAILED. The first time counts. */
int shared_memory_leave(Channel *c, int how) {
  int none = 0;
  if (!c) return GONE;
  atomic_compare_exchange_strong(&c->desks[c->rank].left, &none, how);
  return DONE;
}
