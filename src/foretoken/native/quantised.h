/* Products with weights of 8 or 4 bits. forward/quantised_weight.py says what they are; here are the same bits.
 *
 *     tile      of 16 outputs: the parameters of every group, then the codes
 *     group     16 scales, then perhaps 16 minimums, floats or halves; all groups' padded to 64 bytes
 *     codes     [unit][output][4 bytes], 64 bytes a unit: of 4 inputs, or of 8, whose first four are the lower halves
 *     row       of each cell, room for the codes of `size` inputs, 8 bits each, and a Cell
 *
 * STEP inputs of a row share a step; a cell is what has one step and lies in one group. Codes are kept from 0 on. What that adds to a cell's sum of products is
 * the sum of the row's codes times the offset: an integer, too, which the sum of products begins with. Sums of integers are
 * exact in any order, so every processor may take its own; those over cells are floats, every product and every sum rounded
 * by itself, in ascending order: over the cells of a step, then over steps; in larger groups over those of a group, then over
 * groups. A scale comes before a minimum.
 */

/* Of each tile's codes, that a product asks for before it uses them: not yet into the nearest cache, which waits for fewer
 * lines at a time than there are on their way from memory. As many as that are on their way from several tiles together. */
#define LINES_AHEAD(TILES) ((TILES) > 2 ? 48 : 96)
/* Rows whose sums are in registers together, and how many parts of tiles at a time: next to every sum of integers a sum of
 * floats is kept. Rows that are more than MOST_CODED take turns, in blocks of six where codes have 8 bits: these gain by
 * sharing what two parts load; of 4 bits more rows gain, because codes are opened once for all of them. A single row reads tiles
 * with few parameters one after the other, from end to end: the processor prefetches that by itself, and faster alone. */
#if REGISTERS > 16
#define CODED_PARTS(KIND, MR) ((KIND) == LARGER && (MR) == 1 && PARTS == 1 ? 1 : (MR) <= 3 ? 4 : (MR) == 5 || (MR) == 6 ? 2 : 1)
#else
#define CODED_PARTS(KIND, MR) ((MR) <= 2 ? 2 : 1)
#endif
#ifndef MOST_CODED /* a test may take fewer: each of them is compiled by itself */
#if PARTS == 1
#define MOST_CODED 12
#elif REGISTERS > 16
#define MOST_CODED 8
#else
#define MOST_CODED 4
#endif
#endif

/* Groups, next to a step; PLAIN: the same, and there are no minimums; TABLED: the same, and codes are places in a table. */
enum { SMALLER, PLAIN, SAME, LARGER, TABLED };

/* What codes stand for, by their table; of FP4, twice that. */
static const int8_t TABLES[][16] __attribute__((aligned(16))) = {
    [IQ4] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
    [FP4] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
};

/* Codes below 16 as codes of 8 bits, from 0 on, LESS so much. */
static inline __attribute__((always_inline)) part_of_units from_table(int64_t table, part_of_units codes) {
    const uint8_t *values = (const uint8_t *)TABLES[table];
    part_of_units y;
#if PARTS == 1 && defined(__AVX512BW__)
    y = (part_of_units)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)values)), (__m512i)codes);
#elif PARTS == 2 && defined(__AVX2__)
    y = (part_of_units)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)values)), (__m256i)codes);
#elif PARTS == 4 && defined(__aarch64__)
    y = (part_of_units)vqtbl1q_u8(vld1q_u8(values), (uint8x16_t)codes);
#else
    y = (part_of_units){0};
    UNROLL for (int l = 0; l < LANES; l++)
        UNROLL for (int b = 0; b < 4; b++) y[l] |= (uint32_t)values[codes[l] >> 8 * b & 15] << 8 * b;
#endif
    return LESS ? y : y ^ 0x80808080u;
}

typedef part_of_signs sums_of_codes; /* LANES of them */

