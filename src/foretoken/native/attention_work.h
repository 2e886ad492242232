/* How attention is divided among threads: a piece is a group of heads of one segment, or a panel of the rows of that. */

typedef struct {
    const Segment *segment;
    long group, from, to; /* rows of the segment */
} Piece;

/* Tokens of a panel: as many as their folded rows, one for each query head of a group, fit. */
static inline long panel_tokens(const Model *m) {
    const long n = m->heads / m->kv_heads;
    return n < PANEL ? PANEL / n : 1;
}

/* A segment that selects blocks is not divided: its choice is made once. */
static inline long panels_of(const Job *job, const Segment *s) {
    const long tokens = panel_tokens(job->model);
    return s->keep ? 1 : (s->rows + tokens - 1) / tokens;
}

static long attention_items(const Job *job) {
    long count = 0;
    for (long i = 0; i < job->call->num_segments; i++) count += panels_of(job, job->call->segments + i);
    return count * job->model->kv_heads;
}

/* Piece i. The last rows of a segment come first: they see the most, and threads should end together. */
static Piece piece_of(const Job *job, long i) {
    const Segment *s = job->call->segments;
    const long groups = job->model->kv_heads, tokens = panel_tokens(job->model);
    while (i >= panels_of(job, s) * groups) i -= panels_of(job, s++) * groups;
    const long panels = panels_of(job, s), panel = panels - 1 - i / groups;
    if (panels == 1) return (Piece){s, i % groups, 0, s->rows};
    const long from = panel * tokens, to = from + tokens;
    return (Piece){s, i % groups, from, to < s->rows ? to : s->rows};
}
