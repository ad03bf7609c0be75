/* The k largest numbers of gradient + residual, in one pass: add, keep what may be among them, leave the rest as residual.

   Numbers are compared by their bits without the sign, which are ordered as the numbers are: infinities above all others,
   NaN above them, so that neither is ever left behind. Of equal numbers the first are taken. A sample says which numbers
   are of interest (Deep Gradient Compression, Lin et al., 2018), but not what is taken: candidates that have become too
   many are reduced to the k best of them, and if there are too few at the end, the pass is repeated without it. */
#include <math.h>

#include "native.h"

enum { SLICE = 64, SMALL = 16384, SAMPLED = 64, MOST_SAMPLED = 16384 };

/* Flat parts of what is selected from; places count through all of them, one after the other. gradient: of `type`, or
   NULL for none. residual: receives gradient * scale + residual, 0 where a number was taken. */
typedef struct {
  const void *gradient;
  float *residual;
  ptrdiff_t numel;
} Segment;

typedef struct {
  uint32_t *keys; /* candidates, in the order of their places */
  int32_t *places;
  ptrdiff_t count, capacity, k;
  uint32_t least; /* the smallest key that is still of interest */
} Best;

/* The k-th largest key, and how many of those equal to it are among the k. */
static uint32_t kth_largest(const uint32_t *keys, ptrdiff_t count, ptrdiff_t k, ptrdiff_t *equal) {
  static const int SHIFTS[] = {20, 10, 0}; /* keys have 31 bits: 11, 10, 10 */
  uint32_t found = 0, known = 0;
  for (int digit = 0; digit < 3; digit++) {
    ptrdiff_t histogram[2048] = {0};
    const uint32_t shift = SHIFTS[digit], mask = digit ? 1023 : 2047;
    for (ptrdiff_t i = 0; i < count; i++)
      if ((keys[i] & known) == found) histogram[keys[i] >> shift & mask]++;
    uint32_t bin = mask;
    while (histogram[bin] < k) k -= histogram[bin--];
    found |= bin << shift;
    known |= mask << shift;
  }
  *equal = k;
  return found;
}

static void keep_best(Best *best) {
  ptrdiff_t equal, count = 0;
  const uint32_t last = kth_largest(best->keys, best->count, best->k, &equal);
  for (ptrdiff_t i = 0; i < best->count; i++) {
    const uint32_t key = best->keys[i];
    if (key < last || (key == last && equal-- <= 0)) continue;
    best->keys[count] = key;
    best->places[count++] = best->places[i];
  }
  best->count = count;
  best->least = last + 1;
}

INLINE void pass(const void *gradient, int type, float scale, float *residual, ptrdiff_t numel, ptrdiff_t first, Best *best) {
  for (ptrdiff_t start = 0; start < numel; start += SLICE) {
    const ptrdiff_t size = numel - start < SLICE ? numel - start : SLICE;
    float *r = residual + start;
    uint32_t keys[SLICE], most = 0;
#pragma omp simd reduction(max : most)
    for (ptrdiff_t i = 0; i < size; i++) {
      float v = r[i];
      if (gradient) {
        float g = type == FLOAT16 ? float_of_half(((const uint16_t *)gradient)[start + i]) : get(gradient, start + i, type);
        v += scale * g;
        r[i] = v;
      }
      keys[i] = bits_of_float(v) & 0x7fffffffu;
      most = keys[i] > most ? keys[i] : most;
    }
    if (most < best->least) continue;
    if (best->count + SLICE > best->capacity) keep_best(best);
    for (ptrdiff_t i = 0; i < size; i++) {
      best->keys[best->count] = keys[i];
      best->places[best->count] = (int32_t)(first + start + i);
      best->count += keys[i] >= best->least;
    }
  }
}

CLONES static void pass_of_type(const Segment *s, int type, float scale, ptrdiff_t first, Best *best) {
  if (!s->gradient) pass(0, FLOAT32, 1, s->residual, s->numel, first, best);
  else if (type == FLOAT32) pass(s->gradient, FLOAT32, scale, s->residual, s->numel, first, best);
  else if (type == BFLOAT16) pass(s->gradient, BFLOAT16, scale, s->residual, s->numel, first, best);
  else pass(s->gradient, FLOAT16, scale, s->residual, s->numel, first, best);
}

