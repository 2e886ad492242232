/* Drives the native decoder without Python, for sanitizers: chunks, a tree and its branch, windows, taps, selected
 * blocks, open gates, every way to norm, rotate and cap, experts, quantised weights, chains of passes over pairs, blocks of
 * masks, searches through lattices, several threads, two teams at once, and a fork. Exits with 0 if every forward gives the same bits as single rows on one thread.
 *
 *     driver          everything
 *     driver nofork   without the fork
 *     driver bits     single rows and chunks only; prints a hash of each kind's bits, for comparing processors */

#include "unit.c" /* all sources, see variants.unit */

#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

enum { WIDTH = 64, HEADS = 4, GROUPS = 2, HEAD_DIM = 32, MLP = 96, VOCAB = 48, LAYERS = 2, EXPERTS = 5, CHOSEN = 2, CHANNELS = 32, CAPACITY = 88, ROWS = 80, SLOTS = 2 };

static uint64_t state = 1;

static float noise(void) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (float)(state >> 40) / (1 << 23) - 1.0f;
}

static void *filled(long count, int bf16, float scale, float offset) {
    void *to = aligned_alloc(64, (count * 4 + 63) / 64 * 64);
    for (long i = 0; i < count; i++) {
        union { float f; uint32_t u; } x = {offset + scale * noise()};
        if (bf16)
            ((uint16_t *)to)[i] = (uint16_t)(x.u >> 16);
        else
            ((float *)to)[i] = x.f;
    }
    return to;
}

typedef struct {
    Model model;
    Layer layers[LAYERS];
    Experts experts;
    Angles angles[2];
    void *owned[96];
    int num_owned;
} Decoder;

typedef struct {
    void *keys[LAYERS], *values[LAYERS], *tiled[LAYERS];
    int32_t *known[LAYERS];
} Cache;

static void *own(Decoder *d, void *memory) { return d->owned[d->num_owned++] = memory; }

/* How weights are kept: as elements, or in so many bits, in groups (0: whole rows), with float16 scales or with minimums.
 * uncommon, parallel: the layers do everything that a model can ask for beside the common anatomy. */
typedef struct {
    int bf16, bits;
    long group;
    int half, minimum, uncommon, parallel;
} Kind;

static Matrix matrix(Decoder *d, Kind kind, long outputs, long inputs, float scale) {
    const long tiles = outputs / 16;
    if (!kind.bits) {
        Matrix dense = {.tiles = own(d, filled(outputs * inputs, kind.bf16, scale, 0)), .stride = 16 * inputs * (kind.bf16 ? 2 : 4)};
        return dense;
    }
    Matrix y = {.bits = kind.bits, .group = kind.group ? kind.group : inputs, .half = kind.half, .minimum = kind.minimum,
                .offset = kind.minimum ? 0 : 1 << (kind.bits - 1)};
    const Places at = places_of(&y, inputs);
    const long count = at.groups * at.parameters / (y.half ? 2 : 4);
    y.stride = at.codes + at.all_units * LINE;
    char *data = own(d, aligned_alloc(64, tiles * y.stride));
    for (long t = 0; t < tiles; t++) {
        char *tile = data + t * y.stride;
        memset(tile, 0, at.codes);
        for (long i = 0; i < count; i++)
            if (y.half)
                ((uint16_t *)tile)[i] = (uint16_t)(0x1800 + (int)(900 * (noise() + 1)) + (noise() < 0) * 0x8000);
            else
                ((float *)tile)[i] = scale * noise() / (1 << (kind.bits - 1));
        for (long i = at.codes; i < y.stride; i++) tile[i] = (char)(int)(127 * noise());
    }
    y.tiles = data;
    if (kind.minimum) { /* columns in an order of their own */
        int32_t *order = own(d, malloc(inputs * sizeof(int32_t)));
        for (long i = 0; i < inputs; i++) order[i] = (int32_t)(inputs - 1 - i);
        y.order = order;
    }
    return y;
}

