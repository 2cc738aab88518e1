/* Convolutions with int8 weights on a CPU, on images of uint8 codes.

   Each sample is quantized into a frame of zeros, pixel by pixel with the channels side by side, unless it comes as codes already. There
   the taps of a pixel are a few runs of bytes, which the products read where they lie: no matrix of patches is made. Codes of weights are
   transposed once a call, into a scratch that all threads share. A transposed convolution is one plain convolution for each phase of its
   stride. Here: which runs and phases there are, and what each thread does; images.c makes the integers, products.c multiplies them,
   results.c has scales, activations and formats. */

#include "convolution.h"

#include <stdlib.h>

#ifdef _OPENMP
#include <omp.h>
#endif

enum { NEAR = 192 << 10, ROUND = 512 << 10 };          /* bytes of images that are used by all panels before the next ones; of a round */

/* Results `first`, `first + step`, ... of each dimension, `count` of them, from pixels `stride` apart; their runs. */
typedef struct {
    int64_t first[3], step[3], count[3], stride[3];
    run *runs;
    int64_t number, length;                            /* of runs; codes of each */
    int64_t lines, pixels, pieces;                     /* of a sample: lines of so many pixels, each in so many pieces */
    char *packed;
} phase;

typedef struct {
    const convolution *l;
    const product *way;                                /* NULL: depthwise */
    phase *phases;
    run *runs;
    int64_t number, panels, each, bytes, units;        /* phases; panels of all groups, of a group; bytes of a panel; pieces of a sample */
    int64_t together, sample;                          /* samples of a round; bytes of one in the frames */
    int columns, level, zero, framed;
    frame f;
    int32_t *start;                                    /* [phases][panels][columns] */
    char *packed;
} job;

static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- phases and runs ---- */

/* Along dimension d: is tap k of this phase, and how far from the first pixel of a result does it lie? */
static int tap_at(const convolution *l, int d, int64_t part, int64_t k, int64_t *at) {
    if (!l->transposed) { *at = k * l->dilation[d] - l->pad[d]; return 1; }
    const int64_t from = part + l->pad[d] - k * l->dilation[d];
    if (from % l->stride[d]) return 0;
    *at = from / l->stride[d];
    return 1;
}

/* Codes of a run: taps in a row lie side by side where no channels of other groups stand between them. */
static int64_t length_of(const convolution *l) {
    const int joined = !l->transposed && l->groups == 1 && l->dilation[2] == 1;
    return l->in / l->groups * (joined ? l->kernel[2] : 1);
}

static void make_phase(job *j, int64_t number, run *runs) {
    const convolution *l = j->l;
    phase *p = j->phases + number;
    const int64_t here = l->in / l->groups;            /* channels of a tap */
    int64_t part[3] = {0, 0, 0}, at[3], rest = number;
    for (int d = 2; d >= 0; d--) {
        if (l->transposed) { part[d] = rest % l->stride[d]; rest /= l->stride[d]; }
        p->first[d] = part[d];
        p->step[d] = l->transposed ? l->stride[d] : 1;
        p->stride[d] = l->transposed ? 1 : l->stride[d];
        p->count[d] = (l->result[d] - part[d] + p->step[d] - 1) / p->step[d];
    }
    p->runs = runs;
    p->length = length_of(l);
    const int joined = p->length != here;
    for (int64_t a = 0; a < l->kernel[0]; a++)
        for (int64_t b = 0; b < l->kernel[1]; b++)
            for (int64_t c = 0; c < (joined ? 1 : l->kernel[2]); c++)
                if (tap_at(l, 0, part[0], a, at) && tap_at(l, 1, part[1], b, at + 1) && tap_at(l, 2, part[2], c, at + 2))
                    p->runs[p->number++] = (run){((at[0] + j->f.before[0]) * j->f.size[1] + at[1] + j->f.before[1]) * j->f.size[2]
                                                 + at[2] + j->f.before[2], ((a * l->kernel[1] + b) * l->kernel[2] + c) * here};
    for (int64_t i = 0; i < p->number; i++) p->runs[i].at *= l->in;
    const int flat = j->number == 1 && !j->framed && l->kernel[0] * l->kernel[1] * l->kernel[2] == 1
        && p->stride[0] * p->stride[1] * p->stride[2] == 1 && !memcmp(l->result, l->size, sizeof l->size);
    p->lines = flat ? 1 : p->count[0] * p->count[1];
    p->pixels = flat ? pixels_of(p->count) : p->count[2];
    const int64_t most = j->way ? j->way->piece : PIECE;
    p->pieces = (p->pixels + most - 1) / most;
    j->units += p->lines * p->pieces;
}

