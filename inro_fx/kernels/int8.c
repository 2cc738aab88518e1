/* Linear layers with int8 weights on a CPU: activations become integers row by row, products are exact in int32.

   x [rows, in], codes [out, in] int8, scale [out] (or one), y [rows, out]; groups and narrower codes as in groups.c:

       one level     x = s * q,               q in -127..127        s = max|x| / 127
       two levels    x = s * (128 * q1 + q0), q1 in -127..127, q0 in -64..63, s = max|x| / 16256

   One level is dynamic int8. With a fixed scale s and zero point z for all rows, q = clamp(round(x / s) + z) and z * sum(w) is taken
   off in the epilogue. Two levels hold 15 bits of each activation: as good as float activations beside int8 weights,
   and two integer products cost less than one of floats where the CPU multiplies bytes (VNNI).

   bfloat16 activations are multiplied as they are where the CPU does that and rows are many: a code is a bfloat16, too.

   Fifteen bits are too few where one activation is hundreds of times the others: such a row is computed in floats.

   Weights stay as they are stored. For few rows of x both operands run along `in`, and a block of 6 x 4 results keeps its sums
   in registers. For many rows 16 columns (AVX2, as int16) or 32 (VNNI) are transposed into a scratch that stays in cache.

   No instruction here saturates: AVX2 multiplies |w| (as unsigned, at most 128) by x with the sign of w, so that a pair of
   products stays within 2 * 128 * 127 < 2^15, or int16 by int16 into int32; VNNI adds four products to an int32, with w + 128
   as the unsigned side and 128 * sum(x) taken off at the end. */

#include "kernels.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif

enum { STEP = 64, MR = 6, NR = 4, MANY = 6, MANY_AVX2 = 6, MANY_BFLOAT16 = 96 };
/* bytes of a step along `in`; block of results; rows from which transposing the weights pays */
enum { BLOCKS, PANELS_AVX2, PANELS_VNNI, PANELS_BFLOAT16 };     /* how results are computed */
static const int columns_of[] = {NR, 16, 32, 32};                /* that go together */

enum { CHUNK_BYTES = 1 << 20, SAFE = 1024 };          /* 128 * 16256 * 1024 < 2^31: columns whose sums fit int32 */

#define OUTLIER 350.0                                 /* one number against the mean of the others: they keep about 0.5 % */

/* ---- activations to integers ---- */

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

static int quantize_row(const float *x, int64_t n, int64_t padded, int levels, int8_t *q, float *scale, int32_t *sums) {
    float largest = 0.0f;
    int finite = 1;
    for (int64_t i = 0; i < n; i++) {
        float a = fabsf(x[i]);
        largest = a > largest ? a : largest;
        finite &= a <= 3.402823466e38f;               /* false for NaN and infinity */
    }
    float steps = levels == 2 ? 16256.0f : 127.0f;
    float s = largest / steps;
    if (s < 1.17549435e-38f) s = 1.0f;
    memset(q, 0, (size_t)(padded * levels));
    sums[0] = 0;
    if (levels == 2) sums[1] = 0;
    *scale = finite ? s : NAN;
    if (!finite) return levels == 2;                   /* floats know what to do with it */
    if (levels == 1) {
        int32_t sum = 0;
        for (int64_t i = 0; i < n; i++) {
            float v = rintf(x[i] / s);
            v = v > 127.0f ? 127.0f : v < -127.0f ? -127.0f : v;
            q[i] = (int8_t)v;
            sum += (int32_t)v;
        }
        sums[0] = sum;
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
        sums[0] = high_sum;
        sums[1] = low_sum;
    }
    return levels == 2 && wide_row(x, n);
}

/* One level with a given scale and zero point; a row that holds NaN or infinity gets the scale NaN. */
__attribute__((always_inline))
static inline void quantize_fixed(const float *x, int64_t n, int64_t padded, float s, float zero, int8_t *q, float *scale, int32_t *sums) {
    int32_t sum = 0;
    int finite = 1;
    memset(q + n, 0, (size_t)(padded - n));
    for (int64_t i = 0; i < n; i++) {
        float v = rintf(x[i] / s) + zero;
        finite &= fabsf(x[i]) <= 3.402823466e38f;
        v = v > 127.0f ? 127.0f : v;
        v = v > -127.0f ? v : -127.0f;                 /* NaN too: it cannot become an integer */
        q[i] = (int8_t)(int32_t)v;
        sum += (int32_t)v;
    }
    sums[0] = sum;
    *scale = finite ? s : NAN;
}

static void quantize_fixed_portable(const float *x, int64_t n, int64_t padded, float s, float zero, int8_t *q, float *scale, int32_t *sums) {
    quantize_fixed(x, n, padded, s, zero, q, scale, sums);
}

#ifdef X86
__attribute__((target("avx2,fma")))
static void quantize_fixed_avx2(const float *x, int64_t n, int64_t padded, float s, float zero, int8_t *q, float *scale, int32_t *sums) {
    quantize_fixed(x, n, padded, s, zero, q, scale, sums);
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
    const __m256 limit = _mm256_set1_ps(3.402823466e38f);
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
        *finite &= a <= 3.402823466e38f;
    }
    return largest;
}

__attribute__((target("avx2,fma")))
static int quantize_row_avx2(const float *x, int64_t n, int64_t padded, int levels, int8_t *q, float *scale, int32_t *sums) {
    int finite;
    const float largest = reach_avx2(x, n, &finite);
    int64_t i;
    float steps = levels == 2 ? 16256.0f : 127.0f, s = largest / steps;
    if (s < 1.17549435e-38f) s = 1.0f;
    float inverse = 1.0f / s;
    if (!finite) return quantize_row(x, n, padded, levels, q, scale, sums);      /* rare */
    *scale = s;
    memset(q + n, 0, (size_t)(padded - n));
    if (levels == 2) memset(q + padded + n, 0, (size_t)(padded - n));
    __m256 by = _mm256_set1_ps(s), times = _mm256_set1_ps(inverse), high = _mm256_set1_ps(steps), low = _mm256_set1_ps(-steps);
    __m256i first_sum = _mm256_setzero_si256(), second_sum = _mm256_setzero_si256(), lanes_in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
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
    sums[0] = total[0];
    if (levels == 2) sums[1] = total[1];
    return levels == 2 && wide_row_avx2(x, n);
}
#endif

/* ---- blocks of integer products: out[m][n] = sum_k x[m][k] * w[n][k] ----
   x: `m` rows of `padded` bytes, zero beyond `k`; w: up to NR rows of `k` bytes. */

static void block_portable(const int8_t *x, int64_t padded, int m, const int8_t *const *w, int n, int64_t k, const int32_t *sums,
                           int32_t out[MR][NR]) {
    (void)sums;
    (void)n;
    for (int i = 0; i < m; i++)
        for (int j = 0; j < NR; j++) {
            const int8_t *a = x + i * padded, *b = w[j];
            int32_t total = 0;
            for (int64_t p = 0; p < k; p++) total += (int32_t)a[p] * b[p];
            out[i][j] = total;
        }
}

#ifdef X86
/* The sums of a block must each be a variable of its own: arrays of vectors end up in memory. DO3(F) is F(0) F(1) F(2). */
#define DO1(F) F(0)
#define DO2(F) DO1(F) F(1)
#define DO3(F) DO2(F) F(2)
#define DO4(F) DO3(F) F(3)
#define DO5(F) DO4(F) F(4)
#define DO6(F) DO5(F) F(5)
#define DO8(F) DO6(F) F(6) F(7)
#define DO12(F) DO8(F) F(8) F(9) F(10) F(11)

/* Rows are short for the hardware's prefetcher: the next block is asked for while this one is used, into the second-level cache,
   whose queue is longer: 27 GB/s in the place of 18 where it was measured. (A prefetch cannot fault.) */
#define NEXT(j) _mm_prefetch((const char *)(w[j] + NR * k + p), _MM_HINT_T1);

