/* Structures that the caller passes; structs.py reads their fields from this file. */

#define MAX_HEAD_DIM 512
#define MAX_TAPS 8
#define ABI 21
#define UNITS_AHEAD 48 /* units of a weight that a product prefetches: 3 KiB of each tile */
/* A vector of 16 floats is PARTS of the processor's own, of which it has REGISTERS. The sums of up to MOST_ROWS rows and
 * TILES_FOR them are in registers together; where rows are more, they take turns at GROUP tiles. */
#if defined(__AVX512F__)
#define PARTS 1
#define REGISTERS 32
#define MOST_ROWS 14
#define TILES_FOR(MR) ((MR) <= 6 ? 4 : 2)
#define GROUP 4
#else
#if defined(__AVX__)
#define PARTS 2
#define REGISTERS 16
#define MOST_ROWS 6
#elif defined(__aarch64__)
#define PARTS 4
#define REGISTERS 32
#define MOST_ROWS 6
#else
#define PARTS 4
#define REGISTERS 16
#define MOST_ROWS 3
#endif
#define TILES_FOR(MR) (2 * (MR) <= MOST_ROWS ? (4 * (MR) <= MOST_ROWS ? 4 : 2) : 1)
#define GROUP 1
#endif
/* Attention takes columns in tiles and rows in panels, see tiles.inc; up to so many rows, query heads folded into them, use
 * a tile while it is near. Of their values so many parts are summed at a time. */
#ifndef TILE /* a test may take less */
#define TILE 256
#define PANEL 96
#endif
#define SPAN (4 * TILE) /* columns with sums of their own, which another thread may find */
#if REGISTERS > 16
#define VALUES_FOR(MR) ((MR) <= 6 ? 4 : 2)
#else
#define VALUES_FOR(MR) ((MR) <= 3 ? 4 : (MR) <= 6 ? 2 : 1)
#endif
#define LANES (16 / PARTS)
#define UNROLL _Pragma("GCC unroll 16")

typedef float vf __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef float part __attribute__((vector_size(4 * LANES)));
typedef float part_unaligned __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t part_of_signs __attribute__((vector_size(4 * LANES)));
typedef int32_t part_of_signs_unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int8_t codes_unaligned __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef uint32_t part_of_units __attribute__((vector_size(4 * LANES)));
typedef uint32_t part_of_units_unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float vf_unaligned __attribute__((vector_size(64), aligned(4)));
typedef uint32_t vu_unaligned __attribute__((vector_size(64), aligned(4)));

/* A Mamba-2 mixer; see ssm.inc. A projected row is z [inner], x, B and C [channels], dt [heads]. Of a gated delta net it is z,
 * q, k and v, a and b [heads] each. Of a short convolution (LFM2) it is z, x and a factor of x, [inner] each; there is no SiLU,
 * no B, C and dt, and states stay zero. */
typedef struct {
    int64_t place; /* among the model's mixers */
    int64_t heads, groups, state, width, taps, channels, inner, stride, norm_group;
    double low, high, eps;                    /* limits of dt */
    const float *conv, *conv_bias;            /* [taps][channels], the row itself last; [channels] or NULL */
    const float *rate, *step_bias, *skip;     /* [heads] */
    const float *gain;                        /* [inner] */
    int64_t norm_first;                       /* before the gate; no norm at all where `norm_group` is 0 */
    int64_t is_short, is_delta;
    double most_factor;                       /* of a delta net: b = most_factor * sigmoid(its projection) */
} Mixer;

/* How superblocks of 256 inputs are stored, see superblocks.h; structs.py reads these names. */
enum { NO_SUPERBLOCK, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS };

/* How rows of the embedding are stored: in the model's dtype, or in blocks of a GGUF file (stored_blocks.h); structs.py reads
 * these names. */
enum { DENSE, Q4_0_BLOCKS, Q4_1_BLOCKS, Q5_0_BLOCKS, Q5_1_BLOCKS, Q8_0_BLOCKS, IQ4_NL_BLOCKS, MXFP4_BLOCKS, Q2_K_BLOCKS, Q3_K_BLOCKS, Q4_K_BLOCKS, Q5_K_BLOCKS, Q6_K_BLOCKS, IQ4_XS_BLOCKS };
/* Numbers that codes of 4 bits stand for, see quantised.h; structs.py reads these names. */
enum { NO_TABLE, IQ4, FP4 };

