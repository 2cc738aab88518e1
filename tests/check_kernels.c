/* Checks the kernels against sums in int64 and double, on whatever CPU they are compiled for: tests/check_kernels.sh runs it under
   sanitizers and on an emulated Arm. */

#define _DEFAULT_SOURCE                                /* mmap */

#include "../inro_fx/kernels/linear.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static uint64_t state = 88172645463325252ull;
static uint32_t draw(void) { state ^= state << 13; state ^= state >> 7; state ^= state << 17; return (uint32_t)(state >> 32); }

/* Memory that ends where a page begins that nobody may read: instructions that no sanitizer sees are caught, too. */
typedef struct { void *start, *memory; size_t all; } guarded;

static guarded guard(size_t size) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), whole = (size + page - 1) / page * page;
    guarded g = {.all = whole + page};
    g.memory = mmap(NULL, g.all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (g.memory == MAP_FAILED || mprotect((char *)g.memory + whole, page, PROT_NONE)) { perror("mmap"); exit(2); }
    g.start = (char *)g.memory + whole - size;
    return g;
}

static void let_go(guarded g) { munmap(g.memory, g.all); }

static int check(int64_t rows, int64_t in, int64_t out, int levels, int level, int threads, int kind, int fixed) {
    const int64_t stride = in + 3;
    float *x = malloc((size_t)(rows * stride + 1) * sizeof(float)), *y = malloc((size_t)(rows * out + 1) * sizeof(float));
    const guarded codes = guard((size_t)(out * in));
    int8_t *w = codes.start;
    float *scale = malloc((size_t)(out + 1) * sizeof(float)), *bias = malloc((size_t)(out + 1) * sizeof(float));
    for (int64_t i = 0; i < rows * stride; i++)
        x[i] = kind == 1 ? 1.0f : kind == 2 ? -1.0f : (float)((int32_t)draw()) / 2147483648.0f * (i % 7 == 0 ? 100.0f : 1.0f);
    for (int64_t i = 0; i < out * in; i++) w[i] = (int8_t)(kind == 1 ? 127 : kind == 2 ? -128 : (int)(draw() % 256) - 128);
    for (int64_t i = 0; i < out; i++) scale[i] = 0.5f + (float)(draw() % 100) / 100.0f, bias[i] = (float)(draw() % 9) - 4.0f;
    const float step = 0.01f;
    const int32_t zero = (int32_t)(draw() % 255) - 127;
    int32_t *column_sums = calloc((size_t)(out + 1), sizeof(int32_t));
    for (int64_t i = 0; i < out * in; i++) column_sums[i / in] += w[i];
    const layer l = {x, w, scale, bias, y, rows, in, stride, out, 0, 1, 8, FLOAT32, FLOAT32, levels, threads, level, fixed ? &step : NULL, &zero, column_sums};
    int bad = inro_linear(&l);
    int8_t *q = malloc((size_t)(levels * (in + STEP)));
    for (int64_t r = 0; r < rows && !bad; r++) {
        float s, undo;
        int32_t sums[2];
        const quantized row = {q, in, &s, &undo, sums};
        if (fixed) quantize_fixed(x + r * stride, in, step, (float)zero, PORTABLE, &row);
        else if (quantize_row(x + r * stride, in, levels, PORTABLE, &row)) continue;        /* in floats: checked by the tests in Python */
        for (int64_t n = 0; n < out && !bad; n++) {
            int64_t high = 0, low = 0;
            for (int64_t k = 0; k < in; k++) {
                high += (int64_t)q[k] * w[n * in + k];
                if (levels == 2) low += (int64_t)q[in + k] * w[n * in + k];
            }
            if (fixed) high -= (int64_t)zero * column_sums[n];
            double want = (levels == 2 ? 128.0 * (double)high + (double)low : (double)high) * s * scale[n] + bias[n];
            double error = fabs(want - (double)y[r * out + n]), limit = 1e-6 * (fabs(want) + fabs((double)bias[n])) + 1e-30;
            if (fixed) limit += 1e-6 * fabs((double)zero * column_sums[n] * s * scale[n]);
            if (levels == 2) limit += 2e-5 * (fabs(want) + 127.0 * s * scale[n] * 128.0 * in / 100.0);
            if (!(error <= limit)) {
                printf("rows %lld in %lld out %lld levels %d level %d threads %d kind %d: [%lld, %lld] is %g, not %g\n", (long long)rows,
                       (long long)in, (long long)out, levels, level, threads, kind, (long long)r, (long long)n, y[r * out + n], want);
                bad = 1;
            }
        }
    }
    free(x); free(y); free(scale); free(bias); free(q); free(column_sums);
    let_go(codes);
    return bad;
}