#define ZERO_AVX2(i) __m256i e##i##0 = _mm256_setzero_si256(), e##i##1 = e##i##0, e##i##2 = e##i##0, e##i##3 = e##i##0;
#define LOAD_AVX2(i) const __m256i v##i = _mm256_loadu_si256((const __m256i *)(x + i * padded + p));
#define MULTIPLY_AVX2(i, j) e##i##j = _mm256_add_epi32(e##i##j, _mm256_madd_epi16(_mm256_maddubs_epi16(u, _mm256_sign_epi8(v##i, c)), ones));
#define COLUMN_AVX2(M, j) { \
    const __m256i c = p + 32 <= k ? _mm256_loadu_si256((const __m256i *)(w[j] + p)) : tail_avx2(w[j] + p, k - p), u = _mm256_abs_epi8(c); \
    COLUMN##M##_AVX2(j) }
#define COLUMN1_AVX2(j) MULTIPLY_AVX2(0, j)
#define COLUMN2_AVX2(j) MULTIPLY_AVX2(0, j) MULTIPLY_AVX2(1, j)
#define ADD_UP_AVX2(i) { \
    const __m256i s = _mm256_hadd_epi32(_mm256_hadd_epi32(e##i##0, e##i##1), _mm256_hadd_epi32(e##i##2, e##i##3)); \
    _mm_storeu_si128((__m128i *)out[i], _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1))); }
#define ROWS_AVX2(M) \
__attribute__((target("avx2"))) \
static void rows##M##_avx2(const int8_t *x, int64_t padded, const int8_t *const *w, int64_t k, int32_t out[MR][NR]) { \
    const __m256i ones = _mm256_set1_epi16(1); \
    DO##M(ZERO_AVX2) \
    for (int64_t p = 0; p < k; p += 32) { \
        if (p % 64 == 0) { NEXT(0) NEXT(1) NEXT(2) NEXT(3) } \
        DO##M(LOAD_AVX2) \
        COLUMN_AVX2(M, 0) COLUMN_AVX2(M, 1) COLUMN_AVX2(M, 2) COLUMN_AVX2(M, 3) \
    } \
    DO##M(ADD_UP_AVX2) \
}

__attribute__((target("avx2"), noinline))
static __m256i tail_avx2(const int8_t *w, int64_t left) {
    int8_t bytes[32] = {0};
    memcpy(bytes, w, (size_t)left);
    return _mm256_loadu_si256((const __m256i *)bytes);
}

ROWS_AVX2(1)
ROWS_AVX2(2)

__attribute__((target("avx2")))
static void block_avx2(const int8_t *x, int64_t padded, int m, const int8_t *const *w, int n, int64_t k, const int32_t *sums,
                       int32_t out[MR][NR]) {
    (void)sums;
    (void)n;                                          /* w repeats its last row beyond n */
    int i = 0;
    for (; i + 2 <= m; i += 2) rows2_avx2(x + i * padded, padded, w, k, out + i);
    if (i < m) rows1_avx2(x + i * padded, padded, w, k, out + i);
}

/* ---- many rows on AVX2: 16 columns of weights as int16, transposed to [in / 2][16][2], against 6 rows of x as int16 ----
   The activations need no second level here: 15 bits fit, and their sums fit int32 for SAFE columns at a time. */

__attribute__((target("avx2")))
static void transpose_avx2(const int8_t *codes, int64_t in, int64_t padded, int width, int16_t *packed) {
    for (int half = 0; half < 2; half++)
        for (int64_t p = 0; p < padded; p += 16) {
            __m256i a[8], b[8];
            for (int j = 0; j < 8; j++) {
                const int column = half * 8 + j;
                const int64_t left = column < width ? in - p : 0;
                __m128i bytes = _mm_setzero_si128();
                if (left >= 16) bytes = _mm_loadu_si128((const __m128i *)(codes + column * in + p));
                else if (left > 0) { int8_t some[16] = {0}; memcpy(some, codes + column * in + p, (size_t)left); bytes = _mm_loadu_si128((const __m128i *)some); }
                a[j] = _mm256_cvtepi8_epi16(bytes);   /* eight words of two codes */
            }
            for (int j = 0; j < 8; j += 2) {
                b[j] = _mm256_unpacklo_epi32(a[j], a[j + 1]);
                b[j + 1] = _mm256_unpackhi_epi32(a[j], a[j + 1]);
            }
            for (int j = 0; j < 8; j += 4)
                for (int i = 0; i < 2; i++) {
                    a[j + 2 * i] = _mm256_unpacklo_epi64(b[j + i], b[j + i + 2]);
                    a[j + 2 * i + 1] = _mm256_unpackhi_epi64(b[j + i], b[j + i + 2]);
                }
            for (int i = 0; i < 4; i++) {
                b[i] = _mm256_permute2x128_si256(a[i], a[i + 4], 0x20);
                b[i + 4] = _mm256_permute2x128_si256(a[i], a[i + 4], 0x31);
            }
            for (int i = 0; i < 8; i++) _mm256_store_si256((__m256i *)(packed + (p / 2 + i) * 32 + half * 16), b[i]);
        }
}

#define ZERO16(i) __m256i a##i = _mm256_setzero_si256(), b##i = a##i;
#define MULTIPLY16(i) { \
    int32_t two; \
    memcpy(&two, x + i * padded + 2 * p, 4); \
    __m256i v = _mm256_set1_epi32(two);               /* the next line keeps the rows in order, and the sums in registers */ \
    __asm__ volatile("" : "+x"(v), "+x"(a##i), "+x"(b##i)); \
    a##i = _mm256_add_epi32(a##i, _mm256_madd_epi16(w0, v)); b##i = _mm256_add_epi32(b##i, _mm256_madd_epi16(w1, v)); }
#define START16(i) __m256i a##i = m0, b##i = m1;
#define KEEP16(i) left[i] = _mm256_add_ps(left[i], _mm256_cvtepi32_ps(a##i)); right[i] = _mm256_add_ps(right[i], _mm256_cvtepi32_ps(b##i));
#define PANEL_AVX2(M) \
__attribute__((target("avx2"))) \
static void panel##M##_avx2(const int16_t *x, int64_t padded, int64_t safe, const int16_t *packed, const float *x_scale, \
                            const int32_t *minus, const float *by, const float *plus, float *y, int64_t out, int width) { \
    __m256 left[M], right[M]; \
    for (int i = 0; i < M; i++) left[i] = right[i] = _mm256_setzero_ps(); \
    for (int64_t start = 0; start < padded; start += safe) { \
        const int64_t end = start + safe < padded ? start + safe : padded; \
        const __m256i m0 = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_loadu_si256((const __m256i *)minus)); \
        const __m256i m1 = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_loadu_si256((const __m256i *)(minus + 8))); \
        DO##M(START16) \
        for (int64_t p = start / 2; p < end / 2; p++) { \
            const __m256i w0 = _mm256_load_si256((const __m256i *)(packed + p * 32)), w1 = _mm256_load_si256((const __m256i *)(packed + p * 32 + 16)); \
            DO##M(MULTIPLY16) \
        } \
        DO##M(KEEP16) \
    } \
    for (int i = 0; i < M; i++) { \
        float values[16]; \
        const __m256 s = _mm256_set1_ps(x_scale[i]); \
        _mm256_storeu_ps(values, _mm256_add_ps(_mm256_mul_ps(_mm256_mul_ps(left[i], s), _mm256_loadu_ps(by)), _mm256_loadu_ps(plus))); \
        _mm256_storeu_ps(values + 8, _mm256_add_ps(_mm256_mul_ps(_mm256_mul_ps(right[i], s), _mm256_loadu_ps(by + 8)), _mm256_loadu_ps(plus + 8))); \
        memcpy(y + i * out, values, (size_t)width * sizeof(float)); \
    } \
}
PANEL_AVX2(6)
PANEL_AVX2(2)
PANEL_AVX2(1)

