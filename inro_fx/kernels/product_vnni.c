/* Products of int8 on AVX-512 VNNI, which adds four products of an unsigned and a signed byte to an int32, without saturation.
   One side is made unsigned by adding 128, and 128 times the sum of the other is taken off. */

#include "linear.h"

#ifdef X86
/* ---- few rows: both operands run along `in`, w + 128 is the unsigned one ---- */

__attribute__((target(TARGET_VNNI), always_inline))
static inline void add_up(__m512i a, __m512i b, __m512i c, __m512i d, int32_t sum, int32_t *out) {
    __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    _mm_storeu_si128((__m128i *)out, _mm_sub_epi32(four, _mm_set1_epi32(128 * sum)));
}

#define ZERO4(i) __m512i d##i##0 = _mm512_setzero_si512(), d##i##1 = d##i##0, d##i##2 = d##i##0, d##i##3 = d##i##0;
#define MULTIPLY4(i) { \
    const __m512i v = _mm512_loadu_si512(x + i * padded + p); \
    d##i##0 = _mm512_dpbusd_epi32(d##i##0, w0, v); d##i##1 = _mm512_dpbusd_epi32(d##i##1, w1, v); \
    d##i##2 = _mm512_dpbusd_epi32(d##i##2, w2, v); d##i##3 = _mm512_dpbusd_epi32(d##i##3, w3, v); }
#define ADD_UP(i) add_up(d##i##0, d##i##1, d##i##2, d##i##3, sums[i], out[i]);
#define ROWS(M) \
__attribute__((target(TARGET_VNNI))) \
static void rows##M(const int8_t *x, int64_t padded, const int8_t *const *w, int64_t k, const int32_t *sums, \
                    int32_t out[MR][NR]) { \
    const __m512i flip = _mm512_set1_epi8((char)0x80); \
    DO##M(ZERO4) \
    for (int64_t p = 0; p < k; p += STEP) { \
        NEXT(0) NEXT(1) NEXT(2) NEXT(3) \
        const __mmask64 some = k - p >= STEP ? (__mmask64)-1 : (__mmask64)-1 >> (STEP - (k - p)); \
        const __m512i w0 = _mm512_xor_si512(_mm512_maskz_loadu_epi8(some, w[0] + p), flip); \
        const __m512i w1 = _mm512_xor_si512(_mm512_maskz_loadu_epi8(some, w[1] + p), flip); \
        const __m512i w2 = _mm512_xor_si512(_mm512_maskz_loadu_epi8(some, w[2] + p), flip); \
        const __m512i w3 = _mm512_xor_si512(_mm512_maskz_loadu_epi8(some, w[3] + p), flip); \
        DO##M(MULTIPLY4) \
    } \
    DO##M(ADD_UP) \
}
ROWS(1)
ROWS(2)
ROWS(3)
ROWS(4)
ROWS(5)
ROWS(6)

__attribute__((target(TARGET_VNNI)))
static void block(const int8_t *x, int64_t padded, int m, const int8_t *const *w, int64_t k, const int32_t *sums,
                  int32_t out[MR][NR]) {
    switch (m) {
        case 1: rows1(x, padded, w, k, sums, out); break;
        case 2: rows2(x, padded, w, k, sums, out); break;
        case 3: rows3(x, padded, w, k, sums, out); break;
        case 4: rows4(x, padded, w, k, sums, out); break;
        case 5: rows5(x, padded, w, k, sums, out); break;
        default: rows6(x, padded, w, k, sums, out);
    }
}

static void multiply_few(const panel *p) { multiply_blocks(p, block); }

const way blocks_vnni = {NR, BYTES, 0, NULL, multiply_few, NULL};

/* ---- many rows: 32 columns of codes, transposed to [in / 4][32][4], against 12 rows of q ---- */

__attribute__((target(TARGET_VNNI), always_inline))
static inline void transpose(const panel p, __m512i flip) {
    for (int half = 0; half < 2; half++)
        for (int64_t k = 0; k < p.in; k += STEP) {
            __m512i words[16];
            transpose_sixteen(p.codes + half * 16 * p.in + k, p.in, p.in - k, p.width - half * 16, words);
            for (int i = 0; i < 16; i++)
                _mm512_storeu_si512((char *)p.packed + ((k / 4 + i) * 2 + half) * 64, _mm512_xor_si512(words[i], flip));
        }
}

__attribute__((target(TARGET_VNNI)))
static void pack(const panel *p) { transpose(*p, _mm512_set1_epi8((char)0x80)); }             /* w + 128 is the unsigned side */

