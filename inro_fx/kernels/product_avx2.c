/* Products of int8 on AVX2. Nothing saturates: for few rows of x |w| (as unsigned, at most 128) is multiplied by x with the sign
   of w, so that a pair of products stays within 2 * 128 * 127 < 2^15; for many, int16 by int16 into int32. */

#include "linear.h"

#ifdef X86
/* ---- few rows: both operands run along `in` ---- */

#define ZERO(i) __m256i e##i##0 = _mm256_setzero_si256(), e##i##1 = e##i##0, e##i##2 = e##i##0, e##i##3 = e##i##0;
#define LOAD(i) const __m256i v##i = _mm256_loadu_si256((const __m256i *)(x + i * padded + p));
#define MULTIPLY(i, j) \
    e##i##j = _mm256_add_epi32(e##i##j, _mm256_madd_epi16(_mm256_maddubs_epi16(u, _mm256_sign_epi8(v##i, c)), ones));
#define COLUMN(M, j) { \
    const __m256i c = p + 32 <= k ? _mm256_loadu_si256((const __m256i *)(w[j] + p)) : tail(w[j] + p, k - p); \
    const __m256i u = _mm256_abs_epi8(c); \
    COLUMN##M(j) }
#define COLUMN1(j) MULTIPLY(0, j)
#define COLUMN2(j) MULTIPLY(0, j) MULTIPLY(1, j)
#define ADD_UP(i) { \
    const __m256i s = _mm256_hadd_epi32(_mm256_hadd_epi32(e##i##0, e##i##1), _mm256_hadd_epi32(e##i##2, e##i##3)); \
    _mm_storeu_si128((__m128i *)out[i], _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1))); }
#define ROWS(M) \
__attribute__((target("avx2"))) \
static void rows##M(const int8_t *x, int64_t padded, const int8_t *const *w, int64_t k, int32_t out[MR][NR]) { \
    const __m256i ones = _mm256_set1_epi16(1); \
    DO##M(ZERO) \
    for (int64_t p = 0; p < k; p += 32) { \
        if (p % 64 == 0) { NEXT(0) NEXT(1) NEXT(2) NEXT(3) } \
        DO##M(LOAD) \
        COLUMN(M, 0) COLUMN(M, 1) COLUMN(M, 2) COLUMN(M, 3) \
    } \
    DO##M(ADD_UP) \
}

__attribute__((target("avx2"), noinline))
static __m256i tail(const int8_t *w, int64_t left) {
    int8_t bytes[32] = {0};
    memcpy(bytes, w, (size_t)left);
    return _mm256_loadu_si256((const __m256i *)bytes);
}

ROWS(1)
ROWS(2)

__attribute__((target("avx2")))
static void block(const int8_t *x, int64_t padded, int m, const int8_t *const *w, int64_t k, const int32_t *sums,
                  int32_t out[MR][NR]) {
    (void)sums;
    int i = 0;
    for (; i + 2 <= m; i += 2) rows2(x + i * padded, padded, w, k, out + i);
    if (i < m) rows1(x + i * padded, padded, w, k, out + i);
}

static void multiply_few(const panel *p) { multiply_blocks(p, block); }

const way blocks_avx2 = {NR, BYTES, 0, NULL, multiply_few, NULL};

/* ---- many rows: 16 columns of codes as int16, transposed to [in / 2][16][2], against 6 rows of x as int16 ----
   The activations need no second level here: 15 bits fit, and their sums fit int32 for SAFE columns at a time. */

__attribute__((target("avx2")))
static void transpose(const panel *at) {
    const panel p = *at;
    int16_t *packed = p.packed;
    for (int half = 0; half < 2; half++)
        for (int64_t k = 0; k < p.padded; k += 16) {
            __m256i words[8];
            transpose_eight(p.codes + half * 8 * p.in + k, p.in, p.in - k, p.width - half * 8, words);
            for (int i = 0; i < 8; i++) _mm256_store_si256((__m256i *)(packed + (k / 2 + i) * 32 + half * 16), words[i]);
        }
}

/* A row of results: the sums times the scale of the row, `by` (of the columns) if it is there, and the bias. */
__attribute__((target("avx2"), always_inline))
static inline void store(const panel p, int64_t r, __m256 left, __m256 right, const float *by) {
    float values[16];
    const __m256 s = _mm256_set1_ps(p.x_scale[r]);
    left = _mm256_mul_ps(left, s);
    right = _mm256_mul_ps(right, s);
    if (by) {
        left = _mm256_mul_ps(left, _mm256_loadu_ps(by));
        right = _mm256_mul_ps(right, _mm256_loadu_ps(by + 8));
    }
    _mm256_storeu_ps(values, _mm256_add_ps(left, _mm256_loadu_ps(p.plus)));
    _mm256_storeu_ps(values + 8, _mm256_add_ps(right, _mm256_loadu_ps(p.plus + 8)));
    memcpy(p.y + r * p.out, values, (size_t)p.width * sizeof(float));
}

