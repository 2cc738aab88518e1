/* Codes of 2 to 8 bits with a scale for each group of columns (or for the whole row): rows as floats, and linear layers.

   codes [out, ...] hold `columns` numbers in a row: int8, or below eight bits fields of 4, 2 and 1 bits as numerics/bits.py packs
   them, code + 2^(bits - 1). scale [out, groups] float32, `scale_step` apart from row to row (0: one row serves all).

   A linear of few rows of x reads each code once and keeps float sums of a group before its scale is applied; for many rows there are
   the integer panels of int8.c, or the caller expands blocks of the weight and multiplies floats. */

#include "kernels.h"

#include <stdlib.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif

enum { TOGETHER = 4 };                                 /* rows of x for which a code is converted once */

int64_t bytes_of_row(int64_t columns, int bits) {
    int64_t bytes = 0;
    if (bits == 8) return columns;
    for (int width = 4; width; width /= 2)
        if (bits & width) bytes += (columns * width + 7) / 8;
    return bytes;
}

/* ---- packed codes to int8 ---- */

static void unpack_four(const uint8_t *from, int64_t first, int64_t columns, int8_t *to) {
    for (int64_t k = first; k < columns; k++) to[k] = (int8_t)(((from[k / 2] >> (k % 2 * 4)) & 15) - 8);
}

static void unpack_row(const uint8_t *from, int64_t columns, int bits, int8_t *to) {
    int shift = 0;
    memset(to, 0, (size_t)columns);
    for (int width = 4; width; width /= 2) {
        if (!(bits & width)) continue;
        const int in_byte = 8 / width, mask = (1 << width) - 1;
        for (int64_t k = 0; k < columns; k++)
            to[k] = (int8_t)(to[k] | ((from[k / in_byte] >> (k % in_byte * width)) & mask) << shift);
        from += (columns * width + 7) / 8;
        shift += width;
    }
    for (int64_t k = 0; k < columns; k++) to[k] = (int8_t)((uint8_t)to[k] - (1 << (bits - 1)));
}

#ifdef X86
__attribute__((target("avx2")))
static void unpack_four_avx2(const uint8_t *from, int64_t columns, int8_t *to) {
    const __m128i low = _mm_set1_epi8(15), eight = _mm_set1_epi8(8);
    int64_t k = 0;
    for (; k + 32 <= columns; k += 32) {
        const __m128i bytes = _mm_loadu_si128((const __m128i *)(from + k / 2));
        const __m128i even = _mm_and_si128(bytes, low), odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), low);
        _mm_storeu_si128((__m128i *)(to + k), _mm_sub_epi8(_mm_unpacklo_epi8(even, odd), eight));
        _mm_storeu_si128((__m128i *)(to + k + 16), _mm_sub_epi8(_mm_unpackhi_epi8(even, odd), eight));
    }
    unpack_four(from, k, columns, to);
}
#endif

/* A row of codes of less than eight bits as int8. */
void unpack(const void *row, int64_t columns, int bits, int8_t *to, int level) {
#ifdef X86
    if (bits == 4 && level >= AVX2) { unpack_four_avx2(row, columns, to); return; }
#endif
    (void)level;
    if (bits == 4) unpack_four(row, 0, columns, to);
    else unpack_row(row, columns, bits, to);
}

/* A row of codes as int8: where it lies, or in `line`. */
static const int8_t *codes_of(const char *row, int64_t columns, int bits, int8_t *line, int level) {
    if (bits == 8) return (const int8_t *)row;
    unpack(row, columns, bits, line, level);
    return line;
}

/* ---- a row as floats ---- */

__attribute__((always_inline))
static inline void scale_loop(const int8_t *codes, int64_t columns, int64_t group, const float *scale, float *to) {
    for (int64_t first = 0; first < columns; first += group) {
        const int64_t end = first + group < columns ? first + group : columns;
        const float s = scale[first / group];
        for (int64_t k = first; k < end; k++) to[k] = (float)codes[k] * s;
    }
}

#ifdef X86
__attribute__((target("avx2")))
static void scale_avx2(const int8_t *codes, int64_t columns, int64_t group, const float *scale, float *to) {
    scale_loop(codes, columns, group, scale, to);
}
#endif

static void scale_row(const int8_t *codes, int64_t columns, int64_t group, const float *scale, float *to, int level) {
#ifdef X86
    if (level >= AVX2) { scale_avx2(codes, columns, group, scale, to); return; }
#endif
    (void)level;
    scale_loop(codes, columns, group, scale, to);
}

