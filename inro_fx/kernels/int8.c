/* Linear layers with int8 weights on a CPU: activations become integers row by row, products are exact in int32.

   x [rows, in] float32, codes [out, in] int8, scale [out] (or one), y [rows, out] float32:

       one level     x = s * q,               q in -127..127        s = max|x| / 127
       two levels    x = s * (128 * q1 + q0), q1 in -127..127, q0 in -64..63, s = max|x| / 16256

   One level is dynamic int8. Two levels hold 15 bits of each activation: as good as float activations beside int8 weights,
   and two integer products cost less than one of floats where the CPU multiplies bytes (VNNI).

   Weights stay as they are stored. For few rows of x both operands run along `in`, and a block of 6 x 4 results keeps its sums
   in registers. For many rows VNNI takes 32 columns at a time, transposed into a scratch that stays in cache. No instruction here saturates: AVX2 multiplies |w| (as unsigned, at most 128) by x with the sign of w, so that
   a pair of products stays within 2 * 128 * 127 < 2^15; VNNI adds four products to an int32, with w + 128 as the unsigned side
   and 128 * sum(x) taken off at the end. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define X86 1
#endif

enum { PORTABLE = 0, AVX2 = 1, VNNI = 2 };
enum { STEP = 64, MR = 6, NR = 4, CHUNK = 192, MANY = 24 };
/* bytes of a step along `in`; block of results; rows of x at a time; rows of integers from which transposing pays */

static int in_child = 0;                              /* OpenMP's threads do not survive a fork: the child works alone */
static void after_fork(void) { in_child = 1; }

int inro_level(void) {
    static int level = -1;
    if (level < 0) {
#if defined(__unix__) || defined(__APPLE__)
        pthread_atfork(NULL, NULL, after_fork);
#endif
        int found = PORTABLE;
#ifdef X86
        __builtin_cpu_init();
        if (__builtin_cpu_supports("avx2")) found = AVX2;
        if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni")) found = VNNI;
#endif
        level = found;
    }
    return level;
}

/* ---- activations to integers ---- */

static void quantize_row(const float *x, int64_t n, int64_t padded, int levels, int8_t *q, float *scale, int32_t *sums) {
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
    if (!finite) return;
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
        if (!(inverse <= 3.402823466e38f)) inverse = 0.0f;
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
}

#ifdef X86
__attribute__((target("avx2,fma")))
static void quantize_row_avx2(const float *x, int64_t n, int64_t padded, int levels, int8_t *q, float *scale, int32_t *sums) {
    __m256 top = _mm256_setzero_ps(), clear_sign = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)), bad = _mm256_setzero_ps();
    __m256 limit = _mm256_set1_ps(3.402823466e38f);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 a = _mm256_and_ps(_mm256_loadu_ps(x + i), clear_sign);
        top = _mm256_max_ps(top, a);
        bad = _mm256_or_ps(bad, _mm256_cmp_ps(a, limit, _CMP_NLE_UQ));
    }
    float lanes[8], largest = 0.0f;
    _mm256_storeu_ps(lanes, top);
    for (int j = 0; j < 8; j++) largest = lanes[j] > largest ? lanes[j] : largest;
    int finite = !_mm256_movemask_ps(bad);
    for (; i < n; i++) {
        float a = fabsf(x[i]);
        largest = a > largest ? a : largest;
        finite &= a <= 3.402823466e38f;
    }
    float steps = levels == 2 ? 16256.0f : 127.0f, s = largest / steps;
    if (s < 1.17549435e-38f) s = 1.0f;
    float inverse = 1.0f / s;
    if (!finite || !(inverse <= 3.402823466e38f)) {    /* rare: the plain loop knows what to do */
        quantize_row(x, n, padded, levels, q, scale, sums);
        return;
    }
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
__attribute__((target("avx2"), always_inline))
static inline void step_avx2(const int8_t *x, int64_t padded, int m, __m256i w[NR], __m256i acc[2][NR]) {
    const __m256i ones = _mm256_set1_epi16(1);
    for (int i = 0; i < m; i++) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(x + i * padded));
        for (int j = 0; j < NR; j++) {
            __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w[j]), _mm256_sign_epi8(a, w[j]));
            acc[i][j] = _mm256_add_epi32(acc[i][j], _mm256_madd_epi16(pairs, ones));
        }
    }
}

