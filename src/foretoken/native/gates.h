/* A gated MLP whose nearly shut channels are left out. The definition is methods/sparse/feed_forward.py.
 *
 *     gate tiles    g = act(x Wg), zero below the row's threshold
 *     up tiles      only those with a channel that some row keeps
 *     down          summed over the units (of one or two channels) that some row keeps
 *
 * What is skipped would have added exact zeros, so a row's result does not depend on what its neighbours keep, and with
 * thresholds of 0 it is that of the dense MLP, bit for bit. A quantised `down` sums over all units: its codes of several
 * inputs lie in one.
 */

/* Gate and up tiles lo..hi-1 (in pairs) of all rows: hidden = g * up. */
static void NAME(open_gates)(const Job *job, const Layer *layer, long lo, long hi, const NAME(input) *normed,
                             const char *coded) {
    const Model *m = job->model;
    const Call *call = job->call;
    const long T = call->num_rows, pairs = (hi - lo) / 2, stride = 2 * layer->mlp_width;
    const float *bias = layer->gate_up_bias;
    Matrix gate = layer->gate_up, up;
    gate.tiles = (const char *)gate.tiles + lo * gate.stride;
    gate.stride *= 2;
    up = gate;
    up.tiles = (const char *)gate.tiles + gate.stride / 2;
    /* of a row's place for these tiles, gates take the first half and the other projection the second */
    float *gates = job->gate_up_out + lo * 16, *ups = gates + pairs * 16;
    NAME(multiply)(&gate, 0, pairs, normed, coded, m->width, T, gates, stride, 0, 0);
    long begin = 0;
    for (long p = 0; p <= pairs; p++) {
        int any = 0;
        if (p < pairs)
            for (long r = 0; r < T; r++) {
                vf_unaligned *at = (vf_unaligned *)(gates + r * stride + p * 16);
                const vf x = bias ? *at + *(const vf_unaligned *)(bias + (lo + 2 * p) * 16) : *at;
                const vf g = activated((int)m->activation, x);
                const vi shut = (vector_max(g, -g) < call->thresholds[r]) | (g == 0.0f); /* NaN is not shut */
                *at = (vf)((vi)g & ~shut);
                for (int i = 0; i < 16; i++) any |= !shut[i];
            }
        if (any) continue;
        if (p > begin) NAME(multiply)(&up, begin, p, normed, coded, m->width, T, ups, stride, 0, 0);
        begin = p + 1;
    }
    for (long r = 0; r < T; r++)
        for (long p = 0; p < pairs; p++) {
            const vf g = *(const vf_unaligned *)(gates + r * stride + p * 16);
            const vi shut = g == 0.0f; /* where all are, nobody has computed the other factor */
            vf up = *(const vf_unaligned *)(ups + r * stride + p * 16);
            if (bias) up += *(const vf_unaligned *)(bias + (lo + 2 * p + 1) * 16);
            NAME(enter16)((NAME(input) *)job->hidden + INPUTS(r * stride / 2 + (lo / 2 + p) * 16), (vf)((vi)(g * up) & ~shut));
        }
}

/* The units of `hidden` that are not zero in all rows, ascending; NULL if leaving the others out would hardly pay. */
static const int32_t *NAME(open_units)(const Job *job, long units, long rows, Scratch *scratch, long *count) {
    const NAME(input) *hidden = job->hidden;
    int32_t *open = scratch->part[5].data;
    long n = 0;
    for (long u = 0; u < units; u++) {
        int any = 0;
        for (long r = 0; r < rows; r++)
            for (int s = 0; s < STEPS; s++) any |= hidden[(r * units + u) * STEPS + s] != 0;
        open[n] = (int32_t)u;
        n += any;
    }
    if (n > units - units / 16) return 0;
    *count = n;
    return open;
}

/* out[r][o] (+)= x[r] . W[o] over these units. */
static void NAME(product_of)(const uint32_t *w, long w_stride, long first, long last_tile, const NAME(input) *x, long x_stride,
                             const int32_t *only, long units, long rows, float *out, long out_stride, const float *bias,
                             int add) {
#if BF16 && MATRIX_UNIT
    if (matrix_unit) {
        const long all = w_stride / 16;
        tile_product(w, w_stride, first, last_tile, x, x_stride, only, units, all, rows, out, out_stride, bias, add);
        return;
    }
#endif
    NAME(product_over)(w, w_stride, first, last_tile, x, x_stride, only, units, rows, out, out_stride, bias, add);
}
