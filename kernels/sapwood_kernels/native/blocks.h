// Blocks of GGUF files. Formats: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and gguf-py's quants.py.
//
// A row is a run of blocks; here it is read in groups of 32 numbers; each is `scale * q - minus` with an integer q.

#ifndef SAPWOOD_BLOCKS_H
#define SAPWOOD_BLOCKS_H

#include <string.h>

#include "vectors.h"

enum { GROUP = 32, PARTS = GROUP / LANES, SCALES = 32 };

typedef int8_t signed_bytes __attribute__((vector_size(LANES)));
typedef uint8_t bytes __attribute__((vector_size(16)));
typedef uint32_t words __attribute__((vector_size(16)));
typedef uint16_t pairs __attribute__((vector_size(16)));
typedef uint8_t bytes_at __attribute__((vector_size(16), aligned(1), may_alias));

// By ggml's numbers.
enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, IQ4_NL = 20, IQ4_XS = 23, MXFP4 = 39 };
// Our own, of 32 and 128 numbers: `(code - zero) * scale` with a float32 scale, a zero in a byte (three unused), codes as for Q4_0.
enum { G4_32 = 64, G4_128 = 65 };

// A group's numbers.
//
// Each is `scale * q - minus`, rounded once: scale times q is exact where something is subtracted.
typedef struct {
    floats w[PARTS];
} group;

INLINE bytes load16(const uint8_t *at) { return *(const bytes_at *)at; }

// A group of 32 signed bytes.
INLINE group grouped(bytes low, bytes high, float low_scale, float high_scale, float minus) {
    group g;
    const bytes both[2] = {low, high};
    const float scale[2] = {low_scale, high_scale};
    for (int i = 0; i < PARTS; i++) {
        const bytes q = both[i / (PARTS / 2)];
#if defined(__AVX512F__)
        const floats each = (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)q));
#elif defined(__AVX2__)
        const __m128i part = i % 2 ? _mm_srli_si128((__m128i)q, 8) : (__m128i)q;
        const floats each = (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(part));
#else
        union { bytes all; signed_bytes part[PARTS / 2]; } split = {q};
        const floats each = __builtin_convertvector(__builtin_convertvector(split.part[i % (PARTS / 2)], ints), floats);
#endif
        g.w[i] = each * scale[i / (PARTS / 2)] - minus;
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

#if defined(__AVX512F__)
// What the 16 codes of 4 bits stand for. Its processors look numbers up in a register by the low four bits of each index.
INLINE floats table(float scale, float zero, float minus) {
    const floats codes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (codes - zero) * scale - minus;
}
// Those of the bits from `shift` on of 16 bytes.
INLINE floats looked_up(floats table, const uint8_t *at, int shift) {
    return (floats)_mm512_permutexvar_ps(_mm512_srli_epi32(_mm512_cvtepu8_epi32((__m128i)load16(at)), shift), (__m512)table);
}
// With `more` added where the mask has a bit.
INLINE floats plus(floats w, uint32_t mask, float more) {
    return (floats)_mm512_mask_add_ps((__m512)w, (__mmask16)mask, (__m512)w, _mm512_set1_ps(more));
}
#else
// 16 where the bit of `mask` is set, else 0.
INLINE bytes bit5(uint32_t mask) {
    const bytes select = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint8_t low = (uint8_t)mask, high = (uint8_t)(mask >> 8);
    const bytes spread = {low, low, low, low, low, low, low, low, high, high, high, high, high, high, high, high};
    return (bytes)((spread & select) == select) & 16;
}
#endif

// Codes of 4 bits; a byte has those of two numbers 16 apart.
INLINE group four_bits(const uint8_t *at, float scale, uint8_t zero, float minus) {
#if defined(__AVX512F__)
    const floats values = table(scale, zero, minus);
    return (group){{looked_up(values, at, 0), looked_up(values, at, 4)}};
#else
    const bytes q = load16(at);
    return grouped((q & 15) - zero, (right(q, 4) & 15) - zero, scale, scale, minus);
#endif
}

