/* Arithmetic over vectors of 16 floats that does not depend on the element type of the model. */

static inline float horizontal_sum(vf x) {
    float sum = 0;
    for (int i = 0; i < 16; i++) sum += x[i];
    return sum;
}

static inline __attribute__((always_inline)) vf vector_max(vf a, vf b) {
    const vi greater = a > b;
    return (vf)(((vi)a & greater) | ((vi)b & ~greater));
}

/* exp(x), about 1 ulp; 0 below -87, saturates above 88; NaN stays NaN */
static inline __attribute__((always_inline)) vf exponential(vf x) {
    const vi too_small = x < -87.0f, is_nan = x != x;
    const vf y = (vf)((vi)x & ~(too_small | is_nan));
    const vi too_large = y > 88.0f;
    const vf z = (vf)(((vi)y & ~too_large) | (too_large & (vi)((vf){0} + 88.0f)));
    const vf n = (z * 1.44269504088896341f + 12582912.0f) - 12582912.0f; /* round to nearest */
    const vf r = (z - n * 0.693359375f) + n * 2.12194440e-4f;
    vf p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const vi exponent = (__builtin_convertvector(n, vi) + 127) << 23;
    const vf e = (vf)((vi)(p * (vf)exponent) & ~too_small);
    return (vf)(((vi)e & ~is_nan) | ((vi)x & is_nan));
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

