/* State-space layers (Mamba-2): convolution, recurrence and gated norm of rows along their own ancestors.
 *
 *     in product   z | x, B, C | dt of all rows                                  qkv_out
 *     mix          per (request, head): absorb what is pending, then walk the tree depth first
 *     settle       per row: gate and norm; per request: the convolution's last rows
 *     out product
 *
 * See forward/ssm/state.py for what is kept of a request. A row's sums have a fixed order: over the taps of its own path, over
 * the states ascending. Hence its bits do not depend on chunks, trees or neighbours. */

/* Where a row of convolution inputs lies: among the kept ones, in the model's elements, or projected in this forward. */
typedef struct {
    const char *kept;
    const float *fresh;
} NAME(Source);

/* Rows in the order of a request's text: those before the state, the pending ones, those behind the committed prefix. */
static NAME(Source) NAME(source)(const Job *job, const Layer *layer, const Segment *s, const StateSegment *z, long index) {
    const Mixer *x = layer->mixer;
    const States *states = job->call->states;
    const long row = x->channels * (4 / UNIT), place = x->place * states->slots + s->slot, before = x->taps - 1;
    const char *conv = (const char *)states->conv + place * before * row;
    const char *raw = (const char *)states->raw + place * states->capacity * row;
    if (index < before) return (NAME(Source)){conv + index * row, 0};
    index -= before;
    if (index < z->pending + z->stored) return (NAME(Source)){raw + (z->pend + index) * row, 0};
    return (NAME(Source)){0, job->qkv_out + (s->start + index - z->pending - z->stored) * x->stride + x->inner};
}

static inline __attribute__((always_inline)) part NAME(raw)(NAME(Source) from, long channel) {
    return from.kept ? NAME(widen)(from.kept + channel * (4 / UNIT))
                     : NAME(rounded)(*(const part_unaligned *)(from.fresh + channel));
}

/* Convolution and SiLU of `count` channels of a row whose taps are these. */
static void NAME(convolve)(const Mixer *x, const NAME(Source) *taps, long channel, long count, float *to) {
    for (long i = 0; i < count; i += LANES) {
        const long c = channel + i;
        part sum = {0};
        for (long w = 0; w < x->taps; w++)
            sum = fused_part(*(const part_unaligned *)(x->conv + w * x->channels + c), NAME(raw)(taps[w], c), sum);
        if (x->conv_bias) sum += *(const part_unaligned *)(x->conv_bias + c);
        *(part_unaligned *)(to + i) = sum / (1.0f + part_exponential(-sum));
    }
}

/* One row of one head: to = decay * from + k (factor v)^T, and y = to^T q; `to` may be `from`, or NULL. */
static inline __attribute__((always_inline)) void NAME(recur)(const int PARTS_AT_ONCE, const float *from, float *to, const float *v,
                                                              const float *k, const float *q, float decay, float factor,
                                                              long N, long P, float *y) {
    part u[4], sum[4];
    UNROLL for (int p = 0; p < PARTS_AT_ONCE; p++) {
        u[p] = *(const part_unaligned *)(v + p * LANES) * factor;
        sum[p] = (part){0};
    }
    const part kept = all_of_part(decay);
    for (long n = 0; n < N; n++) {
        const part kn = all_of_part(k[n]), qn = all_of_part(q[n]);
        UNROLL for (int p = 0; p < PARTS_AT_ONCE; p++) {
            const part state = fused_part(kn, u[p], kept * *(const part_unaligned *)(from + n * P + p * LANES));
            if (to) *(part_unaligned *)(to + n * P + p * LANES) = state;
            sum[p] = fused_part(qn, state, sum[p]);
        }
    }
    UNROLL for (int p = 0; p < PARTS_AT_ONCE; p++) *(part_unaligned *)(y + p * LANES) = sum[p];
}

