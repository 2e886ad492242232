/* The matrix unit's instructions in plain C, for processors that have none: included before decoder.c. As Intel's manual has
 * them, except that tiny numbers are not flushed to zero. Every thread has its own tiles, of the shapes that it has set; a tile
 * that is used outside its shape, or before any shape is set, ends the process. */

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1

typedef struct { uint8_t palette, start, unused[14]; uint16_t bytes[16]; uint8_t rows[16]; } SoftwareShapes;

/* the sources around it are compiled without: the compiler takes a third of the time */
#pragma GCC push_options
#pragma GCC optimize("O2")

static _Thread_local SoftwareShapes software_shapes;
static _Thread_local float software_tiles[8][16][16];

static void software_shape(const void *shapes) {
    memcpy(&software_shapes, shapes, sizeof software_shapes);
    memset(software_tiles, 0, sizeof software_tiles);
}

static void software_release(void) { memset(&software_shapes, 0, sizeof software_shapes); }

static int software_rows(int t) {
    if (software_shapes.palette != 1 || !software_shapes.rows[t] || software_shapes.bytes[t] != 64) abort();
    return software_shapes.rows[t];
}

static void software_zero(int t) {
    software_rows(t);
    memset(software_tiles[t], 0, sizeof software_tiles[t]);
}

static void software_load(int t, const void *from, long stride) {
    software_zero(t);
    for (int r = 0; r < software_rows(t); r++) memcpy(software_tiles[t][r], (const char *)from + r * stride, 64);
}

static void software_store(int t, void *to, long stride) {
    for (int r = 0; r < software_rows(t); r++) memcpy((char *)to + r * stride, software_tiles[t][r], 64);
}

static float software_element(float pair, int second) {
    uint32_t bits;
    memcpy(&bits, &pair, 4);
    bits = second ? bits & 0xffff0000u : bits << 16;
    memcpy(&pair, &bits, 4);
    return pair;
}

/* The first and the second elements of pairs are summed apart, then together, then added. */
static void software_dpbf16ps(int sums, int a, int b) {
    if (software_rows(sums) != software_rows(a) || software_rows(b) != 16) abort();
    for (int r = 0; r < software_rows(sums); r++)
        for (int n = 0; n < 16; n++) {
            float apart[2] = {0, 0};
            for (int k = 0; k < 16; k++)
                for (int i = 0; i < 2; i++)
                    apart[i] += software_element(software_tiles[a][r][k], i) * software_element(software_tiles[b][k][n], i);
            software_tiles[sums][r][n] += apart[0] + apart[1];
        }
}

#pragma GCC pop_options

#define LOAD_SHAPES(Y) software_shape(&(Y))
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_release software_release
#define _tile_zero software_zero
#define _tile_loadd software_load
#define _tile_stored software_store
#define _tile_dpbf16ps software_dpbf16ps
#define syscall(...) 0 /* the system grants the unit to every process */
