/* A mixture of experts in the place of an MLP, or next to one: a router chooses a few of many MLPs for each row.
 *
 *     route     row by row: norm, scores of all experts, the best of them, their shares
 *     group     pairs of a row and an expert that it has chosen, in the order of experts
 *     enter     expert by expert, some tiles at a time: hidden = act(gate) * up, or act(up), of all its pairs
 *     leave     some tiles at a time: each pair's output, expert by expert; then a row's sum, in the order of its choices
 *
 * The weights of an expert are read once, however many rows have chosen it; those of an unchosen expert are not read. A
 * row's scores, choices and sum depend on that row alone. Other rows decide only which rows a product computes together,
 * and no sum of a product depends on that.
 */

/* Size of the memory for the result of pairs_of, in int32. */
static inline long size_of_pairs(const Experts *x, long rows) { return 3 * x->count + 1 + 2 * rows * x->chosen; }

/* Most experts that so many rows can have chosen. Work items are counted by this bound: a thread may read the choices, and so
 * the real number, only after it has claimed an item. */
static inline long most_experts(const Experts *x, long rows) {
    return rows * x->chosen < x->count ? rows * x->chosen : x->count;
}

/* Tiles of an expert's first product. */
static inline long tiles_of_expert(const Experts *x) { return x->width * (1 + x->gated) / 16; }

/* Tiles of an expert that are claimed at a time: few, since experts differ in how many rows they have. */
static inline long tiles_of_item(const Job *job, const Experts *x) {
    const long tiles = tiles_of_expert(x), even = tiles_per_share(job, most_experts(x, job->call->num_rows) * tiles);
    const long most = tiles < 32 ? tiles : 32;
    return even < most ? even : most;
}

/* Tiles of the router: the scores of experts, and the gate of the shared MLP next to them. */
static inline long router_tiles(const Experts *x) { return (x->count + x->opens + 15) / 16; }

typedef struct {
    int32_t *begins; /* [count + 1]: of each expert's pairs */
    int32_t *chosen; /* [num_chosen]: experts that have some, ascending */
    int32_t *rows;   /* of each pair */
    int32_t *pair_of_choice; /* [rows][chosen of a row]: the pair of each choice */
    long num_chosen;
} Pairs;

static Pairs pairs_of(const Job *job, const Experts *x, int32_t *memory) {
    const long E = x->count, count = job->call->num_rows * x->chosen;
    int32_t *next = memory + 2 * E + 1;
    Pairs y = {.begins = memory, .chosen = memory + E + 1, .rows = next + E, .pair_of_choice = next + E + count};
    for (long e = 0; e <= E; e++) y.begins[e] = 0;
    for (long p = 0; p < count; p++) y.begins[job->choices[p] + 1]++;
    for (long e = 0; e < E; e++) {
        if (y.begins[e + 1]) y.chosen[y.num_chosen++] = (int32_t)e;
        y.begins[e + 1] += y.begins[e];
        next[e] = y.begins[e];
    }
    for (long p = 0; p < count; p++) {
        const int32_t place = next[job->choices[p]]++;
        y.rows[place] = (int32_t)(p / x->chosen);
        y.pair_of_choice[p] = place;
    }
    return y;
}

/* The weight of one of several that lie one after the other, each of so many tiles. */
static inline Matrix one_of(const Matrix *all, long which, long tiles) {
    Matrix y = *all;
    y.tiles = (const char *)y.tiles + which * tiles * y.stride;
    return y;
}

/* Scores to exp(score - their highest); returns the sum. */
static float softmaxed(const Experts *x, float *scores, float highest) {
    float whole = 0;
    for (long e = 0; e < x->count; e += LANES)
        *(part_unaligned *)(scores + e) = part_exponential(*(const part_unaligned *)(scores + e) - highest);
    for (long e = 0; e < x->count; e++) whole += scores[e];
    return whole;
}

/* The score by which an expert is chosen, of squashed or softmaxed scores with the sum `whole`. */
static inline float score_of(const Experts *x, const float *scores, float whole, long e) {
    return x->correction ? scores[e] / whole + x->correction[e] : scores[e];
}

/* The groups that experts are chosen from, as bits; of equal groups the earlier. */
static uint64_t open_groups(const Experts *x, const float *scores, float whole) {
    const long each = x->count / x->groups;
    float sums[64];
    uint64_t open = 0;
    for (long g = 0; g < x->groups; g++) {
        float best = -INFINITY, second = -INFINITY;
        for (long e = g * each; e < (g + 1) * each; e++) {
            const float score = score_of(x, scores, whole, e);
            if (score > best) second = best, best = score;
            else if (score > second) second = score;
        }
        sums[g] = x->group_best > 1 && each > 1 ? best + second : best;
    }
    for (long i = 0; i < x->open_groups; i++) {
        long at = -1;
        for (long g = 0; g < x->groups; g++)
            if (!(open >> g & 1) && (at < 0 || sums[g] > sums[at])) at = g;
        open |= (uint64_t)1 << at;
    }
    return open;
}

/* The experts with the highest scores, and their shares; of equal scores the earlier. Overwrites the scores: `count` of them,
 * in whole vectors. A NaN score makes all shares NaN. */
static void choose_experts(const Experts *x, float *scores, int32_t *choices, float *shares) {
    const long E = x->count;
    const int late = !x->sigmoid && !x->correction; /* softmaxed after the choice, which it does not change */
    float whole = 0, sum = 0;
    if (x->sigmoid) {
        for (long e = 0; e < E; e += LANES)
            *(part_unaligned *)(scores + e) = 1.0f / (1.0f + part_exponential(-*(const part_unaligned *)(scores + e)));
        for (long e = 0; e < E; e++) whole += scores[e];
        whole = whole != whole ? whole : 1; /* shares of none: those of sigmoids are their values */
    } else if (!late) {
        float highest = scores[0];
        for (long e = 1; e < E; e++) highest = scores[e] > highest ? scores[e] : highest;
        whole = softmaxed(x, scores, highest);
    }
    const uint64_t open = x->groups > 1 ? open_groups(x, scores, whole) : 1;
    const long each = E / x->groups;
    for (long e = 0, held = 0; e < E; e++) {
        if (!(open >> e / each & 1)) continue;
        const float score = score_of(x, scores, whole, e);
        long at = held;
        while (at && score > score_of(x, scores, whole, choices[at - 1])) at--;
        if (at == x->chosen) continue;
        held += held < x->chosen;
        for (long i = held - 1; i > at; i--) choices[i] = choices[i - 1];
        choices[at] = (int32_t)e;
    }
    if (late) whole = softmaxed(x, scores, scores[choices[0]]);
    for (long j = 0; j < x->chosen; j++) sum += shares[j] = scores[choices[j]];
    if (!x->normed || whole != whole) sum = whole;
    for (long j = 0; j < x->chosen; j++) shares[j] = shares[j] / sum * (float)x->factor;
}
