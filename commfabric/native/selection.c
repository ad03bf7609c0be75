/* Selects the k largest elements of gradient + residual in one pass: adds them, keeps candidates for the k largest, and
   leaves the rest as the residual.

   Magnitudes are compared as keys: the bits without the sign, which are ordered like the values. Infinities are above all
   finite values and NaN above infinities, so that non-finite elements are selected first. Of equal elements, those with the
   smallest indices are selected.

   A sample of the elements gives a threshold for candidates (Deep Gradient Compression, Lin et al., 2018). It makes the pass
   fast, and does not change what is selected: when there are too many candidates, they are reduced to the k largest, and if
   there are fewer than k at the end, a second pass takes all elements as candidates. */
#include <math.h>

#include "native.h"

/* Elements compared with the threshold at a time; fewer elements than this are not sampled; one in SAMPLED is sampled, but
   at most MOST_SAMPLED. */
enum { SLICE = 64, SMALL = 16384, SAMPLED = 64, MOST_SAMPLED = 16384 };

/* A flat tensor. Selection treats several as if they were concatenated, and indices count through all of them.
   gradient: NULL for none. residual: is overwritten with gradient * scale + residual, and 0 where an element was selected. */
typedef struct {
  const void *gradient;
  float *residual;
  ptrdiff_t numel;
} Segment;

/* The candidates, with ascending indices. */
typedef struct {
  uint32_t *keys;
  int32_t *indices;
  ptrdiff_t count, capacity, k;
  uint32_t threshold; /* elements with smaller keys are no candidates */
} Candidates;

