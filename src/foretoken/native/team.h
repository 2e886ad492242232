/* A team of threads for forwards of less than a millisecond.
 *
 * A forward is a sequence of stages; the threads claim pieces of a stage, and no thread waits for one that has claimed
 * nothing. On an idle machine this is an ordinary team; on a busy one, where the system may not run a thread for many
 * milliseconds, the caller does more of the work itself. (With a barrier, every stage would wait for every thread.)
 * A thread that waits for longer than a stage takes goes to sleep: its core is then free for the thread that it waits for.
 * Between forwards the others wait awake, unless they notice that other programs want their cores.
 *
 * A team is an object with threads and working memory of its own: forwards of two teams overlap, those of one follow
 * each other. Threads do not survive a fork; a team does, and starts new ones in the child.
 */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define SPINS_IN_JOB 2000        /* some ten microseconds */
#define SPINS_BEFORE_SLEEP 20000 /* some hundred microseconds: about the time between two forwards */
#define SPINS_BETWEEN_LOOKS 256
#define DISPLACED 1e-4 /* seconds between two looks at the clock: another program had the core */
#define MAX_THREADS 256
#define PARTS_OF_SCRATCH 16
#define ROW_BUFFERS 14
#define STAGES_OF_LAYER 22 /* at most */

typedef struct {
    _Alignas(64) atomic_long next; /* first unclaimed piece */
    atomic_int done;               /* finished pieces */
    atomic_int blocked;            /* threads that sleep until there are more */
} Stage;

typedef struct {
    void *data;
    size_t size; /* bytes */
} Buffer;

typedef struct {
    Buffer part[PARTS_OF_SCRATCH]; /* queries, sums of a panel, scores, normed rows, scores of blocks, runs of columns or open
                                      units or pairs of rows and experts, weights of a tile, paths of a tree, coded rows, a row
                                      of floats, coded queries, opened values of a tile, scores of experts, external
                                      keys, sums of corrections, inputs of all layers */
} Scratch;

typedef struct Job {
    void (*run)(const struct Job *job, int thread); /* what a thread does of it; a team itself knows no work */
    const Model *model; /* a forward ... */
    const Call *call;
    const Call *rest;      /* the call of only the rows that are read after the last layer; NULL: all are */
    const int32_t *packed_row; /* [num_rows]: a row's index among them, or -1 */
    const Linear *linear; /* ... or one product, of these inputs */
    const void *inputs;
    const char *coded; /* the same, for quantised weights */
    float *residual, *branch, *qkv_out, *gate_up_out; /* of all rows; shared by the threads */
    void *attended, *hidden; /* inputs of products */
    void *entering;          /* the same of experts */
    int32_t *choices;        /* experts of each row */
    float *shares, *opened;  /* weights of each choice; of a row's shared MLP */
    float *layer_inputs;     /* [num_rows][num_layers][input_width] */
    float *span_sums;        /* of attention that is divided among threads, see attention_work.h; NULL: it is not */
    long most_spans;
    Scratch *scratch; /* one for each thread */
    Stage *stages;
    int threads;
} Job;

typedef struct {
    struct Team *team;
    int number; /* from 1 on: the caller is 0 */
    pthread_t thread;
} Worker;

typedef struct Team {
    pthread_mutex_t callers; /* one job at a time */
    pthread_mutex_t door;    /* guards `sleeping` */
    pthread_cond_t bell;
    int sleeping, started;
    atomic_uint number; /* of the newest job; an odd number while it is open */
    atomic_int inside;  /* workers that may be looking at the job */
    atomic_int blocked; /* whether the caller sleeps until they have left */
    atomic_int closing; /* workers leave for good */
    Job *job;
    Worker workers[MAX_THREADS];
    Buffer stages, rows[ROW_BUFFERS], scratch; /* grown in the caller before a job is open: no job allocates anything */
    struct Team *before, *after;
} Team;

