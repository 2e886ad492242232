/* Rows in codes of 8 bits, as products with quantised weights take them; quantised.h says what steps and cells are. */

#define LINE 64
#define STEP 32 /* inputs of a row that share a step; the last ones of a row may be fewer */

static inline long whole_lines(long bytes) { return (bytes + LINE - 1) / LINE * LINE; }

/* What a coded row says of a cell. */
typedef struct {
    int32_t correction; /* what its sum of products begins with */
    float sum;          /* of its codes; of a group that is larger, in its last cell: of all its cells, each times its step */
    float step;         /* what a code of 1 stands for */
    float unused;
} Cell;

/* Where the parts of a coded row and of a tile are, in bytes, and how many there are. */
typedef struct {
    long groups, cells;               /* of a row */
    long inner;                       /* cells of a step, or of a group that is larger; of the last perhaps fewer */
    long size, units, all_units;      /* of a cell, but for the last: inputs, units; units of a row */
    long apart;                       /* in a row: from a cell to the next */
    long parameters, minimums, codes; /* of a tile: bytes of a group's; of these, where the minimums begin; all groups' */
} Places;

static inline Places places_of(const Matrix *w, long inputs) {
    Places y;
    const int larger = w->group > STEP;
    y.groups = inputs / w->group;
    y.size = w->group < STEP ? w->group : STEP;
    y.cells = (inputs + y.size - 1) / y.size;
    y.inner = larger ? (w->group + STEP - 1) / STEP : STEP / w->group;
    y.units = y.size * w->bits / 32;
    y.all_units = inputs * w->bits / 32;
    y.apart = y.size + (long)sizeof(Cell);
    y.minimums = w->half ? 32 : 64;
    y.parameters = w->minimum ? 2 * y.minimums : y.minimums;
    y.codes = whole_lines(y.groups * y.parameters);
    return y;
}

/* Space that coding a row for a matrix and its rest needs for the work, in floats of the row. */
static inline long lines_of(const Matrix *w) {
    for (; w; w = w->rest)
        if (w->order) return 2;
    return 1;
}

/* Bytes of a coded row; none where the matrix is not quantised. */
static inline long coded_bytes(const Matrix *w, long inputs) {
    if (!w->bits) return 0;
    const Places at = places_of(w, inputs);
    return whole_lines(at.cells * at.apart);
}

/* The same for a matrix and its rest together. */
static inline long all_coded_bytes(const Matrix *w, long inputs) {
    long bytes = 0;
    for (; w; w = w->rest) bytes += coded_bytes(w, inputs);
    return bytes;
}

static inline __attribute__((always_inline)) int32_t largest_of_signs(part_of_signs x) {
#if PARTS == 1
    return _mm512_reduce_max_epi32((__m512i)x);
#elif PARTS == 4 && defined(__aarch64__)
    return vmaxvq_s32((int32x4_t)x);
#else
    int32_t most = x[0];
    UNROLL for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
    return most;
#endif
}

static inline __attribute__((always_inline)) int32_t sum_of_signs(part_of_signs x) {
#if PARTS == 1
    return _mm512_reduce_add_epi32((__m512i)x);
#elif PARTS == 4 && defined(__aarch64__)
    return vaddvq_s32((int32x4_t)x);
#else
    int32_t sum = 0;
    UNROLL for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
#endif
}

/* Bits of magnitudes: integers in the same order, those of infinity and NaN the largest. */
static inline __attribute__((always_inline)) part_of_signs larger_magnitudes(part_of_signs largest, const float *x) {
    const part_of_signs y = *(const part_of_signs_unaligned *)x & 0x7fffffff;
#if PARTS == 1
    return (part_of_signs)_mm512_max_epi32((__m512i)y, (__m512i)largest);
#else
    const part_of_signs larger = y > largest;
    return (y & larger) | (largest & ~larger);
#endif
}

/* The largest magnitude of n floats, a multiple of 16 of them; NaN if one of them is not finite. */
static inline __attribute__((always_inline)) float largest_magnitude(const float *x, long n) {
    part_of_signs largest = {0};
    for (long i = 0; i < n; i += LANES) largest = larger_magnitudes(largest, x + i);
    const int32_t bits = largest_of_signs(largest);
    float most;
    memcpy(&most, &bits, 4);
    return bits < 0x7f800000 ? most : NAN;
}

/* What a code of 8 bits stands for where this is the largest magnitude; *inverse: of a number that is coded. */
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

/* Where the processor multiplies only signed codes with signed ones, those of 8 bits are taken as 128 less; what that takes
 * from a sum of products is 128 times the sum of the row's codes, which the sum begins with. */
#if PARTS == 4 && defined(__ARM_FEATURE_DOTPROD)
#define LESS 128
#else
#define LESS 0
#endif

