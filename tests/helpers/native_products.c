/* Products with quantised weights alone, for tests that compile them for several kinds of processors. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "types.h"
#include "vectors.h"
#include "coded_rows.h"
#include "quantised.h"
#include "superblocks.h"
#include "stored_blocks.h"

/* x: floats [rows][inputs]; out: floats [rows][16 tiles] */
void product(const Matrix *w, const float *x, int64_t inputs, int64_t rows, int64_t tiles, const float *bias, float *out) {
    const long bytes = coded_bytes(w, inputs);
    char *coded = aligned_alloc(64, bytes * rows);
    for (long r = 0; r < rows; r++) code_row(w, x + r * inputs, inputs, coded + r * bytes);
    (w->superblock ? superblock_product : coded_product)(w, 0, tiles, coded, inputs, rows, out, 16 * tiles, bias, 0);
    free(coded);
}

int64_t parts(void) { return PARTS; }
