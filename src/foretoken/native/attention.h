/* x normed, times a gain, in place; n is a multiple of 16 */
static void NAME(norm_line)(const Model *m, float *x, const float *gain, long n) {
    const Norming y = norming_of(x, n, (float)m->eps, (int)m->centred);
    for (long i = 0; i < n; i += LANES)
        *(part_unaligned *)(x + i) = (*(const part_unaligned *)(x + i) - y.mean) * y.scale * *(const part_unaligned *)(gain + i);
}

/* One head's query or key of a row: optional norm by the head's gain, rotary. */
static void NAME(rotate)(const Job *job, const Layer *layer, long row, const float *x, const float *gains, long head,
                         float *z) {
    const Model *m = job->model;
    const float *gain = gains ? gains + head * m->head_dim : 0;
    const long D = m->head_dim, half = layer->rot_dim / 2, position = job->call->positions[row];
    const Angles *angles = job->call->angles + layer->angles;
    const float *cos = angles->cos + position * half, *sin = angles->sin + position * half;
    float y[MAX_HEAD_DIM];
    const Norming by = gain ? norming_of(x, D, (float)m->eps, (int)m->centred) : (Norming){0, 1};
    for (long i = 0; i < D; i++) y[i] = gain ? (x[i] - by.mean) * by.scale * gain[i] : x[i];
    if (m->interleaved) {
        for (long i = 0; i < half; i++) {
            z[2 * i] = y[2 * i] * cos[i] - y[2 * i + 1] * sin[i];
            z[2 * i + 1] = y[2 * i + 1] * cos[i] + y[2 * i] * sin[i];
        }
    } else {
        for (long i = 0; i < half; i++) {
            z[i] = y[i] * cos[i] - y[i + half] * sin[i];
            z[i + half] = y[i + half] * cos[i] + y[i] * sin[i];
        }
    }
    for (long i = 2 * half; i < D; i++) z[i] = y[i];
}

/* The sum of one group's queries of a row. */
static void NAME(sum_queries)(const Job *job, const Layer *layer, long row, long g, float *sum) {
    const Model *m = job->model;
    const long D = m->head_dim, n = m->heads / m->kv_heads;
    float q[MAX_HEAD_DIM];
    memset(sum, 0, D * sizeof(float));
    for (long h = g * n; h < (g + 1) * n; h++) {
        NAME(rotate)(job, layer, row, job->qkv_out + row * m->qkv_stride + h * D, layer->q_norm, h, q);
        for (long d = 0; d < D; d += LANES) *(part_unaligned *)(sum + d) += NAME(rounded)(*(const part_unaligned *)(q + d));
    }
}

/* 32-bit units of a row of the cache. */
static inline long NAME(row_units)(const Job *job) {
    return job->call->coded ? job->model->head_dim / 4 + 1 : job->model->head_dim / UNIT;
}

/* Write one group's new keys and values, and lay out what of the slot's keys is not laid out yet: those of 16 columns side
 * by side, [column / 16][unit][16], so that one product scores 16 columns. Whole committed tiles stay as they are; the
 * others are laid out again by every forward. */
