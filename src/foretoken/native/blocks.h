/* Which columns a group of heads looks at: all of them, those of a window, or selected blocks of the prefix.
 *
 * methods/sparse/blocks.py defines the selection; this file must choose the same blocks.
 */

typedef struct {
    long from, to; /* columns from .. to - 1; of all runs but the last, a multiple of 16 of them */
} Run;

/* The fewest columns that a row of a segment sees before itself: of a tree, along its own path. */
static long furthest_look(const Segment *s) {
    if (!s->seen) return s->prefix + s->tail;
    long fewest = s->tail + s->rows;
    for (long r = 0; r < s->rows; r++) {
        long count = 0;
        for (long j = 0; j < s->tail + s->rows; j++) count += s->seen[r * (s->tail + s->rows) + j];
        if (count < fewest) fewest = count;
    }
    return s->prefix + fewest - 1;
}

/* The k-th largest of n floats, k >= 1, none of them NaN; reorders them. */
static float kth_largest(float *x, long n, long k) {
    long low = 0, high = n - 1;
    while (low < high) {
        const float pivot = x[low + (high - low) / 2];
        long i = low, j = high;
        while (i <= j) {
            while (x[i] > pivot) i++;
            while (x[j] < pivot) j--;
            if (i <= j) {
                const float swap = x[i];
                x[i++] = x[j];
                x[j--] = swap;
            }
        }
        if (k - 1 <= j)
            high = j;
        else if (k - 1 >= i)
            low = i;
        else
            break;
    }
    return x[k - 1];
}

/* Scores of one head's blocks from their means or bounds, q being the sum of the group's queries. */
static void score_summaries(const Blocks *b, const float *q, const float *summaries, long D, long num_blocks, float *scores) {
    for (long n = 0; n < num_blocks; n++) {
        if (b->score == MEAN) {
            scores[n] = dot(q, summaries + n * D, D);
            continue;
        }
        const float *least = summaries + n * 2 * D, *largest = least + D; /* of each coordinate */
        vf sum = {0};
        for (long d = 0; d < D; d += 16) {
            const vf x = *(const vf_unaligned *)(q + d);
            sum += vector_max(x * *(const vf_unaligned *)(least + d), x * *(const vf_unaligned *)(largest + d));
        }
        scores[n] = horizontal_sum(sum);
    }
}

/* Add one head's attention weights over each block to the block's score. */
static void add_weights(const float *line, float inverse, long size, long num_blocks, float *scores) {
    for (long n = 0; n < num_blocks; n++) {
        vf sum = {0};
        for (long c = 0; c < size; c += 16) sum += *(const vf_unaligned *)(line + n * size + c);
        scores[n] += horizontal_sum(sum) * inverse;
    }
}

/* Infinity for the blocks of a head that are always kept; NaN ranks last. */
static void fix_scores(const Blocks *b, long num_blocks, float *scores) {
    for (long n = 0; n < num_blocks; n++) {
        if (scores[n] != scores[n]) scores[n] = -INFINITY; /* a broken model */
        if (n < b->sinks || n >= num_blocks - b->locals) scores[n] = INFINITY;
    }
}

/* Another head's scores, added to those of a layer; of a broken model infinities may meet, and come last. */
static void add_scores(const float *from, long num_blocks, float *scores) {
    for (long n = 0; n < num_blocks; n++) {
        scores[n] += from[n];
        if (scores[n] != scores[n]) scores[n] = -INFINITY;
    }
}

/* The blocks of one head that are among the `keep` best of all n scores, ascending; of equal ones the earlier.
 * chosen: the number of blocks, then their indices. `copy` is workspace of n floats. */
static void choose_blocks(const float *scores, float *copy, long n, long keep, long head, long num_blocks, int32_t *chosen) {
    memcpy(copy, scores, n * sizeof(float));
    const float lowest = kth_largest(copy, n, keep);
    long ties = keep, count = 0; /* how many of those that equal the lowest are kept */
    for (long i = 0; i < n; i++) ties -= scores[i] > lowest;
    for (long i = 0; i < (head + 1) * num_blocks; i++)
        if (scores[i] > lowest || (scores[i] == lowest && ties-- > 0))
            if (i >= head * num_blocks) chosen[1 + count++] = (int32_t)(i - head * num_blocks);
    chosen[0] = (int32_t)count;
}

/* The chosen blocks and everything from `rest` to `end`, neighbours joined; returns how many runs there are. */
static long runs_of(const int32_t *chosen, long size, long rest, long end, Run *runs) {
    long count = 0;
    for (long i = 0; i < chosen[0]; i++) {
        const long from = chosen[1 + i] * size;
        if (count && runs[count - 1].to == from)
            runs[count - 1].to = from + size;
        else
            runs[count++] = (Run){from, from + size};
    }
    if (count && runs[count - 1].to == rest)
        runs[count - 1].to = end;
    else
        runs[count++] = (Run){rest, end};
    return count;
}
