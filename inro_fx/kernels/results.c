/* From the sums of a convolution to its results: scale and bias, what is added, the activation, and floats or codes. */

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-trapping-math", "no-math-errno")
#endif

#include "convolution.h"
#include "functions.h"

#include <math.h>

/* The activation of `n` numbers in place. Loops of their own: each is a row of vectors. */
__attribute__((always_inline))
static inline void activate(const convolution *l, float *v, int n) {
    const float low = l->low, high = l->high;
    switch (l->activation) {
        case CLAMP: for (int i = 0; i < n; i++) { const float a = v[i] < low ? low : v[i]; v[i] = a > high ? high : a; } break;
        case LEAKY: for (int i = 0; i < n; i++) v[i] = v[i] > 0.0f ? v[i] : v[i] * low; break;
        case HARDSIGMOID: for (int i = 0; i < n; i++) v[i] = clamped(v[i] + 3.0f, 0.0f, 6.0f) / 6.0f; break;
        case HARDSWISH: for (int i = 0; i < n; i++) v[i] = v[i] * clamped(v[i] + 3.0f, 0.0f, 6.0f) / 6.0f; break;
        case SIGMOID: for (int i = 0; i < n; i++) v[i] = sigmoid(v[i]); break;
        case SILU: for (int i = 0; i < n; i++) v[i] = v[i] * sigmoid(v[i]); break;
        case TANH: for (int i = 0; i < n; i++) v[i] = tangent(v[i]); break;
        case GELU: for (int i = 0; i < n; i++) v[i] = 0.5f * v[i] * (1.0f + error_function(v[i] * 0.707106781f)); break;
        default: break;
    }
}

__attribute__((always_inline))
static inline void finish_loop(const convolution *l, const piece *p, float *values, int columns) {
    const int64_t all = pixels_of(l->result);
    for (int i = 0; i < p->pixels; i++) {
        float *v = values + i * columns;
        const int32_t *high = p->high + i * columns, *low = p->low + i * columns;
        if (p->sums) for (int c = 0; c < columns; c++) v[c] = p->sums[i * columns + c];
        else if (p->low) for (int c = 0; c < columns; c++) v[c] = (float)high[c] * 128.0f + (float)low[c];
        else for (int c = 0; c < columns; c++) v[c] = (float)high[c];
        for (int c = 0; c < columns; c++) v[c] = v[c] * p->by[c] + p->plus[c];
        if (l->residual && l->r_form == CHANNELS_LAST) {
            const float *r = (const float *)l->residual + (p->n * all + p->first + i * p->step) * l->out + p->channel;
            for (int c = 0; c < p->width; c++) v[c] += r[c];
        } else if (l->residual) {
            const uint8_t *r = (const uint8_t *)l->residual + (p->n * all + p->first + i * p->step) * l->out + p->channel;
            uint8_t row[WIDEST];
            if (p->width < columns) { memset(row, 0, sizeof row); memcpy(row, r, (size_t)p->width); r = row; }
            for (int c = 0; c < columns; c++) v[c] += (float)((int32_t)r[c] - l->added.zero) * l->added.scale;
        }
        activate(l, v, columns);
    }
    if (l->y_form != CODES) return;
    const float by = 1.0f / l->output.scale, z = (float)l->output.zero;
    for (int i = 0; i < p->pixels; i++) {
        uint8_t q[WIDEST], *to = (uint8_t *)l->y + (p->n * all + p->first + i * p->step) * l->out + p->channel;
        const float *v = values + i * columns;
        for (int c = 0; c < columns; c++) {
            float a = rintf(v[c] * by) + z;
            a = a < 255.0f ? a : 255.0f;
            a = a > 1.0f ? a : 1.0f;
            q[c] = (uint8_t)(int32_t)a;
        }
        if (p->width == columns) memcpy(to, q, (size_t)columns);
        else memcpy(to, q, (size_t)p->width);
    }
}

#define FOR_COLUMNS(call) switch (p->columns) { case 16: call(16); break; case 32: call(32); break; default: call(64); }

#ifdef X86
#define CALL(columns) finish_loop(l, p, values, columns)
__attribute__((target("avx2,fma")))
static void finish_avx2(const convolution *l, const piece *p, float *values) { FOR_COLUMNS(CALL) }
__attribute__((target(TARGET_VNNI ",prefer-vector-width=512")))
static void activate_vnni(const convolution *l, float *values, int n) { activate(l, values, n); }

/* Sixteen numbers as codes, those in the mask. */
__attribute__((target(TARGET_VNNI), always_inline))
static inline void codes_vnni(__m512 v, __m512 by, __m512i z, uint8_t *to, __mmask16 some) {
    const __m512i whole = _mm512_cvtps_epi32(_mm512_min_ps(_mm512_mul_ps(v, by), _mm512_set1_ps(512.0f)));       /* beyond, too many for int32 */
    _mm_mask_storeu_epi8(to, some, _mm512_cvtusepi32_epi8(_mm512_max_epi32(_mm512_add_epi32(whole, z), _mm512_set1_epi32(1))));
}

/* Sixteen columns from `c` on of all pixels, into `values`, or as codes into y where those are asked for and nothing but a clamp comes
   between. `added` (what is added, or -1) and `two` (levels) are constants where it matters: the loop is short. */
