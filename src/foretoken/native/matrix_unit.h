/* Products by the processor's matrix unit (AMX), where there is one: up to 32 rows for little more than one.
 *
 *     inputs     16 rows at most, 64 bytes of each: 32 elements of bfloat16
 *     weights    16 outputs as they are packed, 16 units of them: 1 KiB
 *     sums       16 rows at most of 16 outputs
 *
 * One instruction adds a tile of inputs times a tile of weights to a tile of sums; what it takes of the inner dimension is a
 * cut. Cuts begin at multiples of 16 units, and zeros stand after a last one that is shorter.
 *
 * The first and the second elements of a cut's units are summed apart, then together, then added: other bits than those of
 * vectors, which take unit by unit. So where the matrix unit is used every product with bfloat16 weights goes through it, of a
 * single row, too. A row's sums are its own, whatever rows are next to it.
 *
 * Products of codes (quantised.h) are left to vectors: after each 32 inputs their sums are scaled, one by one, which takes
 * longer than the unit's own work.
 *
 * The unit's shapes and tiles are the thread's, and other libraries use them, too: a product sets them, a job's end
 * releases them.
 */

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define MATRIX_UNIT 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define MATRIX_UNIT 0
#endif

#if MATRIX_UNIT

static int matrix_unit; /* whether it is used; settled before there is any team */

#define CUT 1024        /* bytes of weights */
#define CUTS_AHEAD 3    /* of each tile, that are asked for before they are used: UNITS_AHEAD */
#define NEAR (1 << 19)  /* bytes of weights that stay in the second cache while all rows use them */
#ifndef LOAD_SHAPES     /* _tile_loadconfig lets compilers drop stores to the shapes */
#define LOAD_SHAPES(Y) __asm__ volatile("ldtilecfg %0" ::"m"(Y))
#endif

/* The system keeps the tiles of a process's threads only if it is asked to, and may refuse. */
static void ask_for_matrix_unit(void) {
    matrix_unit = !syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XFEATURE_XTILEDATA */);
}

static inline void leave_matrix_unit(void) {
    if (matrix_unit) _tile_release();
}

/* What has been written to memory is there before tiles are loaded from it: compilers do not know that they are. */
#define WRITTEN __asm__ volatile("" ::: "memory")

/* Tiles for so many rows, and so many more: 0, 1 of sums and 4 of inputs are of the first ones, 2, 3 and 5 of the others; 6
 * and 7 are weights. Without others 2 and 3 are of the first rows, too, and 5 is of weights. */
static void shape_tiles(long rows, long others) {
    struct { uint8_t palette, start, unused[14]; uint16_t bytes[16]; uint8_t rows[16]; } y = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        y.bytes[t] = LINE;
        y.rows[t] = (uint8_t)(t < 2 || t == 4 ? rows : t < 4 ? others ? others : rows : t == 5 && others ? others : 16);
    }
    LOAD_SHAPES(y);
}

/* What a tile of weights is loaded from: themselves, or their open units and zeros, or those after the last whole cut. */
static inline __attribute__((always_inline)) const char *cut_of(const char *w, long cut, long units, const int32_t *only,
                                                                 long num_only, char *room) {
    w += cut * CUT;
    if (!only && (cut + 1) * 16 <= units) return w;
    for (long u = 0, i = 0; u < 16; u++) {
        while (only && i < num_only && only[i] < cut * 16 + u) i++;
        const int there = only ? i < num_only && only[i] == cut * 16 + u : cut * 16 + u < units;
        _mm512_store_si512(room + u * LINE, there ? _mm512_loadu_si512(w + u * LINE) : _mm512_setzero_si512());
    }
    WRITTEN;
    return room;
}

/* Sums of a block of rows over NT tiles of outputs, [row][NT x 16]. BROAD: there are more than 16 rows, and at most two tiles.
 * next: the tiles after these, which are asked for early; NULL: those at hand are near, and so are the next.
 * only: as in products.inc. x_rest: the rows' inputs after the last whole cut, then zeros; LINE apart. */
