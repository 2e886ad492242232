/* A block of masks after a text, filled in one pass (methods/diffuspec/network.py has the same in Python).
 *
 *     states of fresh rows ── norm, each depth ── context product ── keys (normed, rotated), values ── cache
 *     root, last state ── enter product ── + mask of each slot ── layers ── head                       decoder.c
 */

/* Constants of a network; mirrored in lattice.py, as is Fill. */
typedef struct {
    Matrix context, enter;
    const void *embedding;  /* [tokens][width], of the model's elements */
    const float *masks;     /* [slots][width] */
    const float *key_gains; /* [layers][head_dim], or NULL: keys are not normed */
    int64_t depths, target_width, slots;
} Filler;

typedef struct {
    Call *call;              /* `slots` rows of each request; receives the inputs of the layers */
    int64_t rows, requests;
    const float *states;     /* [rows][depths * target_width] */
    const int64_t *slot, *position; /* [rows] */
    const int32_t *roots;    /* [requests] */
    const float *const *lasts; /* [requests]: the normed states of the row before the root; may point into `fused` */
    float *fused;            /* [rows][depths * target_width]: the states, normed */
    float *product;          /* [rows][columns of the context product]: workspace */
    float *entered, *entering; /* [requests][width], [requests * slots][width]: workspace */
    uint32_t *elements;      /* workspace for the inputs of both products */
} Fill;

static void norm_plain(const float *x, long n, float eps, float *to) {
    const float scale = 1.0f / sqrtf(dot(x, x, n) / (float)n + eps);
    for (long i = 0; i < n; i += LANES) *(part_unaligned *)(to + i) = *(const part_unaligned *)(x + i) * scale;
}

static int product_over(Team *team, const Model *m, const Matrix *w, const uint32_t *x, long rows, long inputs, long columns,
                        long threads, float *out) {
    const Linear y = {.w = *w, .bf16 = m->bf16, .tiles = columns / 16, .units = m->bf16 ? inputs / 2 : inputs,
                      .rows = rows, .threads = threads, .x = x, .out = out};
    return !foretoken_linear(team, &y);
}

/* Keys and values of a row in every layer, into the cache. */
static void keep_context(const Model *m, const Filler *f, const Call *call, float *product, long slot, long position) {
    const long d = m->head_dim, G = m->kv_heads, all = m->num_layers * G * d, unit = m->bf16 ? 2 : 4;
    for (long l = 0; l < m->num_layers; l++) {
        const Layer *layer = m->layers + l;
        const Angles *angles = call->angles + layer->angles;
        const long half = layer->rot_dim / 2;
        for (long g = 0; g < G; g++) {
            float *key = product + (l * G + g) * d;
            const float *value = key + all, *cos = angles->cos + position * half, *sin = angles->sin + position * half;
            if (f->key_gains) norm_row(key, f->key_gains + l * d, d, (float)m->eps, key);
            for (long i = 0; i < half; i++) {
                const float left = key[i], right = key[i + half];
                key[i] = left * cos[i] - right * sin[i];
                key[i + half] = right * cos[i] + left * sin[i];
            }
            const long at = ((slot * G + g) * call->capacity + position) * d * unit;
            as_elements(m, key, d, (uint32_t *)((char *)call->keys[l] + at));
            as_elements(m, value, d, (uint32_t *)((char *)call->values[l] + at));
        }
    }
}

/* Returns 0, or 1 if there was no memory. */
int64_t foretoken_fill(Team *team, const Model *m, const Filler *f, const Fill *fill) {
    Call *call = fill->call;
    const long W = m->width, F = f->depths * f->target_width, columns = 2 * m->num_layers * m->kv_heads * m->head_dim;
    const long units = m->bf16 ? F / 2 : F, entered = m->bf16 ? (W + F) / 2 : W + F;
    for (long r = 0; r < fill->rows; r++) {
        for (long depth = 0; depth < F; depth += f->target_width)
            norm_plain(fill->states + r * F + depth, f->target_width, (float)m->eps, fill->fused + r * F + depth);
        as_elements(m, fill->fused + r * F, F, fill->elements + r * units);
    }
    if (fill->rows && !product_over(team, m, &f->context, fill->elements, fill->rows, F, columns, call->threads, fill->product)) return 1;
    for (long r = 0; r < fill->rows; r++) keep_context(m, f, call, fill->product + r * columns, fill->slot[r], fill->position[r]);
    for (long a = 0; a < fill->requests; a++) {
        const long element = m->bf16 ? 2 : 4;
        char *to = (char *)(fill->elements + a * entered);
        memcpy(to, (const char *)f->embedding + fill->roots[a] * W * element, W * element);
        as_elements(m, fill->lasts[a], F, (uint32_t *)(to + W * element));
    }
    if (!product_over(team, m, &f->enter, fill->elements, fill->requests, W + F, W, call->threads, fill->entered)) return 1;
    for (long a = 0; a < fill->requests; a++)
        for (long slot = 0; slot < f->slots; slot++)
            for (long i = 0; i < W; i += LANES)
                *(part_unaligned *)(fill->entering + (a * f->slots + slot) * W + i) =
                    *(const part_unaligned *)(fill->entered + a * W + i) + *(const part_unaligned *)(f->masks + slot * W + i);
    call->entering = fill->entering;
    return foretoken_forward(team, m, call);
}
