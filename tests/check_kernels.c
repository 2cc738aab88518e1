/* Checks int8.c against sums in int64, on whatever CPU it is compiled for: tests/check_kernels.sh runs it under sanitizers and
   on an emulated Arm. */

#include "../inro_fx/kernels/int8.c"

#include <stdio.h>

static uint64_t state = 88172645463325252ull;
static uint32_t draw(void) { state ^= state << 13; state ^= state >> 7; state ^= state << 17; return (uint32_t)(state >> 32); }

static int check(int64_t rows, int64_t in, int64_t out, int levels, int level, int threads, int kind, int fixed) {
    const int64_t stride = in + 3;
    float *x = malloc((size_t)(rows * stride + 1) * sizeof(float)), *y = malloc((size_t)(rows * out + 1) * sizeof(float));
    int8_t *w = malloc((size_t)(out * in + 1));
    float *scale = malloc((size_t)(out + 1) * sizeof(float)), *bias = malloc((size_t)(out + 1) * sizeof(float));
    for (int64_t i = 0; i < rows * stride; i++)
        x[i] = kind == 1 ? 1.0f : kind == 2 ? -1.0f : (float)((int32_t)draw()) / 2147483648.0f * (i % 7 == 0 ? 100.0f : 1.0f);
    for (int64_t i = 0; i < out * in; i++) w[i] = (int8_t)(kind == 1 ? 127 : kind == 2 ? -128 : (int)(draw() % 256) - 128);
    for (int64_t i = 0; i < out; i++) scale[i] = 0.5f + (float)(draw() % 100) / 100.0f, bias[i] = (float)(draw() % 9) - 4.0f;
    const float step = 0.01f;
    const int32_t zero = (int32_t)(draw() % 255) - 127;
    int32_t *column_sums = calloc((size_t)(out + 1), sizeof(int32_t));
    for (int64_t i = 0; i < out * in; i++) column_sums[i / in] += w[i];
    const int result = inro_linear(x, rows, in, stride, w, out, scale, 1, bias, y, levels, threads, level, fixed ? &step : NULL,
                                   fixed ? &zero : NULL, fixed ? column_sums : NULL);
    int bad = result < 0 || (result == 1 && levels == 1);
    const int skip = result == 1;                      /* a row too wide for two levels: the caller computes it */
    int8_t *q = malloc((size_t)(levels * (in + STEP)));
    for (int64_t r = 0; r < rows && !bad && !skip; r++) {
        float s;
        int32_t sums[2];
        if (fixed) quantize_fixed_portable(x + r * stride, in, in, step, (float)zero, q, &s, sums);
        else quantize_row(x + r * stride, in, in, levels, q, &s, sums);
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
    free(x); free(y); free(w); free(scale); free(bias); free(q); free(column_sums);
    return bad;
}

int main(void) {
    int failed = 0, passed = 0;
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
