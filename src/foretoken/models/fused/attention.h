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
        scale = 1.0f / sqrtf(horizontal_sum(sum) / (float)D + (float)m->eps);
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
static void NAME(sum_queries)(const Job *job, const Layer *layer, long row, long g, float *sum) {
    const Model *m = job->model;
    const Call *call = job->call;
    const long D = m->head_dim, n = m->heads / m->kv_heads, position = call->positions[row];
    const float *cos = call->cos + position * (m->rot_dim / 2), *sin = call->sin + position * (m->rot_dim / 2);
    uint32_t q[MAX_HEAD_DIM / UNIT];
    memset(sum, 0, D * sizeof(float));
    for (long h = g * n; h < (g + 1) * n; h++) {
        NAME(rotate)(m, job->qkv_out + row * m->qkv_stride + h * D, layer->q_norm, cos, sin, q);
        for (long d = 0; d < D; d += 16) *(vf_unaligned *)(sum + d) += NAME(widen)((char *)q + d * (4 / UNIT));
    }
}

/* The columns of the cache that a group looks at, ascending; the blocks among them are chosen by the first row. */
static long NAME(look)(const Job *job, const Layer *layer, const Segment *s, long g, Scratch *scratch, Run **runs) {
    const Model *m = job->model;
    const Call *call = job->call;
    const long end = s->prefix + s->tail + s->rows, window = layer->window;
    if (!s->keep || window) {
        *runs = scratch->part[5].data;
        /* With a window, columns left of everybody's view are never looked at. Behind the prefix a tree's columns are no
         * positions: all of them are looked at, and each row compacts its own path. */
        long left = window ? furthest_look(s) - window + 1 : 0;
        if (s->seen && left > s->prefix) left = s->prefix;
        **runs = (Run){left > 0 ? left / 16 * 16 : 0, end};
        return 1;
    }
    const Blocks *b = call->blocks;
    const long D = m->head_dim, G = m->kv_heads, num_blocks = s->prefix / b->size;
    int32_t *chosen = b->chosen + ((s - call->segments) * G + g) * (1 + b->most);
    const float *means = b->means[layer->index];
    if (means) {
        const long heads = b->across_heads ? G : 1, from = b->across_heads ? 0 : g; /* every item ranks all it needs */
        float *scores = scratch->part[4].data;
        for (long h = 0; h < heads; h++) {
            float q[MAX_HEAD_DIM];
            NAME(sum_queries)(job, layer, s->start, from + h, q);
            score_blocks(b, q, means + (s->slot * G + from + h) * b->capacity * D, D, num_blocks, scores + h * num_blocks);
        }
        choose_blocks(scores, scores + heads * num_blocks, heads * num_blocks, b->across_heads ? s->keep : s->keep / G,
                      g - from, num_blocks, chosen);
    }
    *runs = scratch->part[5].data;
    return runs_of(chosen, b->size, num_blocks * b->size, end, *runs);
}

/* acc += weights[c] * value of column c, for the columns from .. to - 1 */
static inline __attribute__((always_inline)) vf NAME(weigh)(vf acc, const float *weights, long from, long to,
                                                            const char *values, long D) {
    for (long c = from; c < to; c++) acc += weights[c] * NAME(widen)(values + c * D * (4 / UNIT));
    return acc;
}

/* Bring the tiled keys of a slot up to date with its whole committed tiles; returns how many columns they are. */
static long NAME(store)(const Job *job, const Layer *layer, const Segment *s, long g, const char *keys) {
    const Model *m = job->model;
    const Call *call = job->call;
    const long D = m->head_dim, units = D / UNIT, place = (long)s->slot * m->kv_heads + g, whole = s->committed / 16;
    int32_t *known = call->known[layer->index] + place;
    uint32_t *tiles = (uint32_t *)call->tiled[layer->index] + place * ((call->capacity + 15) / 16) * 16 * units;
    for (; *known < whole; ++*known)
        transpose16((const uint32_t *)(keys + *known * 16 * D * (4 / UNIT)), units, 16, tiles + *known * 16 * units);
    return whole * 16;
}

/* Write one group's new keys and values, and attend with its query heads over one segment.
 *
 * The runs of columns that the group looks at are laid end to end: from here on a column is its place in that line. What
 * is left out is prefix only, so behind the prefix nothing but the numbering changes. */
