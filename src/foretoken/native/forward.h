/* The forward of a span of layers. */

static void NAME(embed)(const Job *job, long row) {
    const Model *m = job->model;
    const float scale = (float)m->embedding_scale;
    const char *from = (const char *)m->embedding + (long)job->call->tokens[row] * m->width * (4 / UNIT);
    const char *place = (const char *)m->places;
    if (place) place += (long)job->call->positions[row] * m->width * (4 / UNIT);
    float *to = job->residual + row * m->width;
    for (long i = 0; i < m->width; i += LANES) {
        part x = NAME(widen)(from + i * (4 / UNIT)) * scale;
        if (place) x += NAME(widen)(place + i * (4 / UNIT));
        *(part_unaligned *)(to + i) = x;
    }
}

/* Copy the tapped rows of the residual stream, if this depth is tapped. The stage keeps threads in step. */
static void NAME(tap)(const Job *job, long depth, Stage *stage) {
    const Call *call = job->call;
    const long W = job->model->width, rows = call->num_tap_rows;
    long index = 0;
    while (index < call->num_taps && call->taps[index] != depth) index++;
    if (index == call->num_taps) return;
    float *to = call->tapped + index * rows * W;
    for (long r; (r = claim(stage, rows)) < rows; finish(stage))
        memcpy(to + r * W, job->residual + (long)call->tap_rows[r] * W, W * sizeof(float));
    wait_for(stage, rows);
}

/* Where the last product of a branch goes: it is added to the residual stream, or put beside it first. */
static inline int NAME(adds)(const Model *m, const float *end_norm) { return !end_norm && m->residual_scale == 1; }

/* Add what lies beside the residual stream, normed and scaled. */
static void NAME(end_branch)(const Job *job, long rows, const float *end_norm, Stage *stage) {
    const Model *m = job->model;
    const long W = m->width;
    const float scale = (float)m->residual_scale;
    for (long r; (r = claim(stage, rows)) < rows; finish(stage)) {
        float *from = job->branch + r * W, *to = job->residual + r * W;
        if (end_norm) NAME(norm_line)(m, from, end_norm, W);
        for (long w = 0; w < W; w += LANES) *(part_unaligned *)(to + w) += *(const part_unaligned *)(from + w) * scale;
    }
    wait_for(stage, rows);
}

/* Norm all queries and all keys of each row. */
static void NAME(norm_heads)(const Job *job, const Layer *layer, Stage *stage) {
    const Model *m = job->model;
    const long queries = m->heads * m->head_dim, keys = m->kv_heads * m->head_dim, rows = job->call->num_rows;
    for (long r; (r = claim(stage, rows)) < rows; finish(stage)) {
        float *row = job->qkv_out + r * m->qkv_stride;
        NAME(norm_line)(m, row, layer->q_all_norm, queries);
        NAME(norm_line)(m, row + queries, layer->k_all_norm, keys);
    }
    wait_for(stage, rows);
}

/* Add to some tiles of all rows' queries, keys and values what comes from beside the residual stream. */
static void NAME(add_beside)(const Job *job, long first, long last) {
    const long stride = job->model->qkv_stride;
    for (long r = 0; r < job->call->num_rows; r++)
        for (long i = r * stride + first * 16; i < r * stride + last * 16; i += 16)
            *(vf_unaligned *)(job->qkv_out + i) += *(const vf_unaligned *)(job->call->beside + i);
}

/* Whether rows that nobody reads are left out behind this layer's attention. */
static inline int NAME(leaves_out)(const Job *job, const Layer *layer) {
    return job->rest && layer == job->model->layers + job->call->last - 1;
}

/* A piece without the rows before its first and behind its last one that is read. What selects blocks looks at all of them. */
static Piece NAME(of_read_rows)(const Job *job, Piece piece) {
    const int32_t *places = job->places + piece.segment->start;
    if (job->call->blocks && piece.segment->keep) return piece;
    while (piece.from < piece.to && places[piece.from] < 0) piece.from++;
    while (piece.from < piece.to && places[piece.to - 1] < 0) piece.to--;
    return piece;
}

