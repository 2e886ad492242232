/* Arithmetic over vectors of 16 floats that does not depend on the element type of the model. */

/* a * b + c. Which products are rounded before the addition is written here and nowhere left to the compiler, which is
 * told to contract nothing: bits are equal only where operations are. */
static inline __attribute__((always_inline)) part fused_part(part a, part b, part c) {
#if defined(__AVX512F__)
    return (part)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && defined(__AVX__)
    return (part)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (part)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

static inline __attribute__((always_inline)) part all_of_part(float x) {
#if PARTS == 1
    return (part){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
#elif PARTS == 2
    return (part){x, x, x, x, x, x, x, x};
#else
    return (part){x, x, x, x};
#endif
}

/* Units without their lower halves. Where registers are few, none is free to keep the mask in. */
static inline __attribute__((always_inline)) part_of_units upper_halves(part_of_units x) {
#if REGISTERS > 16
    return x & 0xffff0000u;
#else
    enum { UPPER = -65536 };
    static const _Alignas(32) int32_t in_memory[8] = {UPPER, UPPER, UPPER, UPPER, UPPER, UPPER, UPPER, UPPER};
    const void *mask = in_memory;
    __asm__("" : "+r"(mask)); /* from here on the compiler does not know what it is */
    return x & *(const part_of_units *)mask;
#endif
}

static inline float horizontal_sum(vf x) {
    float sum = 0;
    for (int i = 0; i < 16; i++) sum += x[i];
    return sum;
}

/* a . b over n elements, a multiple of 16 */
static inline float dot(const float *a, const float *b, long n) {
    part sums[PARTS] = {{0}};
    for (long i = 0; i < n; i += 16)
        UNROLL for (int p = 0; p < PARTS; p++)
            sums[p] = fused_part(*(const part_unaligned *)(a + i + p * LANES), *(const part_unaligned *)(b + i + p * LANES), sums[p]);
    float sum = 0;
    UNROLL for (int i = 0; i < 16; i++) sum += sums[i / LANES][i % LANES];
    return sum;
}

/* What n elements, a multiple of 16, are normed by: y = (x - mean) * scale; not centred: the mean counts as 0. */
typedef struct { float mean, scale; } Norming;

static inline Norming norming_of(const float *x, long n, float eps, int centred) {
    if (!centred) return (Norming){0, 1.0f / sqrtf(dot(x, x, n) / (float)n + eps)};
    part sums[PARTS] = {{0}}, squares[PARTS] = {{0}};
    for (long i = 0; i < n; i += 16)
        UNROLL for (int p = 0; p < PARTS; p++) sums[p] += *(const part_unaligned *)(x + i + p * LANES);
    float sum = 0, square = 0;
    UNROLL for (int i = 0; i < 16; i++) sum += sums[i / LANES][i % LANES];
    const float mean = sum / (float)n;
    for (long i = 0; i < n; i += 16)
        UNROLL for (int p = 0; p < PARTS; p++) {
            const part y = *(const part_unaligned *)(x + i + p * LANES) - mean;
            squares[p] = fused_part(y, y, squares[p]);
        }
    UNROLL for (int i = 0; i < 16; i++) square += squares[i / LANES][i % LANES];
    return (Norming){mean, 1.0f / sqrtf(square / (float)n + eps)};
}

/* The larger of each two; b where one of them is NaN. */
static inline __attribute__((always_inline)) part part_max(part a, part b) {
#if defined(__AVX512F__)
    return (part)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (part)_mm256_max_ps((__m256)a, (__m256)b);
#else
    const part_of_signs greater = a > b;
    return (part)(((part_of_signs)a & greater) | ((part_of_signs)b & ~greater));
#endif
}

static inline __attribute__((always_inline)) vf vector_max(vf a, vf b) {
    union { vf whole; part of[PARTS]; } x = {a}, y = {b};
    UNROLL for (int i = 0; i < PARTS; i++) x.of[i] = part_max(x.of[i], y.of[i]);
    return x.whole;
}

static inline float highest_of(vf x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float highest = -INFINITY;
    for (int i = 0; i < 16; i++) highest = x[i] > highest ? x[i] : highest;
    return highest;
#endif
}

/* exp(x), about 1 ulp; 0 below -87, saturates above 88; NaN stays NaN */
static inline __attribute__((always_inline)) part part_exponential(part x) {
    const part_of_signs too_small = x < -87.0f, is_nan = x != x;
    const part y = (part)((part_of_signs)x & ~(too_small | is_nan));
    const part_of_signs too_large = y > 88.0f;
    const part z = (part)(((part_of_signs)y & ~too_large) | (too_large & (part_of_signs)all_of_part(88.0f)));
    const part shifted = fused_part(z, all_of_part(1.44269504088896341f), all_of_part(12582912.0f));
    const part n = shifted - 12582912.0f; /* round to nearest */
    const part r = fused_part(n, all_of_part(2.12194440e-4f), fused_part(n, all_of_part(-0.693359375f), z));
    part p = fused_part(all_of_part(1.9875691500e-4f), r, all_of_part(1.3981999507e-3f));
    p = fused_part(p, r, all_of_part(8.3334519073e-3f));
    p = fused_part(p, r, all_of_part(4.1665795894e-2f));
    p = fused_part(p, r, all_of_part(1.6666665459e-1f));
    p = fused_part(p, r, all_of_part(5.0000001201e-1f));
    p = fused_part(p * r, r, r) + 1.0f;
    const part_of_signs exponent = (__builtin_convertvector(n, part_of_signs) + 127) << 23;
    const part e = (part)((part_of_signs)(p * (part)exponent) & ~too_small);
    return (part)(((part_of_signs)e & ~is_nan) | ((part_of_signs)x & is_nan));
}

static inline __attribute__((always_inline)) vf exponential(vf x) {
    union { vf whole; part of[PARTS]; } y = {x};
    UNROLL for (int i = 0; i < PARTS; i++) y.of[i] = part_exponential(y.of[i]);
    return y.whole;
}

/* 2^x of what is not above 0, about 1 ulp; 0 below -126, NaN stays NaN. Half the multiplications of exponential. */
static inline __attribute__((always_inline)) part part_power_below(part x) {
#if defined(__AVX512F__)
    const __mmask16 kept = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ); /* NaN is */
    const part n = (part)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const part_of_signs too_small = x < -126.0f;
    x = (part)((part_of_signs)x & ~too_small);
    const part n = (x + 12582912.0f) - 12582912.0f; /* round to nearest */
#endif
    const part r = x - n;
    part p = fused_part(all_of_part(1.3264726e-3f), r, all_of_part(9.671513e-3f)); /* least error on -1/2..1/2, exact at 0 */
    p = fused_part(p, r, all_of_part(5.5507336e-2f));
    p = fused_part(p, r, all_of_part(0.24022242f));
    p = fused_part(p, r, all_of_part(0.693147f));
    p = fused_part(p, r, all_of_part(1.0f));
#if defined(__AVX512F__)
    return (part)_mm512_maskz_scalef_ps(kept, (__m512)p, (__m512)n);
#else
    return (part)((part_of_signs)(p * (part)((__builtin_convertvector(n, part_of_signs) + 127) << 23)) & ~too_small);
#endif
}

static inline __attribute__((always_inline)) vf power_below(vf x) {
    union { vf whole; part of[PARTS]; } y = {x};
    UNROLL for (int i = 0; i < PARTS; i++) y.of[i] = part_power_below(y.of[i]);
    return y.whole;
}

/* erfc(x) of what is not below 0, to a part in 10^6: t exp(-x^2 + P(t)), t = 1 / (1 + x / 2) (Numerical Recipes, 6.2.2) */
static inline __attribute__((always_inline)) part part_erfc(part x) {
    const part t = 1.0f / (1.0f + 0.5f * x);
    part p = fused_part(all_of_part(0.17087277f), t, all_of_part(-0.82215223f));
    p = fused_part(p, t, all_of_part(1.48851587f));
    p = fused_part(p, t, all_of_part(-1.13520398f));
    p = fused_part(p, t, all_of_part(0.27886807f));
    p = fused_part(p, t, all_of_part(-0.18628806f));
    p = fused_part(p, t, all_of_part(0.09678418f));
    p = fused_part(p, t, all_of_part(0.37409196f));
    p = fused_part(p, t, all_of_part(1.00002368f));
    p = fused_part(p, t, all_of_part(-1.26551223f));
    return t * part_exponential(fused_part(-x, x, p));
}

/* What an activation makes of a gate; NaN stays NaN. */
static inline __attribute__((always_inline)) part part_activated(int kind, part x) {
    if (kind == RELU) return part_max((part){0}, x);
    if (kind == GELU) { /* x (1 + erf(x / sqrt(2))) / 2 */
        const part half = 0.5f * part_erfc(part_max(x, -x) * 0.70710678118654752f);
        const part_of_signs below = x < 0.0f;
        return x * (part)(((part_of_signs)half & below) | ((part_of_signs)(1.0f - half) & ~below));
    }
    if (kind == GELU_TANH) /* x (1 + tanh(y)) / 2 = x / (1 + exp(-2 y)), y = sqrt(2 / pi) (x + 0.044715 x^3) */
        return x / (1.0f + part_exponential(-1.5957691216057308f * (x + 0.044715f * (x * x * x))));
    if (kind == RELU_SQUARED) {
        const part y = part_max((part){0}, x);
        return y * y;
    }
    if (kind == CLAMPED_SWIGLU) { /* GPT-OSS's */
        x = -part_max(all_of_part(-7.0f), -x);
        return x / (1.0f + part_exponential(-1.702f * x));
    }
    return x / (1.0f + part_exponential(-x));
}

static inline __attribute__((always_inline)) vf activated(int kind, vf x) {
    union { vf whole; part of[PARTS]; } y = {x};
    UNROLL for (int i = 0; i < PARTS; i++) y.of[i] = part_activated(kind, y.of[i]);
    return y.whole;
}

/* line[begin..end) -> cap tanh(factor x / cap), or factor x without a cap; up to whole vectors around it */
static void cap_line(float *line, long begin, long end, float factor, float cap) {
    const float inner = cap ? 2.0f * factor / cap : factor;
    for (long c = begin / 16 * 16; c < end; c += 16) {
        const vf x = *(const vf_unaligned *)(line + c) * inner;
        *(vf_unaligned *)(line + c) = cap ? cap * (1.0f - 2.0f / (1.0f + exponential(x))) : x;
    }
}

/* line[begin..length) -> exp(scaling * (score - max)) with zeros left of `low` and up to the padded end; returns 1 / sum */
static float softmax(float *line, long begin, long low, long length, long padded, float scaling) {
    for (long c = begin; c < low; c++) line[c] = -INFINITY;
    for (long c = length; c < padded; c++) line[c] = -INFINITY;
    const long end = (length + 15) / 16 * 16;
    vf top = (vf){0} - INFINITY;
    for (long c = begin; c < end; c += 16) top = vector_max(*(const vf_unaligned *)(line + c), top);
    float highest = -INFINITY;
    for (int i = 0; i < 16; i++) highest = top[i] > highest ? top[i] : highest;
    vf sum = {0};
    for (long c = begin; c < end; c += 16) {
        const vf weight = exponential((*(const vf_unaligned *)(line + c) - highest) * scaling);
        *(vf_unaligned *)(line + c) = weight;
        sum += weight;
    }
    for (long c = end; c < padded; c++) line[c] = 0;
    return 1.0f / horizontal_sum(sum);
}

/* rows of `units` units, `count` <= 16 of them, to [unit][16]; missing rows become zero */
static void transpose16(const uint32_t *from, long units, long count, uint32_t *to) {
    long u = 0;
#ifdef __AVX512F__
    if (count == 16)
        for (; u + 16 <= units; u += 16) {
            __m512i a[16], b[16];
            for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(from + i * units + u);
            for (int i = 0; i < 16; i += 2) {
                b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
                b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
            }
            for (int i = 0; i < 16; i += 4) {
                a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
                a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
                a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
                a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
            }
            for (int i = 0; i < 4; i++) { /* a[4 * q + i] holds, per 128-bit lane L, unit 4 L + i of rows 4 q .. 4 q + 3 */
                const __m512i low01 = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x44);
                const __m512i high01 = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xee);
                const __m512i low23 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x44);
                const __m512i high23 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xee);
                _mm512_storeu_si512(to + (u + i) * 16, _mm512_shuffle_i32x4(low01, low23, 0x88));
                _mm512_storeu_si512(to + (u + 4 + i) * 16, _mm512_shuffle_i32x4(low01, low23, 0xdd));
                _mm512_storeu_si512(to + (u + 8 + i) * 16, _mm512_shuffle_i32x4(high01, high23, 0x88));
                _mm512_storeu_si512(to + (u + 12 + i) * 16, _mm512_shuffle_i32x4(high01, high23, 0xdd));
            }
        }
