/* The arithmetic of one decoder, written over 32-bit units so that one text serves two element types.
 *
 * This and what is built on it are included twice by decoder.c. A unit is 32 bits: two bfloat16 (BF16 = 1) or one float32 (BF16 = 0). Weights, keys,
 * values and the inputs of every product are arrays of units; sums are float32.
 *
 * Every result of a row is computed by the same operations in the same order, however many rows, requests or threads
 * take part and whether the row belongs to a chain or a tree. Hence the text of a greedy request does not depend on
 * speculation or on its neighbours, bit for bit, in bfloat16 too. Two rules keep it so:
 *   - a product sums over its inner dimension in ascending order, one accumulator per (row, output);
 *   - attention sums over the positions a row sees in ascending order; a tree row's own path is compacted first.
 */

#if BF16
#define UNIT 2
#else
#define UNIT 1
#endif

/* acc += w * x over one unit: 16 outputs against one broadcast unit of the row */
static inline __attribute__((always_inline)) vf NAME(mac)(vf acc, vu w, uint32_t x) {
#if BF16
#ifdef __AVX512BF16__
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)_mm512_set1_epi32((int)x));
#else
    union { uint32_t u; float f; } low = {x << 16}, high = {x & 0xffff0000u};
    acc += (vf)(w << 16) * low.f;
    return acc + (vf)(w & 0xffff0000u) * high.f;
#endif
#else
    union { uint32_t u; float f; } value = {x};
    return acc + (vf)w * value.f;
#endif
}

/* 16 elements to float */
static inline __attribute__((always_inline)) vf NAME(widen)(const void *from) {
#if BF16
    typedef uint16_t vh __attribute__((vector_size(32), aligned(2)));
    return (vf)(__builtin_convertvector(*(const vh *)from, vu) << 16);
#else
    return *(const vf_unaligned *)from;
#endif
}

/* 16 floats to elements, rounded to nearest even; NaN stays NaN */
static inline __attribute__((always_inline)) void NAME(narrow)(void *to, vf x) {
#if BF16
    typedef uint16_t vh __attribute__((vector_size(32), aligned(2)));
    vu bits = (vu)x;
    vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    vu is_nan = (vu)(x != x);
    *(vh *)to = __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0u), vh);
#else
    *(vf_unaligned *)to = x;
#endif
}

/* One unit of MR rows and NT tiles: wk is NT * 16 outputs' weights, each used by all rows. */
#define UNIT_OF_BLOCK(K)                                                                                              \
    do {                                                                                                              \
        vu wk[4];                                                                                                     \
        UNROLL for (int t = 0; t < NT; t++) wk[t] = *(const vu *)(w + t * w_stride + (K) * 16);                       \
        UNROLL for (int m = 0; m < MR; m++) {                                                                         \
            const uint32_t xk = x[m * x_stride + (K)];                                                                \
            UNROLL for (int t = 0; t < NT; t++) acc[m][t] = NAME(mac)(acc[m][t], wk[t], xk);                          \
        }                                                                                                             \
    } while (0)

/* MR rows times NT tiles of 16 outputs.
 * w: packed weight [tile][K units][16]; x: rows of `units` units, `x_stride` units apart; out: floats.
 * only: `units` of them to sum over, ascending; NULL: the first ones.
 * next: the tiles that will be read after these. Weights stream from memory several tiles at a time, which is more than
 * processors foresee by themselves; without being told they wait at every page and at the beginning of every tile. */
