// Runs the calls of a whole step one after another, recorded by recording.py, on threads that stay together meanwhile.
//
// A step of one token of a small model is some hundred calls of a few microseconds. To wake threads for each, and to come back to
// Python after each, takes longer than many of the calls.

#define _GNU_SOURCE
#include <sched.h>
#include <string.h>

#include "vectors.h"

enum { MULTIPLY, NORM, STORE_HEADS, ATTEND, ADD };

// The arguments are those of the function, without threads: numbers and addresses in `words`, a float in `number`.
typedef struct {
    int64_t kind;
    int64_t function;
    double number;
    int64_t words[12];
} call;

enum { SPINS = 2000, APART = 64 };

typedef struct {
    const call *calls;
    int64_t count;
    int64_t failed;
    unsigned threads;
    int64_t joined __attribute__((aligned(APART)));
    // Odd while there is work that the others may take part in; -1 at the end.
    int64_t turn __attribute__((aligned(APART)));
    void (*work)(void *);
    void *data;
    int64_t inside __attribute__((aligned(APART)));  // how many of the others are in it
} replaying;

static __thread replaying *mine;

INLINE void relax(int *spins) {
    if (++*spins > SPINS) sched_yield();  // the machine has other things to do
#if defined(__x86_64__)
    else __builtin_ia32_pause();
#endif
}

// Stands in for the pool of threads: those that wait in `help` take part. It waits for none that has not begun.
static void share(void (*work)(void *), void *data, unsigned threads, unsigned flags) {
    (void)threads, (void)flags;
    replaying *r = mine;
    r->work = work;
    r->data = data;
    __atomic_add_fetch(&r->turn, 1, __ATOMIC_SEQ_CST);
    work(data);
    __atomic_add_fetch(&r->turn, 1, __ATOMIC_SEQ_CST);
    for (int spins = 0; __atomic_load_n(&r->inside, __ATOMIC_SEQ_CST);) relax(&spins);
}

static void help(replaying *r) {
    int64_t done = 0;
    for (int spins = 0;;) {
        const int64_t turn = __atomic_load_n(&r->turn, __ATOMIC_SEQ_CST);
        if (turn < 0) return;
        if (turn % 2 == 0 || turn == done) {
            relax(&spins);
            continue;
        }
        spins = 0;
        __atomic_add_fetch(&r->inside, 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&r->turn, __ATOMIC_SEQ_CST) == turn) r->work(r->data);  // else it is over, and the data may be gone
        __atomic_sub_fetch(&r->inside, 1, __ATOMIC_SEQ_CST);
        done = turn;
    }
}

static int64_t run_call(const call *c, parallel run, unsigned threads) {
    const int64_t *w = c->words;
    void *const function = (void *)c->function;
    switch (c->kind) {
        case MULTIPLY:
            return ((int64_t(*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float, int64_t,
                                parallel, unsigned))function)(
                w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], (float)c->number, w[9], run, threads);
        case NORM:
            ((void (*)(int64_t, int64_t, int64_t, int64_t, int64_t, float, int64_t, parallel, unsigned))function)(
                w[0], w[1], w[2], w[3], w[4], (float)c->number, w[5], run, threads);
            return 0;
        case STORE_HEADS:
            ((void (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, parallel, unsigned))function)(
                w[0], w[1], w[2], w[3], w[4], w[5], w[6], run, threads);
            return 0;
        case ATTEND:
            return ((int64_t(*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, parallel, unsigned))function)(
                w[0], w[1], w[2], w[3], w[4], w[5], w[6], run, threads);
        default: {
            float *to = (float *)w[0];
            const float *from = (const float *)w[1];
            for (int64_t i = 0; i < w[2]; i++) to[i] += from[i];
            return 0;
        }
    }
}

static void replay(void *data) {
    replaying *r = data;
    if (__atomic_fetch_add(&r->joined, 1, __ATOMIC_RELAXED)) {
        help(r);
        return;
    }
    mine = r;
    for (int64_t i = 0; i < r->count && !r->failed; i++) r->failed = run_call(&r->calls[i], r->threads > 1 ? share : NULL, r->threads);
    mine = NULL;
    __atomic_store_n(&r->turn, -1, __ATOMIC_SEQ_CST);
}

// Returns what the first call that failed returned; 0: none did.
EXPORT int64_t sapwood_replay(const call *calls, int64_t count, parallel run, unsigned threads) {
    replaying r;
    memset(&r, 0, sizeof r);
    r.calls = calls, r.count = count, r.threads = run ? threads : 1;
    if (r.threads > 1) run(replay, &r, threads, 0);
    else replay(&r);
    return r.failed;
}
