/* All-reduce and all-gather between the ranks of one machine, through memory that they share.

   The memory holds for every rank a state (a counter and a header) and two slots. A message is sent in pieces. For piece n
   a rank writes its data, in the wire format, into its slot n & 1, and then sets its counter to n. When the counters of all
   ranks have reached n, it reads the slots of all ranks and adds them up in rank order.

   One such synchronization per piece suffices: a rank writes piece n + 2 into the slot of piece n only after the counters
   of all ranks have reached n + 1, and a rank sets its counter to n + 1 after it has read piece n. The counter is stored
   with release and loaded with acquire order, so slots and headers need no other synchronization.

   No function blocks for ever. After MAX_WAIT of waiting it returns NOT_YET, so that Python can handle signals and look for
   ranks that have died, and `shared_memory_proceed` continues the operation. */
#include "formats.h"

#include <limits.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

enum { SLOT = 256 << 10, PAGE = 4096, LINE = 128 }; /* bytes: of a slot, of a page, that two ranks' states are apart */
enum { DONE, NOT_YET, LEFT, MISMATCH, BUSY, GONE }; /* what the operations return */
enum { HERE, MISSING, CLOSED, FAILED };             /* what `shared_memory_peer` returns */
/* Nanoseconds. A function returns NOT_YET after MAX_WAIT. A rank yields the processor for YIELDING, then sleeps SLEEP at a
   time. */
enum { MAX_WAIT = 20000000, YIELDING = 100000000, SLEEP = 50000 };
enum { PROGRESS = 7 }; /* place of the current piece in `report` */

/* What the ranks compare: operation, formats and types (`kind_of`), and the number of elements of both parts. */
typedef struct {
  uint64_t kind, numel, second_numel;
} Header;

/* The state of a rank that the others read. Only the rank itself writes it. */
typedef struct {
  _Alignas(LINE) _Atomic uint64_t posted; /* the last piece that is complete in its slot */
  _Atomic int departure;                  /* 0, or CLOSED or FAILED: the rank will post nothing more */
  Header headers[2];                      /* of the pieces in the two slots */
} RankState;

/* A rank's private side of the memory, and its current operation. */
typedef struct {
  RankState *states;
  char *slots;
  int rank, ranks, spins; /* spins: reads of a counter before the processor is yielded */
  uint64_t piece;         /* the last piece that this rank has begun, counted over all operations */
  Part parts[2];
  int count, op, busy; /* number of parts; SUM, MAX or GATHER; whether an operation has begun and not ended */
  int waiting, seen;   /* whether this rank has posted the piece; how many ranks, in rank order, have been seen to do so */
  Header header;
  ptrdiff_t done[2], taken[2], offset[2]; /* per part: elements before this piece, in it, and their place in the slot */
  int64_t call_began, wait_began;         /* when this C call and this piece began to wait; 0: not yet */
  int64_t *report; /* after MISMATCH: a rank, its header and this rank's header; at PROGRESS: the current piece */
} Channel;

/* Pieces */

static char *slot(const Channel *c, int rank) { return c->slots + (2 * (ptrdiff_t)rank + (c->piece & 1)) * SLOT; }

static void write_part(const Channel *c, int k) {
  const Part *part = &c->parts[k];
  char *to = slot(c, c->rank) + c->offset[k];
  ptrdiff_t size = part->format == BYTES ? 1 : part->format == FLOAT64 ? 8 : 0; /* of an element that is copied */
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
  else if (part->format == FLOAT64) reduce_doubles((double *)part->out + first, numel, from, stride, c->ranks, c->op);
  else reduce_floats(part, first, numel, from, stride, c->ranks, c->op);
}

/* Writes as many of the remaining elements as fit into this rank's slot, and posts them. */
static void write_piece(Channel *c) {
  RankState *own = &c->states[c->rank];
  ptrdiff_t used = 0;
  c->piece++;
  for (int k = 0; k < c->count; k++) {
    int format = c->parts[k].format;
    c->offset[k] = used;
    c->taken[k] = smaller(c->parts[k].numel - c->done[k], capacity(SLOT - used, format));
    used = smaller(SLOT, (used + encoded_bytes(c->taken[k], format) + 63) / 64 * 64);
    if (c->taken[k]) write_part(c, k);
  }
  own->headers[c->piece & 1] = c->header;
  atomic_store_explicit(&own->posted, c->piece, memory_order_release);
  c->waiting = 1, c->seen = 0, c->wait_began = 0;
}

/* Reduces or gathers the slots of all ranks. */
static void read_piece(Channel *c) {
  for (int k = 0; k < c->count; k++) {
    if (c->taken[k]) read_part(c, k);
    c->done[k] += c->taken[k];
  }
  c->waiting = 0;
}

/* Waiting */

INLINE void pause_cpu(void) {
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
  return atomic_load_explicit(&c->states[rank].posted, memory_order_acquire) >= c->piece;
}