static inline __attribute__((always_inline)) void NAME(block)(const int MR, const int NT, const uint32_t *w, long w_stride,
                                                              const uint32_t *x, long x_stride, const int32_t *only,
                                                              long units, const uint32_t *next, float *out,
                                                              long out_stride, const float *bias, int add) {
    vf acc[12][4]; /* MR x NT of them are used, and live in registers: every loop over them is unrolled */
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int t = 0; t < NT; t++) acc[m][t] = (vf){0};
    if (only) {
        for (long i = 0; i < units; i++) UNIT_OF_BLOCK(only[i]);
    } else {
        const long ahead = units < UNITS_AHEAD ? units : UNITS_AHEAD;
        long k = 0;
        for (; k < units - ahead; k++) {
            UNROLL for (int t = 0; t < NT; t++) __builtin_prefetch(w + t * w_stride + (k + ahead) * 16);
            UNIT_OF_BLOCK(k);
        }
        for (long from = k; k < units; k++) {
            UNROLL for (int t = 0; t < NT; t++) __builtin_prefetch(next + t * w_stride + (k - from) * 16);
            UNIT_OF_BLOCK(k);
        }
    }
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int t = 0; t < NT; t++) {
            vf_unaligned *to = (vf_unaligned *)(out + m * out_stride + t * 16);
            vf y = acc[m][t];
            if (bias) y += *(const vf_unaligned *)(bias + t * 16);
            *to = add ? *to + y : y;
        }
}
#undef UNIT_OF_BLOCK

#define BLOCK_CASE(MR)                                                                                                \
    case MR: {                                                                                                        \
        const int wide = MR <= 6 ? 4 : 2;                                                                             \
        for (; t + wide <= last; t += wide)                                                                           \
            NAME(block)(MR, wide, w + t * w_stride, w_stride, x + r * x_stride, x_stride, only, units,                \
                        w + (t + 2 * wide <= last ? t + wide : after) * w_stride, out + r * out_stride + t * 16,      \
                        out_stride, bias ? bias + t * 16 : 0, add);                                                   \
        for (; t < last; t++)                                                                                         \
            NAME(block)(MR, 1, w + t * w_stride, w_stride, x + r * x_stride, x_stride, only, units,                   \
                        w + (t + 1 < last ? t + 1 : after) * w_stride, out + r * out_stride + t * 16, out_stride,     \
                        bias ? bias + t * 16 : 0, add);                                                               \
        break;                                                                                                        \
    }

/* out[r][o] (+)= x[r] . W[o] (+ bias[o]) for rows 0..rows-1 and tiles first..last-1, summed over some units or all.
 * A few tiles at a time over all rows, so that a weight is fetched from memory once and then found in cache. Rows are
 * taken up to 12 at once, in blocks of nearly one size: 13 are 7 and 6. */
static inline __attribute__((always_inline)) void NAME(product_over)(const uint32_t *w, long w_stride, long first,
                                                                     long last_tile, const uint32_t *x, long x_stride,
                                                                     const int32_t *only, long units, long rows,
                                                                     float *out, long out_stride, const float *bias,
                                                                     int add) {
    const long group = rows <= 12 ? last_tile - first : 4, blocks = (rows + 11) / 12;
    for (long begin = first; begin < last_tile; begin += group) {
        const long last = begin + group < last_tile ? begin + group : last_tile;
        for (long i = 0, r = 0; i < blocks; i++) {
            const long count = rows / blocks + (i < rows % blocks);
            /* the same tiles again, for the rows that are left, or the next ones; at the end, those that are there */
            const long after = i + 1 < blocks || last + 4 > last_tile ? begin : last;
            long t = begin;
            switch (count) {
                BLOCK_CASE(1) BLOCK_CASE(2) BLOCK_CASE(3) BLOCK_CASE(4) BLOCK_CASE(5) BLOCK_CASE(6)
                BLOCK_CASE(7) BLOCK_CASE(8) BLOCK_CASE(9) BLOCK_CASE(10) BLOCK_CASE(11) BLOCK_CASE(12)
            }
            r += count;
        }
    }
}
#undef BLOCK_CASE

static void NAME(product)(const uint32_t *w, long w_stride, long first, long last_tile, const uint32_t *x, long x_stride,
                          long units, long rows, float *out, long out_stride, const float *bias, int add) {
    NAME(product_over)(w, w_stride, first, last_tile, x, x_stride, 0, units, rows, out, out_stride, bias, add);
}

