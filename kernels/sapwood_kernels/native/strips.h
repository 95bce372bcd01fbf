// Strips of a matrix: 16 rows, each in a lane of its own, whose groups are unpacked into bytes, for processors with AVX-512's VNNI.

#ifndef SAPWOOD_STRIPS_H
#define SAPWOOD_STRIPS_H

#include "rows.h"

// STRIP: rows; TILE: tokens whose sums stay in registers.
enum { STRIP = 16, TILE = 8 };

struct whole_tokens {
    int64_t count, groups;
    int64_t digits;  // of a number
    int8_t *x;       // [tiles of tokens][groups][TILE][digits][GROUP], the highest digit first
    struct digit_scales *scales;  // [tiles of tokens][groups][TILE]
};

// A group of a token: what one of its numbers stands for, and the numbers of either half, and of both.
typedef struct digit_scales {
    float scale, sums[2], all;
} digit_scales;

// A group of a strip: lane r of code i has numbers 4 * i .. 4 * i + 3 of row r; scales are of either half, in most types alike.
typedef struct {
    __m512i codes[GROUP / 4];
    floats scale[2], minus[2];
} strip_group;

// Where a group or block of a strip's rows lies.
typedef struct {
    const uint8_t *first;
    int64_t stride;
} strip_bytes;

// Words of four rows, in each quarter of the vectors, as rows of four words.
INLINE void turn(__m512i *v) {
    const __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
    const __m512i c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
    v[0] = _mm512_unpacklo_epi64(a, c), v[1] = _mm512_unpackhi_epi64(a, c);
    v[2] = _mm512_unpacklo_epi64(b, d), v[3] = _mm512_unpackhi_epi64(b, d);
}

// 16 bytes of each row, from byte `from` on: number d of the results has bytes 4 * d .. 4 * d + 3 of row r in lane r.
INLINE void words_of_16(const strip_bytes in, int64_t from, __m512i *out) {
    for (int64_t i = 0; i < 4; i++) {
        const uint8_t *at = in.first + from + in.stride * i;
        out[i] = _mm512_castsi128_si512((__m128i)load16(at));
        out[i] = _mm512_mask_broadcast_i32x4(out[i], 0x00f0, (__m128i)load16(at + 4 * in.stride));
        out[i] = _mm512_mask_broadcast_i32x4(out[i], 0x0f00, (__m128i)load16(at + 8 * in.stride));
        out[i] = _mm512_mask_broadcast_i32x4(out[i], 0xf000, (__m128i)load16(at + 12 * in.stride));
    }
    turn(out);
}

// The same of 32 bytes.
INLINE void words_of_32(const strip_bytes in, int64_t from, __m512i *out) {
    __m512i v[2][4];
    for (int64_t side = 0; side < 2; side++) {
        for (int64_t i = 0; i < 4; i++) {
            const uint8_t *at = in.first + from + in.stride * (8 * side + i);
            v[side][i] = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)at));
            const __m256i fourth = _mm256_loadu_si256((const __m256i *)(at + 4 * in.stride));
            v[side][i] = _mm512_mask_broadcast_i64x4(v[side][i], 0xf0, fourth);
        }
        turn(v[side]);
    }
    for (int d = 0; d < 4; d++) {
        out[d] = _mm512_shuffle_i32x4(v[0][d], v[1][d], 0x88);
        out[4 + d] = _mm512_shuffle_i32x4(v[0][d], v[1][d], 0xdd);
    }
}

// The half of a word that begins with its bit `from`.
INLINE floats half_of(__m512i words, const unsigned from) {
    return (floats)_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(words, from)));
}

// Byte i of each word.
INLINE floats byte_of(__m512i words, const int i) {
    return (floats)_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(words, 8 * (unsigned)i), _mm512_set1_epi32(255)));
}
INLINE floats signed_byte_of(__m512i words, const int i) {
    return (floats)_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 24 - 8 * (unsigned)i), 24));
}

typedef int32_t int_at __attribute__((aligned(1), may_alias));
INLINE __m512i four(const int8_t *at) { return _mm512_set1_epi32(*(const int_at *)at); }
INLINE __m512i bits(__m512i v, const unsigned shift, const char mask) {
    return _mm512_and_si512(_mm512_srli_epi32(v, shift), _mm512_set1_epi8(mask));
}
INLINE __m512i plus16(__m512i v, __mmask64 where) { return _mm512_mask_add_epi8(v, where, v, _mm512_set1_epi8(16)); }

INLINE void all_scales(strip_group *to, floats scale, floats minus) {
    to->scale[0] = to->scale[1] = scale;
    to->minus[0] = to->minus[1] = minus;
}

// 32 codes of 4 bits from byte `from` on; a byte has those of two numbers 16 apart.
INLINE void four_bit_codes(const strip_bytes in, int64_t from, __m512i *codes) {
    __m512i q[4];
    words_of_16(in, from, q);
    for (int i = 0; i < 4; i++) codes[i] = bits(q[i], 0, 15), codes[4 + i] = bits(q[i], 4, 15);
}

// A fifth bit for each, number by number.
INLINE void fifth_bits(__m512i fifth, __m512i *codes) {
    for (int i = 0; i < 8; i++) {
        const __m512i first = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
        const __m512i byte = _mm512_add_epi32(first, _mm512_set1_epi32(0x01010101 * (i / 2)));
        const __m512i select = _mm512_set1_epi32(i % 2 ? (int)0x80402010 : 0x08040201);
        codes[i] = plus16(codes[i], _mm512_test_epi8_mask(_mm512_shuffle_epi8(fifth, byte), select));
    }
}

