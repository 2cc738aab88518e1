/* The steps of a recurrent layer whose products with x are there: h @ codes.T of each step, the gates, and the next h.

   The codes are read at every step, and are often a little larger than the caches next to a core: every other step goes through them
   from the end, so that it begins with those that the step before has left there. */

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-trapping-math", "no-math-errno")      /* or the loops below are not vectors: a comparison might trap */
#endif

#include "kernels.h"
#include "functions.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { LSTM, GRU, WITH_TANH, WITH_RELU };
static const int gates_of[] = {4, 3, 1, 1};

/* One row: `x` are its products with x, `h` those with the state before; to `state`, and to `cell_state` of an LSTM. */
__attribute__((always_inline))
static inline void row(int cell, const float *restrict x, const float *restrict h, int64_t n, float *restrict state,
                       float *restrict cell_state) {
    if (cell == LSTM)
        for (int64_t j = 0; j < n; j++) {
            const float i = sigmoid(x[j] + h[j]), f = sigmoid(x[n + j] + h[n + j]), g = tangent(x[2 * n + j] + h[2 * n + j]);
            const float o = sigmoid(x[3 * n + j] + h[3 * n + j]), c = f * cell_state[j] + i * g;
            cell_state[j] = c;
            state[j] = o * tangent(c);
        }
    else if (cell == GRU)
        for (int64_t j = 0; j < n; j++) {
            const float r = sigmoid(x[j] + h[j]), z = sigmoid(x[n + j] + h[n + j]), new = tangent(x[2 * n + j] + r * h[2 * n + j]);
            state[j] = new + z * (state[j] - new);
        }
    else if (cell == WITH_TANH)
        for (int64_t j = 0; j < n; j++) state[j] = tangent(x[j] + h[j]);
    else
        for (int64_t j = 0; j < n; j++) {
            const float sum = x[j] + h[j];
            state[j] = sum < 0.0f ? 0.0f : sum;
        }
}

#ifdef X86
__attribute__((target("avx2,fma")))
static void row_avx2(int cell, const float *x, const float *h, int64_t n, float *state, float *cell_state) {
    row(cell, x, h, n, state, cell_state);
}
#endif

static void any_row(int level, int cell, const float *x, const float *h, int64_t n, float *state, float *cell_state) {
#ifdef X86
    if (level >= AVX2) { row_avx2(cell, x, h, n, state, cell_state); return; }
#endif
    (void)level;
    row(cell, x, h, n, state, cell_state);
}

/* Returns 0, or -1 where memory ran out. */
int inro_recurrent(const recurrence *r) {
    const int64_t n = r->hidden, width = gates_of[r->cell] * n;
    const int level = r->level < 0 ? inro_level() : r->level;
    float *products = aligned((size_t)(r->batch * width) * sizeof(float) + 64);
    if (!products) return -1;
    int failed = 0;
    for (int64_t s = 0; s < r->steps && !failed; s++) {
        const int64_t t = r->reverse ? r->steps - 1 - s : s;
        const layer l = {.x = r->h, .codes = r->codes, .scale = r->scale, .bias = r->bias, .y = products, .rows = r->batch, .in = n, .stride = n,
                         .out = width, .scale_step = r->scale_step, .bits = 8, .dtype = FLOAT32, .levels = r->levels, .threads = r->threads,
                         .level = level, .backwards = (int)(s & 1)};
        failed = inro_linear(&l) != 0;
        for (int64_t b = 0; b < r->batch && !failed; b++) {
            float *state = r->h + b * n;
            any_row(level, r->cell, r->gates + (t * r->batch + b) * width, products + b * width, n, state, r->c ? r->c + b * n : NULL);
            memcpy(r->y + (t * r->batch + b) * n, state, (size_t)n * sizeof(float));
        }
    }
    free(products);
    return failed ? -1 : 0;
}
