/* Codes of 2 to 8 bits with a scale for each group of columns (or for the whole row): rows as floats, and linear layers.

   codes [out, ...] hold `columns` numbers in a row: int8, or below eight bits fields of 4, 2 and 1 bits as numerics/bits.py packs
   them, code + 2^(bits - 1). scale [out, groups] of any of the three dtypes, `scale_step` apart from
   row to row (0: one row serves all).

   A linear of few rows of x reads each code as it is stored. With VNNI x becomes integers of 15 bits, as in linear.c, and four
   products at a time are exact before their group's scale is applied; else the codes become floats. For many rows there are the
   integer panels of linear.c, or the caller expands blocks of the weight and multiplies floats. */

#include "kernels.h"

#include <stdlib.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif

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
int inro_expand(const void *codes, int64_t rows, int64_t columns, int bits, int64_t group, const void *scale, int scale_dtype,
                int64_t scale_step, const int64_t *ids, void *to, int dtype, int threads, int level) {
    const int64_t bytes = bytes_of_row(columns, bits), step = group ? group : columns, groups = columns ? (columns - 1) / step + 1 : 0;
    int failed = 0;
    if (rows == 0 || columns == 0) return 0;
    if (level < 0) level = inro_level();
    threads = inro_threads(threads, 8.0 * (double)rows * (double)columns);
    #pragma omp parallel num_threads(threads) if (threads > 1) reduction(|| : failed)
    {
        int8_t *line = bits < 8 ? aligned((size_t)columns) : NULL;
        float *floats = dtype != FLOAT32 ? aligned((size_t)columns * sizeof(float)) : NULL;
        float *scales = scale_dtype != FLOAT32 ? aligned((size_t)groups * sizeof(float)) : NULL;
        failed = (bits < 8 && !line) || (dtype != FLOAT32 && !floats) || (scale_dtype != FLOAT32 && !scales);
        const int ready = !failed;
        #pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            const int64_t row = ids ? ids[r] : r;
            char *end = (char *)to + r * columns * (int64_t)size_of(dtype);
            if (!ready) continue;
            const int8_t *wide = codes_of((const char *)codes + row * bytes, columns, bits, line, level);
            const float *by = floats_at(scale, scale_dtype, row * scale_step, groups, scales, level);
            scale_row(wide, columns, step, by, dtype == FLOAT32 ? (float *)end : floats, level);
            if (dtype != FLOAT32) narrow(floats, columns, dtype, end, level);
        }
        free(line);
        free(floats);
        free(scales);
    }
    return failed ? -1 : 0;
}

/* ---- few rows of x ---- */

/* A row of x as integers: two levels of `padded` bytes, and where the sums of four products of unsigned codes start. */
typedef struct {
    int8_t *q;
    int32_t *start;
    float scale;
} integers;

typedef struct {
    const char *codes, *bias;
    const float *x;
    const void *scale;
    char *y;
    int64_t rows, in, stride, out, group, groups, scale_step, bytes, padded;
    int bits, dtype, scale_dtype, level;
    float *floats, *undo;                              /* a copy of x, and what takes a lift off its rows; or NULL */
    integers *as_integers;                             /* of each row; `q` NULL where it takes floats */
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

#ifdef X86
/* Can the sixteen lanes of four columns each have their scales picked from the groups' at once? */
static int has_lanes(int bits, int64_t group) { return (bits == 4 || bits == 8) && (group == 16 || group == 32 || group % 64 == 0); }

/* What the columns of a block share: see `columns_vnni`. */
typedef struct {
    const integers *x;
    int64_t padded, in, bytes, group, groups;
} row_by_rows;

/* 64 codes from column `k` on as unsigned numbers, code + 8 or code + 128; `there` are the bytes of them that exist. */
__attribute__((target(TARGET_VNNI), always_inline))
static inline __m512i unsigned_codes(const uint8_t *row, int64_t k, int bits, __mmask64 there) {
    if (bits == 8) return _mm512_xor_si512(_mm512_set1_epi8((char)0x80), _mm512_maskz_loadu_epi8(there, row + k));
    const __m512i wide = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8((__mmask32)there, row + k / 2));
    return _mm512_and_si512(_mm512_or_si512(wide, _mm512_slli_epi16(wide, 4)), _mm512_set1_epi8(15));
}

