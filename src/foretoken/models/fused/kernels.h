/* The arithmetic of one decoder, written over 32-bit units so that one text serves two element types.
 *
 * Included twice by decoder.c. A unit is 32 bits: two bfloat16 (BF16 = 1) or one float32 (BF16 = 0). Weights, keys,
 * values and the inputs of every product are arrays of units; sums are float32.
 *
 * Every result of a row is computed by the same operations in the same order, however many rows, requests or threads
 * take part and whether the row belongs to a chain or a tree. Hence the text of a greedy request does not depend on
 * speculation or on its neighbours, bit for bit, in bfloat16 too. Two rules keep it so:
 *   - a product sums over its inner dimension in ascending order, one accumulator per (row, output);
 *   - attention sums over the positions a row sees in ascending order; a tree row's own path is compacted first.
 */

#if BF16
#define UNIT 2
#else
#define UNIT 1
#endif

/* acc += w * x over one unit: 16 outputs against one broadcast unit of the row */
static inline __attribute__((always_inline)) vf NAME(mac)(vf acc, vu w, uint32_t x) {
#if BF16
#ifdef __AVX512BF16__
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)_mm512_set1_epi32((int)x));
#else
    union { uint32_t u; float f; } low = {x << 16}, high = {x & 0xffff0000u};
    acc += (vf)(w << 16) * low.f;
    return acc + (vf)(w & 0xffff0000u) * high.f;
#endif
#else
    union { uint32_t u; float f; } value = {x};
    return acc + (vf)w * value.f;
#endif
}

/* 16 elements to float */
static inline __attribute__((always_inline)) vf NAME(widen)(const void *from) {
#if BF16
    typedef uint16_t vh __attribute__((vector_size(32), aligned(2)));
    return (vf)(__builtin_convertvector(*(const vh *)from, vu) << 16);
#else
    return *(const vf_unaligned *)from;
#endif
}

/* 16 floats to elements, rounded to nearest even; NaN stays NaN */
static inline __attribute__((always_inline)) void NAME(narrow)(void *to, vf x) {
#if BF16
    typedef uint16_t vh __attribute__((vector_size(32), aligned(2)));
    vu bits = (vu)x;
    vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    vu is_nan = (vu)(x != x);
    *(vh *)to = __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0u), vh);
#else
    *(vf_unaligned *)to = x;
#endif
}

/* MR rows times NT tiles of 16 outputs.
 * w: packed weight [tile][K units][16]; x: rows of `units` units, `x_stride` units apart; out: floats.
 * only: `units` of them to sum over, ascending; NULL: the first ones. */
static inline __attribute__((always_inline)) void NAME(block)(const int MR, const int NT, const uint32_t *w, long w_stride,
                                                              const uint32_t *x, long x_stride, const int32_t *only,
                                                              long units, float *out, long out_stride,
                                                              const float *bias, int add) {
    vf acc[12][4]; /* MR x NT of them are used, and live in registers: every loop over them is unrolled */
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int t = 0; t < NT; t++) acc[m][t] = (vf){0};
    for (long i = 0; i < units; i++) {
        const long k = only ? only[i] : i;
        vu wk[4];
        UNROLL for (int t = 0; t < NT; t++) wk[t] = *(const vu *)(w + t * w_stride + k * 16);
        UNROLL for (int m = 0; m < MR; m++) {
            const uint32_t xk = x[m * x_stride + k];
            UNROLL for (int t = 0; t < NT; t++) acc[m][t] = NAME(mac)(acc[m][t], wk[t], xk);
        }
    }
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int t = 0; t < NT; t++) {
            vf_unaligned *to = (vf_unaligned *)(out + m * out_stride + t * 16);
            vf y = acc[m][t];
            if (bias) y += *(const vf_unaligned *)(bias + t * 16);
            *to = add ? *to + y : y;
        }
}

#define BLOCK_CASE(MR)                                                                                                \
    case MR: {                                                                                                        \
        const int wide = MR <= 6 ? 4 : 2;                                                                             \
        for (; t + wide <= last; t += wide)                                                                           \
            NAME(block)(MR, wide, w + t * w_stride, w_stride, x + r * x_stride, x_stride, only, units,                \
                        out + r * out_stride + t * 16, out_stride, bias ? bias + t * 16 : 0, add);                    \
        for (; t < last; t++)                                                                                         \
            NAME(block)(MR, 1, w + t * w_stride, w_stride, x + r * x_stride, x_stride, only, units,                   \
                        out + r * out_stride + t * 16, out_stride, bias ? bias + t * 16 : 0, add);                    \
        break;                                                                                                        \
    }