/* A row of `bits`-bit codes, packed as numerics/bits.py does. */
static void pack(const int8_t *codes, int64_t columns, int bits, uint8_t *to) {
    int shift = 0;
    for (int width = 4; width; width /= 2) {
        if (!(bits & width)) continue;
        const int in_byte = 8 / width;
        const int64_t bytes = (columns * width + 7) / 8;
        memset(to, 0, (size_t)bytes);
        for (int64_t k = 0; k < columns; k++) {
            const int field = ((codes[k] + (1 << (bits - 1))) >> shift) & ((1 << width) - 1);
            to[k / in_byte] = (uint8_t)(to[k / in_byte] | field << (k % in_byte * width));
        }
        to += bytes;
        shift += width;
    }
}

static int check_groups(int64_t rows, int64_t in, int64_t out, int bits, int64_t group, int dtype, int level, int threads) {
    const int64_t step = group ? group : in, groups = (in + step - 1) / step, bytes = bits == 8 ? in : bytes_of_row(in, bits), stride = in + 1;
    int8_t *w = malloc((size_t)(out * in));
    uint8_t *codes = malloc((size_t)(out * bytes));
    float *scale = malloc((size_t)(out * groups) * sizeof(float)), *floats = malloc((size_t)(rows * stride) * sizeof(float));
    void *x = malloc((size_t)(rows * stride) * 4), *bias = malloc((size_t)out * 4), *y = malloc((size_t)(rows * out) * 4), *rowsof = malloc((size_t)(out * in) * 4);
    int64_t *ids = malloc((size_t)out * sizeof(int64_t));
    for (int64_t i = 0; i < out * in; i++) w[i] = (int8_t)((int)(draw() % (1u << bits)) - (1 << (bits - 1)));
    for (int64_t n = 0; n < out; n++) {
        if (bits == 8) memcpy(codes + n * bytes, w + n * in, (size_t)in);
        else pack(w + n * in, in, bits, codes + n * bytes);
        ids[n] = draw() % (uint32_t)out;
        const float plus = (float)(draw() % 9) - 4.0f;
        if (dtype == FLOAT32) ((float *)bias)[n] = plus;
        else narrow(&plus, 1, dtype, (uint16_t *)bias + n, level);
    }
    for (int64_t i = 0; i < out * groups; i++) scale[i] = 0.5f + (float)(draw() % 64) / 64.0f;
    for (int64_t i = 0; i < rows * stride; i++) {
        floats[i] = (float)((int32_t)draw() % 128) / 64.0f;              /* exact in half precision */
        if (dtype == FLOAT32) ((float *)x)[i] = floats[i];
        else narrow(floats + i, 1, dtype, (uint16_t *)x + i, level);
    }
    const int halves = draw() % 2;                         /* scales in half precision: these are exact in it */
    uint16_t *half = malloc((size_t)(out * groups) * sizeof(uint16_t));
    narrow(scale, out * groups, FLOAT16, half, level);
    const void *by = halves ? (void *)half : (void *)scale;
    const int by_dtype = halves ? FLOAT16 : FLOAT32;
    const int panels = rows > 8 && groups > 1 && inro_has_panels(level, bits, group);
    const layer l = {x, codes, by, bias, y, rows, in, stride, out, group, groups, bits, dtype, by_dtype, 2, threads, level, NULL, NULL, NULL};
    int bad = (panels ? inro_linear(&l) : inro_linear_groups(&l))
        || inro_expand(codes, out, in, bits, group, by, by_dtype, groups, ids, rowsof, dtype, threads, level);
    const double unit = dtype == FLOAT32 ? 1e-6 : dtype == BFLOAT16 ? 4e-3 : 5e-4;
    for (int64_t n = 0; n < out && !bad; n++) {
        for (int64_t k = 0; k < in && !bad; k++) {
            const double want = (double)w[ids[n] * in + k] * scale[ids[n] * groups + k / step];
            bad = !(fabs(one_of(rowsof, dtype, n * in + k) - want) <= unit * fabs(want));
        }
        for (int64_t r = 0; r < rows && !bad; r++) {
            double want = one_of(bias, dtype, n), size = 1.0;
            for (int64_t k = 0; k < in; k++) {
                const double term = (double)floats[r * stride + k] * w[n * in + k] * scale[n * groups + k / step];
                want += term;
                size += fabs(term);
            }
            bad = !(fabs(one_of(y, dtype, r * out + n) - want) <= unit * fabs(want) + (panels || level >= VNNI ? 5e-4 : 1e-6) * size);
        }
    }
    if (bad) printf("groups: rows %lld in %lld out %lld bits %d group %lld dtype %d level %d threads %d\n", (long long)rows, (long long)in,
                    (long long)out, bits, (long long)group, dtype, level, threads);
    free(w); free(codes); free(scale); free(half); free(floats); free(x); free(bias); free(y); free(rowsof); free(ids);
    return bad;
}