/* One row of x as integers against four rows of codes (or the last of them again), 64 columns at a time: y[4]. */
#define START_COLUMN(c) __m512 total##c = _mm512_setzero_ps();
#define PICK_SCALE(c) const __m512 by##c = pick ? _mm512_permutexvar_ps(each, _mm512_maskz_loadu_ps(some, scale[c] + g)) : _mm512_set1_ps(scale[c][g]);
#define ADD_COLUMN(c) { \
    _mm_prefetch((const char *)(row[c] + 4 * j->bytes + (bits == 8 ? k : k / 2)), _MM_HINT_T1);        /* the next four rows */ \
    const __m512i u = unsigned_codes(row[c], k, bits, bytes); \
    const __m512i upper = _mm512_slli_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), u, high), 7); \
    const __m512i both = _mm512_dpbusd_epi32(_mm512_add_epi32(upper, begin), u, low); \
    total##c = _mm512_fmadd_ps(_mm512_cvtepi32_ps(both), by##c, total##c); }
#define FINISH_COLUMN(c) y[c] = _mm512_reduce_add_ps(total##c) * j->x->scale;
#define FOUR(F) F(0) F(1) F(2) F(3)

__attribute__((target(TARGET_VNNI), always_inline))
static inline void columns_vnni(const row_by_rows *j, int bits, int pick, const uint8_t *const *row, const float *const *scale, float *y) {
    const int64_t group = j->group, step = pick ? 64 / group : 1, every = pick ? 64 : group;
    const __m512i each = _mm512_srl_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                          _mm_cvtsi32_si128(group == 16 ? 2 : 3));                   /* the group of each lane */
    FOUR(START_COLUMN)
    for (int64_t start = 0, g = 0; start < j->in; start += every, g += step) {
        const __mmask16 some = j->groups - g >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << (j->groups - g)) - 1);
        const int64_t end = start + every < j->in ? start + every : j->in;
        FOUR(PICK_SCALE)
        for (int64_t k = start; k < end; k += 64) {
            const int64_t left = bits == 8 ? j->in - k : j->bytes - k / 2;
            const __mmask64 bytes = left >= 64 ? ~0ull : (1ull << left) - 1;
            const __m512i high = _mm512_loadu_si512(j->x->q + k), low = _mm512_loadu_si512(j->x->q + j->padded + k);
            const __m512i begin = _mm512_loadu_si512(j->x->start + k / 4);
            FOUR(ADD_COLUMN)
        }
    }
    FOUR(FINISH_COLUMN)
}

__attribute__((target(TARGET_VNNI)))
static void columns_four_picked(const row_by_rows *j, const uint8_t *const *row, const float *const *scale, float *y) { columns_vnni(j, 4, 1, row, scale, y); }
__attribute__((target(TARGET_VNNI)))
static void columns_four(const row_by_rows *j, const uint8_t *const *row, const float *const *scale, float *y) { columns_vnni(j, 4, 0, row, scale, y); }
__attribute__((target(TARGET_VNNI)))
static void columns_eight_picked(const row_by_rows *j, const uint8_t *const *row, const float *const *scale, float *y) { columns_vnni(j, 8, 1, row, scale, y); }
__attribute__((target(TARGET_VNNI)))
static void columns_eight(const row_by_rows *j, const uint8_t *const *row, const float *const *scale, float *y) { columns_vnni(j, 8, 0, row, scale, y); }
#endif

