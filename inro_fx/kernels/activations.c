/* Rows of activations to integers, x = scale * q: one level of 7 bits, or the two of linear.c that hold 15.

   Fifteen bits are too few where one activation is hundreds of times the others: such rows are told apart and left to floats.

   Where the activations are so small that s would be no normal number, or so large that s times the sums would overflow, x is
   lifted first: multiplied by a power of two, which `undo` takes off the results. Two levels leave such rows to floats, too. */

#include "linear.h"

#include <math.h>
#include <string.h>

#define LARGEST 3.402823466e38f                       /* finite float; infinity and NaN are not <= it */
#define SMALLEST 1.17549435e-38f                      /* normal float; 1 / s is finite from there on */

/* Is one number of the row so much larger than the others that two levels lose them? */
static int is_wide(const float *x, int64_t n, float largest, double total, int64_t nonzero) {
    double rest = total - largest;
    if (nonzero > 1 && rest < 1e-3 * largest) {        /* the difference has lost the others: add them up alone */
        int seen = 0;
        rest = 0.0;
        for (int64_t i = 0; i < n; i++) {
            const float a = fabsf(x[i]);
            if (a < largest || seen) rest += a;
            else seen = 1;
        }
    }
    return nonzero > 1 && rest > 0.0 && largest * (double)(nonzero - 1) > OUTLIER * rest;
}

static int wide_row(const float *x, int64_t n) {
    float largest = 0.0f;
    double total = 0.0;
    int64_t nonzero = 0;
    for (int64_t i = 0; i < n; i++) {
        const float a = fabsf(x[i]);
        largest = a > largest ? a : largest;
        total += a;
        nonzero += a > 0.0f;
    }
    return is_wide(x, n, largest, total, nonzero);
}

static int row_portable(const float *x, int64_t n, int levels, const quantized *to) {
    int8_t *const q = to->q;
    const int64_t padded = to->padded;
    float largest = 0.0f;
    int finite = 1;
    for (int64_t i = 0; i < n; i++) {
        float a = fabsf(x[i]);
        largest = a > largest ? a : largest;
        finite &= a <= LARGEST;
    }
    const float steps = levels == 2 ? 16256.0f : 127.0f, lift = lift_by(largest);
    float s = largest * lift / steps;
    if (s < SMALLEST) s = 1.0f;
    memset(q, 0, (size_t)(padded * levels));
    to->sums[0] = 0;
    if (levels == 2) to->sums[1] = 0;
    *to->scale = finite ? s : NAN;
    *to->undo = 1.0f / lift;
    if (!finite || (levels == 2 && lift != 1.0f)) return levels == 2;              /* floats know what to do with it */
    if (levels == 1) {
        int32_t sum = 0;
        for (int64_t i = 0; i < n; i++) {
            float v = rintf(x[i] * lift / s);
            v = v > 127.0f ? 127.0f : v < -127.0f ? -127.0f : v;
            q[i] = (int8_t)v;
            sum += (int32_t)v;
        }
        to->sums[0] = sum;
    } else {
        int32_t high_sum = 0, low_sum = 0;
        float inverse = 1.0f / s;
        for (int64_t i = 0; i < n; i++) {
            float v = rintf(x[i] * inverse);
            v = v > 16256.0f ? 16256.0f : v < -16256.0f ? -16256.0f : v;
            int32_t whole = (int32_t)v, high = (whole + 64) >> 7, low = whole - high * 128;
            q[i] = (int8_t)high;
            q[padded + i] = (int8_t)low;
            high_sum += high;
            low_sum += low;
        }
        to->sums[0] = high_sum;
        to->sums[1] = low_sum;
    }
    return levels == 2 && wide_row(x, n);
}

static void set_fixed(float s, int finite, const quantized *to) {
    const float lift = s > HIGH / 127.0f ? 1.0f / LIFT : 1.0f;
    *to->scale = finite ? s * lift : NAN;
    *to->undo = 1.0f / lift;
}