// The same with a fifth bit for each, number by number.
INLINE group five_bits(const uint8_t *at, const uint8_t *fifths, float scale, uint8_t zero, float minus) {
    uint32_t fifth;
    memcpy(&fifth, fifths, sizeof fifth);
#if defined(__AVX512F__)
    const group g = four_bits(at, scale, zero, 0);
    return (group){{plus(g.w[0], fifth, 16 * scale) - minus, plus(g.w[1], fifth >> 16, 16 * scale) - minus}};
#else
    const bytes q = load16(at);
    const bytes low = (q & 15) | bit5(fifth), high = (right(q, 4) & 15) | bit5(fifth >> 16);
    return grouped(low - zero, high - zero, scale, scale, minus);
#endif
}

INLINE group q4_0(const uint8_t *block) { return four_bits(block + 2, half(block), 8, 0); }
INLINE group q4_1(const uint8_t *block) { return four_bits(block + 4, half(block), 0, -half(block + 2)); }
INLINE group q5_0(const uint8_t *block) { return five_bits(block + 6, block + 2, half(block), 16, 0); }
INLINE group q5_1(const uint8_t *block) { return five_bits(block + 8, block + 4, half(block), 0, -half(block + 2)); }

INLINE group q8_0(const uint8_t *block) {
    const float scale = half(block);
    return grouped(load16(block + 2), load16(block + 18), scale, scale, 0);
}

// What codes of 4 bits stand for where that is a table: of IQ4, and of MXFP4, twice its numbers.
static const int8_t CURVE[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t FLOATS[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Such codes; a byte has those of two numbers 16 apart.
INLINE group coded(const uint8_t *at, const int8_t *values, float scale) {
#if defined(__AVX512F__)
    const bytes all = load16((const uint8_t *)values);
    const floats table = (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)all)) * scale;
    return (group){{looked_up(table, at, 0), looked_up(table, at, 4)}};
#else
    const bytes q = load16(at);
    bytes low = q & 15, high = right(q, 4) & 15;
#if defined(__AVX2__)
    const __m128i all = (__m128i)load16((const uint8_t *)values);
    low = (bytes)_mm_shuffle_epi8(all, (__m128i)low), high = (bytes)_mm_shuffle_epi8(all, (__m128i)high);
#else
    for (int i = 0; i < 16; i++) low[i] = (uint8_t)values[low[i]], high[i] = (uint8_t)values[high[i]];
#endif
    return grouped(low, high, scale, scale, 0);
#endif
}

INLINE group iq4_nl(const uint8_t *block) { return coded(block + 2, CURVE, half(block)); }
INLINE group iq4_xs(const uint8_t *block, int j, const float *scales) { return coded(block + 8 + 16 * j, CURVE, scales[j]); }

INLINE group mxfp4(const uint8_t *block) {
    const uint32_t exponent = block[0], bits = exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23;
    float scale;  // half of what the exponent says
    memcpy(&scale, &bits, sizeof scale);
    return coded(block + 1, FLOATS, scale);
}

// The scales of a block of eight groups, SCALES numbers: Q6_K has two for each; Q4_K and Q5_K have one, and what they subtract
// from the 24th number on; IQ4_XS has one.
INLINE void block_scales(const int type, const uint8_t *block, float *scales) {
    bytes codes;
    float low, high;
    if (type == IQ4_XS) {
        uint16_t upper;
        memcpy(&upper, block + 2, sizeof upper);
        for (int j = 0; j < 8; j++)
            scales[j] = half(block) * (float)(((block[4 + j / 2] >> j % 2 * 4 & 15) | (upper >> 2 * j & 3) << 4) - 32);
        return;
    }
    if (type == Q6_K) {
        codes = load16(block + 192);
        low = high = half(block + 208);
    } else {  // 6 bits each, eight of either in 12 bytes: the upper two bits of the last four are above those of the first four
        uint32_t a, b, c;
        memcpy(&a, block + 4, sizeof a);
        memcpy(&b, block + 8, sizeof b);
        memcpy(&c, block + 12, sizeof c);
        const words split = {
            a & 0x3f3f3f3f, (c & 0x0f0f0f0f) | (a >> 2 & 0x30303030), b & 0x3f3f3f3f, (c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030)};
        codes = (bytes)split;
        low = half(block), high = half(block + 2);
    }
    const group both = grouped(codes, codes, low, high, 0);
    for (int i = 0; i < PARTS; i++) store(scales + LANES * i, both.w[i]);
}