static void NAME(attend)(const Job *job, const Layer *layer, const Segment *s, long g, Scratch *scratch) {
    const Model *m = job->model;
    const Call *call = job->call;
    const long D = m->head_dim, n = m->heads / m->kv_heads, units = D / UNIT, R = s->rows;
    const long place = s->prefix + s->tail; /* of the first row in the cache */
    const long qkv_stride = m->qkv_stride;
    const long element = 4 / UNIT;
    char *keys = (char *)call->keys[layer->index] + ((long)s->slot * m->kv_heads + g) * call->capacity * D * element;
    char *values = (char *)call->values[layer->index] + ((long)s->slot * m->kv_heads + g) * call->capacity * D * element;

    uint32_t *q = scratch->part[0].data;
    for (long r = 0; r < R; r++) {
        const float *row = job->qkv_out + (s->start + r) * qkv_stride;
        const long position = call->positions[s->start + r];
        const float *cos = call->cos + position * (m->rot_dim / 2), *sin = call->sin + position * (m->rot_dim / 2);
        NAME(rotate)(m, row + (m->heads + g) * D, layer->k_norm, cos, sin, keys + (place + r) * D * element);
        for (long i = 0; i < D; i += 16)
            NAME(narrow)(values + ((place + r) * D + i) * element,
                         *(const vf_unaligned *)(row + (m->heads + m->kv_heads + g) * D + i));
        for (long h = 0; h < n; h++)
            NAME(rotate)(m, row + (g * n + h) * D, layer->q_norm, cos, sin, q + (r * n + h) * units);
    }

    Run *runs;
    const long num_runs = NAME(look)(job, layer, s, g, scratch, &runs), window = layer->window;
    const long begin = s->keep && !window ? 0 : runs[0].from; /* a window keeps the numbers */
    long columns = begin;
    for (long i = 0; i < num_runs; i++) columns += runs[i].to - runs[i].from;
    const long first = columns - R, prefix = first - s->tail, padded = (columns + 15) / 16 * 16;

    /* Keys of 16 columns side by side, [column / 16][unit][16]: one product then scores 16 columns. Of committed rows
     * they are kept; the others are laid out now, in their places in the line. */
    const long stored = NAME(store)(job, layer, s, g, keys), tiles_held = (call->capacity + 15) / 16;
    const uint32_t *store = (const uint32_t *)call->tiled[layer->index] + ((long)s->slot * m->kv_heads + g) * tiles_held * 16 * units;
    uint32_t *side = scratch->part[1].data;
    for (long i = 0, to = begin; i < num_runs; to += runs[i].to - runs[i].from, i++)
        for (long c = runs[i].from > stored ? runs[i].from : stored; c < runs[i].to; c += 16)
            transpose16((const uint32_t *)(keys + c * D * element), units, runs[i].to - c < 16 ? runs[i].to - c : 16,
                        side + (to + c - runs[i].from) * units);

    float *scores = scratch->part[2].data;
    for (long base = 0; base < R * n; base += 12) {
        const long rows = R * n - base < 12 ? R * n - base : 12;
        /* In a chain nobody in this block sees beyond its last row. */
        const long seen_end = s->seen ? columns : first + (base + rows - 1) / n + 1;
        for (long i = 0, to = begin; i < num_runs && to < seen_end; to += runs[i].to - runs[i].from, i++) {
            Run run = runs[i];
            if (run.to > run.from + seen_end - to) run.to = run.from + seen_end - to;
            const long middle = stored < run.from ? run.from : stored < run.to ? stored : run.to;
            const long from_store = (middle - run.from) / 16, from_side = (run.to - middle + 15) / 16;
            const uint32_t *x = q + base * units;
            NAME(product)(store + run.from * units, units * 16, 0, from_store, x, units, units, rows, scores + to, padded, 0, 0);
            NAME(product)(side + (to + middle - run.from) * units, units * 16, 0, from_side, x, units, units, rows,
                          scores + to + middle - run.from, padded, 0, 0);
        }
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
            inverse[i] = softmax(line, begin, low, length, padded, (float)m->scaling);
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
                NAME(narrow)((char *)(job->attended + (s->start + r) * out_stride) + (h * D + d) * element, acc[i] * inverse[i]);
            }
        }
    }
}

