/* Products with weights in superblocks of 256 inputs, at the bits of a GGUF file: Q2_K to Q6_K, and IQ4_XS.
 *
 *     tile        of 16 outputs: their superblocks, one after the other
 *     superblock  of 16 outputs: their halves d (and dmin), 64 bytes; their scales, then the codes of eight groups of 32 inputs
 *     scales      [byte][output], the bytes of the file as they stand
 *     group       four bits of its codes, then two, then one, of these planes those that the kind has, from the lowest bits:
 *                 four  [unit][output][4 bytes], as codes of 4 bits in quantised.h
 *                 two   [2][output][4 bytes]: byte b has those of inputs 16 i + 4 q + b, q from its lowest bits on
 *                 one   [output][4 bytes]: byte b has those of inputs 4 q + b, q from its lowest bits on
 *
 * A scale is d times a whole number, which float32 holds exactly; minimums likewise. So a product has the bits of
 * forward/quantised_weight.py, with the sums that quantised.h describes; rows are coded by the code there, too.
 */

#define SUPERBLOCK 256
#define GROUPS_OF_SUPERBLOCK (SUPERBLOCK / STEP)

#define HAS_FOUR(KIND) ((KIND) >= Q4_K)
#define HAS_TWO(KIND) ((KIND) <= Q3_K || (KIND) == Q6_K)
#define HAS_ONE(KIND) ((KIND) == Q3_K || (KIND) == Q5_K)
#define HAS_MINIMUMS(KIND) ((KIND) == Q2_K || (KIND) == Q4_K || (KIND) == Q5_K)
#define IS_HALVED(KIND) HAS_TWO(KIND) /* a group has two scales, of 16 inputs each */
#define NUM_SCALES(KIND) ((KIND) == Q2_K || (KIND) == Q6_K ? 16 : (KIND) == IQ4_XS ? 6 : 12) /* bytes of an output's */

/* Lines of 64 bytes. */
#define LINES_OF_SCALES(KIND) ((NUM_SCALES(KIND) + 3) / 4)
#define LINE_OF_TWO(KIND) (HAS_FOUR(KIND) ? 4 : 0) /* where its planes begin in a group */
#define LINE_OF_ONE(KIND) (LINE_OF_TWO(KIND) + (HAS_TWO(KIND) ? 2 : 0))
#define LINES_OF_GROUP(KIND) (LINE_OF_ONE(KIND) + HAS_ONE(KIND))
#define LINES_OF_SUPERBLOCK(KIND) (1 + LINES_OF_SCALES(KIND) + GROUPS_OF_SUPERBLOCK * LINES_OF_GROUP(KIND))
/* Parts of tiles at a time, as CODED_PARTS. Halved groups take one more sum, over both halves. */
#if PARTS == 1
#define SUPERBLOCK_PARTS(KIND, MR) ((MR) == 2 ? 4 : (MR) == 3 ? 2 : 1)
#elif REGISTERS > 16
#define SUPERBLOCK_PARTS(KIND, MR) ((MR) <= 2 ? 4 : (MR) == 3 ? 2 : 1)
#else
#define SUPERBLOCK_PARTS(KIND, MR) ((MR) == 1 ? 2 : 1)
#endif

/* The whole numbers by which d and dmin of 16 outputs are multiplied. */
typedef struct {
    uint8_t scales[16][16] __attribute__((aligned(64))); /* [group or half of one][output]; int8_t without minimums */
    uint8_t minimums[16][16] __attribute__((aligned(64)));
} Factors;