/* to[rows, columns] of `dtype` are rows of the matrix, `ids` of it or (NULL) the first; `ids` must be within it.
   Returns 0, or -1 where memory ran out. */
int inro_expand(const void *codes, int64_t rows, int64_t columns, int bits, int64_t group, const float *scale, int64_t scale_step,
                const int64_t *ids, void *to, int dtype, int threads, int level) {
    const int64_t bytes = bytes_of_row(columns, bits), step = group ? group : columns;
    int failed = 0;
    if (rows == 0 || columns == 0) return 0;
    if (level < 0) level = inro_level();
    threads = inro_threads(threads, 8.0 * (double)rows * (double)columns);
    #pragma omp parallel num_threads(threads) if (threads > 1) reduction(|| : failed)
    {
        int8_t *line = bits < 8 ? aligned((size_t)columns) : NULL;
        float *floats = dtype != FLOAT32 ? aligned((size_t)columns * sizeof(float)) : NULL;
        failed = (bits < 8 && !line) || (dtype != FLOAT32 && !floats);
        const int ready = !failed;
        #pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            const int64_t row = ids ? ids[r] : r;
            char *end = (char *)to + r * columns * (int64_t)size_of(dtype);
            if (!ready) continue;
            const int8_t *wide = codes_of((const char *)codes + row * bytes, columns, bits, line, level);
            scale_row(wide, columns, step, scale + row * scale_step, dtype == FLOAT32 ? (float *)end : floats, level);
            if (dtype != FLOAT32) narrow(floats, columns, dtype, end, level);
        }
        free(line);
        free(floats);
    }
    return failed ? -1 : 0;
}

/* ---- few rows of x ---- */

typedef struct {
    const char *codes, *bias;
    const float *x, *scale;
    char *y;
    int64_t rows, in, stride, out, group, scale_step, bytes;
    int bits, dtype, level;
} job;

/* y[0..m] = sum over groups of scale * (x[m] . codes), rows of x `stride` floats apart. */
__attribute__((always_inline))
static inline void groups_loop(const float *x, int64_t stride, int m, const int8_t *codes, int64_t in, int64_t group, const float *scale,
                               float *y) {
    for (int i = 0; i < m; i++) {
        float lanes[16] = {0}, total = 0.0f;
        for (int64_t first = 0; first < in; first += group) {
            const int64_t end = first + group < in ? first + group : in;
            float part[16] = {0};
            int64_t k = first;
            for (; k + 16 <= end; k += 16)
                for (int j = 0; j < 16; j++) part[j] += x[i * stride + k + j] * (float)codes[k + j];
            for (int j = 0; k + j < end; j++) part[j] += x[i * stride + k + j] * (float)codes[k + j];
            for (int j = 0; j < 16; j++) lanes[j] += part[j] * scale[first / group];
        }
        for (int j = 0; j < 16; j++) total += lanes[j];
        y[i] = total;
    }
}

#ifdef X86
__attribute__((target("avx2")))
static void groups_avx2(const float *x, int64_t stride, int m, const int8_t *codes, int64_t in, int64_t group, const float *scale, float *y) {
    groups_loop(x, stride, m, codes, in, group, scale, y);
}

#define GROUPS_VNNI(M) \
__attribute__((target(TARGET_VNNI))) \
static void groups##M##_vnni(const float *x, int64_t stride, const int8_t *codes, int64_t in, int64_t group, const float *scale, float *y) { \
    __m512 lanes[M]; \
    for (int i = 0; i < M; i++) lanes[i] = _mm512_setzero_ps(); \
    for (int64_t first = 0; first < in; first += group) { \
        const int64_t end = first + group < in ? first + group : in; \
        const __m512 s = _mm512_set1_ps(scale[first / group]); \
        __m512 part[M]; \
        for (int i = 0; i < M; i++) part[i] = _mm512_setzero_ps(); \
        int64_t k = first; \
        for (; k + 16 <= end; k += 16) { \
            const __m512 c = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(codes + k)))); \
            for (int i = 0; i < M; i++) part[i] = _mm512_fmadd_ps(_mm512_loadu_ps(x + i * stride + k), c, part[i]); \
        } \
        if (k < end) { \
            const __mmask16 some = (__mmask16)((1 << (end - k)) - 1); \
            const __m512 c = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(some, codes + k))); \
            for (int i = 0; i < M; i++) part[i] = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(some, x + i * stride + k), c, part[i]); \
        } \
        for (int i = 0; i < M; i++) lanes[i] = _mm512_fmadd_ps(part[i], s, lanes[i]); \
    } \
    for (int i = 0; i < M; i++) y[i] = _mm512_reduce_add_ps(lanes[i]); \
}
GROUPS_VNNI(1)
GROUPS_VNNI(2)
GROUPS_VNNI(3)
GROUPS_VNNI(4)
#endif

