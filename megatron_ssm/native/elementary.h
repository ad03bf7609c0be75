/* exp, sigmoid, log1p and softplus of one float32 number, without branches, so that GCC vectorizes the loops that use them. The result
   for NaN is NaN. */
#ifndef ELEMENTARY_H
#define ELEMENTARY_H

#include "native.h"

#define LOG2E 1.44269504088896341f
#define LEAST_EXPONENT -126.0f /* the least exponent of 2 whose result is not subnormal */
#define MOST_EXPONENT 127.0f   /* the largest one whose result is not infinite */

/* x, in a way that hides from GCC that it is a constant: clamping by a variable is one instruction, while for clamping by a constant
   GCC 12 writes longer code. So most vectorized loops pass `least`, unknown(LEAST_EXPONENT), and `most`, unknown(MOST_EXPONENT), to the
   functions below; exp_ and other callers pass the constants. */
INLINE float unknown(float x) {
  __asm__("" : "+g"(x));
  return x;
}

/* 2^u for u <= MOST_EXPONENT; where u < least, 2^least. u = whole + f: 2^f is a polynomial on [-1/2, 1/2], with a relative
   error of 8e-8, or 1e-7 on processors that round products before they add; `whole` is added to its exponent bits. */
INLINE float exp2_from(float u, float least) {
  u = least > u ? least : u;
  float whole = __builtin_rintf(u), f = u - whole, p = 1.535336063e-04f;
  p = p * f + 1.339887487e-03f;
  p = p * f + 9.618437366e-03f;
  p = p * f + 5.550332470e-02f;
  p = p * f + 2.402264791e-01f;
  p = p * f + 6.931472029e-01f;
  p = p * f + 1.0f;
  return float_of_bits(bits_of_float(p) + ((uint32_t)(int32_t)whole << 23));
}

/* 2^u, with u clamped to [least, most]. */
INLINE float exp2_between(float u, float least, float most) { return exp2_from(most < u ? most : u, least); }

INLINE float exp_(float x) { return exp2_between(x * LOG2E, LEAST_EXPONENT, MOST_EXPONENT); }

/* e^-|x| */
INLINE float exp_of_negative(float x, float least) { return exp2_from((x < 0 ? x : -x) * LOG2E, least); }

/* 1 / (1 + e^-x) */
INLINE float sigmoid_(float x, float least) {
  float e = exp_of_negative(x, least);
  return (x < 0 ? e : 1.0f) / (1.0f + e);
}

/* log(1 + e) for 0 <= e <= 1, with a relative error of 2e-7: e times a polynomial in e. */
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

/* softplus(x) = log(1 + e^x) = max(x, 0) + log(1 + e^-|x|) */
INLINE float softplus_(float x, float least) { return (x > 0 ? x : 0.0f) + log1p_(exp_of_negative(x, least)); }

#endif