/* The k-th largest key, and how many of the keys equal to it are among the k largest. */
static uint32_t kth_largest(const uint32_t *keys, ptrdiff_t count, ptrdiff_t k, ptrdiff_t *equal) {
  static const int SHIFTS[] = {20, 10, 0}; /* a radix search over the 31 bits of a key: 11, then 10, then 10 */
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

/* Keeps the k largest candidates, and raises the threshold so that only larger elements join them. */
static void keep_largest(Candidates *candidates) {
  ptrdiff_t equal, count = 0;
  const uint32_t last = kth_largest(candidates->keys, candidates->count, candidates->k, &equal);
  for (ptrdiff_t i = 0; i < candidates->count; i++) {
    const uint32_t key = candidates->keys[i];
    if (key < last || (key == last && equal-- <= 0)) continue;
    candidates->keys[count] = key;
    candidates->indices[count++] = candidates->indices[i];
  }
  candidates->count = count;
  candidates->threshold = last + 1;
}

/* Adds scale * gradient (if there is one) to a residual whose elements have the indices from `first` on, and collects its
   candidates. */
INLINE void pass(const void *gradient, int type, float scale, float *residual, ptrdiff_t numel, ptrdiff_t first,
                 Candidates *candidates) {
  for (ptrdiff_t start = 0; start < numel; start += SLICE) {
    const ptrdiff_t size = numel - start < SLICE ? numel - start : SLICE;
    float *r = residual + start;
    uint32_t keys[SLICE], largest = 0;
#pragma omp simd reduction(max : largest)
    for (ptrdiff_t i = 0; i < size; i++) {
      float v = r[i];
      if (gradient) {
        float g = type == FLOAT16 ? float_of_half(((const uint16_t *)gradient)[start + i]) : get(gradient, start + i, type);
        v += scale * g;
        r[i] = v;
      }
      keys[i] = bits_of_float(v) & 0x7fffffffu;
      largest = keys[i] > largest ? keys[i] : largest;
    }
    if (largest < candidates->threshold) continue;
    if (candidates->count + SLICE > candidates->capacity) keep_largest(candidates);
    for (ptrdiff_t i = 0; i < size; i++) { /* without branches: what is no candidate is overwritten by the next element */
      candidates->keys[candidates->count] = keys[i];
      candidates->indices[candidates->count] = (int32_t)(first + start + i);
      candidates->count += keys[i] >= candidates->threshold;
    }
  }
}

/* `pass` over one segment, compiled for each type of gradient. */
CLONES static void pass_of_type(const Segment *s, int type, float scale, ptrdiff_t first, Candidates *candidates) {
  if (!s->gradient) pass(0, FLOAT32, 1, s->residual, s->numel, first, candidates);
  else if (type == FLOAT32) pass(s->gradient, FLOAT32, scale, s->residual, s->numel, first, candidates);
  else if (type == BFLOAT16) pass(s->gradient, BFLOAT16, scale, s->residual, s->numel, first, candidates);
  else pass(s->gradient, FLOAT16, scale, s->residual, s->numel, first, candidates);
}

/* A key that is expected to be reached by somewhat more than k of all `numel` elements, from a sample of one element at a
   random place in each of equally long stretches. 1, which all elements but zeros reach, if there are few elements. */
static uint32_t sampled_threshold(const Segment *segments, int type, float scale, ptrdiff_t k, ptrdiff_t numel,
                                  uint32_t *keys) {
  if (numel < SMALL) return 1;
  const ptrdiff_t sampled = numel / SAMPLED < MOST_SAMPLED ? numel / SAMPLED : MOST_SAMPLED, stride = numel / sampled;
  const double hits = (double)sampled * k / numel;
  const ptrdiff_t rank = (ptrdiff_t)(hits + 2 * sqrt(hits) + 1);
  ptrdiff_t end = segments->numel, begin = 0, equal;
  uint32_t random = 1;
  if (rank >= sampled) return 1;
  for (ptrdiff_t i = 0; i < sampled; i++) {
    random = random * 1664525u + 1013904223u;
    const ptrdiff_t index = i * stride + (random >> 8) % stride;
    while (index >= end) begin = end, end += (++segments)->numel;
    const void *g = segments->gradient;
    const ptrdiff_t j = index - begin;
    const float added = type == FLOAT16 ? float_of_half(((const uint16_t *)g)[j]) : get(g, j, type);
    keys[i] = bits_of_float(segments->residual[j] + scale * added) & 0x7fffffffu;
  }
  return kth_largest(keys, sampled, rank, &equal);
}

/* Selects exactly k elements: values (k) and ascending indices (k). If fewer elements are not 0, the last index is repeated
   with value 0. `type` is that of the gradients. keys, workspace: space for `capacity` elements each, at least k + SLICE and
   the size of the sample. The indices have 32 bits, so there are at most 2^31 elements. */
int selection_take(const Segment *segments, int count, int type, float scale, ptrdiff_t k, uint32_t *keys,
                   int32_t *workspace, ptrdiff_t capacity, float *values, int32_t *indices) {
  ptrdiff_t first = 0, numel = 0;
  for (int s = 0; s < count; s++) numel += segments[s].numel;
  const uint32_t threshold = sampled_threshold(segments, type, scale, k, numel, keys);
  Candidates candidates = {keys, workspace, 0, capacity, k, threshold < 1 ? 1 : threshold};
  for (int s = 0; s < count; first += segments[s++].numel) pass_of_type(segments + s, type, scale, first, &candidates);
  if (candidates.count < k && threshold > 1) {
    candidates.count = first = 0;
    candidates.threshold = 1;
    for (int s = 0; s < count; first += segments[s++].numel) {
      const Segment added = {0, segments[s].residual, segments[s].numel}; /* the gradient is in the residual by now */
      pass_of_type(&added, type, 1, first, &candidates);
    }
  }
  if (candidates.count > k) keep_largest(&candidates);
  uint32_t largest = 0;
  ptrdiff_t taken = 0, begin = 0;
  for (int s = 0; s < count; begin += segments[s++].numel)
    for (; taken < candidates.count && candidates.indices[taken] < begin + segments[s].numel; taken++) {
      float *r = segments[s].residual + (candidates.indices[taken] - begin);
      largest = candidates.keys[taken] > largest ? candidates.keys[taken] : largest;
      values[taken] = *r;
      indices[taken] = candidates.indices[taken];
      *r = 0;
    }
  for (; taken < k; taken++) {
    values[taken] = 0;
    indices[taken] = (int32_t)(begin - 1);
  }
  if (largest >= 0x7f800000u) /* there may be more non-finite elements than k: none may stay in a residual */
    for (int s = 0; s < count; s++)
      for (ptrdiff_t i = 0; i < segments[s].numel; i++)
        if ((bits_of_float(segments[s].residual[i]) & 0x7fffffffu) >= 0x7f800000u) segments[s].residual[i] = 0;
  return 0;
}

/* residual += values * scale at ascending indices. Returns 1 if an index lies outside, or not in order so that it would
   belong to an earlier segment; then the values before it have been added. */
int selection_add(const Segment *segments, int count, const float *values, const int32_t *indices, ptrdiff_t k, float scale) {
  ptrdiff_t i = 0, begin = 0;
  if (k && indices[0] < 0) return 1;
  for (int s = 0; s < count; begin += segments[s++].numel) {
    const ptrdiff_t end = begin + segments[s].numel;
    for (; i < k && indices[i] < end; i++) {
      if (indices[i] < begin) return 1;
      segments[s].residual[indices[i] - begin] += values[i] * scale;
    }
  }
  return i < k;
}