/* LANES sums + the products of 4 codes of each of LANES outputs, LESS so much if they are of 8 bits, with 4 of a row */
static inline __attribute__((always_inline)) sums_of_codes add_codes(sums_of_codes sums, part_of_units w, const char *x) {
    int32_t four;
    memcpy(&four, x, 4);
#if PARTS == 1 && defined(__AVX512VNNI__)
    return (sums_of_codes)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, _mm512_set1_epi32(four));
#elif PARTS == 2 && defined(__AVXVNNI__)
    return (sums_of_codes)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)w, _mm256_set1_epi32(four));
#elif PARTS == 1 && defined(__AVX512BW__)
    const __m512i y = _mm512_set1_epi32(four), even = _mm512_srai_epi16(_mm512_slli_epi16(y, 8), 8);
    const __m512i first = _mm512_madd_epi16((__m512i)(w & 0x00ff00ffu), even);
    const __m512i second = _mm512_madd_epi16(_mm512_srli_epi16((__m512i)w, 8), _mm512_srai_epi16(y, 8));
    return sums + (sums_of_codes)_mm512_add_epi32(first, second);
#elif PARTS == 2 && defined(__AVX2__)
    const __m256i y = _mm256_set1_epi32(four), even = _mm256_srai_epi16(_mm256_slli_epi16(y, 8), 8);
    const __m256i first = _mm256_madd_epi16((__m256i)(w & 0x00ff00ffu), even);
    const __m256i second = _mm256_madd_epi16(_mm256_srli_epi16((__m256i)w, 8), _mm256_srai_epi16(y, 8));
    return sums + (sums_of_codes)_mm256_add_epi32(first, second);
#elif PARTS == 4 && defined(__ARM_FEATURE_DOTPROD)
    return (sums_of_codes)vdotq_s32((int32x4_t)sums, (int8x16_t)w, vreinterpretq_s8_s32(vdupq_n_s32(four)));
#else
    (void)four;
    part_of_units y = (part_of_units)sums; /* unsigned: on the way a sum may pass what 32 bits hold, and come back */
    UNROLL for (int i = 0; i < 4; i++) y += (w >> (8 * i) & 0xffu) * (uint32_t)(int8_t)x[i];
    return (sums_of_codes)y;
#endif
}

/* The same of 8 codes below 16: the first four, and the last. Pairs of their products with codes of a row fit 16 bits, and
 * so do sums of two pairs; those of codes of 8 bits do not. */
static inline __attribute__((always_inline)) sums_of_codes add_halves(sums_of_codes sums, part_of_units first,
                                                                      part_of_units last, const char *x) {
#if PARTS == 1 && defined(__AVX512BW__) && !defined(__AVX512VNNI__)
    int32_t four[2];
    memcpy(four, x, 8);
    const __m512i pairs = _mm512_add_epi16(_mm512_maddubs_epi16((__m512i)first, _mm512_set1_epi32(four[0])),
                                           _mm512_maddubs_epi16((__m512i)last, _mm512_set1_epi32(four[1])));
    return sums + (sums_of_codes)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif PARTS == 2 && defined(__AVX2__) && !defined(__AVXVNNI__)
    int32_t four[2];
    memcpy(four, x, 8);
    const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16((__m256i)first, _mm256_set1_epi32(four[0])),
                                           _mm256_maddubs_epi16((__m256i)last, _mm256_set1_epi32(four[1])));
    return sums + (sums_of_codes)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
    return add_codes(add_codes(sums, first, x), last, x + 4);
#endif
}

/* LANES parameters of a group, as floats */
static inline __attribute__((always_inline)) part parameters(const char *from, long half, int lanes_on) {
    if (!half) return *(const part *)(from + 4 * lanes_on);
    from += 2 * lanes_on;
#if PARTS == 1
    return (part)_mm512_cvtph_ps(_mm256_load_si256((const __m256i *)from));
#elif PARTS == 2 && defined(__F16C__)
    return (part)_mm256_cvtph_ps(_mm_load_si128((const __m128i *)from));
#elif PARTS == 4 && defined(__aarch64__)
    return (part)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)from)));