/* All teams of the process: a fork must find them. */
static struct {
    pthread_mutex_t lock;
    pthread_once_t once;
    Team *first;
} teams = {.lock = PTHREAD_MUTEX_INITIALIZER, .once = PTHREAD_ONCE_INIT};

static inline void pause_a_little(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Sleep while the word has that value, or less: the caller looks again. */
static void sleep_while(atomic_int *word, int value) {
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, 0, 0, 0);
#else
    (void)word, (void)value;
    sched_yield();
#endif
}

static void wake(atomic_int *word) {
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, MAX_THREADS, 0, 0, 0);
#else
    (void)word;
#endif
}

/* The next piece of `count`, or something not below `count`. */
static inline long claim(Stage *stage, long count) {
    if (atomic_load_explicit(&stage->next, memory_order_relaxed) >= count) return count;
    return atomic_fetch_add_explicit(&stage->next, 1, memory_order_acq_rel);
}

/* Sequentially consistent, as the other side is: it counts itself among the blocked before it looks at `done`. */
static inline void finish(Stage *stage) {
    atomic_fetch_add(&stage->done, 1);
    if (atomic_load(&stage->blocked)) wake(&stage->done);
}

static inline void wait_for(Stage *stage, long count) {
    for (long spins = 0; spins < SPINS_IN_JOB; spins++, pause_a_little())
        if (atomic_load_explicit(&stage->done, memory_order_acquire) >= count) return;
    atomic_fetch_add(&stage->blocked, 1);
    for (int done; (done = atomic_load(&stage->done)) < count;) sleep_while(&stage->done, done);
}

static void wait_until_left(Team *team) {
    for (long spins = 0; spins < SPINS_IN_JOB; spins++, pause_a_little())
        if (!atomic_load(&team->inside)) return;
    atomic_store(&team->blocked, 1);
    for (int inside; (inside = atomic_load(&team->inside)) != 0;) sleep_while(&team->inside, inside);
    atomic_store(&team->blocked, 0);
}

/* A product's tiles are claimed in shares: a few per thread, in multiples of four tiles. */
static inline long tiles_per_share(const Job *job, long tiles) {
    const long even = (tiles + 4 * job->threads - 1) / (4 * job->threads);
    return (even + 3) / 4 * 4;
}

static inline long shares(const Job *job, long tiles) {
    const long each = tiles_per_share(job, tiles);
    return (tiles + each - 1) / each;
}

/* Claim tiles lo..hi-1 of a product; 0 when there is nothing left to claim. The inputs of a product may be prepared
 * only after the first claim: until a claimed share is finished, no thread reaches a stage that writes them. */
static inline int next_share(const Job *job, Stage *stage, long tiles, long *lo, long *hi) {
    const long each = tiles_per_share(job, tiles), i = claim(stage, shares(job, tiles));
    *lo = i * each;
    *hi = *lo + each < tiles ? *lo + each : tiles;
    return *lo < tiles;
}

static void *serve(void *argument) {
    Team *team = ((Worker *)argument)->team;
    const int thread = ((Worker *)argument)->number;
    unsigned seen = 0;
    long patience = SPINS_BEFORE_SLEEP;
    double looked = now();
    for (long spins = 0;; spins++) {
        const unsigned number = atomic_load_explicit(&team->number, memory_order_acquire);
        if ((number & 1) && number != seen) {
            atomic_fetch_add_explicit(&team->inside, 1, memory_order_seq_cst);
            if (atomic_load_explicit(&team->number, memory_order_seq_cst) == number && thread < team->job->threads)
                team->job->run(team->job, thread);
            atomic_fetch_sub(&team->inside, 1);
            if (atomic_load(&team->blocked)) wake(&team->inside);
            seen = number;
            spins = 0;
            looked = now();
        } else if (spins < patience) {
            pause_a_little();
            if (spins % SPINS_BETWEEN_LOOKS == SPINS_BETWEEN_LOOKS - 1) {
                const double before = looked;
                looked = now();
                if (looked - before > DISPLACED) patience = SPINS_BETWEEN_LOOKS;
            }
        } else {
            pthread_mutex_lock(&team->door);
            team->sleeping++;
            while (atomic_load(&team->number) == number && !atomic_load(&team->closing))
                pthread_cond_wait(&team->bell, &team->door);
            team->sleeping--;
            pthread_mutex_unlock(&team->door);
            spins = 0;
            looked = now();
            patience += SPINS_BETWEEN_LOOKS; /* the other program may be gone */
            if (patience > SPINS_BEFORE_SLEEP) patience = SPINS_BEFORE_SLEEP;
        }
        if (atomic_load_explicit(&team->closing, memory_order_acquire)) return 0;
    }
}

