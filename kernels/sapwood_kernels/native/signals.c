// Signals between processes that share memory: each counts its own word up, and waits for those of the others.

#include <limits.h>
#include <stdint.h>
#include <time.h>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define SPIN_NANOSECONDS 30000  // about what it takes to put a thread to sleep and to wake it

// A cache line of its own for each process.
typedef struct {
    uint32_t count;
    uint32_t sleepers;
    uint32_t unused[14];
} signal_t;

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static void rest(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int has_come(const signal_t *signal, uint32_t count) {
    return (int32_t)(__atomic_load_n(&signal->count, __ATOMIC_SEQ_CST) - count) >= 0;  // which may begin again at 0
}

// Says that this process has come to `count`: what it wrote before is seen by all that wait for it.
EXPORT int64_t sapwood_post(signal_t *own, int64_t count) {
    __atomic_store_n(&own->count, (uint32_t)count, __ATOMIC_SEQ_CST);
#ifdef __linux__
    // A sleeper counts itself before it looks at the word for the last time: it is either counted here, or sees the word.
    if (__atomic_load_n(&own->sleepers, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, &own->count, FUTEX_WAKE, INT_MAX, 0, 0, 0);
#endif
    return 0;
}

// Waits until all `size` processes have come to `count`. Returns -1, or after `nanoseconds` the first that has not.
EXPORT int64_t sapwood_wait(signal_t *signals, int64_t size, int64_t count, int64_t nanoseconds) {
    int64_t began = 0;
    for (int64_t i = 0; i < size; i++) {
        signal_t *signal = signals + i;
        for (int tries = 1; !has_come(signal, (uint32_t)count); tries++) {
            rest();
            if (tries % 64)
                continue;
            int64_t time = now(), waited;
            if (!began)
                began = time;
            waited = time - began;
            if (waited > nanoseconds)
                return i;
            if (waited < SPIN_NANOSECONDS)
                continue;
#ifdef __linux__
            struct timespec left = {(nanoseconds - waited) / 1000000000, (nanoseconds - waited) % 1000000000};
            __atomic_add_fetch(&signal->sleepers, 1, __ATOMIC_SEQ_CST);
            uint32_t seen = __atomic_load_n(&signal->count, __ATOMIC_SEQ_CST);
            if ((int32_t)(seen - (uint32_t)count) < 0)
                syscall(SYS_futex, &signal->count, FUTEX_WAIT, seen, &left, 0, 0);
            __atomic_sub_fetch(&signal->sleepers, 1, __ATOMIC_SEQ_CST);
#else
            sched_yield();
#endif
        }
    }
    return -1;
}