__attribute__((target(TARGET_VNNI), always_inline))
static inline void finish_columns(const convolution *l, const piece *p, float *values, int c, int added, int two, int codes) {
    const int64_t at = (p->n * pixels_of(l->result) + p->first) * l->out + p->channel + c, apart = p->step * l->out;
    const __mmask16 some = lanes_from(c, p->width);
    const __m512 low = _mm512_set1_ps(l->activation == CLAMP ? l->low : -INFINITY), up = _mm512_set1_ps(128.0f);
    const __m512 high = _mm512_set1_ps(l->activation == CLAMP ? l->high : INFINITY), by = _mm512_set1_ps(1.0f / l->output.scale);
    const __m512i z = _mm512_set1_epi32(l->output.zero), less = _mm512_set1_epi32(l->added.zero);
    const __m512 times = _mm512_loadu_ps(p->by + c), plus = _mm512_loadu_ps(p->plus + c), r_scale = _mm512_set1_ps(l->added.scale);
    const int32_t *sums = p->high + c, *more = two ? p->low + c : NULL;
    const float *floats = (const float *)l->residual + at;
    const uint8_t *bytes = (const uint8_t *)l->residual + at;
    uint8_t *to = (uint8_t *)l->y + at;
    const int columns = p->columns, pixels = p->pixels;
    for (int i = 0; i < pixels; i++) {
        __m512 v = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums + i * columns));
        if (two) v = _mm512_add_ps(_mm512_mul_ps(v, up), _mm512_cvtepi32_ps(_mm512_loadu_si512(more + i * columns)));
        v = _mm512_add_ps(_mm512_mul_ps(v, times), plus);
        if (added == CHANNELS_LAST) v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(some, floats + i * apart));
        if (added == CODES) {
            const __m512i whole = _mm512_sub_epi32(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(some, bytes + i * apart)), less);
            v = _mm512_add_ps(v, _mm512_mul_ps(_mm512_cvtepi32_ps(whole), r_scale));
        }
        v = _mm512_min_ps(high, _mm512_max_ps(low, v));                /* of NaN, NaN */
        if (codes) codes_vnni(v, by, z, to + i * apart, some);
        else _mm512_store_ps(values + i * columns + c, v);
    }
}

__attribute__((target(TARGET_VNNI)))
static void finish_vnni(const convolution *l, const piece *p, float *values) {
    const int codes = l->y_form == CODES, clamps = l->activation <= CLAMP, added = l->residual ? l->r_form : -1;
    for (int c = 0; c < p->columns && c < p->width; c += 16) {
        if (codes && clamps && !p->low && added == -1) finish_columns(l, p, values, c, -1, 0, 1);
        else if (codes && clamps && !p->low && added == CODES) finish_columns(l, p, values, c, CODES, 0, 1);
        else finish_columns(l, p, values, c, added, p->low != NULL, codes && clamps);
    }
    if (clamps) return;
    const int64_t at = (p->n * pixels_of(l->result) + p->first) * l->out + p->channel, apart = p->step * l->out;
    const __m512 by = _mm512_set1_ps(1.0f / l->output.scale);
    activate_vnni(l, values, p->pixels * p->columns);
    for (int i = 0; i < p->pixels && codes; i++)
        for (int c = 0; c < p->width; c += 16)
            codes_vnni(_mm512_load_ps(values + i * p->columns + c), by, _mm512_set1_epi32(l->output.zero), (uint8_t *)l->y + at + i * apart + c,
                       lanes_from(c, p->width));
}

/* Sixteen pixels of sixteen channels at once, to planes. */
__attribute__((target(TARGET_VNNI)))
static void scatter_vnni(const piece *p, const float *values, float *to, int64_t apart) {
    for (int c = 0; c < p->width; c += 16)
        for (int i = 0; i < p->pixels; i += 16) {
            const int rows = p->pixels - i < 16 ? p->pixels - i : 16, width = p->width - c < 16 ? p->width - c : 16;
            __m512i block[16];
            for (int j = 0; j < 16; j++)
                block[j] = j < rows ? _mm512_loadu_si512(values + (i + j) * p->columns + c) : _mm512_setzero_si512();
            transpose_words(block);
            for (int j = 0; j < width; j++) _mm512_mask_storeu_epi32(to + (c + j) * apart + i, lanes_from(i, p->pixels), block[j]);
        }
}
#endif

static void scatter(const convolution *l, const piece *p, const float *values, int level) {
    const int64_t all = pixels_of(l->result);
    if (l->y_form == CHANNELS_LAST) {
        for (int i = 0; i < p->pixels; i++)
            memcpy((float *)l->y + (p->n * all + p->first + i * p->step) * l->out + p->channel, values + i * p->columns,
                   (size_t)p->width * sizeof(float));
        return;
    }
    float *to = (float *)l->y + (p->n * l->out + p->channel) * all + p->first;
#ifdef X86
    if (level >= VNNI && p->step == 1) { scatter_vnni(p, values, to, all); return; }
#endif
    (void)level;
    for (int c = 0; c < p->width; c++)
        for (int i = 0; i < p->pixels; i++) to[c * all + i * p->step] = values[i * p->columns + c];
}

void finish(const convolution *l, const piece *p, int level) {
    _Alignas(64) float values[PIECE * WIDEST];
#ifdef X86
    if (level >= VNNI) finish_vnni(l, p, values);
    else if (level >= AVX2) finish_avx2(l, p, values);
    else
#endif
    FOR_COLUMNS(CALL)
    if (l->y_form != CODES) scatter(l, p, values, level);
}
