/* Dense weights [output][inputs] in the order of products: as they are, or rounded to 8 or 4 bits with the bits of
 * forward/quantised_weight.py. Elements are float32 or bfloat16.
 */

/* Tiles first .. end - 1 of 32-bit units, [output][units] to [tile][unit][16]; outputs that do not exist become zeros.
 * stride: bytes from a tile to the next. */
int64_t foretoken_tile(const uint32_t *weight, int64_t outputs, int64_t units, int64_t first, int64_t end, char *tiles, int64_t stride) {
    for (long t = first; t < end; t++) {
        uint32_t *tile = (uint32_t *)(tiles + t * stride);
        const uint32_t *rows = weight + 16 * t * units;
        const long have = outputs - 16 * t < 16 ? outputs - 16 * t : 16;
        if (have < 16) memset(tile, 0, units * LINE);
        long u = 0;
        for (; have == 16 && u + 16 <= units; u += 16) /* 16 lines of each row at a time stay in the nearest cache */
            for (long i = 0; i < 16; i++) {
                uint32_t *to = tile + 16 * (u + i);
                UNROLL for (int o = 0; o < 16; o++) to[o] = rows[o * units + u + i];
            }
        for (; u < units; u++)
            for (long o = 0; o < have; o++) tile[16 * u + o] = rows[o * units + u];
    }
    return 0;
}

typedef uint16_t part_of_halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint8_t part_of_bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

/* LANES elements of a row from element i on. */
static inline __attribute__((always_inline)) part elements_at(const char *row, const int BF16_TOO, long i) {
    if (!BF16_TOO) return (part)*(const part_unaligned *)(row + 4 * i);
    return (part)(__builtin_convertvector(*(const part_of_halves *)(row + 2 * i), part_of_units) << 16);
}

static inline __attribute__((always_inline)) void ranges_of(const int BF16_TOO, const char *weight, int64_t groups, int64_t group,
                                                            int64_t first, int64_t end, float *low, float *high) {
    for (long g = first * groups; g < end * groups; g++) {
        const char *from = weight + g * group * (BF16_TOO ? 2 : 4);
        part least, most, odd = {0};
        for (long i = 0; i < group; i += LANES) {
            const part x = elements_at(from, BF16_TOO, i);
            odd += x * 0.0f;
            least = i ? -part_max(-least, -x) : x;
            most = i ? part_max(most, x) : x;
        }
        float smallest = least[0], largest = most[0], zero = odd[0];
        for (int l = 1; l < LANES; l++) {
            smallest = least[l] < smallest ? least[l] : smallest;
            largest = most[l] > largest ? most[l] : largest;
            zero += odd[l];
        }
        low[g] = smallest + zero; /* NaN where an element is not finite */
        high[g] = largest + zero;
    }
}

/* The smallest and the largest element of each group of outputs first .. end - 1, [output][groups]; NaN where one is not finite.
 * A group is a multiple of 16. */
int64_t foretoken_ranges(const char *weight, int64_t bf16, int64_t groups, int64_t group, int64_t first, int64_t end, float *low,
                         float *high) {
    if (bf16) ranges_of(1, weight, groups, group, first, end, low, high);
    else ranges_of(0, weight, groups, group, first, end, low, high);
    return 0;
}

static inline __attribute__((always_inline)) void round_tiles(const int BF16_TOO, const int BITS, const char *weight, int64_t outputs,
                                                              int64_t groups, int64_t group, const float *scales,
                                                              const float *minimums, const char *kept_scales,
                                                              const char *kept_minimums, int64_t half, int64_t first, int64_t end,
                                                              char *tiles, int64_t stride) {
    const long inputs = groups * group, size = half ? 2 : 4, apart = 16 * size * (BITS == 4 ? 2 : 1);
    const long codes = whole_lines(groups * apart), units = inputs * BITS / 32, step = 32 / BITS;
    const float least = BITS == 8 ? -127.0f : 0.0f, most = BITS == 8 ? 127.0f : 15.0f;
    for (long t = first; t < end; t++) {
        char *tile = tiles + t * stride;
        memset(tile + groups * apart, 0, codes - groups * apart);
        if (16 * t + 16 > outputs) memset(tile, 0, codes + units * LINE);
        for (long o = 0; o < 16 && 16 * t + o < outputs; o++) {
            const long row = 16 * t + o;
            const char *from = weight + row * inputs * (BF16_TOO ? 2 : 4);
            for (long g = 0; g < groups; g++) {
                const long at = row * groups + g;
                memcpy(tile + g * apart + o * size, kept_scales + at * size, size);
                if (BITS == 4) memcpy(tile + g * apart + (16 + o) * size, kept_minimums + at * size, size);
                const float divisor = scales[at] == 0 ? 1.0f : scales[at], minimum = BITS == 4 ? minimums[at] : 0.0f;
                uint32_t *to = (uint32_t *)(tile + codes + g * group / step * LINE) + o;
                for (long i = 0; i < group; i += 16) {
                    uint8_t found[16];
                    UNROLL for (int l = 0; l < 16; l += LANES) {
                        part x = elements_at(from, BF16_TOO, g * group + i + l);
                        if (BITS == 4) x -= minimum;
                        x = -part_max(-part_max(x / divisor, (part){0} + least), (part){0} - most);
                        x += 12582912.0f; /* 1.5 * 2^23: the sum's last bits are the nearest whole number, ties to even */
                        const part_of_units code = (part_of_units)x - (BITS == 8 ? 0x4b400000u - 128 : 0x4b400000u);
                        *(part_of_bytes *)(found + l) = __builtin_convertvector(code, part_of_bytes);
                    }
                    for (int u = 0; u < 16 / step; u++) {
                        uint32_t word, upper = 0;
                        memcpy(&word, found + u * step, 4);
                        if (BITS == 4) memcpy(&upper, found + u * step + 4, 4);
                        to[(i / step + u) * 16] = word | upper << 4;
                    }
                }
            }
        }
    }
}

/* Tiles first .. end - 1 of quantised.h: every element to the nearest code. scales, minimums: [output][groups]; `kept_` as they
 * are packed, halves or floats; a minimum is there if there are 4 bits. */
int64_t foretoken_round_tiles(const char *weight, int64_t bf16, int64_t bits, int64_t outputs, int64_t groups, int64_t group,
                              const float *scales, const float *minimums, const char *kept_scales, const char *kept_minimums,
                              int64_t half, int64_t first, int64_t end, char *tiles, int64_t stride) {
#define ROUND(BF16_TOO, BITS)                                                                                                       \
    round_tiles(BF16_TOO, BITS, weight, outputs, groups, group, scales, minimums, kept_scales, kept_minimums, half, first, end,     \
                tiles, stride)
    if (bf16 && bits == 8) ROUND(1, 8);
    else if (bf16) ROUND(1, 4);
    else if (bits == 8) ROUND(0, 8);
    else ROUND(0, 4);
#undef ROUND
    return 0;
}
