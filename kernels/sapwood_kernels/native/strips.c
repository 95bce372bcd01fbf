// Products in whole numbers, for processors with AVX-512's VNNI: 16 rows at a time, each in a lane of its own.
//
// x is rounded to 16 bits of the largest of each 32 numbers, and kept as two signed digits of a byte: v = 256 * high + low. Where
// there is a matrix unit (tiles.c), it may be 24 bits in three digits, which is as near as float32.
// A row's group is `scale * u - minus` with bytes u, so that its product is scale * (sum of u * v) - minus * (sum of v): the first
// sum is exact, in half the instructions that float32 takes, and what is rounded after it does not depend on how many tokens
// there are.

#include "rows.h"

#if defined(__AVX512VNNI__)
#include <math.h>
#include <stdlib.h>

#include "strips.h"

// CHUNK: groups that are unpacked at a time for several tiles, of BLOCK tokens, so that both stay in the processor's caches; NEXT:
// how many strips ahead is fetched.
enum { CHUNK = 24, BLOCK = 128, NEXT = 2 };

// Two digits of a group.
typedef struct {
    int8_t high[GROUP], low[GROUP];
} digits;

static void round_group(const float *x, int64_t count, int8_t *to, digit_scales *scales) {
    const float most = count == 3 ? 127 * 65536 : 127 * 256 + 127;  // of three less than they hold, for what is rounded
    const floats a = load(x), b = load(x + LANES);
    const float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps((__m512)a), _mm512_abs_ps((__m512)b)));
    const float factor = largest > 1e-30f ? most / largest : 0;
    // What is no number, or infinite, makes none of the sums a number.
    const int finite = !(_mm512_fpclass_ps_mask((__m512)a, 0x99) | _mm512_fpclass_ps_mask((__m512)b, 0x99));
    scales->scale = finite ? largest / most : NAN;
    int32_t sums[2];
    for (int i = 0; i < 2; i++) {
        __m512i v = _mm512_cvtps_epi32((__m512)((i ? b : a) * factor));
        sums[i] = _mm512_reduce_add_epi32(v);
        scales->sums[i] = scales->scale * (float)sums[i];
        for (int64_t digit = count - 1; digit >= 0; digit--) {
            _mm_storeu_si128((__m128i *)(to + GROUP * digit + LANES * i), _mm512_cvtepi32_epi8(v));
            v = _mm512_srai_epi32(_mm512_add_epi32(v, _mm512_set1_epi32(128)), 8);
        }
    }
    scales->all = scales->scale * (float)(sums[0] + sums[1]);
}

INLINE int64_t place(const whole_tokens *in, int64_t token, int64_t group) {
    return (token / TILE * in->groups + group) * TILE + token % TILE;
}

whole_tokens *sapwood_whole_tokens(int64_t count, int64_t columns, int64_t digits_each) {
    const int64_t groups = columns / GROUP, padded = (count + TILE - 1) / TILE * TILE;
    const size_t size = (size_t)(padded * groups), each = (size_t)(digits_each * GROUP);
    const size_t scales = (sizeof(digit_scales) * size + LINE - 1) / LINE * LINE;
    whole_tokens *made = aligned_alloc(LINE, LINE + each * size + scales);
    if (!made) return NULL;
    made->count = count;
    made->groups = groups;
    made->digits = digits_each;
    made->x = (int8_t *)made + LINE;
    made->scales = (digit_scales *)(made->x + each * size);
    for (int64_t t = count; t < padded; t++)
        for (int64_t g = 0; g < groups; g++) {  // multiplied with the others, and not written
            memset(made->x + (int64_t)each * place(made, t, g), 0, each);
            memset(made->scales + place(made, t, g), 0, sizeof(digit_scales));
        }
    return made;
}