static void NAME(recur_row)(const float *from, float *to, const float *v, const float *k, const float *q, float decay,
                            float factor, long N, long P, float *y) {
    long p = 0;
    for (; p + 4 * LANES <= P; p += 4 * LANES)
        NAME(recur)(4, from + p, to ? to + p : 0, v + p, k, q, decay, factor, N, P, y + p);
    for (; p < P; p += LANES) NAME(recur)(1, from + p, to ? to + p : 0, v + p, k, q, decay, factor, N, P, y + p);
}

/* One head of one request. */
static void NAME(mix)(const Job *job, const Layer *layer, const Segment *s, const StateSegment *z, long h, Scratch *scratch) {
    const Mixer *x = layer->mixer;
    const States *states = job->call->states;
    const long N = x->state, P = x->width, H = x->heads, size = N * P, g = h / (H / x->groups);
    const long place = x->place * states->slots + s->slot, first = z->pend + z->pending + z->stored;
    float *base = states->base + (place * H + h) * size, *gates = states->gates + place * states->capacity * 2 * H;
    float *v = scratch->part[2].data, *k = v + P, *q = k + N, *y = q + N, *open = y + P;
    const long at_v = h * P, at_k = x->inner + g * N, at_q = at_k + x->groups * N;
    NAME(Source) taps[MAX_TAPS];

    for (long i = 0; i < z->pending; i++) {
        const float *gate = gates + (z->pend + i) * 2 * H;
        for (long w = 0; w < x->taps; w++) taps[w] = NAME(source)(job, layer, s, z, i + w);
        NAME(convolve)(x, taps, at_v, P, v);
        NAME(convolve)(x, taps, at_k, N, k);
        memset(q, 0, N * sizeof(float));
        NAME(recur_row)(base, base, v, k, q, expf(gate[h]), gate[H + h], N, P, y);
    }
    for (long i = 0; i < z->count; i++) {
        const int32_t *step = z->steps + 3 * i;
        const long row = step[0];
        float decay, factor;
        for (long w = 0; w < x->taps; w++) taps[w] = NAME(source)(job, layer, s, z, z->pending + z->taps[row * x->taps + w]);
        NAME(convolve)(x, taps, at_v, P, v);
        NAME(convolve)(x, taps, at_k, N, k);
        NAME(convolve)(x, taps, at_q, N, q);
        if (row < z->stored) {
            const float *gate = gates + (z->pend + z->pending + row) * 2 * H;
            decay = gate[h];
            factor = gate[H + h];
        } else {
            const long fresh = s->start + row - z->stored;
            const float raw = job->qkv_out[fresh * x->stride + x->inner + x->channels + h] + x->step_bias[h];
            factor = raw > 20.0f ? raw : log1pf(expf(raw));
            if (states->limited[fresh]) factor = factor < x->low ? (float)x->low : factor > x->high ? (float)x->high : factor;
            decay = factor * x->rate[h];
            if (!z->ahead_base) {
                float *gate = gates + (z->pend + z->pending + row) * 2 * H;
                gate[h] = decay;
                gate[H + h] = factor;
            }
        }
        const float *from = step[1] < 0 ? base : open + step[1] * size;
        NAME(recur_row)(from, step[2] < 0 ? 0 : open + step[2] * size, v, k, q, expf(decay), factor, N, P, y);
        if (row < z->stored) continue;
        float *to = job->gate_up_out + (s->start + row - z->stored) * x->inner + h * P;
        for (long p = 0; p < P; p += LANES)
            *(part_unaligned *)(to + p) = fused_part(all_of_part(x->skip[h]), *(const part *)(v + p), *(const part *)(y + p));
    }
    if (z->ahead_base) {
        memcpy(z->ahead_base + (x->place * H + h) * size, open, size * sizeof(float));
        return;
    }
    const long row_bytes = x->channels * (4 / UNIT);
    char *raw = (char *)states->raw + (place * states->capacity + first) * row_bytes;
    const int leads = h % (H / x->groups) == 0; /* of its group: what the group shares is kept once */
    const long begin[3] = {at_v, at_k, at_q}, count[3] = {P, leads ? N : 0, leads ? N : 0};
    for (long r = 0; r < s->rows; r++)
        for (int part_of = 0; part_of < 3; part_of++)
            for (long i = 0; i < count[part_of]; i += LANES) {
                const long c = begin[part_of] + i;
                const float *from = job->qkv_out + (s->start + r) * x->stride + x->inner + c;
                NAME(narrow)(raw + r * row_bytes + c * (4 / UNIT), *(const part_unaligned *)from);
            }
}

