/* Rows between products: what a product reads of the residual stream, and what an MLP makes of its first one. */

/* What a layer or the head reads of a row of n elements, a multiple of 16: normed, or as it is where there is no gain. */
static void NAME(read_row)(const Model *m, const float *row, const float *gain, const float *shift, NAME(input) *to) {
    const long n = m->width;
    if (!gain) {
        for (long i = 0; i < n; i += LANES) NAME(enter)(to + INPUTS(i), *(const part_unaligned *)(row + i));
        return;
    }
    const Norming y = norming_of(row, n, (float)m->eps, (int)m->centred);
    for (long i = 0; i < n; i += LANES) {
        part x = (*(const part_unaligned *)(row + i) - y.mean) * y.scale * *(const part_unaligned *)(gain + i);
        if (shift) x += *(const part_unaligned *)(shift + i);
        NAME(enter)(to + INPUTS(i), x);
    }
}

/* gate and up tiles alternate: h = act(gate) * up of some tiles, rows of `stride` floats to rows of half as many inputs;
 * not gated: h = act(x) of some tiles, rows of as many */
static inline __attribute__((always_inline)) void NAME(gate_by)(const int kind, const int gated, const float *from, long stride,
                                                                NAME(input) *hidden, long first, long last, long rows) {
    for (long r = 0; r < rows; r++)
        for (long t = first; t < last; t += 1 + gated) {
            const float *x = from + r * stride + t * 16;
            NAME(input) *to = hidden + INPUTS((r * stride + t * 16) / (1 + gated));
            for (int i = 0; i < 16; i += LANES) {
                const part y = part_activated(kind, *(const part_unaligned *)(x + i));
                NAME(enter)(to + INPUTS(i), gated ? y * *(const part_unaligned *)(x + 16 + i) : y);
            }
        }
}

static void NAME(gate)(long kind, long gated, const float *from, long stride, NAME(input) *hidden, long first, long last,
                       long rows) {
#define GATE_CASE(KIND)                                                                                               \
    case KIND:                                                                                                        \
        if (gated)                                                                                                    \
            NAME(gate_by)(KIND, 1, from, stride, hidden, first, last, rows);                                          \
        else                                                                                                          \
            NAME(gate_by)(KIND, 0, from, stride, hidden, first, last, rows);                                          \
        break;
    switch (kind) { GATE_CASE(SILU) GATE_CASE(GELU_TANH) GATE_CASE(RELU_SQUARED) GATE_CASE(GELU) GATE_CASE(RELU) }
#undef GATE_CASE
}