#else
    typedef uint16_t halves __attribute__((vector_size(2 * LANES), may_alias));
    const part_of_units bits = __builtin_convertvector(*(const halves *)from, part_of_units);
    const part size = (part)((bits & 0x7fffu) << 13) * 5.192296858534828e33f; /* 2^112: an exponent begins elsewhere */
    return (part)((part_of_units)size | (bits & 0x8000u) << 16);
#endif
}

/* MR rows times NP parts of tiles. The first tile begins at `tile`, of which the parts from `part_of_tile` on are taken;
 * `next` is the tile that will be first after them. KIND: of groups.
 *
 * Where cells have one length, their loop is unrolled, and two things are kept from the compiler. An address for every row
 * takes more registers than there are: every third row's is enough, and the rest is in the load. And lines are prefetched
 * between products, not all of them at a cell's beginning. */
static inline __attribute__((always_inline)) void coded_block(const int MR, const int NP, const int BITS, const int KIND,
                                                              const Matrix *w, const Places *at, const char *tile,
                                                              const char *next, int part_of_tile, const char *x, long x_stride,
                                                              float *out, long out_stride, const float *bias, int add) {
    part sums[MOST_CODED][4]; /* MR x NP of them are used, as in products.inc */
    const char *group = tile + part_of_tile * (at->minimums / PARTS);
    const char *x3 = x + (MR > 3 ? 3 : 0) * x_stride; /* rows 3, 6 and 9, if there are */
    const char *x6 = x + (MR > 6 ? 6 : 0) * x_stride, *x9 = x + (MR > 9 ? 9 : 0) * x_stride;
    const char *codes[4]; /* of each tile */
    UNROLL for (int n = 0; n < NP; n += PARTS) codes[n / PARTS] = tile + at->codes + part_of_tile * 4 * LANES + n / PARTS * w->stride;
    const int WHOLE = KIND == PLAIN || KIND == SAME || KIND == TABLED;
    const int FORESEEN = PARTS == 1 && MR == 1 && KIND == LARGER;
    const long size = WHOLE ? STEP : at->size, apart = size + (long)sizeof(Cell);
    const long early = at->all_units < LINES_AHEAD(NP / PARTS) ? at->all_units : LINES_AHEAD(NP / PARTS);
    const long stride = w->stride, half = w->half, to_next = next - tile, table = w->table;
    const long minimum_too = KIND != PLAIN && KIND != TABLED && w->minimum;
    long ahead = early * LINE; /* from the codes of a unit to those that are prefetched with them */
#define ROW(M)                                                                                                        \
    ((M) < 3 ? x + (M) * x_stride : (M) < 6 ? x3 + ((M) - 3) * x_stride : (M) < 9 ? x6 + ((M) - 6) * x_stride         \
                                                                                  : x9 + ((M) - 9) * x_stride)
#define CELL(M) ((const Cell *)(ROW(M) + size))
#define LAST(M) ((const Cell *)(ROW(M) - (long)sizeof(Cell)))
#define ADDRESSES_UNKNOWN                                                                                             \
    do {                                                                                                              \
        __asm__("" : "+r"(x), "+r"(x_stride), "+r"(ahead), "+r"(group));                                              \
        if (MR > 3) __asm__("" : "+r"(x3));                                                                           \
        if (MR > 6) __asm__("" : "+r"(x6));                                                                           \
        if (MR > 9) __asm__("" : "+r"(x9));                                                                           \
        UNROLL for (int n = 0; n < NP; n += PARTS) __asm__("" : "+r"(codes[n / PARTS]));                              \
    } while (0)
#define UNIT_OF_CELL(U)                                                                                               \
    do {                                                                                                              \
        if (!FORESEEN)                                                                                                \
            UNROLL for (int n = 0; n < NP; n += PARTS) __builtin_prefetch(codes[n / PARTS] + ahead + (U) * LINE, 0, 2); \
        if (WHOLE && (U)) __asm__ volatile("" ::: "memory");                                                          \
        UNROLL for (int n = 0; n < NP; n++) {                                                                         \
            part_of_units v = *(const part_of_units *)(codes[n / PARTS] + n % PARTS * 4 * LANES + (U) * LINE);        \
            if (LESS && BITS == 8) v ^= 0x80808080u;                                                                  \
            part_of_units lower = v & 0x0f0f0f0fu, upper = v >> 4 & 0x0f0f0f0fu;                                      \
            if (KIND == TABLED) lower = from_table(table, lower), upper = from_table(table, upper);                   \
            UNROLL for (int m = 0; m < MR; m++)                                                                       \
                whole[m][n] = BITS == 8        ? add_codes(whole[m][n], v, ROW(m) + (U) * 4)                          \
                              : KIND == TABLED ? add_codes(add_codes(whole[m][n], lower, ROW(m) + (U) * 8),           \
                                                           upper, ROW(m) + (U) * 8 + 4)                               \
                                               : add_halves(whole[m][n], lower, upper, ROW(m) + (U) * 8);             \
        }                                                                                                             \
    } while (0)
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int n = 0; n < NP; n++) sums[m][n] = (part){0};
    for (long left = at->all_units; left > 0;) { /* units of the row */
        part inner[MOST_CODED][4];
        UNROLL for (int m = 0; m < MR; m++)
            UNROLL for (int n = 0; n < NP; n++) inner[m][n] = (part){0};
        for (long i = 0; WHOLE ? i < 1 : i < at->inner && left > 0; i++) {
            sums_of_codes whole[MOST_CODED][4];
            if (left <= early && left + at->units > early) ahead += to_next - at->all_units * LINE;
            if (WHOLE) ADDRESSES_UNKNOWN;
            UNROLL for (int m = 0; m < MR; m++)
                UNROLL for (int n = 0; n < NP; n++) whole[m][n] = (sums_of_codes){0} + CELL(m)->correction;
            const long units = WHOLE ? STEP * BITS / 32 : at->units < left ? at->units : left;
            if (WHOLE) {
                UNROLL for (int u = 0; u < STEP * BITS / 32; u++) UNIT_OF_CELL(u);
            } else {
                _Pragma("GCC unroll 1") for (long u = 0; u < units; u++) UNIT_OF_CELL(u);
            }
            if (WHOLE) ADDRESSES_UNKNOWN;
            UNROLL for (int n = 0; n < NP; n += PARTS) codes[n / PARTS] += units * LINE;
            left -= units;
            UNROLL for (int n = 0; n < NP; n++) {
                const char *own = group + n / PARTS * stride;
                const part scale = KIND == LARGER ? (part){0} : parameters(own, half, n % PARTS * LANES);
                UNROLL for (int m = 0; m < MR; m++) {
                    const part y = __builtin_convertvector(whole[m][n], part);
                    const part term = KIND == LARGER ? y * CELL(m)->step : y * scale;
                    inner[m][n] = WHOLE ? term : inner[m][n] + term; /* one cell, or several */
                }
                if (KIND == LARGER || !minimum_too) continue;
                const part minimum = parameters(own + at->minimums, half, n % PARTS * LANES);
                UNROLL for (int m = 0; m < MR; m++) inner[m][n] += minimum * CELL(m)->sum;
            }
            if (KIND != LARGER) group += at->parameters;
            x += apart;
            x3 += apart;
            x6 += apart;
            x9 += apart;
        }
        UNROLL for (int n = 0; n < NP; n++) {
            const char *own = group + n / PARTS * stride;
            __builtin_prefetch(own + to_next, 0, 2);
            if (KIND != LARGER) {
                UNROLL for (int m = 0; m < MR; m++) sums[m][n] += inner[m][n] * LAST(m)->step;
                continue;
            }
            const part scale = parameters(own, half, n % PARTS * LANES);
            UNROLL for (int m = 0; m < MR; m++) sums[m][n] += scale * inner[m][n];
            if (!minimum_too) continue;
            const part minimum = parameters(own + at->minimums, half, n % PARTS * LANES);
            UNROLL for (int m = 0; m < MR; m++) sums[m][n] += minimum * LAST(m)->sum;
        }
        if (KIND == LARGER) group += at->parameters;
    }