/* out[r][o] (+)= x[r] . W[o] (+ bias[o]) for rows 0..rows-1 and tiles first..last-1, summed over some units or all.
 * A few tiles at a time over all rows, so that a weight is fetched from memory once and then found in cache. */
static inline __attribute__((always_inline)) void NAME(product_over)(const uint32_t *w, long w_stride, long first,
                                                                     long last_tile, const uint32_t *x, long x_stride,
                                                                     const int32_t *only, long units, long rows,
                                                                     float *out, long out_stride, const float *bias,
                                                                     int add) {
    const long group = rows <= 12 ? last_tile - first : 4;
    for (long begin = first; begin < last_tile; begin += group) {
        const long last = begin + group < last_tile ? begin + group : last_tile;
        for (long r = 0; r < rows; r += 12) {
            const long left = rows - r < 12 ? rows - r : 12;
            long t = begin;
            switch (left) {
                BLOCK_CASE(1) BLOCK_CASE(2) BLOCK_CASE(3) BLOCK_CASE(4) BLOCK_CASE(5) BLOCK_CASE(6)
                BLOCK_CASE(7) BLOCK_CASE(8) BLOCK_CASE(9) BLOCK_CASE(10) BLOCK_CASE(11) BLOCK_CASE(12)
            }
        }
    }
}
#undef BLOCK_CASE

static void NAME(product)(const uint32_t *w, long w_stride, long first, long last_tile, const uint32_t *x, long x_stride,
                          long units, long rows, float *out, long out_stride, const float *bias, int add) {
    NAME(product_over)(w, w_stride, first, last_tile, x, x_stride, 0, units, rows, out, out_stride, bias, add);
}

/* to = x / rms(x) * gain, as elements; n is a multiple of 16 */
static void NAME(rms_norm)(const float *x, const float *gain, long n, float eps, void *to) {
    vf sum = {0};
    for (long i = 0; i < n; i += 16) {
        vf v = *(const vf_unaligned *)(x + i);
        sum += v * v;
    }
    const float scale = 1.0f / sqrtf(horizontal_sum(sum) / (float)n + eps);
    for (long i = 0; i < n; i += 16)
        NAME(narrow)((char *)to + i * (4 / UNIT), *(const vf_unaligned *)(x + i) * scale * *(const vf_unaligned *)(gain + i));
}

/* One head's query or key: optional norm, rotary, to elements. */
static void NAME(rotate)(const Model *m, const float *x, const float *gain, const float *cos, const float *sin, void *to) {
    const long D = m->head_dim, half = m->rot_dim / 2;
    float y[MAX_HEAD_DIM];
    float scale = 1.0f;
    if (gain) {
        vf sum = {0};
        for (long i = 0; i < D; i += 16) {
            vf v = *(const vf_unaligned *)(x + i);
            sum += v * v;
        }
        scale = 1.0f / sqrtf(horizontal_sum(sum) / (float)D + m->eps);
    }
    for (long i = 0; i < D; i++) y[i] = gain ? x[i] * scale * gain[i] : x[i];
    float z[MAX_HEAD_DIM];
    for (long i = 0; i < half; i++) {
        z[i] = y[i] * cos[i] - y[i + half] * sin[i];
        z[i + half] = y[i + half] * cos[i] + y[i] * sin[i];
    }
    for (long i = 2 * half; i < D; i++) z[i] = y[i];
    for (long i = 0; i < D; i += 16) NAME(narrow)((char *)to + i * (4 / UNIT), *(const vf_unaligned *)(z + i));
}

