/* Products with weights of 8 or 4 bits. forward/quantised_weight.py says what they are; here are the same bits.
 *
 *     tile      of 16 outputs: the parameters of every group, then the codes
 *     group     16 scales, then perhaps 16 minimums, floats or halves; all groups' padded to 64 bytes
 *     codes     [unit][output][4 bytes], 64 bytes a unit: of 4 inputs, or of 8, whose first four are the lower halves
 *     row       a code of 8 bits for each input, a correction and a sum for each group, a step
 *
 * Codes are kept from 0 on. What that adds to a sum of products is the group's sum of the row's codes times the offset:
 * an integer, too, which the sum of products begins with. Sums of integers are exact in any order, so every processor
 * may take its own; those over groups are floats, rounded one by one, scale before minimum, in ascending order.
 */

#define LINE 64
/* Of each tile's codes, that a product asks for before it uses them: not yet into the nearest cache, which waits for fewer
 * lines at a time than there are on their way from memory. As many as that are on their way from several tiles together. */
#define LINES_AHEAD(TILES) ((TILES) > 2 ? 48 : 96)
#define UNITS_AT_ONCE 16 /* between two looks at what to ask for */
/* Rows whose sums are in registers together, and how many parts of tiles at a time: beside every sum of integers a sum of
 * floats is kept. Four rows and more are enough to keep the processor busy with one part; six of 4 bits gain by sharing what
 * two parts load. */
#if REGISTERS > 16
#define CODED_PARTS(BITS, MR) ((MR) <= 3 ? 4 : (BITS) == 4 && (MR) == 6 ? 2 : 1)
#else
#define CODED_PARTS(BITS, MR) ((MR) <= 2 ? 2 : 1)
#endif
#ifndef MOST_CODED /* a test may take fewer: each of them is compiled by itself */
#if REGISTERS > 16
#define MOST_CODED 8
#else
#define MOST_CODED 4
#endif
#endif

typedef part_of_signs sums_of_codes; /* LANES of them */

static inline long whole_lines(long bytes) { return (bytes + LINE - 1) / LINE * LINE; }

/* Where the parts of a coded row and of a tile are, in bytes. */
typedef struct {
    long groups, units;               /* of a row; of a group */
    long corrections, sums, step;     /* of a row */
    long parameters, minimums, codes; /* of a tile: bytes of a group's; of these, where the minimums begin; all groups' */
} Places;

static inline Places places_of(const Matrix *w, long inputs) {
    Places y;
    y.groups = inputs / w->group;
    y.units = w->group * w->bits / 32;
    y.corrections = whole_lines(inputs);
    y.sums = y.corrections + 4 * y.groups;
    y.step = y.sums + 4 * y.groups;
    y.minimums = w->half ? 32 : 64;
    y.parameters = w->minimum ? 2 * y.minimums : y.minimums;
    y.codes = whole_lines(y.groups * y.parameters);
    return y;
}

/* Room that coding a row needs for the work, in floats of the row. */
#define LINES_OF(W) ((W)->order ? 2 : 1)

/* Bytes of a coded row. */
static inline long coded_bytes(const Matrix *w, long inputs) { return whole_lines(places_of(w, inputs).step + 4); }

/* The largest magnitude of n floats, a multiple of 16 of them; NaN if one of them is not finite. */
static float largest_magnitude(const float *x, long n) {
    part largest[PARTS] = {{0}};
    part_of_signs bad[PARTS] = {{0}};
    for (long i = 0; i < n; i += 16)
        UNROLL for (int p = 0; p < PARTS; p++) {
            const part y = (part)(*(const part_of_signs_unaligned *)(x + i + p * LANES) & 0x7fffffff);
            bad[p] |= ~(y <= 3.40282347e38f); /* NaN is, too */
            largest[p] = part_max(y, largest[p]);
        }
    float most = 0;
    int odd = 0;
    UNROLL for (int i = 0; i < 16; i++) {
        most = largest[i / LANES][i % LANES] > most ? largest[i / LANES][i % LANES] : most;
        odd |= bad[i / LANES][i % LANES];
    }
    return odd ? NAN : most;
}