#endif
    for (; u < units; u++)
        for (long i = 0; i < 16; i++) to[u * 16 + i] = i < count ? from[i * units + u] : 0;
}

/* Highest logit and its index, the first if there are several; the peak is NaN if any logit is. */
static void best_of(const float *logits, long count, int32_t *best, float *peak) {
    vf top = (vf){0} - INFINITY;
    vi bad = {0};
    long i = 0;
    for (; i + 16 <= count; i += 16) {
        const vf x = *(const vf_unaligned *)(logits + i);
        bad |= x != x;
        top = vector_max(x, top);
    }
    float highest = -INFINITY;
    int any_bad = 0;
    for (int k = 0; k < 16; k++) {
        highest = top[k] > highest ? top[k] : highest;
        any_bad |= bad[k] != 0;
    }
    for (; i < count; i++) {
        highest = logits[i] > highest ? logits[i] : highest;
        any_bad |= logits[i] != logits[i];
    }
    long at = 0;
    while (at + 1 < count && logits[at] != highest) at++;
    *best = (int32_t)at;
    *peak = any_bad ? NAN : highest;
}

/* The `top` most probable tokens, highest first, and their probabilities at temperature 1 (NaN if any logit is). */
static void top_of(const float *logits, long count, long top, float peak, int32_t *ids, float *shares) {
    vf sum = {0};
    long i = 0;
    for (; i + 16 <= count; i += 16) sum += exponential(*(const vf_unaligned *)(logits + i) - peak);
    float total = horizontal_sum(sum);
    for (; i < count; i++) total += expf(logits[i] - peak);
    long held = 0;
    float lowest = -INFINITY; /* of those held, once there are enough */
    for (i = 0; i < count; i++) {
        if (held == top && i % 16 == 0) { /* skip what cannot be among them, 16 at a time */
            while (i + 16 <= count) {
                const vi higher = *(const vf_unaligned *)(logits + i) > lowest;
                int any = 0;
                for (int k = 0; k < 16; k++) any |= higher[k];
                if (any) break;
                i += 16;
            }
            if (i >= count) break;
        }
        if (held == top && !(logits[i] > lowest)) continue;
        long at = held < top ? held++ : top - 1;
        for (; at > 0 && logits[i] > shares[at - 1]; at--) shares[at] = shares[at - 1], ids[at] = ids[at - 1];
        shares[at] = logits[i];
        ids[at] = (int32_t)i;
        if (held == top) lowest = shares[top - 1];
    }
    for (i = 0; i < held; i++) shares[i] = expf(shares[i] - peak) / total;
}