static void NAME(write)(const Job *job, const Layer *layer, const Segment *s, long g) {
    const Model *m = job->model;
    const Call *call = job->call;
    const long D = m->head_dim, units = NAME(row_units)(job), bytes = 4 * units, element = 4 / UNIT;
    const long group = (long)s->slot * m->kv_heads + g;
    const long place = s->prefix + s->tail, end = place + s->rows; /* of the rows in the cache */
    char *keys = (char *)call->keys[layer->index] + group * call->capacity * bytes;
    char *values = (char *)call->values[layer->index] + group * call->capacity * bytes;
    float turned[MAX_HEAD_DIM];
    for (long r = 0; r < s->rows; r++) {
        const float *row = job->qkv_out + (s->start + r) * m->qkv_stride;
        const float *value = row + (m->heads + m->kv_heads + g) * D;
        NAME(rotate)(job, layer, s->start + r, row + (m->heads + g) * D, layer->k_norm, g, turned);
        if (call->coded) {
            code_line(turned, D, keys + (place + r) * bytes);
            code_line(value, D, values + (place + r) * bytes);
            continue;
        }
        for (long i = 0; i < D; i += LANES) {
            NAME(narrow)(keys + ((place + r) * D + i) * element, *(const part_unaligned *)(turned + i));
            NAME(narrow)(values + ((place + r) * D + i) * element, *(const part_unaligned *)(value + i));
        }
    }
    int32_t *known = call->known[layer->index] + group;
    uint32_t *tiles = (uint32_t *)call->tiled[layer->index] + group * ((call->capacity + 15) / 16) * 16 * units;
    const long whole = s->committed / 16;
    for (long t = *known < whole ? *known : whole; t * 16 < end; t++)
        transpose16((const uint32_t *)(keys + t * 16 * bytes), units, end - t * 16 < 16 ? end - t * 16 : 16,
                    tiles + t * 16 * units);
    *known = (int32_t)whole;
}

/* Queries of one group of heads of a row, for a product. */
static void NAME(turn_queries)(const Job *job, const Layer *layer, long row, long g, NAME(input) *q) {
    const Model *m = job->model;
    const long D = m->head_dim, n = m->heads / m->kv_heads;
    float turned[MAX_HEAD_DIM];
    for (long h = 0; h < n; h++) {
        NAME(rotate)(job, layer, row, job->qkv_out + row * m->qkv_stride + (g * n + h) * D, layer->q_norm, g * n + h, turned);
        for (long i = 0; i < D; i += LANES) NAME(enter)(q + INPUTS(h * D + i), *(const part_unaligned *)(turned + i));
    }
}

/* The same in codes, each of them twice. */
static void NAME(code_queries)(const Job *job, const Layer *layer, long row, long g, const Matrix *keys, char *to) {
    const Model *m = job->model;
    const long D = m->head_dim, n = m->heads / m->kv_heads, bytes = coded_bytes(keys, D);
    float turned[MAX_HEAD_DIM];
    for (long h = 0; h < n; h++, to += 2 * bytes) {
        NAME(rotate)(job, layer, row, job->qkv_out + row * m->qkv_stride + (g * n + h) * D, layer->q_norm, g * n + h, turned);
        code_query(keys, turned, D, to, to + bytes);
    }
}