/* A packed weight, in tiles of 16 outputs. */
typedef struct Matrix {
    const void *tiles;      /* aligned to 64 bytes if quantised; NULL: there is none */
    int64_t stride;         /* bytes from a tile to the next; if quantised, a multiple of 64 */
    int64_t bits;           /* 8 or 4: quantised.h says how; 0: [unit][16] of the model's elements */
    int64_t group;          /* inputs that share a scale */
    int64_t half, minimum;  /* whether scales are float16, and whether there are minimums */
    int64_t offset;         /* subtracted from codes */
    const int32_t *order;   /* column i is of input order[i]; NULL: of input i */
    int64_t table;          /* of the numbers that codes of 4 bits stand for; NO_TABLE: they are numbers */
    int64_t superblock;     /* how its superblocks are stored; NO_SUPERBLOCK: as quantised.h says */
    int64_t own_tiles;      /* tiles from here on are those of `rest`, which is stored in another way */
    const struct Matrix *rest; /* or NULL */
} Matrix;

/* Experts in the place of an MLP; see experts.h. */
typedef struct {
    Matrix router;        /* to `count` scores and the shared MLP's gate, padded to whole tiles; not quantised */
    Matrix gate_up, down; /* of all of them, one after the other */
    int64_t count, chosen, width; /* `chosen` of each row; channels of one of them */
    const float *router_bias;             /* [router tiles * 16], or NULL */
    const float *gate_up_bias, *down_bias; /* of each expert, gate_up's in the order of its tiles; or NULL */
    int64_t gated;        /* whether `gate_up` has a gate and another factor, tiles in turn */
    int64_t normed;       /* whether shares are of the chosen ones only */
    int64_t sigmoid;      /* scores are squashed one by one before experts are chosen, and not softmaxed */
    const float *correction; /* [count], added to squashed or softmaxed scores for the choice alone; or NULL */
    double factor;        /* of the shares */
    int64_t opens;        /* whether the sigmoid of the router's last output multiplies the layer's MLP */
    int64_t groups, open_groups, group_best; /* experts are chosen from the `open_groups` of at most 64 groups of neighbours with
                                                the highest sums of their `group_best` best scores, 1 or 2; 1 group: from all */
} Experts;

/* Latent attention: queries, keys and values are products of compressed ones; see latent.inc. The layer's first projection
 * gives a row's compressed queries (without `queries` the queries themselves), its compressed keys and values, and the last
 * elements of its keys, which all heads share. These are rotated. */
typedef struct {
    Matrix queries;           /* to [head][head_dim]; or none */
    Matrix keys_values;       /* to [head][head_dim - rot_dim of a key, then value_dim of a value] */
    const float *query_norm, *norm;
    int64_t query_rank, rank; /* compressed queries, or all heads'; compressed keys and values */
    int64_t value_dim;        /* at most head_dim; in the cache a value has zeros after it */
    double eps;               /* of these norms */
} Latent;

typedef struct Layer {
    Matrix qkv, out, gate_up, down;
    const float *qkv_bias, *out_bias, *gate_up_bias, *down_bias; /* in the order of the tiles; or NULL */
    const float *qkv_scale, *out_scale, *gate_up_scale;          /* of the products, before biases; or NULL */
    const float *attention_norm, *mlp_norm;         /* of a branch's input; NULL: the residual stream as it is */
    const float *attention_shift, *mlp_shift;       /* added after these norms; or NULL */
    const float *attention_end_norm, *mlp_end_norm; /* of a branch's output; NULL: it is added as it is */
    const float *q_norm, *k_norm;                   /* over each head, [head][head_dim], or NULL */
    const float *q_all_norm, *k_all_norm;           /* over all heads together, or NULL */
    int64_t norm_last;                              /* heads are normed after they are rotated */
    int64_t opens;                                  /* projections give a gate of each query's size, between queries and keys:
                                                       its sigmoid multiplies what the head attended to */
    const float *sinks;                             /* [heads], scores of a column that nothing is read from; or NULL */
    int64_t window;                                 /* 0: full attention */
    int64_t rot_dim, angles;                        /* elements of a head that are rotated, 0 for none; by which angles */
    int64_t index;
    int64_t head_dim, kv_heads;   /* of attention; 0 in other layers */
    int64_t kv_layer;             /* keys and values are read from this layer of the decoder; if it is another one, none
                                     are projected or written */
    int64_t values_are_keys;      /* values are the projections of keys, before norm and rotary */
    int64_t norm_values;          /* each head's value is normed, without a gain */
    int64_t external_kv;          /* cross-attention: only queries are projected; all rows of a segment attend to the first
                                     `far` rows of its slot in the call's `external_kv` */
    int64_t mlp_width, gated;     /* channels of the MLP; whether `gate_up` has a gate and another factor, tiles in turn */
    int64_t parallel;             /* the MLP reads the stream that attention read, and both are added to it */
    const struct Layer *parallel_mixer; /* a mixer with attention's input; both outputs are added to the stream; or NULL */
    const Mixer *mixer;           /* in the place of attention; `qkv` is its in projection then; or NULL */
    const Experts *experts;       /* in the place of the MLP, or next to it: then the sum of both; or NULL */
    const Latent *latent;         /* or NULL */
    Matrix input_gate, input_out; /* of the layer's own input, see Model: x += norm(out (act(gate x) * input)); or none */
    const float *input_norm;
    double factor;                /* of the stream at the layer's end; not 1 only where a norm is after its last branch */
} Layer;

