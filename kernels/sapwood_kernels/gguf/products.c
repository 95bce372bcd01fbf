// Products with matrices in the block formats of GGUF files, as they are stored, on a CPU.
//
// Formats: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and gguf-py's quants.py. A row is a run of blocks; here it is
// read in groups of 32 numbers, each of which is `scale * q - minus` with an integer q. Activations stay float32, so a product
// differs from one with the dequantised matrix only in the order of its sum.
//
// Vectors are those of GCC and Clang: the same source becomes AVX-512, AVX2 or NEON by the flags it is compiled with
// (hatch_build.py). `run` is torch's own thread pool (GOMP_parallel), since two pools on the same cores wait for each other.

#include <stdint.h>
#include <string.h>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

// LANES: numbers of a vector, as wide as the processor's registers; TOKENS: those whose sums fit in its registers with ROWS rows.
#if defined(__AVX512F__)
enum { LANES = 16, TOKENS = 4 };
#elif defined(__AVX2__)
enum { LANES = 8, TOKENS = 2 };
#else
enum { LANES = 4, TOKENS = 4 };
#endif
enum { GROUP = 32, PARTS = GROUP / LANES, ROWS = 4, CHUNK = 1024, TASK = 32, BLOCK = 128 };

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef float floats4 __attribute__((vector_size(16)));
typedef float floats_at __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
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

// Four numbers with the sum of a vector's.
INLINE floats4 quarter(floats v) {
    union { floats all; floats4 part[LANES / 4]; } a = {v};
    for (int count = LANES / 8; count > 0; count /= 2)
        for (int i = 0; i < count; i++) a.part[i] += a.part[i + count];
    return a.part[0];
}

// The sum of each vector's numbers.
INLINE void sum4(floats a, floats b, floats c, floats d, float *sums) {
#if defined(__AVX2__)
    const __m128 ab = _mm_hadd_ps((__m128)quarter(a), (__m128)quarter(b));
    _mm_storeu_ps(sums, _mm_hadd_ps(ab, _mm_hadd_ps((__m128)quarter(c), (__m128)quarter(d))));
#else
    const floats4 all[4] = {quarter(a), quarter(b), quarter(c), quarter(d)};
    for (int i = 0; i < 4; i++) sums[i] = (all[i][0] + all[i][1]) + (all[i][2] + all[i][3]);
#endif
}

// By ggml's numbers.
enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14 };

// Groups and bytes of a block.
INLINE int groups_of(const int type) { return type < Q4_K ? 1 : 8; }
INLINE int64_t bytes_of(const int type) {
    switch (type) {
        case Q4_0: return 18;
        case Q4_1: return 20;
        case Q5_0: return 22;
        case Q5_1: return 24;
        case Q8_0: return 34;
        case Q4_K: return 144;
        case Q5_K: return 176;
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
        default: return q6_k(block, j);
    }
}

// The sums of ROWS rows times one x. Row by row, since processors fetch ahead what is read in order.
INLINE void one_token(const int type, const uint8_t *const *rows, const float *x, int64_t groups, float *sums) {
    floats total[ROWS];
    for (int r = 0; r < ROWS; r++) {
        const uint8_t *block = rows[r];
        const float *with = x;
        floats part[4] = {0};  // several, since each sum waits for the one before
        for (int64_t left = groups / groups_of(type); left > 0; left--, block += bytes_of(type)) {
#pragma GCC unroll 8
            for (int j = 0; j < groups_of(type); j++, with += GROUP) {
                const group g = read(type, block, j);
                for (int i = 0; i < PARTS; i++)
                    part[(j * PARTS + i) % 4] +=
                        (g.q[i] * g.scale[i / (PARTS / 2)] - g.minus) * *(const floats_at *)(with + LANES * i);
            }
        }
        total[r] = (part[0] + part[1]) + (part[2] + part[3]);
    }
    sum4(total[0], total[1], total[2], total[3], sums);
}

