/* The integer products of convolutions: tiles of pixels against panels of columns, and depthwise ones, where each channel has its own
   taps. x are codes from 0 to 255; what 128, or whatever stands for 0, adds to the sums of a column is what its sums start from. */

#include "convolution.h"

/* What `zero` in every place adds to the sum of a column, negated. */
static int32_t start_of(const int8_t *codes, const run *runs, int64_t count, int64_t length, int zero) {
    int32_t sum = 0;
    for (int64_t i = 0; i < count; i++)
        for (int64_t k = 0; k < length; k++) sum += codes[runs[i].from + k];
    return -zero * sum;
}

/* ---- plain C: packed are [runs][length][16] codes ---- */

enum { COLUMNS = 16 };

static int64_t bytes_portable(int64_t count, int64_t length) { return count * length * COLUMNS; }

static void pack_portable(const int8_t *codes, int64_t apart, int width, const run *runs, int64_t count, int64_t length, int zero,
                          void *packed, int32_t *start) {
    int8_t *to = packed;
    for (int c = 0; c < COLUMNS; c++) start[c] = c < width ? start_of(codes + c * apart, runs, count, length, zero) : 0;
    for (int64_t i = 0; i < count; i++)
        for (int64_t k = 0; k < length; k++)
            for (int c = 0; c < COLUMNS; c++) *to++ = c < width ? codes[c * apart + runs[i].from + k] : 0;
}

typedef void (*tile)(const void *x, int64_t step, const run *runs, int64_t count, int64_t length, const void *packed, const int32_t *start,
                     int32_t *to);
#define MULTIPLY(kind) \
static void multiply_##kind(const void *x, int64_t step, const run *runs, int64_t count, int64_t length, const void *packed, \
                            const int32_t *start, int32_t *to, int pixels) { \
    tiles_##kind[pixels](x, step, runs, count, length, packed, start, to); \
}

static int64_t one(int64_t length) { (void)length; return 1; }

static void multiply_portable(const void *x, int64_t step, const run *runs, int64_t count, int64_t length, const void *packed,
                              const int32_t *start, int32_t *to, int pixels) {
    (void)step, (void)pixels;
    const int8_t *w = packed;
    int32_t sums[COLUMNS];
    memcpy(sums, start, sizeof sums);
    for (int64_t i = 0; i < count; i++)
        for (int64_t k = 0; k < length; k++, w += COLUMNS) {
            const int32_t v = ((const uint8_t *)x)[runs[i].at + k];
            for (int c = 0; c < COLUMNS; c++) sums[c] += v * w[c];
        }
    memcpy(to, sums, sizeof sums);
}

const product product_portable = {COLUMNS, 1, 48, 0, one, multiply_portable, bytes_portable, pack_portable, NULL};

#ifdef X86
/* ---- AVX-512 VNNI: packed are [runs][length / 4][columns][4] codes ---- */

#define EACH(F, columns) F(1, columns) F(2, columns) F(3, columns) F(4, columns) F(5, columns) F(6, columns) F(7, columns) F(8, columns) \
    F(9, columns) F(10, columns) F(11, columns) F(12, columns)
#define NAMES(M, kind) tile##M##_##kind,

__attribute__((always_inline))
static inline int64_t words_of(int64_t length) { return (length + 3) / 4; }

/* The transposition writes whole steps: the last one's rest lies behind the panel. */
static int64_t bytes_narrow(int64_t count, int64_t length) { return (count * words_of(length) + STEP / 4) * 64; }
static int64_t bytes_wide(int64_t count, int64_t length) { return 2 * bytes_narrow(count, length); }

__attribute__((target(TARGET_VNNI), always_inline))
static inline void pack_vnni(const int8_t *codes, int64_t apart, int width, const run *runs, int64_t count, int64_t length, int zero,
                             char *packed, int32_t *start, int halves) {
    const __m512i ones = _mm512_set1_epi8(1);
    for (int half = 0; half < halves; half++) {
        __m512i sums = _mm512_setzero_si512();
        char *to = packed + half * 64;
        for (int64_t i = 0; i < count; i++, to += words_of(length) * halves * 64)
            for (int64_t k = 0; k < length; k += STEP) {
                __m512i words[16];
                transpose_sixteen(codes + half * 16 * apart + runs[i].from + k, apart, length - k, width - half * 16, words);
                for (int j = 0; j < 16; j++) {
                    sums = _mm512_dpbusd_epi32(sums, ones, words[j]);
                    _mm512_storeu_si512(to + (k / 4 + j) * halves * 64, words[j]);
                }
            }
        _mm512_storeu_si512(start + half * 16, _mm512_mullo_epi32(sums, _mm512_set1_epi32(-zero)));
    }
}