__attribute__((always_inline))
static inline void fixed_loop(const float *x, int64_t n, float s, float zero, const quantized *to) {
    int8_t *const q = to->q;
    const int64_t padded = to->padded;
    int32_t sum = 0;
    int finite = 1;
    memset(q + n, 0, (size_t)(padded - n));
    for (int64_t i = 0; i < n; i++) {
        float v = rintf(x[i] / s) + zero;
        finite &= fabsf(x[i]) <= LARGEST;
        v = v > 127.0f ? 127.0f : v;
        v = v > -127.0f ? v : -127.0f;                 /* NaN too: it cannot become an integer */
        q[i] = (int8_t)(int32_t)v;
        sum += (int32_t)v;
    }
    to->sums[0] = sum;
    set_fixed(s, finite, to);
}

#ifdef X86
__attribute__((target("avx2,fma")))
static void fixed_avx2(const float *x, int64_t n, float s, float zero, const quantized *to) {
    fixed_loop(x, n, s, zero, to);
}

__attribute__((target("avx2")))
static int wide_row_avx2(const float *x, int64_t n) {
    __m256 top = _mm256_setzero_ps();
    __m256d sum = _mm256_setzero_pd();
    int64_t nonzero = 0;
    const __m256 clear_sign = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256 a = _mm256_and_ps(_mm256_loadu_ps(x + i), clear_sign);
        top = _mm256_max_ps(top, a);
        sum = _mm256_add_pd(sum, _mm256_cvtps_pd(_mm256_castps256_ps128(a)));
        sum = _mm256_add_pd(sum, _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1)));
        nonzero += __builtin_popcount((unsigned)_mm256_movemask_ps(_mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_GT_OQ)));
    }
    float tops[8], largest = 0.0f;
    double sums[4], total = 0.0;
    _mm256_storeu_ps(tops, top);
    _mm256_storeu_pd(sums, sum);
    for (int j = 0; j < 8; j++) largest = tops[j] > largest ? tops[j] : largest;
    for (int j = 0; j < 4; j++) total += sums[j];
    for (; i < n; i++) {
        const float a = fabsf(x[i]);
        largest = a > largest ? a : largest;
        total += a;
        nonzero += a > 0.0f;
    }
    return is_wide(x, n, largest, total, nonzero);
}

/* max |x|, and whether all of it is finite. */
__attribute__((target("avx2"), always_inline))
static inline float reach_avx2(const float *x, int64_t n, int *finite) {
    __m256 top = _mm256_setzero_ps(), clear_sign = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)), bad = _mm256_setzero_ps();
    const __m256 limit = _mm256_set1_ps(LARGEST);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 a = _mm256_and_ps(_mm256_loadu_ps(x + i), clear_sign);
        top = _mm256_max_ps(top, a);
        bad = _mm256_or_ps(bad, _mm256_cmp_ps(a, limit, _CMP_NLE_UQ));
    }
    float lanes[8], largest = 0.0f;
    _mm256_storeu_ps(lanes, top);
    for (int j = 0; j < 8; j++) largest = lanes[j] > largest ? lanes[j] : largest;
    *finite = !_mm256_movemask_ps(bad);
    for (; i < n; i++) {
        float a = fabsf(x[i]);
        largest = a > largest ? a : largest;
        *finite &= a <= LARGEST;
    }
    return largest;
}

