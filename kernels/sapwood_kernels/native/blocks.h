// Blocks of GGUF files. Formats: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and gguf-py's quants.py.
//
// A row is a run of blocks; here it is read in groups of 32 numbers, each of which is `scale * q - minus` with an integer q.

#ifndef SAPWOOD_BLOCKS_H
#define SAPWOOD_BLOCKS_H

#include <string.h>

#include "vectors.h"

enum { GROUP = 32, PARTS = GROUP / LANES };

typedef int8_t signed_bytes __attribute__((vector_size(LANES)));
typedef uint8_t bytes __attribute__((vector_size(16)));
typedef uint16_t pairs __attribute__((vector_size(16)));
typedef uint8_t bytes_at __attribute__((vector_size(16), aligned(1), may_alias));

// A group's numbers: those of part i are q[i] * scale[i / (PARTS / 2)] - minus.
typedef struct {
    floats q[PARTS];
    float scale[2];
    float minus;
} group;

INLINE bytes load16(const uint8_t *at) { return *(const bytes_at *)at; }

// A group of 32 signed bytes.
INLINE group grouped(bytes low, bytes high, float low_scale, float high_scale, float minus) {
    group g = {.scale = {low_scale, high_scale}, .minus = minus};
    const bytes both[2] = {low, high};
    for (int i = 0; i < PARTS; i++) {
        const bytes q = both[i / (PARTS / 2)];
#if defined(__AVX512F__)
        g.q[i] = (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)q));
#elif defined(__AVX2__)
        const __m128i part = i % 2 ? _mm_srli_si128((__m128i)q, 8) : (__m128i)q;
        g.q[i] = (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(part));
#else
        union { bytes all; signed_bytes part[PARTS / 2]; } split = {q};
        g.q[i] = __builtin_convertvector(__builtin_convertvector(split.part[i % (PARTS / 2)], ints), floats);
#endif
    }
    return g;
}

INLINE float half(const uint8_t *at) {
    uint16_t bits;
    memcpy(&bits, at, sizeof bits);
#if defined(__F16C__)
    return _cvtsh_ss(bits);
#else
    __fp16 value;
    memcpy(&value, &bits, sizeof value);
    return (float)value;
#endif
}

// Processors shift no bytes: pairs of them are shifted, and the caller masks what came from the neighbour.
INLINE bytes right(bytes q, int by) { return (bytes)((pairs)q >> by); }
INLINE bytes left(bytes q, int by) { return (bytes)((pairs)q << by); }

// 16 where the bit of `mask` is set, else 0.
INLINE bytes bit5(uint32_t mask) {
#if defined(__AVX512BW__)
    return (bytes)_mm_maskz_set1_epi8((__mmask16)mask, 16);
#else
    const bytes select = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint8_t low = (uint8_t)mask, high = (uint8_t)(mask >> 8);
    const bytes spread = {low, low, low, low, low, low, low, low, high, high, high, high, high, high, high, high};
    return (bytes)((spread & select) == select) & 16;
#endif
}

INLINE group q4_0(const uint8_t *block) {
    const bytes q = load16(block + 2);
    const float scale = half(block);
    return grouped((q & 15) - 8, (right(q, 4) & 15) - 8, scale, scale, 0);
}

INLINE group q4_1(const uint8_t *block) {
    const bytes q = load16(block + 4);
    const float scale = half(block);
    return grouped(q & 15, right(q, 4) & 15, scale, scale, -half(block + 2));
}

INLINE group q5_0(const uint8_t *block) {
    const bytes q = load16(block + 6);
    const float scale = half(block);
    uint32_t fifth;
    memcpy(&fifth, block + 2, sizeof fifth);
    return grouped(((q & 15) | bit5(fifth)) - 16, ((right(q, 4) & 15) | bit5(fifth >> 16)) - 16, scale, scale, 0);
}

INLINE group q5_1(const uint8_t *block) {
    const bytes q = load16(block + 8);
    const float scale = half(block);
    uint32_t fifth;
    memcpy(&fifth, block + 4, sizeof fifth);
    return grouped((q & 15) | bit5(fifth), (right(q, 4) & 15) | bit5(fifth >> 16), scale, scale, -half(block + 2));
}