#undef ROW
#undef CELL
#undef LAST
#undef ADDRESSES_UNKNOWN
#undef UNIT_OF_CELL
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int n = 0; n < NP; n++) {
            part_unaligned *to = (part_unaligned *)(out + m * out_stride + n * LANES);
            part y = sums[m][n];
            if (bias) y += *(const part_unaligned *)(bias + n * LANES);
            *to = add ? *to + y : y;
        }
}

/* MR rows times tiles t .. last - 1: as many parts at a time as there are registers for, then those that are left. */
#define CODED_CASE(MR)                                                                                                  \
    case MR: {                                                                                                          \
        const int parts = CODED_PARTS(KIND, MR), wide = parts / PARTS;                                                  \
        for (; wide && t + wide <= last; t += wide)                                                                     \
            coded_block(MR, parts, BITS, KIND, w, at, tiles + t * w->stride,                                            \
                        tiles + (t + 2 * wide <= end ? t + wide : t) * w->stride, 0, x, x_stride, out + t * 16,         \
                        out_stride, bias ? bias + t * 16 : 0, add);                                                     \
        for (; wide != 1 && t < last; t++)                                                                              \
            for (int p = 0; p < PARTS; p++)                                                                             \
                coded_block(MR, 1, BITS, KIND, w, at, tiles + t * w->stride,                                            \
                            tiles + (t + 1 < end ? t + 1 : t) * w->stride, p, x, x_stride, out + t * 16 + p * LANES,    \
                            out_stride, bias ? bias + t * 16 + p * LANES : 0, add);                                     \
        break;                                                                                                          \
    }

