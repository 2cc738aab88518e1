/* What the parts of the integer linear layer share; linear.c puts them together. */

#ifndef INRO_LINEAR_H
#define INRO_LINEAR_H

#include "kernels.h"

#include <string.h>

enum { STEP = 64, MR = 6, NR = 4, MOST_TOGETHER = 32 };
/* codes that a vector holds; results of a block, [MR][NR]; columns of a panel at most */
enum { SAFE = 1024 };                                  /* 128 * 16256 * 1024 < 2^31: columns whose sums fit int32 */

/* Some columns of the weight, and the rows of x that they multiply: y[r * out + c] for c < width. Inner loops get a copy of it, not
   its address: a store of a vector might change what lies there, for all that C knows. */
typedef struct {
    const int8_t *codes;                               /* of the columns, [width, in] */
    const char *next;                                  /* the codes after these, which memory is asked for while these are used */
    void *packed;                                      /* these, or the rows of x, as `pack` arranges them */
    int32_t *start;                                    /* [groups][columns]: what the sums of a group start from */
    const float *by, *plus;                            /* scales [groups][columns], biases [columns] */
    const int32_t *minus;                              /* [columns]: what the zero point of x adds to the sums */
    int64_t in, group;                                 /* columns of a scale, 0 for all */
    int width, levels;
    const void *q;                                     /* rows of x in the form of the way, `padded` numbers (and levels) each */
    const float *x_scale;
    const int32_t *sums;                               /* of each level of each row */
    int64_t rows, padded, out;
    float *y;
} panel;

/* How the integers of a row of x lie in memory, zero beyond `in`. */
enum {
    BYTES,                                             /* int8, level after level */
    UNSIGNED,                                          /* the same + 128 */
    WORDS,                                             /* int16, both levels as one number */
    AS_IT_IS                                           /* no integers: bfloat16 */
};

/* How a panel is computed. */
typedef struct {
    int columns, form;                                 /* columns of a panel, form of the rows of x */
    int bytes;                                         /* of `packed` for each number of a column; 0: it holds rows of x */
    void (*pack)(const panel *);                       /* each panel's codes, or the rows once; NULL: both are multiplied as they lie */
    void (*multiply)(const panel *);
    void (*leave)(void);                               /* called when a thread has done its part, or NULL */
} way;

#pragma GCC visibility push(hidden)
#ifdef X86
extern const way blocks_avx2, panels_avx2, groups_avx2;                 /* product_avx2.c */
extern const way blocks_vnni, panels_vnni, groups_vnni;                 /* product_vnni.c */
#ifdef TARGET_BFLOAT16
extern const way panels_bfloat16;                                       /* product_bfloat16.c */
#endif
#ifdef AMX_HERE
extern const way rows_amx;                                              /* product_amx.c */
#endif
#endif
#pragma GCC visibility pop

/* ---- blocks: out[m][n] = sum_k x[m][k] * w[n][k] of up to MR rows of x (and their levels) and NR of codes ---- */

typedef void (*block_function)(const int8_t *x, int64_t padded, int m, const int8_t *const *w, int64_t k, const int32_t *sums,
                               int32_t out[MR][NR]);

__attribute__((always_inline))
static inline void multiply_blocks(const panel *p, block_function block) {
    const int levels = p->levels, together = MR / levels;
    const int8_t *w[NR];
    for (int c = 0; c < NR; c++) w[c] = p->codes + (c < p->width ? c : p->width - 1) * p->in;      /* the last one again */
    for (int64_t r = 0; r < p->rows; r += together) {
        const int m = p->rows - r < together ? (int)(p->rows - r) : together;
        int32_t total[MR][NR];
        block((const int8_t *)p->q + r * levels * p->padded, p->padded, m * levels, w, p->in, p->sums + r * levels, total);
        for (int i = 0; i < m; i++) {
            float value[NR];
            for (int c = 0; c < NR; c++) {
                value[c] = levels == 2 ? 128.0f * (float)total[2 * i][c] + (float)total[2 * i + 1][c]
                                       : (float)(total[i][c] - p->minus[c]);
                value[c] = value[c] * p->x_scale[r + i] * p->by[c] + p->plus[c];
            }
            memcpy(p->y + (r + i) * p->out, value, (size_t)p->width * sizeof(float));
        }
    }
}

#ifdef X86
/* Sums must each be a variable of their own: arrays of vectors end up in memory. DO3(F) is F(0) F(1) F(2). */
#define DO1(F) F(0)
#define DO2(F) DO1(F) F(1)
#define DO3(F) DO2(F) F(2)
#define DO4(F) DO3(F) F(3)
#define DO5(F) DO4(F) F(4)
#define DO6(F) DO5(F) F(5)
#define DO7(F) DO6(F) F(6)
#define DO8(F) DO7(F) F(7)
#define DO9(F) DO8(F) F(8)
#define DO10(F) DO9(F) F(9)
#define DO11(F) DO10(F) F(10)
#define DO12(F) DO11(F) F(11)

/* Rows are short for the hardware's prefetcher: the next block is asked for while this one is used, into the second-level cache,
   whose queue is longer: 27 GB/s in the place of 18 where it was measured. (A prefetch cannot fault.) */
#define NEXT(j) _mm_prefetch((const char *)(w[j] + NR * k + p), _MM_HINT_T1);

/* Eight rows of up to sixteen codes, `apart` from each other (`width` of them are there, and `left` codes of each), as eight vectors of
   8 rows x 2 codes, which become words. */
__attribute__((target("avx2"), always_inline))
static inline void transpose_eight(const int8_t *codes, int64_t apart, int64_t left, int width, __m256i b[8]) {
    __m256i a[8];
    for (int j = 0; j < 8; j++) {
        const int8_t *from = codes + j * apart;
        __m128i bytes = _mm_setzero_si128();
        if (j < width && left >= 16) bytes = _mm_loadu_si128((const __m128i *)from);
        else if (j < width && left > 0) {
            int8_t some[16] = {0};
            memcpy(some, from, (size_t)left);
            bytes = _mm_loadu_si128((const __m128i *)some);
        }
        a[j] = _mm256_cvtepi8_epi16(bytes);            /* eight words of two codes */
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
}

/* ---- AVX-512 ---- */

/* Of sixteen lanes from `i` on, those below `n`. */
__attribute__((target(TARGET_VNNI), always_inline))
static inline __mmask16 lanes_from(int64_t i, int64_t n) {
    return n - i >= 16 ? (__mmask16)0xffff : n <= i ? 0 : (__mmask16)((1u << (n - i)) - 1);
}

/* Sixteen vectors of sixteen words of four bytes, transposed in four rounds. */
__attribute__((target(TARGET_VNNI), always_inline))
static inline void transpose_words(__m512i a[16]) {
    __m512i b[16];
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

/* Sixteen rows of up to STEP codes, `apart` from each other (`width` of them are there, and `left` codes of each), as sixteen vectors of
   16 rows x 4 codes. */
__attribute__((target(TARGET_VNNI), always_inline))
static inline void transpose_sixteen(const int8_t *codes, int64_t apart, int64_t left, int width, __m512i a[16]) {
    const __mmask64 some = left >= STEP ? (__mmask64)-1 : (__mmask64)-1 >> (STEP - left);
    for (int j = 0; j < 16; j++) a[j] = j < width ? _mm512_maskz_loadu_epi8(some, codes + j * apart) : _mm512_setzero_si512();
    transpose_words(a);
}
#endif

#endif