__attribute__((target("avx2,fma")))
static int row_avx2(const float *x, int64_t n, int levels, const quantized *to) {
    int8_t *const q = to->q;
    const int64_t padded = to->padded;
    int finite;
    const float largest = reach_avx2(x, n, &finite);
    int64_t i;
    float steps = levels == 2 ? 16256.0f : 127.0f, s = largest / steps;
    if (s < SMALLEST) s = 1.0f;
    float inverse = 1.0f / s;
    if (!finite || lift_by(largest) != 1.0f) return row_portable(x, n, levels, to);          /* rare */
    *to->scale = s;
    *to->undo = 1.0f;
    memset(q + n, 0, (size_t)(padded - n));
    if (levels == 2) memset(q + padded + n, 0, (size_t)(padded - n));
    __m256 by = _mm256_set1_ps(s), times = _mm256_set1_ps(inverse), high = _mm256_set1_ps(steps), low = _mm256_set1_ps(-steps);
    const __m256i lanes_in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i first_sum = _mm256_setzero_si256(), second_sum = first_sum;
    for (i = 0; i + 32 <= n; i += 32) {
        __m256i v[4], h[4];
        for (int j = 0; j < 4; j++) {
            __m256 value = _mm256_loadu_ps(x + i + 8 * j);
            value = levels == 2 ? _mm256_mul_ps(value, times) : _mm256_div_ps(value, by);
            value = _mm256_max_ps(_mm256_min_ps(value, high), low);
            v[j] = _mm256_cvtps_epi32(value);
        }
        if (levels == 2)
            for (int j = 0; j < 4; j++) {
                h[j] = _mm256_srai_epi32(_mm256_add_epi32(v[j], _mm256_set1_epi32(64)), 7);
                v[j] = _mm256_sub_epi32(v[j], _mm256_slli_epi32(h[j], 7));
                second_sum = _mm256_add_epi32(second_sum, v[j]);
                first_sum = _mm256_add_epi32(first_sum, h[j]);
            }
        else
            for (int j = 0; j < 4; j++) first_sum = _mm256_add_epi32(first_sum, v[j]);
        __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
        packed = _mm256_permutevar8x32_epi32(packed, lanes_in_order);
        _mm256_storeu_si256((__m256i *)(q + (levels == 2 ? padded : 0) + i), packed);
        if (levels == 2) {
            packed = _mm256_packs_epi16(_mm256_packs_epi32(h[0], h[1]), _mm256_packs_epi32(h[2], h[3]));
            _mm256_storeu_si256((__m256i *)(q + i), _mm256_permutevar8x32_epi32(packed, lanes_in_order));
        }
    }
    int32_t sums8[8], total[2] = {0, 0};
    _mm256_storeu_si256((__m256i *)sums8, first_sum);
    for (int j = 0; j < 8; j++) total[0] += sums8[j];
    _mm256_storeu_si256((__m256i *)sums8, second_sum);
    for (int j = 0; j < 8; j++) total[1] += sums8[j];
    for (; i < n; i++) {
        float v = rintf(levels == 2 ? x[i] * inverse : x[i] / s);
        v = v > steps ? steps : v < -steps ? -steps : v;
        int32_t whole = (int32_t)v;
        if (levels == 2) {
            int32_t top_part = (whole + 64) >> 7;
            q[i] = (int8_t)top_part;
            q[padded + i] = (int8_t)(whole - top_part * 128);
            total[0] += top_part;
            total[1] += whole - top_part * 128;
        } else {
            q[i] = (int8_t)whole;
            total[0] += whole;
        }
    }
    to->sums[0] = total[0];
    if (levels == 2) to->sums[1] = total[1];
    return levels == 2 && wide_row_avx2(x, n);
}