/* Of LANES vectors the largest element of each, or the sum of its elements. */
static inline __attribute__((always_inline)) part_of_signs reduced(const int LARGEST, part_of_signs x[LANES]) {
#if PARTS == 1
    static const _Alignas(64) int32_t places[2][16] = {{0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30},
                                                       {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31}};
    const __m512i even = _mm512_load_si512(places[0]), odd = _mm512_load_si512(places[1]);
    UNROLL for (int count = LANES / 2; count; count /= 2) /* neighbours become one, of which each has a half */
        UNROLL for (int i = 0; i < count; i++) {
            const __m512i a = (__m512i)x[2 * i], b = (__m512i)x[2 * i + 1];
            const __m512i first = _mm512_permutex2var_epi32(a, even, b), second = _mm512_permutex2var_epi32(a, odd, b);
            x[i] = (part_of_signs)(LARGEST ? _mm512_max_epi32(first, second) : _mm512_add_epi32(first, second));
        }
    return x[0];
#else
    part_of_signs y;
    UNROLL for (int i = 0; i < LANES; i++) y[i] = LARGEST ? largest_of_signs(x[i]) : sum_of_signs(x[i]);
    return y;
#endif
}

/* As step_of, from the bits of LANES largest magnitudes. */
static inline __attribute__((always_inline)) part steps_of(part_of_signs bits, part *inverse) {
    const part_of_signs infinite = bits >= 0x7f800000, counts = (bits >= 0x0d800000 /* 2^-100 */) & ~infinite;
    const part most = (part)bits;
    *inverse = (part)((part_of_signs)(127.0f / most) & counts);
    return (part)(((part_of_signs)(most / 127.0f) & counts) | (infinite & 0x7fc00000));
}

/* Some steps of a row, at most LANES of them, in cells of SIZE inputs: largest magnitudes are found, divided and summed side
 * by side. `row` is where the first cell is; of_group: of a larger group, what its cells so far came to. */
static inline __attribute__((always_inline)) void code_steps(const int SIZE, const Places *at, int32_t offset, const float *x,
                                                             long count, long cell, float *of_group, char *row) {
    enum { VECTORS = STEP / LANES };
    const int CELLS = STEP / SIZE, OWN = SIZE / LANES; /* cells of a step, vectors of a cell */
    part_of_signs vectors[LANES];
    UNROLL for (int s = 0; s < LANES; s++) vectors[s] = (part_of_signs){0};
    for (long s = 0; s < count; s++)
        UNROLL for (int i = 0; i < VECTORS; i++) vectors[s] = larger_magnitudes(vectors[s], x + s * STEP + i * LANES);
    part inverse;
    const part step = steps_of(reduced(1, vectors), &inverse);
    float steps[LANES], inverses[LANES], sums[2][LANES];
    int32_t corrections[2][LANES];
    memcpy(steps, &step, sizeof step);
    memcpy(inverses, &inverse, sizeof inverse);
    __asm__("" : "+m"(steps), "+m"(inverses)); /* compilers would take them from registers, one by one */
    UNROLL for (int half = 0; half < CELLS; half++) { /* each step's first cells, then the second ones */
        for (long s = 0; s < count; s++) {
            const float *from = x + s * STEP + half * SIZE;
            char *to = row + (s * CELLS + half) * (SIZE + (long)sizeof(Cell));
            part_of_signs sum = {0};
            UNROLL for (int i = 0; i < OWN; i++) {
                /* where an input is not finite, the step is NaN and spoils any code */
                const part_of_signs code = codes_of(from + i * LANES, inverses[s], 0);
                sum += code;
                *(codes_unaligned *)(to + i * LANES) = __builtin_convertvector(code, codes_unaligned);
            }
            vectors[s] = sum;
        }
        const part_of_signs total = reduced(0, vectors);
        const part sum = __builtin_convertvector(total, part);
        const part_of_units correction = (part_of_units)total * (uint32_t)offset;
        memcpy(sums[half], &sum, sizeof sum);
        memcpy(corrections[half], &correction, sizeof correction);
    }
    __asm__("" : "+m"(sums), "+m"(corrections));
    for (long s = 0; s < count; s++)
        UNROLL for (int half = 0; half < CELLS; half++) {
            float *sum = &sums[half][s];
            if (SIZE == STEP && at->inner > 1) *sum = *of_group = ((cell + s) % at->inner ? *of_group : 0) + steps[s] * *sum;
            *(Cell *)(row + (s * CELLS + half) * (SIZE + (long)sizeof(Cell)) + SIZE) = (Cell){corrections[half][s], *sum, steps[s], 0};
        }
}

/* One row in codes of 8 bits. x: floats, a multiple of 16 of them. */
static void code_row(const Matrix *w, const float *x, long inputs, char *row) {
    const Places at = places_of(w, inputs);
    const int32_t offset = (w->bits == 8 || w->table ? LESS : 0) - (int32_t)w->offset;
    float of_group = 0, last[STEP] = {0};
    for (long i = 0; i < inputs;) {
        const long left = (inputs - i) / STEP, count = left > LANES ? LANES : left ? left : 1;
        const float *from = x + i;
        if (!left) from = memcpy(last, from, (inputs - i) * sizeof(float)); /* half a step, then zeros */
        if (at.size == STEP)
            code_steps(STEP, &at, offset, from, count, i / STEP, &of_group, row + i / STEP * at.apart);
        else
            code_steps(STEP / 2, &at, offset, from, count, 0, &of_group, row + i / STEP * 2 * at.apart);
        i += count * STEP;
    }
}
