// Products in whole numbers, for processors with AVX-512's VNNI: 16 rows at a time, each in a lane of its own.
//
// x is rounded to 16 bits of the largest of each 32 numbers, and kept as two signed digits of a byte: v = 256 * high + low.
// A row's group is `scale * u - minus` with bytes u, so that its product is scale * (sum of u * v) - minus * (sum of v): the first
// sum is exact, in half the instructions that float32 takes, and what is rounded after it does not depend on how many tokens
// there are.

#include "rows.h"

#if defined(__AVX512VNNI__)
#include <math.h>
#include <stdlib.h>
#include <string.h>

// STRIP: rows; TILE: tokens whose sums stay in registers; CHUNK: groups that are unpacked at a time for several tiles, of BLOCK
// tokens, so that both stay in the processor's caches; NEXT: how many strips ahead is fetched.
enum { STRIP = 16, TILE = 8, CHUNK = 24, BLOCK = 128, NEXT = 2, LARGEST = 127 * 256 + 127 };

// A group of a token: its digits, and by halves what they stand for.
typedef struct {
    int8_t high[GROUP], low[GROUP];
} digits;
typedef struct {
    float scale, sums[2], all;  // of one of v; of the numbers of either half, and of both
} digit_scales;

struct whole_tokens {
    int64_t count, groups;
    digits *x;  // [tiles of tokens][groups][TILE]
    digit_scales *scales;
};

// A group of a strip: lane r of code i has numbers 4 * i .. 4 * i + 3 of row r; scales are of either half, in most types alike.
typedef struct {
    __m512i codes[GROUP / 4];
    floats scale[2], minus[2];
} strip_group;

static void round_group(const float *x, digits *to, digit_scales *scales) {
    const floats a = load(x), b = load(x + LANES);
    const float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps((__m512)a), _mm512_abs_ps((__m512)b)));
    const float factor = largest > 1e-30f ? LARGEST / largest : 0;
    // What is no number, or infinite, makes none of the sums a number.
    const int finite = !(_mm512_fpclass_ps_mask((__m512)a, 0x99) | _mm512_fpclass_ps_mask((__m512)b, 0x99));
    scales->scale = finite ? largest / LARGEST : NAN;
    int32_t sums[2];
    for (int i = 0; i < 2; i++) {
        const __m512i v = _mm512_cvtps_epi32((__m512)((i ? b : a) * factor));
        const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(v, _mm512_set1_epi32(128)), 8);
        _mm_storeu_si128((__m128i *)(to->high + LANES * i), _mm512_cvtepi32_epi8(high));
        _mm_storeu_si128((__m128i *)(to->low + LANES * i), _mm512_cvtepi32_epi8(v));
        sums[i] = _mm512_reduce_add_epi32(v);
        scales->sums[i] = scales->scale * (float)sums[i];
    }
    scales->all = scales->scale * (float)(sums[0] + sums[1]);
}

INLINE int64_t place(const whole_tokens *in, int64_t token, int64_t group) {
    return (token / TILE * in->groups + group) * TILE + token % TILE;
}

whole_tokens *sapwood_whole_tokens(int64_t count, int64_t columns) {
    const int64_t groups = columns / GROUP, padded = (count + TILE - 1) / TILE * TILE;
    const size_t size = (size_t)(padded * groups);
    const size_t scales = (sizeof(digit_scales) * size + LINE - 1) / LINE * LINE;
    whole_tokens *made = aligned_alloc(LINE, LINE + sizeof(digits) * size + scales);
    if (!made) return NULL;
    made->count = count;
    made->groups = groups;
    made->x = (digits *)((char *)made + LINE);
    made->scales = (digit_scales *)(made->x + size);
    for (int64_t t = count; t < padded; t++)
        for (int64_t g = 0; g < groups; g++) {  // multiplied with the others, and not written
            memset(made->x + place(made, t, g), 0, sizeof(digits));
            memset(made->scales + place(made, t, g), 0, sizeof(digit_scales));
        }
    return made;
}