__attribute__((target("avx2"), always_inline))
static inline void rows_avx2(const int8_t *x, int64_t padded, int m, const int8_t *const *w, int64_t k, int32_t out[MR][NR], int first) {
    __m256i acc[2][NR], wide[NR];
    for (int i = 0; i < m; i++)
        for (int j = 0; j < NR; j++) acc[i][j] = _mm256_setzero_si256();
    int64_t p = 0;
    for (; p + 32 <= k; p += 32) {
        for (int j = 0; j < NR; j++) wide[j] = _mm256_loadu_si256((const __m256i *)(w[j] + p));
        step_avx2(x + p, padded, m, wide, acc);
    }
    if (p < k) {
        int8_t tail[32];
        for (int j = 0; j < NR; j++) {
            memset(tail, 0, 32);
            memcpy(tail, w[j] + p, (size_t)(k - p));
            wide[j] = _mm256_loadu_si256((const __m256i *)tail);
        }
        step_avx2(x + p, padded, m, wide, acc);
    }
    for (int i = 0; i < m; i++) {
        __m256i s = _mm256_hadd_epi32(_mm256_hadd_epi32(acc[i][0], acc[i][1]), _mm256_hadd_epi32(acc[i][2], acc[i][3]));
        _mm_storeu_si128((__m128i *)out[first + i], _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1)));
    }
}

__attribute__((target("avx2")))
static void block_avx2(const int8_t *x, int64_t padded, int m, const int8_t *const *w, int n, int64_t k, const int32_t *sums,
                       int32_t out[MR][NR]) {
    (void)sums;
    (void)n;                                          /* w repeats its last row beyond n */
    int i = 0;
    for (; i + 2 <= m; i += 2) rows_avx2(x + i * padded, padded, 2, w, k, out, i);
    if (i < m) rows_avx2(x + i * padded, padded, 1, w, k, out, i);
}

#define TARGET_VNNI "avx512f,avx512bw,avx512vl,avx512vnni"

__attribute__((target(TARGET_VNNI), always_inline))
static inline void rows_vnni(const int8_t *x, int64_t padded, const int m, const int8_t *const *w, int64_t k, const int32_t *sums,
                             int32_t out[MR][NR]) {
    __m512i acc[MR][NR], flip = _mm512_set1_epi8((char)0x80);
    for (int i = 0; i < m; i++)
        for (int j = 0; j < NR; j++) acc[i][j] = _mm512_setzero_si512();
    int64_t p = 0;
    for (; p + STEP <= k; p += STEP) {
        __m512i wide[NR];
        for (int j = 0; j < NR; j++) wide[j] = _mm512_xor_si512(_mm512_loadu_si512(w[j] + p), flip);
        for (int i = 0; i < m; i++) {
            __m512i a = _mm512_loadu_si512(x + i * padded + p);
            for (int j = 0; j < NR; j++) acc[i][j] = _mm512_dpbusd_epi32(acc[i][j], wide[j], a);
        }
    }
    if (p < k) {
        __mmask64 some = (__mmask64)-1 >> (STEP - (k - p));
        __m512i wide[NR];
        for (int j = 0; j < NR; j++) wide[j] = _mm512_xor_si512(_mm512_maskz_loadu_epi8(some, w[j] + p), flip);
        for (int i = 0; i < m; i++) {
            __m512i a = _mm512_loadu_si512(x + i * padded + p);      /* zero beyond k */
            for (int j = 0; j < NR; j++) acc[i][j] = _mm512_dpbusd_epi32(acc[i][j], wide[j], a);
        }
    }
    for (int i = 0; i < m; i++) {
        __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(acc[i][0], acc[i][1]), _mm512_unpackhi_epi32(acc[i][0], acc[i][1]));
        __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(acc[i][2], acc[i][3]), _mm512_unpackhi_epi32(acc[i][2], acc[i][3]));
        __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
        __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
        __m128i four = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
        _mm_storeu_si128((__m128i *)out[i], _mm_sub_epi32(four, _mm_set1_epi32(128 * sums[i])));
    }
}

__attribute__((target(TARGET_VNNI)))
static void block_vnni(const int8_t *x, int64_t padded, int m, const int8_t *const *w, int n, int64_t k, const int32_t *sums,
                       int32_t out[MR][NR]) {
    (void)n;
    switch (m) {
        case 1: rows_vnni(x, padded, 1, w, k, sums, out); break;
        case 2: rows_vnni(x, padded, 2, w, k, sums, out); break;
        case 3: rows_vnni(x, padded, 3, w, k, sums, out); break;
        case 4: rows_vnni(x, padded, 4, w, k, sums, out); break;
        case 5: rows_vnni(x, padded, 5, w, k, sums, out); break;
        default: rows_vnni(x, padded, 6, w, k, sums, out);
    }
}

