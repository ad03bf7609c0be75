/* Tokens of each sequence of a batch from their ids to this rank's logits, without Python in between, except for all-reduces that
   are not done in shared memory: one token to decode, or several that may be taken back. models/calls.py does the same step by
   step. */
#include "step.h"

typedef struct {
  Matrix embeddings;      /* this rank's rows, those of the ids from `first` on; of `type` or rounded */
  Sum sum;                /* the all-reduce of the embeddings */
  const int64_t *ids;     /* (batch, tokens) */
  int64_t *lengths;       /* (batch): how many tokens were read of each sequence */
  void *part;             /* of the sum: (batch, tokens, size) of `type` */
  void *x;                /* where `layers` read their inputs: (batch, tokens, size) of sum_type */
  Layers *layers;
  ptrdiff_t batch, tokens, size, vocabulary;
  ptrdiff_t first, rows;  /* of this rank's embeddings */
  ptrdiff_t begun;        /* how many of the token's parts were begun: the embeddings and the layers */
  int type, sum_type;
  int speculative;        /* whether the tokens may be taken back, so that the lengths stay */
} Tokens;

/* This rank's part of the embedding of an id -> to, (size) of `type`: zeros, unless it has that id. */
static void embed(const Tokens *t, int64_t id, void *to) {
  const Matrix *m = &t->embeddings;
  ptrdiff_t row = id - t->first, block = row * (t->size / BLOCK);
  if (row < 0 || row >= t->rows) memset(to, 0, bytes_of(t->size, t->type));
  else if (!is_quantized(m->type)) memcpy(to, at(m->values, row * t->size, t->type), bytes_of(t->size, t->type));
  else
    widen((const char *)m->values + block * bytes_per_block(m->type), m->scales + block, to, 1, t->size, m->type, t->type, 1);
}

/* Decodes tokens of each sequence, and adds them to the lengths. Returns and is called again as `decode`, with `begun` 0 at first.
   UNUSUAL, before anything is done, for an id outside the vocabulary, and for a sequence whose first token it is: its states
   could be those of a prompt. */
int decode_tokens(Tokens *t, int threads) {
  ptrdiff_t rows = t->batch * t->tokens;
  int code;
  if (t->begun == 0) {
    for (ptrdiff_t b = 0; b < t->batch; b++)
      if (t->lengths[b] <= 0) return UNUSUAL;
    for (ptrdiff_t i = 0; i < rows; i++)
      if (t->ids[i] < 0 || t->ids[i] >= t->vocabulary) return UNUSUAL;
    for (ptrdiff_t i = 0; i < rows; i++) embed(t, t->ids[i], at(t->part, i * t->size, t->type));
    t->begun = 1;
    if ((code = all_reduce(&t->sum))) return code;
  }
  if (t->begun == 1) {
    t->begun = 2;
    for (ptrdiff_t i = 0; i < rows * t->size; i++) put(t->x, i, get(t->sum.total, i, t->type), t->sum_type);
  }
  if ((code = decode(t->layers, threads))) return code;
  for (ptrdiff_t b = 0; b < t->batch && !t->speculative; b++) t->lengths[b] += t->tokens;
  return 0;
}
