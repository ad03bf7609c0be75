/* Activation functions of rows. The enum has the order of ACTIVATIONS in layers/tape_operations.py. */
#include <math.h>

#include "kernels.h"

enum { GELU, GELU_TANH, SILU, RELU, SQUARED_RELU, SIGMOID };

INLINE float activated(float x, int activation) {
  if (activation == SILU) return x * sigmoid_(x, LEAST_EXPONENT);
  if (activation == SIGMOID) return sigmoid_(x, LEAST_EXPONENT);
  if (activation == RELU) return x > 0 ? x : 0;
  if (activation == SQUARED_RELU) return x > 0 ? x * x : 0;
  if (activation == GELU) return 0.5f * x * (1 + erff(x * 0.70710678118654752f));
  float inner = 0.79788456080286536f * (x + 0.044715f * x * x * x); /* tanh(u) = 2 sigmoid(2 u) - 1 */
  return x * sigmoid_(2 * inner, LEAST_EXPONENT);
}

/* y = activation(f x) z, or activation(f x) if not gated. */
INLINE void activate_row(const void *x, const void *z, void *y, ptrdiff_t size, float f, int activation, int gated, int type) {
#pragma omp simd
  for (ptrdiff_t i = 0; i < size; i++) {
    float value = rounded(activated(rounded(f * get(x, i, type), type), activation), type);
    put(y, i, gated ? value * get(z, i, type) : value, type);
  }
}
#define ACTIVATE_FOR(NAME, ACTIVATION)                                                                                  \
  CLONES static void NAME(const void *x, const void *z, void *y, ptrdiff_t size, float f, int gated, int type) {        \
    if (type == FLOAT32) activate_row(x, z, y, size, f, ACTIVATION, gated, FLOAT32);                                    \
    else activate_row(x, z, y, size, f, ACTIVATION, gated, BFLOAT16);                                                   \
  }
ACTIVATE_FOR(activate_gelu, GELU)
ACTIVATE_FOR(activate_gelu_tanh, GELU_TANH)
ACTIVATE_FOR(activate_silu, SILU)
ACTIVATE_FOR(activate_relu, RELU)
ACTIVATE_FOR(activate_squared_relu, SQUARED_RELU)
ACTIVATE_FOR(activate_sigmoid, SIGMOID)

void activate_any(const void *x, const void *z, void *y, ptrdiff_t size, float f, int activation, int gated, int type) {
  void (*functions[])(const void *, const void *, void *, ptrdiff_t, float, int, int) = {
      activate_gelu, activate_gelu_tanh, activate_silu, activate_relu, activate_squared_relu, activate_sigmoid};
  functions[activation](x, z, y, size, f, gated, type);
}