/* Sixteen results from column `first` on, of row `r` of x. */
__attribute__((target(TARGET_VNNI), always_inline))
static inline void store(const panel p, int64_t r, __m512i high, __m512i low, int first) {
    const int32_t *sums = p.sums + r * p.levels;
    const __m512i less = _mm512_add_epi32(_mm512_set1_epi32(128 * sums[0]), _mm512_loadu_si512(p.minus + first));
    __m512 value = _mm512_cvtepi32_ps(_mm512_sub_epi32(high, less));
    if (p.levels == 2)
        value = _mm512_add_ps(_mm512_mul_ps(value, _mm512_set1_ps(128.0f)),
                              _mm512_cvtepi32_ps(_mm512_sub_epi32(low, _mm512_set1_epi32(128 * sums[1]))));
    value = _mm512_mul_ps(_mm512_mul_ps(value, _mm512_set1_ps(p.x_scale[r])), _mm512_loadu_ps(p.by + first));
    value = _mm512_add_ps(value, _mm512_loadu_ps(p.plus + first));
    _mm512_mask_storeu_ps(p.y + r * p.out + first, lanes_from(first, p.width), value);
}

/* The two lines of the `next` codes are asked for half a step apart (side by side they wait for each other), and the empty __asm__
   keeps the compiler from moving them together. */
#define ASK(byte) __asm__ volatile("prefetcht1 %0" : : "m"(next[k * 128 + byte]));
#define ZERO2(i) __m512i a##i = _mm512_setzero_si512(), b##i = a##i;
#define MULTIPLY2(i) { \
    int32_t four; \
    memcpy(&four, x + i * padded + 4 * k, 4); \
    __m512i v = _mm512_set1_epi32(four); \
    __asm__ volatile("" : "+v"(v), "+v"(a##i), "+v"(b##i)); \
    a##i = _mm512_dpbusd_epi32(a##i, w0, v); b##i = _mm512_dpbusd_epi32(b##i, w1, v); \
    if (i == 0) ASK(0) \
    if (i == HALF) ASK(64) }
#define KEEP2(i) left[i] = a##i; right[i] = b##i;
#define PANEL(M) \
__attribute__((target(TARGET_VNNI))) \
static void panel##M(const panel p, int64_t r) { \
    enum { HALF = M / 2 }; \
    const int64_t padded = p.padded, words = (p.in + 3) / 4; \
    const int8_t *x = (const int8_t *)p.q + r * padded; \
    const char *packed = p.packed, *next = r ? packed : p.next; \
    DO##M(ZERO2) \
    for (int64_t k = 0; k < words; k++) { \
        const __m512i w0 = _mm512_load_si512(packed + k * 128), w1 = _mm512_load_si512(packed + k * 128 + 64); \
        DO##M(MULTIPLY2) \
    } \
    __m512i left[M], right[M]; \
    DO##M(KEEP2) \
    r /= p.levels; \
    for (int i = 0; i < M; i += p.levels, r++) { \
        const int low = p.levels == 2 ? i + 1 : i; \
        store(p, r, left[i], left[low], 0); \
        if (p.width > 16) store(p, r, right[i], right[low], 16); \
    } \
}
PANEL(12)
PANEL(8)
PANEL(4)
PANEL(2)
PANEL(1)

/* The first panel asks memory for the `next` codes, which lie in a row, while it computes. */
static void multiply_many(const panel *p) {
    const int64_t all = p->rows * p->levels;           /* rows of q */
    int64_t r = 0;
    for (; r + 12 <= all; r += 12) panel12(*p, r);
    for (; r + 8 <= all; r += 8) panel8(*p, r);
    for (; r + 4 <= all; r += 4) panel4(*p, r);
    for (; r + 2 <= all; r += 2) panel2(*p, r);
    for (; r < all; r++) panel1(*p, r);
}

const way panels_vnni = {32, BYTES, 32, pack, multiply_many, NULL};

/* ---- the same with a scale for each group of columns, `group` a multiple of four, and two levels ----
   Here x + 128 is the unsigned side, and -128 * sum(w) of a group is what its sums start from. */

