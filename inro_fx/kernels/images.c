/* Images of a convolution as integers: pixel by pixel, the channels side by side, in a frame of zeros. */

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-trapping-math", "no-math-errno")
#endif

#include "convolution.h"

#include <math.h>

#define LARGEST 3.402823466e38f                       /* finite float; infinity and NaN are not <= it */

int64_t pixels_of(const int64_t size[3]) { return size[0] * size[1] * size[2]; }

/* ---- how large the numbers of a sample are ---- */

enum { BLOCK = 4096 };                                 /* numbers whose sum float32 holds well */

__attribute__((always_inline))
static inline int range_loop(const float *x, int64_t n, float *largest, double *total, int64_t *nonzero) {
    float top = 0.0f;
    int finite = 1;
    for (int64_t from = 0; from < n; from += BLOCK) {
        const int64_t to = n - from < BLOCK ? n : from + BLOCK;
        float high = 0.0f, sum[16] = {0};
        int32_t bad = 0, count = 0;
        int64_t i = from;
        for (; i + 16 <= to; i += 16)
            for (int j = 0; j < 16; j++) {
                const float a = fabsf(x[i + j]);
                high = a > high ? a : high;
                bad += !(a <= LARGEST);
                count += a > 0.0f;
                sum[j] += a;
            }
        for (; i < to; i++) {
            const float a = fabsf(x[i]);
            high = a > high ? a : high;
            bad += !(a <= LARGEST);
            count += a > 0.0f;
            sum[0] += a;
        }
        top = high > top ? high : top;
        finite &= !bad;
        for (int j = 0; j < 16; j++) *total += sum[j];
        *nonzero += count;
    }
    *largest = top;
    return finite;
}

#ifdef X86
__attribute__((target("avx2,fma")))
static int range_avx2(const float *x, int64_t n, float *largest, double *total, int64_t *nonzero) {
    return range_loop(x, n, largest, total, nonzero);
}
__attribute__((target(TARGET_VNNI)))
static int range_vnni(const float *x, int64_t n, float *largest, double *total, int64_t *nonzero) {
    __m512 top[4], sums[4];
    __mmask16 bad = 0;
    for (int j = 0; j < 4; j++) top[j] = _mm512_setzero_ps();
    for (int64_t from = 0; from < n; from += BLOCK) {
        const int64_t to = n - from < BLOCK ? n : from + BLOCK;
        __m512i count = _mm512_setzero_si512();
        for (int j = 0; j < 4; j++) sums[j] = _mm512_setzero_ps();
        for (int64_t i = from; i < to; i += 64)
            for (int j = 0; j < 4; j++) {
                const __m512 a = _mm512_abs_ps(_mm512_maskz_loadu_ps(lanes_from(i + 16 * j, to), x + i + 16 * j));
                top[j] = _mm512_max_ps(top[j], a);
                bad |= _mm512_cmp_ps_mask(a, _mm512_set1_ps(LARGEST), _CMP_NLE_UQ);
                sums[j] = _mm512_add_ps(sums[j], a);
                count = _mm512_mask_sub_epi32(count, _mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_GT_OQ), count, _mm512_set1_epi32(-1));
            }
        *total += _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3])));
        *nonzero += _mm512_reduce_add_epi32(count);
    }
    *largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(top[0], top[1]), _mm512_max_ps(top[2], top[3])));
    return !bad;
}
#endif

/* The largest |x| of sample n; 1 where integers do not fit it: it is not finite, of extreme size, or (two levels) a few numbers of it are
   so large that the others would lose their digits. */
int inro_range(const convolution *l, int64_t n, float *largest) {
    const int level = l->level < 0 ? inro_level() : l->level;
    const int64_t count = l->in * pixels_of(l->size);
    const float *x = (const float *)l->x + n * count;
    double total = 0.0;
    int64_t nonzero = 0;
    int finite;
#ifdef X86
    if (level >= VNNI) finite = range_vnni(x, count, largest, &total, &nonzero);
    else if (level >= AVX2) finite = range_avx2(x, count, largest, &total, &nonzero);
    else
#endif
    finite = range_loop(x, count, largest, &total, &nonzero);
    (void)level;
    if (!finite || lift_by(*largest) != 1.0f) return 1;
    return l->levels == 2 && nonzero > 1 && *largest * (double)(nonzero - 1) > OUTLIER * (total - *largest);
}

/* ---- numbers to integers ---- */

/* How x becomes q = clamp(round(x * by)) + plus; two levels: q = 128 * high + low. */
typedef struct { float by, low, high; int32_t plus; int levels, wide; } rounding;

__attribute__((always_inline))
static inline int32_t rounded(float x, const rounding r) {
    float v = rintf(x * r.by);
    v = v < r.high ? v : r.high;                       /* NaN too: it cannot become an integer */
    v = v > r.low ? v : r.low;
    return (int32_t)v + r.plus;
}

