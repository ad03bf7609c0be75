/* Operations of a tape for routed experts: the router, and the experts. kernels/experts.py is their twin in torch. */
#include <math.h>

#include "tape.h"

/* The router */

enum { ALL_EXPERTS, CHOSEN_EXPERTS, SIGMOIDS }; /* the forms: softmax of all logits, softmax of the chosen logits, sigmoids */

/* The indices of the `chosen` largest numbers, in descending order of the numbers; of equal numbers, the first ones. */
static void largest(const float *numbers, ptrdiff_t count, ptrdiff_t chosen, int32_t *places) {
  ptrdiff_t held = 0;
  for (ptrdiff_t i = 0; i < count; i++) {
    if (held == chosen && !(numbers[i] > numbers[places[held - 1]])) continue;
    ptrdiff_t j = held < chosen ? held++ : held - 1;
    for (; j > 0 && numbers[i] > numbers[places[j - 1]]; j--) places[j] = places[j - 1];
    places[j] = (int32_t)i;
  }
}

/* Sets numbers outside the best groups to -inf. The score of a group is the sum of its two largest numbers. */
static void keep_groups(float *numbers, ptrdiff_t count, ptrdiff_t groups, ptrdiff_t chosen) {
  ptrdiff_t size = count / groups;
  float totals[MOST_EXPERTS], kept[MOST_EXPERTS];
  int32_t best[MOST_EXPERTS];
  for (ptrdiff_t g = 0; g < groups; g++) {
    largest(numbers + g * size, size, 2, best);
    totals[g] = numbers[g * size + best[0]] + numbers[g * size + best[1]];
  }
  largest(totals, groups, chosen, best);
  for (ptrdiff_t i = 0; i < count; i++) kept[i] = -INFINITY;
  for (ptrdiff_t g = 0; g < chosen; g++)
    memcpy(kept + best[g] * size, numbers + best[g] * size, size * sizeof(float));
  memcpy(numbers, kept, count * sizeof(float));
}

CLONES static float sum_of_exponentials(const float *x, ptrdiff_t count, float most) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (ptrdiff_t i = 0; i < count; i++) sum += exp_(x[i] - most);
  return sum;
}

/* Writes the weights of the chosen experts; `index` has the experts in descending order of their logits. */
static void weigh(const Op *o, const float *logits, const float *scores, const int32_t *index, float *weights) {
  ptrdiff_t experts = o->n[0], chosen = o->n[1];
  float sum = 0;
  for (ptrdiff_t j = 0; j < chosen; j++) {
    weights[j] = o->n[2] == SIGMOIDS ? scores[index[j]] : exp_(logits[index[j]] - logits[index[0]]);
    sum += weights[j];
  }
  float scale = o->f[0];
  if (o->n[2] == SIGMOIDS) scale = o->n[3] ? scale / (sum + 1e-20f) : scale;
  else scale = 1 / (o->n[3] ? sum : sum_of_exponentials(logits, experts, logits[index[0]]));
  for (ptrdiff_t j = 0; j < chosen; j++) weights[j] = rounded(weights[j] * scale, o->type);
}

/* x: the logits, of from_type. y: for each token, the indices of the chosen experts in ascending order as int32, relative to this
   rank's first expert, and then their weights as float32. n: experts, chosen experts, form, 1 if weights are divided by their sum,
   groups, chosen groups, this rank's first expert. f: the factor of the weights of SIGMOIDS. weight: float32 numbers that are added to
   the scores of SIGMOIDS for the choice, or NULL. */
