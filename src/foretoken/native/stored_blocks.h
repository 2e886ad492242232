/* Blocks as they stand in a GGUF file; models/gguf/blocks.py says of what their elements are made. Those of 32 elements are
 * packed for products (quantised.h), those of 256 in superblocks.h. All are decoded a row at a time, for embeddings, with the
 * bits of that file.
 */

static inline float half_at(const char *from) {
    uint16_t half;
    memcpy(&half, from, 2);
    const uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
    float size;
    memcpy(&size, &bits, 4);
    size *= 5.192296858534828e33f; /* 2^112: an exponent begins elsewhere */
    return half & 0x8000 ? -size : size;
}

/* Of a block of 32 elements: its bytes, and where the fifth bits and the codes begin. A scale comes first, then perhaps a
 * minimum. */
typedef struct {
    int size, fifth, codes, has_minimum, bits; /* bits of a packed code */
} SmallBlock;

static inline __attribute__((always_inline)) SmallBlock small_block(const int64_t KIND) {
    switch (KIND) {
        case Q4_0_BLOCKS: return (SmallBlock){18, 0, 2, 0, 4};
        case Q4_1_BLOCKS: return (SmallBlock){20, 0, 4, 1, 4};
        case Q5_0_BLOCKS: return (SmallBlock){22, 2, 6, 0, 8};
        case Q5_1_BLOCKS: return (SmallBlock){24, 4, 8, 1, 8};
        case IQ4_NL_BLOCKS: return (SmallBlock){18, 0, 2, 0, 4};
        case MXFP4_BLOCKS: return (SmallBlock){17, 0, 1, 0, 4};
        default: return (SmallBlock){34, 0, 2, 0, 8};
    }
}

/* A scale of MXFP4, a power of two: a byte, of numbers that are twice what codes stand for. */
static inline float power_at(const char *from) {
    const uint32_t power = (uint8_t)*from, bits = power < 2 ? 0x00200000u << power : (power - 1) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return scale;
}

/* Four codes from element 4 i on, one a byte, as they are packed: from 0 on in 4 bits, from -128 on in 8. */
static inline __attribute__((always_inline)) uint32_t packed_codes_at(const int KIND, const char *block, int i) {
    const SmallBlock at = small_block(KIND);
    if (KIND == Q8_0_BLOCKS) return word_at(block + at.codes, i) ^ 0x80808080u;
    uint32_t codes = word_at(block + at.codes, i % 4) >> (i < 4 ? 0 : 4) & 0x0f0f0f0fu;
    if (!at.fifth) return codes;
    const uint32_t bits = word_at(block + at.fifth, 0) >> 4 * i; /* of element 4 i + b in bit b */
    codes |= (bits & 1) << 4 | (bits & 2) << 11 | (bits & 4) << 18 | (bits & 8) << 25;
    return codes + (KIND == Q5_0_BLOCKS ? 0x70707070u : 0x80808080u);
}

static inline __attribute__((always_inline)) void pack_tiles(const int KIND, const char *blocks, int64_t outputs, int64_t count,
                                                             int64_t first, int64_t end, char *tiles, int64_t stride) {
    const SmallBlock at = small_block(KIND);
    const long apart = at.has_minimum || KIND == MXFP4_BLOCKS ? 64 : 32, units = at.bits, codes = whole_lines(count * apart);
    for (long t = first; t < end; t++) {
        char *tile = tiles + t * stride;
        memset(tile + count * apart, 0, codes - count * apart);
        if (16 * t + 16 > outputs) memset(tile, 0, codes + count * units * LINE);
        for (long b = 0; b < count; b++)
            for (long o = 0; o < 16 && 16 * t + o < outputs; o++) {
                const char *block = blocks + ((16 * t + o) * count + b) * at.size;
                const float power = power_at(block);
                if (KIND == MXFP4_BLOCKS) memcpy(tile + b * apart + 4 * o, &power, 4);
                else memcpy(tile + b * apart + 2 * o, block, 2);
                if (at.has_minimum) memcpy(tile + b * apart + 32 + 2 * o, block + 2, 2);
                char *to = tile + codes + b * units * LINE + 4 * o;
                UNROLL for (int u = 0; u < units; u++) {
                    const uint32_t word = at.bits == 8 ? packed_codes_at(KIND, block, u)
                                                       : packed_codes_at(KIND, block, 2 * u) | packed_codes_at(KIND, block, 2 * u + 1) << 4;
                    memcpy(to + u * LINE, &word, 4);
                }
            }
    }
}

/* Tiles first .. end - 1 of quantised.h from blocks of 32 elements, [output][count]; outputs that do not exist become zeros.
 * stride: bytes from a tile to the next. */
int64_t foretoken_pack_blocks(int64_t kind, const char *blocks, int64_t outputs, int64_t count, int64_t first, int64_t end,
                              char *tiles, int64_t stride) {
    switch (kind) {
        case Q4_0_BLOCKS: pack_tiles(Q4_0_BLOCKS, blocks, outputs, count, first, end, tiles, stride); break;
        case Q4_1_BLOCKS: pack_tiles(Q4_1_BLOCKS, blocks, outputs, count, first, end, tiles, stride); break;
        case Q5_0_BLOCKS: pack_tiles(Q5_0_BLOCKS, blocks, outputs, count, first, end, tiles, stride); break;
        case Q5_1_BLOCKS: pack_tiles(Q5_1_BLOCKS, blocks, outputs, count, first, end, tiles, stride); break;
        case IQ4_NL_BLOCKS: pack_tiles(IQ4_NL_BLOCKS, blocks, outputs, count, first, end, tiles, stride); break;
        case MXFP4_BLOCKS: pack_tiles(MXFP4_BLOCKS, blocks, outputs, count, first, end, tiles, stride); break;
        default: pack_tiles(Q8_0_BLOCKS, blocks, outputs, count, first, end, tiles, stride);
    }
    return 0;
}