__attribute__((always_inline))
static inline int finite_loop(const float *x, int64_t n) {
    int32_t bad = 0;
    for (int64_t i = 0; i < n; i++) bad |= !(fabsf(x[i]) <= LARGEST);
    return !bad;
}

/* Numbers side by side to codes side by side, `plane` bytes apart where there are two levels; 1 where one is not finite. */
__attribute__((always_inline))
static inline int line_loop(const float *x, int64_t n, const rounding r, char *to, int64_t plane) {
    if (r.wide) {
        int16_t *q = (int16_t *)to;
        for (int64_t i = 0; i < n; i++) q[i] = (int16_t)rounded(x[i], r);
    } else if (r.levels == 1) {
        uint8_t *q = (uint8_t *)to;
        for (int64_t i = 0; i < n; i++) q[i] = (uint8_t)rounded(x[i], r);
    } else {
        uint8_t *q = (uint8_t *)to, *p = (uint8_t *)to + plane;
        for (int64_t i = 0; i < n; i++) {
            const int32_t whole = rounded(x[i], r), high = (whole + 64) >> 7;
            q[i] = (uint8_t)(high + 128);
            p[i] = (uint8_t)(whole - high * 128 + 128);
        }
    }
    return !finite_loop(x, n);
}

/* The pixels of a row, whose channels lie `apart` floats from each other, to pixels of `channels` codes. */
__attribute__((always_inline))
static inline int planes_loop(const float *x, int64_t apart, int64_t channels, int64_t n, const rounding r, char *to, int64_t plane) {
    enum { SOME = 64 };
    char line[2 * SOME * 2];
    const int size = r.wide ? 2 : 1;
    int bad = 0;
    for (int64_t from = 0; from < n; from += SOME)
        for (int64_t c = 0; c < channels; c++) {
            const int64_t here = n - from < SOME ? n - from : SOME;
            bad |= line_loop(x + c * apart + from, here, r, line, SOME);
            char *q = to + (from * channels + c) * size;
            for (int64_t i = 0; i < here; i++) {
                memcpy(q + i * channels * size, line + i * size, (size_t)size);
                if (r.levels == 2 && !r.wide) q[i * channels + plane] = line[SOME + i];
            }
        }
    return bad;
}

#ifdef X86
__attribute__((target("avx2,fma")))
static int line_avx2(const float *x, int64_t n, const rounding r, char *to, int64_t plane) { return line_loop(x, n, r, to, plane); }
__attribute__((target("avx2,fma")))
static int planes_avx2(const float *x, int64_t apart, int64_t channels, int64_t n, const rounding r, char *to, int64_t plane) {
    return planes_loop(x, apart, channels, n, r, to, plane);
}

__attribute__((target(TARGET_VNNI), always_inline))
static inline __m512i rounded_vnni(__m512 x, const rounding r, __mmask16 *bad) {
    *bad |= _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(LARGEST), _CMP_NLE_UQ);
    const __m512 v = _mm512_min_ps(_mm512_mul_ps(x, _mm512_set1_ps(r.by)), _mm512_set1_ps(r.high));
    return _mm512_cvtps_epi32(_mm512_max_ps(v, _mm512_set1_ps(r.low)));
}

/* Of sixteen integers, those in `some`, as bytes; two levels to two planes. */
__attribute__((target(TARGET_VNNI), always_inline))
static inline void put_vnni(__m512i whole, int some, const rounding r, char *to, int64_t plane) {
    const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(64)), 7), middle = _mm512_set1_epi32(128);
    const __m512i low = _mm512_sub_epi32(whole, _mm512_slli_epi32(high, 7));
    const __m128i first = _mm512_cvtepi32_epi8(_mm512_add_epi32(r.levels == 1 ? whole : high, r.levels == 1 ? _mm512_set1_epi32(r.plus) : middle));
    const __m128i second = _mm512_cvtepi32_epi8(_mm512_add_epi32(low, middle));
    if (some >= 16) {                                  /* stores under a mask are slow */
        _mm_storeu_si128((__m128i *)to, first);
        if (r.levels == 2) _mm_storeu_si128((__m128i *)(to + plane), second);
        return;
    }
    char bytes[16];
    _mm_storeu_si128((__m128i *)bytes, first);
    memcpy(to, bytes, (size_t)some);
    _mm_storeu_si128((__m128i *)bytes, second);
    if (r.levels == 2) memcpy(to + plane, bytes, (size_t)some);
}

