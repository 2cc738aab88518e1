/* What this CPU can do, how many threads pay, numbers of half precision, packed codes, and the sizes of rows. */

#define _DEFAULT_SOURCE                                /* madvise, syscall */

#include "kernels.h"

#include <float.h>
#include <stdlib.h>
#include <string.h>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <sys/mman.h>
#endif
#ifdef AMX_HERE
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

static int in_child = 0;                               /* OpenMP's threads do not survive a fork: the child works alone */
#if defined(__unix__) || defined(__APPLE__)
static void after_fork(void) { in_child = 1; }
#endif
static int highest = AMX;

/* Does this CPU multiply tiles of bytes, and does the system let this process do it? */
static int has_amx(void) {
#ifdef AMX_HERE
    enum { TILES = 1 << 24, BYTES_IN_TILES = 1 << 25, ASK_FOR = 0x1023, TILE_DATA = 18 };      /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & TILES) && (d & BYTES_IN_TILES) && !syscall(SYS_arch_prctl, ASK_FOR, TILE_DATA);
#else
    return 0;
#endif
}

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
        if (found == VNNI && has_amx()) found = AMX;
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
    static const double cost[] = {16.0, 2.0, 1.0, 0.5};                /* of a product at each level */
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

/* `n` numbers from `start` on as floats: where they lie, or in `line`. */
const float *floats_at(const void *numbers, int dtype, int64_t start, int64_t n, float *line, int level) {
    if (dtype == FLOAT32) return (const float *)numbers + start;
    widen((const char *)numbers + start * (int64_t)size_of(dtype), dtype, n, line, level);
    return line;
}

/* `n` floats rounded to half precision. */
void narrow(const float *from, int64_t n, int dtype, void *to, int level) {
#ifdef X86
    if (level >= AVX2) { narrow_avx2(from, n, dtype, to); return; }
#endif
    (void)level;
    narrow_loop(from, n, dtype, to);
}

/* ---- codes of less than eight bits, as numerics/bits.py packs them ---- */

int64_t bytes_of_row(int64_t columns, int bits) {
    int64_t bytes = 0;
    if (bits == 8) return columns;
    for (int width = 4; width; width /= 2)
        if (bits & width) bytes += (columns * width + 7) / 8;
    return bytes;
}

static void unpack_four(const uint8_t *from, int64_t first, int64_t columns, int8_t *to) {
    for (int64_t k = first; k < columns; k++) to[k] = (int8_t)(((from[k / 2] >> (k % 2 * 4)) & 15) - 8);
}

static void unpack_row(const uint8_t *from, int64_t columns, int bits, int8_t *to) {
    int shift = 0;
    memset(to, 0, (size_t)columns);
    for (int width = 4; width; width /= 2) {
        if (!(bits & width)) continue;
        const int in_byte = 8 / width, mask = (1 << width) - 1;
        for (int64_t k = 0; k < columns; k++)
            to[k] = (int8_t)(to[k] | ((from[k / in_byte] >> (k % in_byte * width)) & mask) << shift);
        from += (columns * width + 7) / 8;
        shift += width;
    }
    for (int64_t k = 0; k < columns; k++) to[k] = (int8_t)((uint8_t)to[k] - (1 << (bits - 1)));
}

#ifdef X86
__attribute__((target("avx2")))
static void unpack_four_avx2(const uint8_t *from, int64_t columns, int8_t *to) {
    const __m128i low = _mm_set1_epi8(15), eight = _mm_set1_epi8(8);
    int64_t k = 0;
    for (; k + 32 <= columns; k += 32) {
        const __m128i bytes = _mm_loadu_si128((const __m128i *)(from + k / 2));
        const __m128i even = _mm_and_si128(bytes, low), odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), low);
        _mm_storeu_si128((__m128i *)(to + k), _mm_sub_epi8(_mm_unpacklo_epi8(even, odd), eight));
        _mm_storeu_si128((__m128i *)(to + k + 16), _mm_sub_epi8(_mm_unpackhi_epi8(even, odd), eight));
    }
    unpack_four(from, k, columns, to);
}
#endif

/* A row of codes of less than eight bits as int8. */
void unpack(const void *row, int64_t columns, int bits, int8_t *to, int level) {
#ifdef X86
    if (bits == 4 && level >= AVX2) { unpack_four_avx2(row, columns, to); return; }
#endif
    (void)level;
    if (bits == 4) unpack_four(row, 0, columns, to);
    else unpack_row(row, columns, bits, to);
}

/* ---- rows of extreme sizes ---- */

__attribute__((always_inline))
static inline float lift_loop(const float *x, int64_t n) {
    int32_t top = 0;                                   /* bits of floats are in the order of the floats */
    for (int64_t i = 0; i < n; i++) {
        int32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffff;
        top = bits > top ? bits : top;
    }
    float largest;
    memcpy(&largest, &top, sizeof largest);
    return largest <= FLT_MAX ? lift_by(largest) : 1.0f;
}

__attribute__((always_inline))
static inline int extreme_loop(const char *x, int64_t n) {
    int16_t top = 0;
    for (int64_t i = 0; i < n; i++) {
        int16_t bits;
        memcpy(&bits, x + 2 * i, sizeof bits);
        bits &= 0x7fff;
        top = bits > top ? bits : top;
    }
    const int32_t wide = (int32_t)top << 16;
    float largest;
    memcpy(&largest, &wide, sizeof largest);
    return largest <= FLT_MAX && lift_by(largest) != 1.0f;
}

#ifdef X86
__attribute__((target("avx2")))
static float lift_avx2(const float *x, int64_t n) { return lift_loop(x, n); }
__attribute__((target("avx2")))
static int extreme_avx2(const char *x, int64_t n) { return extreme_loop(x, n); }
#endif

/* What a row that floats compute is to be multiplied by: 1 but for rows of extreme sizes. */
float lift_of(const float *x, int64_t n, int level) {
#ifdef X86
    if (level >= AVX2) return lift_avx2(x, n);
#endif
    (void)level;
    return lift_loop(x, n);
}

/* Would a row of bfloat16 be lifted? */
int is_extreme_bfloat16(const void *x, int64_t n, int level) {
#ifdef X86
    if (level >= AVX2) return extreme_avx2(x, n);
#endif
    (void)level;
    return extreme_loop(x, n);
}