/* The same integers as `quantize_row`, whole (128 * q1 + q0 where there are two levels), in int16; from AVX2 on. */
__attribute__((target("avx2,fma")))
int quantize_words(const float *x, int64_t n, int levels, const quantized *to) {
    int16_t *const q = (int16_t *)to->q;
    const int64_t padded = to->padded;
    int finite;
    const float largest = reach_avx2(x, n, &finite);
    int64_t i;
    const float steps = levels == 2 ? 16256.0f : 127.0f, lift = lift_by(largest);
    float s = largest * lift / steps;
    if (s < SMALLEST) s = 1.0f;
    float inverse = 1.0f / s;
    *to->scale = finite ? s : NAN;
    *to->undo = 1.0f / lift;
    if (!finite || (levels == 2 && lift != 1.0f)) { memset(q, 0, (size_t)padded * sizeof(int16_t)); return levels == 2; }
    const __m256 by = _mm256_set1_ps(s), times = _mm256_set1_ps(inverse);
    const __m256 high = _mm256_set1_ps(steps), low = _mm256_set1_ps(-steps);
    for (i = 0; i + 16 <= n && lift == 1.0f; i += 16) {
        __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + i + 8);
        a = levels == 2 ? _mm256_mul_ps(a, times) : _mm256_div_ps(a, by);
        b = levels == 2 ? _mm256_mul_ps(b, times) : _mm256_div_ps(b, by);
        a = _mm256_max_ps(_mm256_min_ps(a, high), low);
        b = _mm256_max_ps(_mm256_min_ps(b, high), low);
        __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b));
        _mm256_storeu_si256((__m256i *)(q + i), _mm256_permute4x64_epi64(packed, 0xd8));
    }
    for (; i < n; i++) {
        float v = rintf(levels == 2 ? x[i] * inverse : x[i] * lift / s);
        v = v > steps ? steps : v < -steps ? -steps : v;
        q[i] = (int16_t)v;
    }
    memset(q + n, 0, (size_t)(padded - n) * sizeof(int16_t));
    return levels == 2 && wide_row_avx2(x, n);
}

/* round(x / s), to the bit: x / s and x * (1 / s) round alike but close to a tie, where the division is done. */
__attribute__((target(TARGET_VNNI), always_inline))
static inline __m512 divide_and_round(__m512 x, __m512 s, __m512 inverse) {
    __m512 v = _mm512_mul_ps(x, inverse), whole = _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __mmask16 close = _mm512_cmp_ps_mask(_mm512_abs_ps(_mm512_sub_ps(v, whole)), _mm512_set1_ps(0.4995f), _CMP_GT_OQ);
    if (__builtin_expect(close, 0))
        whole = _mm512_roundscale_ps(_mm512_div_ps(x, s), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return whole;
}

__attribute__((target(TARGET_VNNI)))
static int row_vnni(const float *x, int64_t n, int levels, const quantized *to) {
    int8_t *const q = to->q;
    const int64_t padded = to->padded;
    __m512 top = _mm512_setzero_ps(), all = top;
    const __m512 limit = _mm512_set1_ps(LARGEST);
    __m512i count = _mm512_setzero_si512(), first = count, second = count;
    __mmask16 bad = 0;
    for (int64_t i = 0; i < n; i += 16) {
        const __m512 a = _mm512_abs_ps(_mm512_maskz_loadu_ps(lanes_from(i, n), x + i));
        top = _mm512_max_ps(top, a);
        bad |= _mm512_cmp_ps_mask(a, limit, _CMP_NLE_UQ);
        if (levels == 2) {
            all = _mm512_add_ps(all, a);
            const __mmask16 nonzero = _mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_GT_OQ);
            count = _mm512_mask_add_epi32(count, nonzero, count, _mm512_set1_epi32(1));
        }
    }
    const float largest = _mm512_reduce_max_ps(top), total = levels == 2 ? _mm512_reduce_add_ps(all) : 0.0f;
    const float steps = levels == 2 ? 16256.0f : 127.0f, step = largest / steps, s = step < SMALLEST ? 1.0f : step;
    if (bad || lift_by(largest) != 1.0f) return row_portable(x, n, levels, to);        /* rare */
    *to->scale = s;
    *to->undo = 1.0f;
    const __m512 by = _mm512_set1_ps(s), times = _mm512_set1_ps(1.0f / s);
    const __m512 high = _mm512_set1_ps(steps), low = _mm512_set1_ps(-steps);
    for (int64_t i = 0; i < padded; i += 16) {
        const __m512 v = _mm512_maskz_loadu_ps(lanes_from(i, n), x + i);
        const __m512 value = levels == 2 ? _mm512_mul_ps(v, times) : divide_and_round(v, by, times);
        __m512i whole = _mm512_cvtps_epi32(_mm512_max_ps(_mm512_min_ps(value, high), low));
        if (levels == 2) {
            const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(64)), 7);
            whole = _mm512_sub_epi32(whole, _mm512_slli_epi32(upper, 7));
            first = _mm512_add_epi32(first, upper);
            second = _mm512_add_epi32(second, whole);
            _mm_storeu_si128((__m128i *)(q + i), _mm512_cvtepi32_epi8(upper));
            _mm_storeu_si128((__m128i *)(q + padded + i), _mm512_cvtepi32_epi8(whole));
        } else {
            first = _mm512_add_epi32(first, whole);
            _mm_storeu_si128((__m128i *)(q + i), _mm512_cvtepi32_epi8(whole));
        }
    }
    to->sums[0] = _mm512_reduce_add_epi32(first);
    if (levels == 1) return 0;
    to->sums[1] = _mm512_reduce_add_epi32(second);
    return is_wide(x, n, largest, (double)total, _mm512_reduce_add_epi32(count));
}