static void build(Decoder *d, Kind kind) {
    const int bf16 = kind.bf16;
    const long qkv = (HEADS + 2 * GROUPS) * HEAD_DIM;
    *d = (Decoder){0};
    for (int l = 0; l < LAYERS; l++)
        d->layers[l] = (Layer){
            .qkv = matrix(d, kind, qkv, WIDTH, 0.2f),
            .out = matrix(d, kind, WIDTH, (long)HEADS * HEAD_DIM, 0.1f),
            .gate_up = matrix(d, kind, 2 * MLP, WIDTH, 0.2f),
            .down = matrix(d, kind, WIDTH, MLP, 0.1f),
            .qkv_bias = own(d, filled(qkv, 0, 0.1f, 0)),
            .attention_norm = own(d, filled(WIDTH, 0, 0.2f, 1)),
            .mlp_norm = own(d, filled(WIDTH, 0, 0.2f, 1)),
            .q_norm = l ? own(d, filled(HEADS * HEAD_DIM, 0, 0.2f, 1)) : 0,
            .k_norm = l ? own(d, filled(GROUPS * HEAD_DIM, 0, 0.2f, 1)) : 0,
            .mlp_width = MLP,
            .gated = 1,
            .window = l ? 7 : 0,
            .rot_dim = l ? HEAD_DIM : HEAD_DIM / 2,
            .angles = l,
            .index = l,
            .head_dim = HEAD_DIM, .kv_heads = GROUPS, .kv_layer = l,
            .factor = 1,
        };
    for (int i = 0; i < 2; i++)
        d->angles[i] = (Angles){own(d, filled(CAPACITY * HEAD_DIM / 2, 0, 1, 0)), own(d, filled(CAPACITY * HEAD_DIM / 2, 0, 1, 0))};
    d->model = (Model){
        .bf16 = bf16, .num_layers = LAYERS, .width = WIDTH, .heads = HEADS, .kv_heads = GROUPS, .head_dim = HEAD_DIM,
        .vocab = VOCAB - 3, .qkv_stride = qkv, .mlp_width = MLP, .logits_stride = VOCAB, .eps = 1e-6, .scaling = 0.2, .logit_scale = 1,
        .embedding_scale = 1, .residual_scale = 1, .layers = d->layers,
        .embedding = own(d, filled(VOCAB * WIDTH, bf16, 1, 0)), .head = matrix(d, kind, VOCAB, WIDTH, 0.3f),
        .final_norm = own(d, filled(WIDTH, 0, 0.2f, 1)),
    };
    Model *m = &d->model;
    Layer *y = d->layers + 1;
    const Kind dense = {.bf16 = bf16};
    if (kind.uncommon || kind.parallel) {
        d->experts = (Experts){
            .router = matrix(d, dense, 16, WIDTH, 0.5f), .gate_up = matrix(d, kind, (long)EXPERTS * 2 * CHANNELS, WIDTH, 0.2f),
            .down = matrix(d, kind, (long)EXPERTS * WIDTH, CHANNELS, 0.1f), .count = EXPERTS, .chosen = CHOSEN,
            .width = CHANNELS, .normed = 1, .opens = kind.parallel, .gated = 1, .groups = 1, .open_groups = 1, .group_best = 1,
        };
        y->experts = &d->experts;
    }
    if (kind.parallel) { /* a parallel block without a gate; a gated MLP beside experts */
        m->centred = 1, m->activation = GELU;
        m->position_embedding = own(d, filled(CAPACITY * WIDTH, bf16, 0.5f, 0));
        m->final_shift = own(d, filled(WIDTH, 0, 0.2f, 0)), m->head_bias = own(d, filled(VOCAB, 0, 0.2f, 0));
        Layer *x = d->layers;
        x->parallel = 1, x->gated = 0;
        x->gate_up = matrix(d, kind, MLP, WIDTH, 0.2f);
        x->gate_up_bias = own(d, filled(MLP, 0, 0.2f, 0)), x->down_bias = own(d, filled(WIDTH, 0, 0.2f, 0));
        x->attention_shift = own(d, filled(WIDTH, 0, 0.2f, 0)), x->mlp_shift = own(d, filled(WIDTH, 0, 0.2f, 0));
        y->gate_up_bias = own(d, filled(2 * MLP, 0, 0.2f, 0));
    }
    if (!kind.uncommon) return;
    m->activation = GELU_TANH, m->interleaved = 1, m->score_cap = 2, m->logit_cap = 4, m->logit_scale = 0.5;
    m->embedding_scale = 3, m->residual_scale = 0.7;
    y->gate_up.tiles = 0;
    y->attention_norm = y->mlp_norm = y->q_norm = y->k_norm = 0;
    y->attention_end_norm = own(d, filled(WIDTH, 0, 0.2f, 1)), y->mlp_end_norm = own(d, filled(WIDTH, 0, 0.2f, 1));
    y->q_all_norm = own(d, filled(HEADS * HEAD_DIM, 0, 0.2f, 1)), y->k_all_norm = own(d, filled(GROUPS * HEAD_DIM, 0, 0.2f, 1));
    y->rot_dim = 0;
}

