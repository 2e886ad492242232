/* The workspace of a forward, reserved before it begins: all memory that it writes, except the caller's own arrays. */

/* Make a buffer hold `bytes`, its content lost; 0 if there is no memory. */
static int reserve(Buffer *buffer, size_t bytes) {
    if (buffer->size >= bytes) return 1;
    const size_t size = (bytes + bytes / 2 + 63) / 64 * 64; /* half as much again: prefixes grow row by row */
    free(buffer->data);
    buffer->data = aligned_alloc(64, size);
    buffer->size = buffer->data ? size : 0;
    if (buffer->data) memset(buffer->data, 0, size);
    return buffer->data != 0;
}

/* Reserve so many stages, all of them cleared. */
static int clear_stages(Team *team, Job *job, long count) {
    if (!reserve(&team->stages, count * sizeof(Stage))) return 0;
    job->stages = team->stages.data;
    for (long i = 0; i < count; i++) {
        atomic_store_explicit(&job->stages[i].next, 0, memory_order_relaxed);
        atomic_store_explicit(&job->stages[i].done, 0, memory_order_relaxed);
        atomic_store_explicit(&job->stages[i].blocked, 0, memory_order_relaxed);
    }
    return 1;
}

static long larger(long a, long b) { return a > b ? a : b; }