// Groups of a row as float32, to the bit what gguf-py's dequantize gives: product and difference are rounded one by one.
INLINE void widen_groups(const int type, const uint8_t *row, int64_t at, int64_t groups, float *out) {
    const int shifted = type == Q4_1 || type == Q5_1 || type == Q4_K || type == Q5_K;
    const uint8_t *block = row + at / groups_of(type) * bytes_of(type);
    for (const int64_t end = at + groups; at < end; at += groups_of(type), block += bytes_of(type)) {
#pragma GCC unroll 8
        for (int j = 0; j < groups_of(type); j++, out += GROUP) {
            const group g = read(type, block, j);
            for (int i = 0; i < PARTS; i++) {
                floats_at *to = (floats_at *)(out + LANES * i);
                *to = g.q[i] * g.scale[i / (PARTS / 2)];
                if (shifted) {
                    __asm__ volatile("" ::: "memory");  // or the two become one fused operation
                    *to = *to - g.minus;
                }
            }
        }
    }
}

#define FORMAT(type)                                                                                                \
    static void one_##type(const uint8_t *const *rows, const float *x, int64_t groups, float *sums) {               \
        one_token(type, rows, x, groups, sums);                                                                     \
    }                                                                                                               \
    static void widen_##type(const uint8_t *row, int64_t at, int64_t groups, float *out) {                          \
        widen_groups(type, row, at, groups, out);                                                                   \
    }
FORMAT(Q4_0)
FORMAT(Q4_1)
FORMAT(Q5_0)
FORMAT(Q5_1)
FORMAT(Q8_0)
FORMAT(Q4_K)
FORMAT(Q5_K)
FORMAT(Q6_K)

typedef struct {
    void (*one)(const uint8_t *const *rows, const float *x, int64_t groups, float *sums);
    void (*widen)(const uint8_t *row, int64_t at, int64_t groups, float *out);
} format;

static const format FORMATS[] = {
    [Q4_0] = {one_Q4_0, widen_Q4_0}, [Q4_1] = {one_Q4_1, widen_Q4_1}, [Q5_0] = {one_Q5_0, widen_Q5_0},
    [Q5_1] = {one_Q5_1, widen_Q5_1}, [Q8_0] = {one_Q8_0, widen_Q8_0}, [Q4_K] = {one_Q4_K, widen_Q4_K},
    [Q5_K] = {one_Q5_K, widen_Q5_K}, [Q6_K] = {one_Q6_K, widen_Q6_K},
};

// out[t][r]: the sums of ROWS widened rows, CHUNK apart, times `count` of the x.
INLINE void tile(const int count, const float *w, const float *x, int64_t x_stride, int64_t columns, float *out) {
    floats total[4][ROWS] = {0};
    for (int64_t k = 0; k < columns; k += LANES) {
        floats row[ROWS];
        for (int r = 0; r < ROWS; r++) row[r] = *(const floats_at *)(w + CHUNK * r + k);
        for (int t = 0; t < count; t++) {
            const floats each = *(const floats_at *)(x + x_stride * t + k);
            for (int r = 0; r < ROWS; r++) total[t][r] += row[r] * each;
        }
    }
    for (int t = 0; t < count; t++) sum4(total[t][0], total[t][1], total[t][2], total[t][3], out + ROWS * t);
}

typedef struct {
    const uint8_t *data;  // the first row
    int64_t stride;       // bytes from row to row
    int64_t width;        // bytes of a row
    int64_t rows;
    int64_t type;  // ggml's number
    int64_t first;  // the output's column of the first row
} matrix;

typedef struct {
    const matrix *parts;
    int64_t tokens, columns;
    const float *x;
    int64_t x_stride;
    float *out;
    int64_t out_stride;
    int64_t tasks, next;
} product;

// Processors fetch ahead only to the end of a page of memory, which is a few rows away.
INLINE void fetch(const uint8_t *row, int64_t width) {
    for (int64_t at = 0; at < width; at += 64) __builtin_prefetch(row + at, 0, 2);
}

