/* Addresses, sizes, strides and dtypes of torch's tensors, and words of Python's objects, to compare them later. torch describes
   a tensor by a function of DLPack's exchange interface, so that neither its headers nor Python's are needed. Callers hold
   Python's global lock. */
#include <stddef.h>
#include <stdint.h>

/* DLPack's DLTensor; dtype: its code, bits and lanes. */
typedef struct {
  void *data;
  int32_t device_type, device_id, dimensions;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t offset;
} Description;

typedef int Describe(void *tensor, Description *to); /* 0, or -1 with Python's exception set */

enum {
  FIELDS = 4, /* of a tensor, before its sizes and strides */
  PARTS = 3,  /* of a tensor: Python's object, torch's, and its storage */
  AHEAD = 8   /* tensors */
};

/* Brings the parts of a tensor to the first-level cache: a line of Python's object, three of torch's, and one of its storage. */
static void prefetch_parts(const char *const parts[PARTS]) {
  __builtin_prefetch(parts[0]);
  for (int line = 0; line < 3; line++) __builtin_prefetch(parts[1] + 64 * line);
  __builtin_prefetch(parts[2]);
}

/* Compares the layouts of `count` tensors with `layouts`, or if `write`, writes them there, to at most `size` numbers. Returns
   how many numbers they are; 0 if they differ or do not fit; -1 with Python's exception set. parts: where the parts of the
   tensors were before, (count, PARTS), which are read faster if they are still there; or NULL. */
ptrdiff_t compare_layouts(Describe *describe, void *const *tensors, ptrdiff_t count, int64_t *layouts, ptrdiff_t size,
                          int write, const char *const *parts) {
  int64_t *to = layouts;
  for (ptrdiff_t i = 0; parts && i < AHEAD && i < count; i++) prefetch_parts(parts + i * PARTS);
  for (ptrdiff_t i = 0; i < count; i++) {
    Description d;
    if (parts && i + AHEAD < count) prefetch_parts(parts + (i + AHEAD) * PARTS);
    if (describe(tensors[i], &d)) return -1;
    if (to - layouts + FIELDS + 2 * d.dimensions > size) return 0;
    int64_t fields[FIELDS] = {(int64_t)((intptr_t)d.data + d.offset), d.device_type * 65536 + d.device_id,
                              d.code << 16 | d.bits << 8 | d.lanes, d.dimensions};
    for (int f = 0; f < FIELDS; f++, to++)
      if (write) *to = fields[f];
      else if (*to != fields[f]) return 0;
    for (int n = 0; n < 2 * d.dimensions; n++, to++) {
      int64_t number = n < d.dimensions ? d.shape[n] : d.strides ? d.strides[n - d.dimensions] : 0;
      if (write) *to = number;
      else if (*to != number) return 0;
    }
  }
  return to - layouts;
}

/* Whether there are these words at these addresses. There is no early end, so that the processor reads many of them at once. */
int have_words(const uint64_t *const *addresses, const uint64_t *words, ptrdiff_t count) {
  uint64_t difference = 0;
  for (ptrdiff_t i = 0; i < count; i++) difference |= *addresses[i] ^ words[i];
  return !difference;
}
