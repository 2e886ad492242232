/* A decoder of the common anatomies (attention, norms, MLPs or experts) for CPUs, one call per forward.
 *
 * Compiled by build.py on the user's machine, or for a wheel, together with the methods' own calls (native_sources.txt); called
 * through ctypes by decoder.py, which checks everything that it hands over (checks.py). Plain C with GCC/Clang vector types;
 * bfloat16 dot products where the processor has them. Files that end in .inc are included once for each element type.
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

#include "types.h"          /* the structures that Python hands over */
#include "vectors.h"        /* exponential, softmax, ranking */
#include "coded_rows.h"     /* rows in codes of 8 bits */
#include "quantised.h"      /* packed weights of 8 or 4 bits */
#include "superblocks.h"    /* packed weights in the superblocks of a GGUF file */
#include "stored_blocks.h"  /* the blocks of a GGUF file: packed, and decoded */
#include "dense_weights.h"  /* dense weights: in tiles, and rounded */
#include "matrix_unit.h"    /* products of up to 32 rows at a time, where the processor has a unit for them */
#include "int8_kv.h"        /* keys and values of 8 bits */
#include "team.h"           /* threads and their memory */
#include "blocks.h"         /* which columns are attended to */
#include "attention_work.h" /* attention, divided among threads */
#include "experts.h"        /* which rows go through which expert */

#define BF16 1
#define NAME(x) x##_bf16
#include "layers.inc"
#define BF16 0
#define NAME(x) x##_f32
#include "layers.inc"

#include "workspace.h" /* memory of a forward */
#include "calls.h"     /* the functions that Python calls */
