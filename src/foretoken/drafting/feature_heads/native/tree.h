/* EAGLE-2's dynamic tree over pairs, all levels of it: drafting/reranked_tree.py has it level by level, in the same order.
 *
 *     recorded    of every expanded node its `top` best tokens
 *     expanded    the `width` best of a level by the probability of their path, if that exceeds that of the last of
 *                 the `most` best of all recorded nodes
 *     given       these `most`, in the order in which they were recorded
 *
 * A level is a forward of decoder.c over the expanded nodes of all drafts. */

/* One draft; structs.py reads its fields. */
typedef struct {
    int64_t most, deepest; /* nodes at most, and how long a path may be; both 1 or more */
    double least;          /* a path's probability must exceed this for its last node to be expanded */
    int64_t count;         /* nodes in the result */
    int64_t odd;           /* whether a logit was NaN */
    int32_t *tokens, *parents; /* [most]: a parent is a place among them, or -1 for the root */
    float *shares;             /* [most]: the probability that a node is accepted if its parent is */
} Growth;

/* Several drafts that grow together. */
typedef struct {
    const Call *first;     /* taps the last depth at the wanted rows, which are the last one of each segment; its results
                              hold `width` rows of each, and `top` is `width` at most */
    const float *features; /* [num_rows][width of the model] */
    float *entering, *parts, *gathered; /* workspace for the larger number of rows, of the model's width or `columns` */
    uint32_t *elements;                 /* the same, of the model's width */
    const int32_t *ids;                 /* [vocab]: the tokens that the head's columns stand for; NULL: column i is token i */
    int64_t width;
    Growth *drafts; /* [num_segments] */
} Trees;

typedef struct {
    double reach; /* the probability of its path */
    float share;
    int32_t token, parent, depth;
    int32_t tail; /* where it was read after the prefix */
    int32_t at;   /* its row in the forward that read it; at the end, its place among those that are given */
} TreeNode;

/* A draft while it grows. */
typedef struct {
    TreeNode *nodes;
    int32_t *best, *level, *open;   /* the best of all, and of this level, most probable first; next to read, eldest first */
    long count, held, ranked, going; /* of each of the four */
    long tail;                       /* rows after the prefix */
} Grown;

/* Workspace of all drafts. */
typedef struct {
    Grown *drafts;
    TreeNode *nodes;
    int32_t *numbers, *tokens, *positions, *rows;
    Segment *segments;
    uint8_t *seen;
} Forest;

static void free_forest(Forest *f) {
    free(f->drafts), free(f->nodes), free(f->numbers), free(f->tokens), free(f->positions), free(f->rows);
    free(f->segments), free(f->seen);
}

/* Allocate the workspace; 0 if there is no memory. */
static int allocate_forest(const Trees *t, Forest *f) {
    const long D = t->first->num_segments, rows = D * t->width;
    long nodes = 0, numbers = 0, seen = 0;
    for (long i = 0; i < D; i++) {
        const long levels = t->drafts[i].deepest - 1; /* after the first */
        nodes += t->first->top * (1 + levels * t->width);
        numbers += t->drafts[i].most + 2 * t->width;
        seen += t->width * levels * t->width;
    }
    *f = (Forest){.drafts = calloc(D, sizeof(Grown)), .nodes = malloc(nodes * sizeof(TreeNode)),
                  .numbers = malloc(numbers * sizeof(int32_t)), .tokens = malloc(rows * sizeof(int32_t)),
                  .positions = malloc(rows * sizeof(int32_t)), .rows = malloc(rows * sizeof(int32_t)),
                  .segments = malloc(D * sizeof(Segment)), .seen = malloc(seen + 1)};
    if (!f->drafts || !f->nodes || !f->numbers || !f->tokens || !f->positions || !f->rows || !f->segments || !f->seen) return 0;
    TreeNode *next = f->nodes;
    int32_t *number = f->numbers;
    for (long i = 0; i < D; i++) {
        const long most = t->drafts[i].most;
        f->drafts[i] = (Grown){.nodes = next, .best = number, .level = number + most, .open = number + most + t->width};
        next += t->first->top * (1 + (t->drafts[i].deepest - 1) * t->width);
        number += most + 2 * t->width;
    }
    for (long i = 0; i < rows; i++) f->rows[i] = (int32_t)i;
    return 1;
}

/* Put a node among the `most` best, after those that are as good, which are older; returns how many there are. */
static long ranked_in(const TreeNode *nodes, int32_t *best, long held, long most, long node) {
    const double reach = nodes[node].reach;
    if (held == most && !(reach > nodes[best[held - 1]].reach)) return held;
    long at = held < most ? held++ : most - 1;
    for (; at > 0 && reach > nodes[best[at - 1]].reach; at--) best[at] = best[at - 1];
    best[at] = (int32_t)node;
    return held;
}

static void ascending(int32_t *numbers, long count) {
    for (long i = 1; i < count; i++) {
        const int32_t number = numbers[i];
        long at = i;
        for (; at > 0 && numbers[at - 1] > number; at--) numbers[at] = numbers[at - 1];
        numbers[at] = number;
    }
}