static inline __attribute__((always_inline)) void factors_of(const int KIND, const char *bytes, Factors *to) {
    const vu *line = (const vu *)bytes;
    if (KIND == Q6_K) memcpy(to->scales, bytes, 256);
    if (KIND == Q2_K)
        UNROLL for (int i = 0; i < 4; i++) {
            *(vu *)to->scales[4 * i] = line[i] & 0x0f0f0f0fu;
            *(vu *)to->minimums[4 * i] = line[i] >> 4 & 0x0f0f0f0fu;
        }
    if (KIND == IQ4_XS) /* two upper bits of 0 to 3, of 4 to 7, then four of 0 and 1, of 2 and 3, ...; less 32 */
        UNROLL for (int g = 0; g < GROUPS_OF_SUPERBLOCK; g++)
            for (int o = 0; o < 16; o++) {
                const int four = (uint8_t)bytes[16 * (2 + g / 2) + o] >> 4 * (g % 2) & 15;
                to->scales[g][o] = (uint8_t)((four | ((uint8_t)bytes[16 * (g / 4) + o] >> 2 * (g % 4) & 3) << 4) - 32);
            }
    if (KIND == Q3_K) /* 4 bits of 0 to 7 and of 8 to 15, then two more of 0 to 3, of 4 to 7, ...; less 32 */
        UNROLL for (int i = 0; i < 4; i++) {
            const vu six = (line[i % 2] >> i / 2 * 4 & 0x0f0f0f0fu) | ((line[2] >> 2 * i & 0x03030303u) << 4);
            *(vu *)to->scales[4 * i] = (six + 0x60606060u) ^ 0x80808080u;
        }
    if (KIND == Q4_K || KIND == Q5_K) { /* 6 bits of 0 to 3; of 4 to 7 four, the other two above those six */
        *(vu *)to->scales[0] = line[0] & 0x3f3f3f3fu;
        *(vu *)to->scales[4] = (line[2] & 0x0f0f0f0fu) | (line[0] >> 2 & 0x30303030u);
        *(vu *)to->minimums[0] = line[1] & 0x3f3f3f3fu;
        *(vu *)to->minimums[4] = (line[2] >> 4 & 0x0f0f0f0fu) | (line[1] >> 2 & 0x30303030u);
    }
}

/* LANES whole numbers as floats. */
static inline __attribute__((always_inline)) part factors(const int SIGNED, const uint8_t *from) {
#if PARTS == 1
    const __m128i bytes = _mm_load_si128((const __m128i *)from);
    return (part)_mm512_cvtepi32_ps(SIGNED ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif PARTS == 2 && defined(__AVX2__)
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)from);
    return (part)_mm256_cvtepi32_ps(SIGNED ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
    part y;
    UNROLL for (int i = 0; i < LANES; i++) y[i] = SIGNED ? (float)(int8_t)from[i] : (float)from[i];
    return y;
#endif
}

/* Of every byte the bits under `mask` from bit `from` on, moved to bit `to`. */
static inline __attribute__((always_inline)) part_of_units bits_at(part_of_units x, const int from, uint32_t mask, const int to) {
    return (from < to ? x << (to - from) : x >> (from - to)) & mask << to;
}

