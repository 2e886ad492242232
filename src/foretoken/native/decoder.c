/* A decoder of the common anatomies (attention, norms, MLPs or experts) for CPUs, one call per forward.
 *
 * Compiled on the user's machine by build.py, called through ctypes by decoder.py, which checks everything that it hands
 * over (checks.py). Plain C with GCC/Clang vector types; bfloat16 dot products where the processor has them.
 *
 *     types.h      what is handed over                  products.h    packed weights times rows
 *     quantised.h  packed weights of 8 or 4 bits        coded.h       keys and values of 8 bits
 *     vectors.h    exponential, softmax, ranking        attention.h   rotary, keys and values, attention
 *     team.h       threads and their memory             tiles.h       rows over tiles of keys and values
 *     blocks.h     which columns are attended to        gates.h       an MLP that leaves channels out
 *     pieces.h     attention, divided among threads     ssm.h         state-space layers
 *     experts.h    who goes through which expert        mixture.h     a mixture of experts
 *     rows.h       rows between products                forward.h     a span of layers
 *     chain.h      passes over pairs or tokens, drafts  tree.h        the same for trees
 *     lattice.h    a block of masks in one pass         paths.h       paths through a lattice
 *     matrix_unit.h  products of up to 32 rows at a time, where the processor has a unit for them
 */

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "types.h"
#include "vectors.h"
#include "quantised.h"
#include "matrix_unit.h"
#include "coded.h"
#include "team.h"
#include "blocks.h"
#include "pieces.h"
#include "experts.h"

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#define BF16 1
#define NAME(x) x##_bf16
#include "products.h"
#include "tiles.h"
#include "attention.h"
#include "rows.h"
#include "gates.h"
#include "ssm.h"
#include "mixture.h"
#include "forward.h"
#undef UNIT
#undef STEPS
#undef INPUTS
#undef TAKEN
#undef BF16
#undef NAME
#define BF16 0
#define NAME(x) x##_f32
#include "products.h"
#include "tiles.h"
#include "attention.h"
#include "rows.h"
#include "gates.h"
#include "ssm.h"
#include "mixture.h"
#include "forward.h"
#undef UNIT
#undef STEPS
#undef INPUTS
#undef TAKEN
#undef BF16
#undef NAME

int64_t foretoken_abi(void) { return ABI; }

/* Room for `bytes` in a buffer, its content lost; 0 if there is no memory. */
static int room(Buffer *buffer, size_t bytes) {
    if (buffer->size >= bytes) return 1;
    const size_t size = (bytes + bytes / 2 + 63) / 64 * 64; /* half as much again: prefixes grow row by row */
    free(buffer->data);
    buffer->data = aligned_alloc(64, size);
    buffer->size = buffer->data ? size : 0;
    if (buffer->data) memset(buffer->data, 0, size);
    return buffer->data != 0;
}

/* Room for so many stages, all of them cleared. */
static int clear_stages(Team *team, Job *job, long count) {
    if (!room(&team->stages, count * sizeof(Stage))) return 0;
    job->stages = team->stages.data;
    for (long i = 0; i < count; i++) {
        atomic_store_explicit(&job->stages[i].next, 0, memory_order_relaxed);
        atomic_store_explicit(&job->stages[i].done, 0, memory_order_relaxed);
    }
    return 1;
}

static long larger(long a, long b) { return a > b ? a : b; }