/* A key that somewhat more than k of `numel` numbers should reach: of one in SAMPLED of them, spread over all. */
static uint32_t sampled_least(const Segment *segments, int count, int type, float scale, ptrdiff_t k, ptrdiff_t numel, uint32_t *keys) {
  if (numel < SMALL) return 1;
  const ptrdiff_t sampled = numel / SAMPLED < MOST_SAMPLED ? numel / SAMPLED : MOST_SAMPLED, stride = numel / sampled;
  const double hits = (double)sampled * k / numel;
  const ptrdiff_t rank = (ptrdiff_t)(hits + 2 * sqrt(hits) + 1);
  ptrdiff_t end = segments->numel, begin = 0, equal;
  uint32_t random = 1;
  if (rank >= sampled) return 1;
  for (ptrdiff_t i = 0; i < sampled; i++) {
    random = random * 1664525u + 1013904223u;
    const ptrdiff_t place = i * stride + (random >> 8) % stride;
    while (place >= end) begin = end, end += (++segments)->numel;
    const void *g = segments->gradient;
    const ptrdiff_t j = place - begin;
    const float added = type == FLOAT16 ? float_of_half(((const uint16_t *)g)[j]) : get(g, j, type);
    keys[i] = bits_of_float(segments->residual[j] + scale * added) & 0x7fffffffu;
  }
  return kth_largest(keys, sampled, rank, &equal);
}

/* Take exactly k numbers: values (k) and places (k, ascending; of padding the last place, with value 0). keys, candidates:
   room for `capacity` each, at least k + SLICE and one in SAMPLED, to MOST_SAMPLED, of all. */
int selection_take(const Segment *segments, int count, int type, float scale, ptrdiff_t k, uint32_t *keys,
                   int32_t *candidates, ptrdiff_t capacity, float *values, int32_t *places) {
  ptrdiff_t first = 0, numel = 0;
  for (int s = 0; s < count; s++) numel += segments[s].numel;
  const uint32_t least = sampled_least(segments, count, type, scale, k, numel, keys);
  Best best = {keys, candidates, 0, capacity, k, least < 1 ? 1 : least};
  for (int s = 0; s < count; first += segments[s++].numel) pass_of_type(segments + s, type, scale, first, &best);
  if (best.count < k && least > 1) {
    best.count = first = 0;
    best.least = 1;
    for (int s = 0; s < count; first += segments[s++].numel) {
      const Segment added = {0, segments[s].residual, segments[s].numel};
      pass_of_type(&added, type, 1, first, &best);
    }
  }
  if (best.count > k) keep_best(&best);
  uint32_t most = 0;
  ptrdiff_t taken = 0, begin = 0;
  for (int s = 0; s < count; begin += segments[s++].numel)
    for (; taken < best.count && best.places[taken] < begin + segments[s].numel; taken++) {
      float *r = segments[s].residual + (best.places[taken] - begin);
      most = best.keys[taken] > most ? best.keys[taken] : most;
      values[taken] = *r;
      places[taken] = best.places[taken];
      *r = 0;
    }
  for (; taken < k; taken++) {
    values[taken] = 0;
    places[taken] = (int32_t)(begin - 1);
  }
  if (most >= 0x7f800000u) /* more may not be finite than were taken: none of it stays */
    for (int s = 0; s < count; s++)
      for (ptrdiff_t i = 0; i < segments[s].numel; i++)
        if ((bits_of_float(segments[s].residual[i]) & 0x7fffffffu) >= 0x7f800000u) segments[s].residual[i] = 0;
  return 0;
}

/* residual += values * scale at places, which ascend; 1 if one is outside. */
int selection_add(const Segment *segments, int count, const float *values, const int32_t *places, ptrdiff_t k, float scale) {
  ptrdiff_t i = 0, begin = 0;
  if (k && places[0] < 0) return 1;
  for (int s = 0; s < count; begin += segments[s++].numel) {
    const ptrdiff_t end = begin + segments[s].numel;
    for (; i < k && places[i] < end; i++) {
      if (places[i] < begin) return 1;
      segments[s].residual[places[i] - begin] += values[i] * scale;
    }
  }
  return i < k;
}