/* The rows that are read become neighbours, ascending, so that none is written before it has been read. */
static void NAME(close_up)(const Job *job, long attended, Stage *stage) {
    const long W = job->model->width;
    NAME(input) *inputs = job->attended;
    if (claim(stage, 1) == 0) {
        for (long r = 0; r < job->call->num_rows; r++) {
            const long to = job->places[r];
            if (to < 0 || to == r) continue;
            memcpy(job->residual + to * W, job->residual + r * W, W * sizeof(float));
            memcpy(inputs + INPUTS(to * attended), inputs + INPUTS(r * attended), INPUTS(attended) * sizeof(NAME(input)));
        }
        finish(stage);
    }
    wait_for(stage, 1);
}

/* The stages between the in and the out product of a layer that attends; returns the next stage. */
static Stage *NAME(attend_rows)(const Job *job, const Layer *layer, Stage *stage, Scratch *scratch) {
    const Model *m = job->model;
    const Call *call = job->call;
    const long groups = layer->elsewhere ? 0 : call->num_segments * m->kv_heads, items = attention_items(job);
    if (layer->q_all_norm) NAME(norm_heads)(job, layer, stage++);
    for (long i; (i = claim(stage, groups)) < groups; finish(stage))
        NAME(write)(job, layer, call->segments + i / m->kv_heads, i % m->kv_heads);
    wait_for(stage++, groups);
    if (call->blocks && call->blocks->selects[layer->index]) {
        for (long i; (i = claim(stage, groups)) < groups; finish(stage))
            if (call->segments[i / m->kv_heads].keep)
                NAME(score)(job, layer, call->segments + i / m->kv_heads, i % m->kv_heads, scratch);
        wait_for(stage++, groups);
    }
    for (long i; (i = claim(stage, items)) < items; finish(stage)) {
        Piece piece = piece_of(job, i);
        if (NAME(leaves_out)(job, layer)) piece = NAME(of_read_rows)(job, piece);
        if (piece.from < piece.to) NAME(attend)(job, layer, piece.segment, piece.group, piece.from, piece.to, scratch);
    }
    wait_for(stage++, items);
    return stage;
}

/* One product of some tiles, its outputs scaled if there are scales; `add` only where there are none. */
static void NAME(scaled_product)(const Matrix *w, long first, long last, const NAME(input) *x, const char *coded, long inputs,
                                 long rows, float *out, long stride, const float *scale, const float *bias, int add) {
    NAME(multiply)(w, first, last, x, coded, inputs, rows, out, stride, scale ? 0 : bias, add);
    if (!scale) return;
    for (long r = 0; r < rows; r++)
        for (long i = first * 16; i < last * 16; i += LANES) {
            part y = *(const part_unaligned *)(out + r * stride + i) * *(const part_unaligned *)(scale + i);
            if (bias) y += *(const part_unaligned *)(bias + i);
            *(part_unaligned *)(out + r * stride + i) = y;
        }
}