/* The rows of x as integers where that is faster; 0 if memory ran out. */
static int take_integers(job *j) {
    j->as_integers = NULL;
#ifdef X86
    if (j->level < VNNI || !has_lanes(j->bits, j->group) || j->rows > TOGETHER) return 1;
    const size_t q = (size_t)(2 * j->padded), each = q + (size_t)j->padded;        /* four bytes for each four of them */
    char *memory = aligned(TOGETHER * sizeof(integers) + (size_t)j->rows * each + 64);
    if (!memory) return 0;
    j->as_integers = (integers *)memory;
    memory += (TOGETHER * sizeof(integers) + 63) / 64 * 64;
    for (int64_t r = 0; r < j->rows; r++, memory += each) {
        integers *to = j->as_integers + r;
        to->q = (int8_t *)memory;
        to->start = (int32_t *)(memory + q);
        int32_t sums[2];
        float undo;
        const quantized row = {to->q, j->padded, &to->scale, &undo, sums};     /* undo is 1 where integers compute the row */
        if (quantize_row(j->x + r * j->stride, j->in, 2, j->level, &row)) to->q = NULL;
        for (int64_t k = 0; k < j->padded && to->q; k += 4) {
            int32_t sum = 0;
            for (int i = 0; i < 4; i++) sum += 128 * to->q[k + i] + to->q[j->padded + k + i];
            to->start[k / 4] = sum * (j->bits == 4 ? -8 : -128);
        }
    }
#endif
    return 1;
}

/* A copy of x, as floats, and no row lifted as yet; 0 if memory ran out. */
static int take_floats(job *j) {
    float *const floats = aligned((size_t)(j->rows * (j->in + 1)) * sizeof(float));
    if (!floats) return 0;
    for (int64_t r = 0; r < j->rows; r++) {
        const char *row = (const char *)j->x + r * j->stride * (int64_t)size_of(j->dtype);
        if (j->dtype == FLOAT32) memcpy(floats + r * j->in, row, (size_t)j->in * sizeof(float));
        else widen(row, j->dtype, j->in, floats + r * j->in, j->level);
        floats[j->rows * j->in + r] = 1.0f;
    }
    j->x = j->floats = floats;
    j->undo = floats + j->rows * j->in;
    j->stride = j->in;
    return 1;
}

/* Lifts the rows of extreme sizes that take floats, as activations.c says; 0 if memory ran out. */
static int lift_rows(job *j) {
    for (int64_t r = 0; r < j->rows; r++) {
        const float lift = j->as_integers && j->as_integers[r].q ? 1.0f : lift_of(j->x + r * j->stride, j->in, j->level);
        if (lift == 1.0f) continue;
        if (!j->floats && !take_floats(j)) return 0;
        for (int64_t k = 0; k < j->in; k++) j->floats[r * j->in + k] *= lift;
        j->undo[r] = 1.0f / lift;
    }
    return 1;
}

/* y[m] of up to four rows of x, `stride` apart, against one row of codes, in floats. */
void dots(const float *x, int64_t stride, int m, const int8_t *codes, int64_t in, int64_t group, const float *scale, float *y, int level) {
#ifdef X86
    if (level >= VNNI) {
        switch (m) {
            case 1: groups1_vnni(x, stride, codes, in, group, scale, y); break;
            case 2: groups2_vnni(x, stride, codes, in, group, scale, y); break;
            case 3: groups3_vnni(x, stride, codes, in, group, scale, y); break;
            default: groups4_vnni(x, stride, codes, in, group, scale, y);
        }
        return;
    }
    if (level >= AVX2) { groups_avx2(x, stride, m, codes, in, group, scale, y); return; }
#endif
    (void)level;
    groups_loop(x, stride, m, codes, in, group, scale, y);
}

static void store(const job *j, int64_t r, int64_t n, float y) {
    if (j->undo) y *= j->undo[r];
    y += j->bias ? one_of(j->bias, j->dtype, n) : 0.0f;
    char *to = j->y + (r * j->out + n) * (int64_t)size_of(j->dtype);
    if (j->dtype == FLOAT32) memcpy(to, &y, sizeof y);
    else narrow(&y, 1, j->dtype, to, PORTABLE);
}