/* Everything that a forward writes into but the caller's own arrays. */
static int room_for_forward(Team *team, Job *job, long threads) {
    const Model *m = job->model;
    const Call *call = job->call;
    const long T = call->num_rows, group = m->heads / m->kv_heads;
    const long entered = m->bf16 ? entered_bf16 : entered_f32; /* bytes */
    long projected = m->qkv_stride, mixed = 0, attended = m->heads * m->head_dim, walked = 0, levels = 0;
    for (long i = 0; call->states && i < call->num_segments; i++) levels = larger(levels, call->states->segments[i].levels);
    long gated = T * 2 * m->mlp_width, hidden = gated / 2, choices = 0, routed = 0, pairs = 0; /* routed: scores of a row */
    int beside = m->residual_scale != 1;
    for (long l = call->first; l < call->last; l++) {
        const Experts *experts = m->layers[l].experts;
        if (experts) {
            const long chosen = T * experts->chosen;
            choices = larger(choices, chosen);
            gated = larger(gated, chosen * larger(2 * experts->width, m->width));
            hidden = larger(hidden, chosen * experts->width);
            routed = larger(routed, router_tiles(experts) * 16);
            pairs = larger(pairs, room_for_pairs(experts, T));
        }
        const Layer *y = m->layers + l;
        const Mixer *x = y->beside ? y->beside->mixer : y->mixer;
        beside |= y->attention_end_norm || y->mlp_end_norm || y->parallel || y->beside || y->out_scale;
        beside |= experts && y->gate_up.tiles;
        if (!x) continue;
        projected = larger(projected, x->stride);
        mixed = larger(mixed, x->inner);
        attended = larger(attended, x->inner);
        walked = larger(walked, 2 * x->width + 2 * x->state + levels * x->state * x->width);
    }
    const size_t rows[ROW_BUFFERS] = {T * m->width * 4,
                                      T * projected * 4,
                                      larger(T * mixed, gated) * 4,
                                      T * attended * entered,
                                      hidden * entered,
                                      beside ? T * m->width * 4 : 0,
                                      choices ? T * m->width * entered : 0,
                                      choices * sizeof(int32_t),
                                      choices * sizeof(float),
                                      choices ? T * sizeof(float) : 0,
                                      (T + call->num_wanted + call->num_tap_rows) * sizeof(int32_t)};
    for (int i = 0; i < ROW_BUFFERS; i++)
        if (!room(team->rows + i, rows[i])) return 0;
    job->residual = team->rows[0].data;
    job->qkv_out = team->rows[1].data;
    job->gate_up_out = team->rows[2].data;
    job->attended = team->rows[3].data;
    job->hidden = team->rows[4].data;
    job->branch = team->rows[5].data;
    job->entering = team->rows[6].data;
    job->choices = team->rows[7].data;
    job->shares = team->rows[8].data;
    job->opened = team->rows[9].data;

    const long tokens = panel_tokens(m), folded = tokens * group;
    long most_columns = 0, most_blocks = 0, behind = 0; /* behind: what a tree's rows see beside the prefix, at most */
    for (long i = 0; i < call->num_segments; i++) {
        const Segment *s = call->segments + i;
        if (s->keep && call->blocks->score == EXACT) most_columns = larger(most_columns, s->prefix + s->tail + 16);
        if (s->seen) behind = larger(behind, s->tail + s->rows);
        if (call->blocks) most_blocks = larger(most_blocks, s->prefix / call->blocks->size);
    }
    long coded = 0, line = 0;
    for (long l = call->first; l < call->last; l++) {
        const Layer *y = m->layers + l, *z = y->beside;
        const Experts *x = y->experts;
        const long inputs[8] = {m->width, y->mixer ? y->mixer->inner : m->heads * m->head_dim, m->width, y->mlp_width,
                                m->width, x ? x->width : 0, m->width, z ? z->mixer->inner : 0};
        const Matrix *matrices[8] = {&y->qkv, &y->out, &y->gate_up, &y->down, x ? &x->gate_up : 0, x ? &x->down : 0,
                                     z ? &z->qkv : 0, z ? &z->out : 0};
        for (int i = 0; i < 8; i++) {
            if (!matrices[i] || !matrices[i]->bits) continue;
            coded = larger(coded, T * coded_bytes(matrices[i], inputs[i]));
            line = larger(line, LINES_OF(matrices[i]) * inputs[i]);
        }
    }
    if (m->head.bits) {
        coded = larger(coded, call->num_wanted * coded_bytes(&m->head, m->width));
        line = larger(line, LINES_OF(&m->head) * m->width);
    }
    long rest = -16; /* columns of elsewhere that are not laid out there */
    for (long i = 0; call->elsewhere && i < call->num_segments; i++) {
        const Segment *s = call->segments + i;
        for (long g = 0; g < m->kv_heads; g++)
            rest = larger(larger(rest, 0), s->far - 16L * call->elsewhere->known[s->far_slot * call->elsewhere->groups + g]);
    }
    const Matrix keys = coded_keys(0, m->head_dim);
    const long lines = call->coded ? 24 : 12; /* of scores */
    const size_t parts[PARTS_OF_SCRATCH] = {folded * m->head_dim * entered,
                                            folded * (16 + m->head_dim + 1) * sizeof(float),
                                            larger(lines * larger(TILE, larger(most_columns, behind + 32)), walked) * sizeof(float),
                                            larger(T, call->num_wanted) * m->width * entered,
                                            2 * m->kv_heads * most_blocks * sizeof(float),
                                            larger((most_blocks + 2) * sizeof(Run), larger(m->mlp_width, pairs) * sizeof(int32_t)),
                                            12 * TILE * sizeof(float),
                                            behind * (tokens + folded) * sizeof(float),
                                            coded,
                                            line * sizeof(float),
                                            call->coded ? 2 * folded * coded_bytes(&keys, m->head_dim) : 0,
                                            call->coded ? TILE * (m->head_dim + 2) * sizeof(float) : 0,
                                            routed * sizeof(float),
                                            (rest + 16) * m->head_dim * (m->bf16 ? 2 : 4)};
    const size_t held = team->scratch.size / sizeof(Scratch);
    if (held < (size_t)threads) {
        Scratch *more = realloc(team->scratch.data, threads * sizeof(Scratch));
        if (!more) return 0;
        memset(more + held, 0, (threads - held) * sizeof(Scratch));
        team->scratch = (Buffer){more, threads * sizeof(Scratch)};
    }
    job->scratch = team->scratch.data;
    for (long t = 0; t < threads; t++)
        for (int part = 0; part < PARTS_OF_SCRATCH; part++)
            if (!room(job->scratch[t].part + part, parts[part])) return 0;
    return 1;
}