/* The sum of one group's queries of a row. */
static void NAME(sum_queries)(const Model *m, const Layer *layer, const Call *call, long row, long g, float *sum) {
    const long D = m->head_dim, n = m->heads / m->kv_heads, position = call->positions[row];
    const float *cos = m->cos + position * (m->rot_dim / 2), *sin = m->sin + position * (m->rot_dim / 2);
    uint32_t q[MAX_HEAD_DIM / UNIT];
    memset(sum, 0, D * sizeof(float));
    for (long h = g * n; h < (g + 1) * n; h++) {
        NAME(rotate)(m, m->qkv_out + row * m->qkv_stride + h * D, layer->q_norm, cos, sin, q);
        for (long d = 0; d < D; d += 16) *(vf_unaligned *)(sum + d) += NAME(widen)((char *)q + d * (4 / UNIT));
    }
}

/* The columns of the cache that a group looks at, ascending; the blocks among them are chosen by the first row. */
static long NAME(look)(const Model *m, const Layer *layer, const Call *call, const Segment *s, long g, Scratch *scratch,
                       Run **runs) {
    const long end = s->prefix + s->tail + s->rows, window = layer->window;
    if (!s->keep || window) {
        *runs = (Run *)scratch_units(scratch, 5, sizeof(Run) / 4);
        /* With a window, columns left of everybody's view are never looked at. Behind the prefix a tree's columns are no
         * positions: all of them are looked at, and each row compacts its own path. */
        long left = 0;
        if (window) {
            left = call->positions[s->start];
            for (long r = 1; r < s->rows; r++)
                if (call->positions[s->start + r] < left) left = call->positions[s->start + r];
            left -= window - 1;
            if (s->seen && left > s->prefix) left = s->prefix;
        }
        **runs = (Run){left > 0 ? left / 16 * 16 : 0, end};
        return 1;
    }
    const Blocks *b = call->blocks;
    const long D = m->head_dim, G = m->kv_heads, num_blocks = s->prefix / b->size;
    int32_t *chosen = b->chosen + ((s - call->segments) * G + g) * (1 + b->most);
    const float *means = b->means[layer->index];
    if (means) {
        const long heads = b->across_heads ? G : 1, from = b->across_heads ? 0 : g; /* every item ranks all it needs */
        float *scores = (float *)scratch_units(scratch, 4, 2 * heads * num_blocks);
        for (long h = 0; h < heads; h++) {
            float q[MAX_HEAD_DIM];
            NAME(sum_queries)(m, layer, call, s->start, from + h, q);
            score_blocks(b, q, means + (s->slot * G + from + h) * b->capacity * D, D, num_blocks, scores + h * num_blocks);
        }
        choose_blocks(scores, scores + heads * num_blocks, heads * num_blocks, b->across_heads ? s->keep : s->keep / G,
                      g - from, num_blocks, chosen);
    }
    *runs = (Run *)scratch_units(scratch, 5, (chosen[0] + 1) * (sizeof(Run) / 4));
    return runs_of(chosen, b->size, num_blocks * b->size, end, *runs);
}

/* acc += weights[c] * value of column c, for the columns from .. to - 1 */
static inline __attribute__((always_inline)) vf NAME(weigh)(vf acc, const float *weights, long from, long to,
                                                            const char *values, long D) {
    for (long c = from; c < to; c++) acc += weights[c] * NAME(widen)(values + c * D * (4 / UNIT));
    return acc;
}

/* Write one group's new keys and values, and attend with its query heads over one segment.
 *
 * The runs of columns that the group looks at are laid end to end: from here on a column is its place in that line. What
 * is left out is prefix only, so behind the prefix nothing but the numbering changes. */
