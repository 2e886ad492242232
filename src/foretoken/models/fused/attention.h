/* to = x / rms(x) * gain, for a product; n is a multiple of 16 */
static void NAME(rms_norm)(const float *x, const float *gain, long n, float eps, NAME(input) *to) {
    const float scale = 1.0f / sqrtf(dot(x, x, n) / (float)n + eps);
    for (long i = 0; i < n; i += LANES)
        NAME(enter)(to + INPUTS(i), *(const part_unaligned *)(x + i) * scale * *(const part_unaligned *)(gain + i));
}

/* One head's query or key: optional norm, rotary. */
static void NAME(rotate)(const Model *m, const float *x, const float *gain, const float *cos, const float *sin, float *z) {
    const long D = m->head_dim, half = m->rot_dim / 2;
    float y[MAX_HEAD_DIM];
    const float scale = gain ? 1.0f / sqrtf(dot(x, x, D) / (float)D + (float)m->eps) : 1.0f;
    for (long i = 0; i < D; i++) y[i] = gain ? x[i] * scale * gain[i] : x[i];
    for (long i = 0; i < half; i++) {
        z[i] = y[i] * cos[i] - y[i + half] * sin[i];
        z[i + half] = y[i + half] * cos[i] + y[i] * sin[i];
    }
    for (long i = 2 * half; i < D; i++) z[i] = y[i];
}

/* The sum of one group's queries of a row. */
static void NAME(sum_queries)(const Job *job, const Layer *layer, long row, long g, float *sum) {
    const Model *m = job->model;
    const Call *call = job->call;
    const long D = m->head_dim, n = m->heads / m->kv_heads, position = call->positions[row];
    const float *cos = call->cos + position * (m->rot_dim / 2), *sin = call->sin + position * (m->rot_dim / 2);
    float q[MAX_HEAD_DIM];
    memset(sum, 0, D * sizeof(float));
    for (long h = g * n; h < (g + 1) * n; h++) {
        NAME(rotate)(m, job->qkv_out + row * m->qkv_stride + h * D, layer->q_norm, cos, sin, q);
        for (long d = 0; d < D; d += LANES) *(part_unaligned *)(sum + d) += NAME(rounded)(*(const part_unaligned *)(q + d));
    }
}

