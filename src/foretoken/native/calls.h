/* The functions that Python calls: a forward, a product, a move of rows. The methods' own calls build on these. */

int64_t foretoken_abi(void) { return ABI; }

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
    Job job = {.run = run, .model = m, .call = call};
    Call rest;
    pthread_mutex_lock(&team->callers);
    const int ready = clear_stages(team, &job, STAGES_OF_LAYER * (call->last - call->first) + 5) &&
                      reserve_workspace(team, &job, threads);
    if (ready) leave_unread_out(team, &job, &rest);
    if (ready) together(team, &job, (int)threads);
    pthread_mutex_unlock(&team->callers);
    return !ready;
}

/* Keep a branch of a draft: its rows become neighbours, ascending, so that none is written before it has been read. */
void foretoken_move(const Move *move) {
    for (int64_t layer = 0; layer < move->num_layers; layer++)
        for (int64_t g = 0; g < move->kv_heads[layer]; g++) {
            if (!move->keys[layer]) continue; /* it keeps none */
            const size_t bytes = move->row_bytes[layer], at = (move->slot * move->kv_heads[layer] + g) * move->capacity * bytes;
            char *keys = (char *)move->keys[layer] + at, *values = (char *)move->values[layer] + at;
            for (int64_t i = 0; i < move->count; i++) {
                if (move->from_rows[i] == move->to + i) continue;
                memcpy(keys + (move->to + i) * bytes, keys + move->from_rows[i] * bytes, bytes);
                memcpy(values + (move->to + i) * bytes, values + move->from_rows[i] * bytes, bytes);
            }
        }
}

/* One linear layer over packed weights, for code that drives layers itself; returns as foretoken_forward does. */
int64_t foretoken_linear(Team *team, const Linear *y) {
    Job job = {.run = run, .linear = y};
    pthread_mutex_lock(&team->callers);
    const size_t entered = y->bf16 ? 2 * entered_bf16 : entered_f32; /* bytes of a unit */
    const long width = y->units * (y->bf16 ? 2 : 1), coded = y->w.bits ? y->rows * all_coded_bytes(&y->w, width) : 0;
    const int ready = clear_stages(team, &job, 1) && reserve(team->rows + 3, y->rows * y->units * entered) &&
                      reserve(team->rows + 4, coded) && reserve(team->rows + 2, lines_of(&y->w) * width * sizeof(float));
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
