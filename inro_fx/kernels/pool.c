/* Max pooling of codes, whose channels lie side by side: the order of codes is that of the numbers. */

#include "kernels.h"

#include <string.h>

static void larger(uint8_t *restrict to, const uint8_t *restrict from, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = from[i] > to[i] ? from[i] : to[i];
}

#ifdef X86
__attribute__((target("avx2")))
static void larger_avx2(uint8_t *restrict to, const uint8_t *restrict from, int64_t n) {
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
        _mm256_storeu_si256((__m256i *)(to + i), _mm256_max_epu8(_mm256_loadu_si256((const __m256i *)(to + i)),
                                                                 _mm256_loadu_si256((const __m256i *)(from + i))));
    for (; i < n; i++) to[i] = from[i] > to[i] ? from[i] : to[i];
}
#endif

void inro_max_pool(const pool *p) {
    const int64_t c = p->channels, lines = p->n * p->result[0];
    void (*join)(uint8_t *, const uint8_t *, int64_t) = larger;
#ifdef X86
    if (inro_level() >= AVX2) join = larger_avx2;
#endif
    const int threads = inro_threads(p->threads, (double)lines * p->result[1] * c * p->kernel[0] * p->kernel[1]);
    #pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t line = 0; line < lines; line++) {
        const uint8_t *image = p->x + line / p->result[0] * p->size[0] * p->size[1] * c;
        uint8_t *y = p->y + line * p->result[1] * c;
        memset(y, 0, (size_t)(p->result[1] * c));      /* below every code: what stands for numbers is at least 1 */
        for (int64_t a = 0; a < p->kernel[0]; a++) {
            const int64_t h = line % p->result[0] * p->stride[0] - p->pad[0] + a * p->dilation[0];
            if (h < 0 || h >= p->size[0]) continue;
            for (int64_t o = 0; o < p->result[1]; o++)
                for (int64_t b = 0; b < p->kernel[1]; b++) {
                    const int64_t w = o * p->stride[1] - p->pad[1] + b * p->dilation[1];
                    if (w >= 0 && w < p->size[1]) join(y + o * c, image + (h * p->size[1] + w) * c, c);
                }
        }
    }
}