/* Elements of a block, and its bytes. */
static inline long block_elements(int64_t kind) { return kind >= Q2_K_BLOCKS ? SUPERBLOCK : 32; }
static inline long block_bytes(int64_t kind) {
    return kind >= Q2_K_BLOCKS ? block_of_file(kind - Q2_K_BLOCKS + Q2_K).size : small_block(kind).size;
}

static inline __attribute__((always_inline)) void decode_small(const int KIND, const char *block, float *to) {
    const SmallBlock at = small_block(KIND);
    const float scale = KIND == MXFP4_BLOCKS ? power_at(block) : half_at(block), minimum = at.has_minimum ? half_at(block + 2) : 0;
    for (int i = 0; i < 8; i++) {
        const uint32_t codes = packed_codes_at(KIND, block, i);
        for (int b = 0; b < 4; b++) {
            int code = (int)(codes >> 8 * b & 255) - (KIND == Q4_0_BLOCKS ? 8 : at.bits == 8 ? 128 : 0);
            if (KIND == IQ4_NL_BLOCKS) code = TABLES[IQ4][code];
            if (KIND == MXFP4_BLOCKS) code = TABLES[FP4][code];
            const float x = scale * (float)code;
            to[4 * i + b] = at.has_minimum ? x + minimum : x;
        }
    }
}

/* A superblock by way of a tile of its own. */
static inline __attribute__((always_inline)) void decode_superblock(const int KIND, const char *block, float *to) {
    char tile[64 * LINE] __attribute__((aligned(64)));
    Factors whole_numbers;
    pack_superblock(KIND, block, 0, tile);
    factors_of(KIND, tile + LINE, &whole_numbers);
    const float d = half_at(tile), dmin = HAS_MINIMUMS(KIND) ? half_at(tile + 32) : 0;
    const int offset = KIND == Q3_K ? 4 : KIND == Q6_K ? 32 : 0;
    const char *group = tile + (1 + LINES_OF_SCALES(KIND)) * LINE;
    for (int g = 0; g < GROUPS_OF_SUPERBLOCK; g++, group += LINES_OF_GROUP(KIND) * LINE)
        for (int q = 0; q < 8; q++) {
            uint32_t codes = 0;
            if (HAS_FOUR(KIND)) codes = word_at(group + q / 2 * LINE, 0) >> 4 * (q % 2) & 0x0f0f0f0fu;
            if (HAS_TWO(KIND))
                codes |= (word_at(group + (LINE_OF_TWO(KIND) + q / 4) * LINE, 0) >> 2 * (q % 4) & 0x03030303u) << (HAS_FOUR(KIND) ? 4 : 0);
            if (HAS_ONE(KIND)) codes |= (word_at(group + LINE_OF_ONE(KIND) * LINE, 0) >> q & 0x01010101u) << (HAS_FOUR(KIND) ? 4 : 2);
            const int which = IS_HALVED(KIND) ? 2 * g + q / 4 : g;
            const uint8_t whole = whole_numbers.scales[which][0];
            const float scale = d * (HAS_MINIMUMS(KIND) ? (float)whole : (float)(int8_t)whole);
            for (int b = 0; b < 4; b++) {
                const int code = (int)(codes >> 8 * b & 255);
                const float x = scale * (float)(KIND == IQ4_XS ? TABLES[IQ4][code] : code - offset);
                to[32 * g + 4 * q + b] = HAS_MINIMUMS(KIND) ? x + -(dmin * (float)whole_numbers.minimums[which][0]) : x;
            }
        }
}

/* A row of so many elements, from its blocks. */
static void decode_row(int64_t kind, const char *blocks, long elements, float *to) {
    const long size = block_bytes(kind), each = block_elements(kind);
    for (long done = 0; done < elements; done += each, blocks += size, to += each) switch (kind) {
            case Q4_0_BLOCKS: decode_small(Q4_0_BLOCKS, blocks, to); break;
            case Q4_1_BLOCKS: decode_small(Q4_1_BLOCKS, blocks, to); break;
            case Q5_0_BLOCKS: decode_small(Q5_0_BLOCKS, blocks, to); break;
            case Q5_1_BLOCKS: decode_small(Q5_1_BLOCKS, blocks, to); break;
            case IQ4_NL_BLOCKS: decode_small(IQ4_NL_BLOCKS, blocks, to); break;
            case MXFP4_BLOCKS: decode_small(MXFP4_BLOCKS, blocks, to); break;
            case Q8_0_BLOCKS: decode_small(Q8_0_BLOCKS, blocks, to); break;
            case Q2_K_BLOCKS: decode_superblock(Q2_K, blocks, to); break;
            case Q3_K_BLOCKS: decode_superblock(Q3_K, blocks, to); break;
            case Q4_K_BLOCKS: decode_superblock(Q4_K, blocks, to); break;
            case Q5_K_BLOCKS: decode_superblock(Q5_K, blocks, to); break;
            case IQ4_XS_BLOCKS: decode_superblock(IQ4_XS, blocks, to); break;
            default: decode_superblock(Q6_K, blocks, to);
        }
}

/* Rows of blocks as floats, [rows][elements]; row_bytes: from a row's blocks to the next. */
int64_t foretoken_decode_blocks(int64_t kind, const char *blocks, int64_t rows, int64_t row_bytes, int64_t elements, float *to) {
    for (long r = 0; r < rows; r++) decode_row(kind, blocks + r * row_bytes, elements, to + r * elements);
    return 0;
}