/* `minus`, of fixed scales alone, is taken off once: one level has one block of `safe` columns. */
static void columns_avx2(const int16_t *q, int64_t padded, int64_t rows, int levels, const int16_t *packed, const float *x_scale,
                         const int32_t *minus, const float *by, const float *plus, float *y, int64_t out, int width) {
    const int64_t safe = levels == 2 ? SAFE : padded;
    int64_t r = 0;
    for (; r + 6 <= rows; r += 6) panel6_avx2(q + r * padded, padded, safe, packed, x_scale + r, minus, by, plus, y + r * out, out, width);
    for (; r + 2 <= rows; r += 2) panel2_avx2(q + r * padded, padded, safe, packed, x_scale + r, minus, by, plus, y + r * out, out, width);
    for (; r < rows; r++) panel1_avx2(q + r * padded, padded, safe, packed, x_scale + r, minus, by, plus, y + r * out, out, width);
}

/* The same with a scale for each group of columns: by [groups][16]; a group has at most SAFE columns. */
#define KEEP_GROUP16(i) \
    left[i] = _mm256_add_ps(left[i], _mm256_mul_ps(_mm256_cvtepi32_ps(a##i), s0)); \
    right[i] = _mm256_add_ps(right[i], _mm256_mul_ps(_mm256_cvtepi32_ps(b##i), s1));
#define GROUPED_AVX2(M) \
__attribute__((target("avx2"))) \
static void grouped##M##_avx2(const int16_t *x, int64_t padded, int64_t in, int64_t group, const int16_t *packed, const float *x_scale, \
                             const float *by, const float *plus, float *y, int64_t out, int width) { \
    __m256 left[M], right[M]; \
    for (int i = 0; i < M; i++) left[i] = right[i] = _mm256_setzero_ps(); \
    for (int64_t start = 0; start < in; start += group, by += 16) { \
        const int64_t end = start + group < in ? start + group : in; \
        const __m256 s0 = _mm256_loadu_ps(by), s1 = _mm256_loadu_ps(by + 8); \
        DO##M(ZERO16) \
        for (int64_t p = start / 2; p < (end + 1) / 2; p++) { \
            const __m256i w0 = _mm256_load_si256((const __m256i *)(packed + p * 32)), w1 = _mm256_load_si256((const __m256i *)(packed + p * 32 + 16)); \
            DO##M(MULTIPLY16) \
        } \
        DO##M(KEEP_GROUP16) \
    } \
    for (int i = 0; i < M; i++) { \
        float values[16]; \
        const __m256 s = _mm256_set1_ps(x_scale[i]); \
        _mm256_storeu_ps(values, _mm256_add_ps(_mm256_mul_ps(left[i], s), _mm256_loadu_ps(plus))); \
        _mm256_storeu_ps(values + 8, _mm256_add_ps(_mm256_mul_ps(right[i], s), _mm256_loadu_ps(plus + 8))); \
        memcpy(y + i * out, values, (size_t)width * sizeof(float)); \
    } \
}
GROUPED_AVX2(4)
GROUPED_AVX2(1)

static void grouped_columns_avx2(const int16_t *q, int64_t padded, int64_t in, int64_t rows, int64_t group, const int16_t *packed,
                                 const float *x_scale, const float *by, const float *plus, float *y, int64_t out, int width) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) grouped4_avx2(q + r * padded, padded, in, group, packed, x_scale + r, by, plus, y + r * out, out, width);
    for (; r < rows; r++) grouped1_avx2(q + r * padded, padded, in, group, packed, x_scale + r, by, plus, y + r * out, out, width);
}

/* The same integers as quantize_row, whole (128 * q1 + q0 where there are two levels), in int16. */
__attribute__((target("avx2,fma")))
static void quantize_wide_avx2(const float *x, int64_t n, int64_t padded, int levels, int16_t *q, float *scale) {
    int finite;
    const float largest = reach_avx2(x, n, &finite);
    int64_t i;
    const float steps = levels == 2 ? 16256.0f : 127.0f;
    float s = largest / steps;
    if (s < 1.17549435e-38f) s = 1.0f;
    float inverse = 1.0f / s;
    *scale = finite ? s : NAN;
    if (!finite) { memset(q, 0, (size_t)padded * sizeof(int16_t)); return; }
    const __m256 by = _mm256_set1_ps(s), times = _mm256_set1_ps(inverse), high = _mm256_set1_ps(steps), low = _mm256_set1_ps(-steps);
    for (i = 0; i + 16 <= n; i += 16) {
        __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + i + 8);
        a = levels == 2 ? _mm256_mul_ps(a, times) : _mm256_div_ps(a, by);
        b = levels == 2 ? _mm256_mul_ps(b, times) : _mm256_div_ps(b, by);
        a = _mm256_max_ps(_mm256_min_ps(a, high), low);
        b = _mm256_max_ps(_mm256_min_ps(b, high), low);
        __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b));
        _mm256_storeu_si256((__m256i *)(q + i), _mm256_permute4x64_epi64(packed, 0xd8));
    }
    for (; i < n; i++) {
        float v = rintf(levels == 2 ? x[i] * inverse : x[i] / s);
        v = v > steps ? steps : v < -steps ? -steps : v;
        q[i] = (int16_t)v;
    }
    memset(q + n, 0, (size_t)(padded - n) * sizeof(int16_t));
}


__attribute__((target(TARGET_VNNI), always_inline))
static inline void add_up_vnni(__m512i a, __m512i b, __m512i c, __m512i d, int32_t sum, int32_t *out) {
    __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    _mm_storeu_si128((__m128i *)out, _mm_sub_epi32(four, _mm_set1_epi32(128 * sum)));
}

#define ZERO(i) __m512i d##i##0 = _mm512_setzero_si512(), d##i##1 = d##i##0, d##i##2 = d##i##0, d##i##3 = d##i##0;
#define MULTIPLY(i) { \
    const __m512i v = _mm512_loadu_si512(x + i * padded + p); \
    d##i##0 = _mm512_dpbusd_epi32(d##i##0, w0, v); d##i##1 = _mm512_dpbusd_epi32(d##i##1, w1, v); \
    d##i##2 = _mm512_dpbusd_epi32(d##i##2, w2, v); d##i##3 = _mm512_dpbusd_epi32(d##i##3, w3, v); }
#define ADD_UP(i) add_up_vnni(d##i##0, d##i##1, d##i##2, d##i##3, sums[i], out[i]);
#define ROWS_VNNI(M) \
__attribute__((target(TARGET_VNNI))) \
static void rows##M##_vnni(const int8_t *x, int64_t padded, const int8_t *const *w, int64_t k, const int32_t *sums, int32_t out[MR][NR]) { \
    const __m512i flip = _mm512_set1_epi8((char)0x80); \
    DO##M(ZERO) \
    for (int64_t p = 0; p < k; p += STEP) { \
        NEXT(0) NEXT(1) NEXT(2) NEXT(3) \
        const __mmask64 some = k - p >= STEP ? (__mmask64)-1 : (__mmask64)-1 >> (STEP - (k - p)); \
        const __m512i w0 = _mm512_xor_si512(_mm512_maskz_loadu_epi8(some, w[0] + p), flip); \
        const __m512i w1 = _mm512_xor_si512(_mm512_maskz_loadu_epi8(some, w[1] + p), flip); \
        const __m512i w2 = _mm512_xor_si512(_mm512_maskz_loadu_epi8(some, w[2] + p), flip); \
        const __m512i w3 = _mm512_xor_si512(_mm512_maskz_loadu_epi8(some, w[3] + p), flip); \
        DO##M(MULTIPLY) \
    } \
    DO##M(ADD_UP) \
}
ROWS_VNNI(1)
ROWS_VNNI(2)
ROWS_VNNI(3)
ROWS_VNNI(4)
ROWS_VNNI(5)
ROWS_VNNI(6)

__attribute__((target(TARGET_VNNI)))
static void block_vnni(const int8_t *x, int64_t padded, int m, const int8_t *const *w, int n, int64_t k, const int32_t *sums,
                       int32_t out[MR][NR]) {
    (void)n;
    switch (m) {
        case 1: rows1_vnni(x, padded, w, k, sums, out); break;
        case 2: rows2_vnni(x, padded, w, k, sums, out); break;
        case 3: rows3_vnni(x, padded, w, k, sums, out); break;
        case 4: rows4_vnni(x, padded, w, k, sums, out); break;
        case 5: rows5_vnni(x, padded, w, k, sums, out); break;
        default: rows6_vnni(x, padded, w, k, sums, out);
    }
}