__attribute__((target(TARGET_VNNI)))
static void pack_narrow(const int8_t *codes, int64_t apart, int width, const run *runs, int64_t count, int64_t length, int zero,
                        void *packed, int32_t *start) {
    pack_vnni(codes, apart, width, runs, count, length, zero, packed, start, 1);
}

__attribute__((target(TARGET_VNNI)))
static void pack_wide(const int8_t *codes, int64_t apart, int width, const run *runs, int64_t count, int64_t length, int zero,
                      void *packed, int32_t *start) {
    pack_vnni(codes, apart, width, runs, count, length, zero, packed, start, 2);
}

#define START(i) __m512i a##i = s0;
#define START_TWO(i) __m512i a##i = s0, b##i = s1;
#define PRODUCT(i) { \
    int32_t four; \
    memcpy(&four, at + i * step, 4); \
    a##i = _mm512_dpbusd_epi32(a##i, _mm512_set1_epi32(four), w0); }
#define PRODUCT_TWO(i) { \
    int32_t four; \
    memcpy(&four, at + i * step, 4); \
    __m512i v = _mm512_set1_epi32(four); \
    __asm__ volatile("" : "+v"(v), "+v"(a##i), "+v"(b##i));        /* keeps the sums in registers */ \
    a##i = _mm512_dpbusd_epi32(a##i, v, w0); b##i = _mm512_dpbusd_epi32(b##i, v, w1); }
#define KEEP(i) _mm512_storeu_si512(to + i * 16, a##i);
#define KEEP_TWO(i) _mm512_storeu_si512(to + i * 32, a##i); _mm512_storeu_si512(to + i * 32 + 16, b##i);

#define TILE_NARROW(M, kind) \
__attribute__((target(TARGET_VNNI))) \
static void tile##M##_narrow(const void *x, int64_t step, const run *runs, int64_t count, int64_t length, const void *packed, \
                             const int32_t *start, int32_t *to) { \
    const __m512i s0 = _mm512_loadu_si512(start); \
    const char *w = packed; \
    DO##M(START) \
    for (int64_t i = 0; i < count; i++) { \
        const char *at = (const char *)x + runs[i].at; \
        for (int64_t k = 0; k < words_of(length); k++, at += 4, w += 64) { \
            const __m512i w0 = _mm512_load_si512(w); \
            DO##M(PRODUCT) \
        } \
    } \
    DO##M(KEEP) \
}
EACH(TILE_NARROW, narrow)

#define TILE_WIDE(M, kind) \
__attribute__((target(TARGET_VNNI))) \
static void tile##M##_wide(const void *x, int64_t step, const run *runs, int64_t count, int64_t length, const void *packed, \
                           const int32_t *start, int32_t *to) { \
    const __m512i s0 = _mm512_loadu_si512(start), s1 = _mm512_loadu_si512(start + 16); \
    const char *w = packed; \
    DO##M(START_TWO) \
    for (int64_t i = 0; i < count; i++) { \
        const char *at = (const char *)x + runs[i].at; \
        for (int64_t k = 0; k < words_of(length); k++, at += 4, w += 128) { \
            const __m512i w0 = _mm512_load_si512(w), w1 = _mm512_load_si512(w + 64); \
            DO##M(PRODUCT_TWO) \
        } \
    } \
    DO##M(KEEP_TWO) \
}
EACH(TILE_WIDE, wide)

static const tile tiles_narrow[] = {NULL, EACH(NAMES, narrow)}, tiles_wide[] = {NULL, EACH(NAMES, wide)};
MULTIPLY(narrow)
MULTIPLY(wide)
static int64_t four(int64_t length) { (void)length; return 4; }
const product narrow_vnni = {16, 12, 48, 0, four, multiply_narrow, bytes_narrow, pack_narrow, NULL};
const product wide_vnni = {32, 12, 48, 0, four, multiply_wide, bytes_wide, pack_wide, NULL};

/* ---- AVX2: x are int16, and packed are [runs][length / 2][16][2] words ---- */

