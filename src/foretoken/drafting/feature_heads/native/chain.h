/* Passes over pairs of a feature and the token after it (drafting/feature_heads/): both form the input of the
 * first layer; in a chain, a row's best or drawn token and its own output are the pair of the next pass. Or passes over tokens
 * alone.
 *
 *     feature, token ── enter ── layers ── head ── best token
 *        ▲       ▲                 │                   │
 *        │       └─────────────────┼───────────────────┘
 *        └──────── norm? ──────────┘
 *
 * A pass is a forward of decoder.c; the result of a row does not depend on the other rows. */

/* The input layer of pairs; structs.py reads its fields. */
typedef struct {
    const float *table;      /* [num_tokens][columns]: the tokens' parts; NULL: they are multiplied */
    const void *embedding;   /* [num_tokens][width], of the model's elements */
    const float *token_norm; /* gain of the norm of an embedding, or NULL */
    Matrix token;            /* from it to its part */
    Matrix feature;          /* the input is this product of the feature plus the token's part; none: the input is the feature,
                                and the part is added to queries, keys and values */
    const float *bias;       /* of the input, or NULL */
    const float *before;     /* gain of the norm of a feature that enters as it is, or NULL */
    const float *behind;     /* gain of the norm through which a row's output becomes a feature, or NULL */
    int64_t num_tokens;
    int64_t columns;         /* of a token's part; 0: tokens enter by themselves, as in any forward, and there are no features */
} Entry;

/* Up to `passes` of them. The first is a forward as any other; of the others every row is one draft. */
typedef struct {
    const Call *first;     /* taps the last depth at the wanted rows; its results hold all passes, one after the other,
                              each of num_wanted rows; of several, the wanted row of each segment is its last one */
    const float *features; /* [num_rows][width] */
    float *entering;       /* [num_rows][width]: workspace */
    float *parts;          /* [num_rows][columns]: workspace */
    uint32_t *elements;    /* [num_rows][width]: workspace */
    int64_t passes;
    const int32_t *most;   /* [num_wanted]: passes of each draft */
    const int32_t *ids;    /* [vocab]: the tokens that the head's columns stand for; NULL: column i is token i */
    int64_t tenths;        /* of `stands` */
    const double *stands;  /* [num_wanted][tenths]: for each step of confidence, the rate at which such a node is accepted */
    const double *least;   /* [num_wanted][2]: least acceptance probability of the first node, and of later ones */
    const int32_t *free;   /* [num_wanted]: first nodes without such a limit */
    double *reach;         /* [num_wanted]: 1 each; of the draft so far */
    const double *temperature; /* [num_wanted]: of the distribution of drawn tokens; 0: take the best one */
    const double *uniforms;    /* [num_wanted][passes][2]: random numbers of each draft's tokens */
    float *weights;            /* [logits_stride]: workspace; NULL: no token is drawn */
    Segment *segments;     /* [num_wanted]: workspace */
    int32_t *positions;    /* [num_wanted]: workspace */
    int32_t *rows;         /* [num_wanted]: 0, 1, 2 ... */
    int64_t made;          /* passes that were made */
    int64_t *counts;       /* [passes]: rows of each */
    int32_t *drafts;       /* [passes][num_wanted]: the draft of each row */
    int32_t *tokens;       /* [passes][num_wanted]: the token of each row; not of the first pass */
} Chain;

static void norm_row(const float *x, const float *gain, long n, float eps, float *to) {
    const float scale = 1.0f / sqrtf(dot(x, x, n) / (float)n + eps);
    for (long i = 0; i < n; i += LANES)
        *(part_unaligned *)(to + i) = *(const part_unaligned *)(x + i) * scale * *(const part_unaligned *)(gain + i);
}

/* Convert floats to the input of a product: elements of the model. */
static void as_elements(const Model *m, const float *from, long n, uint32_t *to) {
    for (long i = 0; i < n; i += LANES) {
        const part x = *(const part_unaligned *)(from + i);
        if (m->bf16)
            narrow_bf16((uint16_t *)to + i, x);
        else
            narrow_f32((float *)to + i, x);
    }
}