void sapwood_set_token(whole_tokens *to, int64_t token, const float *x) {
    for (int64_t g = 0; g < to->groups; g++) {
        const int64_t at = place(to, token, g);
        round_group(x + GROUP * g, to->x + at, to->scales + at);
    }
}

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

// 32 codes of 4 bits from byte `from` on, of which a byte has those of two numbers 16 apart.
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

// total[t] += the products of a strip's group with those of `count` tokens.
INLINE void add_group(
    const int count, const int halves, const strip_group *w, const digits *x, const digit_scales *scales, floats *total) {
#pragma GCC unroll 8
    for (int t = 0; t < count; t++)
#pragma GCC unroll 2
        for (int half = 0; half <= halves; half++) {
            const int first = 4 * half, last = halves ? first + 4 : 8;
            __m512i sum = _mm512_setzero_si512();
#pragma GCC unroll 8
            for (int i = first; i < last; i++) sum = _mm512_dpbusd_epi32(sum, w->codes[i], four(x[t].high + 4 * i));
            sum = _mm512_slli_epi32(sum, 8);
#pragma GCC unroll 8
            for (int i = first; i < last; i++) sum = _mm512_dpbusd_epi32(sum, w->codes[i], four(x[t].low + 4 * i));
            total[t] += (floats)_mm512_cvtepi32_ps(sum) * (w->scale[half] * scales[t].scale);
            total[t] -= w->minus[half] * (halves ? scales[t].sums[half] : scales[t].all);
        }
}

// What is fetched for each group, since processors fetch ahead only what is read in order, and here 16 rows are read at a time.
typedef struct {
    const uint8_t *next;
    int64_t bytes;
} ahead;

INLINE void fetch(ahead *from) {
    for (int64_t at = 0; at < from->bytes; at += LINE) __builtin_prefetch(from->next + at, 0, 2);
    from->next += from->bytes;
}

// The products of a strip with `count` tokens of a tile.
INLINE void few_tokens(
    const int type, const int count, strip_bytes in, int64_t groups, const digits *x, const digit_scales *scales, ahead from,
    floats *sums) {
    floats total[TILE] = {0};
    for (; groups > 0; groups -= groups_of(type), in.first += bytes_of(type)) {
        strip_group w[8];  // of one group it stays in registers
        unpack(type, in, w);
        for (int j = 0; j < groups_of(type); j++, x += TILE, scales += TILE) {
            fetch(&from);
            add_group(count, type == Q6_K, w + j, x, scales, total);
        }
    }
    for (int t = 0; t < count; t++) sums[t] = total[t];
}

// sums[t] += the products of what is unpacked of a strip with a tile.
INLINE void add_tile(
    const int halves, const strip_group *w, int64_t groups, const digits *x, const digit_scales *scales, ahead from,
    floats *sums) {
    floats total[TILE];
    for (int t = 0; t < TILE; t++) total[t] = sums[t];
    for (; groups > 0; groups--, w++, x += TILE, scales += TILE) {
        fetch(&from);
        add_group(TILE, halves, w, x, scales, total);
    }
    for (int t = 0; t < TILE; t++) sums[t] = total[t];
}

typedef struct {
    void (*few)(
        int64_t count, strip_bytes in, int64_t groups, const digits *x, const digit_scales *scales, ahead from, floats *sums);
    void (*unpack)(strip_bytes in, int64_t groups, strip_group *to);
} format;

#define FORMAT(type)                                                                                                   \
    static void few_##type(                                                                                            \
        int64_t count, strip_bytes in, int64_t groups, const digits *x, const digit_scales *scales, ahead from,        \
        floats *sums) {                                                                                                \
        if (count == 1) few_tokens(type, 1, in, groups, x, scales, from, sums);                                        \
        else if (count == 2) few_tokens(type, 2, in, groups, x, scales, from, sums);                                   \
        else if (count <= 4) few_tokens(type, 4, in, groups, x, scales, from, sums);                                   \
        else few_tokens(type, TILE, in, groups, x, scales, from, sums);                                                \
    }                                                                                                                  \
    static void unpack_##type(strip_bytes in, int64_t groups, strip_group *to) {                                       \
        for (; groups > 0; groups -= groups_of(type), to += groups_of(type), in.first += bytes_of(type))               \
            unpack(type, in, to);                                                                                      \
    }
