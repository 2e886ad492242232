/* Keys and values in codes of 8 bits.
 *
 *     row     a float, the scale, then a code for each element of the head, 128 more than it is
 *     tile    of keys: those of 16 rows side by side, [unit of 4 bytes][16]; so quantised.h has a weight of 16 outputs,
 *             each of them one group
 *     query   coded twice: the query, then the rounding error of its code: 15 bits
 *
 * Scores are products of quantised.h, exact sums of integers times scales. Codes of values are elements, none of which is
 * rounded: their scale goes to the weight that they are met by. A scale and its codes are a row's own, so that a row is
 * the same whenever it is written, and it is moved as one.
 */

/* One head's key or value of a row. x: floats, a multiple of 16 of them. */
static void code_line(const float *x, long n, char *row) {
    typedef uint8_t own_codes __attribute__((vector_size(LANES), aligned(1), may_alias));
    const float most = largest_magnitude(x, n);
    float inverse;
    *(float *)row = step_of(most, &inverse);
    for (long i = 0; i < n; i += LANES)
        *(own_codes *)(row + 4 + i) = __builtin_convertvector(codes_of(x + i, inverse, most != most) + 128, own_codes);
}

/* LANES codes of a row's, as floats. Compilers turn the plain loop into loads of single bytes. */
static inline __attribute__((always_inline)) part leave_codes(const char *codes) {
#if PARTS == 1
    const part_of_signs whole = (part_of_signs)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes));
#elif PARTS == 2 && defined(__AVX2__)
    const part_of_signs whole = (part_of_signs)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)codes));
#else
    typedef uint8_t own_codes __attribute__((vector_size(LANES), aligned(1), may_alias));
    const part_of_signs whole = __builtin_convertvector(*(const own_codes *)codes, part_of_signs);
#endif
    return __builtin_convertvector(whole - 128, part);
}

/* Keys of some tiles, as a weight. */
static inline Matrix coded_keys(const char *tiles, long head_dim) {
    return (Matrix){.tiles = tiles, .stride = (head_dim + 4) * 16, .bits = 8, .group = head_dim, .offset = 128};
}

/* Code a query twice: the second codes are those of the first ones' rounding error. Overwrites x. */
static void code_query(const Matrix *keys, float *x, long n, char *first, char *second) {
    code_row(keys, x, n, first);
    const Places at = places_of(keys, n);
    for (long i = 0; i < n; i++) {
        const char *cell = first + i / at.size * at.apart;
        x[i] -= ((const Cell *)(cell + at.size))->step * (float)((const int8_t *)cell)[i % at.size];
    }
    code_row(keys, x, n, second);
}