// Types with a scale for each 32 numbers, and what is subtracted from their codes or products.
INLINE void unpack_group(const int type, const strip_bytes in, strip_group *restrict to) {
    __m512i head[4], codes[8];
    words_of_16(in, 0, head);
    const int has_minus = type == Q4_1 || type == Q5_1, five = type == Q5_0 || type == Q5_1;
    const floats scale = half_of(head[0], 0);
    if (type == Q8_0) {
        words_of_32(in, 2, codes);
        for (int i = 0; i < 8; i++) codes[i] = _mm512_xor_si512(codes[i], _mm512_set1_epi8((char)128));
    } else four_bit_codes(in, 2 + 2 * has_minus + 4 * five, codes);
    if (type == Q5_0) fifth_bits(_mm512_or_si512(_mm512_srli_epi32(head[0], 16), _mm512_slli_epi32(head[1], 16)), codes);
    if (type == Q5_1) fifth_bits(head[1], codes);
    memcpy(to->codes, codes, sizeof codes);
    all_scales(to, scale, has_minus ? -half_of(head[0], 16) : scale * (type == Q8_0 ? 128.0f : type == Q5_0 ? 16.0f : 8.0f));
}

// The upper two bits of the last four codes of 6 bits, of eight in 12 bytes, are above those of the first four.
INLINE __m512i last_codes(__m512i low, __m512i first) {
    return _mm512_or_si512(low, _mm512_and_si512(_mm512_srli_epi32(first, 2), _mm512_set1_epi8(48)));
}

INLINE void unpack_k(const int type, const strip_bytes in, strip_group *restrict to) {
    __m512i head[4];
    words_of_16(in, 0, head);
    const __m512i a = head[1], b = head[2], c = head[3];
    const __m512i scales[2] = {bits(a, 0, 63), last_codes(bits(c, 0, 15), a)};
    const __m512i minuses[2] = {bits(b, 0, 63), last_codes(bits(c, 4, 15), b)};
    const floats scale = half_of(head[0], 0), minus = half_of(head[0], 16);
    for (int j = 0; j < 8; j++)
        all_scales(to + j, scale * byte_of(scales[j / 4], j % 4), minus * byte_of(minuses[j / 4], j % 4));
    __m512i fifth[8], q[8];
    if (type == Q5_K) words_of_32(in, 16, fifth);
    for (int pair = 0; pair < 4; pair++) {
        words_of_32(in, (type == Q5_K ? 48 : 16) + 32 * pair, q);
        for (int j = 2 * pair; j < 2 * pair + 2; j++)
            for (int i = 0; i < 8; i++) {
                const __m512i code = bits(q[i], 4 * (unsigned)(j % 2), 15), select = _mm512_set1_epi8((char)(1 << j));
                to[j].codes[i] = type == Q5_K ? plus16(code, _mm512_test_epi8_mask(fifth[i], select)) : code;
            }
    }
}

INLINE void unpack_q6_k(const strip_bytes in, strip_group *restrict to) {
    __m512i scales[4], last[4];
    words_of_16(in, 192, scales);
    words_of_16(in, 194, last);
    const floats scale = half_of(last[3], 16);
    for (int j = 0; j < 8; j++)
        for (int half = 0; half < 2; half++) {
            to[j].scale[half] = scale * signed_byte_of(scales[j / 2], j % 2 * 2 + half);
            to[j].minus[half] = to[j].scale[half] * 32.0f;
        }
    for (int side = 0; side < 2; side++) {
        __m512i low[2][8], high[8];
        words_of_32(in, 64 * side, low[0]);
        words_of_32(in, 64 * side + 32, low[1]);
        words_of_32(in, 128 + 32 * side, high);
        for (int j = 0; j < 4; j++)
            for (int i = 0; i < 8; i++)
                to[4 * side + j].codes[i] = _mm512_or_si512(
                    bits(low[j % 2][i], 4 * (unsigned)(j / 2), 15), _mm512_slli_epi32(bits(high[i], 2 * (unsigned)j, 3), 4));
    }
}

// A block of each row: groups_of(type) groups.
INLINE void unpack(const int type, const strip_bytes in, strip_group *restrict to) {
    if (type == Q6_K) unpack_q6_k(in, to);
    else if (type == Q4_K || type == Q5_K) unpack_k(type, in, to);
    else unpack_group(type, in, to);
}

// What is fetched for each group, since processors fetch ahead only what is read in order, and here 16 rows are read at a time.
typedef struct {
    const uint8_t *next;
    int64_t bytes;
} ahead;

INLINE void fetch(ahead *from) {
    for (int64_t at = 0; at < from->bytes; at += LINE) __builtin_prefetch(from->next + at, 0, 3);
    from->next += from->bytes;
}

// sums[t][r]: the products of a strip with the tokens of a tile, by the processor's matrix unit (tiles.c).
typedef void by_matrix(strip_bytes in, int64_t groups, const int8_t *x, const digit_scales *scales, ahead from, floats *sums);

// Of a type and a number of digits; null: types with scales for halves of a group have none.
by_matrix *sapwood_by_matrix(int64_t type, int64_t digits);
// Between these a thread may call it.
void sapwood_begin_matrix(void);
void sapwood_end_matrix(void);

#endif