FORMAT(Q4_0)
FORMAT(Q4_1)
FORMAT(Q5_0)
FORMAT(Q5_1)
FORMAT(Q8_0)
FORMAT(Q4_K)
FORMAT(Q5_K)
FORMAT(Q6_K)
#define ENTRY(type) [type] = {few_##type, unpack_##type}
static const format FORMATS[] = {
    ENTRY(Q4_0), ENTRY(Q4_1), ENTRY(Q5_0), ENTRY(Q5_1), ENTRY(Q8_0), ENTRY(Q4_K), ENTRY(Q5_K), ENTRY(Q6_K),
};

static void write_sums(const floats *sums, int64_t tokens, int64_t rows, float *out, int64_t out_stride) {
    const __mmask16 there = (__mmask16)((1u << rows) - 1);
    for (int64_t t = 0; t < tokens; t++) _mm512_mask_storeu_ps(out + out_stride * t, there, (__m512)sums[t]);
}

static void some_tokens(
    const whole_tokens *in, int type, strip_bytes strip, ahead from, int64_t rows, float *out, int64_t out_stride) {
    floats sums[TILE];
    FORMATS[type].few(in->count, strip, in->groups, in->x, in->scales, from, sums);
    write_sums(sums, in->count, rows, out, out_stride);
}

// A strip is unpacked once for many tiles.
static void many_tokens(
    const whole_tokens *in, int type, strip_bytes strip, ahead from, int64_t rows, float *out, int64_t out_stride) {
    strip_group w[CHUNK];
    floats sums[BLOCK];
    for (int64_t start = 0; start < in->count; start += BLOCK) {
        const int64_t count = in->count - start < BLOCK ? in->count - start : BLOCK;
        memset(sums, 0, sizeof sums);
        for (int64_t g = 0; g < in->groups; g += CHUNK) {
            const int64_t groups = in->groups - g < CHUNK ? in->groups - g : CHUNK;
            const strip_bytes chunk = {strip.first + g / groups_of(type) * bytes_of(type), strip.stride};
            FORMATS[type].unpack(chunk, groups, w);
            for (int64_t t = 0; t < count; t += TILE) {
                const int64_t at = place(in, start + t, g);
                const ahead once = {from.next + from.bytes * g, start + t ? 0 : from.bytes};
                if (type == Q6_K) add_tile(1, w, groups, in->x + at, in->scales + at, once, sums + t);
                else add_tile(0, w, groups, in->x + at, in->scales + at, once, sums + t);
            }
        }
        write_sums(sums, count, rows, out + out_stride * start, out_stride);
    }
}

void sapwood_whole_rows(const whole_tokens *in, const matrix *m, int64_t first, int64_t last, float *out, int64_t out_stride) {
    for (int64_t row = first, rows; row < last; row += rows, out += rows) {
        rows = last - row < STRIP ? 1 : STRIP;  // the last ones one by one, each in all lanes
        const strip_bytes strip = {m->data + m->stride * row, rows > 1 ? m->stride : 0};
        const int64_t bytes = m->rows - row < (NEXT + 1) * STRIP ? 0 : STRIP * m->width / in->groups;
        const ahead from = {strip.first + NEXT * STRIP * m->stride, bytes};
        (in->count > TILE ? many_tokens : some_tokens)(in, (int)m->type, strip, from, rows, out, out_stride);
    }
}
#else  // never called
whole_tokens *sapwood_whole_tokens(int64_t count, int64_t columns) { return (void)count, (void)columns, (whole_tokens *)0; }
void sapwood_set_token(whole_tokens *to, int64_t token, const float *x) { (void)to, (void)token, (void)x; }
void sapwood_whole_rows(const whole_tokens *in, const matrix *m, int64_t first, int64_t last, float *out, int64_t out_stride) {
    (void)in, (void)m, (void)first, (void)last, (void)out, (void)out_stride;
}
#endif