/* Few tiles at a time over all rows, as in products.inc. x: coded rows. */
static inline __attribute__((always_inline)) void coded_product_over(const int BITS, const int KIND, const Matrix *w,
                                                                     const Places *at, long first, long end,
                                                                     const char *rows_from, long x_stride, long rows, float *to,
                                                                     long out_stride, const float *bias, int add) {
    const char *tiles = w->tiles;
    const long most = BITS == 8 && MOST_CODED > 6 && rows > MOST_CODED ? 6 : MOST_CODED;
    const long blocks = (rows + most - 1) / most, group = blocks <= 1 ? end - first : 4;
    for (long begin = first; begin < end; begin += group) {
        const long last = begin + group < end ? begin + group : end;
        for (long i = 0, r = 0; i < blocks; i++) {
            const long count = rows / blocks + (i < rows % blocks);
            const char *x = rows_from + r * x_stride;
            float *out = to + r * out_stride;
            long t = begin;
            switch (count) {
                CODED_CASE(1) CODED_CASE(2) CODED_CASE(3) CODED_CASE(4)
#if MOST_CODED > 4
                CODED_CASE(5) CODED_CASE(6) CODED_CASE(7) CODED_CASE(8)
#endif
#if MOST_CODED > 8
                CODED_CASE(9) CODED_CASE(10) CODED_CASE(11) CODED_CASE(12)
#endif
            }
            r += count;
        }
    }
}
#undef CODED_CASE

/* out[r][o] (+)= x[r] . W[o] (+ bias[o]) for coded rows 0 .. rows - 1 and tiles first .. end - 1. */
static void coded_product(const Matrix *w, long first, long end, const char *x, long inputs, long rows, float *out,
                          long out_stride, const float *bias, int add) {
    const Places at = places_of(w, inputs);
    const long x_stride = coded_bytes(w, inputs);
#define CODED(BITS, KIND) coded_product_over(BITS, KIND, w, &at, first, end, x, x_stride, rows, out, out_stride, bias, add)
    if (w->group > STEP)
        w->bits == 4 ? CODED(4, LARGER) : CODED(8, LARGER);
    else if (w->group < STEP)
        w->bits == 4 ? CODED(4, SMALLER) : CODED(8, SMALLER);
    else if (w->bits == 4)
        w->table ? CODED(4, TABLED) : CODED(4, SAME);
    else
        w->minimum ? CODED(8, SAME) : CODED(8, PLAIN);
#undef CODED
}
