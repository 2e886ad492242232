/* The arithmetic of one decoder, written over 32-bit units so that one text serves two element types.
 *
 * This and what is built on it are included twice by decoder.c. A unit is 32 bits: two bfloat16 (BF16 = 1) or one float32
 * (BF16 = 0). Weights, keys and values are arrays of units; sums are float32.
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

/* What a product reads of a row: its units where the processor multiplies units, else its elements as floats, so that none
 * is widened again for every tile. A unit takes STEPS multiply-adds; its weights are widened once for all rows. */
#if BF16 && defined(__AVX512BF16__)
#define STEPS 1
typedef uint32_t NAME(input);
#else
#define STEPS UNIT
typedef float NAME(input);
#endif
#define INPUTS(ELEMENTS) ((ELEMENTS) / UNIT * STEPS)
enum { NAME(entered) = STEPS * sizeof(NAME(input)) / UNIT }; /* bytes of an element in it */

/* acc += w * x for one step: LANES outputs' weights of a unit, of which the step takes its element */
static inline __attribute__((always_inline)) part NAME(mac)(part acc, part w, NAME(input) x) {
#if BF16 && defined(__AVX512BF16__)
    return (part)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)_mm512_set1_epi32((int)x));
#else
    return fused_part(w, all_of_part(x), acc);
#endif
}

/* LANES weights of a step: of the unit's first or second element */
static inline __attribute__((always_inline)) part NAME(weights)(const uint32_t *w, int step) {
    const part_of_units units = *(const part_of_units *)w;
#if STEPS == UNIT && BF16
    return (part)(step ? upper_halves(units) : units << 16);
#else
    (void)step;
    return (part)units;
#endif
}

/* LANES elements to float */
static inline __attribute__((always_inline)) part NAME(widen)(const void *from) {
#if BF16
    typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
    return (part)(__builtin_convertvector(*(const halves *)from, part_of_units) << 16);
#else
    return *(const part_unaligned *)from;
#endif
}