static Cache new_cache(void) {
    Cache c;
    for (int l = 0; l < LAYERS; l++) {
        c.keys[l] = malloc(SLOTS * GROUPS * CAPACITY * HEAD_DIM * 4);
        c.values[l] = malloc(SLOTS * GROUPS * CAPACITY * HEAD_DIM * 4);
        c.tiled[l] = aligned_alloc(64, SLOTS * GROUPS * ((CAPACITY + 15) / 16) * 16 * HEAD_DIM * 4);
        c.known[l] = calloc(SLOTS * GROUPS, sizeof(int32_t));
    }
    return c;
}

static void free_cache(Cache *c) {
    for (int l = 0; l < LAYERS; l++) free(c->keys[l]), free(c->values[l]), free(c->tiled[l]), free(c->known[l]);
}

/* Logits of `rows` rows behind `prefix`; seen, positions: of a tree, or NULL. */
static void forward(Team *team, const Decoder *d, Cache *c, int threads, long prefix, long rows, const int32_t *tokens,
                    const uint8_t *seen, const int32_t *depths, const Blocks *blocks, const float *thresholds, float *logits) {
    int32_t *positions = malloc(rows * 4), *wanted = malloc(rows * 4), *best = malloc(rows * 4), *ids = malloc(rows * 8);
    float *peaks = malloc(rows * 4), *shares = malloc(rows * 8), *tapped = malloc(rows * WIDTH * 4);
    for (long r = 0; r < rows; r++) positions[r] = (int32_t)(prefix + (depths ? depths[r] : r)), wanted[r] = (int32_t)r;
    const int64_t taps[1] = {1};
    const Segment segment = {.prefix = prefix, .rows = rows, .committed = prefix, .seen = seen,
                             .keep = blocks ? GROUPS * (prefix / blocks->size) : 0};
    const Call call = {
        .num_rows = rows, .num_segments = 1, .num_wanted = rows, .capacity = CAPACITY, .threads = threads, .tokens = tokens,
        .positions = positions, .wanted = wanted, .angles = d->angles, .segments = &segment,
        .blocks = segment.keep ? blocks : 0, .keys = c->keys, .values = c->values, .tiled = c->tiled, .known = c->known,
        .logits = logits, .best = best, .peaks = peaks, .top = 2, .top_ids = ids, .top_shares = shares, .last = LAYERS,
        .num_taps = 1, .num_tap_rows = rows, .taps = taps, .tap_rows = wanted, .tapped = tapped, .thresholds = thresholds,
    };
    if (foretoken_forward(team, &d->model, &call)) exit(3);
    free(positions), free(wanted), free(best), free(ids), free(peaks), free(shares), free(tapped);
}

static void must_equal(const float *a, const float *b, long count, const char *what) {
    if (memcmp(a, b, count * sizeof(float))) {
        fprintf(stderr, "%s: bits differ\n", what);
        exit(2);
    }
}

typedef struct {
    const Decoder *decoder;
    const float *expected;
    const int32_t *tokens;
    int ways;
} Task;

static void print_hash(const Kind *kind, const float *values, long count) {
    uint64_t hash = 14695981039346656037ull; /* FNV-1a */
    for (const unsigned char *at = (const void *)values, *end = at + count * 4; at < end; at++)
        hash = (hash ^ *at) * 1099511628211ull;
    printf("%s %d bits, groups of %ld: %016llx\n", kind->bf16 ? "bfloat16" : "float32", kind->bits, kind->group,
           (unsigned long long)hash);
}