static void NAME(attend)(const Model *m, const Layer *layer, const Call *call, const Segment *s, long g, Scratch *scratch) {
    const long D = m->head_dim, n = m->heads / m->kv_heads, units = D / UNIT, R = s->rows;
    const long place = s->prefix + s->tail; /* of the first row in the cache */
    const long qkv_stride = m->qkv_stride;
    const long element = 4 / UNIT;
    char *keys = (char *)call->keys[layer->index] + ((long)s->slot * m->kv_heads + g) * call->capacity * D * element;
    char *values = (char *)call->values[layer->index] + ((long)s->slot * m->kv_heads + g) * call->capacity * D * element;

    uint32_t *q = scratch_units(scratch, 0, R * n * units);
    for (long r = 0; r < R; r++) {
        const float *row = m->qkv_out + (s->start + r) * qkv_stride;
        const long position = call->positions[s->start + r];
        const float *cos = m->cos + position * (m->rot_dim / 2), *sin = m->sin + position * (m->rot_dim / 2);
        NAME(rotate)(m, row + (m->heads + g) * D, layer->k_norm, cos, sin, keys + (place + r) * D * element);
        for (long i = 0; i < D; i += 16)
            NAME(narrow)(values + ((place + r) * D + i) * element,
                         *(const vf_unaligned *)(row + (m->heads + m->kv_heads + g) * D + i));
        for (long h = 0; h < n; h++)
            NAME(rotate)(m, row + (g * n + h) * D, layer->q_norm, cos, sin, q + (r * n + h) * units);
    }

    Run *runs;
    const long num_runs = NAME(look)(m, layer, call, s, g, scratch, &runs), window = layer->window;
    const long begin = s->keep && !window ? 0 : runs[0].from; /* a window keeps the numbers */
    long columns = begin;
    for (long i = 0; i < num_runs; i++) columns += runs[i].to - runs[i].from;
    const long first = columns - R, prefix = first - s->tail, padded = (columns + 15) / 16 * 16;

    /* Keys of 16 columns side by side, [column / 16][unit][16]: one product then scores 16 columns. */
    uint32_t *side = scratch_units(scratch, 1, padded * units);
    for (long i = 0, to = begin; i < num_runs; i++)
        for (long c = runs[i].from; c < runs[i].to; c += 16, to += 16)
            transpose16((const uint32_t *)(keys + c * D * element), units, runs[i].to - c < 16 ? runs[i].to - c : 16,
                        side + to * units);

    float *scores = (float *)scratch_units(scratch, 2, 12 * padded);
    for (long base = 0; base < R * n; base += 12) {
        const long rows = R * n - base < 12 ? R * n - base : 12;
        /* In a chain nobody in this block sees beyond its last row. */
        const long seen_end = s->seen ? columns : first + (base + rows - 1) / n + 1;
        const long tiles = (seen_end + 15) / 16;
        NAME(product)(side, units * 16, begin / 16, tiles, q + base * units, units, units, rows, scores, padded, 0, 0);
        long lows[12], lengths[12]; /* the columns that a row sees; of a tree's row, after its path is compacted */
        float inverse[12];
        long shared_from = begin, shared_to = columns; /* the columns that all rows of the block see */
        for (long i = 0; i < rows; i++) {
            const long r = (base + i) / n;
            float *line = scores + i * padded;
            long length = first + r + 1;
            if (s->seen) { /* compact the row's own path behind the prefix: column index becomes position */
                const uint8_t *seen = s->seen + r * (s->tail + R);
                length = prefix;
                for (long j = 0; j < s->tail + R; j++)
                    if (seen[j]) line[length++] = line[prefix + j];
            }
            const long low = window && length > window ? length - window : 0;
            lows[i] = low;
            lengths[i] = length;
            inverse[i] = softmax(line, begin, low, length, padded, m->scaling);
            const long own = s->seen ? prefix : length;
            if (low > shared_from) shared_from = low;
            if (own < shared_to) shared_to = own;
        }
        if (shared_to < shared_from) shared_to = shared_from;
        const long out_stride = m->heads * units;
        for (long d = 0; d < D; d += 16) {
            const char *v = values + d * element, *last = v + (runs[num_runs - 1].to - columns) * D * element;
            vf acc[12];
            /* Ascending, and never over a column that the row does not see: zero times NaN is NaN. */
            for (long i = 0; i < rows; i++) {
                const long own = s->seen ? prefix : lengths[i];
                acc[i] = NAME(weigh)((vf){0}, scores + i * padded, lows[i], own < shared_from ? own : shared_from, last, D);
            }
            /* rows of the block read each value that all of them see once */
            for (long k = 0, at = begin; at < shared_to; at += runs[k].to - runs[k].from, k++) {
                Run run = runs[k];
                if (run.to - run.from > shared_to - at) run.to = run.from + shared_to - at;
                if (at < shared_from) run.from += shared_from - at; /* a window: there is one run */
                const float *line = scores + at - runs[k].from;
                switch (rows) {
#define VALUE_CASE(MR)                                                                                                \
    case MR:                                                                                                          \
        for (long c = run.from; c < run.to; c++) {                                                                    \
            const vf vc = NAME(widen)(v + c * D * element);                                                           \
            UNROLL for (int i = 0; i < MR; i++) acc[i] += line[i * padded + c] * vc;                                  \
        }                                                                                                             \
        break;
                VALUE_CASE(1) VALUE_CASE(2) VALUE_CASE(3) VALUE_CASE(4) VALUE_CASE(5) VALUE_CASE(6)
                VALUE_CASE(7) VALUE_CASE(8) VALUE_CASE(9) VALUE_CASE(10) VALUE_CASE(11) VALUE_CASE(12)
#undef VALUE_CASE
                }
            }
            for (long i = 0; i < rows; i++) {
                if (s->seen) {
                    const uint8_t *seen = s->seen + (base + i) / n * (s->tail + R);
                    long c = prefix;
                    for (long j = 0; j < s->tail + R; j++)
                        if (seen[j]) {
                            if (c >= lows[i]) acc[i] += scores[i * padded + c] * NAME(widen)(v + (s->prefix + j) * D * element);
                            c++;
                        }
                } else {
                    acc[i] = NAME(weigh)(acc[i], scores + i * padded, shared_to, lengths[i], last, D);
                }
                const long r = (base + i) / n, h = g * n + (base + i) % n;
                NAME(narrow)((char *)(m->attended + (s->start + r) * out_stride) + (h * D + d) * element, acc[i] * inverse[i]);
            }
        }
    }
}

