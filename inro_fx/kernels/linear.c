/* Linear layers with int8 weights on a CPU: activations become integers row by row, products are exact in int32.

       one level     x = s * q,               q in -127..127        s = max|x| / 127
       two levels    x = s * (128 * q1 + q0), q1 in -127..127, q0 in -64..63, s = max|x| / 16256

   One level is dynamic int8. With a fixed scale s and zero point z for all rows, q = clamp(round(x / s) + z) and z * sum(w) is
   taken off in the epilogue. Two levels hold 15 bits of each activation: as good as float activations beside int8 weights,
   and two integer products cost less than one of floats where the CPU multiplies bytes (VNNI).

   Weights stay as they are stored. For few rows of x, blocks of results read them where they lie; for many, a panel of columns is
   transposed into a scratch that stays in cache, or on AMX the rows are. Here: which of these ways runs, and what each thread does of it. activations.c
   makes the integers, product_*.c multiply them, groups.c has narrower codes and dots in floats. */

#include "linear.h"

#include <stdlib.h>

#ifdef _OPENMP
#include <omp.h>
#endif

enum { MANY = 6, MANY_AVX2 = 6, MANY_BFLOAT16 = 96, MANY_AMX = 5 };        /* rows from which transposing the weights pays */
enum { CHUNK_BYTES = 1 << 20 };                        /* of integers, which stay in the second-level cache */

typedef struct {
    const layer *l;
    const way *way;
    int64_t padded, chunk, bytes;                      /* numbers of a row of q; rows at a time; bytes of a row of codes */
    int level;
} job;

/* ---- which way ---- */

static void block_portable(const int8_t *x, int64_t padded, int m, const int8_t *const *w, int64_t k, const int32_t *sums,
                           int32_t out[MR][NR]) {
    (void)sums;
    for (int i = 0; i < m; i++)
        for (int j = 0; j < NR; j++) {
            const int8_t *a = x + i * padded, *b = w[j];
            int32_t total = 0;
            for (int64_t p = 0; p < k; p++) total += (int32_t)a[p] * b[p];
            out[i][j] = total;
        }
}

static void multiply_portable(const panel *p) { multiply_blocks(p, block_portable); }

static const way blocks_portable = {NR, BYTES, 0, NULL, multiply_portable, NULL};

/* By all rows of x and not by those of a chunk: results must not depend on the number of threads. */
static const way *way_of(const layer *l, int level) {
#ifdef X86
    const int panels = l->bits < 8 || l->group;        /* blocks know neither packed codes nor groups */
#ifdef TARGET_BFLOAT16
    if (l->dtype == BFLOAT16 && l->levels == 2 && l->rows >= MANY_BFLOAT16 && level >= VNNI && has_bfloat16())
        return &panels_bfloat16;
#endif
#ifdef AMX_HERE
    if (level >= AMX && !l->group && l->rows * l->levels >= MANY_AMX) return &rows_amx;
#endif
    if (level >= VNNI) return l->group ? &groups_vnni : panels || l->rows * l->levels >= MANY ? &panels_vnni : &blocks_vnni;
    if (level >= AVX2) {
        const int many = MANY_AVX2 * (l->levels == 1 && l->in >= 512 && l->in % 32 == 0 ? 2 : 1);
        return l->group ? &groups_avx2 : panels || l->rows >= many ? &panels_avx2 : &blocks_avx2;
    }
#endif
    (void)l, (void)level;
    return &blocks_portable;
}

/* Can integers multiply codes with such groups here, for many rows? (The float kernel of groups.c always can.) */
int inro_has_panels(int level, int64_t bits, int64_t group) {
    return level >= AVX2 && (bits < 8 || group) && group % 4 == 0 && group <= SAFE;
}

/* ---- what threads work with ---- */

/* For up to `chunk` rows of x. `y` are the results as floats where x is of half precision, `lines` one row as floats for each
   thread; `wide` says of each row whether two levels are too few for it. */
typedef struct {
    int8_t *q;
    float *scale, *undo, *y, *lines;
    int32_t *sums;
    unsigned char *wide;
    void *memory;
    _Alignas(64) char small[4096];                     /* enough for one row, where asking for memory would take longer */
} scratch;

static size_t round_up(size_t bytes) { return (bytes + 63) / 64 * 64; }

