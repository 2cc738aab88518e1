/* Many rows of bfloat16 activations, multiplied as they are: a code is a bfloat16, too. 32 columns of codes, transposed to
   [in / 2][32][2], against 12 rows of x. */

#include "linear.h"

#ifdef TARGET_BFLOAT16
/* With groups (of a multiple of four columns) the scales are applied here, and the products rounded. */
__attribute__((target(TARGET_BFLOAT16)))
static void pack(const panel *at) {
    const panel p = *at;
    const __m512i in_pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                              23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (int half = 0; half < 2; half++)
        for (int64_t k = 0; k < p.in; k += STEP) {
            __m512i words[16];
            transpose_sixteen(p.codes + half * 16 * p.in + k, p.in, p.in - k, p.width - half * 16, words);
            for (int i = 0; i < 16; i++) {
                __m512 code[4];
                const int64_t first = k + 4 * i < p.in ? k + 4 * i : p.in - 1;
                const __m512 scale = p.group ? _mm512_loadu_ps(p.by + first / p.group * 32 + half * 16) : _mm512_set1_ps(1.0f);
                for (int j = 0; j < 4; j++) {
                    const __m512i wide = _mm512_srai_epi32(_mm512_sllv_epi32(words[i], _mm512_set1_epi32(24 - 8 * j)), 24);
                    code[j] = _mm512_mul_ps(_mm512_cvtepi32_ps(wide), scale);
                }
                for (int j = 0; j < 4; j += 2)
                    _mm512_storeu_si512((char *)p.packed + ((k / 2 + 2 * i + j / 2) * 2 + half) * 64,
                                        _mm512_permutexvar_epi16(in_pairs, (__m512i)_mm512_cvtne2ps_pbh(code[j + 1], code[j])));
            }
        }
}

/* Sixteen results from column `first` on; scales of groups were applied before. */
__attribute__((target(TARGET_BFLOAT16), always_inline))
static inline void store(const panel p, int64_t r, __m512 sums, int first) {
    if (!p.group) sums = _mm512_mul_ps(sums, _mm512_loadu_ps(p.by + first));
    sums = _mm512_add_ps(sums, _mm512_loadu_ps(p.plus + first));
    _mm512_mask_storeu_ps(p.y + r * p.out + first, lanes_from(first, p.width), sums);
}

#define ZERO(i) __m512 a##i = _mm512_setzero_ps(), b##i = a##i;
#define MULTIPLY(i) { \
    int32_t two; \
    memcpy(&two, x + (i * padded + 2 * k) * 2, 4); \
    const __m512bh v = (__m512bh)_mm512_set1_epi32(two); \
    a##i = _mm512_dpbf16_ps(a##i, w0, v); b##i = _mm512_dpbf16_ps(b##i, w1, v); }
#define STORE(i) \
    store(p, r + i, a##i, 0); \
    if (p.width > 16) store(p, r + i, b##i, 16);
#define PANEL(M) \
__attribute__((target(TARGET_BFLOAT16))) \
static void panel##M(const panel p, int64_t r) { \
    const int64_t padded = p.padded, pairs = (p.in + 1) / 2; \
    const char *x = (const char *)p.q + r * padded * 2, *packed = p.packed, *next = r ? packed : p.next; \
    DO##M(ZERO) \
    for (int64_t k = 0; k < pairs; k++) { \
        const __m512bh w0 = (__m512bh)_mm512_load_si512(packed + k * 128); \
        const __m512bh w1 = (__m512bh)_mm512_load_si512(packed + k * 128 + 64); \
        _mm_prefetch(next + k * 64, _MM_HINT_T1); \
        DO##M(MULTIPLY) \
    } \
    DO##M(STORE) \
}
PANEL(12)
PANEL(8)
PANEL(4)
PANEL(2)
PANEL(1)

static void multiply(const panel *p) {
    int64_t r = 0;
    for (; r + 12 <= p->rows; r += 12) panel12(*p, r);
    for (; r + 8 <= p->rows; r += 8) panel8(*p, r);
    for (; r + 4 <= p->rows; r += 4) panel4(*p, r);
    for (; r + 2 <= p->rows; r += 2) panel2(*p, r);
    for (; r < p->rows; r++) panel1(*p, r);
}

const way panels_bfloat16 = {32, AS_IT_IS, 64, pack, multiply, NULL};
#endif
