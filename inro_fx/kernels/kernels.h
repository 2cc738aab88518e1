/* What the files of this library share. Plain C with OpenMP: no header of torch is needed. */

#ifndef INRO_KERNELS_H
#define INRO_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define X86 1
#define TARGET_VNNI "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma"
#if defined(__clang__) || __GNUC__ >= 10
#define TARGET_BFLOAT16 TARGET_VNNI ",avx512bf16"
#endif
#if defined(__linux__) && !defined(__clang__) && __GNUC__ >= 11
#define AMX_HERE 1                                     /* whose registers the system must be asked for */
#endif
#endif

enum { PORTABLE = 0, AVX2 = 1, VNNI = 2, AMX = 3 };    /* levels of instructions, each with all of those before */
enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };       /* dtypes of activations and results */

/* numbers.c */
int inro_level(void);
void inro_limit_level(int level);
#pragma GCC visibility push(hidden)                   /* so that no library with the same names takes their place */
int has_bfloat16(void);
int inro_threads(int wanted, double products);
size_t size_of(int dtype);
void *aligned(size_t size);
void prefer_huge_pages(void *start, size_t bytes);
int64_t share(int64_t all, int part, int parts);
float one_of(const void *numbers, int dtype, int64_t index);
void widen(const void *from, int dtype, int64_t n, float *to, int level);
void narrow(const float *from, int64_t n, int dtype, void *to, int level);
const float *floats_at(const void *numbers, int dtype, int64_t start, int64_t n, float *line, int level);
int64_t bytes_of_row(int64_t columns, int bits);
void unpack(const void *row, int64_t columns, int bits, int8_t *to, int level);
float lift_of(const float *x, int64_t n, int level);
int is_extreme_bfloat16(const void *x, int64_t n, int level);
#pragma GCC visibility pop

/* y[rows, out] = x[rows, in] @ (codes * scale).T + bias; as Layer in binding.py */
typedef struct {
    const void *x;                                     /* rows are `stride` numbers apart; all else lies without gaps */
    const void *codes;                                 /* of `bits`, as groups.c says */
    const void *scale;                                 /* [out, groups] of scale_dtype, rows `scale_step` apart (0: one row serves all) */
    const void *bias;                                  /* or NULL */
    void *y;
    int64_t rows, in, stride, out, group, scale_step;  /* group: columns of a scale, 0 for all */
    int bits, dtype, scale_dtype, levels, threads, level;          /* dtype of x, bias and y; level -1: the best that this CPU has */
    const float *fixed;                                /* scale and zero point of x, or NULL: row by row */
    const int32_t *zero, *column_sums;                 /* the codes of each column added up */
    int backwards;                                     /* from the last columns to the first */
} layer;

/* A row of activations so small that its scale would be no normal number, or so large that the scale times the sums would overflow, is
   lifted: multiplied by a power of two, which `undo` takes off the results. */
#define LIFT 0x1p64f                                  /* from 2^-149 to within `LOW` and `HIGH`, and from 2^128 */
#define LOW 0x1p-96f                                  /* activations from here on have normal scales */
#define HIGH 0x1p96f                                  /* 2^96 / 127 * 2^30 and 2^96 * 2^7 * 65536 are finite, with room */

#define OUTLIER 350.0                                 /* one number against the mean of the others: they keep about 0.5 % */

static inline float lift_by(float largest) { return largest > HIGH ? 1.0f / LIFT : largest < LOW && largest > 0.0f ? LIFT : 1.0f; }

/* activations.c */
#pragma GCC visibility push(hidden)
typedef struct { int8_t *q; int64_t padded; float *scale, *undo; int32_t *sums; } quantized;  /* a row of x, sums of its levels */
int quantize_row(const float *x, int64_t n, int levels, int level, const quantized *to);
int quantize_words(const float *x, int64_t n, int levels, const quantized *to);
void quantize_fixed(const float *x, int64_t n, float s, float zero, int level, const quantized *to);
#pragma GCC visibility pop

/* linear.c */
int inro_linear(const layer *l);
int inro_has_panels(int level, int64_t bits, int64_t group);

/* recurrent.c: all steps of one layer in one direction, as Recurrence in binding.py */
typedef struct {
    const float *gates;                                /* [steps, batch, gates * hidden]: x @ W_ih.T + b_ih */
    const int8_t *codes;                               /* [gates * hidden, hidden] */
    const float *scale;                                /* of each row of codes, or (`scale_step` 0) of all */
    const float *bias;                                 /* or NULL */
    float *h, *c, *y;                                  /* states [batch, hidden], which become the last; y [steps, batch, hidden] */
    int64_t steps, batch, hidden, scale_step;
    int cell, reverse, levels, threads, level;         /* cell: 0 LSTM, 1 GRU, 2 tanh, 3 ReLU */
} recurrence;
int inro_recurrent(const recurrence *r);

/* convolution.c: one convolution of 1 to 3 dimensions, plain or transposed, as Convolution in binding.py. Images are */
enum { CODES, PLANES, CHANNELS_LAST };                 /* uint8 [n, d, h, w, c], float32 [n, c, d, h, w], float32 [n, d, h, w, c] */
enum { NOTHING, CLAMP, LEAKY, HARDSIGMOID, HARDSWISH, SIGMOID, SILU, TANH, GELU };     /* activations */
typedef struct { float scale; int32_t zero; } format;  /* number = scale * (code - zero) */
typedef struct {
    const void *x;                                     /* [n, in, *size] */
    const int8_t *codes;                               /* [out, *kernel, in / groups]; transposed: out counts group by group */
    const float *scale, *bias;                         /* scale of each output channel, or (`scale_step` 0) of all; bias or NULL */
    const void *residual;                              /* what is added to the results, laid out like y: CODES or CHANNELS_LAST; or NULL */
    void *y;                                           /* [n, out, *result] */
    int64_t n, in, out, groups, scale_step;
    int64_t size[3], kernel[3], stride[3], pad[3], dilation[3], result[3];         /* pad: before the first */
    format input, added, output;                       /* of x, the residual, and y where they are codes; input also where `fixed` */
    float low, high;                                   /* of CLAMP; `low` the slope of LEAKY */
    int x_form, y_form, r_form, transposed, fixed, levels, activation, threads, level;     /* fixed: of one level; else each sample has a scale */
} convolution;
int inro_convolution(const convolution *l);            /* 0; 1 where floats must compute it; -1 where memory ran out */

/* pool.c: the largest of each window of codes [n, h, w, c] */
typedef struct {
    const uint8_t *x;
    uint8_t *y;                                        /* [n, *result, c] */
    int64_t n, channels, size[2], kernel[2], stride[2], pad[2], dilation[2], result[2];
    int threads;
} pool;
void inro_max_pool(const pool *p);

/* groups.c */
int inro_expand(const void *codes, int64_t rows, int64_t columns, int bits, int64_t group, const void *scale, int scale_dtype,
                int64_t scale_step, const int64_t *ids, void *to, int dtype, int threads, int level);
int inro_linear_groups(const layer *l);
#pragma GCC visibility push(hidden)
enum { TOGETHER = 4 };                                 /* rows of x for which a code is converted once */
void dots(const float *x, int64_t stride, int m, const int8_t *codes, int64_t in, int64_t group, const float *scale, float *y, int level);
#pragma GCC visibility pop

/* operators.c */
int inro_covers(int op, int dtype, int64_t bits, int64_t group, int64_t columns, int64_t rows, const char **why);
int inro_covers_conv(int dtype, int64_t bits, int64_t group, int64_t columns, int levels, double each, const char **why);
int inro_register(void *const *addresses);

#endif