/* The frame around the images: as far as any tap of any phase reaches. */
static void measure_frame(job *j) {
    const convolution *l = j->l;
    for (int d = 0; d < 3; d++) {
        int64_t before = 0, after = 0, at;
        for (int64_t part = 0; part < (l->transposed ? l->stride[d] : 1); part++)
            for (int64_t k = 0; k < l->kernel[d]; k++)
                if (tap_at(l, d, part, k, &at)) {
                    const int64_t step = l->transposed ? l->stride[d] : 1, count = (l->result[d] - part + step - 1) / step;
                    before = most(before, -at);
                    if (count > 0) after = most(after, (count - 1) * (l->transposed ? 1 : l->stride[d]) + at - (l->size[d] - 1));
                }
        j->f.before[d] = before;
        j->f.size[d] = before + l->size[d] + after;
        j->framed |= before > 0 || after > 0;
    }
}

static const product *way_of(const convolution *l, int level) {
    const int64_t out = l->out / l->groups;
    if (l->groups > 1 && l->in == l->groups && l->out == l->groups && !l->transposed) return NULL;
#ifdef X86
#ifdef AMX_HERE
    if (level >= AMX && fills_tiles(length_of(l))) return &tiles_amx;
#endif
    if (level >= VNNI) return out <= 16 ? &narrow_vnni : &wide_vnni;
    if (level >= AVX2) return l->levels == 2 ? &levels_avx2 : &product_avx2;
#endif
    (void)level, (void)out;
    return &product_portable;
}

/* 0 where memory ran out. */
static int make_plan(job *j) {
    const convolution *l = j->l;
    const int64_t taps = l->kernel[0] * l->kernel[1] * l->kernel[2];
    j->way = way_of(l, j->level);
    j->columns = j->way ? j->way->columns : WIDEST;
    j->f.wide = j->way ? j->way->wide : j->level == AVX2;
    j->zero = l->fixed ? l->input.zero : j->f.wide ? 0 : 128;
    j->f.zero = j->zero;
    j->number = l->transposed ? pixels_of(l->stride) : 1;
    measure_frame(j);
    j->framed |= l->x_form != CODES || j->f.wide || !j->way || length_of(l) % j->way->reads(length_of(l)) != 0;
    j->each = j->way ? (l->out / l->groups + j->columns - 1) / j->columns : 0;
    j->panels = j->way ? l->groups * j->each : (l->out + WIDEST - 1) / WIDEST;
    j->phases = calloc((size_t)j->number, sizeof *j->phases);
    j->runs = calloc((size_t)taps, sizeof *j->runs);
    if (!j->phases || !j->runs) return 0;
    int64_t before = 0, all = 0;
    for (int64_t i = 0; i < j->number; i++) {
        phase *p = j->phases + i;
        make_phase(j, i, j->runs + before);
        before += p->number;
        all += j->panels * (j->way ? j->way->bytes(p->number, p->length) : depthwise_bytes(p->number));
    }
    j->f.plane = pixels_of(j->f.size) * l->in + 2 * WIDEST;            /* tiles read to the end of a word, or of WIDEST channels */
    j->sample = j->f.plane * (j->f.wide ? 2 : l->levels);
    j->together = least(l->n, most(1, ROUND / j->sample));
    j->f.data = j->framed ? aligned((size_t)(j->together * j->sample)) : NULL;
    j->packed = aligned((size_t)all);
    j->start = aligned((size_t)(j->number * j->panels * j->columns) * sizeof(int32_t));
    if ((j->framed && !j->f.data) || !j->packed || !j->start) return 0;
    char *to = j->packed;
    for (int64_t i = 0; i < j->number; i++) {
        phase *p = j->phases + i;
        p->packed = to;
        to += j->panels * (j->way ? j->way->bytes(p->number, p->length) : depthwise_bytes(p->number));
    }
    return 1;
}

/* ---- what threads do ---- */

typedef struct { int64_t channel, input; int width; } columns_of;      /* the channels of a panel, and where theirs of x begin */