void route(const Tape *t, const Op *o) {
  ptrdiff_t rows = tape_rows(t), experts = o->n[0], chosen = o->n[1], share = rows_per_thread(rows, 16 * experts, t->threads);
#pragma omp parallel for num_threads(t->threads) if (share < rows)
  for (ptrdiff_t start = 0; start < rows; start += share)
    for (ptrdiff_t r = start; r < rows && r < start + share; r++) {
      float logits[MOST_EXPERTS], scores[MOST_EXPERTS], for_choice[MOST_EXPERTS], weights[MOST_EXPERTS];
      int32_t index[MOST_EXPERTS], *to = row(t, &o->y, r, FLOAT32);
      for (ptrdiff_t i = 0; i < experts; i++) {
        logits[i] = get(row(t, &o->x, r, o->from_type), i, o->from_type);
        scores[i] = o->n[2] == SIGMOIDS ? sigmoid_(logits[i], LEAST_EXPONENT) : logits[i];
        for_choice[i] = scores[i] + (o->weight ? ((const float *)o->weight)[i] : 0);
      }
      if (o->n[4] > 1) keep_groups(for_choice, experts, o->n[4], o->n[5]);
      largest(for_choice, experts, chosen, index);
      weigh(o, logits, scores, index, weights);
      for (ptrdiff_t j = 0; j < chosen; j++) {
        ptrdiff_t place = 0;
        for (ptrdiff_t k = 0; k < chosen; k++) place += index[k] < index[j];
        to[place] = index[j] - (int32_t)o->n[6], memcpy(to + chosen + place, weights + j, sizeof(float));
      }
    }
}

/* The experts */

/* The pairs of a token and an expert of this rank that it chose, sorted by expert. */
enum { ELSEWHERE = -1 }; /* an expert of another rank */
typedef struct {
  ptrdiff_t first[MOST_EXPERTS + 1]; /* expert e has the pairs first[e] to first[e + 1] - 1 */
  int32_t active[MOST_EXPERTS];      /* the experts that at least one token chose */
  int32_t *place;                    /* (tokens, chosen): the index of the pair of a choice, or ELSEWHERE */
  ptrdiff_t count;                   /* the number of active experts */
  char *each, *inner;                /* the rows of each pair: its input, later its output, (size); its activations, (width) */
} Pairs;

static const int32_t *choice(const Tape *t, const Op *o, ptrdiff_t r) { return row(t, &o->z, r, FLOAT32); }

/* 1 if this rank has an expert. */
INLINE int is_own(const Op *o, int32_t expert) { return expert >= 0 && expert < o->n[0]; }

/* Sorts the pairs by expert and then by token. */
static void sort_pairs(const Tape *t, const Op *o, Pairs *p) {
  ptrdiff_t rows = tape_rows(t), experts = o->n[0], chosen = o->n[1], next[MOST_EXPERTS];
  memset(p->first, 0, (experts + 1) * sizeof *p->first);
  for (ptrdiff_t r = 0; r < rows; r++)
    for (ptrdiff_t j = 0; j < chosen; j++)
      if (is_own(o, choice(t, o, r)[j])) p->first[choice(t, o, r)[j] + 1]++;
  p->count = 0;
  for (ptrdiff_t e = 0; e < experts; e++) {
    if (p->first[e + 1]) p->active[p->count++] = (int32_t)e;
    p->first[e + 1] += p->first[e], next[e] = p->first[e];
  }
  for (ptrdiff_t r = 0; r < rows; r++)
    for (ptrdiff_t j = 0; j < chosen; j++) {
      int32_t expert = choice(t, o, r)[j];
      p->place[r * chosen + j] = is_own(o, expert) ? (int32_t)next[expert]++ : ELSEWHERE;
    }
}

/* The product with the matrix (out, in) of expert e; the matrices of all experts are concatenated. */
static int multiply_by(const Matrix *m, ptrdiff_t e, ptrdiff_t out, ptrdiff_t in, const void *x, ptrdiff_t x_stride, void *y,
                       ptrdiff_t rows, int type, int threads) {
  ptrdiff_t before = e * out * in, blocks = before / BLOCK;
  Product p = {.x = x, .y = y, .batch = rows, .out = out, .in = in, .weight_stride = in, .x_stride = x_stride, .y_stride = out,
               .weight_type = (int)m->type, .type = type, .threads = threads};
  if (is_quantized(m->type)) p.weight = (const char *)m->values + blocks * bytes_per_block((int)m->type), p.scales = m->scales + blocks;
  else p.weight = at(m->values, before, (int)m->type);
  return multiply(&p);
}

