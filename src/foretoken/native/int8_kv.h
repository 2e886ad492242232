/* Keys and values in codes of 8 bits.
 *
 *     row     a float, the scale, then a code for each element of the head, 128 more than it is
 *     tile    of keys: those of 16 rows side by side, [unit of 4 bytes][16], the scales first
 *     query   whole numbers of 15 bits, each of them 256 of a first code and a second one, and what 1 stands for
 *     weight  of a column, times the scale of its values: likewise, 1 of its own for each tile of columns
 *
 * Scores and weighted values are exact sums of integers, in any order, times such steps. A scale and its codes are a row's own,
 * so that a row is the same whenever it is written, and it is moved as one.
 */

#define ROWS_OF_CODES 6 /* rows of whole numbers that are summed in registers together */

/* Whole numbers of a row stand for so much each; a sum of their products with codes begins with `correction`. */
typedef struct {
    float step;
    int32_t correction;
} Whole;

/* One head's key or value of a row. x: floats, a multiple of 16 of them. */
static void code_line(const float *x, long n, char *row) {
    typedef uint8_t own_codes __attribute__((vector_size(LANES), aligned(1), may_alias));
    const float most = largest_magnitude(x, n);
    float inverse;
    *(float *)row = step_of(most, &inverse);
    for (long i = 0; i < n; i += LANES)
        *(own_codes *)(row + 4 + i) = __builtin_convertvector(codes_of(x + i, inverse, most != most) + 128, own_codes);
}

/* LANES whole numbers as two codes each. */
static inline __attribute__((always_inline)) void split_codes(part_of_signs whole, char *first, char *second) {
    *(codes_unaligned *)first = __builtin_convertvector((whole + 128) >> 8, codes_unaligned);
    *(codes_unaligned *)second = __builtin_convertvector(whole, codes_unaligned); /* the lowest 8 bits */
}

/* n floats, a multiple of 16 of them, as whole numbers: the first codes, then, `apart` bytes on, the second ones. */
static Whole code_twice(const float *x, long n, char *first, long apart) {
    const float most = largest_magnitude(x, n);
    float inverse;
    const float step = step_of(most, &inverse) / 256;
    part_of_signs sum = {0};
    for (long i = 0; i < n; i += LANES) {
        const part_of_signs whole = codes_of(x + i, inverse * 256, most != most);
        sum += whole;
        split_codes(whole, first + i, first + apart + i);
    }
    return (Whole){step, (LESS - 128) * sum_of_signs(sum)};
}

/* sums[i] of 2 ROWS rows of codes = their products with codes of some outputs. w: of unit 0, a tile `stride` bytes after the
 * other, a unit `unit_bytes` after the other; x: of row 0. */
static inline __attribute__((always_inline)) void sum_codes(const int ROWS, const int NP, const char *w, long stride, long unit_bytes,
                                                            long units, const char *x, const long row_apart, const long unit_apart,
                                                            const char *later, long later_apart, sums_of_codes sums[2 * ROWS_OF_CODES][4]) {
    UNROLL for (int m = 0; m < 2 * ROWS; m++)
        UNROLL for (int n = 0; n < NP; n++) sums[m][n] = (sums_of_codes){0};
    for (long u = 0; u < units; u++, w += unit_bytes, x += unit_apart) {
        part_of_units v[4];
        UNROLL for (int n = 0; n < NP; n++) {
            v[n] = *(const part_of_units *)(w + n / PARTS * stride + n % PARTS * 4 * LANES);
            if (LESS) v[n] ^= 0x80808080u;
            if (later && n % PARTS == 0) __builtin_prefetch(later + n / PARTS * later_apart + u * LINE, 0, 2);
        }
        UNROLL for (int m = 0; m < 2 * ROWS; m++)
            UNROLL for (int n = 0; n < NP; n++) sums[m][n] = add_codes(sums[m][n], v[n], x + m * row_apart);
    }
}