/* Floats as they are once they are elements: to nearest, ties to even; NaN stays NaN. */
static inline __attribute__((always_inline)) part NAME(rounded)(part x) {
#if BF16
    const part_of_units bits = (part_of_units)x, is_nan = (part_of_units)(x != x);
    return (part)(((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u & ~is_nan) | (is_nan & 0x7fc00000u));
#else
    return x;
#endif
}

/* LANES floats to elements */
static inline __attribute__((always_inline)) void NAME(narrow)(void *to, part x) {
#if BF16
    typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
    *(halves *)to = __builtin_convertvector((part_of_units)NAME(rounded)(x) >> 16, halves);
#else
    *(part_unaligned *)to = x;
#endif
}

/* The same of floats that are elements already. */
static inline __attribute__((always_inline)) void NAME(narrow_exactly)(void *to, part x) {
#if BF16
    typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
    *(halves *)to = __builtin_convertvector((part_of_units)x >> 16, halves);
#else
    *(part_unaligned *)to = x;
#endif
}

/* LANES floats to what a product reads */
static inline __attribute__((always_inline)) void NAME(enter)(NAME(input) *to, part x) {
#if STEPS == UNIT
    *(part_unaligned *)to = NAME(rounded)(x);
#else
    NAME(narrow)(to, x);
#endif
}

/* The same of 16. */
static inline __attribute__((always_inline)) void NAME(enter16)(NAME(input) *to, vf x) {
    const union { vf whole; part of[PARTS]; } y = {x};
    UNROLL for (int i = 0; i < PARTS; i++) NAME(enter)(to + INPUTS(i * LANES), y.of[i]);
}

/* One unit of MR rows and N parts of tiles. Every weight is used by all rows and every input by all parts: kept in registers
 * are the weights if they fit beside the sums, else the inputs. Where registers are few, none is free for loads of the next
 * step, so they are not begun early. */
#define UNIT_OF_BLOCK(K)                                                                                              \
    UNROLL for (int s = 0; s < STEPS; s++) {                                                                          \
        if (s && REGISTERS <= 16) __asm__ volatile("" ::: "memory");                                                  \
        const NAME(input) *xk = x + (K) * STEPS + s;                                                                  \
        if (MR * N + N < REGISTERS) {                                                                                 \
            part wk[4 * PARTS];                                                                                       \
            UNROLL for (int n = 0; n < N; n++)                                                                        \
                wk[n] = NAME(weights)(w + n / PARTS * w_stride + (K) * 16 + n % PARTS * LANES, s);                    \
            UNROLL for (int m = 0; m < MR; m++)                                                                       \
                UNROLL for (int n = 0; n < N; n++) acc[m][n] = NAME(mac)(acc[m][n], wk[n], xk[m * x_stride]);         \
        } else {                                                                                                      \
            NAME(input) inputs[MOST_ROWS];                                                                            \
            UNROLL for (int m = 0; m < MR; m++) inputs[m] = xk[m * x_stride];                                         \
            UNROLL for (int n = 0; n < N; n++) {                                                                      \
                const part wk = NAME(weights)(w + n / PARTS * w_stride + (K) * 16 + n % PARTS * LANES, s);            \
                UNROLL for (int m = 0; m < MR; m++) acc[m][n] = NAME(mac)(acc[m][n], wk, inputs[m]);                  \
            }                                                                                                         \
        }                                                                                                             \
    }

/* MR rows times NT tiles of 16 outputs.
 * w: packed weight [tile][K units][16]; x: rows of inputs of `units` units, `x_stride` inputs apart; out: floats.
 * only: `units` of them to sum over, ascending; NULL: the first ones.
 * next: what will be read after these tiles, each at its beginning. Weights stream from memory several tiles at a time,
 * which is more than processors foresee by themselves; without being told they wait at every page and at the beginning of
 * every tile. What is asked for early is not for the nearest cache yet, which waits for few lines at a time.
 * every: of `next`, a unit is fetched each time so many have been computed. */
static inline __attribute__((always_inline)) void NAME(block)(const int MR, const int NT, const uint32_t *w, long w_stride,
                                                              const NAME(input) *x, long x_stride, const int32_t *only,
                                                              long units, const uint32_t *next, long every, float *out,
                                                              long out_stride, const float *bias, int add) {
    const int N = NT * PARTS;
    part acc[MOST_ROWS][4 * PARTS]; /* MR x N of them are used, and live in registers: every loop over them is unrolled */
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int n = 0; n < N; n++) acc[m][n] = (part){0};
    if (only) {
        for (long i = 0; i < units; i++) UNIT_OF_BLOCK(only[i]);
    } else {
#if PARTS == 1
        (void)every;
        const long ahead = units < UNITS_AHEAD ? units : UNITS_AHEAD;
        long k = 0;
        for (; k < units - ahead; k++) {
            UNROLL for (int t = 0; t < NT; t++) __builtin_prefetch(w + t * w_stride + (k + ahead) * 16, 0, 2);
            UNIT_OF_BLOCK(k);
        }
        for (long from = k; k < units; k++) {
            UNROLL for (int t = 0; t < NT; t++) __builtin_prefetch(next + t * w_stride + (k - from) * 16, 0, 2);
            UNIT_OF_BLOCK(k);
        }
#else
        for (long k = 0; k < units; next += 16) {
            UNROLL for (int t = 0; t < NT; t++) __builtin_prefetch(next + t * w_stride, 0, 2);
            for (const long end = k + every < units ? k + every : units; k < end; k++) UNIT_OF_BLOCK(k);
        }
#endif
    }
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int n = 0; n < N; n++) {
            part_unaligned *to = (part_unaligned *)(out + m * out_stride + n * LANES);
            part y = acc[m][n];
            if (bias) y += *(const part_unaligned *)(bias + n * LANES);
            *to = add ? *to + y : y;
        }
}
#undef UNIT_OF_BLOCK

/* What follows tile t in a block WIDE tiles wide. */
#if PARTS == 1
#define NEXT(WIDE) (w + (t + 2 * (WIDE) <= last ? t + (WIDE) : after) * w_stride)
#else
#define NEXT(WIDE) (w + (t + 2 * (WIDE) <= last_tile ? t + (WIDE) : t) * w_stride + i * units / blocks * 16)
#endif

#define BLOCK_CASE(MR)                                                                                                \
    case MR: {                                                                                                        \
        const int wide = TILES_FOR(MR);                                                                               \
        for (; t + wide <= last; t += wide)                                                                           \
            NAME(block)(MR, wide, w + t * w_stride, w_stride, x + r * x_stride, x_stride, only, units, NEXT(wide),    \
                        blocks, out + r * out_stride + t * 16, out_stride, bias ? bias + t * 16 : 0, add);            \
        for (; t < last; t++)                                                                                         \
            NAME(block)(MR, 1, w + t * w_stride, w_stride, x + r * x_stride, x_stride, only, units, NEXT(1), blocks,  \
                        out + r * out_stride + t * 16, out_stride, bias ? bias + t * 16 : 0, add);                    \
        break;                                                                                                        \
    }

/* out[r][o] (+)= x[r] . W[o] (+ bias[o]) for rows 0..rows-1 and tiles first..last-1, summed over some units or all.
 * Few tiles at a time over all rows, so that a weight is fetched from memory once and then found in cache. Rows are
 * taken up to MOST_ROWS at once, in blocks of nearly one size: 15 are 8 and 7 where that is 14. Rows a multiple of 4 KiB
 * apart share one set of the nearest cache: more than 12 of them would wait for their inputs at every unit. */
