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

/* ---- linear layers: 32 columns, packed as [in / 64][2][16][16][4], against rows of q ---- */

__attribute__((target(TARGET_VNNI)))
static void pack(const panel *p) {
    for (int64_t k = 0; k < p->in; k += CODES_OF_TILE)
        for (int half = 0; half < 2; half++) {
            __m512i words[16];
            transpose_sixteen(p->codes + half * 16 * p->in + k, p->in, p->in - k, p->width - half * 16, words);
            for (int i = 0; i < 16; i++) _mm512_store_si512((char *)p->packed + k * 32 + half * 1024 + i * 64, words[i]);
        }
}

/* Sixteen results from column `first` on, of row `r` of x. */
__attribute__((target(TARGET_VNNI), always_inline))
static inline void store(const panel *p, int64_t r, const int32_t *sums, int first) {
    const __m512i high = _mm512_sub_epi32(_mm512_load_si512(sums + first), _mm512_loadu_si512(p->minus + first));
    __m512 value = _mm512_cvtepi32_ps(high);
    if (p->levels == 2)
        value = _mm512_add_ps(_mm512_mul_ps(value, _mm512_set1_ps(128.0f)), _mm512_cvtepi32_ps(_mm512_load_si512(sums + 32 + first)));
    value = _mm512_mul_ps(_mm512_mul_ps(value, _mm512_set1_ps(p->x_scale[r])), _mm512_loadu_ps(p->by + first));
    value = _mm512_add_ps(value, _mm512_loadu_ps(p->plus + first));
    _mm512_mask_storeu_ps(p->y + r * p->out + first, lanes_from(first, p->width), value);
}

__attribute__((target(TARGET_AMX)))
static void multiply(const panel *p) {
    const int64_t all = p->rows * p->levels, most = 2 * TILE;          /* rows of q */
    _Alignas(64) int32_t sums[2 * TILE * 32];
    for (int64_t from = 0; from < all; from += most) {
        const int rows = (int)(all - from < most ? all - from : most);
        const char *x = (const char *)p->q + from * p->padded, *w = p->packed;
        const char *next = from ? w : p->next;
        set_tiles(rows, CODES_OF_TILE);
        _tile_zero(0);
        _tile_zero(1);
        if (rows > TILE) { _tile_zero(2); _tile_zero(3); }
        for (int64_t k = 0; k < p->in; k += CODES_OF_TILE, w += 2048, next += 2048) {
            for (int i = 0; i < 2048; i += 64) _mm_prefetch(next + i, _MM_HINT_T1);
            _tile_loadd(4, x + k, p->padded);
            _tile_loadd(6, w, 64);
            _tile_loadd(7, w + 1024, 64);
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(1, 4, 7);
            if (rows > TILE) {
                _tile_loadd(5, x + k + TILE * p->padded, p->padded);
                _tile_dpbssd(2, 5, 6);
                _tile_dpbssd(3, 5, 7);
            }
        }
        _tile_stored(0, sums, 128);
        _tile_stored(1, sums + 16, 128);
        if (rows > TILE) { _tile_stored(2, sums + TILE * 32, 128); _tile_stored(3, sums + TILE * 32 + 16, 128); }
        for (int i = 0; i < rows; i += p->levels) {
            store(p, (from + i) / p->levels, sums + i * 32, 0);
            if (p->width > 16) store(p, (from + i) / p->levels, sums + i * 32, 16);
        }
    }
}

const way panels_amx = {32, BYTES, 32, pack, multiply, leave};

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