__attribute__((always_inline))
static inline int64_t pairs_of(int64_t length) { return (length + 1) / 2; }

static int64_t bytes_avx2(int64_t count, int64_t length) { return (count * pairs_of(length) + 8) * 64; }

__attribute__((target("avx2")))
static void pack_avx2(const int8_t *codes, int64_t apart, int width, const run *runs, int64_t count, int64_t length, int zero,
                      void *packed, int32_t *start) {
    int16_t *to = packed;
    for (int c = 0; c < COLUMNS; c++) start[c] = c < width && zero ? start_of(codes + c * apart, runs, count, length, zero) : 0;
    for (int64_t i = 0; i < count; i++, to += pairs_of(length) * 32)
        for (int64_t k = 0; k < length; k += 16)
            for (int half = 0; half < 2; half++) {
                __m256i words[8];
                transpose_eight(codes + half * 8 * apart + runs[i].from + k, apart, length - k, width - half * 8, words);
                for (int j = 0; j < 8; j++) _mm256_store_si256((__m256i *)(to + (k / 2 + j) * 32 + half * 16), words[j]);
            }
}

#define START_AVX2(i) __m256i a##i = s0, b##i = s1;
#define PRODUCT_AVX2(i) { \
    int32_t two; \
    memcpy(&two, at + i * step, 4); \
    __m256i v = _mm256_set1_epi32(two); \
    __asm__ volatile("" : "+x"(v), "+x"(a##i), "+x"(b##i)); \
    a##i = _mm256_add_epi32(a##i, _mm256_madd_epi16(w0, v)); b##i = _mm256_add_epi32(b##i, _mm256_madd_epi16(w1, v)); }
#define KEEP_AVX2(i) \
    _mm256_storeu_si256((__m256i *)(to + i * 16), a##i); _mm256_storeu_si256((__m256i *)(to + i * 16 + 8), b##i);

#define TILE_AVX2(M) \
__attribute__((target("avx2"))) \
static void tile##M##_avx2(const void *x, int64_t apart, const run *runs, int64_t count, int64_t length, const void *packed, \
                           const int32_t *start, int32_t *to) { \
    const __m256i s0 = _mm256_loadu_si256((const __m256i *)start), s1 = _mm256_loadu_si256((const __m256i *)(start + 8)); \
    const int16_t *w = packed; \
    const int64_t step = 2 * apart; \
    DO##M(START_AVX2) \
    for (int64_t i = 0; i < count; i++) { \
        const char *at = (const char *)x + 2 * runs[i].at; \
        for (int64_t k = 0; k < pairs_of(length); k++, at += 4, w += 32) { \
            const __m256i w0 = _mm256_load_si256((const __m256i *)w), w1 = _mm256_load_si256((const __m256i *)(w + 16)); \
            DO##M(PRODUCT_AVX2) \
        } \
    } \
    DO##M(KEEP_AVX2) \
}
TILE_AVX2(1) TILE_AVX2(2) TILE_AVX2(3) TILE_AVX2(4) TILE_AVX2(5) TILE_AVX2(6)

static const tile tiles_avx2[] = {NULL, tile1_avx2, tile2_avx2, tile3_avx2, tile4_avx2, tile5_avx2, tile6_avx2};
MULTIPLY(avx2)
const product product_avx2 = {COLUMNS, 6, 48, 1, one, multiply_avx2, bytes_avx2, pack_avx2, NULL};

/* Two levels as one number of 15 bits: sums of more than SAFE columns do not fit int32, and go on as floats. */
#define START_LEVELS(i) __m256i a##i = _mm256_setzero_si256(), b##i = a##i;
#define KEEP_LEVELS(i) \
    left[i] = _mm256_add_ps(left[i], _mm256_cvtepi32_ps(a##i)); right[i] = _mm256_add_ps(right[i], _mm256_cvtepi32_ps(b##i));
#define TILE_LEVELS(M) \
__attribute__((target("avx2"))) \
static void tile##M##_levels(const void *x, int64_t apart, const run *runs, int64_t count, int64_t length, const void *packed, \
                             const int32_t *start, int32_t *to) { \
    (void)start; \
    const int16_t *w = packed; \
    const int64_t step = 2 * apart; \
    __m256 left[M], right[M]; \
    for (int i = 0; i < M; i++) left[i] = right[i] = _mm256_setzero_ps(); \
    for (int64_t i = 0; i < count; i++) { \
        const char *at = (const char *)x + 2 * runs[i].at; \
        for (int64_t from = 0; from < pairs_of(length); from += SAFE / 2) { \
            const int64_t end = from + SAFE / 2 < pairs_of(length) ? from + SAFE / 2 : pairs_of(length); \
            DO##M(START_LEVELS) \
            for (int64_t k = from; k < end; k++, at += 4, w += 32) { \
                const __m256i w0 = _mm256_load_si256((const __m256i *)w), w1 = _mm256_load_si256((const __m256i *)(w + 16)); \
                DO##M(PRODUCT_AVX2) \
            } \
            DO##M(KEEP_LEVELS) \
        } \
    } \
    for (int i = 0; i < M; i++) { \
        _mm256_storeu_ps((float *)(void *)to + i * 16, left[i]); \
        _mm256_storeu_ps((float *)(void *)to + i * 16 + 8, right[i]); \
    } \
}
TILE_LEVELS(1) TILE_LEVELS(2) TILE_LEVELS(3) TILE_LEVELS(4) TILE_LEVELS(5) TILE_LEVELS(6)

static const tile tiles_levels[] = {NULL, tile1_levels, tile2_levels, tile3_levels, tile4_levels, tile5_levels, tile6_levels};
MULTIPLY(levels)
const product levels_avx2 = {COLUMNS, 6, 48, 1, one, multiply_levels, bytes_avx2, pack_avx2, NULL};
#endif

/* ---- depthwise: WIDEST channels of a pixel at once; `packed` are [taps][WIDEST] codes as words, or on VNNI [taps / 4][WIDEST][4] ---- */

int64_t depthwise_bytes(int64_t count) { return (count + 3) / 4 * 4 * WIDEST * 2; }

#ifdef X86
/* 64 bytes of four taps each -> four vectors of 16 channels x 4 taps: channels 4 * i to 4 * i + 3 of each sixteen in the i-th. */
#define INTERLEAVE(a, b, c, d) \
    const __m512i ab0 = _mm512_unpacklo_epi8(a, b), ab1 = _mm512_unpackhi_epi8(a, b); \
    const __m512i cd0 = _mm512_unpacklo_epi8(c, d), cd1 = _mm512_unpackhi_epi8(c, d); \
    const __m512i x0 = _mm512_unpacklo_epi16(ab0, cd0), x1 = _mm512_unpackhi_epi16(ab0, cd0); \
    const __m512i x2 = _mm512_unpacklo_epi16(ab1, cd1), x3 = _mm512_unpackhi_epi16(ab1, cd1);

__attribute__((target(TARGET_VNNI)))
static void interleave(char *words) {                  /* four taps of 64 codes, in place */
    const __m512i a = _mm512_load_si512(words), b = _mm512_load_si512(words + 64), c = _mm512_load_si512(words + 128),
                  d = _mm512_load_si512(words + 192);
    INTERLEAVE(a, b, c, d)
    _mm512_store_si512(words, x0);
    _mm512_store_si512(words + 64, x1);
    _mm512_store_si512(words + 128, x2);
    _mm512_store_si512(words + 192, x3);
}

/* What lies beyond the channels of the last pixel is read too: frames have room for it. */
__attribute__((target(TARGET_VNNI)))
static void depthwise_vnni(const uint8_t *x, int64_t step, int pixels, const run *runs, int64_t count, const char *packed,
                           const int32_t *start, int32_t *to) {
    for (int p = 0; p < pixels; p++, x += step, to += WIDEST) {
        __m512i a0 = _mm512_setzero_si512(), a1 = a0, a2 = a0, a3 = a0;
        const char *w = packed;
        for (int64_t t = 0; t < count; t += 4, w += 256) {             /* the codes of taps beyond the last are 0 */
            const uint8_t *at[4];
            for (int i = 0; i < 4; i++) at[i] = x + runs[t + i < count ? t + i : t].at;
            const __m512i a = _mm512_loadu_si512(at[0]), b = _mm512_loadu_si512(at[1]), c = _mm512_loadu_si512(at[2]),
                          d = _mm512_loadu_si512(at[3]);
            INTERLEAVE(a, b, c, d)
            a0 = _mm512_dpbusd_epi32(a0, x0, _mm512_load_si512(w));
            a1 = _mm512_dpbusd_epi32(a1, x1, _mm512_load_si512(w + 64));
            a2 = _mm512_dpbusd_epi32(a2, x2, _mm512_load_si512(w + 128));
            a3 = _mm512_dpbusd_epi32(a3, x3, _mm512_load_si512(w + 192));
        }
        const __m512i b0 = _mm512_shuffle_i32x4(a0, a1, 0x44), b1 = _mm512_shuffle_i32x4(a2, a3, 0x44);
        const __m512i b2 = _mm512_shuffle_i32x4(a0, a1, 0xee), b3 = _mm512_shuffle_i32x4(a2, a3, 0xee);
        const __m512i sixteen[4] = {_mm512_shuffle_i32x4(b0, b1, 0x88), _mm512_shuffle_i32x4(b0, b1, 0xdd),
                                    _mm512_shuffle_i32x4(b2, b3, 0x88), _mm512_shuffle_i32x4(b2, b3, 0xdd)};
        for (int i = 0; i < 4; i++)
            _mm512_storeu_si512(to + i * 16, _mm512_add_epi32(sixteen[i], _mm512_loadu_si512(start + i * 16)));
    }
}

__attribute__((target("avx2")))
static void depthwise_avx2(const int16_t *x, int64_t step, int pixels, const run *runs, int64_t count, const int16_t *w,
                           const int32_t *start, int32_t *to) {
    for (int p = 0; p < pixels; p++, x += step, to += WIDEST)
        for (int c = 0; c < WIDEST; c += 16) {
            __m256i a = _mm256_loadu_si256((const __m256i *)(start + c)), b = _mm256_loadu_si256((const __m256i *)(start + c + 8));
            for (int64_t t = 0; t < count; t++) {
                const __m256i v = _mm256_loadu_si256((const __m256i *)(x + runs[t].at + c));
                const __m256i u = _mm256_loadu_si256((const __m256i *)(w + t * WIDEST + c));
                const __m256i low = _mm256_mullo_epi16(v, u), high = _mm256_mulhi_epi16(v, u);
                const __m256i first = _mm256_unpacklo_epi16(low, high), second = _mm256_unpackhi_epi16(low, high);
                a = _mm256_add_epi32(a, _mm256_permute2x128_si256(first, second, 0x20));
                b = _mm256_add_epi32(b, _mm256_permute2x128_si256(first, second, 0x31));
            }
            _mm256_storeu_si256((__m256i *)(to + c), a);
            _mm256_storeu_si256((__m256i *)(to + c + 8), b);
        }
}
#endif

/* Up to WIDEST channels from x on, of `pixels` pixels `step` elements apart, into to [pixels][WIDEST]. */
void depthwise(const void *x, int64_t step, int pixels, const run *runs, int64_t count, const void *packed, const int32_t *start, int32_t *to,
               int level) {
#ifdef X86
    if (level >= VNNI) { depthwise_vnni(x, step, pixels, runs, count, packed, start, to); return; }
    if (level >= AVX2) { depthwise_avx2(x, step, pixels, runs, count, packed, start, to); return; }
#endif
    (void)level;
    const int16_t *w = packed;
    for (int p = 0; p < pixels; p++, to += WIDEST) {
        memcpy(to, start, WIDEST * sizeof(int32_t));
        for (int64_t t = 0; t < count; t++) {
            const uint8_t *at = (const uint8_t *)x + p * step + runs[t].at;
            for (int c = 0; c < WIDEST; c++) to[c] += (int32_t)at[c] * w[t * WIDEST + c];
        }
    }
}

/* The codes [channels][taps] of `width` channels, for `depthwise`. */
void pack_depthwise(const int8_t *codes, int64_t taps, int width, const run *runs, int64_t count, int zero, void *packed, int32_t *start,
                    int level) {
    memset(packed, 0, (size_t)depthwise_bytes(count));
    for (int c = 0; c < WIDEST; c++) start[c] = c < width ? start_of(codes + c * taps, runs, count, 1, zero) : 0;
    for (int64_t t = 0; t < count; t++)
        for (int c = 0; c < width; c++) {
            const int8_t code = codes[c * taps + runs[t].from];
            if (level >= VNNI) ((int8_t *)packed)[t * WIDEST + c] = code;
            else ((int16_t *)packed)[t * WIDEST + c] = code;
        }
#ifdef X86
    for (int64_t t = 0; t < count && level >= VNNI; t += 4) interleave((char *)packed + t * WIDEST);
#endif
}