/* What a code of 8 bits stands for where this is the largest magnitude; *inverse: of what is coded. */
static float step_of(float most, float *inverse) {
    const int odd = most != most, counts = most >= 7.888609052210118e-31f; /* 2^-100 */
    *inverse = counts ? 127.0f / most : 0;
    return odd ? NAN : counts ? most / 127.0f : 0;
}

/* LANES codes, to nearest, ties to even. */
static inline __attribute__((always_inline)) part_of_signs codes_of(const float *x, float inverse, int odd) {
    const part y = *(const part_unaligned *)x * inverse;
    return (part_of_signs)((odd ? (part){0} : y) + 12582912.0f) - 0x4b400000;
}

/* One row in codes of 8 bits. x: floats, a multiple of 16 of them. */
static void code_row(const Matrix *w, const float *x, long inputs, char *row) {
    const Places at = places_of(w, inputs);
    const float most = largest_magnitude(x, inputs);
    float inverse;
    *(float *)(row + at.step) = step_of(most, &inverse);
    int8_t *codes = (int8_t *)row;
    int32_t *corrections = (int32_t *)(row + at.corrections);
    float *sums = (float *)(row + at.sums);
    for (long g = 0; g < at.groups; g++) {
        part_of_signs sum = {0};
        for (long i = g * w->group; i < (g + 1) * w->group; i += LANES) {
            const part_of_signs code = codes_of(x + i, inverse, most != most);
            sum += code;
            *(codes_unaligned *)(codes + i) = __builtin_convertvector(code, codes_unaligned);
        }
        int32_t total = 0;
        UNROLL for (int i = 0; i < LANES; i++) total += sum[i];
        corrections[g] = (int32_t)-w->offset * total;
        sums[g] = (float)total;
    }
}

/* Where the processor multiplies only signed codes with signed ones, those of 8 bits are taken as 128 less; what that takes
 * from a sum of products is 128 times the group's sum of the row's codes, which the sum begins with. */
#if PARTS == 4 && defined(__ARM_FEATURE_DOTPROD)
#define LESS 128
#else
#define LESS 0
#endif

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
 * `next` is the tile that will be first after them. */
static inline __attribute__((always_inline)) void coded_block(const int MR, const int NP, const int BITS, const Matrix *w,
                                                              const Places *at, const char *tile, const char *next,
                                                              int part_of_tile, const char *x, long x_stride, float *out,
                                                              long out_stride, const float *bias, int add) {
    part sums[MOST_CODED][4]; /* MR x NP of them are used, as in products.inc */
    sums_of_codes whole[MOST_CODED][4];
    const char *codes = tile + at->codes + part_of_tile * 4 * LANES, *after = next + at->codes;
    const long early = LINES_AHEAD(NP / PARTS), units = at->groups * at->units, far = units > early ? units - early : 0;
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int n = 0; n < NP; n++) sums[m][n] = (part){0};
    for (long g = 0, k = 0; g < at->groups; g++) {
        UNROLL for (int m = 0; m < MR; m++) {
            int32_t correction = ((const int32_t *)(x + m * x_stride + at->corrections))[g];
            if (LESS && BITS == 8) correction += LESS * (int32_t)((const float *)(x + m * x_stride + at->sums))[g];
            UNROLL for (int n = 0; n < NP; n++) whole[m][n] = (sums_of_codes){0} + correction;
        }
        for (const long end = k + at->units; k < end;) {
            const char *ahead = k < far ? codes + early * LINE : after - far * LINE;
            for (const long stop = end - k < UNITS_AT_ONCE ? end : k + UNITS_AT_ONCE; k < stop; k++) {
                UNROLL for (int n = 0; n < NP; n += PARTS) __builtin_prefetch(ahead + n / PARTS * w->stride + k * LINE, 0, 2);
                UNROLL for (int n = 0; n < NP; n++) {
                    const char *at_unit = codes + n / PARTS * w->stride + k * LINE + n % PARTS * 4 * LANES;
                    part_of_units v = *(const part_of_units *)at_unit;
                    if (LESS && BITS == 8) v ^= 0x80808080u;
                    UNROLL for (int m = 0; m < MR; m++)
                        whole[m][n] = BITS == 8 ? add_codes(whole[m][n], v, x + m * x_stride + k * 4)
                                                : add_halves(whole[m][n], v & 0x0f0f0f0fu, v >> 4 & 0x0f0f0f0fu,
                                                             x + m * x_stride + k * 8);
                }
            }
        }
        UNROLL for (int n = 0; n < NP; n++) {
            const int lanes_on = (n % PARTS + part_of_tile) * LANES;
            const char *group = tile + n / PARTS * w->stride + g * at->parameters;
            __builtin_prefetch(next + n / PARTS * w->stride + g * at->parameters, 0, 2);
            const part scale = parameters(group, w->half, lanes_on);
            UNROLL for (int m = 0; m < MR; m++) sums[m][n] += scale * __builtin_convertvector(whole[m][n], part);
            if (!w->minimum) continue;
            const part minimum = parameters(group + at->minimums, w->half, lanes_on);
            UNROLL for (int m = 0; m < MR; m++) sums[m][n] += minimum * ((const float *)(x + m * x_stride + at->sums))[g];
        }
    }
    UNROLL for (int m = 0; m < MR; m++) {
        const float step = *(const float *)(x + m * x_stride + at->step);
        UNROLL for (int n = 0; n < NP; n++) {
            part_unaligned *to = (part_unaligned *)(out + m * out_stride + n * LANES);
            part y = sums[m][n] * step;
            if (bias) y += *(const part_unaligned *)(bias + n * LANES);
            *to = add ? *to + y : y;
        }
    }
}