/* Every number of half precision there and back, and a linear in bfloat16 and float16 beside one in float32. */
static int check_halves(int level) {
    int bad = 0;
    for (int dtype = BFLOAT16; dtype <= FLOAT16; dtype++) {
        for (uint32_t first = 0; first < 65536; first += 16) {
            uint16_t all[16], back[16];
            float wide[16];
            for (uint32_t i = 0; i < 16; i++) all[i] = (uint16_t)(first + i);
            widen(all, dtype, 16, wide, level);
            narrow(wide, 16, dtype, back, level);
            for (int i = 0; i < 16; i++) bad += back[i] != all[i] && wide[i] == wide[i];
        }
        static const int64_t rows_of[] = {1, 5, 130, 500};
        for (int i = 0; i < 4; i++) {
            const int64_t rows = rows_of[i], in = 77, out = 45;
            uint16_t *x = malloc((size_t)(rows * in) * 2), *y = malloc((size_t)(rows * out) * 2);
            float *wide = malloc((size_t)(rows * in) * 4), *want = malloc((size_t)(rows * out) * 4);
            int8_t *w = malloc((size_t)(out * in));
            const float one = 0.01f;
            for (int64_t k = 0; k < out * in; k++) w[k] = (int8_t)((int)(draw() % 255) - 127);
            for (int64_t k = 0; k < rows * in; k++) wide[k] = (float)((int32_t)draw() % 128) / 64.0f;
            narrow(wide, rows * in, dtype, x, level);
            const layer whole = {wide, w, &one, NULL, want, rows, in, in, out, 0, 0, 8, FLOAT32, FLOAT32, 2, 3, level, NULL, NULL, NULL};
            const layer half = {x, w, &one, NULL, y, rows, in, in, out, 0, 0, 8, dtype, FLOAT32, 2, 3, level, NULL, NULL, NULL};
            bad += inro_linear(&whole) != 0;
            bad += inro_linear(&half) != 0;
            for (int64_t k = 0; k < rows * out; k++) bad += !(fabsf(one_of(y, dtype, k) - want[k]) <= 4e-3f * fabsf(want[k]) + 2e-2f);
            free(x); free(y); free(wide); free(want); free(w);
        }
    }
    if (bad) printf("half precision at level %d: %d wrong\n", level, bad);
    return bad != 0;
}