/* gate and up tiles alternate: h = silu(gate) * up, as elements */
static void NAME(gate)(const Model *m, long first, long last, long rows) {
    for (long r = 0; r < rows; r++)
        for (long t = first; t < last; t += 2) {
            const float *from = m->gate_up_out + r * m->gate_up_stride + t * 16;
            const vf gate = *(const vf_unaligned *)from, up = *(const vf_unaligned *)(from + 16);
            NAME(narrow)((char *)(m->hidden + r * m->ffn_units) + t * 8 * (4 / UNIT), gate / (1.0f + exponential(-gate)) * up);
        }
}

#include "gates.h"

static void NAME(embed)(const Model *m, const Call *call, long row) {
    const char *from = (const char *)m->embedding + (long)call->tokens[row] * m->width * (4 / UNIT);
    float *to = m->residual + row * m->width;
    for (long i = 0; i < m->width; i += 16) *(vf_unaligned *)(to + i) = NAME(widen)(from + i * (4 / UNIT));
}

/* Copy the tapped rows of the residual stream, if this depth is tapped. The stage keeps threads in step. */
static void NAME(tap)(const Model *m, const Call *call, long depth, Stage *stage) {
    const long W = m->width, rows = call->num_tap_rows;
    long index = 0;
    while (index < call->num_taps && call->taps[index] != depth) index++;
    if (index == call->num_taps) return;
    float *to = call->tapped + index * rows * W;
    for (long r; (r = claim(stage, rows)) < rows; finish(stage))
        memcpy(to + r * W, m->residual + (long)call->tap_rows[r] * W, W * sizeof(float));
    wait_for(stage, rows);
}

