/* How attention is divided among threads: a piece is a group of heads of one segment, or a panel of the rows of that. Where
 * these are few and columns are many, it is one span of the columns: its sums go to the job's `span_sums`, and are put together
 * in the next stage. A row's sums are found and added span by span in either case, so its bits are the same. */

typedef struct {
    const Segment *segment;
    long group, from, to; /* rows of the segment */
    long span;            /* or -1: all of them */
} Piece;

/* Whether the layer projects and writes keys of its own. */
static inline int writes_keys(const Layer *layer) { return !layer->external_kv && layer->kv_layer == layer->index; }

/* Floats of a projected row before its keys. */
static inline long keys_at(const Model *m, const Layer *layer) { return (layer->opens ? 2 : 1) * m->heads * layer->head_dim; }

/* Elements of a head's value that the layer's last product reads. */
static inline long value_dim(const Model *m, const Layer *layer) { return layer->latent ? layer->latent->value_dim : layer->head_dim; }

/* Floats of a row before keys and values are expanded, and of the expanded ones, end to end. */
static inline long compressed_floats(const Layer *layer) {
    return layer->latent->query_rank + layer->latent->rank + layer->rot_dim;
}
static inline long expanded_floats(const Model *m, const Layer *layer) {
    return m->heads * (m->head_dim - layer->rot_dim + layer->latent->value_dim);
}

/* Tokens of a panel: as many as their folded rows, one for each query head of a group, fit. */
static inline long panel_tokens(const Model *m, long kv_heads) {
    const long n = m->heads / kv_heads;
    return n < PANEL ? PANEL / n : 1;
}

/* A segment that selects blocks is not divided: its choice is made once. */
static inline long panels_of(const Job *job, long kv_heads, const Segment *s) {
    const long tokens = panel_tokens(job->model, kv_heads);
    return s->keep ? 1 : (s->rows + tokens - 1) / tokens;
}

static long panels_of_all(const Job *job) {
    long count = 0;
    for (long i = 0; i < job->call->num_segments; i++) count += panels_of(job, job->model->kv_heads, job->call->segments + i);
    return count;
}

static inline long columns_of(const Segment *s) { return s->prefix + s->tail + s->rows; }

/* Spans of a segment that are pieces of their own; 0 where it is not divided by them. */
static inline long spans_of(const Job *job, const Layer *layer, const Segment *s) {
    if (!job->span_sums || layer->window || layer->external_kv || s->keep) return 0;
    return (columns_of(s) + SPAN - 1) / SPAN;
}

/* Pieces of a layer; summed: only those of segments divided by spans, each with all of its spans. */
static long attention_items(const Job *job, const Layer *layer, int summed) {
    long count = 0;
    for (const Segment *s = job->call->segments; s < job->call->segments + job->call->num_segments; s++) {
        const long spans = spans_of(job, layer, s);
        count += panels_of(job, layer->kv_heads, s) * (summed ? spans > 0 : spans ? spans : 1);
    }
    return count * layer->kv_heads;
}

/* Piece i. The last rows of a segment come first: they see the most, and threads should end together. */
static Piece piece_of(const Job *job, const Layer *layer, long i, int summed) {
    const long groups = layer->kv_heads, tokens = panel_tokens(job->model, groups);
    for (const Segment *s = job->call->segments;; s++) {
        const long panels = panels_of(job, groups, s), spans = spans_of(job, layer, s);
        const long apart = summed ? spans > 0 : spans ? spans : 1, count = panels * groups * apart;
        if (i >= count) {
            i -= count;
            continue;
        }
        Piece y = {s, i / apart % groups, 0, s->rows, spans && !summed ? i % apart : -1};
        if (panels == 1) return y;
        y.from = (panels - 1 - i / apart / groups) * tokens;
        y.to = y.from + tokens < s->rows ? y.from + tokens : s->rows;
        return y;
    }
}

/* Floats of one span's sums of a row and head: the highest score and 15 that are not used, sums of weights, weighted values. */
static inline long span_floats(const Model *m) { return 32 + m->head_dim; }

static inline float *sums_of_span(const Job *job, long row, long head, long span) {
    return job->span_sums + ((row * job->model->heads + head) * job->most_spans + span) * span_floats(job->model);
}

/* Add a span's sums to those of the spans before it: highest scores, sums of 16 weights, D weighted values. */
static void add_span(float scaling, long D, const float *highest, const float *sums, const float *sofar, float *all_highest,
                     float *all_sums, float *all_sofar) {
    const float top = *highest > *all_highest ? *highest : *all_highest, from = top > -INFINITY ? top : 0;
    const vf before = exponential((vf){0} + (*all_highest - from) * scaling), now = exponential((vf){0} + (*highest - from) * scaling);
    *all_highest = top;
    *(vf *)all_sums = *(const vf *)all_sums * before + *(const vf *)sums * now;
    for (long d = 0; d < D; d += LANES) {
        part_unaligned *to = (part_unaligned *)(all_sofar + d);
        *to = *to * before[0] + *(const part_unaligned *)(sofar + d) * now[0];
    }
}