static int take(const job *j, int64_t rows, int threads, scratch *to) {
    const layer *l = j->l;
    const size_t q = round_up((size_t)(rows * 2 * j->padded)), scale = round_up((size_t)(rows * 2) * sizeof(float)),
                 sums = round_up((size_t)(rows * 2) * sizeof(int32_t)), wide = round_up((size_t)rows),
                 y = l->dtype == FLOAT32 ? 0 : round_up((size_t)(rows * l->out) * sizeof(float)),
                 lines = l->dtype == FLOAT32 ? 0 : (size_t)threads * round_up((size_t)l->in * sizeof(float)),
                 all = q + scale + sums + wide + y + lines;
    to->memory = all <= sizeof to->small ? NULL : aligned(all);
    char *start = all <= sizeof to->small ? to->small : to->memory;
    if (!start) return 0;
    to->q = (int8_t *)start;
    to->scale = (float *)(start + q);
    to->undo = to->scale + rows;
    to->sums = (int32_t *)(start + q + scale);
    to->wide = (unsigned char *)start + q + scale + sums;
    to->y = (float *)(start + q + scale + sums + wide);
    to->lines = (float *)(start + q + scale + sums + wide + y);
    return 1;
}

static int64_t groups_of(const layer *l) { return l->group ? (l->in + l->group - 1) / l->group : 1; }

/* What a thread keeps for a panel: its codes transposed, and unpacked before that; the scales of its groups. */
typedef struct {
    void *packed;
    int8_t *codes;
    float *by, *scales;                                /* of a column, where they are no floats */
    int32_t *start;
} panel_memory;

static int take_panel(const job *j, int64_t rows, panel_memory *to) {
    const layer *l = j->l;
    const int64_t columns = j->way->columns, scales = l->group ? groups_of(l) * columns : 0;
    memset(to, 0, sizeof *to);
    if (j->way->pack) to->packed = aligned((size_t)(j->padded * (j->way->bytes ? j->way->bytes : (rows * l->levels + 15) / 16 * 16)));
    if (l->bits < 8) to->codes = aligned((size_t)(columns * l->in));
    if (scales) to->by = aligned((size_t)scales * sizeof(float));
    if (scales) to->start = aligned((size_t)scales * sizeof(int32_t));
    to->scales = aligned((size_t)groups_of(l) * sizeof(float));
    return (!j->way->pack || to->packed) && (l->bits == 8 || to->codes) && (!scales || (to->by && to->start)) && to->scales;
}

static void give_back_panel(panel_memory *from) {
    free(from->packed); free(from->codes); free(from->by); free(from->start); free(from->scales);
}

/* ---- the steps of a chunk ---- */

/* Row `r` of x as floats: where it lies, or in `line`. */
static const float *row_of(const job *j, int64_t r, float *line) {
    const layer *l = j->l;
    const char *x = (const char *)l->x + r * l->stride * (int64_t)size_of(l->dtype);
    if (l->dtype == FLOAT32) return (const float *)x;
    widen(x, l->dtype, l->in, line, j->level);
    return line;
}

/* Row `r` of the chunk that begins at `start`, in the form of the way. */
static void quantize(const job *j, int64_t start, int64_t r, const scratch *with, float *line) {
    const layer *l = j->l;
    const int form = j->way->form, size = form == WORDS || form == AS_IT_IS ? 2 : l->levels;
    int8_t *q = with->q + r * j->padded * size;
    with->wide[r] = 0;
    if (form == AS_IT_IS) {
        memcpy(q, (const char *)l->x + (start + r) * l->stride * 2, (size_t)l->in * 2);
        memset(q + l->in * 2, 0, (size_t)(j->padded - l->in) * 2);
        with->wide[r] = (unsigned char)is_extreme_bfloat16(q, l->in, j->level);
        return;
    }
    const float *x = row_of(j, start + r, line);
    quantized to = {q, j->padded, with->scale + r, with->undo + r, with->sums + r * l->levels};
    if (l->fixed) {
        if (form == WORDS) to.q += j->padded;          /* the upper half of the row, to be widened from there front to back */
        quantize_fixed(x, l->in, *l->fixed, (float)*l->zero, j->level, &to);
        for (int64_t i = 0; i < j->padded && form == WORDS; i++) {
            const int16_t both = to.q[i];
            memcpy(q + 2 * i, &both, 2);
        }
        return;
    }
#ifdef X86
    if (form == WORDS) { with->wide[r] = (unsigned char)quantize_words(x, l->in, l->levels, &to); return; }
#endif
    with->wide[r] = (unsigned char)quantize_row(x, l->in, l->levels, j->level, &to);
    for (int64_t i = 0; i < l->levels * j->padded && form == UNSIGNED; i++) q[i] = (int8_t)(q[i] ^ -128);
}

static float bias_of(const void *bias, int dtype, int64_t column) { return bias ? one_of(bias, dtype, column) : 0.0f; }

/* The rows that are too wide for two levels, or of extreme sizes, in floats, for the columns from `first` to `last`; 0 if memory ran
   out. */