/* MR rows times tiles t .. last - 1: as many parts at a time as there are registers for, then those that are left. */
#define CODED_CASE(MR)                                                                                                  \
    case MR: {                                                                                                          \
        const int parts = CODED_PARTS(BITS, MR), wide = parts / PARTS;                                                  \
        for (; wide && t + wide <= last; t += wide)                                                                     \
            coded_block(MR, parts, BITS, w, at, tiles + t * w->stride,                                                  \
                        tiles + (t + 2 * wide <= end ? t + wide : t) * w->stride, 0, x, x_stride, out + t * 16,         \
                        out_stride, bias ? bias + t * 16 : 0, add);                                                     \
        for (; wide != 1 && t < last; t++)                                                                              \
            for (int p = 0; p < PARTS; p++)                                                                             \
                coded_block(MR, 1, BITS, w, at, tiles + t * w->stride, tiles + (t + 1 < end ? t + 1 : t) * w->stride,   \
                            p, x, x_stride, out + t * 16 + p * LANES, out_stride,                                       \
                            bias ? bias + t * 16 + p * LANES : 0, add);                                                 \
        break;                                                                                                          \
    }

/* Few tiles at a time over all rows, as in products.inc. x: coded rows. */
static inline __attribute__((always_inline)) void coded_product_over(const int BITS, const Matrix *w, long first, long end,
                                                                     const char *rows_from, long inputs, long rows, float *to,
                                                                     long out_stride, const float *bias, int add) {
    const Places places = places_of(w, inputs), *at = &places;
    const char *tiles = w->tiles;
    const long blocks = (rows + MOST_CODED - 1) / MOST_CODED, x_stride = whole_lines(at->step + 4);
    const long group = blocks <= 1 ? end - first : 4;
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
            }
            r += count;
        }
    }
}
#undef CODED_CASE

/* out[r][o] (+)= x[r] . W[o] (+ bias[o]) for coded rows 0 .. rows - 1 and tiles first .. end - 1. */
static void coded_product(const Matrix *w, long first, long end, const char *x, long inputs, long rows, float *out,
                          long out_stride, const float *bias, int add) {
    if (w->bits == 4)
        coded_product_over(4, w, first, end, x, inputs, rows, out, out_stride, bias, add);
    else
        coded_product_over(8, w, first, end, x, inputs, rows, out, out_stride, bias, add);
}