/* Everything that a forward writes into, apart from the caller's own arrays. */
static int reserve_workspace(Team *team, Job *job, long threads) {
    const Model *m = job->model;
    const Call *call = job->call;
    const long T = call->num_rows, inputs_of_layers = m->num_layers * m->input_width;
    const long entered = m->bf16 ? entered_bf16 : entered_f32; /* bytes */
    long projected = m->qkv_stride, mixed = 0, attended = m->heads * m->head_dim, walked = 0, levels = 0;
    for (long i = 0; call->states && i < call->num_segments; i++) levels = larger(levels, call->states->segments[i].levels);
    long gated = T * 2 * larger(m->mlp_width, m->input_width), hidden = gated / 2, choices = 0, routed = 0, pairs = 0; /* routed: scores of a row */
    long columns = 0; /* of a segment that may be divided by its spans */
    for (long i = 0; i < call->num_segments; i++)
        if (!call->segments[i].keep) columns = larger(columns, columns_of(call->segments + i));
    const int divided = columns > SPAN && threads > 1 && panels_of_all(job) * m->kv_heads < 4 * threads;
    job->most_spans = divided ? (columns + SPAN - 1) / SPAN : 0;
    int branched = m->residual_scale != 1 || m->input_width;
    for (long l = call->first; l < call->last; l++) {
        const Experts *experts = m->layers[l].experts;
        if (experts) {
            const long chosen = T * experts->chosen;
            choices = larger(choices, chosen);
            gated = larger(gated, chosen * larger(2 * experts->width, m->width));
            hidden = larger(hidden, chosen * experts->width);
            routed = larger(routed, router_tiles(experts) * 16);
            pairs = larger(pairs, size_of_pairs(experts, T));
        }
        const Layer *y = m->layers + l;
        if (y->latent) mixed = larger(mixed, compressed_floats(y) + expanded_floats(m, y));
        const Mixer *x = y->parallel_mixer ? y->parallel_mixer->mixer : y->mixer;
        branched |= y->attention_end_norm || y->mlp_end_norm || y->parallel || y->parallel_mixer || y->out_scale;
        branched |= experts && y->gate_up.tiles;
        if (!x) continue;
        projected = larger(projected, x->stride);
        mixed = larger(mixed, x->inner);
        attended = larger(attended, x->inner);
        walked = larger(walked, 2 * x->width + 2 * x->state + levels * x->state * x->width);
    }
    const size_t rows[ROW_BUFFERS] = {T * m->width * 4,
                                      T * projected * 4,
                                      larger(T * mixed, gated) * 4,
                                      T * attended * entered,
                                      hidden * entered,
                                      branched ? T * m->width * 4 : 0,
                                      choices ? T * m->width * entered : 0,
                                      choices * sizeof(int32_t),
                                      choices * sizeof(float),
                                      choices ? T * sizeof(float) : 0,
                                      (T + call->num_wanted + call->num_tap_rows) * sizeof(int32_t),
                                      T * m->heads * job->most_spans * span_floats(m) * sizeof(float),
                                      call->adapters ? T * sizeof(LowRank *) : 0,
                                      T * inputs_of_layers * sizeof(float)};
    for (int i = 0; i < ROW_BUFFERS; i++)
        if (!reserve(team->rows + i, rows[i])) return 0;
    job->residual = team->rows[0].data;
    job->qkv_out = team->rows[1].data;
    job->gate_up_out = team->rows[2].data;
    job->attended = team->rows[3].data;
    job->hidden = team->rows[4].data;
    job->branch = team->rows[5].data;
    job->entering = team->rows[6].data;
    job->choices = team->rows[7].data;
    job->shares = team->rows[8].data;
    job->opened = team->rows[9].data;
    job->layer_inputs = team->rows[13].data;
    job->span_sums = divided ? team->rows[11].data : 0;

    long tokens = 0, folded = 0;
    for (long l = call->first; l < call->last; l++) {
        const long kv_heads = m->layers[l].kv_heads, of_panel = kv_heads ? panel_tokens(m, kv_heads) : 0;
        tokens = larger(tokens, of_panel);
        folded = larger(folded, kv_heads ? of_panel * (m->heads / kv_heads) : 0);
    }
    long most_columns = 0, most_blocks = 0, behind = 0; /* the last: most columns of a tree after the prefix */
    for (long i = 0; i < call->num_segments; i++) {
        const Segment *s = call->segments + i;
        if (s->keep && call->blocks->score == EXACT) most_columns = larger(most_columns, columns_of(s) + 15);
        if (s->seen) behind = larger(behind, s->tail + s->rows);
        if (call->blocks) most_blocks = larger(most_blocks, s->prefix / call->blocks->size);
    }
    long coded = 0, line = 0, entering = m->width; /* the last: inputs of products that are not in buffers of all threads */
    for (long l = call->first; l < call->last; l++) {
        const Layer *y = m->layers + l, *z = y->parallel_mixer;
        const Experts *x = y->experts;
        const Latent *c = y->latent;
        if (c) entering = larger(entering, larger(c->rank, c->queries.tiles ? c->query_rank : 0));
        const long inputs[12] = {m->width, y->mixer ? y->mixer->inner : m->heads * value_dim(m, y), m->width, y->mlp_width,
                                 m->width, x ? x->width : 0, m->width, z ? z->mixer->inner : 0,
                                 c ? c->query_rank : 0, c ? c->rank : 0, m->width, m->input_width};
        const Matrix *matrices[12] = {&y->qkv, &y->out, &y->gate_up, &y->down, x ? &x->gate_up : 0, x ? &x->down : 0,
                                      z ? &z->qkv : 0, z ? &z->out : 0, c ? &c->queries : 0, c ? &c->keys_values : 0,
                                      &y->input_gate, &y->input_out};
        for (int i = 0; i < 12; i++) {
            if (!matrices[i] || !matrices[i]->bits) continue;
            coded = larger(coded, T * all_coded_bytes(matrices[i], inputs[i]));
            line = larger(line, lines_of(matrices[i]) * inputs[i]);
        }
    }
    if (m->input_projection.bits) {
        coded = larger(coded, T * all_coded_bytes(&m->input_projection, m->width));
        line = larger(line, lines_of(&m->input_projection) * m->width);
    }
    if (m->head.bits) {
        coded = larger(coded, call->num_wanted * all_coded_bytes(&m->head, m->width));
        line = larger(line, lines_of(&m->head) * m->width);
    }
    long rest = -16; /* external columns that their owner has not laid out */
    for (long i = 0; call->external_kv && i < call->num_segments; i++) {
        const Segment *s = call->segments + i;
        for (long g = 0; g < m->kv_heads; g++)
            rest = larger(larger(rest, 0), s->far - 16L * call->external_kv->known[s->far_slot * call->external_kv->groups + g]);
    }
    const size_t parts[PARTS_OF_SCRATCH] = {folded * m->head_dim * entered,
                                            (2 * folded * (16 + m->head_dim + 1) + 16) * sizeof(float),
                                            larger(12 * larger(TILE, larger(most_columns, behind + 32)), walked) * sizeof(float),
                                            larger(T, call->num_wanted) * entering * entered,
                                            2 * m->kv_heads * most_blocks * sizeof(float),
                                            larger((most_blocks + 2) * sizeof(Run), larger(m->mlp_width, pairs) * sizeof(int32_t)),
                                            12 * TILE * sizeof(float),
                                            behind * (tokens + folded) * sizeof(float),
                                            coded,
                                            line * sizeof(float),
                                            call->coded ? folded * 2 * m->head_dim + (folded + 12) * sizeof(Whole) : 0,
                                            call->coded ? (2 * TILE + 12 * m->head_dim) * sizeof(float) + TILE * m->head_dim : 0,
                                            routed * sizeof(float),
                                            (rest + 16) * m->head_dim * (m->bf16 ? 2 : 4),
                                            T * call->most_rank * sizeof(float),
                                            inputs_of_layers * sizeof(float)};
    const size_t held = team->scratch.size / sizeof(Scratch);
    if (held < (size_t)threads) {
        Scratch *more = realloc(team->scratch.data, threads * sizeof(Scratch));
        if (!more) return 0;
        memset(more + held, 0, (threads - held) * sizeof(Scratch));
        team->scratch = (Buffer){more, threads * sizeof(Scratch)};
    }
    job->scratch = team->scratch.data;
    for (long t = 0; t < threads; t++)
        for (int part = 0; part < PARTS_OF_SCRATCH; part++)
            if (!reserve(job->scratch[t].part + part, parts[part])) return 0;
    return 1;
}