/* Score the blocks of one group of heads for the first row of a segment. */
static void NAME(score)(const Job *job, const Layer *layer, const Segment *s, long g, Scratch *scratch) {
    const Model *m = job->model;
    const Call *call = job->call;
    const Blocks *b = call->blocks;
    const long D = m->head_dim, G = m->kv_heads, n = m->heads / G, units = D / UNIT;
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
    NAME(input) *q = scratch->part[0].data;
    NAME(turn_queries)(job, layer, s->start, g, q);
    const long columns = s->prefix + s->tail + 1, padded = (columns + 15) / 16 * 16;
    const uint32_t *tiles = (const uint32_t *)call->tiled[layer->index] + group * ((call->capacity + 15) / 16) * 16 * units;
    memset(scores, 0, num_blocks * sizeof(float));
    float *lines = scratch->part[2].data;
    for (long base = 0; base < n; base += 12) {
        const long heads = n - base < 12 ? n - base : 12;
        const NAME(input) *x = q + INPUTS(base * D);
        NAME(product)(tiles, units * 16, 0, padded / 16, x, INPUTS(D), units, heads, lines, padded, 0, 0);
        for (long h = 0; h < heads; h++) {
            float *line = lines + h * padded;
            long length = columns;
            if (s->seen) { /* of a tree's tail the row sees its own path */
                length = s->prefix;
                for (long j = 0; j <= s->tail; j++)
                    if (s->seen[j]) line[length++] = line[s->prefix + j];
            }
            if (m->score_cap) cap_line(line, 0, length, (float)m->scaling, (float)m->score_cap);
            const float inverse = softmax(line, 0, 0, length, padded, m->score_cap ? 1 : (float)m->scaling);
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
    if (layer->elsewhere) {
        *runs = scratch->part[5].data;
        **runs = (Run){0, s->far};
        return 1;
    }
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
        const int all = b->sets == GLOBAL;
        const long heads = all ? G : 1, from = all || b->sets == PER_LAYER ? 0 : g; /* every item ranks all it needs */
        float *scores = scratch->part[4].data;
        for (long h = 0; h < heads; h++)
            memcpy(scores + h * num_blocks, b->scores + ((s - call->segments) * G + from + h) * b->most, num_blocks * sizeof(float));
        if (b->sets == PER_LAYER)
            for (long h = 1; h < G; h++)
                add_scores(b->scores + ((s - call->segments) * G + h) * b->most, num_blocks, scores);
        choose_blocks(scores, scores + heads * num_blocks, heads * num_blocks, all ? s->keep : s->keep / G,
                      all ? g : 0, num_blocks, chosen);
    }
    *runs = scratch->part[5].data;
    return runs_of(chosen, b->size, num_blocks * b->size, end, *runs);
}


/* The columns of the line that the rows from..to-1 of a segment see. Of a tree, each row's path behind the prefix is laid
 * out, and scored before the tiles are: there the place in the line is the position, in the cache it is not. */
static void NAME(see)(const Job *job, const Layer *layer, const Segment *s, long from, long to, long columns, Scratch *scratch,
                      NAME(Panel) *y) {
    const long window = layer->window, first = columns - s->rows, behind = s->tail + s->rows;
    for (long t = 0; layer->elsewhere && t < to - from; t++) y->lows[t] = 0, y->ends[t] = columns;
    if (layer->elsewhere) return;
    int32_t *paths = scratch->part[7].data;
    float *path_scores = (float *)(paths + (to - from) * behind);
    for (long t = 0; t < to - from; t++) {
        y->ends[t] = first + from + t + 1;
        if (s->seen) {
            const uint8_t *seen = s->seen + (from + t) * behind;
            long length = 0;
            for (long j = 0; j < behind; j++)
                if (seen[j]) paths[t * behind + length++] = (int32_t)(s->prefix + j);
            y->ends[t] = y->prefix + length;
        }
        y->lows[t] = window && y->ends[t] > window ? y->ends[t] - window : 0;
    }
    if (!s->seen) return;
    const long begin = s->prefix / 16 * 16, tiles = (s->prefix + behind - begin + 15) / 16;
    for (long base = 0; base < y->rows; base += 12) {
        const long rows = y->rows - base < 12 ? y->rows - base : 12;
        NAME(score_tiles)(y, begin, tiles, base, rows, y->scores, tiles * 16);
        for (long i = 0; i < rows; i++) {
            const long t = (base + i) / y->n;
            for (long j = 0; j < y->ends[t] - y->prefix; j++)
                path_scores[(base + i) * behind + j] = y->scores[i * tiles * 16 + paths[t * behind + j] - begin];
        }
    }
    y->paths = paths;
    y->path_scores = path_scores;
    y->own = behind;
}

/* Lay out the keys of elsewhere behind the tiles that are whole there. It is done in memory of this thread: the owner may be
 * writing its own rows into the last tile. */
static void NAME(lay_out_rest)(const Elsewhere *e, const Segment *s, long group, Scratch *scratch, NAME(Panel) *y) {
    const long whole = s->far / 16 < e->known[group] ? s->far / 16 : e->known[group], units = y->units;
    const uint32_t *keys = (const uint32_t *)e->keys + group * e->capacity * units;
    uint32_t *rest = scratch->part[13].data;
    for (long t = whole; t * 16 < s->far; t++)
        transpose16(keys + t * 16 * units, units, s->far - t * 16 < 16 ? s->far - t * 16 : 16, rest + (t - whole) * 16 * units);
    y->rest = rest;
    y->laid = whole * 16;
}

/* Attend with one group's query heads over the rows first_row..end_row-1 of a segment, a panel after the other.
 *
 * The runs of columns that the group looks at are laid end to end: from here on a column is its place in that line. What
 * is left out is prefix only, so behind the prefix nothing but the numbering changes. */
static void NAME(attend)(const Job *job, const Layer *layer, const Segment *s, long g, long first_row, long end_row,
                         Scratch *scratch) {
    const Model *m = job->model;
    const Call *call = job->call;
    const long D = m->head_dim, n = m->heads / m->kv_heads, units = NAME(row_units)(job);
    const Elsewhere *e = layer->elsewhere ? call->elsewhere : 0;
    const long capacity = e ? e->capacity : call->capacity, most = panel_tokens(m);
    const long group = e ? s->far_slot * e->groups + g : s->slot * m->kv_heads + g;
    Run *runs;
    const long num_runs = NAME(look)(job, layer, s, g, scratch, &runs);
    const long begin = s->keep && !layer->window ? 0 : runs[0].from; /* a window keeps the numbers */
    long columns = begin;
    for (long i = 0; i < num_runs; i++) columns += runs[i].to - runs[i].from;
    NAME(input) *q = scratch->part[0].data;
    for (long from = first_row; from < end_row; from += most) {
        const long to = from + most < end_row ? from + most : end_row, rows = (to - from) * n;
        NAME(Panel) y = {
            .tiles = (const uint32_t *)(e ? e->tiled : call->tiled[layer->index]) + group * ((capacity + 15) / 16) * 16 * units,
            .values = (const char *)(e ? e->values : call->values[layer->index]) + group * capacity * 4 * units,
            .units = units,
            .runs = runs, .num_runs = num_runs, .begin = begin,
            .prefix = e ? columns : columns - s->rows - s->tail, .shift = runs[num_runs - 1].to - columns,
            .n = n, .D = D, .rows = rows, .q = q,
            .scaling = m->score_cap ? 1 : (float)m->scaling, .cap = (float)m->score_cap, .cap_factor = (float)m->scaling,
            .scores = scratch->part[2].data, .weights = scratch->part[6].data,
            .sums = scratch->part[1].data};
        y.sofar = y.sums + rows * 16;
        y.highest = y.sofar + rows * D;
        if (call->coded) {
            y.keys = coded_keys((const char *)y.tiles, D);
            y.coded = coded_bytes(&y.keys, D);
            y.queries = scratch->part[10].data;
            y.scales = scratch->part[11].data;
            for (long r = from; r < to; r++)
                NAME(code_queries)(job, layer, s->start + r, g, &y.keys, y.queries + (r - from) * n * 2 * y.coded);
        } else {
            for (long r = from; r < to; r++) NAME(turn_queries)(job, layer, s->start + r, g, q + INPUTS((r - from) * n * D));
        }
        if (e) NAME(lay_out_rest)(e, s, group, scratch, &y);
        NAME(see)(job, layer, s, from, to, columns, scratch, &y);
        memset(y.sums, 0, rows * (16 + D) * sizeof(float));
        long least = columns, last = 0;
        for (long f = 0; f < rows; f++) y.highest[f] = -INFINITY;
        for (long t = 0; t < to - from; t++) {
            if (y.lows[t] < least) least = y.lows[t];
            if (y.ends[t] > last) last = y.ends[t];
        }
        for (long tile = least / TILE * TILE; tile < last; tile += TILE) {
            const long end = tile + TILE < last ? tile + TILE : last;
            if (call->coded) NAME(open_values)(&y, tile, least > tile ? least : tile, y.paths && y.prefix < end ? y.prefix : end);
            for (long base = 0; base < rows; base += 12)
                NAME(take_tile)(&y, tile, end, base, rows - base < 12 ? rows - base : 12);
        }
        for (long f = 0; f < rows; f++) {
            const float inverse = columns ? 1.0f / horizontal_sum(*(const vf *)(y.sums + f * 16)) : 0;
            const long row = s->start + from + f / n, head = g * n + f % n;
            for (long d = 0; d < D; d += LANES)
                NAME(enter)((NAME(input) *)job->attended + INPUTS((row * m->heads + head) * D + d),
                            *(const part_unaligned *)(y.sofar + f * D + d) * inverse);
        }
    }
}