/* Steps of a recurrent layer against libm in double, with h as it was before each step: what 15 (or 7) bits of it lose is small. */
static int check_recurrent(int64_t steps, int64_t batch, int64_t hidden, int cell, int levels, int level, int threads, int reverse) {
    static const int gates_of[] = {4, 3, 1, 1};
    const int64_t width = gates_of[cell] * hidden, states = batch * hidden;
    float *gates = malloc((size_t)(steps * batch * width) * sizeof(float)), *scale = malloc((size_t)width * sizeof(float));
    float *bias = malloc((size_t)width * sizeof(float)), *h = malloc((size_t)states * sizeof(float)), *c = malloc((size_t)states * sizeof(float));
    float *y = malloc((size_t)(steps * states) * sizeof(float)), *was = malloc((size_t)states * sizeof(float)), *c_was = malloc((size_t)states * sizeof(float));
    int8_t *w = malloc((size_t)(width * hidden));
    for (int64_t i = 0; i < steps * batch * width; i++) gates[i] = (float)((int32_t)draw()) / 1073741824.0f;
    for (int64_t i = 0; i < width; i++) scale[i] = 0.004f / (float)hidden, bias[i] = (float)(draw() % 9) / 4.0f - 1.0f;
    for (int64_t i = 0; i < width * hidden; i++) w[i] = (int8_t)((int)(draw() % 255) - 127);
    for (int64_t i = 0; i < states; i++) h[i] = was[i] = (float)((int32_t)draw()) / 2147483648.0f, c[i] = c_was[i] = h[i] * 2.0f;
    const recurrence r = {gates, w, scale, bias, h, cell == 0 ? c : NULL, y, steps, batch, hidden, 1, cell, reverse, levels, threads, level};
    int bad = inro_recurrent(&r);
    for (int64_t s = 0; s < steps && !bad; s++) {
        const int64_t t = reverse ? steps - 1 - s : s;
        for (int64_t b = 0; b < batch; b++)
            for (int64_t j = 0; j < hidden; j++) {
                double x[4], g[4], want;
                for (int k = 0; k < gates_of[cell]; k++) {
                    const int64_t n = k * hidden + j;
                    g[k] = bias[n];
                    for (int64_t i = 0; i < hidden; i++) g[k] += (double)was[b * hidden + i] * w[n * hidden + i] * scale[n];
                    x[k] = gates[(t * batch + b) * width + n];
                }
                const double first = 1 / (1 + exp(-x[0] - g[0])), second = gates_of[cell] > 1 ? 1 / (1 + exp(-x[1] - g[1])) : 0;
                if (cell == 0) {
                    c_was[b * hidden + j] = (float)(second * c_was[b * hidden + j] + first * tanh(x[2] + g[2]));
                    want = tanh(c_was[b * hidden + j]) / (1 + exp(-x[3] - g[3]));
                } else if (cell == 1) {
                    const double new = tanh(x[2] + first * g[2]);
                    want = new + second * (was[b * hidden + j] - new);
                } else want = cell == 2 ? tanh(x[0] + g[0]) : fmax(x[0] + g[0], 0);
                bad |= !(fabs(y[(t * batch + b) * hidden + j] - want) < (levels == 2 ? 1e-3 : 0.02));
            }
        for (int64_t i = 0; i < states; i++) was[i] = y[t * states + i];
    }
    for (int64_t i = 0; i < states && !bad; i++) bad = h[i] != y[(reverse ? 0 : steps - 1) * states + i];
    if (bad) printf("recurrent: steps %ld batch %ld hidden %ld cell %d levels %d level %d\n", (long)steps, (long)batch, (long)hidden, cell, levels, level);
    free(gates), free(scale), free(bias), free(h), free(c), free(y), free(was), free(c_was), free(w);
    return bad;
}