void sapwood_set_token(whole_tokens *to, int64_t token, const float *x) {
    for (int64_t g = 0; g < to->groups; g++) {
        const int64_t at = place(to, token, g);
        round_group(x + GROUP * g, to->digits, to->x + GROUP * to->digits * at, to->scales + at);
    }
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

// total[t][s] += the products of a group of two strips with those of a tile's tokens: what is read of a token is multiplied twice.
INLINE void add_pair(
    const int digit_count, const int halves, const strip_group *const w[2], const int8_t *x, const digit_scales *scales,
    floats (*total)[2]) {
#pragma GCC unroll 8
    for (int t = 0; t < TILE; t++, x += digit_count * GROUP)
#pragma GCC unroll 2
        for (int half = 0; half <= halves; half++) {
            const int first = 4 * half, last = halves ? first + 4 : 8;
            __m512i sum[3][2] = {0};
#pragma GCC unroll 8
            for (int i = first; i < last; i++)
#pragma GCC unroll 3
                for (int digit = 0; digit < digit_count; digit++) {
                    const __m512i v = four(x + GROUP * digit + 4 * i);
                    for (int s = 0; s < 2; s++) sum[digit][s] = _mm512_dpbusd_epi32(sum[digit][s], w[s]->codes[i], v);
                }
            for (int s = 0; s < 2; s++) {
                floats whole = (floats)_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(sum[0][s], 8), sum[1][s]));
                if (digit_count == 3) whole = whole * 256.0f + (floats)_mm512_cvtepi32_ps(sum[2][s]);
                total[t][s] += whole * (w[s]->scale[half] * scales[t].scale);
                total[t][s] -= w[s]->minus[half] * (halves ? scales[t].sums[half] : scales[t].all);
            }
        }
}

// The products of two strips with a tile.
INLINE void two_strips(
    const int type, const int digit_count, const strip_bytes *in, int64_t groups, const int8_t *x, const digit_scales *scales,
    const ahead *from, floats (*sums)[2]) {
    floats total[TILE][2] = {0};
    strip_bytes strip[2] = {in[0], in[1]};
    ahead next[2] = {from[0], from[1]};
    for (; groups > 0; groups -= groups_of(type)) {
        strip_group w[2][8];
        for (int s = 0; s < 2; s++) {
            unpack(type, strip[s], w[s]);
            strip[s].first += bytes_of(type);
        }
#pragma GCC unroll 1
        for (int j = 0; j < groups_of(type); j++, x += digit_count * TILE * GROUP, scales += TILE) {
            for (int s = 0; s < 2; s++) fetch(next + s);
            add_pair(digit_count, type == Q6_K, (const strip_group *const[2]){w[0] + j, w[1] + j}, x, scales, total);
        }
    }
    memcpy(sums, total, sizeof total);
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
    void (*two)(
        int64_t digit_count, const strip_bytes *in, int64_t groups, const int8_t *x, const digit_scales *scales,
        const ahead *from, floats (*sums)[2]);
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
    }                                                                                                                  \
    static void two_##type(                                                                                            \
        int64_t digit_count, const strip_bytes *in, int64_t groups, const int8_t *x, const digit_scales *scales,       \
        const ahead *from, floats (*sums)[2]) {                                                                        \
        if (digit_count == 2) two_strips(type, 2, in, groups, x, scales, from, sums);                                  \
        else two_strips(type, 3, in, groups, x, scales, from, sums);                                                   \
    }
FORMAT(Q4_0)
FORMAT(Q4_1)
FORMAT(Q5_0)
FORMAT(Q5_1)
FORMAT(Q8_0)
FORMAT(Q4_K)
FORMAT(Q5_K)
FORMAT(Q6_K)
#define ENTRY(type) [type] = {few_##type, unpack_##type, two_##type}
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
    FORMATS[type].few(in->count, strip, in->groups, (const digits *)in->x, in->scales, from, sums);
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
                const digits *x = (const digits *)in->x + at;
                if (type == Q6_K) add_tile(1, w, groups, x, in->scales + at, once, sums + t);
                else add_tile(0, w, groups, x, in->scales + at, once, sums + t);
            }
        }
        write_sums(sums, count, rows, out + out_stride * start, out_stride);
    }
}