/* A correction of a packed weight's outputs: out += up (down x); see low_rank.inc. */
typedef struct {
    const float *down;    /* [inputs][rank] */
    const float *up;      /* [tile][rank][16] */
    const int32_t *spans; /* [tile][2]: from where to where `up` of a tile is not zero */
    int64_t rank;         /* a multiple of 16; 0: there is no correction */
} LowRank;

/* The activation of a gate, or of an MLP without gates; structs.py reads these names. */
enum { SILU, GELU_TANH, RELU_SQUARED, GELU, RELU, CLAMPED_SWIGLU };

/* Read only: several teams may work with it at once. */
typedef struct {
    int64_t bf16, num_layers, width, heads, kv_heads, head_dim, vocab;
    int64_t qkv_stride, mlp_width, logits_stride; /* in floats; of the widest layers, like kv_heads and head_dim */
    int64_t activation;
    int64_t centred;     /* norms subtract the mean first */
    int64_t interleaved; /* whether a rotation pairs neighbours, not elements of the two halves */
    double eps, scaling;
    double score_cap, logit_cap; /* x becomes cap tanh(x / cap), of scores after scaling and of logits; 0: it stays */
    double logit_scale;          /* before the cap */
    double embedding_scale, residual_scale; /* of a token's embedding, and of a branch's output */
    const Layer *layers;
    const void *embedding;    /* [token][width] in the model's dtype, or rows of blocks */
    int64_t embedding_blocks; /* what blocks: Q4_0_BLOCKS, ...; or DENSE */
    const void *position_embedding; /* [position][width], added to token embeddings; or NULL */
    /* Inputs of each layer (Gemma 4), [layer][input_width]: (norm(input_projection (e) * projected_factor) +
     * input_embedding[token] * token_factor) * input_factor, of a token's scaled embedding e; input_width 0: none. */
    int64_t input_width;
    double projected_factor, token_factor, input_factor;
    Matrix input_projection;
    const void *input_embedding;    /* [token][layers * input_width], as `embedding` */
    int64_t input_embedding_blocks;
    const float *input_gain;        /* [input_width], of each layer's part */
    Matrix head;
    const float *head_bias; /* [logits_stride], or NULL */
    const float *final_norm, *final_shift;
} Model;

typedef struct {
    int64_t slot, prefix, tail, start, rows;
    int64_t committed;   /* rows of the slot that never change but are only forgotten; at most `prefix` */
    int64_t keep;        /* blocks of the prefix to keep in a layer, over all key/value heads; 0: dense attention */
    int64_t far_slot, far; /* in the external KV cache: a slot, and its number of visible rows, all committed */
    const uint8_t *seen; /* [rows][tail + rows], or NULL for a chain */
} Segment;

/* The score that orders blocks, see methods/sparse/blocks.py; structs.py reads these names. */
enum { EXACT, BOUNDS, MEAN };
/* The rows of a segment that score. */
enum { ROOT, ALL };
/* The scope of one chosen set of blocks. */
enum { PER_HEAD, GLOBAL, PER_LAYER };

/* Attention over selected blocks of the prefix, for the segments that keep some. */
typedef struct {
    int64_t size, sinks, locals; /* see forward/native_plan.py */
    int64_t sets;                /* PER_HEAD, GLOBAL or PER_LAYER */
    int64_t score;               /* EXACT, BOUNDS or MEAN */
    int64_t voters;              /* ROOT or ALL */
    int64_t capacity;            /* blocks of a slot and head in `summaries` */
    int64_t most;                /* blocks of a segment and head in `scores` and `chosen`, at most */
    const uint8_t *selects;      /* per layer */
    const float *const *summaries; /* per layer that selects [slot][kv head][capacity][head_dim, of bounds 2 head_dim] */
    float *scores;                 /* [segment][kv head][most] */
    int32_t *chosen; /* [segment][kv head][1 + most]: of the last layer that selected, how many blocks and which */
} Blocks;