/* Yields the processor for a moment. NOT_YET if this call has waited for MAX_WAIT. */
static int yield_cpu(Channel *c) {
  int64_t time = now();
  if (!c->call_began) c->call_began = time;
  if (!c->wait_began) c->wait_began = time;
  c->report[PROGRESS] = c->piece;
  if (time - c->call_began > MAX_WAIT) return NOT_YET;
  struct timespec nap = {0, SLEEP};
  if (time - c->wait_began > YIELDING) nanosleep(&nap, NULL);
  else sched_yield();
  return DONE;
}

/* Waits until a rank has posted this piece, and compares its header with this rank's. A rank that posted the piece before
   it left counts as here. */
static int wait_for(Channel *c, int rank) {
  for (int tries = 0; !has_posted(c, rank); tries += tries < c->spins) {
    if (tries < c->spins) {
      pause_cpu();
      continue;
    }
    if (atomic_load_explicit(&c->states[rank].departure, memory_order_acquire) && !has_posted(c, rank)) return LEFT;
    if (yield_cpu(c)) return NOT_YET;
  }
  Header theirs = c->states[rank].headers[c->piece & 1], own = c->header;
  if (theirs.kind == own.kind && theirs.numel == own.numel && theirs.second_numel == own.second_numel) return DONE;
  int64_t report[] = {rank, theirs.kind, theirs.numel, theirs.second_numel, own.kind, own.numel, own.second_numel};
  memcpy(c->report, report, sizeof report);
  return MISMATCH;
}

/* Continues the operation that returned NOT_YET or LEFT. */
int shared_memory_proceed(Channel *c) {
  if (!c) return GONE;
  c->call_began = 0;
  while (c->done[0] < c->parts[0].numel || (c->count > 1 && c->done[1] < c->parts[1].numel)) {
    if (!c->waiting) write_piece(c);
    for (; c->seen < c->ranks; c->seen++) {
      int code = wait_for(c, c->seen);
      if (code) return code;
    }
    read_piece(c);
  }
  c->busy = 0;
  return DONE;
}

/* Operations. A channel that is NULL gives GONE: Python has closed the memory. */

/* Four bits each, from the lowest on: operation, number of parts, formats of both parts, types of both. */
static uint64_t kind_of(const Part *parts, int count, int op) {
  uint64_t kind = op | count << 4 | parts[0].format << 8 | parts[0].type << 16;
  return count > 1 ? kind | parts[1].format << 12 | parts[1].type << 20 : kind;
}

/* The sum (or maximum) over the ranks of one part, or of two that are sent together. */
int shared_memory_reduce(Channel *c, const Part *parts, int count, int op) {
  if (!c) return GONE;
  if (c->busy) return BUSY;
  c->busy = 1, c->count = count, c->op = op, c->waiting = 0;
  c->header = (Header){kind_of(parts, count, op), parts[0].numel, count > 1 ? parts[1].numel : 0};
  for (int k = 0; k < count; k++) c->parts[k] = parts[k], c->done[k] = 0;
  return shared_memory_proceed(c);
}

/* The sum of one float32 tensor in float32. */
int shared_memory_sum(Channel *c, const void *in, void *out, ptrdiff_t numel) {
  return shared_memory_reduce(c, &(Part){in, out, numel, FLOAT32, FLOAT32}, 1, SUM);
}

/* Writes `bytes` of every rank to `out`, in rank order. */
int shared_memory_gather(Channel *c, const void *in, void *out, ptrdiff_t bytes) {
  return shared_memory_reduce(c, &(Part){in, out, bytes, BYTES, BYTES}, 1, GATHER);
}

/* Connections */

static ptrdiff_t states_bytes(int ranks) { return (ranks * sizeof(RankState) + PAGE - 1) / PAGE * PAGE; }

/* The bytes of the memory that the ranks share; 0 if they do not fit into an int. */
int shared_memory_bytes(int ranks) {
  ptrdiff_t bytes = states_bytes(ranks) + (ptrdiff_t)ranks * 2 * SLOT;
  return bytes <= INT_MAX ? bytes : 0;
}

/* The bytes of a Channel, which the caller allocates. */
int shared_memory_channel(void) { return sizeof(Channel); }

/* Initializes a channel. The memory was all zeros before the first rank used it; report: space for 8 integers. */
int shared_memory_attach(Channel *c, char *memory, int rank, int ranks, int spins, int64_t *report) {
  memset(c, 0, sizeof *c);
  c->states = (RankState *)memory, c->slots = memory + states_bytes(ranks);
  c->rank = rank, c->ranks = ranks, c->spins = spins, c->report = report;
  return DONE;
}

/* HERE if a rank has posted the piece that this rank waits for; else how it left (CLOSED or FAILED), or MISSING. */
int shared_memory_peer(Channel *c, int rank) {
  if (!c) return HERE;
  int departure = atomic_load_explicit(&c->states[rank].departure, memory_order_acquire);
  return has_posted(c, rank) ? HERE : departure ? departure : MISSING;
}

/* Tells the other ranks that this rank will post nothing more: `how` is CLOSED or FAILED. Later calls change nothing. */
int shared_memory_leave(Channel *c, int how) {
  int none = 0;
  if (!c) return GONE;
  atomic_compare_exchange_strong(&c->states[c->rank].departure, &none, how);
  return DONE;
}