/* MR rows times NP parts of tiles, as coded_block. */
static inline __attribute__((always_inline)) void superblock_block(const int MR, const int NP, const int KIND, const Matrix *w,
                                                                   long count, const char *tile, const char *next,
                                                                   int part_of_tile, const char *x, long x_stride, float *out,
                                                                   long out_stride, const float *bias, int add) {
    const int HALVED = IS_HALVED(KIND), WITH_MINIMUMS = HAS_MINIMUMS(KIND);
    const int size = HALVED ? 16 : STEP, apart = size + (int)sizeof(Cell), lines = LINES_OF_SUPERBLOCK(KIND);
    const long early = NP > 2 * PARTS ? 1 : 2; /* superblocks */
    const int first = part_of_tile * LANES;
    part sums[MOST_CODED][4];
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int n = 0; n < NP; n++) sums[m][n] = (part){0};
    for (long s = 0; s < count; s++) {
        const char *own = tile + s * lines * LINE;
        const long later = s + early < count ? s + early : s + early - count < count ? s + early - count : count - 1;
        const char *ahead = (s + early < count ? tile : next) + later * lines * LINE;
        Factors whole_numbers[(4 + PARTS - 1) / PARTS];
        part d[4], dmin[4];
        UNROLL for (int n = 0; n < NP; n++) {
            const char *head = own + n / PARTS * w->stride;
            const int lane = first + n % PARTS * LANES;
            if (n % PARTS == 0) factors_of(KIND, head + LINE, whole_numbers + n / PARTS);
            d[n] = parameters(head, 1, lane);
            if (WITH_MINIMUMS) dmin[n] = -parameters(head + 32, 1, lane);
        }
        /* for a single row the processor prefetches, see CODED_PARTS */
        int fetched = PARTS == 1 && MR == 1 ? lines : 0;
        const char *codes = own + (1 + LINES_OF_SCALES(KIND)) * LINE;
        _Pragma("GCC unroll 1") for (int g = 0; g < GROUPS_OF_SUPERBLOCK; g++) {
            for (; fetched < (g + 1) * lines / GROUPS_OF_SUPERBLOCK; fetched++)
                UNROLL for (int n = 0; n < NP; n += PARTS) __builtin_prefetch(ahead + n / PARTS * w->stride + fetched * LINE, 0, 2);
            sums_of_codes whole[MOST_CODED][4];
            part inner[MOST_CODED][4];
#define CELL(M) ((const Cell *)(x + (M) * x_stride + size))
            UNROLL for (int half = 0; half < 1 + HALVED; half++) {
                const int units = HALVED ? 2 : 4;
                UNROLL for (int m = 0; m < MR; m++)
                    UNROLL for (int n = 0; n < NP; n++)
                        whole[m][n] = WITH_MINIMUMS ? (sums_of_codes){0} : (sums_of_codes){0} + CELL(m)->correction;
                UNROLL for (int n = 0; n < NP; n++) {
                    const char *at = codes + n / PARTS * w->stride + (first + n % PARTS * LANES) * 4;
                    part_of_units twos = {0}, ones = {0};
                    if (HAS_TWO(KIND)) twos = *(const part_of_units *)(at + (LINE_OF_TWO(KIND) + half) * LINE);
                    if (HAS_ONE(KIND)) ones = *(const part_of_units *)(at + LINE_OF_ONE(KIND) * LINE);
                    UNROLL for (int i = 0; i < units; i++) {
                        const int u = half * 2 + i;
                        part_of_units one = {0}, two = {0};
                        if (HAS_FOUR(KIND)) {
                            const part_of_units v = *(const part_of_units *)(at + u * LINE);
                            one = v & 0x0f0f0f0fu;
                            two = v >> 4 & 0x0f0f0f0fu;
                        }
                        if (HAS_TWO(KIND)) {
                            one |= bits_at(twos, 4 * i, 0x03030303u, HAS_FOUR(KIND) ? 4 : 0);
                            two |= bits_at(twos, 4 * i + 2, 0x03030303u, HAS_FOUR(KIND) ? 4 : 0);
                        }
                        if (HAS_ONE(KIND)) {
                            one |= bits_at(ones, 2 * u, 0x01010101u, HAS_FOUR(KIND) ? 4 : 2);
                            two |= bits_at(ones, 2 * u + 1, 0x01010101u, HAS_FOUR(KIND) ? 4 : 2);
                        }
                        if (KIND == IQ4_XS) one = from_table(IQ4, one), two = from_table(IQ4, two);
                        UNROLL for (int m = 0; m < MR; m++) {
                            const char *own_x = x + m * x_stride + i * 8;
                            whole[m][n] = KIND == IQ4_XS ? add_codes(add_codes(whole[m][n], one, own_x), two, own_x + 4)
                                                         : add_halves(whole[m][n], one, two, own_x);
                        }
                    }
                }
                UNROLL for (int n = 0; n < NP; n++) {
                    const int lane = first + n % PARTS * LANES;
                    const Factors *own_factors = whole_numbers + n / PARTS;
                    const int which = HALVED ? 2 * g + half : g;
                    const part scale = d[n] * factors(!WITH_MINIMUMS, &own_factors->scales[which][lane]);
                    UNROLL for (int m = 0; m < MR; m++) {
                        const part term = __builtin_convertvector(whole[m][n], part) * scale;
                        inner[m][n] = half ? inner[m][n] + term : term;
                    }
                    if (!WITH_MINIMUMS) continue;
                    const part minimum = dmin[n] * factors(0, &own_factors->minimums[which][lane]);
                    UNROLL for (int m = 0; m < MR; m++) inner[m][n] += minimum * CELL(m)->sum;
                }
                if (half == HALVED)
                    UNROLL for (int m = 0; m < MR; m++)
                        UNROLL for (int n = 0; n < NP; n++) sums[m][n] += inner[m][n] * CELL(m)->step;
                x += apart;
            }
#undef CELL
            codes += LINES_OF_GROUP(KIND) * LINE;
        }
    }
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int n = 0; n < NP; n++) {
            part_unaligned *to = (part_unaligned *)(out + m * out_stride + n * LANES);
            part y = sums[m][n];
            if (bias) y += *(const part_unaligned *)(bias + n * LANES);
            *to = add ? *to + y : y;
        }
}

