/* What this CPU can do, how many threads pay, and numbers of half precision. */

#define _DEFAULT_SOURCE                                /* madvise */

#include "kernels.h"

#include <stdlib.h>
#include <string.h>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <sys/mman.h>
#endif

static int in_child = 0;                               /* OpenMP's threads do not survive a fork: the child works alone */
#if defined(__unix__) || defined(__APPLE__)
static void after_fork(void) { in_child = 1; }
#endif
static int highest = VNNI;

int inro_level(void) {
    static int level = -1;
    if (level < 0) {
#if defined(__unix__) || defined(__APPLE__)
        pthread_atfork(NULL, NULL, after_fork);
#endif
        int found = PORTABLE;
#ifdef X86
        __builtin_cpu_init();
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found = AVX2;     /* such CPUs have f16c, too */
        if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni")) found = VNNI;
#endif
        level = found;
    }
    return level < highest ? level : highest;
}

/* Does this CPU multiply pairs of bfloat16? */
int has_bfloat16(void) {
#ifdef TARGET_BFLOAT16
    static int found = -1;
    if (found < 0) found = __builtin_cpu_supports("avx512bf16") != 0;
    return found;
#else
    return 0;
#endif
}

/* From now on no better instructions than these are used: to try what another CPU would do. */
void inro_limit_level(int level) { highest = level; }

/* Threads that pay for so many products of bytes. Starting and joining a team takes microseconds, more where cores share no cache. */
int inro_threads(int wanted, double products) {
    static const double cost[] = {16.0, 2.0, 1.0};     /* of a product at each level */
    return in_child || products * cost[inro_level()] < 400000.0 || wanted < 1 ? 1 : wanted;
}

size_t size_of(int dtype) { return dtype == FLOAT32 ? 4 : 2; }

void *aligned(size_t size) {
    void *p = NULL;
    return posix_memalign(&p, 64, size ? size : 64) ? NULL : p;
}

/* Where the kernel of the system asks for advice: a large new result in pages of 2 MB. Touching it page by page of 4 KB for the first
   time takes longer than computing it. */
void prefer_huge_pages(void *start, size_t bytes) {
#ifdef MADV_HUGEPAGE
    enum { HUGE = 1 << 21 };
    char *first = (char *)(((uintptr_t)start + HUGE - 1) / HUGE * HUGE), *last = (char *)(((uintptr_t)start + bytes) / HUGE * HUGE);
    if (start && last > first) madvise(first, (size_t)(last - first), MADV_HUGEPAGE);
#else
    (void)start, (void)bytes;
#endif
}

int64_t share(int64_t all, int part, int parts) { return all * part / parts; }

/* ---- half precision; written without branches, so that compilers make vectors of the loops ---- */

static inline uint32_t bits_of(float a) { uint32_t b; memcpy(&b, &a, 4); return b; }
static inline float float_of(uint32_t b) { float a; memcpy(&a, &b, 4); return a; }

static inline float from_bfloat16(uint16_t h) { return float_of((uint32_t)h << 16); }

static inline uint16_t to_bfloat16(float a) {          /* to the nearest, ties to even; NaN stays NaN */
    const uint32_t b = bits_of(a);
    return a != a ? 0x7fc0 : (uint16_t)((b + ((b >> 16) & 1) + 0x7fff) >> 16);
}

static inline float from_float16(uint16_t h) {
    const uint32_t magnitude = (uint32_t)(h & 0x7fff) << 13, sign = (uint32_t)(h & 0x8000) << 16;
    const uint32_t finite = bits_of(float_of(magnitude) * 0x1p112f), special = magnitude | 0x7f800000u;    /* another exponent bias */
    return float_of(sign | ((h & 0x7c00) == 0x7c00 ? special : finite));
}

static inline uint16_t to_float16(float a) {
    const uint32_t sign = (bits_of(a) >> 16) & 0x8000, b = bits_of(a) & 0x7fffffff;
    const uint32_t normal = (b - 0x38000000u + 0xfff + ((b >> 13) & 1)) >> 13;
    const uint32_t small = bits_of(float_of(b) + 0.5f) - 0x3f000000u;        /* below 2^-14: the sum has float16's last place */
    const uint32_t h = b > 0x7f800000u ? 0x7e00 : b >= 0x477ff000u ? 0x7c00 : b < 0x38800000u ? small : normal;
    return (uint16_t)(sign | h);
}

float one_of(const void *numbers, int dtype, int64_t index) {
    return dtype == FLOAT32 ? ((const float *)numbers)[index] : dtype == BFLOAT16 ? from_bfloat16(((const uint16_t *)numbers)[index])
                                                                                  : from_float16(((const uint16_t *)numbers)[index]);
}

__attribute__((always_inline))
static inline void widen_loop(const uint16_t *from, int dtype, int64_t n, float *to) {
    if (dtype == BFLOAT16) for (int64_t i = 0; i < n; i++) to[i] = from_bfloat16(from[i]);
    else for (int64_t i = 0; i < n; i++) to[i] = from_float16(from[i]);
}

__attribute__((always_inline))
static inline void narrow_loop(const float *from, int64_t n, int dtype, uint16_t *to) {
    if (dtype == BFLOAT16) for (int64_t i = 0; i < n; i++) to[i] = to_bfloat16(from[i]);
    else for (int64_t i = 0; i < n; i++) to[i] = to_float16(from[i]);
}

#ifdef X86
__attribute__((target("avx2,f16c")))
static void widen_avx2(const uint16_t *from, int dtype, int64_t n, float *to) {
    int64_t i = 0;
    if (dtype == FLOAT16)
        for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
    widen_loop(from + i, dtype, n - i, to + i);
}

__attribute__((target("avx2,f16c")))
static void narrow_avx2(const float *from, int64_t n, int dtype, uint16_t *to) {
    int64_t i = 0;
    if (dtype == FLOAT16)
        for (; i + 8 <= n; i += 8) _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    narrow_loop(from + i, n - i, dtype, to + i);
}

#endif

/* `n` numbers of half precision as floats. */
void widen(const void *from, int dtype, int64_t n, float *to, int level) {
#ifdef X86
    if (level >= AVX2) { widen_avx2(from, dtype, n, to); return; }
#endif
    (void)level;
    widen_loop(from, dtype, n, to);
}

/* `n` floats rounded to half precision. */
void narrow(const float *from, int64_t n, int dtype, void *to, int level) {
#ifdef X86
    if (level >= AVX2) { narrow_avx2(from, n, dtype, to); return; }
#endif
    (void)level;
    narrow_loop(from, n, dtype, to);
}
