/* exp, softplus, silu of single numbers, without branches, for loops that GCC vectorizes. */
#ifndef ELEMENTARY_H
#define ELEMENTARY_H

#include "native.h"

#define LOG2E 1.44269504088896341f

/* 2^u, u clamped to [-126, 127]: 2^f by a polynomial on [-1/2, 1/2], relative error 1e-7. */
INLINE float exp2_(float u) {
  u = u < -126.0f ? -126.0f : u > 127.0f ? 127.0f : u;
  float whole = __builtin_rintf(u), f = u - whole;
  float p = 1.535336063e-04f;
  p = p * f + 1.339887487e-03f;
  p = p * f + 9.618437366e-03f;
  p = p * f + 5.550332470e-02f;
  p = p * f + 2.402264791e-01f;
  p = p * f + 6.931472029e-01f;
  p = p * f + 1.0f;
  return float_of_bits(bits_of_float(p) + ((uint32_t)(int32_t)whole << 23));
}

INLINE float exp_(float x) { return exp2_(x * LOG2E); }

/* 1 / (1 + e^-x) */
INLINE float sigmoid_(float x) {
  float e = exp_(x < 0 ? x : -x); /* at most 1 */
  return (x < 0 ? e : 1.0f) / (1.0f + e);
}

/* log(1 + e) for 0 <= e <= 1, relative error 2e-7: e times a polynomial. */
INLINE float log1p_(float e) {
  float p = -3.243980846e-03f;
  p = p * e + 1.985126256e-02f;
  p = p * e + -5.695915896e-02f;
  p = p * e + 1.060361686e-01f;
  p = p * e + -1.530557011e-01f;
  p = p * e + 1.967593146e-01f;
  p = p * e + -2.495413214e-01f;
  p = p * e + 3.332996227e-01f;
  p = p * e + -4.999990242e-01f;
  p = p * e + 9.999999953e-01f;
  return p * e;
}

/* log(1 + e^x) */
INLINE float softplus_(float x) { return (x > 0 ? x : 0.0f) + log1p_(exp_(x < 0 ? x : -x)); }

#endif