__attribute__((target(TARGET_VNNI)))
static void pack_groups(const panel *p) {
    transpose(*p, _mm512_setzero_si512());
    const __m512i all = _mm512_set1_epi8((char)128);
    const char *packed = p->packed;
    int32_t *start = p->start;
    for (int64_t first = 0; first < p->in; first += p->group, start += 32) {
        const int64_t end = first + p->group < p->in ? first + p->group : p->in;
        __m512i left = _mm512_setzero_si512(), right = left;
        for (int64_t k = first / 4; k < (end + 3) / 4; k++) {
            left = _mm512_dpbusd_epi32(left, all, _mm512_load_si512(packed + k * 128));
            right = _mm512_dpbusd_epi32(right, all, _mm512_load_si512(packed + k * 128 + 64));
        }
        _mm512_storeu_si512(start, _mm512_sub_epi32(_mm512_setzero_si512(), left));
        _mm512_storeu_si512(start + 16, _mm512_sub_epi32(_mm512_setzero_si512(), right));
    }
}

#define START2(i) __m512i a##i = s0, b##i = s1;
#define MULTIPLY_GROUP2(i) { \
    int32_t four; \
    memcpy(&four, x + i * padded + 4 * k, 4); \
    const __m512i v = _mm512_set1_epi32(four); \
    a##i = _mm512_dpbusd_epi32(a##i, v, w0); b##i = _mm512_dpbusd_epi32(b##i, v, w1); }
#define KEEP_ROW2(i, high, low) \
    left[i] = _mm512_fmadd_ps(_mm512_fmadd_ps(_mm512_cvtepi32_ps(a##high), up, _mm512_cvtepi32_ps(a##low)), by0, left[i]); \
    right[i] = _mm512_fmadd_ps(_mm512_fmadd_ps(_mm512_cvtepi32_ps(b##high), up, _mm512_cvtepi32_ps(b##low)), by1, right[i]);
#define KEEP_ROWS1 KEEP_ROW2(0, 0, 1)
#define KEEP_ROWS2 KEEP_ROWS1 KEEP_ROW2(1, 2, 3)
#define KEEP_ROWS4 KEEP_ROWS2 KEEP_ROW2(2, 4, 5) KEEP_ROW2(3, 6, 7)
#define GROUPED(ROWS, M) \
__attribute__((target(TARGET_VNNI))) \
static void grouped##ROWS(const panel p, int64_t r) { \
    const int64_t padded = p.padded, in = p.in, group = p.group; \
    const int8_t *x = (const int8_t *)p.q + 2 * r * padded; \
    const char *packed = p.packed, *next = r ? packed : p.next; \
    const int32_t *start = p.start; \
    const float *by = p.by; \
    const __m512 up = _mm512_set1_ps(128.0f); \
    __m512 left[ROWS], right[ROWS]; \
    for (int i = 0; i < ROWS; i++) left[i] = right[i] = _mm512_setzero_ps(); \
    for (int64_t first = 0; first < in; first += group, by += 32, start += 32) { \
        const int64_t end = first + group < in ? first + group : in; \
        const __m512i s0 = _mm512_loadu_si512(start), s1 = _mm512_loadu_si512(start + 16); \
        DO##M(START2) \
        for (int64_t k = first / 4; k < (end + 3) / 4; k++) { \
            const __m512i w0 = _mm512_load_si512(packed + k * 128), w1 = _mm512_load_si512(packed + k * 128 + 64); \
            _mm_prefetch(next + k * 128, _MM_HINT_T1); \
            _mm_prefetch(next + k * 128 + 64, _MM_HINT_T1); \
            DO##M(MULTIPLY_GROUP2) \
        } \
        const __m512 by0 = _mm512_loadu_ps(by), by1 = _mm512_loadu_ps(by + 16); \
        KEEP_ROWS##ROWS \
    } \
    for (int i = 0; i < ROWS; i++) { \
        const __m512 s = _mm512_set1_ps(p.x_scale[r + i]); \
        float *y = p.y + (r + i) * p.out; \
        _mm512_mask_storeu_ps(y, lanes_from(0, p.width), _mm512_fmadd_ps(left[i], s, _mm512_loadu_ps(p.plus))); \
        if (p.width > 16) \
            _mm512_mask_storeu_ps(y + 16, lanes_from(16, p.width), _mm512_fmadd_ps(right[i], s, _mm512_loadu_ps(p.plus + 16))); \
    } \
}
GROUPED(4, 8)
GROUPED(2, 4)
GROUPED(1, 2)

static void multiply_groups(const panel *p) {
    int64_t r = 0;
    for (; r + 4 <= p->rows; r += 4) grouped4(*p, r);
    for (; r + 2 <= p->rows; r += 2) grouped2(*p, r);
    for (; r < p->rows; r++) grouped1(*p, r);
}

const way groups_vnni = {32, UNSIGNED, 32, pack_groups, multiply_groups, NULL};
#endif