/* A convolution of codes, or of floats that become codes exactly, against sums in int64. */
static int check_convolution(int level, int threads, int x_form, int y_form) {
    convolution l = {.n = 1 + draw() % 2, .scale_step = 1, .transposed = draw() % 3 == 0, .fixed = 1, .levels = 1, .threads = threads, .level = level,
                     .x_form = x_form, .y_form = y_form, .input = {0.5f, 1 + draw() % 255}, .output = {4.0f, 100}, .activation = draw() % 2,
                     .low = -40.0f, .high = 90.0f};
    static const int64_t channels[] = {1, 3, 4, 16, 24, 33, 64, 96};
    l.groups = draw() % 3 == 0 ? 1 + draw() % 3 : 1;
    l.in = channels[draw() % 8] * l.groups;
    l.out = (1 + draw() % 40) * l.groups;
    if (draw() % 5 == 0) l.out = l.groups = l.in;
    for (int d = 0; d < 3; d++) {
        const int used = d == 2 || draw() % 2;
        l.kernel[d] = used ? 1 + draw() % 3 : 1;
        l.stride[d] = used ? 1 + draw() % 2 : 1;
        l.dilation[d] = used ? 1 + draw() % 2 : 1;
        const int64_t reach = l.dilation[d] * (l.kernel[d] - 1);
        l.pad[d] = reach ? draw() % (reach + 1) : 0;
        l.size[d] = used ? reach + 1 + draw() % 20 : 1;
        l.result[d] = l.transposed ? (l.size[d] - 1) * l.stride[d] - 2 * l.pad[d] + reach + 1 : (l.size[d] + 2 * l.pad[d] - reach - 1) / l.stride[d] + 1;
        if (l.result[d] < 1) return 0;
    }
    const int64_t pixels = l.size[0] * l.size[1] * l.size[2], results = l.result[0] * l.result[1] * l.result[2], here = l.in / l.groups;
    const int64_t taps = l.kernel[0] * l.kernel[1] * l.kernel[2], columns = taps * here;
    const guarded x = guard((size_t)(l.n * l.in * pixels) * (x_form == CODES ? 1 : 4)), w = guard((size_t)(l.out * columns));
    const guarded y = guard((size_t)(l.n * l.out * results) * (y_form == CODES ? 1 : 4));
    float *scale = malloc((size_t)l.out * sizeof(float)), *bias = malloc((size_t)l.out * sizeof(float));
    for (int64_t i = 0; i < l.n * l.in * pixels; i++) {
        const int code = 1 + (int)(draw() % 255);
        if (x_form == CODES) ((uint8_t *)x.start)[i] = (uint8_t)code;
        else ((float *)x.start)[i] = 0.5f * (float)(code - l.input.zero);
    }
    for (int64_t i = 0; i < l.out * columns; i++) ((int8_t *)w.start)[i] = (int8_t)((int)(draw() % 255) - 127);
    for (int64_t i = 0; i < l.out; i++) scale[i] = 0.01f * (float)(1 + draw() % 9), bias[i] = (float)(draw() % 9) - 4.0f;
    l.x = x.start; l.codes = w.start; l.y = y.start; l.scale = scale; l.bias = bias;
    int bad = inro_convolution(&l) != 0;
    for (int64_t n = 0; n < l.n; n++)
        for (int64_t o = 0; o < l.out; o++)
            for (int64_t r = 0; r < results && !bad; r++) {
                const int64_t at[3] = {r / (l.result[1] * l.result[2]), r / l.result[2] % l.result[1], r % l.result[2]};
                int64_t sum = 0;
                for (int64_t t = 0; t < taps; t++) {
                    const int64_t tap[3] = {t / (l.kernel[1] * l.kernel[2]), t / l.kernel[2] % l.kernel[1], t % l.kernel[2]};
                    int64_t pixel = 0, inside = 1;
                    for (int d = 0; d < 3; d++) {
                        int64_t p = l.transposed ? at[d] + l.pad[d] - tap[d] * l.dilation[d] : at[d] * l.stride[d] - l.pad[d] + tap[d] * l.dilation[d];
                        if (l.transposed) { inside &= p % l.stride[d] == 0; p /= l.stride[d]; }
                        inside &= p >= 0 && p < l.size[d];
                        pixel = pixel * l.size[d] + p;
                    }
                    for (int64_t c = 0; c < here && inside; c++) {
                        const int64_t channel = o / (l.out / l.groups) * here + c;
                        const int64_t i = x_form == PLANES ? (n * l.in + channel) * pixels + pixel : (n * pixels + pixel) * l.in + channel;
                        const int64_t code = x_form == CODES ? ((uint8_t *)x.start)[i] - l.input.zero : (int64_t)lrintf(((float *)x.start)[i] * 2.0f);
                        sum += code * ((int8_t *)w.start)[o * columns + t * here + c];
                    }
                }
                double want = (double)sum * 0.5 * scale[o] + bias[o];
                if (l.activation) want = want < l.low ? l.low : want > l.high ? l.high : want;
                const int64_t i = y_form == PLANES ? (n * l.out + o) * results + r : (n * results + r) * l.out + o;
                const double coded = fmin(fmax(rint(want / 4) + 100, 1), 255);
                const double got = y_form == CODES ? ((uint8_t *)y.start)[i] : ((float *)y.start)[i];
                bad = y_form == CODES ? fabs(got - coded) > 1 : !(fabs(got - want) <= 1e-5 * (fabs(want) + 100));
                if (bad) printf("convolution at level %d, forms %d %d, transposed %d: %g, not %g\n", level, x_form, y_form, l.transposed, got, want);
            }
    let_go(x); let_go(w); let_go(y);
    free(scale); free(bias);
    return bad;
}