/* out [rows][columns] = w x (+ bias); 0: no memory */
static int product_of_rows(Team *team, const Model *m, const Matrix *w, const uint32_t *x, long rows, long columns,
                           long threads, const float *bias, float *out) {
    const Linear y = {.w = *w, .bf16 = m->bf16, .tiles = columns / 16, .units = m->bf16 ? m->width / 2 : m->width,
                      .rows = rows, .threads = threads, .x = x, .out = out, .bias = bias};
    return !foretoken_linear(team, &y);
}

/* The tokens' parts, [rows][columns]; workspace: [rows][width]. Returns 0 if there was no memory. */
static int parts_of_tokens(Team *team, const Model *m, const Entry *e, const int32_t *tokens, long rows, long threads,
                           float *room, uint32_t *elements, float *out) {
    const long W = m->width, units = m->bf16 ? W / 2 : W;
    if (e->table) {
        for (long r = 0; r < rows; r++)
            memcpy(out + r * e->columns, e->table + tokens[r] * e->columns, e->columns * sizeof(float));
        return 1;
    }
    for (long r = 0; r < rows; r++) {
        float *line = room + r * W;
        const char *from = (const char *)e->embedding + tokens[r] * W * (m->bf16 ? 2 : 4);
        for (long i = 0; i < W; i += LANES)
            *(part_unaligned *)(line + i) = m->bf16 ? widen_bf16(from + 2 * i) : widen_f32(from + 4 * i);
        if (e->token_norm) norm_row(line, e->token_norm, W, (float)m->eps, line);
        as_elements(m, line, W, elements + r * units);
    }
    return product_of_rows(team, m, &e->token, elements, rows, e->columns, threads, 0, out);
}

/* The first layer's input for these pairs, and the addend of its projections; returns 0 if there was no memory. */
static int enter_pairs(Team *team, const Model *m, const Entry *e, float *entering, float *parts, uint32_t *elements,
                       const float *features, Call *call) {
    const long W = m->width, rows = call->num_rows, units = m->bf16 ? W / 2 : W;
    if (!e->columns) return 1;
    if (!parts_of_tokens(team, m, e, call->tokens, rows, call->threads, entering, elements, parts)) return 0;
    call->entering = entering;
    if (!e->feature.tiles) {
        for (long r = 0; r < rows; r++)
            if (e->before)
                norm_row(features + r * W, e->before, W, (float)m->eps, entering + r * W);
            else
                memcpy(entering + r * W, features + r * W, W * sizeof(float));
        call->qkv_addend = parts;
        return 1;
    }
    for (long r = 0; r < rows; r++) as_elements(m, features + r * W, W, elements + r * units);
    if (!product_of_rows(team, m, &e->feature, elements, rows, W, call->threads, e->bias, entering)) return 0;
    for (long i = 0; i < rows * W; i += LANES)
        *(part_unaligned *)(entering + i) += *(const part_unaligned *)(parts + i);
    return 1;
}

enum { DRAW_BLOCK = 1024 }; /* of core/randomness.py: for more than two of them, the block is drawn first, then a token in it */

/* The first of some weights after which the running sum exceeds this share of it. */
static long inverted(const float *weights, long count, double share) {
    double total = 0, upto = 0;
    for (long i = 0; i < count; i++) total += weights[i];
    for (long i = 0; i < count; i++)
        if ((upto += weights[i]) > share * total) return i;
    return count - 1;
}

/* Draw a column for a row, as Streams.categorical does but for rounding, and estimate how likely another draw is to agree: the
 * caller draws again, and reads the rows that this prediction missed. */
static long drawn(const Model *m, const float *logits, float peak, double temperature, const double *uniforms, float *weights,
                  float *agrees) {
    const float scale = (float)(1 / temperature);
    const long V = m->vocab, blocks = V > 2 * DRAW_BLOCK ? (V + DRAW_BLOCK - 1) / DRAW_BLOCK : 0;
    double total = 0, squares = 0;
    for (long v = 0; v < V; v += 16) /* rows are padded to whole vectors */
        *(vf_unaligned *)(weights + v) = exponential((*(const vf_unaligned *)(logits + v) - peak) * scale);
    for (long v = 0; v < V; v++) total += weights[v], squares += (double)weights[v] * weights[v];
    *agrees = (float)(sqrt(squares) / total);
    if (!blocks) return inverted(weights, V, uniforms[0]);
    long block = 0, last;
    double upto = 0;
    for (;; block++) {
        last = block + 1 < blocks ? (block + 1) * DRAW_BLOCK : V;
        for (long v = block * DRAW_BLOCK; v < last; v++) upto += weights[v];
        if (upto > uniforms[0] * total || block + 1 == blocks) break;
    }
    return block * DRAW_BLOCK + inverted(weights + block * DRAW_BLOCK, last - block * DRAW_BLOCK, uniforms[1]);
}