static columns_of panel_at(const job *j, int64_t panel) {
    const convolution *l = j->l;
    if (!j->way) {
        const int64_t from = panel * WIDEST;
        return (columns_of){from, from, (int)least(WIDEST, l->out - from)};
    }
    const int64_t group = panel / j->each, out = l->out / l->groups, from = panel % j->each * j->columns;
    return (columns_of){group * out + from, group * (l->in / l->groups), (int)least(j->columns, out - from)};
}

static void pack(const job *j, int64_t i) {
    const convolution *l = j->l;
    const phase *p = j->phases + i / j->panels;
    const columns_of here = panel_at(j, i % j->panels);
    const int64_t apart = l->kernel[0] * l->kernel[1] * l->kernel[2] * (l->in / l->groups);
    const int8_t *codes = l->codes + here.channel * apart;
    int32_t *start = j->start + i * j->columns;
    if (!j->way) {
        pack_depthwise(codes, apart, here.width, p->runs, p->number, j->zero, p->packed + i % j->panels * depthwise_bytes(p->number), start,
                       j->level);
        return;
    }
    j->way->pack(codes, apart, here.width, p->runs, p->number, p->length, j->zero,
                 p->packed + i % j->panels * j->way->bytes(p->number, p->length), start);
}

/* Piece `unit` of a phase for one panel, of sample n whose scale is s: it is number `k` of its round. */
static void compute(const job *j, const phase *p, int64_t unit, int64_t panel, int64_t n, int64_t k, float s) {
    const convolution *l = j->l;
    const columns_of here = panel_at(j, panel);
    const int64_t line = unit / p->pieces, part = unit % p->pieces, from = share(p->pixels, (int)part, (int)p->pieces),
                  pixels = share(p->pixels, (int)part + 1, (int)p->pieces) - from, a = line / p->count[1], b = line % p->count[1];
    const int size = j->f.wide ? 2 : 1, levels = l->levels == 2 && !j->f.wide ? 2 : 1;
    const int64_t step = p->stride[2] * l->in;
    const char *x = j->framed ? j->f.data + k * j->sample : (const char *)l->x + n * pixels_of(l->size) * l->in;
    x += (((a * p->stride[0] * j->f.size[1] + b * p->stride[1]) * j->f.size[2] + from * p->stride[2]) * l->in + here.input) * size;
    const int32_t *start = j->start + ((p - j->phases) * j->panels + panel) * j->columns;
    const char *packed = p->packed + panel * (j->way ? j->way->bytes(p->number, p->length) : depthwise_bytes(p->number));
    _Alignas(64) int32_t sums[2][PIECE * WIDEST];
    for (int level = 0; level < levels; level++) {
        const char *at = x + level * j->f.plane;
        if (!j->way) { depthwise(at, step, (int)pixels, p->runs, p->number, packed, start, sums[level], j->level); continue; }
        const int64_t tiles = (pixels + j->way->most - 1) / j->way->most;
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t first = share(pixels, (int)t, (int)tiles), rows = share(pixels, (int)t + 1, (int)tiles) - first;
            j->way->multiply(at + first * step * size, step, p->runs, p->number, p->length, packed, start, sums[level] + first * j->columns,
                             (int)rows);
        }
    }
    float by[WIDEST], plus[WIDEST];
    for (int c = 0; c < j->columns; c++) {
        const int64_t channel = here.channel + (c < here.width ? c : 0);
        by[c] = s * l->scale[channel * l->scale_step];
        plus[c] = l->bias ? l->bias[channel] : 0.0f;
    }
    const int64_t first = ((a * p->step[0] + p->first[0]) * l->result[1] + b * p->step[1] + p->first[1]) * l->result[2]
        + from * p->step[2] + p->first[2];
    int floats = 0;
#ifdef X86
    floats = j->way == &levels_avx2;
#endif
    const piece result = {n, first, p->step[2], here.channel, (int)pixels, j->columns, here.width, by, plus, sums[0],
                          levels == 2 ? sums[1] : NULL, floats ? (const float *)(const void *)sums[0] : NULL};
    finish(l, &result, j->level);
}

/* Units from `first` to `last` of `count` samples from n on (in the order of phases, and there of samples), of panels from `from` to `to`:
   as many units at a time as stay near. With `packs` a panel is packed where it is used first, so that it is still near. */