/* ---- many rows: 32 columns of weights, transposed to [in / 4][32][4] and made unsigned, against 12 rows of x ---- */

__attribute__((target(TARGET_VNNI)))
static void transpose_vnni(const int8_t *codes, int64_t in, int64_t padded, int width, uint8_t *packed) {
    const __m512i flip = _mm512_set1_epi8((char)0x80);
    for (int half = 0; half < 2; half++)
        for (int64_t p = 0; p < padded; p += STEP) {
            const int64_t left = in - p;
            const __mmask64 some = left >= STEP ? (__mmask64)-1 : left > 0 ? (__mmask64)-1 >> (STEP - left) : 0;
            __m512i a[16], b[16];
            for (int j = 0; j < 16; j++) {
                const int column = half * 16 + j;
                __m512i row = column < width ? _mm512_maskz_loadu_epi8(some, codes + column * in + p) : _mm512_setzero_si512();
                a[j] = _mm512_xor_si512(row, flip);
            }
            for (int j = 0; j < 16; j += 2) {          /* a transposition of 16 x 16 words of four bytes, in four rounds */
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
            for (int i = 0; i < 16; i++) _mm512_storeu_si512(packed + ((p / 4 + i) * 2 + half) * 64, a[i]);
        }
}

__attribute__((target(TARGET_VNNI), always_inline))
static inline void panel_vnni(const int8_t *x, int64_t padded, const int m, const int levels, const uint8_t *packed, const int32_t *sums,
                              const float *x_scale, const float *by, const float *plus, float *y, int64_t out, int width) {
    __m512i acc[12][2];
    for (int i = 0; i < m; i++) acc[i][0] = acc[i][1] = _mm512_setzero_si512();
    for (int64_t p = 0; p < padded / 4; p++) {
        const __m512i w0 = _mm512_loadu_si512(packed + p * 128), w1 = _mm512_loadu_si512(packed + p * 128 + 64);
        for (int i = 0; i < m; i++) {
            int32_t four;
            memcpy(&four, x + i * padded + p * 4, 4);
            const __m512i a = _mm512_set1_epi32(four);
            acc[i][0] = _mm512_dpbusd_epi32(acc[i][0], w0, a);
            acc[i][1] = _mm512_dpbusd_epi32(acc[i][1], w1, a);
        }
    }
    for (int h = 0; h < 2; h++) {
        const int columns = width - 16 * h;
        if (columns <= 0) break;
        const __mmask16 some = columns >= 16 ? 0xffff : (__mmask16)((1 << columns) - 1);
        const __m512 scale = _mm512_loadu_ps(by + 16 * h), bias = _mm512_loadu_ps(plus + 16 * h);
        for (int i = 0; i < m; i += levels) {
            __m512 value = _mm512_cvtepi32_ps(_mm512_sub_epi32(acc[i][h], _mm512_set1_epi32(128 * sums[i])));
            if (levels == 2) {
                __m512 low = _mm512_cvtepi32_ps(_mm512_sub_epi32(acc[i + 1][h], _mm512_set1_epi32(128 * sums[i + 1])));
                value = _mm512_add_ps(_mm512_mul_ps(value, _mm512_set1_ps(128.0f)), low);
            }
            value = _mm512_mul_ps(_mm512_mul_ps(value, _mm512_set1_ps(x_scale[i / levels])), scale);
            _mm512_mask_storeu_ps(y + (i / levels) * out + 16 * h, some, _mm512_add_ps(value, bias));
        }
    }
}

__attribute__((target(TARGET_VNNI)))
static void columns_vnni(const int8_t *q, int64_t padded, int64_t rows, int levels, const uint8_t *packed, const int32_t *sums,
                         const float *x_scale, const float *by, const float *plus, float *y, int64_t out, int width) {
    int64_t r = 0;                                    /* of q: a row of x is `levels` of them */
    const int64_t all = rows * levels;
#define PANEL(M) for (; r + M <= all; r += M) { \
        if (levels == 2) panel_vnni(q + r * padded, padded, M, 2, packed, sums + r, x_scale + r / 2, by, plus, y + r / 2 * out, out, width); \
        else panel_vnni(q + r * padded, padded, M, 1, packed, sums + r, x_scale + r, by, plus, y + r * out, out, width); }
    PANEL(12)
    PANEL(6)
    PANEL(2)
    for (; r < all; r++) panel_vnni(q + r * padded, padded, 1, 1, packed, sums + r, x_scale + r, by, plus, y + r * out, out, width);
#undef PANEL
}
#endif

