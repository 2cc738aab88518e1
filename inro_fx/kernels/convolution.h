/* What the parts of a convolution share; convolution.c puts them together. */

#ifndef INRO_CONVOLUTION_H
#define INRO_CONVOLUTION_H

#include "linear.h"

enum { PIECE = 64, WIDEST = 64 };                      /* pixels of a piece, and columns of a panel, at most */

/* Where in x, from the first tap of a pixel on, and where in a row of the weight some taps lie side by side. */
typedef struct { int64_t at, from; } run;

/* The images as integers, in a frame of zeros: uint8 (two planes where there are two levels) or int16. */
typedef struct {
    char *data;
    int64_t before[3], size[3], plane;                 /* of the frame; bytes from plane to plane */
    int wide, zero;                                    /* int16? what stands for 0 */
} frame;

/* How the products of up to `most` pixels, `step` elements apart, and a panel of columns are computed: into to [pixels][columns]. */
typedef struct {
    int columns, most, piece, wide;                    /* piece: pixels whose results are finished together; wide: x are int16 */
    int64_t (*reads)(int64_t length);                  /* a run is read in steps of so many elements */
    void (*multiply)(const void *x, int64_t step, const run *runs, int64_t count, int64_t length, const void *packed, const int32_t *start,
                     int32_t *to, int pixels);
    /* bytes of a panel of runs of this length; what x of zero adds to the sums, taken off at the start of them */
    int64_t (*bytes)(int64_t count, int64_t length);
    void (*pack)(const int8_t *codes, int64_t apart, int width, const run *runs, int64_t count, int64_t length, int zero, void *packed,
                 int32_t *start);
    void (*leave)(void);                               /* called when a thread has done its part, or NULL */
} product;

/* A piece of a line of results: pixels `first`, `first + step`, ... of sample n, and channels from `channel` on. */
typedef struct {
    int64_t n, first, step, channel;
    int pixels, columns, width;
    const float *by, *plus;                            /* of the columns */
    const int32_t *high, *low;                         /* sums [pixels][columns]; the second level or NULL */
    const float *sums;                                 /* in their place, where they are floats already */
} piece;

#pragma GCC visibility push(hidden)
/* images.c */
int64_t pixels_of(const int64_t size[3]);
int inro_range(const convolution *l, int64_t n, float *largest);
int fill_frame(const convolution *l, int64_t n, float by, const frame *to, int64_t first, int64_t last, int level);

/* products.c */
extern const product product_portable;
#ifdef X86
extern const product narrow_vnni, wide_vnni, product_avx2, levels_avx2;
#endif
#ifdef AMX_HERE
extern const product tiles_amx;                        /* product_amx.c */
int fills_tiles(int64_t length);
#endif
void depthwise(const void *x, int64_t step, int pixels, const run *runs, int64_t count, const void *packed, const int32_t *start, int32_t *to,
               int level);
int64_t depthwise_bytes(int64_t count);
void pack_depthwise(const int8_t *codes, int64_t taps, int width, const run *runs, int64_t count, int zero, void *packed, int32_t *start,
                    int level);

/* results.c */
void finish(const convolution *l, const piece *p, int level);
#pragma GCC visibility pop

#endif
