/* Paths through a lattice of distributions: methods/diffuspec/search.py defines them, and has the same in Python.
 *
 *     pruned    keeps the fewest best tokens of each slot with the mass `mass`
 *     scored    balance * log of the lattice + (1 - balance) * log of a trigram model
 *     found     the best path of a beam search, or the nodes of all paths, best path first
 *
 * All sums are in double precision and in Python's order, so the two results are equal to the bit. */

enum { MOST_SLOTS = 64 };

/* One order of a trigram model, by context (methods/diffuspec/trigram.py); mirrored in paths.py, as are the others. */
typedef struct {
    int64_t count, wide;     /* number of contexts; whether tokens have 32 bits, not 16 */
    const int64_t *contexts; /* [count], increasing */
    const int32_t *starts;   /* [count + 1] */
    const void *tokens;      /* of each context, increasing */
    const float *own, *below;
} Order;

typedef struct {
    int64_t vocab;
    const float *single; /* [vocab] */
    Order pairs, triples;
} Grams;

typedef struct {
    int64_t slots, top;  /* MOST_SLOTS slots at most */
    const int32_t *ids;  /* [slots][top], best first */
    const float *shares; /* [slots][top] */
    const int32_t *ends; /* [num_ends]: tokens after which nothing follows */
    int64_t num_ends, most;
    double mass, balance;
    const Grams *grams; /* NULL: the lattice decides alone */
    int64_t u, v;       /* the last two tokens of the text */
    int64_t width;      /* of the beam; 0: nodes of a tree */
    int64_t nodes;      /* maximum number; for a path one per slot */
    int64_t count;      /* number of nodes found */
    int32_t *tokens, *parents; /* [nodes] */
    double *logs;              /* [nodes]: log probability in the lattice */
} Search;

/* A slot after pruning. */
typedef struct {
    long count;
    const int32_t *tokens;
    const double *logs;
} Slot;

typedef struct {
    double lost; /* minus its score */
    double log;
    int32_t token, parent, depth; /* depth: of the path that it ends */
} Step;

static int ends_text(const Search *s, int32_t token) {
    for (long i = 0; i < s->num_ends; i++)
        if (s->ends[i] == token) return 1;
    return 0;
}

static long prune_slot(const Search *s, long slot, int32_t *tokens, double *logs) {
    double total = 0;
    long kept = 0;
    for (long i = 0; i < s->top; i++) {
        const int32_t token = s->ids[slot * s->top + i];
        const double share = s->shares[slot * s->top + i];
        if (!(share > 0)) break;
        if (!i || (i < s->most && total < s->mass) || ends_text(s, token)) {
            tokens[kept] = token;
            logs[kept++] = log(share);
        }
        total += share;
    }
    return kept;
}

/* Find the range of a context's entries; return the mass of the order below: 1 for an unseen context. */
static double entries_of(const Order *order, int64_t context, long *begin, long *end) {
    long low = 0, high = order->count;
    while (low < high) {
        const long middle = (low + high) / 2;
        if (order->contexts[middle] < context) low = middle + 1;
        else high = middle;
    }
    *begin = *end = 0;
    if (low == order->count || order->contexts[low] != context) return 1;
    *begin = order->starts[low];
    *end = order->starts[low + 1];
    return order->below[low];
}

static double own_of(const Order *order, long low, long end, int32_t token) {
    long high = end;
    while (low < high) {
        const long middle = (low + high) / 2;
        const int32_t found = order->wide ? ((const int32_t *)order->tokens)[middle] : ((const uint16_t *)order->tokens)[middle];
        if (found == token) return order->own[middle];
        if (found < token) low = middle + 1;
        else high = middle;
    }
    return 0;
}

/* The share of the score that each candidate of a slot adds after u and v. */
static void gains_of(const Search *s, int64_t u, int64_t v, const Slot *slot, double *gains) {
    const Grams *g = s->grams;
    if (!g || s->balance == 1.0) {
        memcpy(gains, slot->logs, slot->count * sizeof(double));
        return;
    }
    long begin[2], end[2];
    const double below_2 = entries_of(&g->pairs, v, begin, end), below_3 = entries_of(&g->triples, u * g->vocab + v, begin + 1, end + 1);
    const double rest = 1 - s->balance;
    for (long i = 0; i < slot->count; i++) {
        const int32_t token = slot->tokens[i];
        const double p = below_2 * (double)g->single[token] + own_of(&g->pairs, begin[0], end[0], token);
        gains[i] = s->balance * slot->logs[i] + rest * log(below_3 * p + own_of(&g->triples, begin[1], end[1], token));
    }
}

/* Order of two paths: where one begins as the other, the shorter is first. */
static int before_path(const int32_t *a, long a_count, const int32_t *b, long b_count) {
    const long both = a_count < b_count ? a_count : b_count;
    for (long i = 0; i < both; i++)
        if (a[i] != b[i]) return a[i] < b[i];
    return a_count < b_count;
}

/* A path of the beam. */
typedef struct {
    double lost;
    long count;
    int32_t tokens[MOST_SLOTS];
    double logs[MOST_SLOTS];
} Beam;