/* Chunks of 13 on a team of one's own. */
static void *chunks(void *argument) {
    const Task *task = argument;
    float *logits = malloc(ROWS * VOCAB * 4), thresholds[ROWS] = {0};
    int32_t chosen[GROUPS * (1 + ROWS / 16)];
    float *summaries = calloc(GROUPS * (ROWS / 16) * 2 * HEAD_DIM, 4), *scores = calloc(GROUPS * (ROWS / 16), 4);
    const float *of_layers[LAYERS] = {summaries, 0};
    const uint8_t selects[LAYERS] = {1};
    Team *team = foretoken_team_new();
    for (int way = 0; way < task->ways; way++) {
        if (way == 1 && !task->decoder->layers->gated) continue;
        /* dense; with every gate open; with every block kept, by each of the scores */
        const Blocks blocks = {.size = 16, .sinks = 1, .locals = 1, .sets = GLOBAL,
                               .score = way == 2 ? MEAN : way == 3 ? BOUNDS : EXACT, .capacity = ROWS / 16,
                               .most = ROWS / 16, .selects = selects, .summaries = of_layers, .scores = scores,
                               .chosen = chosen};
        Cache cache = new_cache();
        for (long begin = 0; begin < ROWS; begin += 13) {
            const long rows = ROWS - begin < 13 ? ROWS - begin : 13;
            forward(team, task->decoder, &cache, 3, begin, rows, task->tokens + begin, 0, 0, way >= 2 ? &blocks : 0,
                    way == 1 ? thresholds : 0, logits + begin * VOCAB);
        }
        must_equal(logits, task->expected, ROWS * VOCAB, way == 0 ? "chunks" : way == 1 ? "gates" : "blocks");
        free_cache(&cache);
    }
    foretoken_team_free(team);
    free(logits), free(summaries), free(scores);
    return 0;
}

/* A root with two chains: 0 -> 1 -> 3 -> 5, 0 -> 2 -> 4; the first is that of single rows, and is committed. */
static void tree(const Decoder *d, const int32_t *tokens, const float *expected) {
    enum { PREFIX = 37, NODES = 6 };
    const int32_t depths[NODES] = {0, 1, 1, 2, 2, 3}, parents[NODES] = {-1, 0, 0, 1, 2, 3};
    int32_t drafted[NODES];
    uint8_t seen[NODES * NODES] = {0};
    float *logits = malloc(ROWS * VOCAB * 4);
    for (int i = 0; i < NODES; i++) {
        drafted[i] = i == 2 || i == 4 ? 1 : tokens[PREFIX + depths[i]];
        for (int j = i; j >= 0; j = parents[j]) seen[i * NODES + j] = 1;
    }
    Team *team = foretoken_team_new();
    Cache cache = new_cache();
    forward(team, d, &cache, 2, 0, PREFIX, tokens, 0, 0, 0, 0, logits);
    forward(team, d, &cache, 2, PREFIX, NODES, drafted, seen, depths, 0, 0, logits);
    const int64_t from[3] = {PREFIX + 1, PREFIX + 3, PREFIX + 5};
    for (int i = 0; i < 3; i++)
        must_equal(logits + (from[i] - PREFIX) * VOCAB, expected + (PREFIX + 1 + i) * VOCAB, VOCAB, "tree");
    int64_t kv_heads[LAYERS], row_bytes[LAYERS];
    for (int l = 0; l < LAYERS; l++) kv_heads[l] = GROUPS, row_bytes[l] = HEAD_DIM * (d->model.bf16 ? 2 : 4);
    const Move move = {.num_layers = LAYERS, .kv_heads = kv_heads, .capacity = CAPACITY,
                       .row_bytes = row_bytes, .to = PREFIX + 1, .count = 3,
                       .keys = cache.keys, .values = cache.values, .from_rows = from};
    foretoken_move(&move);
    const long begin = PREFIX + 4;
    forward(team, d, &cache, 2, begin, ROWS - begin, tokens + begin, 0, 0, 0, 0, logits);
    must_equal(logits, expected + begin * VOCAB, (ROWS - begin) * VOCAB, "after the branch");
    free_cache(&cache);
    foretoken_team_free(team);
    free(logits);
}

enum { PASSES = 4, DRAFTS = 2, FIRST = 5 }; /* rows of the first pass: 4 of one draft, 1 of the other */

/* What passes give: one behind the other, each of DRAFTS rows. */
typedef struct {
    float logits[PASSES * DRAFTS * VOCAB], peaks[PASSES * DRAFTS], shares[PASSES * DRAFTS], following[PASSES * DRAFTS * WIDTH];
    int32_t best[PASSES * DRAFTS], ids[PASSES * DRAFTS];
} Given;