/* Rows that neither the head nor a tap reads behind the last layer are there for its keys and values alone: nearly all rows
 * of a prompt. What follows its attention is computed without them. */
static void leave_unread_out(Team *team, Job *job, Call *rest) {
    const Call *call = job->call;
    const Layer *last = job->model->layers + call->last - 1;
    const long T = call->num_rows, M = call->num_wanted;
    const int tapped = call->num_taps && call->taps[call->num_taps - 1] == call->last;
    const long N = tapped ? call->num_tap_rows : 0;
    if (call->last <= call->first || M >= T || N >= T) return;
    if (!last->qkv.tiles || last->mixer || last->beside || call->thresholds) return;
    int32_t *places = team->rows[10].data, *wanted = places + T, *tap_rows = wanted + M, count = 0;
    memset(places, 0, T * sizeof(int32_t));
    for (long i = 0; i < M; i++) places[call->wanted[i]] = 1;
    for (long i = 0; i < N; i++) places[call->tap_rows[i]] = 1;
    for (long r = 0; r < T; r++) places[r] = places[r] ? count++ : -1;
    for (long i = 0; i < M; i++) wanted[i] = places[call->wanted[i]];
    for (long i = 0; i < N; i++) tap_rows[i] = places[call->tap_rows[i]];
    if (count == T) return;
    *rest = *call;
    rest->num_rows = count;
    rest->wanted = wanted;
    rest->tap_rows = tap_rows;
    if (!tapped) rest->num_taps = 0;
    job->rest = rest;
    job->places = places;
}

static void run(const Job *job, int thread) {
    const Model *m = job->model;
    if (m && m->bf16)
        forward_bf16(job, job->scratch + thread);
    else if (m)
        forward_f32(job, job->scratch + thread);
    else if (job->linear->bf16)
        linear_bf16(job);
    else
        linear_f32(job);
    leave_matrix_unit();
}

/* Returns 0, or 1 if there was no memory; then nothing has been computed. */
int64_t foretoken_forward(Team *team, const Model *m, const Call *call) {
    const long threads = call->threads < 1 ? 1 : call->threads > MAX_THREADS ? MAX_THREADS : call->threads;
    Job job = {.model = m, .call = call};
    Call rest;
    pthread_mutex_lock(&team->callers);
    const int ready = clear_stages(team, &job, STAGES_OF_LAYER * (call->last - call->first) + 3) &&
                      room_for_forward(team, &job, threads);
    if (ready) leave_unread_out(team, &job, &rest);
    if (ready) together(team, &job, (int)threads);
    pthread_mutex_unlock(&team->callers);
    return !ready;
}

/* Keep a branch of a draft: its rows become neighbours, ascending, so that none is written before it has been read. */
void foretoken_move(const Move *move) {
    for (int64_t layer = 0; layer < move->num_layers; layer++)
        for (int64_t g = 0; g < move->kv_heads; g++) {
            if (!move->keys[layer]) continue; /* it keeps none */
            const size_t bytes = move->row_bytes, at = (move->slot * move->kv_heads + g) * move->capacity * bytes;
            char *keys = (char *)move->keys[layer] + at, *values = (char *)move->values[layer] + at;
            for (int64_t i = 0; i < move->count; i++) {
                if (move->from[i] == move->to + i) continue;
                memcpy(keys + (move->to + i) * bytes, keys + move->from[i] * bytes, bytes);
                memcpy(values + (move->to + i) * bytes, values + move->from[i] * bytes, bytes);
            }
        }
}

/* One linear layer over packed weights, for code that drives layers itself; returns as foretoken_forward does. */
int64_t foretoken_linear(Team *team, const Linear *y) {
    Job job = {.linear = y};
    pthread_mutex_lock(&team->callers);
    const size_t entered = y->bf16 ? 2 * entered_bf16 : entered_f32; /* bytes of a unit */
    const long width = y->units * (y->bf16 ? 2 : 1), coded = y->w.bits ? y->rows * coded_bytes(&y->w, width) : 0;
    const int ready = clear_stages(team, &job, 1) && room(team->rows + 3, y->rows * y->units * entered) &&
                      room(team->rows + 4, coded) && room(team->rows + 2, LINES_OF(&y->w) * width * sizeof(float));
    if (ready) {
        void *inputs = team->rows[3].data;
        float *line = team->rows[2].data;
        job.coded = team->rows[4].data;
        if (y->bf16) {
            job.inputs = inputs_bf16(y->x, y->units, y->rows, inputs);
            code_rows_bf16(&y->w, job.inputs, width, y->rows, line, team->rows[4].data);
        } else {
            job.inputs = inputs_f32(y->x, y->units, y->rows, inputs);
            code_rows_f32(&y->w, job.inputs, width, y->rows, line, team->rows[4].data);
        }
        together(team, &job, (int)y->threads);
    }
    pthread_mutex_unlock(&team->callers);
    return !ready;
}

#include "chain.h"
#include "tree.h"
#include "lattice.h"
#include "paths.h"