/* The stages of an MLP, up to what it gives `to` all rows, or adds there; returns the next stage. */
static Stage *NAME(feed_forward)(const Job *job, const Layer *layer, Stage *stage, Scratch *scratch, float *to, int add) {
    const Model *m = job->model;
    const Call *call = job->call;
    const long T = call->num_rows, W = m->width, F = layer->mlp_width, first = layer->gated ? 2 * F : F;
    const long width_tiles = W / 16, tiles = first / 16, units = F / UNIT;
    NAME(input) *normed = scratch->part[3].data;
    char *coded = scratch->part[8].data;
    float *line = scratch->part[9].data;
    long lo, hi;
    for (int prepared = 0; next_share(job, stage, tiles, &lo, &hi); prepared = 1) {
        for (long r = prepared ? T : 0; r < T; r++)
            NAME(read_row)(m, job->residual + r * W, layer->mlp_norm, layer->mlp_shift, normed + INPUTS(r * W));
        if (!prepared) NAME(code_rows)(&layer->gate_up, normed, W, T, line, coded);
        if (call->thresholds) {
            NAME(open_gates)(job, layer, lo, hi, normed, coded);
        } else {
            NAME(scaled_product)(&layer->gate_up, lo, hi, normed, coded, W, T, job->gate_up_out, first, layer->gate_up_scale,
                                 layer->gate_up_bias, 0);
            NAME(gate)(m->activation, layer->gated, job->gate_up_out, first, job->hidden, lo, hi, T);
        }
        finish(stage);
    }
    wait_for(stage++, shares(job, tiles));

    const int32_t *open = 0;
    long num_open = units;
    for (int prepared = 0; next_share(job, stage, width_tiles, &lo, &hi); prepared = 1) {
        if (!prepared && call->thresholds && !layer->down.bits) open = NAME(open_units)(job, units, T, scratch, &num_open);
        if (!prepared) NAME(code_rows)(&layer->down, job->hidden, F, T, line, coded);
        if (open)
            NAME(product_of)(layer->down.tiles, 16 * units, lo, hi, job->hidden, units * STEPS, open, num_open, T, to, W,
                             layer->down_bias, add);
        else
            NAME(multiply)(&layer->down, lo, hi, job->hidden, coded, F, T, to, W, layer->down_bias, add);
        finish(stage);
    }
    wait_for(stage++, shares(job, width_tiles));
    return stage;
}

/* The stages of a layer's attention or mixer, or of both, up to what they add to the stream, or put beside it; returns the next
 * stage. */
static Stage *NAME(look_back)(const Job *job, const Layer *whole, Stage *stage, Scratch *scratch) {
    const Model *m = job->model;
    const Call *call = job->call;
    const long W = m->width, width_tiles = W / 16;
    long T = call->num_rows;
    const int alone = !whole->parallel && !whole->beside && !whole->out_scale && NAME(adds)(m, whole->attention_end_norm);
    NAME(input) *normed = scratch->part[3].data;
    char *coded = scratch->part[8].data;
    float *line = scratch->part[9].data;
    double *seconds = scratch == job->scratch ? call->attention_seconds : 0; /* the first thread keeps the clock */
    long lo, hi;
    for (const Layer *layer = whole; layer; layer = layer->beside) {
        const long in_stride = layer->mixer ? layer->mixer->stride : m->qkv_stride;
        const long in_tiles = (layer->elsewhere ? m->heads * m->head_dim : in_stride) / 16;
        const long attended = layer->mixer ? layer->mixer->inner : m->heads * m->head_dim;
        for (int prepared = 0; next_share(job, stage, in_tiles, &lo, &hi); prepared = 1) {
            for (long r = prepared ? T : 0; r < T; r++)
                NAME(read_row)(m, job->residual + r * W, layer->attention_norm, layer->attention_shift, normed + INPUTS(r * W));
            if (!prepared) NAME(code_rows)(&layer->qkv, normed, W, T, line, coded);
            NAME(scaled_product)(&layer->qkv, lo, hi, normed, coded, W, T, job->qkv_out, in_stride, layer->qkv_scale,
                                 layer->qkv_bias, 0);
            if (call->beside && layer == m->layers + call->first) NAME(add_beside)(job, lo, hi);
            finish(stage);
        }
        wait_for(stage++, shares(job, in_tiles));

        const double began = seconds ? now() : 0;
        if (layer->mixer)
            stage = NAME(mix_rows)(job, layer, stage, scratch);
        else
            stage = NAME(attend_rows)(job, layer, stage, scratch);
        if (seconds) *seconds += now() - began;
        if (NAME(leaves_out)(job, layer)) {
            if (!(T = job->rest->num_rows)) return stage;
            NAME(close_up)(job, attended, stage++);
        }

        const int add = alone || layer != whole; /* of two, the second is added to the first */
        float *to = alone ? job->residual : job->branch;
        for (int prepared = 0; next_share(job, stage, width_tiles, &lo, &hi); prepared = 1) {
            if (!prepared) NAME(code_rows)(&layer->out, job->attended, attended, T, line, coded);
            NAME(scaled_product)(&layer->out, lo, hi, job->attended, coded, attended, T, to, W, layer->out_scale,
                                 layer->out_bias, add);
            finish(stage);
        }
        wait_for(stage++, shares(job, width_tiles));
    }
    if (!alone && !whole->parallel) NAME(end_branch)(job, T, whole->attention_end_norm, stage++);
    return stage;
}

