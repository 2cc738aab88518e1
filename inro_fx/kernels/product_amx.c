/* Products of int8 on AMX, which multiplies tiles: 16 rows of x by 64 codes each, against 64 x 16 codes, into 16 x 16 sums in int32.
   Two tiles of rows and two of columns at a time use all eight registers, and each loaded tile twice.

   Which rows and codes the registers hold is a setting of the thread, which costs about as much as a few products: it is kept from call to
   call until `leave`, after which nothing of ours is left in them. */

#include "convolution.h"

#ifdef AMX_HERE
#define TARGET_AMX TARGET_VNNI ",amx-tile,amx-int8"
enum { TILE = 16, CODES_OF_TILE = 64 };

static _Thread_local int set = 0;                      /* rows << 8 | codes that the registers are set for */

/* Registers 0 to 3 are sums, 4 and 5 rows of x, 6 and 7 codes of the weight. */
__attribute__((target(TARGET_AMX)))
static void set_tiles(int rows, int codes) {
    if (set == (rows << 8 | codes)) return;
    set = rows << 8 | codes;
    struct { uint8_t palette, first, unused[14]; uint16_t bytes[16]; uint8_t rows[16]; } to = {.palette = 1};
    const int first = rows < TILE ? rows : TILE, second = rows - first;
    for (int i = 0; i < 4; i++) { to.bytes[i] = 64; to.rows[i] = (uint8_t)(i < 2 ? first : second); }
    for (int i = 4; i < 6; i++) { to.bytes[i] = (uint16_t)codes; to.rows[i] = (uint8_t)(i < 5 ? first : second); }
    for (int i = 6; i < 8; i++) { to.bytes[i] = 64; to.rows[i] = (uint8_t)(codes / 4); }
    for (int i = 0; i < 8; i++) if (!to.rows[i]) to.bytes[i] = 0;
    __asm__ volatile("" : : "r"(&to) : "memory");      /* the intrinsic says that it reads eight bytes of them */
    _tile_loadconfig(&to);
}

__attribute__((target(TARGET_AMX)))
static void leave(void) {
    if (set) _tile_release();
    set = 0;
}

/* ---- linear layers: codes as they lie, 32 columns, against rows of q packed as [rows / 16][in / 64][16][16][4] ----
   There are mostly fewer rows than columns, and they are packed once for all columns. */

__attribute__((target(TARGET_VNNI)))
static void pack(const panel *p) {
    const int64_t all = p->rows * p->levels;           /* rows of q */
    char *to = p->packed;
    for (int64_t r = 0; r < all; r += TILE)
        for (int64_t k = 0; k < p->in; k += CODES_OF_TILE, to += 1024) {
            __m512i words[16];
            transpose_sixteen((const int8_t *)p->q + r * p->padded + k, p->padded, CODES_OF_TILE, (int)(all - r < TILE ? all - r : TILE), words);
            for (int i = 0; i < 16; i++) _mm512_store_si512(to + i * 64, words[i]);
        }
}

/* Results of up to 16 columns from `first` on, of `rows` rows of q from `from` on: sums are [16 columns][16 rows]. */
__attribute__((target(TARGET_VNNI)))
static void store(const panel *p, int64_t from, int rows, const int32_t *sums, int first) {
    __m512i by_row[16];
    for (int i = 0; i < 16; i++) by_row[i] = _mm512_load_si512(sums + i * 16);
    transpose_words(by_row);
    const __m512 by = _mm512_loadu_ps(p->by + first), plus = _mm512_loadu_ps(p->plus + first);
    const __m512i minus = _mm512_loadu_si512(p->minus + first);
    const __mmask16 some = lanes_from(first, p->width);
    for (int i = 0; i < rows; i += p->levels) {
        const int64_t r = (from + i) / p->levels;
        __m512 value = _mm512_cvtepi32_ps(_mm512_sub_epi32(by_row[i], minus));
        if (p->levels == 2) value = _mm512_add_ps(_mm512_mul_ps(value, _mm512_set1_ps(128.0f)), _mm512_cvtepi32_ps(by_row[i + 1]));
        value = _mm512_add_ps(_mm512_mul_ps(_mm512_mul_ps(value, _mm512_set1_ps(p->x_scale[r])), by), plus);
        _mm512_mask_storeu_ps(p->y + r * p->out + first, some, value);
    }
}