static inline __attribute__((always_inline)) void sum_block(const int BROAD, const int NT, const char *w, long w_stride,
                                                            const char *next, const char *x, long x_stride,
                                                            const char *x_rest, long units, const int32_t *only,
                                                            long num_only, void *to, long to_stride) {
    _Alignas(64) char room[4][CUT];
    const long cuts = (units + 15) / 16, whole = units / 16, far = whole > CUTS_AHEAD ? whole - CUTS_AHEAD : 0;
    _tile_zero(0);
    if (BROAD || NT > 2) _tile_zero(2);
    if (NT > 1) _tile_zero(1);
    if (NT > 1 && (BROAD || NT > 2)) _tile_zero(3);
    for (long c = 0; c < cuts; c++) {
        long num = num_only;
        if (only) { /* those of this cut are the first */
            while (num_only && *only < c * 16) only++, num_only--;
            for (num = 0; num < num_only && only[num] < (c + 1) * 16; num++) continue;
            if (!num) continue;
        }
        const int as_they_lie = c < whole;
        const char *from = as_they_lie ? x + c * LINE : x_rest;
        const long apart = as_they_lie ? x_stride : LINE;
        if (!only && c < whole) { /* a tile waits for its lines one by one: they should be in the nearest cache by now */
            const char *after = next ? next : w, *ahead = c < far ? w + (c + CUTS_AHEAD) * CUT : after + (c - far) * CUT;
            const char *soon = c + 1 < whole ? w + (c + 1) * CUT : after;
            UNROLL for (int i = 0; i < 16; i++)
                UNROLL for (int n = 0; n < NT; n++) {
                    if (next) __builtin_prefetch(ahead + n * w_stride + i * LINE, 0, 2);
                    __builtin_prefetch(soon + n * w_stride + i * LINE, 0, 3);
                }
        }
#define WEIGHTS(N) cut_of(w + (N) * w_stride, c, units, only, num, room[N])
        _tile_loadd(4, from, apart);
        if (BROAD) {
            _tile_loadd(5, from + 16 * apart, apart);
            _tile_loadd(6, WEIGHTS(0), LINE);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(2, 5, 6);
            if (NT > 1) {
                _tile_loadd(7, WEIGHTS(1), LINE);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
        } else {
            _tile_loadd(5, WEIGHTS(0), LINE);
            _tile_dpbf16ps(0, 4, 5);
            if (NT > 1) {
                _tile_loadd(6, WEIGHTS(1), LINE);
                _tile_dpbf16ps(1, 4, 6);
            }
            if (NT > 2) {
                _tile_loadd(7, WEIGHTS(2), LINE);
                _tile_dpbf16ps(2, 4, 7);
                _tile_loadd(5, WEIGHTS(3), LINE);
                _tile_dpbf16ps(3, 4, 5);
            }
        }
#undef WEIGHTS
    }
    char *at = to;
    _tile_stored(0, at, to_stride);
    if (NT > 1) _tile_stored(1, at + LINE, to_stride);
    if (BROAD) {
        _tile_stored(2, at + 16 * to_stride, to_stride);
        if (NT > 1) _tile_stored(3, at + 16 * to_stride + LINE, to_stride);
    } else if (NT > 2) {
        _tile_stored(2, at + 2 * LINE, to_stride);
        _tile_stored(3, at + 3 * LINE, to_stride);
    }
}

/* A product: w, in tiles `stride` bytes apart, times rows of inputs, `x_stride` bytes apart. only: as in products.inc. */
typedef struct {
    const char *tiles;
    long stride;
    const char *x;
    long x_stride, units;
    const int32_t *only;
    long num_only;
} Tiled;

/* The inputs of some rows after the last whole cut, then zeros. */
static inline void rest_of(const Tiled *y, const char *x, long rows, char *rest) {
    const long whole = y->units / 16, bytes = y->units % 16 * 4;
    if (!bytes) return;
    memset(rest, 0, rows * LINE);
    for (long r = 0; r < rows; r++) memcpy(rest + r * LINE, x + r * y->x_stride + whole * LINE, bytes);
    WRITTEN;
}

/* Sums of some rows to where they belong. */
static inline void leave_sums(const float *sums, long rows, long outputs, float *out, long out_stride, const float *bias, int add) {
    for (long r = 0; r < rows; r++)
        for (long i = 0; i < outputs; i += 16) {
            part_unaligned *to = (part_unaligned *)(out + r * out_stride + i);
            part y = *(const part *)(sums + r * outputs + i);
            if (bias) y += *(const part_unaligned *)(bias + i);
            *to = add ? *to + y : y;
        }
}

static inline __attribute__((always_inline)) void tile_block(const int BROAD, const int NT, const Tiled *y,
                                                             const char *tile, const char *next, const char *x, const char *rest,
                                                             long rows, float *out, long out_stride, const float *bias, int add) {
    _Alignas(64) float sums[BROAD ? 32 * 32 : 16 * 64];
    const int direct = !y->only && !bias && !add;
    if (y->only) {
        sum_block(BROAD, NT, tile, y->stride, 0, x, y->x_stride, rest, y->units, y->only, y->num_only, sums, NT * LINE);
    } else {
        sum_block(BROAD, NT, tile, y->stride, next, x, y->x_stride, rest, y->units, 0, 0, direct ? out : sums,
                  direct ? 4 * out_stride : NT * LINE);
    }
    if (!direct) leave_sums(sums, rows, NT * 16, out, out_stride, bias, add);
}

/* Few tiles at a time over all rows, as in products.inc; as many as are near together. */
static inline __attribute__((always_inline)) void tile_product_of(const Tiled *y, long first, long end, long rows,
                                                                  float *to, long out_stride, const float *bias, int add) {
    _Alignas(64) char rest[32 * LINE];
    const long near = NEAR / y->stride / 4 * 4, group = rows <= 32 ? end - first : near < 4 ? 4 : near;
    long shaped = 0;
    WRITTEN;
    for (long begin = first; begin < end; begin += group) {
        const long last = begin + group < end ? begin + group : end;
        for (long r = 0, count; r < rows; r += count) {
            count = rows - r < 32 ? rows - r : 32;
            if (count != shaped) shape_tiles(count < 16 ? count : 16, count > 16 ? count - 16 : 0);
            shaped = count;
            const char *x = y->x + r * y->x_stride;
            rest_of(y, x, count, rest);
            for (long t = begin, n; t < last; t += n) {
                n = count > 16 ? t + 2 <= last ? 2 : 1 : t + 4 <= last ? 4 : 1;
                const char *tile = y->tiles + t * y->stride, *next = r ? 0 : t + 2 * n <= end ? tile + n * y->stride : tile;
                float *out = to + r * out_stride + t * 16;
                const float *own_bias = bias ? bias + t * 16 : 0;
                if (count > 16 && n == 2)
                    tile_block(1, 2, y, tile, next, x, rest, count, out, out_stride, own_bias, add);
                else if (count > 16)
                    tile_block(1, 1, y, tile, next, x, rest, count, out, out_stride, own_bias, add);
                else if (n == 4)
                    tile_block(0, 4, y, tile, next, x, rest, count, out, out_stride, own_bias, add);
                else
                    tile_block(0, 1, y, tile, next, x, rest, count, out, out_stride, own_bias, add);
            }
        }
    }
}

/* out[r][o] (+)= x[r] . W[o] (+ bias[o]) of bfloat16, for tiles first .. end - 1 of [unit][16]; strides of w and x in units. */
static void tile_product(const void *w, long w_stride, long first, long end, const uint32_t *x, long x_stride, const int32_t *only,
                         long num_only, long units, long rows, float *out, long out_stride, const float *bias, int add) {
    const Tiled y = {.tiles = w, .stride = 4 * w_stride, .x = (const char *)x, .x_stride = 4 * x_stride, .units = units,
                     .only = only, .num_only = num_only};
    tile_product_of(&y, first, end, rows, out, out_stride, bias, add);
}

#else

static void ask_for_matrix_unit(void) {}
static inline void leave_matrix_unit(void) {}

#endif
