/* Attention of some rows, a tile of columns after the other: scores, weights and values of one tile are near the processor
 * together, and a panel of rows uses them while they are.
 *
 *     columns of the line   0 ........ | 256 ........ | 512 .. end      cut at multiples of TILE, wherever the rows begin
 *     a row keeps           highest score, sum of weights, weighted values; scaled down when a tile brings a higher score
 *
 * A row's numbers depend on its own columns only: tiles are cut at fixed columns, columns are added in ascending order,
 * and one that the row does not see is never touched, since zero times NaN is NaN. Weights are rounded to elements before
 * they meet the values, as the library's kernels do; they are summed before that.
 *
 * Paper: online softmax as in FlashAttention, arXiv:2205.14135, algorithm 1, with the loop over columns outside.
 */

/* Columns that one multiply-add takes: a unit of them where it multiplies units. */
#define TAKEN (UNIT / STEPS)
enum { NAME(tile_weights) = TILE / TAKEN }; /* inputs of a row and tile */

/* What a panel of one group's rows works on. Row f of it is head f % n of token f / n. */
typedef struct {
    const uint32_t *tiles; /* keys of the slot's columns, [column / 16][unit][16] */
    const uint32_t *rest;  /* or NULL: keys of the columns from `laid` on, which `tiles` does not have */
    long laid;             /* a multiple of 16 */
    const char *values;    /* of the slot's columns, [column][unit] */
    long units;            /* of a column */
    const Run *runs;       /* the columns that the group looks at, end to end: the line */
    long num_runs, begin;  /* of the line, a multiple of 16 */
    long prefix;           /* of the line: those from here on belong to a tree, if there is one */
    long shift;            /* of the last run: from the line to the slot's columns */
    long n, D, rows;       /* heads of a token, width of a head, folded rows */
    float scaling;         /* of scores, once they are capped */
    float cap, cap_factor; /* of them before; 0: none */
    const NAME(input) *q;       /* [rows][INPUTS(D)] */
    long lows[PANEL], ends[PANEL]; /* of each token: the columns of the line that it sees */
    /* Of a tree, else NULL. Behind the prefix each token sees its own path. */
    const int32_t *paths; /* [token][own]: the slot's columns */
    const float *path_scores; /* [row][own] */
    long own;
    /* Of keys and values in codes, else 0; see coded.h. */
    long coded;   /* bytes of a coded query */
    char *queries; /* [rows][2][coded] */
    Matrix keys;  /* `tiles` */
    float *scales; /* [TILE], of the values of the tile at hand; behind them room for a row's own, and for opened values */
    float *sums, *sofar, *highest; /* [rows][16], [rows][D], [rows] */
    float *scores;                 /* [12][TILE], of the tile at hand; twice as much where queries are in codes */
    NAME(input) *weights;          /* [12][tile_weights] */
} NAME(Panel);

/* LANES values of a column, or of the TAKEN columns from it on; `next` is NULL where the second is none of the row's. */
static inline __attribute__((always_inline)) part NAME(value)(const char *column, const char *next) {
#if BF16 && TAKEN == 2
    typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
    const part_of_units lower = column ? __builtin_convertvector(*(const halves *)column, part_of_units) : (part_of_units){0};
    const part_of_units upper = next ? __builtin_convertvector(*(const halves *)next, part_of_units) : (part_of_units){0};
    return (part)(lower | upper << 16);
#else
    (void)next;
    return NAME(widen)(column);
#endif
}

/* The same of values in codes, from `d` on. */
static inline __attribute__((always_inline)) part NAME(code_value)(const char *column, const char *next, long d) {
    const part first = column ? leave_codes(column + 4 + d) : (part){0};
#if BF16 && TAKEN == 2
    const part second = next ? leave_codes(next + 4 + d) : (part){0};
    return (part)((part_of_units)first >> 16 | (part_of_units)second); /* small whole numbers have no lower halves */
#else
    (void)next;
    return first;
#endif
}