/* Passes of some drafts; those but the first are foreseen to be of all drafts, or of the first two of the second one. */
static long read_on(Team *team, const Decoder *d, const Entry *e, Cache *c, int threads, const Segment *segments, long drafts,
                    const int32_t *tokens, const int32_t *positions, const int32_t *wanted, long rows, const float *features,
                    long passes, const double *uniforms, Given *given) {
    static const double stands[2 * DRAFTS] = {1, 1, 1, 1}, least[2 * DRAFTS] = {0};
    const int32_t most[DRAFTS] = {PASSES, 2}, none[DRAFTS] = {0}, in_order[DRAFTS] = {0, 1};
    int32_t ids[VOCAB], next_positions[DRAFTS], of[PASSES * DRAFTS], read[PASSES * DRAFTS];
    int64_t counts[PASSES];
    double reach[DRAFTS] = {1, 1};
    const double temperature[DRAFTS] = {0.7, 0};
    float weights[VOCAB];
    Segment next[DRAFTS];
    for (int i = 0; i < VOCAB; i++) ids[i] = VOCAB - 1 - i;
    const int64_t taps[1] = {LAYERS};
    const Call call = {
        .num_rows = rows, .num_segments = drafts, .num_wanted = drafts, .capacity = CAPACITY, .threads = threads,
        .tokens = tokens, .positions = positions, .wanted = wanted, .angles = d->angles, .segments = segments,
        .keys = c->keys, .values = c->values, .tiled = c->tiled, .known = c->known, .logits = given->logits,
        .best = given->best, .peaks = given->peaks, .top = 1, .top_ids = given->ids, .top_shares = given->shares,
        .last = LAYERS, .num_taps = 1, .num_tap_rows = drafts, .taps = taps, .tap_rows = wanted, .tapped = given->following,
    };
    float *entering = malloc(rows * WIDTH * 4), *parts = malloc(rows * e->columns * 4);
    uint32_t *elements = malloc(rows * WIDTH * 4);
    Chain chain = {.first = &call, .features = features, .entering = entering, .parts = parts, .elements = elements,
                   .passes = passes, .most = most, .ids = ids, .tenths = 2, .stands = stands, .least = least, .free = none,
                   .reach = reach, .temperature = temperature, .uniforms = uniforms, .weights = uniforms ? weights : 0,
                   .segments = next, .positions = next_positions, .rows = (int32_t *)in_order,
                   .counts = counts, .drafts = of, .tokens = read};
    if (foretoken_chain(team, &d->model, e, &chain)) exit(3);
    free(entering), free(parts), free(elements);
    for (long i = 1; i < chain.made; i++)
        if (counts[i] != (i < 2 ? 2 : 1) || (uniforms && read[i * DRAFTS] != VOCAB - 1)) exit(5);
    return chain.made;
}

enum { NODES = 9, WIDEST = 4 };

/* What trees are: of each draft as many nodes as it may have. */
typedef struct {
    int32_t tokens[DRAFTS * NODES], parents[DRAFTS * NODES];
    float shares[DRAFTS * NODES];
    Growth drafts[DRAFTS];
} Trunks;

/* Grow trees behind the pairs of both drafts, the second one less deep. */
static void grow(Team *team, const Decoder *d, const Entry *e, int threads, long width, long top, const Segment *segments,
                 const int32_t *tokens, const int32_t *positions, const int32_t *wanted, const float *features, Trunks *to) {
    enum { MOST = FIRST + DRAFTS * WIDEST };
    Cache cache = new_cache();
    const long columns = e->columns > WIDTH ? e->columns : WIDTH;
    float *logits = malloc(MOST * VOCAB * 4), *tapped = malloc(MOST * WIDTH * 4), *shares = malloc(MOST * WIDEST * 4);
    float *entering = malloc(MOST * WIDTH * 4), *gathered = malloc(MOST * WIDTH * 4), *parts = malloc(MOST * columns * 4), peaks[MOST];
    uint32_t *elements = malloc(MOST * WIDTH * 4);
    int32_t best[MOST], top_ids[MOST * WIDEST], ids[VOCAB];
    const int64_t taps[1] = {LAYERS};
    for (int i = 0; i < VOCAB; i++) ids[i] = VOCAB - 1 - i;
    const Call call = {
        .num_rows = FIRST, .num_segments = DRAFTS, .num_wanted = DRAFTS, .capacity = CAPACITY, .threads = threads,
        .tokens = tokens, .positions = positions, .wanted = wanted, .angles = d->angles, .segments = segments,
        .keys = cache.keys, .values = cache.values, .tiled = cache.tiled, .known = cache.known, .logits = logits,
        .best = best, .peaks = peaks, .top = top, .top_ids = top_ids, .top_shares = shares,
        .last = LAYERS, .num_taps = 1, .num_tap_rows = DRAFTS, .taps = taps, .tap_rows = wanted, .tapped = tapped,
    };
    for (int i = 0; i < DRAFTS; i++)
        to->drafts[i] = (Growth){.most = i ? NODES : PASSES + 1, .deepest = i ? 2 : PASSES, .tokens = to->tokens + i * NODES,
                                 .parents = to->parents + i * NODES, .shares = to->shares + i * NODES};
    Trees trees = {.first = &call, .features = features, .entering = entering, .parts = parts, .gathered = gathered,
                   .elements = elements, .ids = ids, .width = width, .drafts = to->drafts};
    if (foretoken_trees(team, &d->model, e, &trees)) exit(3);
    free(logits), free(tapped), free(shares), free(entering), free(gathered), free(parts), free(elements);
    free_cache(&cache);
}

