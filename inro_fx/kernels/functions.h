/* Functions of floats that compilers turn into vectors, for floats of any size and NaN; on no path is there a branch. */

#ifndef INRO_FUNCTIONS_H
#define INRO_FUNCTIONS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

__attribute__((always_inline))
static inline float clamped(float x, float low, float high) {
    x = x < low ? low : x;
    return x > high ? high : x;
}

/* e^x by 2^n * e^r, |r| <= ln 2 / 2, and Taylor's series of e^r; relative error below 2e-7. */
__attribute__((always_inline))
static inline float exponential(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    const float n = floorf(x * 1.44269504f + 0.5f), r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
    const float series = 1.0f + r * (1.0f + r * (0.5f + r * (0.166666667f + r * (0.0416666667f + r * (0.00833333333f + r * 0.00138888889f)))));
    const int32_t power = (int32_t)((uint32_t)((int32_t)n + 127) << 23);
    float two;
    memcpy(&two, &power, sizeof two);
    return series * two;
}

__attribute__((always_inline))
static inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

__attribute__((always_inline))
static inline float tangent(float x) {                 /* near zero 1 - 2 / (e^2x + 1) has lost its digits */
    const float s = x * x, small = x * (1.0f - s * (0.333333333f - s * (0.133333333f - s * 0.053968254f)));
    const float large = 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f);
    return s < 0.01f ? small : large;
}

/* erf(x) = 1 - e^(-x^2) * polynomial(1 / (1 + p x)), |error| below 2e-7: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26. */
__attribute__((always_inline))
static inline float error_function(float x) {
    const float a = fabsf(x), t = 1.0f / (1.0f + 0.3275911f * a);
    const float series = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    const float y = 1.0f - series * exponential(-a * a);
    return x < 0.0f ? -y : y;
}

#endif