static int in_floats(const job *j, int64_t first, int64_t last) {
    int8_t *line = j->bits < 8 ? aligned((size_t)j->in) : NULL;
    float *scales = j->scale_dtype != FLOAT32 ? aligned((size_t)j->groups * sizeof(float)) : NULL;
    const int ready = (j->bits == 8 || line) && (j->scale_dtype == FLOAT32 || scales);
    for (int64_t n = first; n < last && ready; n++) {
        const int8_t *codes = codes_of(j->codes + n * j->bytes, j->in, j->bits, line, j->level);
        const float *scale = floats_at(j->scale, j->scale_dtype, n * j->scale_step, j->groups, scales, j->level);
        int m;
        for (int64_t r = 0; r < j->rows; r += m) {
            float y[TOGETHER];
            m = j->as_integers ? 1 : j->rows - r < TOGETHER ? (int)(j->rows - r) : TOGETHER;
            if (j->as_integers && j->as_integers[r].q) continue;
            dots(j->x + r * j->stride, j->stride, m, codes, j->in, j->group, scale, y, j->level);
            for (int i = 0; i < m; i++) store(j, r + i, n, y[i]);
        }
    }
    free(line);
    free(scales);
    return ready;
}

static int results_of(const job *j, int64_t first, int64_t last) {
    int floats = !j->as_integers;
#ifdef X86
    float *scales = j->as_integers && j->scale_dtype != FLOAT32 ? aligned((size_t)(4 * j->groups) * sizeof(float)) : NULL;
    if (j->as_integers && j->scale_dtype != FLOAT32 && !scales) return 0;
    for (int64_t r = 0; r < j->rows && j->as_integers; r++) {
        const row_by_rows one = {j->as_integers + r, j->padded, j->in, j->bytes, j->group, j->groups};
        if (!one.x->q) { floats = 1; continue; }
        for (int64_t n = first; n < last; n += 4) {
            const uint8_t *row[4];
            const float *scale[4];
            float y[4];
            for (int c = 0; c < 4; c++) {
                const int64_t column = n + c < last ? n + c : last - 1;
                row[c] = (const uint8_t *)j->codes + column * j->bytes;
                scale[c] = floats_at(j->scale, j->scale_dtype, column * j->scale_step, j->groups, scales + c * j->groups, j->level);
            }
            if (j->group < 64) (j->bits == 4 ? columns_four_picked : columns_eight_picked)(&one, row, scale, y);
            else (j->bits == 4 ? columns_four : columns_eight)(&one, row, scale, y);
            for (int c = 0; c < 4 && n + c < last; c++) store(j, r, n + c, y[c]);
        }
    }
    free(scales);
#endif
    return !floats || in_floats(j, first, last);
}

/* Any codes and groups, for few rows; sums are float32. Returns 0, or -1 where memory ran out. */
int inro_linear_groups(const layer *l) {
    const int64_t rows = l->rows, in = l->in, out = l->out, padded = (in + 63) / 64 * 64;
    if (rows == 0 || out == 0) return 0;
    job j = {l->codes, l->bias, l->x, l->scale, l->y, rows, in, l->stride, out, l->group ? l->group : padded,
             l->group ? (in + l->group - 1) / l->group : 1, l->scale_step, bytes_of_row(in, l->bits), padded, l->bits, l->dtype,
             l->scale_dtype, l->level < 0 ? inro_level() : l->level, NULL, NULL, NULL};
    int threads = inro_threads(l->threads, 2.0 * (double)rows * (double)in * (double)out);
    int failed = (l->dtype != FLOAT32 && !take_floats(&j)) || !take_integers(&j) || !lift_rows(&j);
    if (failed) threads = 0;
    if (threads == 1) failed = !results_of(&j, 0, out);
    else if (threads > 1) {
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
    free(j.floats);
    free(j.as_integers);
    return failed ? -1 : 0;
}