/* MR rows times tiles t .. last - 1. */
#define SUPERBLOCK_CASE(MR)                                                                                                \
    case MR: {                                                                                                             \
        const int parts = SUPERBLOCK_PARTS(KIND, MR), wide = parts / PARTS;                                                \
        for (; wide && t + wide <= last; t += wide)                                                                        \
            superblock_block(MR, parts, KIND, w, count, tiles + t * w->stride,                                             \
                             tiles + (t + 2 * wide <= end ? t + wide : t) * w->stride, 0, x, x_stride, out + t * 16,       \
                             out_stride, bias ? bias + t * 16 : 0, add);                                                   \
        for (; wide != 1 && t < last; t++)                                                                                 \
            for (int p = 0; p < PARTS; p++)                                                                                \
                superblock_block(MR, 1, KIND, w, count, tiles + t * w->stride,                                             \
                                 tiles + (t + 1 < end ? t + 1 : t) * w->stride, p, x, x_stride, out + t * 16 + p * LANES,  \
                                 out_stride, bias ? bias + t * 16 + p * LANES : 0, add);                                   \
        break;                                                                                                             \
    }

/* Few tiles at a time over all rows, as in quantised.h. */
static inline __attribute__((always_inline)) void superblock_product_over(const int KIND, const Matrix *w, long count,
                                                                          long begin_tile, long end, const char *rows_from,
                                                                          long x_stride, long rows, float *to, long out_stride,
                                                                          const float *bias, int add) {
    const char *tiles = w->tiles;
    const long most = MOST_CODED < 8 ? MOST_CODED : 8, blocks = (rows + most - 1) / most;
    const long group = blocks <= 1 ? end - begin_tile : 4;
    for (long begin = begin_tile; begin < end; begin += group) {
        const long last = begin + group < end ? begin + group : end;
        for (long i = 0, r = 0; i < blocks; i++) {
            const long some = rows / blocks + (i < rows % blocks);
            const char *x = rows_from + r * x_stride;
            float *out = to + r * out_stride;
            long t = begin;
            switch (some) {
                SUPERBLOCK_CASE(1) SUPERBLOCK_CASE(2) SUPERBLOCK_CASE(3) SUPERBLOCK_CASE(4)
#if MOST_CODED > 4
                SUPERBLOCK_CASE(5) SUPERBLOCK_CASE(6) SUPERBLOCK_CASE(7) SUPERBLOCK_CASE(8)
#endif
            }
            r += some;
        }
    }
}
#undef SUPERBLOCK_CASE