/* Passes of one call have the bits of single ones: what enters is a table's, multiplied and normed, or a product of the feature. */
static void chain(Decoder *d, Kind kind, const int32_t *tokens) {
    const long qkv = d->model.qkv_stride;
    float *features = filled(FIRST * WIDTH, 0, 1, 0), *table = filled(VOCAB * qkv, 0, 1, 0);
    const float *norm = own(d, filled(WIDTH, 0, 0.2f, 1)), *bias = own(d, filled(WIDTH, 0, 0.2f, 0));
    const Entry entries[3] = {
        {.table = table, .num_tokens = VOCAB, .columns = qkv},
        {.embedding = d->model.embedding, .token_norm = norm, .token = matrix(d, kind, qkv, WIDTH, 0.2f), .before = norm,
         .behind = norm, .num_tokens = VOCAB, .columns = qkv},
        {.embedding = d->model.embedding, .token = matrix(d, kind, WIDTH, WIDTH, 0.2f),
         .feature = matrix(d, kind, WIDTH, WIDTH, 0.2f), .bias = bias, .num_tokens = VOCAB, .columns = WIDTH},
    };
    const Segment segments[DRAFTS] = {{.rows = 4}, {.slot = 1, .start = 4, .rows = 1}};
    const int32_t positions[FIRST] = {0, 1, 2, 3, 0}, wanted[DRAFTS] = {3, 4};
    for (int way = 0; way < 3; way++) {
        Team *team = foretoken_team_new();
        Cache together = new_cache(), apart = new_cache();
        Given *many = calloc(1, sizeof(Given)), *one = calloc(1, sizeof(Given));
        if (read_on(team, d, entries + way, &together, 3, segments, 2, tokens, positions, wanted, FIRST, features, PASSES, 0, many) != PASSES) exit(5);
        read_on(team, d, entries + way, &apart, 1, segments, 2, tokens, positions, wanted, FIRST, features, 1, 0, one);
        for (long pass = 1; pass < PASSES; pass++) {
            const long drafts = pass < 2 ? 2 : 1;
            int32_t read[DRAFTS], at[DRAFTS];
            Segment next[DRAFTS];
            must_equal(many->logits + (pass - 1) * DRAFTS * VOCAB, one->logits, (drafts + (pass == 2)) * VOCAB, "passes");
            for (long i = 0; i < drafts; i++) {
                read[i] = VOCAB - 1 - one->best[i];
                at[i] = positions[wanted[i]] + (int32_t)pass;
                next[i] = (Segment){.slot = i, .prefix = at[i], .start = i, .rows = 1};
            }
            float followed[DRAFTS * WIDTH];
            memcpy(followed, one->following, sizeof followed);
            const int32_t rows[DRAFTS] = {0, 1};
            read_on(team, d, entries + way, &apart, 1, next, drafts, read, at, rows, drafts, followed, 1, 0, one);
        }
        must_equal(many->logits + (PASSES - 1) * DRAFTS * VOCAB, one->logits, VOCAB, "passes");
        must_equal(many->following + (PASSES - 1) * DRAFTS * WIDTH, one->following, WIDTH, "what follows");
        const double none[2 * DRAFTS * PASSES] = {0}; /* by which the first column is drawn, of the first draft */
        Given *drawn_ones = calloc(1, sizeof(Given));
        Cache anew = new_cache();
        if (read_on(team, d, entries + way, &anew, 3, segments, 2, tokens, positions, wanted, FIRST, features, PASSES, none, drawn_ones) != PASSES) exit(5);
        free_cache(&anew), free(drawn_ones);
        Trunks *thin = calloc(1, sizeof(Trunks)), *wide = calloc(2, sizeof(Trunks));
        grow(team, d, entries + way, 3, 1, 1, segments, tokens, positions, wanted, features, thin);
        for (long pass = 0; pass < PASSES; pass++) /* a tree without branches is the chain */
            if (thin->tokens[pass] != VOCAB - 1 - many->best[pass * DRAFTS] || thin->parents[pass] != pass - 1) exit(6);
        if (thin->drafts[0].count != PASSES || thin->drafts[1].count != 2) exit(6);
        for (int i = 0; i < 2; i++)
            grow(team, d, entries + way, i ? 1 : 3, WIDEST, 3, segments, tokens, positions, wanted, features, wide + i);
        must_equal(wide[0].shares, wide[1].shares, DRAFTS * NODES, "trees");
        if (memcmp(wide[0].tokens, wide[1].tokens, sizeof thin->tokens) || wide->drafts[1].count != NODES) exit(6);
        free_cache(&together), free_cache(&apart), free(many), free(one), free(thin), free(wide);
        foretoken_team_free(team);
    }
    free(features), free(table);
}

