// What the sources share: vectors of GCC and Clang. The same source becomes AVX-512, AVX2 or NEON by the flags it is compiled
// with (build.py).

#ifndef SAPWOOD_VECTORS_H
#define SAPWOOD_VECTORS_H

#include <stdint.h>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

// LANES: numbers of a vector, as wide as the processor's registers.
#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX2__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef float floats4 __attribute__((vector_size(16)));
typedef float floats_at __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

// Runs `work(data)` on each of so many threads: torch's own pool (GOMP_parallel), since two pools on the same cores wait for
// each other.
typedef void (*parallel)(void (*work)(void *), void *data, unsigned threads, unsigned flags);

INLINE floats load(const float *at) { return *(const floats_at *)at; }
INLINE void store(float *at, floats v) { *(floats_at *)at = v; }

// Four numbers with the sum of a vector's.
INLINE floats4 quarter(floats v) {
    union { floats all; floats4 part[LANES / 4]; } a = {v};
    for (int count = LANES / 8; count > 0; count /= 2)
        for (int i = 0; i < count; i++) a.part[i] += a.part[i + count];
    return a.part[0];
}

INLINE float sum(floats v) {
    const floats4 four = quarter(v);
    return (four[0] + four[1]) + (four[2] + four[3]);
}

void sapwood_norm_row(const float *x, const float *weight, int64_t width, float eps, float *out);
void sapwood_gate_row(const float *gate_up, int64_t width, int64_t gate, float *out);

#endif