int main(void) {
    int failed = 0, passed = 0;
    for (int level = 0; level <= inro_level(); level++)
        for (int i = 0; i < 400; i++) failed += check_convolution(level, 1 + (int)(draw() % 4), i % 3, i / 3 % 3) ? 1 : (passed++, 0);
    for (int level = 0; level <= inro_level(); level++)
        for (int cell = 0; cell < 4; cell++)
            for (int i = 0; i < 40; i++) {
                static const int64_t hidden[] = {1, 3, 8, 31, 64, 100};
                failed += check_recurrent(1 + draw() % 4, 1 + draw() % 9, hidden[draw() % 6], cell, 1 + i % 2, level, 1 + (int)(draw() % 4), (int)(draw() % 2))
                    ? 1 : (passed++, 0);
            }
    for (int level = 0; level <= inro_level(); level++) {
        failed += check_halves(level);
        static const int64_t sizes[] = {1, 2, 15, 16, 17, 31, 33, 64, 100, 129}, groups[] = {0, 1, 7, 16, 32, 64};
        for (int bits = 2; bits <= 8; bits++)
            for (int dtype = FLOAT32; dtype <= FLOAT16; dtype++)
                for (int i = 0; i < 24; i++)
                    failed += check_groups(1 + draw() % (i % 2 ? 9 : 60), sizes[draw() % 10], sizes[draw() % 10], bits, groups[draw() % 6], dtype, level, 1 + (int)(draw() % 4))
                        ? 1 : (passed++, 0);
    }
    for (int level = 0; level <= inro_level(); level++)
        for (int levels = 1; levels <= 2; levels++)
            for (int kind = 0; kind < 3; kind++) {
                static const int64_t sizes[] = {1, 2, 3, 5, 11, 12, 13, 31, 63, 64, 65, 130, 200};
                for (int i = 0; i < 60; i++) {
                    const int64_t rows = i % 4 == 0 ? 1 + draw() % 3 : sizes[draw() % 13] * (i % 11 == 0 ? 4 : 1);
                    for (int fixed = 0; fixed <= (levels == 1); fixed++)
                        failed += check(rows, sizes[draw() % 13], sizes[draw() % 13], levels, level, 1 + (int)(draw() % 4), kind, fixed)
                            ? 1 : (passed++, 0);
                }
                failed += check(0, 5, 5, levels, level, 2, kind, 0) + check(2, 5, 0, levels, level, 2, kind, 0)
                    + check(900, 40, 70, levels, level, 3, kind, levels == 1);
            }
    printf("%d passed, %d failed (best level %d)\n", passed, failed, inro_level());
    return failed != 0;
}
