/* The stages of a mixture of experts; see experts.h. */

/* Which experts a row goes through, and the row as they read it. */
static void NAME(route_row)(const Job *job, const Layer *layer, long row, Scratch *scratch) {
    const Model *m = job->model;
    const Experts *x = layer->experts;
    const long W = m->width, tiles = router_tiles(x);
    NAME(input) *entering = (NAME(input) *)job->entering + INPUTS(row * W);
    float *scores = scratch->part[12].data;
    NAME(read_row)(m, job->residual + row * W, layer->mlp_norm, layer->mlp_shift, entering);
    NAME(multiply)(&x->router, 0, tiles, entering, 0, W, 1, scores, tiles * 16, 0, 0);
    if (x->opens) job->opened[row] = 1.0f / (1.0f + part_exponential(all_of_part(-scores[x->count]))[0]);
    choose_experts(x, scores, job->choices + row * x->chosen, job->shares + row * x->chosen);
}

/* The rows of an expert's pairs, end to end; where it has been chosen by all of them, as they lie. */
static const NAME(input) *NAME(gathered)(const Job *job, const Pairs *pairs, long from, long count, NAME(input) *to) {
    const NAME(input) *entering = job->entering;
    const long inputs = INPUTS(job->model->width);
    if (count == job->call->num_rows) return entering;
    for (long i = 0; i < count; i++)
        memcpy(to + i * inputs, entering + pairs->rows[from + i] * inputs, inputs * sizeof(NAME(input)));
    return to;
}

/* Some tiles of what leaves a mixture, of all rows; `pairs_out` [pairs][width] is room for what each pair gives. What it is
 * added to counts as much as the router says. */
static void NAME(leave_experts)(const Job *job, const Experts *x, const Pairs *pairs, long lo, long hi, float *line, char *coded,
                                float *pairs_out, float *to, int add) {
    const long W = job->model->width, F = x->width;
    const NAME(input) *hidden = job->hidden;
    for (long i = 0; i < pairs->num_chosen; i++) {
        const long e = pairs->chosen[i], from = pairs->begins[e], count = pairs->begins[e + 1] - from;
        const Matrix down = one_of(&x->down, e, W / 16);
        NAME(code_rows)(&down, hidden + INPUTS(from * F), F, count, line, coded);
        NAME(multiply)(&down, lo, hi, hidden + INPUTS(from * F), coded, F, count, pairs_out + from * W, W, 0, 0);
    }
    for (long r = 0; r < job->call->num_rows; r++) {
        const float beside = x->opens ? job->opened[r] : 1;
        for (long w = lo * 16; w < hi * 16; w += LANES) {
            part sum = {0};
            for (long j = r * x->chosen; j < (r + 1) * x->chosen; j++)
                sum += *(const part_unaligned *)(pairs_out + pairs->places[j] * W + w) * job->shares[j];
            part_unaligned *at = (part_unaligned *)(to + r * W + w);
            *at = add ? *at * beside + sum : sum;
        }
    }
}

/* The stages of a layer's experts, up to what they add to the stream; returns the next stage. */
static Stage *NAME(mix_experts)(const Job *job, const Layer *layer, Stage *stage, Scratch *scratch, float *to, int add) {
    const Model *m = job->model;
    const Experts *x = layer->experts;
    const long T = job->call->num_rows, W = m->width, F = x->width, tiles = F / 8, width_tiles = W / 16;
    const long each = tiles_of_item(job, x), of_expert = (tiles + each - 1) / each, items = most_experts(x, T) * of_expert;
    char *coded = scratch->part[8].data;
    float *line = scratch->part[9].data;
    Pairs pairs;
    for (long r; (r = claim(stage, T)) < T; finish(stage)) NAME(route_row)(job, layer, r, scratch);
    wait_for(stage++, T);

    int grouped = 0;
    long at = -1; /* the expert whose rows are at hand */
    const NAME(input) *rows = 0;
    for (long i; (i = claim(stage, items)) < items; finish(stage)) {
        if (!grouped) pairs = pairs_of(job, x, scratch->part[5].data);
        grouped = 1;
        if (i / of_expert >= pairs.num_chosen) continue;
        const long e = pairs.chosen[i / of_expert], from = pairs.begins[e], count = pairs.begins[e + 1] - from;
        const long lo = i % of_expert * each, hi = lo + each < tiles ? lo + each : tiles;
        const Matrix gate_up = one_of(&x->gate_up, e, tiles);
        if (e != at) {
            rows = NAME(gathered)(job, &pairs, from, count, scratch->part[3].data);
            NAME(code_rows)(&gate_up, rows, W, count, line, coded);
            at = e;
        }
        float *out = job->gate_up_out + from * 2 * F;
        NAME(multiply)(&gate_up, lo, hi, rows, coded, W, count, out, 2 * F, 0, 0);
        NAME(gate)(m->activation, 1, out, 2 * F, (NAME(input) *)job->hidden + INPUTS(from * F), lo, hi, count);
    }
    wait_for(stage++, items);

    for (long lo, hi; next_share(job, stage, width_tiles, &lo, &hi); finish(stage)) {
        if (!grouped) pairs = pairs_of(job, x, scratch->part[5].data);
        grouped = 1;
        NAME(leave_experts)(job, x, &pairs, lo, hi, line, coded, job->gate_up_out, to, add);
    }
    wait_for(stage++, shares(job, width_tiles));
    return stage;
}