typedef void (*block_function)(const int8_t *, int64_t, int, const int8_t *const *, int, int64_t, const int32_t *, int32_t[MR][NR]);
typedef void (*quantize_function)(const float *, int64_t, int64_t, int, int8_t *, float *, int32_t *);

static void *aligned(size_t size) {
    void *p = NULL;
    return posix_memalign(&p, 64, size ? size : 64) ? NULL : p;
}

/* y[rows, out] = x[rows, in] @ (codes * scale).T + bias; rows of x are `stride` floats apart, the rest is contiguous.
   `level` is PORTABLE, AVX2 or VNNI, or -1 for the best that this CPU has. Returns 0, or -1 where memory ran out. */
int inro_linear(const float *x, int64_t rows, int64_t in, int64_t stride, const int8_t *codes, int64_t out, const float *scale,
                int64_t scale_step, const float *bias, float *y, int levels, int threads, int level) {
    level = level < 0 ? inro_level() : level;
    block_function block = block_portable;
    quantize_function quantize = quantize_row;
#ifdef X86
    if (level >= AVX2) { block = block_avx2; quantize = quantize_row_avx2; }
    if (level >= VNNI) block = block_vnni;
#endif
    if (rows == 0 || out == 0) return 0;
    const int64_t padded = (in + STEP - 1) / STEP * STEP + (in == 0 ? STEP : 0);
    const int64_t chunk = rows < CHUNK ? rows : CHUNK;
    int8_t *q = aligned((size_t)(chunk * levels * padded));
    float *x_scale = aligned((size_t)chunk * sizeof(float));
    int32_t *sums = aligned((size_t)(chunk * levels) * sizeof(int32_t));
    if (!q || !x_scale || !sums) { free(q); free(x_scale); free(sums); return -1; }
    const double work = (double)rows * in * out * levels;
    if (in_child || work < 200000.0) threads = 1;
    const size_t packed_size = (size_t)padded * 32;
    int failed = 0;
    const int block_rows = MR / levels;                /* of x, whose levels are neighbouring rows of q */

    #pragma omp parallel num_threads(threads) if (threads > 1)
    for (int64_t start = 0; start < rows; start += chunk) {
        const int64_t here = rows - start < chunk ? rows - start : chunk;
        #pragma omp for schedule(static)
        for (int64_t r = 0; r < here; r++)
            quantize(x + (start + r) * stride, in, padded, levels, q + r * levels * padded, x_scale + r, sums + r * levels);
#ifdef X86
        if (level >= VNNI && here * levels >= MANY ) {
            uint8_t *packed = aligned(packed_size);
            #pragma omp for schedule(static)
            for (int64_t n = 0; n < out; n += 32) {
                const int width = out - n < 32 ? (int)(out - n) : 32;
                float by[32], plus[32];
                for (int j = 0; j < 32; j++) {
                    const int64_t column = n + (j < width ? j : 0);
                    by[j] = scale[column * scale_step];
                    plus[j] = bias ? bias[column] : 0.0f;
                }
                if (!packed) { failed = 1; continue; }
                transpose_vnni(codes + n * in, in, padded, width, packed);
                columns_vnni(q, padded, here, levels, packed, sums, x_scale, by, plus, y + start * out + n, out, width);
            }
            free(packed);
            continue;
        }
#endif
        #pragma omp for schedule(static)
        for (int64_t n = 0; n < out; n += NR) {
            const int width = out - n < NR ? (int)(out - n) : NR;
            const int8_t *w[NR];
            float by[NR], plus[NR];
            for (int j = 0; j < NR; j++) {
                const int64_t column = n + (j < width ? j : width - 1);
                w[j] = codes + column * in;
                by[j] = scale[column * scale_step];
                plus[j] = bias ? bias[column] : 0.0f;
            }
            for (int64_t r = 0; r < here; r += block_rows) {
                const int m = here - r < block_rows ? (int)(here - r) : block_rows;
                int32_t total[MR][NR];
                block(q + r * levels * padded, padded, m * levels, w, width, in, sums + r * levels, total);
                for (int i = 0; i < m; i++) {
                    const float s = x_scale[r + i];
                    float *to = y + (start + r + i) * out + n;
                    float value[NR];
                    for (int j = 0; j < NR; j++) {
                        value[j] = levels == 2 ? 128.0f * (float)total[2 * i][j] + (float)total[2 * i + 1][j] : (float)total[i][j];
                        value[j] = value[j] * s * by[j] + plus[j];
                    }
                    if (width == NR) memcpy(to, value, sizeof value);
                    else memcpy(to, value, (size_t)width * sizeof(float));
                }
            }
        }
    }
    free(q); free(x_scale); free(sums);
    return failed ? -1 : 0;
}