/* The forward of a span of layers, run by every thread that takes part. Norms are repeated by every thread: cheaper than waiting. */
static void NAME(forward)(const Model *m, const Call *call, Job *job, Scratch *scratch) {
    const long T = call->num_rows, W = m->width, units = W / UNIT;
    const long q_units = m->heads * m->head_dim / UNIT;
    const long qkv_tiles = m->qkv_stride / 16, width_tiles = W / 16, ffn_tiles = m->gate_up_stride / 16;
    uint32_t *normed = scratch_units(scratch, 3, T * units);
    double *seconds = scratch == m->scratch ? call->attention_seconds : 0; /* the first thread keeps the clock */
    Stage *stage = job->stages;
    long lo, hi;

    for (long r; (r = claim(stage, T)) < T; finish(stage)) {
        if (call->entering)
            memcpy(m->residual + r * W, call->entering + r * W, W * sizeof(float));
        else
            NAME(embed)(m, call, r);
    }
    wait_for(stage++, T);
    for (long l = call->first; l < call->last; l++) {
        const Layer *layer = m->layers + l;
        if (open_for(stage, shares(job, qkv_tiles)))
            for (long r = 0; r < T; r++)
                NAME(rms_norm)(m->residual + r * W, layer->attention_norm, W, m->eps, normed + r * units);
        while (next_share(job, stage, qkv_tiles, &lo, &hi)) {
            NAME(product)(layer->qkv, 16 * units, lo, hi, normed, units, units, T, m->qkv_out, m->qkv_stride,
                          layer->qkv_bias, 0);
            finish(stage);
        }
        wait_for(stage++, shares(job, qkv_tiles));

        const double began = seconds ? now() : 0;
        const long items = call->num_segments * m->kv_heads;
        for (long i; (i = claim(stage, items)) < items; finish(stage))
            NAME(attend)(m, layer, call, call->segments + i / m->kv_heads, i % m->kv_heads, scratch);
        wait_for(stage++, items);
        if (seconds) *seconds += now() - began;

        while (next_share(job, stage, width_tiles, &lo, &hi)) {
            NAME(product)(layer->out, 16 * q_units, lo, hi, m->attended, q_units, q_units, T, m->residual, W,
                          layer->out_bias, 1);
            finish(stage);
        }
        wait_for(stage++, shares(job, width_tiles));

        if (!layer->gate_up) { /* attention alone, as in an adapter */
            NAME(tap)(m, call, l + 1, stage++);
            continue;
        }
        if (open_for(stage, shares(job, ffn_tiles)))
            for (long r = 0; r < T; r++) NAME(rms_norm)(m->residual + r * W, layer->mlp_norm, W, m->eps, normed + r * units);
        while (next_share(job, stage, ffn_tiles, &lo, &hi)) {
            if (call->thresholds) {
                NAME(open_gates)(m, layer, call, lo, hi, normed);
            } else {
                NAME(product)(layer->gate_up, 16 * units, lo, hi, normed, units, units, T, m->gate_up_out,
                              m->gate_up_stride, 0, 0);
                NAME(gate)(m, lo, hi, T);
            }
            finish(stage);
        }
        wait_for(stage++, shares(job, ffn_tiles));

        const int32_t *open = 0;
        long num_open = m->ffn_units;
        if (call->thresholds && open_for(stage, shares(job, width_tiles)))
            open = NAME(open_units)(m, T, scratch, &num_open);
        while (next_share(job, stage, width_tiles, &lo, &hi)) {
            if (open)
                NAME(product_of)(layer->down, 16 * m->ffn_units, lo, hi, m->hidden, m->ffn_units, open, num_open, T,
                                 m->residual, W);
            else
                NAME(product)(layer->down, 16 * m->ffn_units, lo, hi, m->hidden, m->ffn_units, m->ffn_units, T,
                              m->residual, W, 0, 1);
            finish(stage);
        }
        wait_for(stage++, shares(job, width_tiles));
        NAME(tap)(m, call, l + 1, stage++);
    }
    const long M = call->num_wanted, head_tiles = m->logits_stride / 16;
    if (!M) return; /* a span that only hands its rows on */
    if (open_for(stage, shares(job, head_tiles)))
        for (long i = 0; i < M; i++) {
            const float *row = m->residual + (long)call->wanted[i] * W;
            if (call->skip_norm)
                for (long w = 0; w < W; w += 16)
                    NAME(narrow)((char *)(normed + i * units) + w * (4 / UNIT), *(const vf_unaligned *)(row + w));
            else
                NAME(rms_norm)(row, m->final_norm, W, m->eps, normed + i * units);
        }
    while (next_share(job, stage, head_tiles, &lo, &hi)) {
        NAME(product)(m->head, 16 * units, lo, hi, normed, units, units, M, call->logits, m->logits_stride, 0, 0);
        finish(stage);
    }
    wait_for(stage++, shares(job, head_tiles));
    for (long i; (i = claim(stage, M)) < M; finish(stage)) {
        const float *logits = call->logits + i * m->logits_stride;
        best_of(logits, m->vocab, call->best + i, call->peaks + i);
        if (call->top)
            top_of(logits, m->vocab, call->top, call->peaks[i], call->top_ids + i * call->top, call->top_shares + i * call->top);
    }
    wait_for(stage, M);
}

#undef UNIT
