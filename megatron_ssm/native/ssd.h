/* The arguments of Mamba-2's recurrence. ssd_loops.c computes one token after the other, ssd_amx.c one chunk after the other; dispatch.c
   chooses between them. */
#ifndef SSD_H
#define SSD_H

#include "kernels.h"
#ifdef HAS_INTRINSICS
#include <immintrin.h>
#endif

/* Makes numbers below 2^-126 count as zeros in this thread, until `end_flushing`: an operation with such a number takes more than a
   hundred cycles, and decays over many tokens may be that small. Returns the argument for `end_flushing`. */
INLINE unsigned begin_flushing(void) {
#ifdef HAS_INTRINSICS
  unsigned before = _mm_getcsr();
  _mm_setcsr(before | _MM_FLUSH_ZERO_ON | 1 << 6); /* results, and operands */
  return before;
#else
  return 0;
#endif
}
INLINE void end_flushing(unsigned before) {
#ifdef HAS_INTRINSICS
  _mm_setcsr(before);
#endif
}

typedef struct {
  const void *x, *B, *C;              /* (batch, seq, heads, P); (batch, seq, groups, N) twice; no gaps within a token */
  const float *dt, *A_log, *D;        /* (batch, seq, heads); (heads); (heads) */
  const float *state;                 /* (batch, heads, N, P), with a batch stride; NULL: zeros */
  void *y;                            /* (batch, seq, heads, P) */
  float *next;                        /* the final state, like state; may be state itself */
  float *saved;                       /* the states before each chunk of tokens, (batch, chunks, heads, N, P), or NULL */
  const ptrdiff_t *strides;           /* see the indices below; their unit is one element */
  ptrdiff_t batch, seq, heads, P, groups, N;
  int type;                           /* of x, B, C and y */
  int one_by_one;                     /* 1 if the result must have the same bits as one call per token */
  int may_round;                      /* 1 if factors may be rounded to BFLOAT16 (ssd_amx.c) */
} Ssd;

/* Indices into strides. x, B, C: from sequence to sequence, followed by from token to token. STATE, NEXT: from sequence to
   sequence. */
enum { X = 0, B_ = 2, C_ = 4, STATE = 6, NEXT = 7 };

/* The address of element `place` of token t of sequence b in x, B or C; `which` is the tensor's index into strides. */
INLINE const void *row(const Ssd *a, const void *p, int which, ptrdiff_t b, ptrdiff_t t, ptrdiff_t place, int type) {
  return at(p, b * a->strides[which] + t * a->strides[which + 1] + place, type);
}

/* Copies `width` channels of a head's state, from `first` on, to where its final one belongs, and returns that place. */
INLINE float *own_state(const Ssd *a, ptrdiff_t b, ptrdiff_t head, ptrdiff_t first, ptrdiff_t width) {
  ptrdiff_t N = a->N, P = a->P;
  float *h = a->next + b * a->strides[NEXT] + head * N * P + first;
  const float *state = a->state ? a->state + b * a->strides[STATE] + head * N * P + first : NULL;
  if (state != h)
    for (ptrdiff_t n = 0; n < N; n++)
      for (ptrdiff_t c = 0; c < width; c++) h[n * P + c] = state ? state[n * P + c] : 0;
  return h;
}

int ssd_loops(const Ssd *a, int threads);
/* The recurrence by AMX, which saves no states; and 1 if it supports the arguments and is faster than loops. */
int ssd_amx(const Ssd *a, int threads);
int fits_ssd_amx(const Ssd *a, int threads);

#endif