/* NP parts of the values of a column, or of the TAKEN columns from it on. */
static inline __attribute__((always_inline)) void NAME(values_of)(const int NP, const char *column, long bytes, part *v) {
    const long part_bytes = LANES * (4 / UNIT);
    int p = 0;
#if BF16 && TAKEN == 2
    static const _Alignas(64) uint16_t places[2][32] = {
        {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
        {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
    UNROLL for (; p + 2 <= NP; p += 2) {
        const __m512i a = _mm512_loadu_si512(column + p * part_bytes), b = _mm512_loadu_si512(column + bytes + p * part_bytes);
        UNROLL for (int i = 0; i < 2; i++) v[p + i] = (part)_mm512_permutex2var_epi16(a, _mm512_load_si512(places[i]), b);
    }
#endif
    UNROLL for (; p < NP; p++) v[p] = NAME(value)(column + p * part_bytes, column + bytes + p * part_bytes);
}

/* 16 weights to what a product reads */
static inline __attribute__((always_inline)) void NAME(enter_weights)(NAME(input) *to, vf x) {
#if BF16 && TAKEN == 2
    *(__m256bh *)to = _mm512_cvtneps_pbh((__m512)x); /* none is so small that this would take it for zero */
#else
    NAME(enter16)(to, x);
#endif
}

/* Scores of the columns lo..hi-1 of a tile to weights, zero around them up to whole vectors; `highest` and `sums` are
 * brought up to date. Returns by what the row's sums so far are scaled. scales: of the columns' values, or NULL. */
static float NAME(weigh)(float *scores, long lo, long hi, float scaling, const float *scales, float *highest, float *sums,
                         NAME(input) *weights) {
    const long from = lo / 16 * 16, to = (hi + 15) / 16 * 16;
    for (long c = from; c < lo; c++) scores[c] = -INFINITY;
    for (long c = hi; c < to; c++) scores[c] = -INFINITY;
    vf tops = (vf){0} - INFINITY;
    for (long c = from; c < to; c += 16) tops = vector_max(*(const vf_unaligned *)(scores + c), tops);
    float top = highest_of(tops), scale = 1;
    if (!(top > *highest)) {
        top = *highest;
    } else {
        scale = exponential((vf){0} + (*highest - top) * scaling)[0];
        *highest = top;
    }
    const float shift = top > -INFINITY ? top : 0; /* a broken model: nothing but negative infinity so far */
    vf sum = *(vf *)sums * scale;
    for (long c = from; c < to; c += 16) {
        const vf weight = exponential_below((*(const vf_unaligned *)(scores + c) - shift) * scaling);
        sum += weight;
        if (scales) { /* of a column that is not seen the scale may be no number, and the weight stays zero */
            const vf scaled = weight * *(const vf_unaligned *)(scales + c);
            NAME(enter_weights)(weights + c / TAKEN, (vf)((vu)scaled & (vu)(weight != 0)));
        } else {
            NAME(enter_weights)(weights + c / TAKEN, weight);
        }
    }
    *(vf *)sums = sum;
    return scale;
}

/* sofar[row i] += weights[c] * values of column c, in ascending order over the columns from..to-1 of a tile, which MR rows
 * all see and which lie one behind the other. NP parts of the values at a time. */
static inline __attribute__((always_inline)) void NAME(add_part)(const int MR, const int NP, const NAME(input) *weights,
                                                                 const char *values, long from, long to, long D, float *sofar) {
    part acc[12][4];
    UNROLL for (int i = 0; i < MR; i++)
        UNROLL for (int p = 0; p < NP; p++) acc[i][p] = *(const part_unaligned *)(sofar + i * D + p * LANES);
    const long bytes = D * (4 / UNIT);
    for (long c = from; c < to; c += TAKEN) {
        part v[4];
        NAME(values_of)(NP, values + c * bytes, bytes, v);
        UNROLL for (int i = 0; i < MR; i++)
            UNROLL for (int p = 0; p < NP; p++) acc[i][p] = NAME(mac)(acc[i][p], v[p], weights[i * NAME(tile_weights) + c / TAKEN]);
    }
    UNROLL for (int i = 0; i < MR; i++)
        UNROLL for (int p = 0; p < NP; p++) *(part_unaligned *)(sofar + i * D + p * LANES) = acc[i][p];
}

#define ROWS_CASE(MR)                                                                                                 \
    case MR:                                                                                                          \
        for (; d + VALUES_FOR(MR) * LANES <= D; d += VALUES_FOR(MR) * LANES)                                          \
            NAME(add_part)(MR, VALUES_FOR(MR), weights, values + d * (4 / UNIT), from, to, D, sofar + d);             \
        for (; d < D; d += LANES) NAME(add_part)(MR, 1, weights, values + d * (4 / UNIT), from, to, D, sofar + d);    \
        break;

static void NAME(add_values)(long rows, const NAME(input) *weights, const char *values, long from, long to, long D, float *sofar) {
    long d = 0;
    switch (rows) {
        ROWS_CASE(1) ROWS_CASE(2) ROWS_CASE(3) ROWS_CASE(4) ROWS_CASE(5) ROWS_CASE(6)
        ROWS_CASE(7) ROWS_CASE(8) ROWS_CASE(9) ROWS_CASE(10) ROWS_CASE(11) ROWS_CASE(12)
    }
}
#undef ROWS_CASE

/* The same of a single row over some columns lo..hi-1 of the line, wherever they lie: behind the prefix, if the row has a
 * path, along that. A multiply-add whose second column is not among them takes zeros in its place. */
static void NAME(add_own)(const NAME(Panel) *y, const int32_t *path, const NAME(input) *weights, long lo, long hi, float *sofar) {
    const long bytes = 4 * y->units;
    for (long c = lo / TAKEN * TAKEN; c < hi; c += TAKEN) {
        const char *at[2] = {0, 0};
        for (long i = 0; i < TAKEN; i++)
            if (c + i >= lo && c + i < hi)
                at[i] = y->values + (path && c + i >= y->prefix ? path[c + i - y->prefix] : c + i + y->shift) * bytes;
        for (long d = 0; d < y->D; d += LANES) {
            part_unaligned *to = (part_unaligned *)(sofar + d);
            if (y->coded) {
                *to = NAME(mac)(*to, NAME(code_value)(at[0], at[1], d), weights[c % TILE / TAKEN]);
                continue;
            }
            const char *first = at[0] ? at[0] + d * (4 / UNIT) : 0, *second = at[1] ? at[1] + d * (4 / UNIT) : 0;
            *to = NAME(mac)(*to, NAME(value)(first, second), weights[c % TILE / TAKEN]);
        }
    }
}

/* Scores of some rows of the panel over tiles of the slot's columns, a multiple of 16 the first of them. */
static void NAME(score_tiles)(const NAME(Panel) *y, long column, long tiles, long base, long rows, float *scores, long stride) {
    const uint32_t *keys = y->tiles + column * y->units;
    const long last = column + 16 * tiles;
    if (y->rest && column < y->laid && last > y->laid) {
        NAME(score_tiles)(y, column, (y->laid - column) / 16, base, rows, scores, stride);
        NAME(score_tiles)(y, y->laid, (last - y->laid) / 16, base, rows, scores + y->laid - column, stride);
        return;
    }
    if (y->rest && column >= y->laid) keys = y->rest + (column - y->laid) * y->units;
    if (!y->coded) {
        NAME(product)(keys, y->units * 16, 0, tiles, y->q + INPUTS(base * y->D), INPUTS(y->D), y->units, rows, scores, stride, 0, 0);
        return;
    }
    Matrix w = y->keys;
    w.tiles = keys;
    coded_product(&w, 0, tiles, y->queries + 2 * base * y->coded, y->D, 2 * rows, scores, stride, 0, 0);
    for (long i = 0; i < rows; i++) /* the two of a row become one; none is written before it has been read */
        for (long c = 0; c < 16 * tiles; c += LANES) {
            const float *first = scores + 2 * i * stride + c;
            *(part_unaligned *)(scores + i * stride + c) = *(const part_unaligned *)first + *(const part_unaligned *)(first + stride);
        }
}

/* Values of the columns from..to-1 of the line, all of one tile, as elements, and their scales. */
static void NAME(open_values)(const NAME(Panel) *y, long tile, long from, long to) {
    char *opened = (char *)(y->scales + 2 * TILE);
    for (long c = from; c < to; c++) {
        const char *row = y->values + (c + y->shift) * 4 * y->units;
        y->scales[c - tile] = *(const float *)row;
        for (long d = 0; d < y->D; d += LANES)
            NAME(narrow_exactly)(opened + ((c - tile) * y->D + d) * (4 / UNIT), leave_codes(row + 4 + d));
    }
}

/* The scales of a row's columns lo..hi-1 of a tile: of its own path where it has one. */
static const float *NAME(scales_of)(const NAME(Panel) *y, const int32_t *path, long tile, long lo, long hi) {
    if (!y->coded || !path || hi <= y->prefix) return y->coded ? y->scales : 0;
    float *own = y->scales + TILE;
    memcpy(own, y->scales, TILE * sizeof(float));
    for (long c = lo > y->prefix ? lo : y->prefix; c < hi; c++)
        own[c - tile] = *(const float *)(y->values + path[c - y->prefix] * 4 * y->units);
    return own;
}

/* One tile of columns, tile..tile_end-1 of the line, for at most 12 rows of the panel from `base` on. */
static void NAME(take_tile)(const NAME(Panel) *y, long tile, long tile_end, long base, long rows) {
    const long D = y->D;
    long lo[12], hi[12];
    long least = tile_end, most = tile; /* the columns that some row sees; of a tree, without the paths */
    long shared_from = tile, shared_to = tile_end; /* those that all rows see, of the prefix if there are paths */
    for (long i = 0; i < rows; i++) {
        const long token = (base + i) / y->n;
        lo[i] = y->lows[token] > tile ? y->lows[token] : tile;
        hi[i] = y->ends[token] < tile_end ? y->ends[token] : tile_end;
        if (hi[i] <= lo[i]) { /* nothing */
            lo[i] = hi[i] = shared_to = tile;
            continue;
        }
        const long common = y->paths && hi[i] > y->prefix ? y->prefix : hi[i];
        if (lo[i] < least) least = lo[i];
        if (common > most) most = common;
        if (lo[i] > shared_from) shared_from = lo[i];
        if (common < shared_to) shared_to = common;
    }
    shared_from = (shared_from + TAKEN - 1) / TAKEN * TAKEN;
    shared_to = shared_to / TAKEN * TAKEN;
    if (shared_to < shared_from) shared_to = shared_from;

    for (long k = 0, at = y->begin; k < y->num_runs && at < most; at += y->runs[k].to - y->runs[k].from, k++) {
        const long end = at + y->runs[k].to - y->runs[k].from;
        const long from = at > least / 16 * 16 ? at : least / 16 * 16, to = end < most ? end : most;
        if (from < to)
            NAME(score_tiles)(y, y->runs[k].from + from - at, (to - from + 15) / 16, base, rows, y->scores + from - tile, TILE);
    }
    for (long i = 0; i < rows; i++) {
        const long f = base + i;
        float *scores = y->scores + i * TILE, *sofar = y->sofar + f * D;
        if (hi[i] == lo[i]) continue;
        for (long c = lo[i] > y->prefix || !y->paths ? lo[i] : y->prefix; y->paths && c < hi[i]; c++)
            scores[c - tile] = y->path_scores[f * y->own + c - y->prefix];
        if (y->cap) cap_line(scores, lo[i] - tile, hi[i] - tile, y->cap_factor, y->cap);
        const int32_t *path = y->paths ? y->paths + f / y->n * y->own : 0;
        const float *scales = NAME(scales_of)(y, path, tile, lo[i], hi[i]);
        const float scale = NAME(weigh)(scores, lo[i] - tile, hi[i] - tile, y->scaling, scales, y->highest + f,
                                        y->sums + f * 16, y->weights + i * NAME(tile_weights));
        if (scale != 1)
            for (long d = 0; d < D; d += LANES) *(part_unaligned *)(sofar + d) *= scale;
        NAME(add_own)(y, path, y->weights + i * NAME(tile_weights), lo[i], hi[i] < shared_from ? hi[i] : shared_from, sofar);
    }
    for (long k = 0, at = y->begin; k < y->num_runs && at < shared_to; at += y->runs[k].to - y->runs[k].from, k++) {
        const long end = at + y->runs[k].to - y->runs[k].from;
        const long from = at > shared_from ? at : shared_from, to = end < shared_to ? end : shared_to;
        const char *values = y->coded ? (const char *)(y->scales + 2 * TILE)
                                      : y->values + (y->runs[k].from - at + tile) * D * (4 / UNIT);
        if (from < to) NAME(add_values)(rows, y->weights, values, from - tile, to - tile, D, y->sofar + base * D);
    }
    for (long i = 0; i < rows; i++) {
        const int32_t *path = y->paths ? y->paths + (base + i) / y->n * y->own : 0;
        NAME(add_own)(y, path, y->weights + i * NAME(tile_weights), lo[i] > shared_to ? lo[i] : shared_to, hi[i],
                      y->sofar + (base + i) * D);
    }
}