/* out[r][o] (+)= x[r] . W[o] (+ bias[o]), as coded_product. */
static void superblock_product(const Matrix *w, long first, long end, const char *x, long inputs, long rows, float *out,
                               long out_stride, const float *bias, int add) {
    const long x_stride = coded_bytes(w, inputs), count = inputs / SUPERBLOCK;
#define PRODUCT(KIND) superblock_product_over(KIND, w, count, first, end, x, x_stride, rows, out, out_stride, bias, add)
    switch (w->superblock) {
        case Q2_K: PRODUCT(Q2_K); break;
        case Q3_K: PRODUCT(Q3_K); break;
        case Q4_K: PRODUCT(Q4_K); break;
        case Q5_K: PRODUCT(Q5_K); break;
        case IQ4_XS: PRODUCT(IQ4_XS); break;
        default: PRODUCT(Q6_K);
    }
#undef PRODUCT
}

/* Packing. A block of the file as 64 words of 4 codes, input 4 i + b in byte b of word i, and back. */

typedef struct {
    int size, d, scales, four, two, one; /* bytes: of a block, and where its parts begin; dmin follows d */
} BlockOfFile;

static inline __attribute__((always_inline)) BlockOfFile block_of_file(int64_t kind) {
    switch (kind) {
        case Q2_K: return (BlockOfFile){84, 80, 0, 0, 16, 0};
        case Q3_K: return (BlockOfFile){110, 108, 96, 0, 32, 0};
        case Q4_K: return (BlockOfFile){144, 0, 4, 16, 0, 0};
        case Q5_K: return (BlockOfFile){176, 0, 4, 48, 0, 16};
        case IQ4_XS: return (BlockOfFile){136, 0, 2, 8, 0, 0};
        default: return (BlockOfFile){210, 208, 192, 0, 128, 0};
    }
}

static inline uint32_t word_at(const char *from, int index) {
    uint32_t word;
    memcpy(&word, from + 4 * index, 4);
    return word;
}

static inline void add_to_word(char *to, int index, uint32_t bits) {
    bits |= word_at(to, index);
    memcpy(to + 4 * index, &bits, 4);
}

/* In which word of a file's four lower bits word q of group g lies, and how far from its lowest bits; two bits of it lie in word
 * 8 (g / 4) + q, 2 (g % 4) from the lowest, and one in word q, g from the lowest. */
static inline int word_of_four(int64_t kind, int g, int q, int *shift) {
    if (kind == IQ4_XS) { /* a group's own 16 bytes */
        *shift = 4 * (q / 4);
        return 4 * g + q % 4;
    }
    *shift = kind == Q6_K ? 4 * (g / 2 % 2) : 4 * (g % 2);
    return kind == Q6_K ? 16 * (g / 4) + 8 * (g % 2) + q : 8 * (g / 2) + q;
}

static inline __attribute__((always_inline)) void pack_superblock(const int KIND, const char *block, int output, char *to) {
    const BlockOfFile at = block_of_file(KIND);
    memcpy(to + 2 * output, block + at.d, 2);
    if (HAS_MINIMUMS(KIND)) memcpy(to + 32 + 2 * output, block + at.d + 2, 2);
    for (int i = 0; i < NUM_SCALES(KIND); i++) to[LINE + 16 * i + output] = block[at.scales + i];
    uint32_t *group = (uint32_t *)(to + (1 + LINES_OF_SCALES(KIND)) * LINE) + output;
    UNROLL for (int g = 0; g < GROUPS_OF_SUPERBLOCK; g++, group += 16 * LINES_OF_GROUP(KIND)) {
        uint32_t lines[6] = {0};
        UNROLL for (int q = 0; q < 8; q++) {
            if (HAS_FOUR(KIND)) {
                int shift;
                const int place = word_of_four(KIND, g, q, &shift);
                lines[q / 2] |= (word_at(block + at.four, place) >> shift & 0x0f0f0f0fu) << 4 * (q % 2);
            }
            if (HAS_TWO(KIND))
                lines[LINE_OF_TWO(KIND) + q / 4] |= (word_at(block + at.two, 8 * (g / 4) + q) >> 2 * (g % 4) & 0x03030303u)
                                                    << 2 * (q % 4);
            if (HAS_ONE(KIND)) lines[LINE_OF_ONE(KIND)] |= (word_at(block + at.one, q) >> g & 0x01010101u) << q;
        }
        UNROLL for (int i = 0; i < LINES_OF_GROUP(KIND); i++) group[16 * i] = lines[i];
    }
}