/* Run a job with up to `threads` threads, the caller included; the caller holds `callers`, and the stages are cleared. */
static void together(Team *team, Job *job, int threads) {
    job->threads = threads = threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads;
    for (; team->started < threads - 1; team->started++) {
        Worker *worker = team->workers + team->started;
        *worker = (Worker){.team = team, .number = team->started + 1};
        if (pthread_create(&worker->thread, 0, serve, worker)) break; /* those that there are do it */
    }
    team->job = job;
    if (threads > 1) {
        pthread_mutex_lock(&team->door);
        atomic_fetch_add(&team->number, 1); /* open */
        if (team->sleeping) pthread_cond_broadcast(&team->bell);
        pthread_mutex_unlock(&team->door);
    }
    job->run(job, 0);
    if (threads > 1) {
        atomic_fetch_add(&team->number, 1); /* closed: no further worker enters */
        wait_until_left(team);
    }
}

/* ------------------------------------------------------------------------------------------------ life of a team */

static void without_threads(Team *team) {
    pthread_mutex_init(&team->callers, 0);
    pthread_mutex_init(&team->door, 0);
    pthread_cond_init(&team->bell, 0);
    team->started = team->sleeping = 0;
    atomic_store(&team->number, 0);
    atomic_store(&team->inside, 0);
    atomic_store(&team->blocked, 0);
}

static void before_fork(void) { pthread_mutex_lock(&teams.lock); }

static void after_fork_in_parent(void) { pthread_mutex_unlock(&teams.lock); }

/* Only the thread that forked is here. Locks may be held, and counts be those of threads that are gone. */
static void after_fork_in_child(void) {
    for (Team *team = teams.first; team; team = team->after) without_threads(team);
    pthread_mutex_unlock(&teams.lock);
}

static void prepare_process(void) {
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    ask_for_matrix_unit();
}

/* A team without threads yet; they are started by the first job that asks for them. NULL: no memory. */
Team *foretoken_team_new(void) {
    pthread_once(&teams.once, prepare_process);
    Team *team = calloc(1, sizeof(Team));
    if (!team) return 0;
    without_threads(team);
    pthread_mutex_lock(&teams.lock);
    team->after = teams.first;
    if (teams.first) teams.first->before = team;
    teams.first = team;
    pthread_mutex_unlock(&teams.lock);
    return team;
}

/* End the threads and give the memory back; no job may be running or begin. */
void foretoken_team_free(Team *team) {
    pthread_mutex_lock(&team->door);
    atomic_store(&team->closing, 1);
    pthread_cond_broadcast(&team->bell);
    pthread_mutex_unlock(&team->door);
    for (int i = 0; i < team->started; i++) pthread_join(team->workers[i].thread, 0);
    pthread_mutex_lock(&teams.lock);
    if (team->before)
        team->before->after = team->after;
    else
        teams.first = team->after;
    if (team->after) team->after->before = team->before;
    pthread_mutex_unlock(&teams.lock);
    for (size_t t = 0; t < team->scratch.size / sizeof(Scratch); t++)
        for (int part = 0; part < PARTS_OF_SCRATCH; part++) free(((Scratch *)team->scratch.data)[t].part[part].data);
    free(team->scratch.data);
    free(team->stages.data);
    for (int i = 0; i < ROW_BUFFERS; i++) free(team->rows[i].data);
    free(team);
}