/* acc += weights[c] * value of column c, for the columns from .. to - 1 */
static inline __attribute__((always_inline)) part NAME(weigh)(part acc, const float *weights, long from, long to,
                                                              const char *values, long D) {
    for (long c = from; c < to; c++)
        acc = fused_part(all_of_part(weights[c]), NAME(widen)(values + c * D * (4 / UNIT)), acc);
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

/* Score the blocks of one group of heads for the first row of a segment.
 *
 * For exact scores the row's keys are written here, and again by `attend`: a stage lies between. */
static void NAME(score)(const Job *job, const Layer *layer, const Segment *s, long g, Scratch *scratch) {
    const Model *m = job->model;
    const Call *call = job->call;
    const Blocks *b = call->blocks;
    const long D = m->head_dim, G = m->kv_heads, n = m->heads / G, units = D / UNIT, element = 4 / UNIT;
    const long num_blocks = s->prefix / b->size, group = s->slot * G + g;
    float *scores = b->scores + ((s - call->segments) * G + g) * b->most;
    if (b->score != EXACT) {
        const long width = b->score == BOUNDS ? 2 * D : D;
        float q[MAX_HEAD_DIM];
        NAME(sum_queries)(job, layer, s->start, g, q);
        score_summaries(b, q, b->summaries[layer->index] + group * b->capacity * width, D, num_blocks, scores);
        fix_scores(b, num_blocks, scores);
        return;
    }
    const long place = s->prefix + s->tail, position = call->positions[s->start];
    const float *cos = call->cos + position * (m->rot_dim / 2), *sin = call->sin + position * (m->rot_dim / 2);
    const float *row = job->qkv_out + s->start * m->qkv_stride;
    char *keys = (char *)call->keys[layer->index] + group * call->capacity * D * element;
    float turned[MAX_HEAD_DIM];
    NAME(rotate)(m, row + (m->heads + g) * D, layer->k_norm, cos, sin, turned);
    for (long i = 0; i < D; i += LANES) NAME(narrow)(keys + (place * D + i) * element, *(const part_unaligned *)(turned + i));
    NAME(input) *q = scratch->part[0].data;
    uint32_t *side = scratch->part[1].data;
    for (long h = 0; h < n; h++) {
        NAME(rotate)(m, row + (g * n + h) * D, layer->q_norm, cos, sin, turned);
        for (long i = 0; i < D; i += LANES) NAME(enter)(q + INPUTS(h * D + i), *(const part_unaligned *)(turned + i));
    }

    const long stored = NAME(store)(job, layer, s, g, keys), columns = place + 1, padded = (columns + 15) / 16 * 16;
    const uint32_t *store = (const uint32_t *)call->tiled[layer->index] + group * ((call->capacity + 15) / 16) * 16 * units;
    for (long c = stored; c < columns; c += 16)
        transpose16((const uint32_t *)(keys + c * D * element), units, columns - c < 16 ? columns - c : 16, side + (c - stored) * units);
    memset(scores, 0, num_blocks * sizeof(float));
    float *lines = scratch->part[2].data;
    for (long base = 0; base < n; base += 12) {
        const long heads = n - base < 12 ? n - base : 12;
        const NAME(input) *x = q + INPUTS(base * D);
        NAME(product)(store, units * 16, 0, stored / 16, x, INPUTS(D), units, heads, lines, padded, 0, 0);
        NAME(product)(side, units * 16, 0, (columns - stored + 15) / 16, x, INPUTS(D), units, heads, lines + stored, padded, 0, 0);
        for (long h = 0; h < heads; h++) {
            float *line = lines + h * padded;
            long length = columns;
            if (s->seen) { /* of a tree's tail the row sees its own path */
                length = s->prefix;
                for (long j = 0; j <= s->tail; j++)
                    if (s->seen[j]) line[length++] = line[s->prefix + j];
            }
            const float inverse = softmax(line, 0, 0, length, padded, (float)m->scaling);
            add_weights(line, inverse, b->size, num_blocks, scores);
        }
    }
    fix_scores(b, num_blocks, scores);
}

/* The columns of the cache that a group looks at, ascending; the blocks among them were scored for the first row. */
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
    const long G = m->kv_heads, num_blocks = s->prefix / b->size;
    int32_t *chosen = b->chosen + ((s - call->segments) * G + g) * (1 + b->most);
    if (b->selects[layer->index]) {
        const long heads = b->across_heads ? G : 1, from = b->across_heads ? 0 : g; /* every item ranks all it needs */
        float *scores = scratch->part[4].data;
        for (long h = 0; h < heads; h++)
            memcpy(scores + h * num_blocks, b->scores + ((s - call->segments) * G + from + h) * b->most, num_blocks * sizeof(float));
        choose_blocks(scores, scores + heads * num_blocks, heads * num_blocks, b->across_heads ? s->keep : s->keep / G,
                      g - from, num_blocks, chosen);
    }
    *runs = scratch->part[5].data;
    return runs_of(chosen, b->size, num_blocks * b->size, end, *runs);
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

    NAME(input) *q = scratch->part[0].data;
    float turned[MAX_HEAD_DIM];
    for (long r = 0; r < R; r++) {
        const float *row = job->qkv_out + (s->start + r) * qkv_stride;
        const long position = call->positions[s->start + r];
        const float *cos = call->cos + position * (m->rot_dim / 2), *sin = call->sin + position * (m->rot_dim / 2);
        NAME(rotate)(m, row + (m->heads + g) * D, layer->k_norm, cos, sin, turned);
        for (long i = 0; i < D; i += LANES) {
            NAME(narrow)(keys + ((place + r) * D + i) * element, *(const part_unaligned *)(turned + i));
            NAME(narrow)(values + ((place + r) * D + i) * element,
                         *(const part_unaligned *)(row + (m->heads + m->kv_heads + g) * D + i));
        }
        for (long h = 0; h < n; h++) {
            NAME(rotate)(m, row + (g * n + h) * D, layer->q_norm, cos, sin, turned);
            for (long i = 0; i < D; i += LANES)
                NAME(enter)(q + INPUTS((r * n + h) * D + i), *(const part_unaligned *)(turned + i));
        }
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
            const NAME(input) *x = q + INPUTS(base * D);
            NAME(product)(store + run.from * units, units * 16, 0, from_store, x, INPUTS(D), units, rows, scores + to, padded, 0, 0);
            NAME(product)(side + (to + middle - run.from) * units, units * 16, 0, from_side, x, INPUTS(D), units, rows,
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
        for (long d = 0; d < D; d += LANES) {
            const char *v = values + d * element, *last = v + (runs[num_runs - 1].to - columns) * D * element;
            part acc[12];
            /* Ascending, and never over a column that the row does not see: zero times NaN is NaN. */
            for (long i = 0; i < rows; i++) {
                const long own = s->seen ? prefix : lengths[i];
                acc[i] = NAME(weigh)((part){0}, scores + i * padded, lows[i], own < shared_from ? own : shared_from, last, D);
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
            const part vc = NAME(widen)(v + c * D * element);                                                         \
            UNROLL for (int i = 0; i < MR; i++) acc[i] = fused_part(all_of_part(line[i * padded + c]), vc, acc[i]);   \
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
                            const part value = NAME(widen)(v + (s->prefix + j) * D * element);
                            if (c >= lows[i]) acc[i] = fused_part(all_of_part(scores[i * padded + c]), value, acc[i]);
                            c++;
                        }
                } else {
                    acc[i] = NAME(weigh)(acc[i], scores + i * padded, shared_to, lengths[i], last, D);
                }
                const long r = (base + i) / n, h = g * n + (base + i) % n;
                NAME(enter)((NAME(input) *)job->attended + INPUTS(((s->start + r) * m->heads + h) * D + d), acc[i] * inverse[i]);
            }
        }
    }
}