static void unpack_superblock(int64_t kind, const char *from, int output, char *block) {
    const BlockOfFile at = block_of_file(kind);
    memset(block, 0, at.size);
    memcpy(block + at.d, from + 2 * output, 2);
    if (HAS_MINIMUMS(kind)) memcpy(block + at.d + 2, from + 32 + 2 * output, 2);
    for (int i = 0; i < NUM_SCALES(kind); i++) block[at.scales + i] = from[LINE + 16 * i + output];
    const char *group = from + (1 + LINES_OF_SCALES(kind)) * LINE + 4 * output;
    for (int g = 0; g < GROUPS_OF_SUPERBLOCK; g++, group += LINES_OF_GROUP(kind) * LINE)
        for (int q = 0; q < 8; q++) {
            int shift;
            const int place = word_of_four(kind, g, q, &shift);
            const char *twos = group + (LINE_OF_TWO(kind) + q / 4) * LINE, *ones = group + LINE_OF_ONE(kind) * LINE;
            if (HAS_FOUR(kind))
                add_to_word(block + at.four, place, (word_at(group + q / 2 * LINE, 0) >> 4 * (q % 2) & 0x0f0f0f0fu) << shift);
            if (HAS_TWO(kind))
                add_to_word(block + at.two, 8 * (g / 4) + q, (word_at(twos, 0) >> 2 * (q % 4) & 0x03030303u) << 2 * (g % 4));
            if (HAS_ONE(kind)) add_to_word(block + at.one, q, (word_at(ones, 0) >> q & 0x01010101u) << g);
        }
}

/* Tiles first .. end - 1 from blocks of the file, [output][superblock]; outputs that do not exist become zeros.
 * stride: bytes from a tile to the next. */
int64_t foretoken_pack_superblocks(int64_t kind, const char *blocks, int64_t outputs, int64_t superblocks, int64_t first,
                                   int64_t end, char *tiles, int64_t stride) {
    const long size = block_of_file(kind).size, lines = LINES_OF_SUPERBLOCK(kind);
    for (long t = first; t < end; t++)
        for (long s = 0; s < superblocks; s++) {
            char *to = tiles + t * stride + s * lines * LINE;
            if (16 * t + 16 > outputs || !HAS_MINIMUMS(kind)) memset(to, 0, lines * LINE);
            for (long o = 0; o < 16 && 16 * t + o < outputs; o++) {
                const char *block = blocks + ((16 * t + o) * superblocks + s) * size;
                switch (kind) {
                    case Q2_K: pack_superblock(Q2_K, block, (int)o, to); break;
                    case Q3_K: pack_superblock(Q3_K, block, (int)o, to); break;
                    case Q4_K: pack_superblock(Q4_K, block, (int)o, to); break;
                    case Q5_K: pack_superblock(Q5_K, block, (int)o, to); break;
                    case IQ4_XS: pack_superblock(IQ4_XS, block, (int)o, to); break;
                    default: pack_superblock(Q6_K, block, (int)o, to);
                }
            }
        }
    return 0;
}

/* The blocks of the file again. */
int64_t foretoken_unpack_superblocks(int64_t kind, const char *tiles, int64_t stride, int64_t outputs, int64_t superblocks,
                                     char *blocks) {
    const long size = block_of_file(kind).size, lines = LINES_OF_SUPERBLOCK(kind);
    for (long o = 0; o < outputs; o++)
        for (long s = 0; s < superblocks; s++)
            unpack_superblock(kind, tiles + o / 16 * stride + s * lines * LINE, (int)(o % 16),
                              blocks + (o * superblocks + s) * size);
    return 0;
}