static void compute_some(const job *j, int64_t first, int64_t last, int64_t from, int64_t to, int64_t n, int64_t count, const float *scales,
                         int packs) {
    for (int64_t i = 0; i < j->number; i++) {
        const phase *p = j->phases + i;
        const int64_t each = p->lines * p->pieces, all = each * count, end = least(last, all), start = most(first, 0);
        const int64_t bytes = p->pixels / most(p->pieces, 1) * p->stride[2] * p->stride[1] * j->l->in, some = most(1, NEAR / most(bytes, 1));
        for (int64_t u = start; u < end; u += some)
            for (int64_t panel = from; panel < to; panel++) {
                if (packs && u == start) pack(j, i * j->panels + panel);
                for (int64_t v = u; v < least(end, u + some); v++) compute(j, p, v % each, panel, n + v / each, v / each, scales[n + v / each]);
            }
        first -= all;
        last -= all;
    }
}

/* The scale of sample n, and 1 where integers do not fit it. */
static int scale_of(const convolution *l, int64_t n, float *s) {
    *s = l->input.scale;
    if (l->fixed) return 0;
    float largest = 0.0f;
    const int floats = inro_range(l, n, &largest);
    *s = largest / (l->levels == 2 ? 16256.0f : 127.0f);
    if (*s < 1.17549435e-38f) *s = 1.0f;               /* all of it is zero */
    return floats;
}

/* Every result is computed the same way whatever the number of threads. */
int inro_convolution(const convolution *l) {
    job j = {.l = l, .level = l->level < 0 ? inro_level() : l->level};
    float *scales = aligned((size_t)l->n * sizeof(float));
    int failed = !scales || !make_plan(&j), floats = 0;
    const double products = (double)l->n * pixels_of(l->result) * l->out * (l->in / l->groups) * pixels_of(l->kernel);
    const int64_t weights = l->out * (l->in / l->groups) * pixels_of(l->kernel);
    const int threads = failed ? 1 : inro_threads(l->threads, products / (l->transposed ? pixels_of(l->stride) : 1) * l->levels);
    #pragma omp parallel num_threads(threads) if (threads > 1)
    {
        int part = 0, parts = 1;
#ifdef _OPENMP
        part = omp_get_thread_num();
        parts = omp_get_num_threads();
#endif
        const int64_t rows = j.f.size[0] * j.f.size[1], packs = failed ? 0 : j.number * j.panels;
        int mine = 0;
        for (int64_t n = share(l->n, part, parts); n < share(l->n, part + 1, parts) && !failed; n++) mine |= scale_of(l, n, scales + n);
        /* large weights beside small images: each thread has panels of its own, else pieces */
        const int by_panels = parts == 1 || (j.panels >= parts && (j.units * j.together < 4 * parts || weights > j.sample * j.together));
        if (!by_panels)
            for (int64_t i = share(packs, part, parts); i < share(packs, part + 1, parts); i++) pack(&j, i);
        if (mine) {
            #pragma omp atomic write
            floats = 1;
        }
        #pragma omp barrier
        for (int64_t n = 0; n < l->n && !failed; n += j.together) {
            const int64_t count = least(j.together, l->n - n), units = j.units * count;
            for (int64_t k = 0; k < count && j.framed; k++) {
                frame to = j.f;
                to.data += k * j.sample;
                if (fill_frame(l, n + k, 1.0f / scales[n + k], &to, share(rows, part, parts), share(rows, part + 1, parts), j.level)) {
                    #pragma omp atomic write
                    floats = 1;
                }
            }
            #pragma omp barrier
            int stop;                                  /* nobody writes it between these barriers: all threads leave together */
            #pragma omp atomic read
            stop = floats;
            if (stop) break;
            if (by_panels) compute_some(&j, 0, units, share(j.panels, part, parts), share(j.panels, part + 1, parts), n, count, scales, n == 0);
            else compute_some(&j, share(units, part, parts), share(units, part + 1, parts), 0, j.panels, n, count, scales, 0);
            #pragma omp barrier
        }
        if (!failed && j.way && j.way->leave) j.way->leave();
    }
    free(scales);
    free(j.phases);
    free(j.runs);
    free(j.f.data);
    free(j.packed);
    free(j.start);
    return failed ? -1 : floats;
}
