/* Rows between products: what a product reads of the residual stream, and what a gated MLP makes of its first one. */

/* What a layer or the head reads of a row: normed, or as it is where there is no gain. */
static void NAME(read_row)(const float *row, const float *gain, long W, float eps, NAME(input) *to) {
    if (gain)
        NAME(rms_norm)(row, gain, W, eps, to);
    else
        for (long w = 0; w < W; w += LANES) NAME(enter)(to + INPUTS(w), *(const part_unaligned *)(row + w));
}

/* gate and up tiles alternate: h = act(gate) * up of some tiles, rows of `stride` floats to rows of half as many inputs */
static inline __attribute__((always_inline)) void NAME(gate_by)(const int kind, const float *gate_up, long stride,
                                                                NAME(input) *hidden, long first, long last, long rows) {
    for (long r = 0; r < rows; r++)
        for (long t = first; t < last; t += 2) {
            const float *from = gate_up + r * stride + t * 16;
            NAME(input) *to = hidden + INPUTS(r * stride / 2 + t * 8);
            for (int i = 0; i < 16; i += LANES) {
                const part gate = *(const part_unaligned *)(from + i), up = *(const part_unaligned *)(from + 16 + i);
                NAME(enter)(to + INPUTS(i), part_activated(kind, gate) * up);
            }
        }
}

static void NAME(gate)(long kind, const float *gate_up, long stride, NAME(input) *hidden, long first, long last, long rows) {
    switch (kind) {
        case GELU_TANH: NAME(gate_by)(GELU_TANH, gate_up, stride, hidden, first, last, rows); break;
        case RELU_SQUARED: NAME(gate_by)(RELU_SQUARED, gate_up, stride, hidden, first, last, rows); break;
        default: NAME(gate_by)(SILU, gate_up, stride, hidden, first, last, rows);
    }
}
