/* The stages of a mixture of experts with products that only count the weights that they read. */

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
#include "coded_rows.h"
#include "quantised.h"
#include "matrix_unit.h"
#include "team.h"
#include "experts.h"

#define NAME(x) x##_counted
#define INPUTS(ELEMENTS) (ELEMENTS)
typedef float input_counted;

static int64_t bytes_read;
static const float *scores_of_rows; /* [rows][experts], which the router gives one after the other */

static void read_row_counted(const Model *m, const float *from, const float *norm, const float *shift, float *to) {
    (void)m, (void)from, (void)norm, (void)shift, (void)to;
}

static void code_rows_counted(const Matrix *w, const float *x, long inputs, long rows, float *line, char *coded) {
    (void)w, (void)x, (void)inputs, (void)rows, (void)line, (void)coded;
}

static void multiply_counted(const Matrix *w, long first, long end, const float *x, const char *coded, long inputs, long rows,
                             float *out, long out_stride, const float *bias, int add) {
    (void)x, (void)coded, (void)inputs, (void)rows, (void)bias, (void)add;
    if (w->group) { /* an expert's */
        bytes_read += (end - first) * w->stride;
        return;
    }
    memcpy(out, scores_of_rows, out_stride * sizeof(float));
    scores_of_rows += out_stride;
}

static void gate_counted(int64_t kind, int gated, float *x, long stride, float *to, long lo, long hi, long rows) {
    (void)kind, (void)gated, (void)x, (void)stride, (void)to, (void)lo, (void)hi, (void)rows;
}

#include "mixture.inc"

/* Bytes of experts' weights that a forward of so many rows reads. scores: [rows][16]. */
int64_t bytes_of_mixture(const float *scores, int64_t rows, int64_t chosen, int64_t threads) {
    enum { WIDTH = 64, CHANNELS = 128, COUNT = 16, ROOM = 1 << 16 };
    static float memory[8][ROOM] __attribute__((aligned(64)));
    static Scratch scratch;
    Experts experts = {.count = COUNT, .chosen = chosen, .width = CHANNELS, .gated = 1, .groups = 1};
    experts.gate_up = (Matrix){.stride = 16 * WIDTH, .group = 32};
    experts.down = (Matrix){.stride = 16 * CHANNELS, .group = 32};
    const Model model = {.width = WIDTH};
    const Call call = {.num_rows = rows};
    const Layer layer = {.experts = &experts};
    Stage stages[4] = {0};
    for (int i = 0; i < PARTS_OF_SCRATCH; i++) scratch.part[i].data = memory[7];
    scratch.part[5].data = memory[6];
    const Job job = {.model = &model, .call = &call, .threads = (int)threads, .residual = memory[0], .entering = memory[1],
                     .hidden = memory[2], .gate_up_out = memory[3], .choices = (int32_t *)memory[4], .shares = memory[5]};
    bytes_read = 0;
    scores_of_rows = scores;
    mix_experts_counted(&job, &layer, stages, &scratch, memory[0], 0);
    return bytes_read;
}