/* Record the children of a node, or of the root (-1), from a row of the forward that read it. */
static void record_children(const Trees *t, const Model *m, const Call *call, long row, long parent, Growth *given, Grown *draft) {
    const float *shares = call->top_shares + row * call->top, *logits = call->logits + row * m->logits_stride;
    TreeNode *nodes = draft->nodes;
    if (!(shares[0] == shares[0])) { /* or there is no distribution although all of them are numbers: then it has no children */
        for (long v = 0; v < m->vocab; v++) given->odd |= !(logits[v] == logits[v]);
        return;
    }
    for (long k = 0; k < call->top; k++) {
        if (!(shares[k] > 0)) continue;
        const int32_t column = call->top_ids[row * call->top + k];
        const double reach = parent < 0 ? 1 : nodes[parent].reach;
        nodes[draft->count] = (TreeNode){.reach = (double)shares[k] * reach, .share = shares[k],
                                         .token = t->ids ? t->ids[column] : column, .parent = (int32_t)parent,
                                         .depth = parent < 0 ? 1 : nodes[parent].depth + 1, .at = -1};
        draft->held = ranked_in(nodes, draft->best, draft->held, given->most, draft->count);
        draft->ranked = ranked_in(nodes, draft->level, draft->ranked, t->width, draft->count++);
    }
}

/* Choose which of the level's best are expanded: those that can have a child among the best of all, and have an embedding. */
static void open_level(const Growth *given, Grown *draft, long num_tokens) {
    double least = given->least;
    if (draft->held == given->most) {
        const double last = draft->nodes[draft->best[draft->held - 1]].reach;
        least = last > least ? last : least;
    }
    draft->going = 0;
    for (long i = 0; i < draft->ranked; i++) {
        const TreeNode *node = draft->nodes + draft->level[i];
        if (node->depth < given->deepest && node->reach > least && node->token < num_tokens)
            draft->open[draft->going++] = draft->level[i];
    }
    ascending(draft->open, draft->going);
    draft->ranked = 0;
}

/* Pack a draft's next rows after `rows` rows: tokens, positions, the attention mask, and the features of their parents. */
static Segment packed_level(const Trees *t, const Forest *f, const Call *call, long number, long rows, long width, uint8_t *seen) {
    Grown *draft = f->drafts + number;
    TreeNode *nodes = draft->nodes;
    const Segment *read = t->first->segments + number;
    const long root = t->first->positions[t->first->wanted[number]], columns = draft->tail + draft->going;
    const Segment segment = {.slot = read->slot, .prefix = read->prefix + read->tail + read->rows, .tail = draft->tail,
                             .start = rows, .rows = draft->going, .committed = read->committed, .seen = seen};
    memset(seen, 0, draft->going * columns);
    for (long i = 0; i < draft->going; i++) {
        TreeNode *node = nodes + draft->open[i];
        const long above = node->parent < 0 ? number : nodes[node->parent].at;
        memcpy(t->gathered + (rows + i) * width, call->tapped + above * width, width * sizeof(float));
        f->tokens[rows + i] = node->token;
        f->positions[rows + i] = (int32_t)(root + node->depth);
        node->tail = (int32_t)(draft->tail + i);
        for (long n = draft->open[i]; n >= 0; n = nodes[n].parent) seen[i * columns + nodes[n].tail] = 1;
    }
    for (long i = 0; i < draft->going; i++) nodes[draft->open[i]].at = (int32_t)(rows + i);
    draft->tail += draft->going;
    return segment;
}

/* The best of all, in the order in which they were recorded. */
static void give_best(Growth *given, Grown *draft) {
    ascending(draft->best, draft->held);
    for (long i = 0; i < draft->held; i++) draft->nodes[draft->best[i]].at = (int32_t)i;
    given->count = draft->held;
    for (long i = 0; i < draft->held; i++) {
        const TreeNode *node = draft->nodes + draft->best[i];
        given->tokens[i] = node->token;
        given->parents[i] = node->parent < 0 ? -1 : draft->nodes[node->parent].at;
        given->shares[i] = node->share;
    }
}

/* Returns 0, or 1 if there was no memory; then nothing has been given. */
int64_t foretoken_trees(Team *team, const Model *m, const Entry *e, Trees *t) {
    const long D = t->first->num_segments, W = m->width;
    Forest f;
    Call call = *t->first;
    const float *features = t->features;
    int64_t failed = !allocate_forest(t, &f);
    for (long level = 0; !failed; level++) {
        failed = !enter_pairs(team, m, e, t->entering, t->parts, t->elements, features, &call) || foretoken_forward(team, m, &call);
        if (failed) break;
        if (e->behind)
            for (long i = 0; i < call.num_wanted; i++) norm_row(call.tapped + i * W, e->behind, W, (float)m->eps, call.tapped + i * W);
        long rows = 0, segments = 0;
        uint8_t *seen = f.seen;
        for (long i = 0; i < D; i++) {
            Grown *draft = f.drafts + i;
            if (!level) record_children(t, m, &call, i, -1, t->drafts + i, draft);
            for (long n = 0; n < draft->going; n++)
                record_children(t, m, &call, draft->nodes[draft->open[n]].at, draft->open[n], t->drafts + i, draft);
            open_level(t->drafts + i, draft, e->num_tokens);
        }
        for (long i = 0; i < D; i++) {
            if (!f.drafts[i].going) continue;
            f.segments[segments] = packed_level(t, &f, &call, i, rows, W, seen);
            seen += f.drafts[i].going * f.drafts[i].tail;
            rows += f.segments[segments++].rows;
        }
        if (!rows) break;
        features = t->gathered;
        call.num_segments = segments, call.segments = f.segments;
        call.num_rows = call.num_wanted = call.num_tap_rows = rows;
        call.tokens = f.tokens, call.positions = f.positions, call.wanted = call.tap_rows = f.rows;
    }
    for (long i = 0; !failed && i < D; i++) give_best(t->drafts + i, f.drafts + i);
    free_forest(&f);
    return failed;
}
