/* A decoder of the common anatomy (rotary attention, RMSNorm, gated SiLU MLP) for CPUs, one call per forward.
 *
 * Compiled on the user's machine by build.py, called through ctypes by decoder.py. Plain C with GCC/Clang vector types;
 * bfloat16 dot products where the processor has them. No allocation happens in a forward once buffers have grown.
 */

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define MAX_HEAD_DIM 512
#define ABI 4
#define UNROLL _Pragma("GCC unroll 12")

typedef float vf __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef float vf_unaligned __attribute__((vector_size(64), aligned(4)));
typedef uint32_t vu_unaligned __attribute__((vector_size(64), aligned(4)));

/* Mirrored field by field in decoder.py. */
typedef struct {
    const uint32_t *qkv, *out, *gate_up, *down; /* packed [tile][unit][16] */
    const float *qkv_bias, *out_bias;           /* or NULL */
    const float *attention_norm, *mlp_norm;
    const float *q_norm, *k_norm; /* or NULL */
    int64_t window;               /* 0: full attention */
    int64_t index;
} Layer;

typedef struct {
    uint32_t *data;
    size_t size;
} Buffer;

typedef struct {
    Buffer part[6]; /* queries, keys side by side, scores, normed rows, scores of blocks, runs of columns or open units */
} Scratch;

typedef struct {
    int64_t bf16, num_layers, width, heads, kv_heads, head_dim, rot_dim, vocab;
    int64_t qkv_stride, gate_up_stride, ffn_units, logits_stride; /* in floats, floats, units, floats */
    double eps_, scaling_;
    const Layer *layers;
    const void *embedding;
    const uint32_t *head;
    const float *final_norm;
    const float *cos, *sin; /* [positions][rot_dim / 2] */
    /* below: set by this file */
    float eps, scaling;
    int64_t rows_held, threads_held;
    float *residual, *qkv_out, *gate_up_out;
    uint32_t *attended, *hidden;
    Scratch *scratch;
} Model;

typedef struct {
    int64_t slot, prefix, tail, start, rows;
    int64_t keep;        /* blocks of the prefix to keep in a layer, over all key/value heads; 0: dense attention */
    const uint8_t *seen; /* [rows][tail + rows], or NULL for a chain */
} Segment;

/* Attention over selected blocks of the prefix, for the segments that keep some. */
typedef struct {
    int64_t size, sinks, locals, across_heads; /* see models/native.py */
    int64_t capacity;                          /* blocks of a slot and head in `means` */
    int64_t most;                              /* blocks of a segment and head in `chosen`, at most */
    const float *const *means;                 /* per layer [slot][kv head][capacity][head_dim]; NULL: it does not select */
    int32_t *chosen; /* [segment][kv head][1 + most]: of the last layer that selected, how many blocks and which */
} Blocks;

typedef struct {
    int64_t num_rows, num_segments, num_wanted, capacity, threads;
    const int32_t *tokens, *positions, *wanted;
    const Segment *segments;
    const Blocks *blocks; /* or NULL: all attention is dense */
    void *const *keys, *const *values; /* per layer [slot][kv head][capacity][head_dim] */
    float *logits;                     /* [num_wanted][logits_stride] */
    int32_t *best;                     /* [num_wanted] */
    float *peaks;                      /* [num_wanted] */
    int64_t top;                       /* how many tokens of each row to rank, 0 for none */
    int32_t *top_ids;                  /* [num_wanted][top] */
    float *top_shares;
    int64_t first, last;               /* layers to run: first <= l < last */
    const float *entering;             /* [num_rows][width]: what layer `first` reads; NULL: the embedding of the tokens */
    int64_t skip_norm;                 /* the head reads the residual stream as it is */
    int64_t num_taps, num_tap_rows;
    const int64_t *taps;               /* depths after which rows are copied, increasing, first < depth <= last */
    const int32_t *tap_rows;           /* [num_tap_rows] */
    float *tapped;                     /* [num_taps][num_tap_rows][width] */
    const float *thresholds;           /* [num_rows]: gates below it in absolute value are shut; NULL: the MLP is dense */
    double *attention_seconds;         /* adds the calling thread's wall time of the attention stages; or NULL */
} Call;

/* One product: x [rows][units] with packed weights -> out float [rows][tiles * 16]. */
typedef struct {
    int64_t bf16, tile_stride, tiles, units, rows, threads;
    const uint32_t *w, *x;
    float *out;
    const float *bias;
} Linear;

static inline float horizontal_sum(vf x) {
    float sum = 0;
    for (int i = 0; i < 16; i++) sum += x[i];
    return sum;
}

static inline __attribute__((always_inline)) vf vector_max(vf a, vf b) {
    const vi greater = a > b;
    return (vf)(((vi)a & greater) | ((vi)b & ~greater));
}