__attribute__((target(TARGET_VNNI)))
static int line_vnni(const float *x, int64_t n, const rounding r, char *to, int64_t plane) {
    __mmask16 bad = 0;
    for (int64_t i = 0; i < n; i += 16)
        put_vnni(rounded_vnni(_mm512_maskz_loadu_ps(lanes_from(i, n), x + i), r, &bad), n - i < 16 ? (int)(n - i) : 16, r, to + i, plane);
    return bad != 0;
}

/* Blocks of sixteen pixels of sixteen channels are transposed in registers. */
__attribute__((target(TARGET_VNNI)))
static int planes_vnni(const float *x, int64_t apart, int64_t channels, int64_t n, const rounding r, char *to, int64_t plane) {
    __mmask16 bad = 0;
    for (int64_t c = 0; c < channels; c += 16)
        for (int64_t i = 0; i < n; i += 16) {
            const __mmask16 here = lanes_from(i, n);
            const int width = channels - c < 16 ? (int)(channels - c) : 16, pixels = n - i < 16 ? (int)(n - i) : 16;
            __m512i block[16];
            for (int j = 0; j < 16; j++)
                block[j] = j < width ? rounded_vnni(_mm512_maskz_loadu_ps(here, x + (c + j) * apart + i), r, &bad) : _mm512_setzero_si512();
            transpose_words(block);
            for (int j = 0; j < pixels; j++) put_vnni(block[j], width, r, to + (i + j) * channels + c, plane);
        }
    return bad != 0;
}
#endif

static int line(const float *x, int64_t n, const rounding r, char *to, int64_t plane, int level) {
#ifdef X86
    if (level >= VNNI) return line_vnni(x, n, r, to, plane);
    if (level >= AVX2) return line_avx2(x, n, r, to, plane);
#endif
    (void)level;
    return line_loop(x, n, r, to, plane);
}

static int planes(const float *x, int64_t apart, int64_t channels, int64_t n, const rounding r, char *to, int64_t plane, int level) {
#ifdef X86
    if (level >= VNNI) return planes_vnni(x, apart, channels, n, r, to, plane);
    if (level >= AVX2) return planes_avx2(x, apart, channels, n, r, to, plane);
#endif
    (void)level;
    return planes_loop(x, apart, channels, n, r, to, plane);
}

/* ---- frames ---- */

static void zeros(char *to, int64_t count, const frame *f) {
    if (!f->wide) { memset(to, f->zero, (size_t)count); return; }
    int16_t *q = (int16_t *)to;
    for (int64_t i = 0; i < count; i++) q[i] = (int16_t)f->zero;
}

/* Rows `first` to `last` of the frame of sample n, multiplied by `by` and rounded; 1 where x is not finite. */
int fill_frame(const convolution *l, int64_t n, float by, const frame *to, int64_t first, int64_t last, int level) {
    const int64_t c = l->in, w = l->size[2], size = to->wide ? 2 : 1, row = to->size[2] * c * size, before = to->before[2] * c;
    const float z = l->fixed ? (float)l->input.zero : 0.0f, most = l->levels == 2 ? 16256.0f : 127.0f;
    const rounding r = {by, l->fixed ? 1.0f - z : -most, l->fixed ? 255.0f - z : most, l->fixed ? l->input.zero : to->wide || l->levels == 2 ? 0 : 128,
                        l->levels, to->wide};
    int bad = 0;
    for (int64_t i = first; i < last; i++) {
        const int64_t d = i / to->size[1] - to->before[0], h = i % to->size[1] - to->before[1];
        for (int level_of_x = 0; level_of_x < (to->wide ? 1 : l->levels); level_of_x++) {
            char *at = to->data + level_of_x * to->plane + i * row;
            if (d < 0 || d >= l->size[0] || h < 0 || h >= l->size[1]) { zeros(at, to->size[2] * c, to); continue; }
            zeros(at, before, to);
            zeros(at + (before + w * c) * size, to->size[2] * c - before - w * c, to);
        }
        if (d < 0 || d >= l->size[0] || h < 0 || h >= l->size[1]) continue;
        char *q = to->data + i * row + before * size;
        const int64_t pixel = (d * l->size[1] + h) * w, all = pixels_of(l->size);
        if (l->x_form == CODES) {
            const uint8_t *x = (const uint8_t *)l->x + (n * all + pixel) * c;
            if (!to->wide) memcpy(q, x, (size_t)(w * c));
            else for (int64_t k = 0; k < w * c; k++) ((int16_t *)q)[k] = x[k];
        } else if (l->x_form == CHANNELS_LAST) {
            const float *x = (const float *)l->x + (n * all + pixel) * c;
            bad |= line(x, w * c, r, q, to->plane, level);
        } else {
            const float *x = (const float *)l->x + n * all * c + pixel;
            bad |= planes(x, all, c, w, r, q, to->plane, level);
        }
    }
    return bad;
}