/* The forward of a span of layers, run by every thread that takes part. Norms are repeated by every thread: cheaper than waiting. */
static void NAME(forward)(const Job *job, Scratch *scratch) {
    const Model *m = job->model;
    const Call *call = job->call;
    const long T = call->num_rows, W = m->width;
    NAME(input) *normed = scratch->part[3].data;
    char *coded = scratch->part[8].data;
    float *line = scratch->part[9].data;
    Stage *stage = job->stages;
    Job rest = *job; /* the same with those rows alone that are read in the end */
    rest.call = job->rest;
    rest.rest = 0;
    long lo, hi;

    for (long r; (r = claim(stage, T)) < T; finish(stage)) {
        if (call->entering)
            memcpy(job->residual + r * W, call->entering + r * W, W * sizeof(float));
        else
            NAME(embed)(job, r);
    }
    wait_for(stage++, T);
    for (long l = call->first; l < call->last; l++) {
        const Layer *layer = m->layers + l;
        if (layer->qkv.tiles) stage = NAME(look_back)(job, layer, stage, scratch); /* else an MLP alone */
        if (NAME(leaves_out)(job, layer)) {
            job = &rest, call = rest.call;
            if (!call->num_rows) return;
        }
        if (!layer->gate_up.tiles && !layer->experts) { /* attention alone, as in an adapter */
            NAME(tap)(job, l + 1, stage++);
            continue;
        }
        const int shared = layer->experts && layer->gate_up.tiles;
        const int add = !shared && NAME(adds)(m, layer->mlp_end_norm);
        float *to = add ? job->residual : job->branch;
        if (layer->gate_up.tiles) stage = NAME(feed_forward)(job, layer, stage, scratch, to, add);
        if (layer->experts) stage = NAME(mix_experts)(job, layer, stage, scratch, to, add || shared);
        if (!add || layer->parallel) NAME(end_branch)(job, call->num_rows, layer->mlp_end_norm, stage++);
        NAME(tap)(job, l + 1, stage++);
    }
    const long M = call->num_wanted, head_tiles = m->logits_stride / 16;
    if (!M) return; /* a span that only hands its rows on */
    for (int prepared = 0; next_share(job, stage, head_tiles, &lo, &hi); prepared = 1) {
        for (long i = prepared ? M : 0; i < M; i++) {
            const float *row = job->residual + (long)call->wanted[i] * W;
            NAME(read_row)(m, row, call->skip_norm ? 0 : m->final_norm, m->final_shift, normed + INPUTS(i * W));
        }
        if (!prepared) NAME(code_rows)(&m->head, normed, W, M, line, coded);
        NAME(multiply)(&m->head, lo, hi, normed, coded, W, M, call->logits, m->logits_stride, m->head_bias, 0);
        for (long i = m->logit_cap || m->logit_scale != 1 ? 0 : M; i < M; i++)
            cap_line(call->logits + i * m->logits_stride, lo * 16, hi * 16, (float)m->logit_scale, (float)m->logit_cap);
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

/* One product, run by every thread that takes part. */
static void NAME(linear)(const Job *job) {
    const Linear *y = job->linear;
    long lo, hi;
    while (next_share(job, job->stages, y->tiles, &lo, &hi)) {
        NAME(multiply)(&y->w, lo, hi, job->inputs, job->coded, y->units * UNIT, y->rows, y->out, y->tiles * 16, y->bias, 0);
        finish(job->stages);
    }
    wait_for(job->stages, shares(job, y->tiles));
}