/* Take a path into the best `width`, which are sorted; returns how many there are then. */
static long keep_path(Beam *best, long held, long width, const Beam *path) {
    long at = held;
    while (at && (path->lost < best[at - 1].lost ||
                  (path->lost == best[at - 1].lost && before_path(path->tokens, path->count, best[at - 1].tokens, best[at - 1].count))))
        at--;
    if (at == width) return held;
    const long moved = (held < width ? held : width - 1) - at;
    memmove(best + at + 1, best + at, moved * sizeof(Beam));
    best[at] = *path;
    return held < width ? held + 1 : width;
}

static void find_path(Search *s, const Slot *slots, double *gains, Beam *beam, Beam *grown) {
    long held = 1;
    beam[0].lost = 0;
    beam[0].count = 0;
    for (long slot = 0; slot < s->slots; slot++) {
        long kept = 0;
        for (long i = 0; i < held; i++) {
            Beam *path = beam + i;
            const long count = path->count;
            if (count && ends_text(s, path->tokens[count - 1])) {
                kept = keep_path(grown, kept, s->width, path);
                continue;
            }
            const int64_t v = count ? path->tokens[count - 1] : s->v, u = count > 1 ? path->tokens[count - 2] : count ? s->v : s->u;
            const double lost = path->lost;
            gains_of(s, u, v, slots + slot, gains);
            path->count = count + 1;
            for (long each = 0; each < slots[slot].count; each++) {
                path->lost = lost - gains[each];
                path->tokens[count] = slots[slot].tokens[each];
                path->logs[count] = slots[slot].logs[each];
                kept = keep_path(grown, kept, s->width, path);
            }
            path->lost = lost;
            path->count = count;
        }
        if (!kept) break;
        memcpy(beam, grown, kept * sizeof(Beam));
        held = kept;
    }
    s->count = beam->count < s->nodes ? beam->count : s->nodes;
    for (long i = 0; i < s->count; i++) {
        s->tokens[i] = beam->tokens[i];
        s->parents[i] = (int32_t)i - 1;
        s->logs[i] = beam->logs[i];
    }
}

/* The tokens of the path that a step ends. */
static void path_of(const Search *s, const Step *step, int32_t *tokens) {
    long at = step->depth - 1;
    tokens[at--] = step->token;
    for (int32_t node = step->parent; node >= 0; node = s->parents[node]) tokens[at--] = s->tokens[node];
}

static int before_step(const Search *s, const Step *a, const Step *b) {
    if (a->lost != b->lost) return a->lost < b->lost;
    int32_t path_a[MOST_SLOTS], path_b[MOST_SLOTS];
    path_of(s, a, path_a);
    path_of(s, b, path_b);
    return before_path(path_a, a->depth, path_b, b->depth);
}

/* The steps after a node wait in a heap; returns how many wait. */
static long wait_behind(const Search *s, const Slot *slots, double *gains, Step *heap, long held, int32_t node, long depth, double score) {
    if (depth >= s->slots || (node >= 0 && ends_text(s, s->tokens[node]))) return held;
    const int32_t above = node >= 0 ? s->parents[node] : -1;
    const int64_t v = node >= 0 ? s->tokens[node] : s->v, u = above >= 0 ? s->tokens[above] : node >= 0 ? s->v : s->u;
    gains_of(s, u, v, slots + depth, gains);
    for (long i = 0; i < slots[depth].count; i++) {
        const Step step = {-(score + gains[i]), slots[depth].logs[i], slots[depth].tokens[i], node, (int32_t)depth + 1};
        long at = held++;
        for (; at && before_step(s, &step, heap + (at - 1) / 2); at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
        heap[at] = step;
    }
    return held;
}

static void find_nodes(Search *s, const Slot *slots, double *gains, Step *heap) {
    long held = wait_behind(s, slots, gains, heap, 0, -1, 0, 0);
    for (s->count = 0; held && s->count < s->nodes;) {
        const Step best = heap[0], last = heap[--held];
        long at = 0, below;
        while ((below = 2 * at + 1) < held) {
            if (below + 1 < held && before_step(s, heap + below + 1, heap + below)) below++;
            if (!before_step(s, heap + below, &last)) break;
            heap[at] = heap[below];
            at = below;
        }
        heap[at] = last;
        const int32_t node = (int32_t)s->count++;
        s->tokens[node] = best.token;
        s->parents[node] = best.parent;
        s->logs[node] = best.log;
        held = wait_behind(s, slots, gains, heap, held, node, best.depth, -best.lost);
    }
}

/* Returns 0, or 1 if there was no memory. */
int64_t foretoken_search(Search *s) {
    const long size = s->slots * s->top, steps = s->width ? 0 : (s->nodes + 1) * s->top, beams = 2 * s->width;
    int32_t *tokens = malloc((size + 1) * sizeof(int32_t));
    double *logs = malloc((size + s->top + 1) * sizeof(double));
    Step *heap = malloc((steps + 1) * sizeof(Step));
    Beam *beam = malloc((beams + 1) * sizeof(Beam));
    const int ready = tokens && logs && heap && beam;
    if (ready) {
        Slot slots[MOST_SLOTS];
        for (long i = 0; i < s->slots; i++)
            slots[i] = (Slot){prune_slot(s, i, tokens + i * s->top, logs + i * s->top), tokens + i * s->top, logs + i * s->top};
        if (s->width) find_path(s, slots, logs + size, beam, beam + s->width);
        else find_nodes(s, slots, logs + size, heap);
    }
    free(tokens);
    free(logs);
    free(heap);
    free(beam);
    return !ready;
}