enum { DEPTHS = 2, STATES = DEPTHS * WIDTH, BLOCK = 4, READ = 5 };

/* A block behind rows that are read at once has the bits that it has behind the same rows, read in two calls. */
static void fill_blocks(Decoder *d, Kind kind) {
    const Kind plain = {.bf16 = kind.bf16};
    const long columns = 2 * LAYERS * GROUPS * HEAD_DIM;
    float *states = filled(READ * STATES, 0, 1, 0), logits[3 * BLOCK * VOCAB];
    const Filler filler = {.context = matrix(d, plain, columns, STATES, 0.2f), .enter = matrix(d, plain, WIDTH, WIDTH + STATES, 0.2f),
                           .embedding = d->model.embedding, .masks = own(d, filled(BLOCK * WIDTH, 0, 1, 0)),
                           .key_gains = own(d, filled(LAYERS * HEAD_DIM, 0, 0.2f, 1)), .depths = DEPTHS, .target_width = WIDTH, .slots = BLOCK};
    Team *team = foretoken_team_new();
    Cache cache = new_cache();
    const int64_t slots[READ] = {0}, positions[READ] = {0, 1, 2, 3, 4};
    const int32_t root = 3, tokens[BLOCK] = {3, 3, 3, 3}, wanted[BLOCK] = {0, 1, 2, 3};
    const uint8_t seen[BLOCK * BLOCK] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    const long steps[3][2] = {{0, READ}, {0, 2}, {2, READ}};
    for (int step = 0; step < 3; step++) {
        const long from = steps[step][0], to = steps[step][1], rows = to - from;
        int32_t at[BLOCK], best[BLOCK], ids[BLOCK];
        float peaks[BLOCK], shares[BLOCK], *fused = malloc(rows * STATES * 4), *product = malloc(rows * columns * 4);
        float entered[WIDTH], entering[BLOCK * WIDTH];
        uint32_t *elements = malloc((rows * STATES > WIDTH + STATES ? rows * STATES : WIDTH + STATES) * 4);
        for (int i = 0; i < BLOCK; i++) at[i] = (int32_t)(to + 1 + i);
        const Segment segment = {.prefix = to, .rows = BLOCK, .committed = to, .seen = seen};
        Call call = {.num_rows = BLOCK, .num_segments = 1, .num_wanted = BLOCK, .capacity = CAPACITY, .threads = 1 + step,
                     .tokens = tokens, .positions = at, .wanted = wanted, .angles = d->angles, .segments = &segment,
                     .keys = cache.keys, .values = cache.values, .tiled = cache.tiled, .known = cache.known,
                     .logits = logits + step * BLOCK * VOCAB, .best = best, .peaks = peaks, .top = 1, .top_ids = ids,
                     .top_shares = shares, .last = LAYERS};
        const float *lasts[1] = {fused + (rows - 1) * STATES};
        const Fill fill = {.call = &call, .rows = rows, .requests = 1, .states = states + from * STATES, .slot = slots,
                           .position = positions + from, .roots = &root, .lasts = lasts, .fused = fused, .product = product,
                           .entered = entered, .entering = entering, .elements = elements};
        if (foretoken_fill(team, &d->model, &filler, &fill)) exit(3);
        free(fused), free(product), free(elements);
        if (!step) { /* anew */
            free_cache(&cache);
            cache = new_cache();
        }
    }
    must_equal(logits, logits + 2 * BLOCK * VOCAB, BLOCK * VOCAB, "blocks");
    free_cache(&cache);
    foretoken_team_free(team);
    free(states);
}