static int wide_rows(const job *j, int64_t start, int64_t here, int64_t first, int64_t last, const scratch *with, float *y,
                     float *line) {
    const layer *l = j->l;
    int64_t count = 0;
    for (int64_t r = 0; r < here; r++) count += with->wide[r];
    if (!count) return 1;
    float *x = aligned((size_t)(count * l->in) * sizeof(float)), *undo = aligned((size_t)count * sizeof(float)),
          *scales = aligned((size_t)groups_of(l) * sizeof(float));
    int64_t *which = aligned((size_t)count * sizeof(int64_t));
    int8_t *unpacked = l->bits < 8 ? aligned((size_t)l->in) : NULL;
    const int ready = x && undo && scales && which && (l->bits == 8 || unpacked);
    for (int64_t r = 0, i = 0; r < here && ready; r++)
        if (with->wide[r]) {
            const float *from = row_of(j, start + r, line), lift = lift_of(from, l->in, j->level);
            for (int64_t k = 0; k < l->in; k++) x[i * l->in + k] = from[k] * lift;
            undo[i] = 1.0f / lift;
            which[i++] = r;
        }
    for (int64_t n = first; n < last && ready; n++) {
        const int8_t *codes = (const int8_t *)l->codes + n * j->bytes;
        const float *scale = floats_at(l->scale, l->scale_dtype, n * l->scale_step, groups_of(l), scales, j->level);
        if (unpacked) { unpack(codes, l->in, l->bits, unpacked, j->level); codes = unpacked; }
        for (int64_t i = 0; i < count; i += TOGETHER) {
            const int m = count - i < TOGETHER ? (int)(count - i) : TOGETHER;
            float values[TOGETHER];
            dots(x + i * l->in, l->in, m, codes, l->in, l->group ? l->group : l->in, scale, values, j->level);
            for (int k = 0; k < m; k++) y[which[i + k] * l->out + n] = values[k] * undo[i + k] + bias_of(l->bias, l->dtype, n);
        }
    }
    free(x);
    free(undo);
    free(scales);
    free(which);
    free(unpacked);
    return ready;
}

/* What one level leaves undone where rows were lifted: columns from `first` to `last` of y are there without their biases. */
static void unlift(const job *j, int64_t here, int64_t first, int64_t last, const float *undo, float *y) {
    const layer *l = j->l;
    for (int64_t n = first; n < last; n++) {
        const float bias = bias_of(l->bias, l->dtype, n);
        for (int64_t r = 0; r < here; r++) y[r * l->out + n] = y[r * l->out + n] * undo[r] + bias;
    }
}

/* Results of `here` rows from `start`, for panels from `first` to `last`, into y [here, out]; 0 if memory ran out. */
static int multiply(const job *j, int64_t start, int64_t here, int64_t first, int64_t last, const scratch *with, float *y,
                    float *line) {
    const layer *l = j->l;
    const int columns = j->way->columns;
    const int8_t *const codes = l->codes;
    panel_memory own;
    if (!take_panel(j, here, &own)) { give_back_panel(&own); return 0; }
    float by[MOST_TOGETHER], plus[MOST_TOGETHER], *const scales = l->group ? own.by : by;
    int32_t minus[MOST_TOGETHER];
    panel p = {.packed = own.packed, .start = own.start, .by = scales, .plus = plus, .minus = minus, .in = l->in, .group = l->group,
               .levels = l->levels, .q = with->q, .x_scale = with->scale, .sums = with->sums, .rows = here, .padded = j->padded,
               .out = l->out};
    int lifted = 0;                                    /* two levels leave such rows to floats */
    for (int64_t r = 0; r < here && l->levels == 1; r++) lifted |= with->undo[r] != 1.0f;
    const void *const biases = lifted ? NULL : l->bias;
    for (int64_t i = first; i < last; i++) {
        const int64_t b = l->backwards ? first + last - 1 - i : i, n = b * columns;
        p.width = l->out - n < columns ? (int)(l->out - n) : columns;
        for (int i = 0; i < columns; i++) {            /* beyond the last column, the last one again */
            const int64_t column = n + (i < p.width ? i : p.width - 1);
            const float *scale = floats_at(l->scale, l->scale_dtype, column * l->scale_step, groups_of(l), own.scales, j->level);
            for (int64_t g = 0; g < groups_of(l); g++) scales[g * columns + i] = scale[g];
            plus[i] = bias_of(biases, l->dtype, column);
            minus[i] = l->fixed ? *l->zero * l->column_sums[column] : 0;
            if (l->bits < 8) unpack(codes + column * j->bytes, l->in, l->bits, own.codes + i * l->in, j->level);
        }
        p.codes = l->bits < 8 ? own.codes : codes + n * l->in;
        p.next = l->bits < 8 ? (const char *)own.codes : (const char *)(codes + (n + (l->backwards ? -columns : columns)) * l->in);
        p.y = y + n;
        if (j->way->pack && (j->way->bytes || i == first)) j->way->pack(&p);
        j->way->multiply(&p);
    }
    const int64_t end = last * columns < l->out ? last * columns : l->out;
    if (lifted) unlift(j, here, first * columns, end, with->undo, y);
    if (j->way->leave) j->way->leave();
    const int done = wide_rows(j, start, here, first * columns, end, with, y, line);
    give_back_panel(&own);
    return done;
}