/* A request's rows to read and to store in layers with mixers; see forward/ssm/state.py. */
typedef struct {
    int64_t pend, pending; /* the tail's first pending row, and how many there are */
    int64_t stored;        /* rows of earlier forwards after the committed prefix */
    int64_t count, levels; /* rows to walk; states that are open at once */
    const int32_t *steps;  /* [count][3]: a row after the prefix, the level of the state it follows (-1: the base) and the
                              level at which its own state is stored (-1: no row follows) */
    const int32_t *taps;   /* [stored + rows][taps]: which rows the convolution reads; the first taps - 1 lie before */
    float *ahead_base;     /* [mixer][head][state][width]: where a long chunk's state goes; NULL: rows are kept in the tail */
    void *ahead_conv;      /* [mixer][taps - 1][channels] */
} StateSegment;

typedef struct {
    int64_t slots, capacity;
    float *base;               /* [mixer][slot][head][state][width] */
    void *conv, *raw;          /* [mixer][slot][taps - 1][channels], [mixer][slot][capacity][channels] */
    float *gates;              /* [mixer][slot][capacity][2][head] */
    const uint8_t *limited;    /* [num_rows]: whether dt is limited */
    const StateSegment *segments;
} States;

/* One layer's keys and values of another cache. Its owner may be adding rows, so only committed rows are read. */
typedef struct {
    int64_t groups, capacity;          /* at least the model's number of groups of heads; the first ones are read */
    int64_t bf16;                      /* whether these are bfloat16 */
    const void *keys, *values, *tiled; /* as those of a call */
    const int32_t *known;
} ExternalKV;

/* Rotary angles. */
typedef struct {
    const float *cos, *sin; /* [positions][rot_dim / 2] */
    const float *queries;   /* [positions], factors of queries; or NULL */
} Angles;

typedef struct {
    int64_t num_rows, num_segments, num_wanted, capacity, threads;
    int64_t coded;   /* whether keys and values are in codes of 8 bits: int8_kv.h says how */
    int64_t bf16_kv; /* whether a float32 model's are bfloat16 */
    const int32_t *tokens, *positions, *wanted;
    const Angles *angles; /* as many as the layers speak of */
    const Segment *segments;
    const Blocks *blocks; /* or NULL: all attention is dense */
    void *const *keys, *const *values; /* per layer [slot][kv head][capacity][head_dim], or rows of codes */
    void *const *tiled;                /* per layer [slot][kv head][tiles][unit][16], tiles = capacity / 16 rounded up:
                                          the keys once more, those of 16 rows side by side */
    int32_t *const *known;             /* per layer [slot][the model's kv_heads]: how many of these tiles are whole and committed */
    float *logits;                     /* [num_wanted][logits_stride] */
    int32_t *best;                     /* [num_wanted] */
    float *peaks;                      /* [num_wanted] */
    int64_t top;                       /* how many tokens of each row to rank, 0 for none */
    int32_t *top_ids;                  /* [num_wanted][top] */
    float *top_shares;
    int64_t first, last;               /* layers to run: first <= l < last */
    const float *entering;             /* [num_rows][width]: input of layer `first`; NULL: the embedding of the tokens */
    const float *qkv_addend;           /* [num_rows][qkv_stride]: added to the projections of layer `first`; or NULL */
    int64_t skip_norm;                 /* the head reads the residual stream as it is */
    int64_t num_taps, num_tap_rows;
    const int64_t *taps;               /* depths after which rows are copied, increasing, first < depth <= last */
    const int32_t *tap_rows;           /* [num_tap_rows] */
    float *tapped;                     /* [num_taps][num_tap_rows][width] */
    const float *thresholds;           /* [num_rows]: gates below it in absolute value are shut; NULL: the MLP is dense */
    double *attention_seconds;         /* adds the calling thread's wall time of the attention stages; or NULL */
    const States *states;              /* or NULL: no layer has a mixer */
    const ExternalKV *external_kv;     /* for layers with cross-attention; or NULL */
    const LowRank *const *adapters;    /* [num_rows]: the row's corrections [layer][4] of qkv, out, gate_up and down, or NULL;
                                          NULL: of no row */
    int64_t most_rank;                 /* of a correction */
} Call;

/* Rows of one slot to move together, in every layer. */
typedef struct {
    int64_t num_layers, slot, capacity;
    const int64_t *kv_heads, *row_bytes; /* of each layer */
    int64_t to, count; /* rows to .. to + count - 1 */
    void *const *keys, *const *values;
    const int64_t *from_rows; /* [count], increasing, from_rows[i] >= to + i */
} Move;

/* One product: x [rows][units] with packed weights -> out float [rows][tiles * 16]. */
typedef struct {
    Matrix w;
    int64_t bf16, tiles, units, rows, threads;
    const uint32_t *x;
    float *out;
    const float *bias;
} Linear;