/* y times SiLU(z), n elements. */
static void NAME(gate_line)(float *y, const float *z, long n) {
    for (long i = 0; i < n; i += LANES) {
        const part gate = *(const part_unaligned *)(z + i);
        *(part_unaligned *)(y + i) *= gate / (1.0f + part_exponential(-gate));
    }
}

/* Gate and norm of a row, for the out product. */
static void NAME(gated_norm)(const Job *job, const Mixer *x, long row) {
    float *y = job->gate_up_out + row * x->inner;
    const float *z = job->qkv_out + row * x->stride;
    NAME(input) *to = (NAME(input) *)job->attended + INPUTS(row * x->inner);
    if (!x->norm_first) NAME(gate_line)(y, z, x->inner);
    const long group = x->norm_group ? x->norm_group : x->inner;
    for (long begin = 0; begin < x->inner; begin += group) {
        const float *of = y + begin;
        const float scale = x->norm_group ? 1.0f / sqrtf(dot(of, of, group) / (float)group + (float)x->eps) : 1.0f;
        for (long i = begin; i < begin + group; i += LANES)
            *(part_unaligned *)(y + i) = *(const part_unaligned *)(y + i) * scale * *(const part_unaligned *)(x->gain + i);
    }
    if (x->norm_first) NAME(gate_line)(y, z, x->inner);
    for (long i = 0; i < x->inner; i += LANES) NAME(enter)(to + INPUTS(i), *(const part_unaligned *)(y + i));
}

/* The convolution's rows before the next one to be absorbed, and before what follows a long chunk. */
static void NAME(settle)(const Job *job, const Layer *layer, const Segment *s, const StateSegment *z) {
    const Mixer *x = layer->mixer;
    const States *states = job->call->states;
    const long row = x->channels * (4 / UNIT), before = x->taps - 1;
    if (z->ahead_conv) {
        char *to = (char *)z->ahead_conv + x->place * before * row;
        for (long i = 0; i < before; i++) {
            const NAME(Source) from = NAME(source)(job, layer, s, z, z->pending + s->rows + i);
            for (long c = 0; c < x->channels; c += LANES) NAME(narrow)(to + i * row + c * (4 / UNIT), NAME(raw)(from, c));
        }
    }
    char *to = (char *)states->conv + (x->place * states->slots + s->slot) * before * row;
    for (long i = 0; z->pending && i < before; i++) /* ascending: none is written before it has been read */
        memmove(to + i * row, NAME(source)(job, layer, s, z, z->pending + i).kept, row);
}

/* The stages between the in and the out product of a layer with a mixer; returns the next stage. */
static Stage *NAME(mix_rows)(const Job *job, const Layer *layer, Stage *stage, Scratch *scratch) {
    const Call *call = job->call;
    const long heads = layer->mixer->heads, items = call->num_segments * heads, settled = call->num_rows + call->num_segments;
    for (long i; (i = claim(stage, items)) < items; finish(stage))
        NAME(mix)(job, layer, call->segments + i / heads, call->states->segments + i / heads, i % heads, scratch);
    wait_for(stage++, items);
    for (long i; (i = claim(stage, settled)) < settled; finish(stage)) {
        if (i < call->num_rows)
            NAME(gated_norm)(job, layer->mixer, i);
        else
            NAME(settle)(job, layer, call->segments + i - call->num_rows, call->states->segments + i - call->num_rows);
    }
    wait_for(stage++, settled);
    return stage;
}