/* Whether to extend a draft of `made` nodes after a node of this share: a prediction of its stop rule. The rule itself decides
 * afterwards; wrongly predicted rows are dropped, or read then. */
static int goes_on(const Chain *chain, long draft, long made, float share) {
    if (!(share == share) || made + 2 > chain->most[draft]) return 0;
    const double least = chain->least[2 * draft + (made > 0)];
    const long tenth = (long)((double)share * chain->tenths);
    const double stands = chain->stands[draft * chain->tenths + (tenth < chain->tenths ? tenth : chain->tenths - 1)];
    const int pays = made < chain->free[draft] || chain->reach[draft] * stands > least;
    chain->reach[draft] *= share;
    return pays;
}

/* Returns 0, or 1 if there was no memory for the first pass; a later one for which there is none is not made. */
int64_t foretoken_chain(Team *team, const Model *m, const Entry *e, Chain *chain) {
    const long M = chain->first->num_wanted, W = m->width;
    Call call = *chain->first;
    const float *features = chain->features;
    for (long i = 0; i < M; i++) chain->drafts[i] = (int32_t)i;
    for (chain->made = 0;;) {
        if (!enter_pairs(team, m, e, chain->entering, chain->parts, chain->elements, features, &call) || foretoken_forward(team, m, &call)) return !chain->made;
        const long rows = call.num_wanted, pass = chain->made++;
        if (e->behind)
            for (long i = 0; i < rows; i++) norm_row(call.tapped + i * W, e->behind, W, (float)m->eps, call.tapped + i * W);
        chain->counts[pass] = rows;
        if (chain->made == chain->passes) return 0;
        const int32_t *drafts = chain->drafts + pass * M;
        int32_t *next = chain->drafts + (pass + 1) * M, *tokens = chain->tokens + (pass + 1) * M;
        float *behind = e->columns ? call.tapped + M * W : 0;
        long going = 0;
        for (long i = 0; i < rows; i++) {
            const long draft = drafts[i];
            float share = call.top_shares[i * call.top];
            long column = call.best[i];
            if (chain->weights && chain->temperature[draft] > 0 && share == share)
                column = drawn(m, call.logits + i * m->logits_stride, call.peaks[i], chain->temperature[draft],
                               chain->uniforms + 2 * (draft * chain->passes + pass), chain->weights, &share);
            const long token = chain->ids ? chain->ids[column] : column;
            if (token >= e->num_tokens || !goes_on(chain, draft, pass, share)) continue;
            const Segment *read = chain->first->segments + draft;
            const long place = read->prefix + read->tail + read->rows + pass;
            chain->segments[going] = (Segment){.slot = read->slot, .prefix = place, .start = going, .rows = 1, .committed = read->committed,
                                               .far_slot = read->far_slot, .far = read->far};
            chain->positions[going] = chain->first->positions[chain->first->wanted[draft]] + (int32_t)(1 + pass);
            if (behind) memcpy(behind + going * W, call.tapped + i * W, W * sizeof(float));
            next[going] = (int32_t)draft;
            tokens[going++] = (int32_t)token;
        }
        if (!going) return 0;
        features = call.tapped = behind; /* read before the forward writes there */
        call.num_rows = call.num_segments = call.num_wanted = going;
        call.num_tap_rows = behind ? going : 0;
        call.tokens = tokens, call.positions = chain->positions, call.segments = chain->segments;
        call.wanted = call.tap_rows = chain->rows;
        call.logits += M * m->logits_stride, call.best += M, call.peaks += M;
        call.top_ids += M * call.top, call.top_shares += M * call.top;
    }
}

/* The parts of so many tokens, for a table of them; returns as foretoken_forward does. */
int64_t foretoken_token_parts(Team *team, const Model *m, const Entry *e, const int32_t *tokens, int64_t rows, int64_t threads,
                              float *room, uint32_t *elements, float *out) {
    return !parts_of_tokens(team, m, e, tokens, rows, threads, room, elements, out);
}