/* Sums of whole numbers from those of their two codes. */
static inline __attribute__((always_inline)) part_of_units sum_of_whole(sums_of_codes first, sums_of_codes second, int32_t correction) {
    return ((part_of_units)first << 8) + (part_of_units)second + (uint32_t)correction;
}

/* BLOCK(ROWS, NP) for all parts from p on, NP at a time while there are so many. */
#define CODES_CASE(ROWS)                                                                                                \
    case ROWS:                                                                                                          \
        for (; p + VALUES_FOR(2 * ROWS) <= parts; p += VALUES_FOR(2 * ROWS)) BLOCK(ROWS, VALUES_FOR(2 * ROWS));         \
        for (; p < parts; p++) BLOCK(ROWS, 1);                                                                          \
        break;
#define CODES_CASES CODES_CASE(1) CODES_CASE(2) CODES_CASE(3) CODES_CASE(4) CODES_CASE(5) CODES_CASE(6)

/* MR queries times NP parts of tiles of keys, from part `p` on; `later` is read after the keys. */
static inline __attribute__((always_inline)) void key_block(const int MR, const int NP, const char *tiles, long p, long units,
                                                            const char *later, const char *queries, const Whole *whole,
                                                            float *scores, long apart) {
    const long stride = (units + 1) * LINE, at = p / PARTS * stride;
    const char *tile = tiles + at + p % PARTS * 4 * LANES;
    sums_of_codes sums[2 * ROWS_OF_CODES][4];
    sum_codes(MR, NP, tile + LINE, stride, LINE, units, queries, 4, 8 * MR, later + at, stride, sums);
    UNROLL for (int n = 0; n < NP; n++) {
        const part scale = *(const part *)(tile + n / PARTS * stride + n % PARTS * 4 * LANES);
        UNROLL for (int m = 0; m < MR; m++) {
            const part_of_signs sum = (part_of_signs)sum_of_whole(sums[2 * m][n], sums[2 * m + 1][n], whole[m].correction);
            *(part_unaligned *)(scores + m * apart + (p + n) * LANES) = __builtin_convertvector(sum, part) * (scale * whole[m].step);
        }
    }
}

/* Scores of some rows, at most ROWS_OF_CODES, over some tiles. queries: [unit][row][2][4 codes] */
static void score_codes(const char *tiles, long count, long units, const char *later, const char *queries, long rows,
                        const Whole *whole, float *scores, long apart) {
    const long parts = count * PARTS;
    long p = 0;
#define BLOCK(MR, NP) key_block(MR, NP, tiles, p, units, later, queries, whole, scores, apart)
    switch (rows) { CODES_CASES }
#undef BLOCK
}

/* MR rows of weights times NP parts of values, from part `p` on. */
static inline __attribute__((always_inline)) void value_block(const int MR, const int NP, const char *values, long p, long D,
                                                              long units, const char *codes, const Whole *whole,
                                                              const int32_t *own, float *sofar) {
    sums_of_codes sums[2 * ROWS_OF_CODES][4];
    sum_codes(MR, NP, values + p * 4 * LANES, LINE, 4 * D, units, codes, TILE, 4, 0, 0, sums);
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int n = 0; n < NP; n++) {
            part_of_units sum = sum_of_whole(sums[2 * m][n], sums[2 * m + 1][n], whole[m].correction);
            if (own) sum += *(const part_of_units_unaligned *)(own + m * D + (p + n) * LANES);
            part_unaligned *to = (part_unaligned *)(sofar + m * D + (p + n) * LANES);
            *to = fused_part(__builtin_convertvector((part_of_signs)sum, part), all_of_part(whole[m].step), *to);
        }
}

/* sofar[row] += values weighted, of some units of columns. codes: [row][2][TILE] of these columns on; own: sums of other
 * columns [row][D], or NULL; values: [unit][D][4 columns] */