__attribute__((target(TARGET_AMX)))
static void multiply(const panel *p) {
    const int64_t all = p->rows * p->levels, in = p->in, block = (in + CODES_OF_TILE - 1) / CODES_OF_TILE * 1024;
    _Alignas(64) int32_t sums[4][TILE * TILE];
    _Alignas(64) int8_t last[2 * TILE * CODES_OF_TILE];                /* codes of the last columns, or behind the last whole step */
    set_tiles(2 * TILE, CODES_OF_TILE);
    const int64_t whole = p->width < 2 * TILE ? 0 : in / CODES_OF_TILE * CODES_OF_TILE;
    for (int64_t from = 0; from < all; from += 2 * TILE) {
        const char *x = (const char *)p->packed + from / TILE * block, *next = from ? NULL : p->next;
        const int two = all - from > TILE;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = 0; k < in; k += CODES_OF_TILE, x += 1024) {
            for (int i = 0; next && i < 2048; i += 64) _mm_prefetch(next + k * 32 + i, _MM_HINT_T1);
            const int8_t *codes = p->codes + k;
            int64_t apart = in;
            if (k >= whole) {
                const int64_t left = in - k < CODES_OF_TILE ? in - k : CODES_OF_TILE;
                const __mmask64 some = left == CODES_OF_TILE ? (__mmask64)-1 : ((__mmask64)1 << left) - 1;
                for (int i = 0; i < 2 * TILE; i++)
                    _mm512_store_si512(last + i * CODES_OF_TILE,
                                       i < p->width ? _mm512_maskz_loadu_epi8(some, codes + i * in) : _mm512_setzero_si512());
                __asm__ volatile("" : : "r"(last) : "memory");
                codes = last;
                apart = CODES_OF_TILE;
            }
            _tile_loadd(4, codes, apart);
            _tile_loadd(5, codes + TILE * apart, apart);
            _tile_loadd(6, x, 64);
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(1, 5, 6);
            if (two) {
                _tile_loadd(7, x + block, 64);
                _tile_dpbssd(2, 4, 7);
                _tile_dpbssd(3, 5, 7);
            }
        }
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
        if (two) { _tile_stored(2, sums[2], 64); _tile_stored(3, sums[3], 64); }
        for (int i = 0; i < 2 + 2 * two; i++) {
            const int64_t start = from + i / 2 * TILE;
            if (i % 2 == 0 || p->width > TILE) store(p, start, (int)(all - start < TILE ? all - start : TILE), sums[i], i % 2 * TILE);
        }
    }
}

const way rows_amx = {2 * TILE, BYTES, 0, pack, multiply, leave};

/* ---- convolutions: packed are [runs][chunks][2][chunk / 4][16][4], the chunks of a run as long as each other ---- */

static int64_t chunks_of(int64_t length) { return (length + CODES_OF_TILE - 1) / CODES_OF_TILE; }

static int64_t chunk_of(int64_t length) {
    const int64_t chunks = chunks_of(length);
    return ((length + chunks - 1) / chunks + 3) / 4 * 4;
}

static int64_t bytes_of(int64_t count, int64_t length) { return count * chunks_of(length) * chunk_of(length) * 32; }

__attribute__((target(TARGET_VNNI)))
static void pack_runs(const int8_t *codes, int64_t apart, int width, const run *runs, int64_t count, int64_t length, int zero, void *packed,
                      int32_t *start) {
    const int64_t chunk = chunk_of(length);
    const __m512i ones = _mm512_set1_epi8(1);
    __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    char *to = packed;
    for (int64_t i = 0; i < count; i++)
        for (int64_t k = 0; k < length; k += chunk) {
            const int64_t left = length - k < chunk ? length - k : chunk;
            for (int half = 0; half < 2; half++, to += chunk * 16) {
                __m512i words[16];
                transpose_sixteen(codes + half * 16 * apart + runs[i].from + k, apart, left, width - half * 16, words);
                for (int j = 0; j < chunk / 4; j++) {
                    sums[half] = _mm512_dpbusd_epi32(sums[half], ones, words[j]);
                    _mm512_store_si512(to + j * 64, words[j]);
                }
            }
        }
    for (int half = 0; half < 2; half++) _mm512_storeu_si512(start + half * 16, _mm512_mullo_epi32(sums[half], _mm512_set1_epi32(-zero)));
}

__attribute__((target(TARGET_AMX)))
static void multiply_runs(const void *x, int64_t step, const run *runs, int64_t count, int64_t length, const void *packed,
                          const int32_t *start, int32_t *to, int pixels) {
    const int64_t chunk = chunk_of(length), size = chunk * 16;
    const char *w = packed;
    set_tiles(pixels, (int)chunk);
    _tile_loadd(0, start, 0);                          /* the same row sixteen times */
    _tile_loadd(1, start + 16, 0);
    if (pixels > TILE) { _tile_loadd(2, start, 0); _tile_loadd(3, start + 16, 0); }
    for (int64_t i = 0; i < count; i++) {
        const char *at = (const char *)x + runs[i].at;
        for (int64_t k = 0; k < length; k += chunk, w += 2 * size) {
            _tile_loadd(4, at + k, step);
            _tile_loadd(6, w, 64);
            _tile_loadd(7, w + size, 64);
            _tile_dpbusd(0, 4, 6);
            _tile_dpbusd(1, 4, 7);
            if (pixels > TILE) {
                _tile_loadd(5, at + k + TILE * step, step);
                _tile_dpbusd(2, 5, 6);
                _tile_dpbusd(3, 5, 7);
            }
        }
    }
    _tile_stored(0, to, 128);
    _tile_stored(1, to + 16, 128);
    if (pixels > TILE) { _tile_stored(2, to + TILE * 32, 128); _tile_stored(3, to + TILE * 32 + 16, 128); }
}

/* Short runs fill a tile to a small part: below so many codes the vectors are as fast. */
int fills_tiles(int64_t length) { return chunk_of(length) >= 16; }

const product tiles_amx = {32, 2 * TILE, 2 * TILE * 2, 0, chunk_of, multiply_runs, bytes_of, pack_runs, leave};
#endif