/* ---- threads ---- */

/* Rows `start` to `start + here`, of which this thread does part `part` of `parts`: everything of them where it is the only one. */
static int one_chunk(const job *j, int64_t start, int64_t here, const scratch *with, int part, int parts) {
    const layer *l = j->l;
    float *line = with->lines + part * (int64_t)(round_up((size_t)l->in * sizeof(float)) / sizeof(float));
    const int64_t panels = (l->out + j->way->columns - 1) / j->way->columns;
    float *y = l->dtype == FLOAT32 ? (float *)l->y + start * l->out : with->y;
    for (int64_t r = share(here, part, parts); r < share(here, part + 1, parts); r++) quantize(j, start, r, with, line);
    if (parts > 1) {
        #pragma omp barrier
    }
    const int done = multiply(j, start, here, share(panels, part, parts), share(panels, part + 1, parts), with, y, line);
    if (parts > 1) {
        #pragma omp barrier
    }
    if (l->dtype != FLOAT32) {
        const int64_t from = share(here * l->out, part, parts), to = share(here * l->out, part + 1, parts);
        narrow(y + from, to - from, l->dtype, (char *)l->y + (start * l->out + from) * (int64_t)size_of(l->dtype), j->level);
        if (parts > 1) {
            #pragma omp barrier
        }
    }
    return done;
}

static int many_chunks(const job *j, int64_t chunks, int threads) {    /* each thread takes chunks of its own */
    int failed = 0;
    #pragma omp parallel num_threads(threads) reduction(|| : failed)
    {
        scratch own;
        const int ready = take(j, j->chunk, 1, &own);
        failed = !ready;
        #pragma omp for schedule(static)
        for (int64_t c = 0; c < chunks; c++) {
            const int64_t start = c * j->chunk, here = j->l->rows - start < j->chunk ? j->l->rows - start : j->chunk;
            if (ready && !one_chunk(j, start, here, &own, 0, 1)) failed = 1;
        }
        if (ready) free(own.memory);
    }
    return !failed;
}

static int few_chunks(const job *j, const scratch *shared, int part, int parts) {
    int done = 1;
    const int64_t rows = j->l->rows;
    for (int64_t start = 0; start < rows; start += j->chunk)
        if (!one_chunk(j, start, rows - start < j->chunk ? rows - start : j->chunk, shared, part, parts)) done = 0;
    return done;
}

/* Codes of less than eight bits, and groups, where `inro_has_panels`. Returns 0, or -1 where memory ran out. Every result is
   computed the same way whatever the number of threads. */
int inro_linear(const layer *l) {
    const int64_t rows = l->rows, in = l->in, out = l->out;
    if (rows == 0 || out == 0) return 0;
    const int64_t steps = (in + STEP - 1) / STEP + (in == 0);
    /* rows of q a power of two apart would all want the same lines of the first-level cache */
    const int64_t padded = (steps + (steps % 16 == 0)) * STEP;
    const int level = l->level < 0 ? inro_level() : l->level;
    job j = {l, way_of(l, level), padded, CHUNK_BYTES / padded / 24 * 12, bytes_of_row(in, l->bits), level};
    if (j.chunk < 96) j.chunk = 96;
    if (j.chunk > 1008) j.chunk = 1008;
    const int threads = inro_threads(l->threads, (double)rows * in * out * l->levels);
    int64_t chunks = (rows + j.chunk - 1) / j.chunk;
    /* Rows of its own need no other thread's integers, and all of the weights transposed by each. */
    if (threads > 1 && (chunks >= 2 * threads || (rows >= out && rows >= MANY * threads))) {
        chunks = (chunks + threads - 1) / threads * threads;           /* as many for each */
        j.chunk = ((rows + chunks - 1) / chunks + 3) / 4 * 4;
        return many_chunks(&j, (rows + j.chunk - 1) / j.chunk, threads) ? 0 : -1;
    }
    scratch shared;                                    /* few rows: the threads share them and split the columns */
    if (!take(&j, rows < j.chunk ? rows : j.chunk, threads, &shared)) return -1;
    int failed = 0;
    if (threads == 1) failed = !few_chunks(&j, &shared, 0, 1);
    else {
        #pragma omp parallel num_threads(threads) reduction(|| : failed)
        {
            int part = 0, parts = 1;
#ifdef _OPENMP
            part = omp_get_thread_num();
            parts = omp_get_num_threads();
#endif
            failed = !few_chunks(&j, &shared, part, parts);
        }
    }
    free(shared.memory);
    return failed ? -1 : 0;
}