// Rows `first` .. `last` - 1 times the x from `start` on, BLOCK at most: so many stay in the processor's cache.
static void some_rows(const product *p, const matrix *m, int64_t first, int64_t last, int64_t start) {
    const format *f = &FORMATS[m->type];
    const int64_t end = p->tokens - start < BLOCK ? p->tokens : start + BLOCK;
    float sums[ROWS], wide[ROWS * CHUNK] __attribute__((aligned(64)));
    for (int64_t row = first; row < last; row += ROWS) {
        const int64_t count = last - row < ROWS ? last - row : ROWS;
        const uint8_t *rows[ROWS];
        for (int r = 0; r < ROWS; r++) rows[r] = m->data + m->stride * (row + (r < count ? r : 0));
        float *out = p->out + m->first + row;
        const uint8_t *next = m->data + m->stride * (row + ROWS);
        const int64_t ahead = m->rows - row < 2 * ROWS ? 0 : m->width;
        if (p->tokens == 1) {
            f->one(rows, p->x, p->columns / GROUP, sums);
            memcpy(out, sums, sizeof(float) * (size_t)count);
            continue;
        }
        for (int64_t k = 0; k < p->columns; k += CHUNK) {
            const int64_t width = p->columns - k < CHUNK ? p->columns - k : CHUNK;
            for (int r = 0; r < ROWS; r++) {
                if (k == 0) fetch(next + m->stride * r, ahead);
                f->widen(rows[r], k / GROUP, width / GROUP, wide + CHUNK * r);
            }
            for (int64_t t = start; t < end; t += TOKENS) {
                float block[4 * ROWS];
                const float *x = p->x + p->x_stride * t + k;
                const int64_t many = end - t < TOKENS ? end - t : TOKENS;
                switch (many) {
                    case 1: tile(1, wide, x, p->x_stride, width, block); break;
                    case 2: tile(2, wide, x, p->x_stride, width, block); break;
                    case 3: tile(3, wide, x, p->x_stride, width, block); break;
                    default: tile(TOKENS, wide, x, p->x_stride, width, block);
                }
                for (int64_t i = 0; i < many; i++)
                    for (int64_t r = 0; r < count; r++) {
                        float *to = out + p->out_stride * (t + i) + r;
                        *to = block[ROWS * i + r] + (k ? *to : 0);
                    }
            }
        }
    }
}

static void multiply(void *data) {
    product *p = data;
    for (int64_t task; (task = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED)) < p->tasks;) {
        const matrix *m = p->parts;
        for (int64_t mine; task >= (mine = (m->rows + TASK - 1) / TASK); m++) task -= mine;
        const int64_t first = task * TASK, last = m->rows - first < TASK ? m->rows : first + TASK;
        for (int64_t start = 0; start < p->tokens; start += BLOCK) some_rows(p, m, first, last, start);
    }
}

typedef void (*parallel)(void (*work)(void *), void *data, unsigned threads, unsigned flags);

// out[t][part.first + r] = x[t] . row r of the part, for each part.
EXPORT void sapwood_gguf_multiply(
    const matrix *parts, int64_t count, const float *x, int64_t tokens, int64_t columns, int64_t x_stride, float *out,
    int64_t out_stride, parallel run, unsigned threads) {
    product p = {parts, tokens, columns, x, x_stride, out, out_stride, 0, 0};
    for (int64_t i = 0; i < count; i++) p.tasks += (parts[i].rows + TASK - 1) / TASK;
    if (run && threads > 1) run(multiply, &p, threads, 0);
    else multiply(&p);
}

typedef struct {
    const matrix *from;
    const int64_t *ids;
    int64_t count, columns;
    float *out;
    int64_t next, bad;
} gathering;

static void gather(void *data) {
    gathering *g = data;
    const matrix *m = g->from;
    for (int64_t at; (at = __atomic_fetch_add(&g->next, 1, __ATOMIC_RELAXED)) < g->count;) {
        const int64_t row = g->ids[at];
        if (row < 0 || row >= m->rows) {
            __atomic_store_n(&g->bad, 1, __ATOMIC_RELAXED);
            continue;
        }
        FORMATS[m->type].widen(m->data + m->stride * row, 0, g->columns / GROUP, g->out + g->columns * at);
    }
}

// out[i] = row ids[i] as float32. Returns 1 if there is no such row: what is in its place is undefined.
EXPORT int64_t sapwood_gguf_rows(
    const matrix *from, const int64_t *ids, int64_t count, int64_t columns, float *out, parallel run,
    unsigned threads) {
    gathering g = {from, ids, count, columns, out, 0, 0};
    if (run && threads > 1 && count >= TASK) run(gather, &g, threads, 0);
    else gather(&g);
    return g.bad;
}