INLINE group q8_0(const uint8_t *block) {
    const float scale = half(block);
    return grouped(load16(block + 2), load16(block + 18), scale, scale, 0);
}

// Scale and minimum of a group of Q4_K and Q5_K: 6 bits each, eight of either in 12 bytes.
INLINE void six_bits(const uint8_t *packed, int j, float *scale, float *minus) {
    if (j < 4) {
        *scale = packed[j] & 63;
        *minus = packed[j + 4] & 63;
    } else {
        *scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4;
        *minus = packed[j + 4] >> 4 | (packed[j] >> 6) << 4;
    }
}

INLINE group q4_k(const uint8_t *block, int j) {
    const uint8_t *q = block + 16 + 32 * (j / 2);
    const int shift = j % 2 * 4;
    float scale, minus;
    six_bits(block + 4, j, &scale, &minus);
    scale *= half(block);
    const bytes q0 = right(load16(q), shift) & 15, q1 = right(load16(q + 16), shift) & 15;
    return grouped(q0, q1, scale, scale, minus * half(block + 2));
}

INLINE group q5_k(const uint8_t *block, int j) {
    const uint8_t *fifth = block + 16, *q = block + 48 + 32 * (j / 2);
    const int shift = j % 2 * 4;
    float scale, minus;
    six_bits(block + 4, j, &scale, &minus);
    scale *= half(block);
    const bytes q0 = (right(load16(q), shift) & 15) | left(right(load16(fifth), j) & 1, 4);
    const bytes q1 = (right(load16(q + 16), shift) & 15) | left(right(load16(fifth + 16), j) & 1, 4);
    return grouped(q0, q1, scale, scale, minus * half(block + 2));
}

INLINE group q6_k(const uint8_t *block, int j) {
    const int side = j / 4, part = j % 4, low_shift = part / 2 * 4, high_shift = part * 2;
    const uint8_t *low = block + 64 * side + 32 * (part % 2), *high = block + 128 + 32 * side;
    const int8_t *scales = (const int8_t *)block + 192 + 8 * side + 2 * part;
    const float scale = half(block + 208);
    const bytes q0 = (right(load16(low), low_shift) & 15) | left(right(load16(high), high_shift) & 3, 4);
    const bytes q1 = (right(load16(low + 16), low_shift) & 15) | left(right(load16(high + 16), high_shift) & 3, 4);
    return grouped(q0 - 32, q1 - 32, scale * scales[0], scale * scales[1], 0);
}

INLINE group g4(const uint8_t *block, int j) {
    const bytes q = load16(block + 8 + 16 * j);
    const uint8_t zero = block[4];
    float scale;
    memcpy(&scale, block, sizeof scale);
    return grouped((q & 15) - zero, (right(q, 4) & 15) - zero, scale, scale, 0);
}

// By ggml's numbers.
enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14 };
// Our own, of 32 and 128 numbers: `(code - zero) * scale` with a float32 scale, a zero in a byte (three unused), codes as of Q4_0.
enum { G4_32 = 64, G4_128 = 65 };

// Groups and bytes of a block.
INLINE int groups_of(const int type) { return type == G4_128 ? 4 : type < Q4_K || type == G4_32 ? 1 : 8; }
INLINE int64_t bytes_of(const int type) {
    switch (type) {
        case Q4_0: return 18;
        case Q4_1: return 20;
        case Q5_0: return 22;
        case Q5_1: return 24;
        case Q8_0: return 34;
        case Q4_K: return 144;
        case Q5_K: return 176;
        case G4_32: return 24;
        case G4_128: return 72;
        default: return 210;
    }
}

// Group j of a block.
INLINE group read(const int type, const uint8_t *block, int j) {
    switch (type) {
        case Q4_0: return q4_0(block);
        case Q4_1: return q4_1(block);
        case Q5_0: return q5_0(block);
        case Q5_1: return q5_1(block);
        case Q8_0: return q8_0(block);
        case Q4_K: return q4_k(block, j);
        case Q5_K: return q5_k(block, j);
        case G4_32:
        case G4_128: return g4(block, j);
        default: return q6_k(block, j);
    }
}

#endif
