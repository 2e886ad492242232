/* A team of threads for forwards of less than a millisecond.
 *
 * A forward is a sequence of stages; the threads claim pieces of a stage and nobody waits for a thread that has claimed
 * nothing. On an idle machine this is an ordinary team; on a busy one, where the system may not run a thread for many
 * milliseconds, the caller simply does more of the work itself. (A barrier would make every stage wait for everybody.)
 */

#define SPINS_BEFORE_YIELD 2000
#define SPINS_BEFORE_SLEEP 20000 /* some hundred microseconds: about the time between two forwards */
#define MAX_STAGES 4096
#define MAX_THREADS 256

typedef struct {
    _Alignas(64) atomic_long next; /* first piece that nobody has claimed */
    atomic_long done;              /* finished pieces */
} Stage;

typedef struct {
    const Model *model; /* a forward ... */
    const Call *call;
    const Linear *linear; /* ... or one product */
    Stage *stages;
    int threads;
} Job;

static struct {
    pthread_mutex_t callers; /* one job at a time */
    pthread_mutex_t door;    /* guards `sleeping` */
    pthread_cond_t bell;
    int sleeping, started;
    atomic_uint number; /* of the newest job; odd while it is open */
    atomic_int inside;  /* workers that may be looking at the job */
    Job *job;
    pid_t owner; /* threads do not survive a fork */
} pool = {.callers = PTHREAD_MUTEX_INITIALIZER, .door = PTHREAD_MUTEX_INITIALIZER, .bell = PTHREAD_COND_INITIALIZER};

static Stage stages[MAX_STAGES];

static inline void pause_a_little(long spins) {
    if (spins > SPINS_BEFORE_YIELD) {
        sched_yield();
        return;
    }
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* The next piece of `count`, or something not below `count`. */
static inline long claim(Stage *stage, long count) {
    if (atomic_load_explicit(&stage->next, memory_order_relaxed) >= count) return count;
    return atomic_fetch_add_explicit(&stage->next, 1, memory_order_acq_rel);
}

static inline int open_for(Stage *stage, long count) {
    return atomic_load_explicit(&stage->next, memory_order_relaxed) < count;
}

static inline void finish(Stage *stage) { atomic_fetch_add_explicit(&stage->done, 1, memory_order_release); }

static inline void wait_for(Stage *stage, long count) {
    for (long spins = 0; atomic_load_explicit(&stage->done, memory_order_acquire) < count; spins++) pause_a_little(spins);
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

/* Claim tiles lo..hi-1 of a product; 0 when there is nothing left to claim. */
static inline int next_share(const Job *job, Stage *stage, long tiles, long *lo, long *hi) {
    const long each = tiles_per_share(job, tiles), i = claim(stage, shares(job, tiles));
    *lo = i * each;
    *hi = *lo + each < tiles ? *lo + each : tiles;
    return *lo < tiles;
}

static void run(Job *job, int thread);

static void *work(void *argument) {
    const int thread = (int)(intptr_t)argument;
    unsigned seen = 0;
    for (long spins = 0;; spins++) {
        const unsigned number = atomic_load_explicit(&pool.number, memory_order_acquire);
        if ((number & 1) && number != seen) {
            atomic_fetch_add_explicit(&pool.inside, 1, memory_order_seq_cst);
            if (atomic_load_explicit(&pool.number, memory_order_seq_cst) == number && thread < pool.job->threads)
                run(pool.job, thread);
            atomic_fetch_sub_explicit(&pool.inside, 1, memory_order_release);
            seen = number;
            spins = 0;
        } else if (spins < SPINS_BEFORE_SLEEP) {
            pause_a_little(0);
        } else {
            pthread_mutex_lock(&pool.door);
            pool.sleeping++;
            while (atomic_load(&pool.number) == number) pthread_cond_wait(&pool.bell, &pool.door);
            pool.sleeping--;
            pthread_mutex_unlock(&pool.door);
            spins = 0;
        }
    }
    return 0;
}

/* Run a job with up to `threads` threads, the caller included; the caller holds `pool.callers`. */
static void together(Job *job, int threads, long num_stages) {
    if (num_stages > MAX_STAGES) abort();
    job->threads = threads = threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads;
    job->stages = stages;
    for (long i = 0; i < num_stages; i++) {
        atomic_store_explicit(&stages[i].next, 0, memory_order_relaxed);
        atomic_store_explicit(&stages[i].done, 0, memory_order_relaxed);
    }
    if (pool.owner != getpid()) {
        pool.owner = getpid();
        pool.started = pool.sleeping = 0;
        atomic_store(&pool.inside, 0);
    }
    for (; pool.started < threads - 1; pool.started++) {
        pthread_t thread;
        if (pthread_create(&thread, 0, work, (void *)(intptr_t)(pool.started + 1))) break;
        pthread_detach(thread);
    }
    pool.job = job;
    if (threads > 1) {
        pthread_mutex_lock(&pool.door);
        atomic_fetch_add(&pool.number, 1); /* open */
        if (pool.sleeping) pthread_cond_broadcast(&pool.bell);
        pthread_mutex_unlock(&pool.door);
    }
    run(job, 0);
    if (threads > 1) {
        atomic_fetch_add(&pool.number, 1); /* closed: who has not entered stays out */
        for (long spins = 0; atomic_load_explicit(&pool.inside, memory_order_seq_cst); spins++) pause_a_little(spins);
    }
}