/* ---- many rows: 32 columns of weights, transposed to [in / 4][32][4] and made unsigned, against 12 rows of q ---- */

/* Sixteen columns of 64 codes, as sixteen vectors of 16 columns x 4 codes: a transposition of words of four bytes in four rounds. */
__attribute__((target(TARGET_VNNI), always_inline))
static inline void transpose_sixteen(const int8_t *codes, int64_t in, int64_t left, int width, __m512i a[16]) {
    const __mmask64 some = left >= STEP ? (__mmask64)-1 : left > 0 ? (__mmask64)-1 >> (STEP - left) : 0;
    __m512i b[16];
    for (int j = 0; j < 16; j++) {
        a[j] = j < width ? _mm512_maskz_loadu_epi8(some, codes + j * in) : _mm512_setzero_si512();
    }
    for (int j = 0; j < 16; j += 2) {
        b[j] = _mm512_unpacklo_epi32(a[j], a[j + 1]);
        b[j + 1] = _mm512_unpackhi_epi32(a[j], a[j + 1]);
    }
    for (int j = 0; j < 16; j += 4)
        for (int i = 0; i < 2; i++) {
            a[j + 2 * i] = _mm512_unpacklo_epi64(b[j + i], b[j + i + 2]);
            a[j + 2 * i + 1] = _mm512_unpackhi_epi64(b[j + i], b[j + i + 2]);
        }
    for (int j = 0; j < 16; j += 8)
        for (int i = 0; i < 4; i++) {
            b[j + i] = _mm512_shuffle_i32x4(a[j + i], a[j + i + 4], 0x88);
            b[j + i + 4] = _mm512_shuffle_i32x4(a[j + i], a[j + i + 4], 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        a[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
        a[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd);
    }
}

__attribute__((target(TARGET_VNNI)))
static void transpose_vnni(const int8_t *codes, int64_t in, int width, uint8_t *packed) {
    const __m512i flip = _mm512_set1_epi8((char)0x80);
    for (int half = 0; half < 2; half++)
        for (int64_t p = 0; p < in; p += STEP) {
            __m512i words[16];
            transpose_sixteen(codes + half * 16 * in + p, in, in - p, width - half * 16, words);
            for (int i = 0; i < 16; i++) _mm512_storeu_si512(packed + ((p / 4 + i) * 2 + half) * 64, _mm512_xor_si512(words[i], flip));
        }
}

__attribute__((target(TARGET_VNNI), always_inline))
static inline void finish_vnni(__m512i high, int32_t high_sum, __m512i low, int32_t low_sum, int levels, float s, const int32_t *minus,
                               const float *by, const float *plus, float *y, __mmask16 some) {
    const __m512i less = _mm512_add_epi32(_mm512_set1_epi32(128 * high_sum), _mm512_loadu_si512(minus));
    __m512 value = _mm512_cvtepi32_ps(_mm512_sub_epi32(high, less));
    if (levels == 2)
        value = _mm512_add_ps(_mm512_mul_ps(value, _mm512_set1_ps(128.0f)),
                              _mm512_cvtepi32_ps(_mm512_sub_epi32(low, _mm512_set1_epi32(128 * low_sum))));
    value = _mm512_mul_ps(_mm512_mul_ps(value, _mm512_set1_ps(s)), _mm512_loadu_ps(by));
    _mm512_mask_storeu_ps(y, some, _mm512_add_ps(value, _mm512_loadu_ps(plus)));
}

#define ZERO2(i) __m512i a##i = _mm512_setzero_si512(), b##i = a##i;
#define MULTIPLY2(i) { \
    int32_t four; \
    memcpy(&four, x + i * padded + 4 * p, 4); \
    const __m512i v = _mm512_set1_epi32(four); \
    a##i = _mm512_dpbusd_epi32(a##i, w0, v); b##i = _mm512_dpbusd_epi32(b##i, w1, v); }
#define KEEP2(i) left[i] = a##i; right[i] = b##i;
#define PANEL_VNNI(M) \
__attribute__((target(TARGET_VNNI))) \
static void panel##M##_vnni(const int8_t *x, int64_t padded, int64_t in, int levels, const char *next, const uint8_t *packed, const int32_t *sums, \
                            const float *x_scale, const int32_t *minus, const float *by, const float *plus, float *y, int64_t out, int width) { \
    DO##M(ZERO2) \
    for (int64_t p = 0; p < (in + 3) / 4; p++) { \
        const __m512i w0 = _mm512_load_si512(packed + p * 128), w1 = _mm512_load_si512(packed + p * 128 + 64); \
        _mm_prefetch(next + p * 128, _MM_HINT_T1); \
        _mm_prefetch(next + p * 128 + 64, _MM_HINT_T1); \
        DO##M(MULTIPLY2) \
    } \
    __m512i left[M], right[M]; \
    DO##M(KEEP2) \
    const __mmask16 first = width >= 16 ? 0xffff : (__mmask16)((1 << width) - 1); \
    const __mmask16 second = width >= 32 ? 0xffff : width > 16 ? (__mmask16)((1 << (width - 16)) - 1) : 0; \
    for (int i = 0; i < M; i += levels) { \
        const int low = levels == 2 ? i + 1 : i; \
        float *to = y + i / levels * out; \
        finish_vnni(left[i], sums[i], left[low], sums[low], levels, x_scale[i / levels], minus, by, plus, to, first); \
        if (second) finish_vnni(right[i], sums[i], right[low], sums[low], levels, x_scale[i / levels], minus + 16, by + 16, \
                                plus + 16, to + 16, second); \
    } \
}
PANEL_VNNI(12)
PANEL_VNNI(8)
PANEL_VNNI(4)
PANEL_VNNI(2)
PANEL_VNNI(1)

/* The first panel asks the memory for the weights of the `next` columns, which lie in a row, while it computes. */
__attribute__((target(TARGET_VNNI)))
static void columns_vnni(const int8_t *q, int64_t padded, int64_t in, int64_t rows, int levels, const char *next, const uint8_t *packed, const int32_t *sums,
                         const float *x_scale, const int32_t *minus,
                         const float *by, const float *plus, float *y, int64_t out, int width) {
    int64_t r = 0;                                    /* of q: a row of x is `levels` of them */
    const int64_t all = rows * levels;
#define PANEL(M) for (; r + M <= all; r += M, next = (const char *)packed) \
        panel##M##_vnni(q + r * padded, padded, in, levels, next, packed, sums + r, x_scale + r / levels, minus, by, plus, \
                        y + r / levels * out, out, width);
    PANEL(12)
    PANEL(8)
    PANEL(4)
    PANEL(2)
    PANEL(1)
#undef PANEL
}

/* ---- the same with a scale for each group of columns, `group` a multiple of four ----
   Here x is the unsigned side, x + 128, and 128 * sum(w) of a group is what its sums start from: start, by [groups][32]. */

__attribute__((target(TARGET_VNNI)))
static void transpose_groups_vnni(const int8_t *codes, int64_t in, int64_t group, int width, int8_t *packed, int32_t *start) {
    for (int half = 0; half < 2; half++)
        for (int64_t p = 0; p < in; p += STEP) {
            __m512i words[16];
            transpose_sixteen(codes + half * 16 * in + p, in, in - p, width - half * 16, words);
            for (int i = 0; i < 16; i++) _mm512_storeu_si512(packed + ((p / 4 + i) * 2 + half) * 64, words[i]);
        }
    const __m512i all = _mm512_set1_epi8((char)128);
    for (int64_t first = 0; first < in; first += group, start += 32) {
        const int64_t end = first + group < in ? first + group : in;
        __m512i left = _mm512_setzero_si512(), right = left;
        for (int64_t p = first / 4; p < (end + 3) / 4; p++) {
            left = _mm512_dpbusd_epi32(left, all, _mm512_load_si512(packed + p * 128));
            right = _mm512_dpbusd_epi32(right, all, _mm512_load_si512(packed + p * 128 + 64));
        }
        _mm512_storeu_si512(start, _mm512_sub_epi32(_mm512_setzero_si512(), left));
        _mm512_storeu_si512(start + 16, _mm512_sub_epi32(_mm512_setzero_si512(), right));
    }
}