// By the matrix unit, tile by tile.
static void tiles_of_tokens(
    const whole_tokens *in, by_matrix *multiply, strip_bytes strip, ahead from, int64_t rows, float *out, int64_t out_stride) {
    for (int64_t start = 0; start < in->count; start += TILE) {
        floats sums[TILE];
        const int64_t at = place(in, start, 0), count = in->count - start < TILE ? in->count - start : TILE;
        const ahead once = {from.next, start ? 0 : from.bytes};
        multiply(strip, in->groups, in->x + GROUP * in->digits * at, in->scales + at, once, sums);
        write_sums(sums, count, rows, out + out_stride * start, out_stride);
    }
}

// What is fetched while a strip is multiplied: the strip that is NEXT behind it, or behind what other threads multiply meanwhile.
static ahead behind(const whole_tokens *in, const matrix *m, int64_t row, int64_t last, int64_t then) {
    int64_t at = row + NEXT * STRIP;
    if (at >= last) at += then - last;
    return (ahead){m->data + m->stride * at, m->rows - at < STRIP ? 0 : STRIP * m->width / in->groups};
}

// Two strips at a time, tile by tile; of fewer rows than two strips have, one is there twice.
static void pairs_of_strips(
    const whole_tokens *in, const matrix *m, int64_t first, int64_t last, int64_t then, float *out, int64_t out_stride) {
    for (int64_t row = first, rows; row < last; row += rows, out += rows) {
        rows = last - row < STRIP ? 1 : last - row < 2 * STRIP ? STRIP : 2 * STRIP;
        const int64_t stride = rows > 1 ? m->stride : 0, second = rows > STRIP ? STRIP : 0;
        const uint8_t *at = m->data + m->stride * row;
        ahead from[2] = {behind(in, m, row, last, then), behind(in, m, row + second, last, then)};
        if (!second) from[1].bytes = 0;
        const strip_bytes strips[2] = {{at, stride}, {at + second * stride, stride}};
        for (int64_t start = 0; start < in->count; start += TILE) {
            floats sums[TILE][2];
            const int64_t x = place(in, start, 0), count = in->count - start < TILE ? in->count - start : TILE;
            FORMATS[m->type].two(in->digits, strips, in->groups, in->x + GROUP * in->digits * x, in->scales + x, from, sums);
            for (int64_t t = 0; t < count; t++)
                for (int64_t s = 0; s < (second ? 2 : 1); s++)
                    write_sums(&sums[t][s], 1, rows < STRIP ? 1 : STRIP, out + out_stride * (start + t) + STRIP * s, out_stride);
            from[0].bytes = from[1].bytes = 0;  // once is enough
        }
    }
}

void sapwood_whole_rows(
    const whole_tokens *in, const matrix *m, int64_t first, int64_t last, int64_t then, float *out, int64_t out_stride) {
    const int enough = in->digits == 3 || (in->count > TILE / 2 && in->count <= 3 * TILE);
    by_matrix *multiply = enough ? sapwood_by_matrix(m->type, in->digits) : NULL;
    if (enough && !multiply) {
        pairs_of_strips(in, m, first, last, then, out, out_stride);
        return;
    }
    if (multiply) sapwood_begin_matrix();
    for (int64_t row = first, rows; row < last; row += rows, out += rows) {
        rows = last - row < STRIP ? 1 : STRIP;  // the last ones one by one, each in all lanes
        const strip_bytes strip = {m->data + m->stride * row, rows > 1 ? m->stride : 0};
        const ahead from = behind(in, m, row, last, then);
        if (multiply) tiles_of_tokens(in, multiply, strip, from, rows, out, out_stride);
        else (in->count > TILE ? many_tokens : some_tokens)(in, (int)m->type, strip, from, rows, out, out_stride);
    }
    if (multiply) sapwood_end_matrix();
}
#else  // never called
whole_tokens *sapwood_whole_tokens(int64_t count, int64_t columns, int64_t digits_each) {
    return (void)count, (void)columns, (void)digits_each, (whole_tokens *)0;
}
void sapwood_set_token(whole_tokens *to, int64_t token, const float *x) { (void)to, (void)token, (void)x; }
void sapwood_whole_rows(
    const whole_tokens *in, const matrix *m, int64_t first, int64_t last, int64_t then, float *out, int64_t out_stride) {
    (void)in, (void)m, (void)first, (void)last, (void)then, (void)out, (void)out_stride;
}
#endif