/* Paths and trees through lattices of few levels, of which many have equal scores; a tree's first node begins the path. */
static void search_lattices(void) {
    const int64_t contexts[3] = {0, 2, 5};
    const int32_t starts[4] = {0, 2, 3, 5}, ends[1] = {4};
    const uint16_t tokens[5] = {1, 3, 0, 2, 5};
    const float single[8] = {.2f, .1f, .1f, .2f, .1f, .1f, .1f, .1f}, entries[5] = {.3f, .2f, .5f, .1f, .4f}, below[3] = {.5f, .5f, .5f};
    const Order order = {3, 0, contexts, starts, tokens, entries, below};
    const Grams grams = {8, single, order, order};
    for (int width = 0; width < 4; width++)
        for (long slots = 1; slots < 6; slots++)
            for (long top = 1; top < 6; top++) {
                const long nodes = width ? slots : 7;
                int32_t *ids = malloc(slots * top * 4), *found = malloc(nodes * 4), *parents = malloc(nodes * 4);
                float *shares = malloc(slots * top * 4);
                double *logs = malloc(nodes * sizeof(double));
                for (long i = 0; i < slots * top; i++) ids[i] = (int32_t)((i * 3 + slots) % 8), shares[i] = (i + width) % 3 * 0.1f;
                Search search = {.slots = slots, .top = top, .ids = ids, .shares = shares, .ends = ends, .num_ends = 1, .most = 4,
                                 .mass = 0.9, .balance = 0.5, .grams = top % 2 ? &grams : 0, .u = 0, .v = 2, .width = width,
                                 .nodes = nodes, .tokens = found, .parents = parents, .logs = logs};
                if (foretoken_search(&search) || search.count > nodes) exit(3);
                for (long i = 0; i < search.count; i++)
                    if (parents[i] >= i || found[i] < 0 || found[i] > 7) exit(6);
                free(ids), free(found), free(parents), free(shares), free(logs);
            }
}

int main(int count, char **arguments) {
    int32_t tokens[ROWS];
    float *expected = malloc(ROWS * VOCAB * 4);
    for (int i = 0; i < ROWS; i++) tokens[i] = (7 + 11 * i) % VOCAB;
    const Kind kinds[] = {{0}, {.bf16 = 1}, {.bits = 8}, {.bf16 = 1, .bits = 8, .group = 16, .half = 1},
                          {.bf16 = 1, .bits = 4, .group = 32, .half = 1, .uncommon = 1},
                          {.bits = 4, .group = 32, .minimum = 1}, {.uncommon = 1}, {.bf16 = 1, .uncommon = 1}, {.parallel = 1},
                          {.bf16 = 1, .bits = 8, .parallel = 1}};
    search_lattices();
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        Decoder decoder;
        build(&decoder, kinds[k]);
        Team *team = foretoken_team_new();
        Cache cache = new_cache();
        for (int i = 0; i < ROWS; i++) forward(team, &decoder, &cache, 1, i, 1, tokens + i, 0, 0, 0, 0, expected + i * VOCAB);
        const int bits = count == 2 && !strcmp(arguments[1], "bits");
        Task task = {&decoder, expected, tokens, bits ? 1 : 2};
        if (bits) {
            print_hash(kinds + k, expected, ROWS * VOCAB);
            chunks(&task);
            continue;
        }
        pthread_t other;
        pthread_create(&other, 0, chunks, &task); /* two teams, one model */
        chunks(&task);
        pthread_join(other, 0);
        tree(&decoder, tokens, expected);
        chain(&decoder, kinds[k], tokens);
        fill_blocks(&decoder, kinds[k]);
        if (count < 2 || strcmp(arguments[1], "nofork")) {
            float again[VOCAB];
            forward(team, &decoder, &cache, 3, ROWS, 1, tokens, 0, 0, 0, 0, again);
            const pid_t child = fork();
            if (!child) {
                float found[VOCAB];
                forward(team, &decoder, &cache, 3, ROWS, 1, tokens, 0, 0, 0, 0, found);
                must_equal(found, again, VOCAB, "in a child");
                _exit(0);
            }
            int status = 0;
            if (waitpid(child, &status, 0) != child || status) return 4;
        }
        foretoken_team_free(team);
        free_cache(&cache);
        for (int i = 0; i < decoder.num_owned; i++) free(decoder.owned[i]);
    }
    free(expected);
    puts("fine");
    return 0;
}