static void groups_of_row(const job *j, const float *x, int m, const int8_t *codes, const float *scale, float *y) {
#ifdef X86
    if (j->level >= VNNI) {
        switch (m) {
            case 1: groups1_vnni(x, j->stride, codes, j->in, j->group, scale, y); break;
            case 2: groups2_vnni(x, j->stride, codes, j->in, j->group, scale, y); break;
            case 3: groups3_vnni(x, j->stride, codes, j->in, j->group, scale, y); break;
            default: groups4_vnni(x, j->stride, codes, j->in, j->group, scale, y);
        }
        return;
    }
    if (j->level >= AVX2) { groups_avx2(x, j->stride, m, codes, j->in, j->group, scale, y); return; }
#endif
    groups_loop(x, j->stride, m, codes, j->in, j->group, scale, y);
}

/* One row of x against one row of codes, in floats. */
float dot(const float *x, const int8_t *codes, int64_t in, int64_t group, const float *scale, int level) {
    float y;
#ifdef X86
    if (level >= AVX2) { groups_avx2(x, 0, 1, codes, in, group, scale, &y); return y; }
#endif
    (void)level;
    groups_loop(x, 0, 1, codes, in, group, scale, &y);
    return y;
}

static int results_of(const job *j, int64_t first, int64_t last) {
    int8_t *line = j->bits < 8 ? aligned((size_t)j->in) : NULL;
    if (j->bits < 8 && !line) return 0;
    for (int64_t n = first; n < last; n++) {
        const int8_t *codes = codes_of(j->codes + n * j->bytes, j->in, j->bits, line, j->level);
        const float plus = j->bias ? one_of(j->bias, j->dtype, n) : 0.0f;
        for (int64_t r = 0; r < j->rows; r += TOGETHER) {
            const int m = j->rows - r < TOGETHER ? (int)(j->rows - r) : TOGETHER;
            float y[TOGETHER];
            groups_of_row(j, j->x + r * j->stride, m, codes, j->scale + n * j->scale_step, y);
            for (int i = 0; i < m; i++) {
                y[i] += plus;
                char *to = j->y + ((r + i) * j->out + n) * (int64_t)size_of(j->dtype);
                if (j->dtype == FLOAT32) memcpy(to, y + i, sizeof(float));
                else narrow(y + i, 1, j->dtype, to, PORTABLE);
            }
        }
    }
    free(line);
    return 1;
}

/* y[rows, out] = x[rows, in] @ weight.T + bias, rows of x `stride` numbers apart; x, bias and y are of `dtype`, sums are float32.
   Returns 0, or -1 where memory ran out. */
int inro_linear_groups(const void *x, int64_t rows, int64_t in, int64_t stride, const void *codes, int64_t out, int bits, int64_t group,
                       const float *scale, int64_t scale_step, const void *bias, void *y, int dtype, int threads, int level) {
    if (rows == 0 || out == 0) return 0;
    if (level < 0) level = inro_level();
    job j = {codes, bias, x, scale, y, rows, in, stride, out, group ? group : in, scale_step, bytes_of_row(in, bits), bits, dtype, level};
    float *floats = NULL;
    if (dtype != FLOAT32) {
        floats = aligned((size_t)(rows * in) * sizeof(float));
        if (!floats) return -1;
        for (int64_t r = 0; r < rows; r++)
            widen((const char *)x + r * stride * (int64_t)size_of(dtype), dtype, in, floats + r * in, level);
        j.x = floats;
        j.stride = in;
    }
    threads = inro_threads(threads, 4.0 * (double)rows * (double)in * (double)out);
    int failed = 0;
    if (threads == 1) failed = !results_of(&j, 0, out);
    else {
        #pragma omp parallel num_threads(threads) reduction(|| : failed)
        {
            int part = 0, parts = 1;
#ifdef _OPENMP
            part = omp_get_thread_num();
            parts = omp_get_num_threads();
#endif
            failed = !results_of(&j, share(out, part, parts), share(out, part + 1, parts));
        }
    }
    free(floats);
    return failed ? -1 : 0;
}