/* Rows that neither the head nor a tap reads after the last layer exist for its keys and values alone: nearly all rows of a
 * prompt. Everything after its attention is computed without them. */
static void leave_unread_out(Team *team, Job *job, Call *rest) {
    const Call *call = job->call;
    const Layer *last = job->model->layers + call->last - 1;
    const long T = call->num_rows, M = call->num_wanted;
    const int tapped = call->num_taps && call->taps[call->num_taps - 1] == call->last;
    const long N = tapped ? call->num_tap_rows : 0;
    if (call->last <= call->first || M >= T || N >= T) return;
    if (!last->qkv.tiles || last->mixer || last->parallel_mixer || call->thresholds) return;
    int32_t *packed_row = team->rows[10].data, *wanted = packed_row + T, *tap_rows = wanted + M, count = 0;
    memset(packed_row, 0, T * sizeof(int32_t));
    for (long i = 0; i < M; i++) packed_row[call->wanted[i]] = 1;
    for (long i = 0; i < N; i++) packed_row[call->tap_rows[i]] = 1;
    for (long r = 0; r < T; r++) packed_row[r] = packed_row[r] ? count++ : -1;
    for (long i = 0; i < M; i++) wanted[i] = packed_row[call->wanted[i]];
    for (long i = 0; i < N; i++) tap_rows[i] = packed_row[call->tap_rows[i]];
    if (count == T) return;
    *rest = *call;
    rest->num_rows = count;
    rest->wanted = wanted;
    rest->tap_rows = tap_rows;
    if (call->adapters) {
        const LowRank **adapters = team->rows[12].data;
        for (long r = 0; r < T; r++)
            if (packed_row[r] >= 0) adapters[packed_row[r]] = call->adapters[r];
        rest->adapters = adapters;
    }
    if (!tapped) rest->num_taps = 0;
    job->rest = rest;
    job->packed_row = packed_row;
}