/* exp(x), about 1 ulp; 0 below -87, saturates above 88; NaN stays NaN */
static inline __attribute__((always_inline)) vf exponential(vf x) {
    const vi too_small = x < -87.0f, is_nan = x != x;
    const vf y = (vf)((vi)x & ~(too_small | is_nan));
    const vi too_large = y > 88.0f;
    const vf z = (vf)(((vi)y & ~too_large) | (too_large & (vi)((vf){0} + 88.0f)));
    const vf n = (z * 1.44269504088896341f + 12582912.0f) - 12582912.0f; /* round to nearest */
    const vf r = (z - n * 0.693359375f) + n * 2.12194440e-4f;
    vf p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const vi exponent = (__builtin_convertvector(n, vi) + 127) << 23;
    const vf e = (vf)((vi)(p * (vf)exponent) & ~too_small);
    return (vf)(((vi)e & ~is_nan) | ((vi)x & is_nan));
}

/* line[begin..length) -> exp(scaling * (score - max)) with zeros left of `low` and up to the padded end; returns 1 / sum */
static float softmax(float *line, long begin, long low, long length, long padded, float scaling) {
    for (long c = begin; c < low; c++) line[c] = -INFINITY;
    for (long c = length; c < padded; c++) line[c] = -INFINITY;
    const long end = (length + 15) / 16 * 16;
    vf top = (vf){0} - INFINITY;
    for (long c = begin; c < end; c += 16) top = vector_max(*(const vf_unaligned *)(line + c), top);
    float highest = -INFINITY;
    for (int i = 0; i < 16; i++) highest = top[i] > highest ? top[i] : highest;
    vf sum = {0};
    for (long c = begin; c < end; c += 16) {
        const vf weight = exponential((*(const vf_unaligned *)(line + c) - highest) * scaling);
        *(vf_unaligned *)(line + c) = weight;
        sum += weight;
    }
    for (long c = end; c < padded; c++) line[c] = 0;
    return 1.0f / horizontal_sum(sum);
}

/* rows of `units` units, `count` <= 16 of them, to [unit][16]; missing rows become zero */
static void transpose16(const uint32_t *from, long units, long count, uint32_t *to) {
    long u = 0;
#ifdef __AVX512F__
    if (count == 16)
        for (; u + 16 <= units; u += 16) {
            __m512i a[16], b[16];
            for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(from + i * units + u);
            for (int i = 0; i < 16; i += 2) {
                b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
                b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
            }
            for (int i = 0; i < 16; i += 4) {
                a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
                a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
                a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
                a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
            }
            for (int i = 0; i < 4; i++) { /* a[4 * q + i] holds, per 128-bit lane L, unit 4 L + i of rows 4 q .. 4 q + 3 */
                const __m512i low01 = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x44);
                const __m512i high01 = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xee);
                const __m512i low23 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x44);
                const __m512i high23 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xee);
                _mm512_storeu_si512(to + (u + i) * 16, _mm512_shuffle_i32x4(low01, low23, 0x88));
                _mm512_storeu_si512(to + (u + 4 + i) * 16, _mm512_shuffle_i32x4(low01, low23, 0xdd));
                _mm512_storeu_si512(to + (u + 8 + i) * 16, _mm512_shuffle_i32x4(high01, high23, 0x88));
                _mm512_storeu_si512(to + (u + 12 + i) * 16, _mm512_shuffle_i32x4(high01, high23, 0xdd));
            }
        }
#endif
    for (; u < units; u++)
        for (long i = 0; i < 16; i++) to[u * 16 + i] = i < count ? from[i * units + u] : 0;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static uint32_t *scratch_units(Scratch *scratch, int part, size_t count) {
    Buffer *buffer = scratch->part + part;
    if (buffer->size < count) {
        free(buffer->data);
        buffer->size = (count * 3 / 2 + 15) / 16 * 16;
        buffer->data = aligned_alloc(64, buffer->size * 4);
        if (!buffer->data) abort();
    }
    return buffer->data;
}

/* Highest logit and its index, the first if there are several; the peak is NaN if any logit is. */
static void best_of(const float *logits, long count, int32_t *best, float *peak) {
    vf top = (vf){0} - INFINITY;
    vi bad = {0};
    long i = 0;
    for (; i + 16 <= count; i += 16) {
        const vf x = *(const vf_unaligned *)(logits + i);
        bad |= x != x;
        top = vector_max(x, top);
    }
    float highest = -INFINITY;
    int any_bad = 0;
    for (int k = 0; k < 16; k++) {
        highest = top[k] > highest ? top[k] : highest;
        any_bad |= bad[k] != 0;
    }
    for (; i < count; i++) {
        highest = logits[i] > highest ? logits[i] : highest;
        any_bad |= logits[i] != logits[i];
    }
    long at = 0;
    while (at + 1 < count && logits[at] != highest) at++;
    *best = (int32_t)at;
    *peak = any_bad ? NAN : highest;
}