INLINE group q4_k(const uint8_t *block, int j, const float *scales) {
    const uint8_t *q = block + 16 + 32 * (j / 2);
    const int shift = j % 2 * 4;
    const float scale = scales[j], minus = scales[24 + j];
#if defined(__AVX512F__)
    const floats values = table(scale, 0, minus);
    return (group){{looked_up(values, q, shift), looked_up(values, q + 16, shift)}};
#else
    return grouped(right(load16(q), shift) & 15, right(load16(q + 16), shift) & 15, scale, scale, minus);
#endif
}

INLINE group q5_k(const uint8_t *block, int j, const float *scales) {
    const uint8_t *fifth = block + 16, *q = block + 48 + 32 * (j / 2);
    const int shift = j % 2 * 4;
    const float scale = scales[j], minus = scales[24 + j];
    const bytes q0 = (right(load16(q), shift) & 15) | left(right(load16(fifth), j) & 1, 4);
    const bytes q1 = (right(load16(q + 16), shift) & 15) | left(right(load16(fifth + 16), j) & 1, 4);
    return grouped(q0, q1, scale, scale, minus);
}

INLINE group q6_k(const uint8_t *block, int j, const float *scales) {
    const int side = j / 4, part = j % 4, low_shift = part / 2 * 4, high_shift = part * 2;
    const uint8_t *low = block + 64 * side + 32 * (part % 2), *high = block + 128 + 32 * side;
    const bytes q0 = (right(load16(low), low_shift) & 15) | left(right(load16(high), high_shift) & 3, 4);
    const bytes q1 = (right(load16(low + 16), low_shift) & 15) | left(right(load16(high + 16), high_shift) & 3, 4);
    return grouped(q0 - 32, q1 - 32, scales[2 * j], scales[2 * j + 1], 0);
}

INLINE group g4(const uint8_t *block, int j) {
    float scale;
    memcpy(&scale, block, sizeof scale);
    return four_bits(block + 8 + 16 * j, scale, block[4], 0);
}

// Groups and bytes of a block.
INLINE int groups_of(const int type) {
    return type == G4_128 ? 4 : type < Q4_K || type == IQ4_NL || type == MXFP4 || type == G4_32 ? 1 : 8;
}
INLINE int64_t bytes_of(const int type) {
    switch (type) {
        case Q4_0: return 18;
        case Q4_1: return 20;
        case Q5_0: return 22;
        case Q5_1: return 24;
        case Q8_0: return 34;
        case Q4_K: return 144;
        case Q5_K: return 176;
        case IQ4_NL: return 18;
        case IQ4_XS: return 136;
        case MXFP4: return 17;
        case G4_32: return 24;
        case G4_128: return 72;
        default: return 210;
    }
}

// Group j of a block, with what `block_scales` gave of it, if it has eight.
INLINE group read(const int type, const uint8_t *block, int j, const float *scales) {
    switch (type) {
        case Q4_0: return q4_0(block);
        case Q4_1: return q4_1(block);
        case Q5_0: return q5_0(block);
        case Q5_1: return q5_1(block);
        case Q8_0: return q8_0(block);
        case Q4_K: return q4_k(block, j, scales);
        case Q5_K: return q5_k(block, j, scales);
        case IQ4_NL: return iq4_nl(block);
        case IQ4_XS: return iq4_xs(block, j, scales);
        case MXFP4: return mxfp4(block);
        case G4_32:
        case G4_128: return g4(block, j);
        default: return q6_k(block, j, scales);
    }
}

#endif