static void add_coded_values(const char *values, long D, long units, const char *codes, long rows, const Whole *whole,
                             const int32_t *own, float *sofar) {
    const long parts = D / LANES;
    long p = 0;
#define BLOCK(MR, NP) value_block(MR, NP, values, p, D, units, codes, whole, own, sofar)
    switch (rows) { CODES_CASES }
#undef BLOCK
}
#undef CODES_CASES
#undef CODES_CASE

/* Codes of `count` columns, at most 4 of them, side by side: [D][4]. Of the others there are none. */
static void open_columns(const char *values, long D, long count, char *to) {
    typedef uint8_t bytes __attribute__((vector_size(16), aligned(1), may_alias));
    const long apart = D + 4;
    const char *b = values + (count > 1) * apart, *c = values + (count > 2 ? 2 : 0) * apart, *d = values + (count > 3 ? 3 : 0) * apart;
#if defined(__clang__)
#define MIXED(A, B, ...) __builtin_shufflevector(A, B, __VA_ARGS__)
#else
#define MIXED(A, B, ...) __builtin_shuffle(A, B, (bytes){__VA_ARGS__})
#endif
#define LOWER(A, B) MIXED(A, B, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define UPPER(A, B) MIXED(A, B, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#define LOWER_PAIRS(A, B) MIXED(A, B, 0, 1, 16, 17, 2, 3, 18, 19, 4, 5, 20, 21, 6, 7, 22, 23)
#define UPPER_PAIRS(A, B) MIXED(A, B, 8, 9, 24, 25, 10, 11, 26, 27, 12, 13, 28, 29, 14, 15, 30, 31)
    long i = 4;
#if PARTS == 1
#define WRITE_TWO_LINES(HALF)                                                                                         \
    do {                                                                                                              \
        const __m512i before = _mm512_shuffle_i32x4(quarters[0], quarters[1], HALF);                                  \
        const __m512i after = _mm512_shuffle_i32x4(quarters[2], quarters[3], HALF);                                   \
        _mm512_storeu_si512(to, _mm512_shuffle_i32x4(before, after, 0x88));                                           \
        _mm512_storeu_si512(to + LINE, _mm512_shuffle_i32x4(before, after, 0xdd));                                    \
        to += 2 * LINE;                                                                                               \
    } while (0)
    for (; i + 64 <= apart; i += 64) {
        const __m512i w = _mm512_loadu_si512(values + i), x = _mm512_loadu_si512(b + i);
        const __m512i y = _mm512_loadu_si512(c + i), z = _mm512_loadu_si512(d + i);
        const __m512i first = _mm512_unpacklo_epi8(w, x), second = _mm512_unpacklo_epi8(y, z);
        const __m512i third = _mm512_unpackhi_epi8(w, x), fourth = _mm512_unpackhi_epi8(y, z);
        __m512i quarters[4] = {_mm512_unpacklo_epi16(first, second), _mm512_unpackhi_epi16(first, second),
                               _mm512_unpacklo_epi16(third, fourth), _mm512_unpackhi_epi16(third, fourth)}; /* of each 16 */
        WRITE_TWO_LINES(0x44);
        WRITE_TWO_LINES(0xee);
    }
#undef WRITE_TWO_LINES
#endif
    for (; i < apart; i += 16, to += LINE) {
        const bytes w = *(const bytes *)(values + i), x = *(const bytes *)(b + i), y = *(const bytes *)(c + i), z = *(const bytes *)(d + i);
        const bytes first = LOWER(w, x), second = LOWER(y, z), third = UPPER(w, x), fourth = UPPER(y, z);
        *(bytes *)to = LOWER_PAIRS(first, second);
        *(bytes *)(to + 16) = UPPER_PAIRS(first, second);
        *(bytes *)(to + 32) = LOWER_PAIRS(third, fourth);
        *(bytes *)(to + 48) = UPPER_PAIRS(third, fourth);
    }
#undef MIXED
#undef LOWER
#undef UPPER
#undef LOWER_PAIRS
#undef UPPER_PAIRS
}