/* `minus`, of fixed scales alone, is taken off once: one level has one block of `safe` columns. */
#define START16(i) __m256i a##i = m0, b##i = m1;
#define MULTIPLY16(i) { \
    int32_t two; \
    memcpy(&two, x + i * padded + 2 * k, 4); \
    __m256i v = _mm256_set1_epi32(two);               /* the next line keeps the rows in order, and the sums in registers */ \
    __asm__ volatile("" : "+x"(v), "+x"(a##i), "+x"(b##i)); \
    a##i = _mm256_add_epi32(a##i, _mm256_madd_epi16(w0, v)); b##i = _mm256_add_epi32(b##i, _mm256_madd_epi16(w1, v)); }
#define MULTIPLY_PANEL(M, first, last) \
    for (int64_t k = (first) / 2; k < (last) / 2; k++) { \
        const __m256i w0 = _mm256_load_si256((const __m256i *)(packed + k * 32)); \
        const __m256i w1 = _mm256_load_si256((const __m256i *)(packed + k * 32 + 16)); \
        DO##M(MULTIPLY16) \
    }
#define KEEP16(i) \
    left[i] = _mm256_add_ps(left[i], _mm256_cvtepi32_ps(a##i)); right[i] = _mm256_add_ps(right[i], _mm256_cvtepi32_ps(b##i));
#define PANEL(M) \
__attribute__((target("avx2"))) \
static void panel##M(const panel p, int64_t r) { \
    const int64_t padded = p.padded, safe = p.levels == 2 ? SAFE : padded; \
    const int16_t *x = (const int16_t *)p.q + r * padded, *packed = p.packed; \
    __m256 left[M], right[M]; \
    for (int i = 0; i < M; i++) left[i] = right[i] = _mm256_setzero_ps(); \
    for (int64_t start = 0; start < padded; start += safe) { \
        const int64_t end = start + safe < padded ? start + safe : padded; \
        const __m256i m0 = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_loadu_si256((const __m256i *)p.minus)); \
        const __m256i m1 = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_loadu_si256((const __m256i *)(p.minus + 8))); \
        DO##M(START16) \
        MULTIPLY_PANEL(M, start, end) \
        DO##M(KEEP16) \
    } \
    for (int i = 0; i < M; i++) store(p, r + i, left[i], right[i], p.by); \
}
PANEL(6)
PANEL(2)
PANEL(1)

static void multiply_many(const panel *p) {
    int64_t r = 0;
    for (; r + 6 <= p->rows; r += 6) panel6(*p, r);
    for (; r + 2 <= p->rows; r += 2) panel2(*p, r);
    for (; r < p->rows; r++) panel1(*p, r);
}

const way panels_avx2 = {16, WORDS, 32, transpose, multiply_many, NULL};

/* ---- the same with a scale for each group of columns, SAFE of them at most ---- */

#define ZERO16(i) __m256i a##i = _mm256_setzero_si256(), b##i = a##i;
#define KEEP_GROUP16(i) \
    left[i] = _mm256_add_ps(left[i], _mm256_mul_ps(_mm256_cvtepi32_ps(a##i), s0)); \
    right[i] = _mm256_add_ps(right[i], _mm256_mul_ps(_mm256_cvtepi32_ps(b##i), s1));
#define GROUPED(M) \
__attribute__((target("avx2"))) \
static void grouped##M(const panel p, int64_t r) { \
    const int64_t padded = p.padded, in = p.in, group = p.group; \
    const int16_t *x = (const int16_t *)p.q + r * padded, *packed = p.packed; \
    const float *by = p.by; \
    __m256 left[M], right[M]; \
    for (int i = 0; i < M; i++) left[i] = right[i] = _mm256_setzero_ps(); \
    for (int64_t start = 0; start < in; start += group, by += 16) { \
        const int64_t end = start + group < in ? start + group : in; \
        const __m256 s0 = _mm256_loadu_ps(by), s1 = _mm256_loadu_ps(by + 8); \
        DO##M(ZERO16) \
        MULTIPLY_PANEL(M, start, end + 1) \
        DO##M(KEEP_GROUP16) \
    } \
    for (int i = 0; i < M; i++) store(p, r + i, left[i], right[i], NULL); \
}
GROUPED(4)
GROUPED(1)

static void multiply_groups(const panel *p) {
    int64_t r = 0;
    for (; r + 4 <= p->rows; r += 4) grouped4(*p, r);
    for (; r < p->rows; r++) grouped1(*p, r);
}

const way groups_avx2 = {16, WORDS, 32, transpose, multiply_groups, NULL};
#endif