__attribute__((target(TARGET_VNNI)))
static void fixed_vnni(const float *x, int64_t n, float s, float zero, const quantized *to) {
    int8_t *const q = to->q;
    const int64_t padded = to->padded;
    const __m512 by = _mm512_set1_ps(s), times = _mm512_set1_ps(1.0f / s), plus = _mm512_set1_ps(zero);
    const __m512 far = _mm512_set1_ps((300.0f + fabsf(zero)) * s), high = _mm512_set1_ps(127.0f), low = _mm512_set1_ps(-127.0f);
    __m512i sum = _mm512_setzero_si512();
    __mmask16 bad = 0;
    for (int64_t i = 0; i < padded; i += 16) {
        const __mmask16 some = lanes_from(i, n);
        const __m512 v = _mm512_maskz_loadu_ps(some, x + i);
        bad |= _mm512_cmp_ps_mask(_mm512_abs_ps(v), _mm512_set1_ps(LARGEST), _CMP_NLE_UQ);
        const __m512 near = _mm512_max_ps(_mm512_min_ps(v, far), _mm512_sub_ps(_mm512_setzero_ps(), far));
        const __m512 value = _mm512_add_ps(divide_and_round(near, by, times), plus);
        const __m512i whole = _mm512_maskz_cvtps_epi32(some, _mm512_max_ps(_mm512_min_ps(value, high), low));
        sum = _mm512_add_epi32(sum, whole);
        _mm_storeu_si128((__m128i *)(q + i), _mm512_cvtepi32_epi8(whole));
    }
    to->sums[0] = _mm512_reduce_add_epi32(sum);
    set_fixed(s, !bad, to);
}
#endif

/* A scale of the row's own; 1 where floats must compute the row: too wide for its two levels, of extreme size, or not finite. */
int quantize_row(const float *x, int64_t n, int levels, int level, const quantized *to) {
#ifdef X86
    if (level >= VNNI) return row_vnni(x, n, levels, to);
    if (level >= AVX2) return row_avx2(x, n, levels, to);
#endif
    (void)level;
    return row_portable(x, n, levels, to);
}

/* One level with a given scale and zero point; a row that holds NaN or infinity gets the scale NaN. */
void quantize_fixed(const float *x, int64_t n, float s, float zero, int level, const quantized *to) {
#ifdef X86
    if (level >= VNNI && s >= SMALLEST) { fixed_vnni(x, n, s, zero, to); return; }
    if (level >= AVX2) { fixed_avx2(x, n, s, zero, to); return; }
#endif
    (void)level;
    fixed_loop(x, n, s, zero, to);
}