/* down(activation(gate x) up x), or down(activation(up x)), of the rows of an expert. */
static int one_expert(const Tape *t, const Op *o, const Pairs *p, ptrdiff_t e, int threads) {
  ptrdiff_t size = o->n[2], channels = o->n[3], width = o->flag ? 2 * channels : channels, first = p->first[e];
  ptrdiff_t rows = p->first[e + 1] - first;
  char *each = at(p->each, first * size, o->type), *inner = at(p->inner, first * width, o->type);
  const void *x = tape_rows(t) > 1 ? each : row(t, &o->x, 0, o->type);
  if (multiply_by(&o->matrix, e, width, size, x, size, inner, rows, o->type, threads)) return 1;
  for (ptrdiff_t r = 0; r < rows; r++) {
    void *own = at(inner, r * width, o->type);
    activate_any(own, at(own, channels, o->type), own, channels, 1, (int)o->n[4], o->flag, o->type);
  }
  return multiply_by(&o->down, e, size, channels, inner, width, each, rows, o->type, threads);
}

/* y = the sum over the choices, in the order of the experts, of row times weight, each rounded. */
enum { COLUMNS = 64 };
INLINE void sum_columns(const char *each, const int32_t *place, const float *weights, void *y, ptrdiff_t size, ptrdiff_t chosen,
                        int type) {
  for (ptrdiff_t start = 0; start < size; start += COLUMNS) {
    ptrdiff_t count = size - start < COLUMNS ? size - start : COLUMNS;
    float sums[COLUMNS] = {0};
    for (ptrdiff_t j = 0; j < chosen; j++) {
      if (place[j] == ELSEWHERE) continue;
      const void *from = at(each, place[j] * size + start, type);
#pragma omp simd
      for (ptrdiff_t i = 0; i < count; i++) sums[i] += rounded(weights[j] * get(from, i, type), type);
    }
#pragma omp simd
    for (ptrdiff_t i = 0; i < count; i++) put(y, start + i, sums[i], type);
  }
}
CLONES static void sum_choices(const char *each, const int32_t *place, const float *weights, void *y, ptrdiff_t size,
                               ptrdiff_t chosen, int type) {
  if (type == FLOAT32) sum_columns(each, place, weights, y, size, chosen, FLOAT32);
  else sum_columns(each, place, weights, y, size, chosen, BFLOAT16);
}

/* y = the weighted sum of the outputs of this rank's chosen experts for x. z: the output of `route`. matrix, down: the concatenated
   matrices of this rank's experts. flag: 1 if they are gated. n: this rank's experts, chosen experts on all ranks, size of input and
   output, channels, activation; the offsets of the temporaries each, inner and place of the pairs. Experts are computed in parallel,
   unless there are fewer of them than threads. */
int experts(const Tape *t, const Op *o) {
  ptrdiff_t rows = tape_rows(t), chosen = o->n[1], size = o->n[2], share = rows_per_thread(rows, chosen * size, t->threads);
  Pairs p;
  p.each = t->arena + rows * o->n[5], p.inner = t->arena + rows * o->n[6], p.place = (int32_t *)(t->arena + rows * o->n[7]);
  sort_pairs(t, o, &p);
  int failed = 0, at_once = t->threads > 1 && p.count >= t->threads;
  if (rows > 1)
#pragma omp parallel for num_threads(t->threads) if (share < rows)
    for (ptrdiff_t start = 0; start < rows; start += share)
      for (ptrdiff_t r = start; r < rows && r < start + share; r++)
        for (ptrdiff_t j = 0; j < chosen; j++)
          if (p.place[r * chosen + j] != ELSEWHERE)
            memcpy(at(p.each, p.place[r * chosen + j] * size, o->type), row(t, &o->x, r, o->type), bytes_of(size, o->type));
#pragma omp parallel for num_threads(t->threads) schedule(dynamic, 1) if (at_once) reduction(| : failed)
  for (ptrdiff_t i = 0; i < p.count; i++) failed |= one_expert(t, o, &p, p.active[i], at_once ? 1 : t->threads);
#pragma omp parallel for num_threads(t->threads) if (share < rows)
  for (ptrdiff_t start = 0; start < rows; start += share)
    for (ptrdiff_t r = start; r < rows && r < start + share; r++)
      sum_choices(p.each, p.place + r * chosen, (const float *)(choice(t, o, r) + chosen), row(t, &o->y, r, o->type), size, chosen,
                  o->type);
  return failed;
}