#define START2(i) __m512i a##i = s0, b##i = s1;
#define MULTIPLY_GROUP2(i) { \
    int32_t four; \
    memcpy(&four, x + i * padded + 4 * p, 4); \
    const __m512i v = _mm512_set1_epi32(four); \
    a##i = _mm512_dpbusd_epi32(a##i, v, w0); b##i = _mm512_dpbusd_epi32(b##i, v, w1); }
#define KEEP_ROW2(i, high, low) \
    left[i] = _mm512_fmadd_ps(_mm512_fmadd_ps(_mm512_cvtepi32_ps(a##high), up, _mm512_cvtepi32_ps(a##low)), by0, left[i]); \
    right[i] = _mm512_fmadd_ps(_mm512_fmadd_ps(_mm512_cvtepi32_ps(b##high), up, _mm512_cvtepi32_ps(b##low)), by1, right[i]);
#define KEEP_ROWS1 KEEP_ROW2(0, 0, 1)
#define KEEP_ROWS2 KEEP_ROWS1 KEEP_ROW2(1, 2, 3)
#define KEEP_ROWS4 KEEP_ROWS2 KEEP_ROW2(2, 4, 5) KEEP_ROW2(3, 6, 7)
#define GROUPED_VNNI(ROWS, M) \
__attribute__((target(TARGET_VNNI))) \
static void grouped##ROWS##_vnni(const int8_t *x, int64_t padded, int64_t in, int64_t group, const char *next, const int8_t *packed, \
                                const int32_t *start, const float *x_scale, const float *by, const float *plus, float *y, int64_t out, int width) { \
    __m512 left[ROWS], right[ROWS]; \
    const __m512 up = _mm512_set1_ps(128.0f); \
    for (int i = 0; i < ROWS; i++) left[i] = right[i] = _mm512_setzero_ps(); \
    for (int64_t first = 0; first < in; first += group, by += 32, start += 32) { \
        const int64_t end = first + group < in ? first + group : in; \
        const __m512i s0 = _mm512_loadu_si512(start), s1 = _mm512_loadu_si512(start + 16); \
        DO##M(START2) \
        for (int64_t p = first / 4; p < (end + 3) / 4; p++) { \
            const __m512i w0 = _mm512_load_si512(packed + p * 128), w1 = _mm512_load_si512(packed + p * 128 + 64); \
            _mm_prefetch(next + p * 128, _MM_HINT_T1); \
            _mm_prefetch(next + p * 128 + 64, _MM_HINT_T1); \
            DO##M(MULTIPLY_GROUP2) \
        } \
        const __m512 by0 = _mm512_loadu_ps(by), by1 = _mm512_loadu_ps(by + 16); \
        KEEP_ROWS##ROWS \
    } \
    const __mmask16 some = width >= 16 ? 0xffff : (__mmask16)((1 << width) - 1); \
    const __mmask16 rest = width >= 32 ? 0xffff : width > 16 ? (__mmask16)((1 << (width - 16)) - 1) : 0; \
    for (int i = 0; i < ROWS; i++) { \
        const __m512 s = _mm512_set1_ps(x_scale[i]); \
        _mm512_mask_storeu_ps(y + i * out, some, _mm512_fmadd_ps(left[i], s, _mm512_loadu_ps(plus))); \
        if (rest) _mm512_mask_storeu_ps(y + i * out + 16, rest, _mm512_fmadd_ps(right[i], s, _mm512_loadu_ps(plus + 16))); \
    } \
}
GROUPED_VNNI(4, 8)
GROUPED_VNNI(2, 4)
GROUPED_VNNI(1, 2)

static void grouped_columns_vnni(const int8_t *q, int64_t padded, int64_t in, int64_t rows, int64_t group, const char *next,
                                 const int8_t *packed, const int32_t *start, const float *x_scale, const float *by, const float *plus,
                                 float *y, int64_t out, int width) {
    int64_t r = 0;
#define PANEL(M) for (; r + M <= rows; r += M, next = (const char *)packed) \
        grouped##M##_vnni(q + 2 * r * padded, padded, in, group, next, packed, start, x_scale + r, by, plus, y + r * out, out, width);
    PANEL(4)
    PANEL(2)
    PANEL(1)
#undef PANEL
}

#ifdef TARGET_BFLOAT16
/* ---- many rows of bfloat16: 32 columns of codes as bfloat16, transposed to [in / 2][32][2], against 12 rows of x ---- */

/* With groups (of a multiple of four columns) the scales `by` [groups][32] are applied here, and the products rounded. */
__attribute__((target(TARGET_BFLOAT16)))
static void transpose_bfloat16(const int8_t *codes, int64_t in, int width, int64_t group, const float *by, uint8_t *packed) {
    const __m512i in_pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3,
                                              18, 2, 17, 1, 16, 0);
    for (int half = 0; half < 2; half++)
        for (int64_t p = 0; p < in; p += STEP) {
            __m512i words[16];
            transpose_sixteen(codes + half * 16 * in + p, in, in - p, width - half * 16, words);
            for (int i = 0; i < 16; i++) {
                __m512 code[4];
                const int64_t first = p + 4 * i < in ? p + 4 * i : in - 1;
                const __m512 scale = group ? _mm512_loadu_ps(by + first / group * 32 + half * 16) : _mm512_set1_ps(1.0f);
                for (int j = 0; j < 4; j++) {
                    const __m512i wide = _mm512_srai_epi32(_mm512_sllv_epi32(words[i], _mm512_set1_epi32(24 - 8 * j)), 24);
                    code[j] = _mm512_mul_ps(_mm512_cvtepi32_ps(wide), scale);
                }
                for (int j = 0; j < 4; j += 2)
                    _mm512_storeu_si512(packed + ((p / 2 + 2 * i + j / 2) * 2 + half) * 64,
                                        _mm512_permutexvar_epi16(in_pairs, (__m512i)_mm512_cvtne2ps_pbh(code[j + 1], code[j])));
            }
        }
}

#define ZERO_BF(i) __m512 a##i = _mm512_setzero_ps(), b##i = a##i;
#define MULTIPLY_BF(i) { \
    int32_t two; \
    memcpy(&two, x + (i * padded + 2 * p) * 2, 4); \
    const __m512bh v = (__m512bh)_mm512_set1_epi32(two); \
    a##i = _mm512_dpbf16_ps(a##i, w0, v); b##i = _mm512_dpbf16_ps(b##i, w1, v); }
#define STORE_BF(i) { \
    float *to = y + i * out; \
    _mm512_mask_storeu_ps(to, first, _mm512_add_ps(_mm512_mul_ps(a##i, _mm512_loadu_ps(by)), _mm512_loadu_ps(plus))); \
    if (second) _mm512_mask_storeu_ps(to + 16, second, _mm512_add_ps(_mm512_mul_ps(b##i, _mm512_loadu_ps(by + 16)), _mm512_loadu_ps(plus + 16))); }
#define PANEL_BF(M) \
__attribute__((target(TARGET_BFLOAT16))) \
static void panel##M##_bfloat16(const char *x, int64_t padded, int64_t in, const char *next, const uint8_t *packed, const float *by, const float *plus, \
                                float *y, int64_t out, int width) { \
    const __mmask16 first = width >= 16 ? 0xffff : (__mmask16)((1 << width) - 1); \
    const __mmask16 second = width >= 32 ? 0xffff : width > 16 ? (__mmask16)((1 << (width - 16)) - 1) : 0; \
    DO##M(ZERO_BF) \
    for (int64_t p = 0; p < (in + 1) / 2; p++) { \
        const __m512bh w0 = (__m512bh)_mm512_load_si512(packed + p * 128), w1 = (__m512bh)_mm512_load_si512(packed + p * 128 + 64); \
        _mm_prefetch(next + p * 64, _MM_HINT_T1); \
        DO##M(MULTIPLY_BF) \
    } \
    DO##M(STORE_BF) \
}
PANEL_BF(12)
PANEL_BF(8)
PANEL_BF(4)
PANEL_BF(2)
PANEL_BF(1)

static void columns_bfloat16(const char *x, int64_t padded, int64_t in, int64_t rows, const char *next, const uint8_t *packed, const float *by,
                             const float *plus, float *y, int64_t out, int width) {
    int64_t r = 0;
#define PANEL(M) for (; r + M <= rows; r += M, next = (const char *)packed) \
        panel##M##_bfloat16(x + r * padded * 2, padded, in, next, packed, by, plus, y + r * out, out, width);
    PANEL(12)
    PANEL(8)
    PANEL(4)
    PANEL(2)
    PANEL(1)
#undef PANEL
}
#endif

/* ---- activations to integers, sixteen at a time ---- */

/* round(x / s), to the bit: x / s and x * (1 / s) round alike but close to a tie, where the division is done. */
__attribute__((target(TARGET_VNNI), always_inline))
static inline __m512 divide_and_round(__m512 x, __m512 s, __m512 inverse) {
    __m512 v = _mm512_mul_ps(x, inverse), whole = _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __mmask16 close = _mm512_cmp_ps_mask(_mm512_abs_ps(_mm512_sub_ps(v, whole)), _mm512_set1_ps(0.4995f), _CMP_GT_OQ);
    if (__builtin_expect(close, 0))
        whole = _mm512_roundscale_ps(_mm512_div_ps(x, s), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return whole;
}

__attribute__((target(TARGET_VNNI), always_inline))
static inline __mmask16 lanes_from(int64_t i, int64_t n) {
    return n - i >= 16 ? (__mmask16)0xffff : n <= i ? 0 : (__mmask16)((1u << (n - i)) - 1);
}

__attribute__((target(TARGET_VNNI)))
static int quantize_row_vnni(const float *x, int64_t n, int64_t padded, int levels, int8_t *q, float *scale, int32_t *sums) {
    __m512 top = _mm512_setzero_ps(), all = top;
    const __m512 limit = _mm512_set1_ps(3.402823466e38f);
    __m512i count = _mm512_setzero_si512(), first = count, second = count;
    __mmask16 bad = 0;
    for (int64_t i = 0; i < n; i += 16) {
        const __m512 a = _mm512_abs_ps(_mm512_maskz_loadu_ps(lanes_from(i, n), x + i));
        top = _mm512_max_ps(top, a);
        bad |= _mm512_cmp_ps_mask(a, limit, _CMP_NLE_UQ);
        if (levels == 2) {
            all = _mm512_add_ps(all, a);
            count = _mm512_mask_add_epi32(count, _mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_GT_OQ), count, _mm512_set1_epi32(1));
        }
    }
    const float largest = _mm512_reduce_max_ps(top), total = levels == 2 ? _mm512_reduce_add_ps(all) : 0.0f;
    const float steps = levels == 2 ? 16256.0f : 127.0f, step = largest / steps, s = step < 1.17549435e-38f ? 1.0f : step, inverse = 1.0f / s;
    if (bad || !(total <= 3.402823466e38f))        /* rare: the plain loop knows what to do */
        return quantize_row(x, n, padded, levels, q, scale, sums);
    *scale = s;
    const __m512 by = _mm512_set1_ps(s), times = _mm512_set1_ps(inverse), high = _mm512_set1_ps(steps), low = _mm512_set1_ps(-steps);
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
    sums[0] = _mm512_reduce_add_epi32(first);
    if (levels == 1) return 0;
    sums[1] = _mm512_reduce_add_epi32(second);
    return is_wide(x, n, largest, (double)total, _mm512_reduce_add_epi32(count));
}

__attribute__((target(TARGET_VNNI)))
static void quantize_fixed_vnni(const float *x, int64_t n, int64_t padded, float s, float zero, int8_t *q, float *scale, int32_t *sums) {
    const __m512 by = _mm512_set1_ps(s), times = _mm512_set1_ps(1.0f / s), plus = _mm512_set1_ps(zero);
    const __m512 far = _mm512_set1_ps((300.0f + fabsf(zero)) * s), high = _mm512_set1_ps(127.0f), low = _mm512_set1_ps(-127.0f);
    __m512i sum = _mm512_setzero_si512();
    __mmask16 bad = 0;
    for (int64_t i = 0; i < padded; i += 16) {
        const __mmask16 some = lanes_from(i, n);
        const __m512 v = _mm512_maskz_loadu_ps(some, x + i);
        bad |= _mm512_cmp_ps_mask(_mm512_abs_ps(v), _mm512_set1_ps(3.402823466e38f), _CMP_NLE_UQ);
        const __m512 near = _mm512_max_ps(_mm512_min_ps(v, far), _mm512_sub_ps(_mm512_setzero_ps(), far));      /* clamped either way */
        const __m512 value = _mm512_add_ps(divide_and_round(near, by, times), plus);
        const __m512i whole = _mm512_maskz_cvtps_epi32(some, _mm512_max_ps(_mm512_min_ps(value, high), low));
        sum = _mm512_add_epi32(sum, whole);
        _mm_storeu_si128((__m128i *)(q + i), _mm512_cvtepi32_epi8(whole));
    }
    sums[0] = _mm512_reduce_add_epi32(sum);
    *scale = bad ? NAN : s;
}
#endif

#ifdef X86
/* x = scale * (128 * q[0..] + q[padded..]); 1 where the row is too wide for that, or not finite. For VNNI. */
int quantize_two_levels(const float *x, int64_t n, int64_t padded, int8_t *q, float *scale) {
    int32_t sums[2];
    return quantize_row_vnni(x, n, padded, 2, q, scale, sums) || *scale != *scale;
}
#endif

typedef void (*block_function)(const int8_t *, int64_t, int, const int8_t *const *, int, int64_t, const int32_t *, int32_t[MR][NR]);
typedef int (*quantize_function)(const float *, int64_t, int64_t, int, int8_t *, float *, int32_t *);     /* 1: too wide for two levels */
typedef void (*fixed_function)(const float *, int64_t, int64_t, float, float, int8_t *, float *, int32_t *);

typedef struct {
    const char *x, *bias;
    const float *scale;
    const int8_t *codes;
    char *y;
    int64_t rows, in, stride, out, scale_step, padded, chunk;        /* rows at a time, whose integers stay in the second-level cache */
    int64_t group, bytes;                              /* columns of a scale, 0 for all; bytes of a row of codes */
    int levels, level, dtype, bits;
    block_function block;
    quantize_function quantize;
    fixed_function quantize_fixed;
    const float *fixed;
    const int32_t *zero, *column_sums;
} job;

/* What threads work with, for up to `chunk` rows of x. `y` are the results as floats where x is
   of half precision, `lines` one row as floats for each thread; `wide` says of each row whether two levels are too few for it. */
typedef struct {
    int8_t *q;
    float *scale, *y, *lines;
    int32_t *sums;
    unsigned char *wide;
    void *memory;
    _Alignas(64) char small[4096];                     /* of which a layer of one row needs no more: asking for memory takes longer */
} scratch;

static size_t round_up(size_t bytes) { return (bytes + 63) / 64 * 64; }

static int take(const job *j, int64_t rows, int threads, scratch *to) {
    const size_t q = round_up((size_t)(rows * 2 * j->padded)), scale = round_up((size_t)rows * sizeof(float)),
                 sums = round_up((size_t)(rows * 2) * sizeof(int32_t)), wide = round_up((size_t)rows),
                 y = j->dtype == FLOAT32 ? 0 : round_up((size_t)(rows * j->out) * sizeof(float)),
                 lines = j->dtype == FLOAT32 ? 0 : (size_t)threads * round_up((size_t)j->in * sizeof(float)),
                 all = q + scale + sums + wide + y + lines;
    to->memory = all <= sizeof to->small ? NULL : aligned(all);
    char *start = all <= sizeof to->small ? to->small : to->memory;
    if (!start) return 0;
    to->q = (int8_t *)start;
    to->scale = (float *)(start + q);
    to->sums = (int32_t *)(start + q + scale);
    to->wide = (unsigned char *)start + q + scale + sums;
    to->y = (float *)(start + q + scale + sums + wide);
    to->lines = (float *)(start + q + scale + sums + wide + y);
    return 1;
}

/* By all rows of x and not by those of a chunk: results must not depend on the number of threads. */
static int way_of(const job *j) {
    const int64_t rows = j->rows;
    if (j->dtype == BFLOAT16 && j->levels == 2 && rows >= MANY_BFLOAT16 && j->level >= VNNI && has_bfloat16()) return PANELS_BFLOAT16;
    const int always = j->bits < 8 || j->group;        /* blocks know neither packed codes nor groups */
    if (j->level >= VNNI && (always || rows * j->levels >= MANY)) return PANELS_VNNI;
    if (j->level == AVX2 && always) return PANELS_AVX2;
    if (j->level == AVX2 && rows >= (j->levels == 1 && j->in >= 512 && j->in % 32 == 0 ? 2 : 1) * MANY_AVX2) return PANELS_AVX2;
    return BLOCKS;
}

/* Row `r` of x as floats: where it lies, or in `line`. */
static const float *row_of(const job *j, int64_t r, float *line) {
    const char *x = j->x + r * j->stride * (int64_t)size_of(j->dtype);
    if (j->dtype == FLOAT32) return (const float *)x;
    widen(x, j->dtype, j->in, line, j->level);
    return line;
}

static void quantize_rows(const job *j, int64_t start, int64_t first, int64_t last, int way, const scratch *to, float *line) {
    for (int64_t r = first; r < last; r++) {
        to->wide[r] = 0;
        if (way == PANELS_BFLOAT16) {                  /* as it is, zero beyond `in` */
            char *row = (char *)to->q + r * j->padded * 2;
            memcpy(row, j->x + (start + r) * j->stride * 2, (size_t)j->in * 2);
            memset(row + j->in * 2, 0, (size_t)(j->padded - j->in) * 2);
            continue;
        }
        const float *x = row_of(j, start + r, line);
        if (j->fixed) {
            /* int16 panels: the bytes go to the upper half of the row and are widened from there, front to back */
            int8_t *q = to->q + r * j->padded * (way == PANELS_AVX2 ? 2 : 1), *bytes = q + (way == PANELS_AVX2 ? j->padded : 0);
            j->quantize_fixed(x, j->in, j->padded, *j->fixed, (float)*j->zero, bytes, to->scale + r, to->sums + r);
            if (way == PANELS_AVX2)
                for (int64_t i = 0; i < j->padded; i++) {
                    const int16_t both = bytes[i];
                    memcpy(q + 2 * i, &both, 2);
                }
            continue;
        }
#ifdef X86
        if (way == PANELS_AVX2) {
            quantize_wide_avx2(x, j->in, j->padded, j->levels, (int16_t *)to->q + r * j->padded, to->scale + r);
            to->wide[r] = (unsigned char)(j->levels == 2 && (wide_row_avx2(x, j->in) || to->scale[r] != to->scale[r]));
            continue;
        }
#endif
        int8_t *q = to->q + r * j->levels * j->padded;
        to->wide[r] = (unsigned char)j->quantize(x, j->in, j->padded, j->levels, q, to->scale + r, to->sums + r * j->levels);
        if (j->group)
            for (int64_t i = 0; i < j->levels * j->padded; i++) q[i] = (int8_t)(q[i] ^ -128);      /* unsigned */
    }
}

static float bias_of(const job *j, int64_t column) {
    return j->bias ? one_of(j->bias, j->dtype, column) : 0.0f;
}

/* What a thread keeps for a block of columns: their codes transposed, and unpacked before that; the scales of their groups. */
typedef struct { void *packed; int8_t *codes; float *by; int32_t *start; } block_memory;

static int take_block(const job *j, int way, int columns, block_memory *to) {
    const int64_t groups = j->group ? (j->in + j->group - 1) / j->group : 0;
    memset(to, 0, sizeof *to);
    if (way != BLOCKS) to->packed = aligned((size_t)j->padded * (way == PANELS_BFLOAT16 ? 64 : 32));
    if (j->bits < 8) to->codes = aligned((size_t)(columns * j->in));
    if (groups) to->by = aligned((size_t)(groups * columns) * sizeof(float));
    if (groups) to->start = aligned((size_t)(groups * columns) * sizeof(int32_t));
    return (way == BLOCKS || to->packed) && (j->bits == 8 || to->codes) && (!groups || (to->by && to->start));
}

static void give_back_block(block_memory *from) { free(from->packed); free(from->codes); free(from->by); free(from->start); }

/* The rows that are too wide for two levels, in floats, for the columns from `first` to `last`; 0 if memory ran out. */
static int wide_rows(const job *j, int64_t start, int64_t here, int64_t first, int64_t last, const scratch *from, float *y, float *line) {
    int64_t count = 0;
    for (int64_t r = 0; r < here; r++) count += from->wide[r];
    if (!count) return 1;
    float *x = aligned((size_t)(count * j->in) * sizeof(float));
    int64_t *which = aligned((size_t)count * sizeof(int64_t));
    int8_t *unpacked = j->bits < 8 ? aligned((size_t)j->in) : NULL;
    const int ready = x && which && (j->bits == 8 || unpacked);
    for (int64_t r = 0, i = 0; r < here && ready; r++)
        if (from->wide[r]) {
            memcpy(x + i * j->in, row_of(j, start + r, line), (size_t)j->in * sizeof(float));
            which[i++] = r;
        }
    for (int64_t n = first; n < last && ready; n++) {
        const int8_t *codes = j->codes + n * j->bytes;
        if (unpacked) { unpack(codes, j->in, j->bits, unpacked, j->level); codes = unpacked; }
        for (int64_t i = 0; i < count; i += TOGETHER) {
            const int m = count - i < TOGETHER ? (int)(count - i) : TOGETHER;
            float values[TOGETHER];
            dots(x + i * j->in, j->in, m, codes, j->in, j->group ? j->group : j->in, j->scale + n * j->scale_step, values, j->level);
            for (int k = 0; k < m; k++) y[which[i + k] * j->out + n] = values[k] + bias_of(j, n);
        }
    }
    free(x);
    free(which);
    free(unpacked);
    return ready;
}

/* Results of `here` rows from `start`, for blocks of columns from `first` to `last`, into y [here, out]; 0 if memory ran out. */
static int multiply(const job *j, int64_t start, int64_t here, int64_t first, int64_t last, int way, const scratch *from, float *y,
                    float *line) {
    const int levels = j->levels, columns = columns_of[way];
    block_memory own;
    if (!take_block(j, way, columns, &own)) { give_back_block(&own); return 0; }
    for (int64_t b = first; b < last; b++) {
        const int64_t n = b * columns;
        const int width = j->out - n < columns ? (int)(j->out - n) : columns;
        float by[32], plus[32];
        int32_t minus[32];                             /* what the zero point adds to the sums */
        const int8_t *w[32];
        for (int i = 0; i < columns; i++) {            /* beyond the last column, the last one again */
            const int64_t column = n + (i < width ? i : width - 1);
            const float *scale = j->scale + column * j->scale_step;
            by[i] = way == PANELS_BFLOAT16 && j->group ? 1.0f : *scale;
            minus[i] = j->fixed ? *j->zero * j->column_sums[column] : 0;
            plus[i] = bias_of(j, column);
            w[i] = j->bits < 8 ? own.codes + i * j->in : j->codes + column * j->in;
            if (j->bits < 8) unpack(j->codes + column * j->bytes, j->in, j->bits, own.codes + i * j->in, j->level);
            if (j->group)
                for (int64_t g = 0; g * j->group < j->in; g++) own.by[g * columns + i] = scale[g];
        }
#ifdef X86
        const char *next = j->bits < 8 ? own.packed : (const char *)(j->codes + (n + columns) * j->bytes);
        if (way == PANELS_VNNI && j->group) {
            transpose_groups_vnni(w[0], j->in, j->group, width, own.packed, own.start);
            grouped_columns_vnni(from->q, j->padded, j->in, here, j->group, next, own.packed, own.start, from->scale, own.by,
                                 plus, y + n, j->out, width);
            continue;
        }
        if (way == PANELS_VNNI) {
            transpose_vnni(w[0], j->in, width, own.packed);
            columns_vnni(from->q, j->padded, j->in, here, levels, next, own.packed, from->sums, from->scale, minus, by, plus, y + n, j->out, width);
            continue;
        }
#ifdef TARGET_BFLOAT16
        if (way == PANELS_BFLOAT16) {
            transpose_bfloat16(w[0], j->in, width, j->group, own.by, own.packed);
            columns_bfloat16((const char *)from->q, j->padded, j->in, here, next, own.packed, by, plus, y + n, j->out, width);
            continue;
        }
#endif
        if (way == PANELS_AVX2) {
            transpose_avx2(w[0], j->in, j->padded, width, own.packed);
            if (j->group) grouped_columns_avx2((const int16_t *)from->q, j->padded, j->in, here, j->group, own.packed, from->scale, own.by, plus, y + n,
                                               j->out, width);
            else columns_avx2((const int16_t *)from->q, j->padded, here, levels, own.packed, from->scale, minus, by, plus, y + n, j->out, width);
            continue;
        }
#endif
        const int together = MR / levels;              /* rows of x, whose levels are neighbouring rows of q */
        for (int64_t r = 0; r < here; r += together) {
            const int m = here - r < together ? (int)(here - r) : together;
            int32_t total[MR][NR];
            j->block(from->q + r * levels * j->padded, j->padded, m * levels, w, width, j->in, from->sums + r * levels, total);
            for (int i = 0; i < m; i++) {
                float value[NR];
                for (int c = 0; c < NR; c++) {
                    value[c] = levels == 2 ? 128.0f * (float)total[2 * i][c] + (float)total[2 * i + 1][c]
                                           : (float)(total[i][c] - minus[c]);
                    value[c] = value[c] * from->scale[r + i] * by[c] + plus[c];
                }
                memcpy(y + (r + i) * j->out + n, value, (size_t)width * sizeof(float));
            }
        }
    }
    const int done = wide_rows(j, start, here, first * columns, last * columns < j->out ? last * columns : j->out, from, y, line);
    give_back_block(&own);
    return done;
}

/* Rows `start` to `start + here`, of which this thread does part `part` of `parts`: everything of them where it is the only one. */
static int one_chunk(const job *j, int64_t start, int64_t here, const scratch *with, int part, int parts) {
    float *line = with->lines + part * (int64_t)(round_up((size_t)j->in * sizeof(float)) / sizeof(float));
    const int way = way_of(j);
    const int64_t blocks = (j->out + columns_of[way] - 1) / columns_of[way];
    float *y = j->dtype == FLOAT32 ? (float *)j->y + start * j->out : with->y;
    quantize_rows(j, start, share(here, part, parts), share(here, part + 1, parts), way, with, line);
    if (parts > 1) {
        #pragma omp barrier
    }
    const int done = multiply(j, start, here, share(blocks, part, parts), share(blocks, part + 1, parts), way, with, y, line);
    if (parts > 1) {
        #pragma omp barrier
    }
    if (j->dtype != FLOAT32) {
        const int64_t from = share(here * j->out, part, parts), to = share(here * j->out, part + 1, parts);
        narrow(y + from, to - from, j->dtype, j->y + (start * j->out + from) * (int64_t)size_of(j->dtype), j->level);
        if (parts > 1) {
            #pragma omp barrier
        }
    }
    return done;
}

static int many_chunks(const job *j, int64_t chunks, int threads) {    /* each thread takes chunks of its own */
    int failed = 0;
    #pragma omp parallel num_threads(threads) reduction(|| : failed)
    {
        scratch own;
        const int ready = take(j, j->chunk, 1, &own);
        failed = !ready;
        #pragma omp for schedule(static)
        for (int64_t c = 0; c < chunks; c++) {
            const int64_t start = c * j->chunk, here = j->rows - start < j->chunk ? j->rows - start : j->chunk;
            if (ready && !one_chunk(j, start, here, &own, 0, 1)) failed = 1;
        }
        if (ready) free(own.memory);
    }
    return !failed;
}

static int few_chunks(const job *j, const scratch *shared, int part, int parts) {
    int done = 1;
    for (int64_t start = 0; start < j->rows; start += j->chunk)
        if (!one_chunk(j, start, j->rows - start < j->chunk ? j->rows - start : j->chunk, shared, part, parts)) done = 0;
    return done;
}

/* Can integers multiply codes with such groups here, for many rows? (The float kernel of groups.c always can.) */
int inro_has_panels(int level, int64_t bits, int64_t group) {
    return level >= AVX2 && (bits < 8 || group) && group % 4 == 0 && group <= SAFE;
}

/* y[rows, out] = x[rows, in] @ (codes * scale).T + bias; rows of x are `stride` numbers apart, the rest is contiguous.
   Codes of less than eight bits, and scales for each `group` of columns (0: one for the row), as in groups.c, where
   `inro_has_panels`.
   `dtype` is that of x, bias and y. `level` is PORTABLE, AVX2 or VNNI, or -1 for the best that this CPU has.
   `fixed` (NULL: row by row) and `zero` are the scale and zero point of x, `column_sums` [out] the codes of each column added up.
   Returns 0, or -1 where memory ran out. Every result is computed the same way whatever the number of threads. */
int inro_linear(const void *x, int64_t rows, int64_t in, int64_t stride, const void *codes, int64_t out, int bits,
                int64_t group, const float *scale, int64_t scale_step, const void *bias, void *y, int dtype, int levels, int threads, int level, const float *fixed,
                const int32_t *zero, const int32_t *column_sums) {
    if (rows == 0 || out == 0) return 0;
    const int64_t blocks = (in + STEP - 1) / STEP + (in == 0);
    /* rows of q a power of two apart would all want the same lines of the first-level cache */
    const int64_t padded = (blocks + (blocks % 16 == 0)) * STEP;
    job j = {x, bias, scale, codes, y, rows, in, stride, out, scale_step, padded, CHUNK_BYTES / padded / 24 * 12, group, bytes_of_row(in, bits),
             levels, level < 0 ? inro_level() : level, dtype, bits, block_portable, quantize_row, quantize_fixed_portable, fixed, zero, column_sums};
#ifdef X86
    if (j.level >= AVX2) { j.block = block_avx2; j.quantize = quantize_row_avx2; j.quantize_fixed = quantize_fixed_avx2; }
    if (j.level >= VNNI) { j.block = block_vnni; j.quantize = quantize_row_vnni; j.quantize_fixed = quantize_fixed_vnni; }
#endif
    if (j.chunk < 96) j.chunk = 96;
    if (j.chunk > 1008) j.chunk = 1008;
    threads = inro_threads(threads, (double)rows * in * out * levels);
    int64_t chunks = (rows + j.chunk - 1) / j.chunk;
    /* Rows of its own need no other thread's integers, and all of the weights transposed by each. */
    if (threads > 1 && (chunks >= 2 * threads || (rows >= out && rows >= MANY * threads))) {
        chunks = (chunks + threads - 1) / threads * threads;           /* as many for each */
        j.chunk = ((rows + chunks - 1) / chunks + 3) / 4 * 4;
        return many_chunks(&j, (rows + j.chunk - 1) / j.chunk, threads) ? 0 : -1;
    }
    scratch shared;                                    /* few rows: the threads share them and split the columns */
    if (!take(&j, rows < j.chunk ? rows : j.chunk, threads, &shared)) return -1;
    int failed = 0;
    if (threads == 1) failed = !few_chunks(&j, &shared, 0, 1);
    else {
        #pragma omp parallel num_threads(threads) reduction(|| : failed)
        {
            int part = 0, parts = 1;
#ifdef _OPENMP
            part = omp_get_thread_num();
            parts = omp_get_num_threads();
#endif
            failed = !few_chunks(&j, &shared, part, parts);
        }
    }
    free(shared.memory);
    return failed ? -1 : 0;
}