static inline __attribute__((always_inline)) void NAME(product_over)(const uint32_t *w, long w_stride, long first,
                                                                     long last_tile, const NAME(input) *x, long x_stride,
                                                                     const int32_t *only, long units, long rows,
                                                                     float *out, long out_stride, const float *bias,
                                                                     int add) {
    const long most = MOST_ROWS > 12 && x_stride * (long)sizeof *x % 4096 == 0 ? 12 : MOST_ROWS;
    const long blocks = (rows + most - 1) / most;
    const long group = blocks <= 1 ? last_tile - first : GROUP;
    for (long begin = first; begin < last_tile; begin += group) {
        const long last = begin + group < last_tile ? begin + group : last_tile;
        for (long i = 0, r = 0; i < blocks; i++) {
            const long count = rows / blocks + (i < rows % blocks);
#if PARTS == 1
            /* the same tiles again, for the rows that are left, or the next ones; at the end, those that are there */
            const long after = i + 1 < blocks || last + 4 > last_tile ? begin : last;
#endif
            long t = begin;
            switch (count) {
                BLOCK_CASE(1) BLOCK_CASE(2) BLOCK_CASE(3)
#if MOST_ROWS > 3
                BLOCK_CASE(4) BLOCK_CASE(5) BLOCK_CASE(6)
#endif
#if MOST_ROWS > 6
                BLOCK_CASE(7) BLOCK_CASE(8) BLOCK_CASE(9) BLOCK_CASE(10) BLOCK_CASE(11) BLOCK_CASE(12) BLOCK_CASE(13) BLOCK_CASE(14)
#endif
            }
            r += count;
        }
    }
}
#undef BLOCK_CASE
#undef NEXT

static void NAME(product)(const uint32_t *w, long w_stride, long first, long last_tile, const NAME(input) *x, long x_stride,
                          long units, long rows, float *out, long out_stride, const float *bias, int add) {
    NAME(product_over)(w, w_stride, first, last_tile, x, x_stride, 0, units, rows, out, out_stride, bias, add);
}

/* Inputs as floats, LANES of them. */
static inline __attribute__((always_inline)) part NAME(leave)(const NAME(input) *x) {
#if STEPS == UNIT
    return *(const part_unaligned *)x;
#else
    return NAME(widen)(x);
#endif
}

/* Rows coded for a quantised matrix, each in coded_bytes(w, inputs) of `room`; nothing is done for another one.
 * line: of LINES_OF(w) times `inputs` floats, for the work. */
static void NAME(code_rows)(const Matrix *w, const NAME(input) *x, long inputs, long rows, float *line, char *room) {
    if (!w->bits) return;
    float *ordered = w->order ? line + inputs : line;
    for (long r = 0; r < rows; r++) {
        for (long i = 0; i < inputs; i += LANES)
            *(part_unaligned *)(line + i) = NAME(leave)(x + INPUTS(r * inputs + i));
        for (long i = 0; w->order && i < inputs; i++) ordered[i] = line[w->order[i]];
        code_row(w, ordered, inputs, room + r * coded_bytes(w, inputs));
    }
}

/* A product with a matrix of either kind. coded: the same rows, by NAME(code_rows), where it is quantised. */
static void NAME(multiply)(const Matrix *w, long first, long last_tile, const NAME(input) *x, const char *coded, long inputs,
                           long rows, float *out, long out_stride, const float *bias, int add) {
    if (w->bits)
        product_of_codes(w, first, last_tile, coded, inputs, rows, out, out_stride, bias, add);
#if BF16 && MATRIX_UNIT
    else if (matrix_unit)
        tile_product(w->tiles, w->stride / 4, first, last_tile, x, inputs / UNIT, 0, 0, inputs / UNIT, rows, out, out_stride,
                     bias, add);
#endif
    else
        NAME(product)(w->tiles, w->stride / 4, first, last_tile, x, INPUTS(inputs), inputs / UNIT, rows, out, out_stride,
                      bias, add);
}

/* Rows of elements as a product reads them: they themselves, or in `room`, which has NAME(entered) bytes for each. */
static const NAME(input) *NAME(inputs)(const void *x, long units, long rows, void *room) {
    if (NAME(entered) == 4 / UNIT) return x;
    const uint32_t *from = x;
    NAME(input) *to = room;
    for (long i = 0; i < units * rows; i++)
        for (int s = 0; s < STEPS; s++) {
            union { uint32_t bits; float value; } element = {s ? from[i] & 0xffff0000u : from[i] << 16};
            to[i * STEPS + s] = element.value;
        }
    return to;
}