/* The `top` most probable tokens, highest first, and their probabilities at temperature 1 (NaN if any logit is). */
static void top_of(const float *logits, long count, long top, float peak, int32_t *ids, float *shares) {
    vf sum = {0};
    long i = 0;
    for (; i + 16 <= count; i += 16) sum += exponential(*(const vf_unaligned *)(logits + i) - peak);
    float total = horizontal_sum(sum);
    for (; i < count; i++) total += expf(logits[i] - peak);
    long held = 0;
    float lowest = -INFINITY; /* of those held, once there are enough */
    for (i = 0; i < count; i++) {
        if (held == top && i % 16 == 0) { /* skip what cannot be among them, 16 at a time */
            while (i + 16 <= count) {
                const vi higher = *(const vf_unaligned *)(logits + i) > lowest;
                int any = 0;
                for (int k = 0; k < 16; k++) any |= higher[k];
                if (any) break;
                i += 16;
            }
            if (i >= count) break;
        }
        if (held == top && !(logits[i] > lowest)) continue;
        long at = held < top ? held++ : top - 1;
        for (; at > 0 && logits[i] > shares[at - 1]; at--) shares[at] = shares[at - 1], ids[at] = ids[at - 1];
        shares[at] = logits[i];
        ids[at] = (int32_t)i;
        if (held == top) lowest = shares[top - 1];
    }
    for (i = 0; i < held; i++) shares[i] = expf(shares[i] - peak) / total;
}

#include "team.h"
#include "blocks.h"

#define BF16 1
#define NAME(x) x##_bf16
#include "kernels.h"
#undef BF16
#undef NAME
#define BF16 0
#define NAME(x) x##_f32
#include "kernels.h"
#undef BF16
#undef NAME

static void *grown(void *old, size_t bytes) {
    free(old);
    void *fresh = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!fresh) abort();
    memset(fresh, 0, bytes);
    return fresh;
}

int64_t foretoken_abi(void) { return ABI; }

static void run(Job *job, int thread) {
    const Model *m = job->model;
    if (m) {
        if (m->bf16)
            forward_bf16(m, job->call, job, m->scratch + thread);
        else
            forward_f32(m, job->call, job, m->scratch + thread);
        return;
    }
    const Linear *y = job->linear;
    long lo, hi;
    while (next_share(job, job->stages, y->tiles, &lo, &hi)) {
        if (y->bf16)
            product_bf16(y->w, y->tile_stride, lo, hi, y->x, y->units, y->units, y->rows, y->out, y->tiles * 16, y->bias, 0);
        else
            product_f32(y->w, y->tile_stride, lo, hi, y->x, y->units, y->units, y->rows, y->out, y->tiles * 16, y->bias, 0);
        finish(job->stages);
    }
    wait_for(job->stages, shares(job, y->tiles));
}

void foretoken_forward(Model *m, const Call *call) {
    pthread_mutex_lock(&pool.callers);
    const size_t unit = m->bf16 ? 2 : 1;
    m->eps = (float)m->eps_;
    m->scaling = (float)m->scaling_;
    if (call->num_rows > m->rows_held) {
        const size_t rows = (size_t)call->num_rows;
        m->residual = grown(m->residual, rows * m->width * 4);
        m->qkv_out = grown(m->qkv_out, rows * m->qkv_stride * 4);
        m->attended = grown(m->attended, rows * m->heads * m->head_dim / unit * 4);
        m->gate_up_out = grown(m->gate_up_out, rows * m->gate_up_stride * 4);
        m->hidden = grown(m->hidden, rows * m->ffn_units * 4);
        m->rows_held = (int64_t)rows;
    }
    if (call->threads > m->threads_held) {
        m->scratch = realloc(m->scratch, sizeof(Scratch) * call->threads);
        if (!m->scratch) abort();
        memset(m->scratch + m->threads_held, 0, sizeof(Scratch) * (call->threads - m->threads_held));
        m->threads_held = call->threads;
    }
    Job job = {.model = m, .call = call};
    together(&job, (int)call->threads, 6 * (call->last - call->first) + 3);
    pthread_mutex_unlock(&pool.callers);
}

void foretoken_free(Model *m) {
    free(m->residual);
    free(m->qkv_out);
    free(m->attended);
    free(m->gate_up_out);
    free(m->hidden);
    for (int64_t t = 0; t < m->threads_held; t++)
        for (int part = 0; part < 6; part++) free(m->scratch[t].part[part].data);
    free(m->scratch);
}

/* One linear layer over packed weights, for code that drives layers itself. */
void foretoken_linear(const Linear *y) {
    pthread_mutex_lock(&pool.callers);
    Job job = {.linear = y};
    together(&job, (int)y->threads, 1);
    pthread_mutex_unlock(&pool.callers);
}
