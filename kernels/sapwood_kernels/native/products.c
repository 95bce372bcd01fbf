// Products with matrices in the block formats of GGUF files, as they are stored, and in two of our own, on a CPU.
//
// Activations stay float32, so a product differs from one with the dequantised matrix only in the order of its sum; but where a
// matrix says that it may be multiplied in whole numbers (strips.c).
//
// Rows are shared out over `run`, torch's own threads.

#include <stdlib.h>
#include <string.h>

#include "rows.h"

// TOKENS: those whose sums fit in the processor's registers with ROWS widened rows; FEW: those whose sums fit there with PAIR rows
// that are widened as they are multiplied.
#if defined(__AVX512F__)
enum { TOKENS = 4, FEW = 8, FEWER = 4 };
#elif defined(__AVX2__)
enum { TOKENS = 2, FEW = 4, FEWER = 2 };
#else
enum { TOKENS = 4, FEW = 8, FEWER = 4 };
#endif
enum { ROWS = 4, PAIR = 2, CHUNK = 1024, TASK = 32, MOST = 512, SHARES = 8, BLOCK = 128, AHEAD = 4096 };
// What is read once for several uses: else compilers read it from memory for each.
#if defined(__AVX512F__)
#define KEEP(v) __asm__("" : "+v"(v))
#else
#define KEEP(v) ((void)0)
#endif
enum { SMALL = 24 };  // up to so many tokens rows are widened as they are multiplied

// Processors fetch ahead only to the end of a page of memory, which is a few rows away.
INLINE void fetch(const uint8_t *row, int64_t width) {
    for (int64_t at = 0; at < width; at += 64) __builtin_prefetch(row + at, 0, 2);
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

#if defined(__AVX512F__)
#define JOIN(shuffle, a, b, low, high) _mm512_add_ps(shuffle(a, b, low), shuffle(a, b, high))
#endif

// sums[t][r] of the vectors of `count` tokens and PAIR rows, each in the order in which sum4 adds.
INLINE void sum_pairs(const int count, floats (*total)[PAIR], float *sums) {
#if defined(__AVX512F__)
    if (count * PAIR == LANES) {  // each JOIN makes one vector of two, so that all are summed in as many additions as there are
        const __m512 *v = (const __m512 *)total;
        __m512 part[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const __m512 ab = JOIN(_mm512_shuffle_f32x4, v[i], v[4 + i], 0x44, 0xee);
            const __m512 cd = JOIN(_mm512_shuffle_f32x4, v[8 + i], v[12 + i], 0x44, 0xee);
            part[i] = JOIN(_mm512_shuffle_f32x4, ab, cd, 0x88, 0xdd);
        }
        const __m512 low = JOIN(_mm512_shuffle_ps, part[0], part[1], 0x88, 0xdd);
        const __m512 high = JOIN(_mm512_shuffle_ps, part[2], part[3], 0x88, 0xdd);
        store(sums, (floats)JOIN(_mm512_shuffle_ps, low, high, 0x88, 0xdd));
        return;
    }
#endif
#pragma GCC unroll 8
    for (int t = 0; t < count; t += 2) sum4(total[t][0], total[t][1], total[t + 1][0], total[t + 1][1], sums + PAIR * t);
}

// The sums of ROWS rows times one x, row by row; what is `ahead` bytes further is fetched: processors fetch not far enough.
INLINE void one_token(const int type, const uint8_t *const *rows, const float *x, int64_t groups, int64_t ahead, float *sums) {
    floats total[ROWS];
    for (int r = 0; r < ROWS; r++) {
        const uint8_t *block = rows[r];
        const float *with = x;
        floats part[4] = {0};  // several, since each sum waits for the one before
        for (int64_t left = groups / groups_of(type); left > 0; left--, block += bytes_of(type)) {
            for (int64_t at = 0; at < bytes_of(type); at += 64) __builtin_prefetch(block + ahead + at, 0, 3);
            float scales[SCALES];
            if (groups_of(type) == 8) block_scales(type, block, scales);
#pragma GCC unroll 8
            for (int j = 0; j < groups_of(type); j++, with += GROUP) {
                const group g = read(type, block, j, scales);
                for (int i = 0; i < PARTS; i++) part[(j * PARTS + i) % 4] += g.w[i] * load(with + LANES * i);
            }
        }
        total[r] = (part[0] + part[1]) + (part[2] + part[3]);
    }
    sum4(total[0], total[1], total[2], total[3], sums);
}

// sums[t][r]: the sums of PAIR rows times `count` of the x, which lie LANES numbers of each after another. Meanwhile what is
// `ahead` bytes further is fetched, block by block: a whole row at once would wait for memory.
INLINE void few_tokens(
    const int type, const int count, const uint8_t *const *rows, const float *x, int64_t groups, int64_t ahead, float *sums) {
    floats total[FEW][PAIR] = {0};
    const uint8_t *block[PAIR] = {rows[0], rows[1]};
    for (int64_t left = groups / groups_of(type); left > 0; left--) {
        float scales[PAIR][SCALES];
        for (int r = 0; groups_of(type) == 8 && r < PAIR; r++) block_scales(type, block[r], scales[r]);
#pragma GCC unroll 1
        for (int j = 0; j < groups_of(type); j++) {
            const group g[PAIR] = {read(type, block[0], j, scales[0]), read(type, block[1], j, scales[1])};
#pragma GCC unroll 8
            for (int i = 0; i < PARTS; i++, x += LANES * count) {
#pragma GCC unroll 8
                for (int t = 0; t < count; t++) {
                    floats each = load(x + LANES * t);
                    KEEP(each);
                    for (int r = 0; r < PAIR; r++) total[t][r] += g[r].w[i] * each;
                }
            }
        }
        for (int r = 0; r < PAIR; r++) {
            fetch(block[r] + ahead, bytes_of(type));
            block[r] += bytes_of(type);
        }
    }
    sum_pairs(count, total, sums);
}

// Groups of a row as float32, to the bit what gguf-py's dequantize gives.
INLINE void widen_groups(const int type, const uint8_t *row, int64_t at, int64_t groups, float *out) {
    const uint8_t *block = row + at / groups_of(type) * bytes_of(type);
    for (const int64_t end = at + groups; at < end; at += groups_of(type), block += bytes_of(type)) {
        float scales[SCALES];
        if (groups_of(type) == 8) block_scales(type, block, scales);
#pragma GCC unroll 8
        for (int j = 0; j < groups_of(type); j++, out += GROUP) {
            const group g = read(type, block, j, scales);
            for (int i = 0; i < PARTS; i++) store(out + LANES * i, g.w[i]);
        }
    }
}

#define FORMAT(type)                                                                                                   \
    static void one_##type(const uint8_t *const *rows, const float *x, int64_t groups, int64_t ahead, float *sums) {   \
        one_token(type, rows, x, groups, ahead, sums);                                                                 \
    }                                                                                                                  \
    static void few_##type(const uint8_t *const *rows, const float *x, int64_t groups, int64_t ahead, float *sums) {   \
        few_tokens(type, FEW, rows, x, groups, ahead, sums);                                                           \
    }                                                                                                                  \
    static void fewer_##type(const uint8_t *const *rows, const float *x, int64_t groups, int64_t ahead, float *sums) { \
        few_tokens(type, FEWER, rows, x, groups, ahead, sums);                                                         \
    }                                                                                                                  \
    static void widen_##type(const uint8_t *row, int64_t at, int64_t groups, float *out) {                             \
        widen_groups(type, row, at, groups, out);                                                                      \
    }
FORMAT(Q4_0)
FORMAT(Q4_1)
FORMAT(Q5_0)
FORMAT(Q5_1)
FORMAT(Q8_0)
FORMAT(Q4_K)
FORMAT(Q5_K)
FORMAT(Q6_K)
FORMAT(IQ4_NL)
FORMAT(IQ4_XS)
FORMAT(MXFP4)
FORMAT(G4_32)
FORMAT(G4_128)

typedef struct {
    void (*one)(const uint8_t *const *rows, const float *x, int64_t groups, int64_t ahead, float *sums);
    void (*few)(const uint8_t *const *rows, const float *x, int64_t groups, int64_t ahead, float *sums);
    void (*fewer)(const uint8_t *const *rows, const float *x, int64_t groups, int64_t ahead, float *sums);
    void (*widen)(const uint8_t *row, int64_t at, int64_t groups, float *out);
} format;

#define ENTRY(type) [type] = {one_##type, few_##type, fewer_##type, widen_##type}
static const format FORMATS[] = {
    ENTRY(Q4_0), ENTRY(Q4_1), ENTRY(Q5_0), ENTRY(Q5_1), ENTRY(Q8_0), ENTRY(Q4_K), ENTRY(Q5_K), ENTRY(Q6_K),
    ENTRY(IQ4_NL), ENTRY(IQ4_XS), ENTRY(MXFP4), ENTRY(G4_32), ENTRY(G4_128),
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
    const matrix *parts;
    int64_t tokens, columns;
    const float *x;
    int64_t x_stride;
    float *out;
    int64_t out_stride;
    whole_tokens *whole;  // the x in whole numbers; null: they are multiplied as they are
    int64_t tasks, task_rows, threads;
    // In a cache line of its own: each thread that takes a task would take the others' from them.
    int64_t next __attribute__((aligned(LINE)));
} product;

// Rows `first` .. `last` - 1 times all x, as `small_product` lays them out.
static void few_rows(const product *p, const matrix *m, int64_t first, int64_t last) {
    const format *f = &FORMATS[m->type];
    const int64_t groups = p->columns / GROUP;
    for (int64_t row = first; row < last; row += PAIR) {
        const int64_t count = last - row < PAIR ? 1 : PAIR;
        const uint8_t *at = m->data + m->stride * row, *rows[PAIR] = {at, at + (count > 1 ? m->stride : 0)};
        const int64_t ahead = m->rows - row >= 3 * PAIR ? 2 * PAIR * m->stride : 0;
        for (int64_t t = 0; t < p->tokens;) {
            const int many = p->tokens - t > FEWER;
            float sums[FEW * PAIR];
            (many ? f->few : f->fewer)(rows, p->x + p->columns * t, groups, ahead, sums);
            for (int64_t i = 0; i < (many ? FEW : FEWER) && t + i < p->tokens; i++)
                for (int64_t r = 0; r < count; r++) p->out[p->out_stride * (t + i) + m->first + row + r] = sums[PAIR * i + r];
            t += many ? FEW : FEWER;
        }
    }
}

// Rows `first` .. `last` - 1 (and next probably those from `then` on) times BLOCK of the x at most: so many stay in the cache.
static void some_rows(const product *p, const matrix *m, int64_t first, int64_t last, int64_t then, int64_t start) {
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
            f->one(rows, p->x, p->columns / GROUP, AHEAD + (m->stride * (last - row) > AHEAD ? 0 : m->stride * (then - last)), sums);
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
        const int64_t rows = p->task_rows;
        for (int64_t mine; task >= (mine = (m->rows + rows - 1) / rows); m++) task -= mine;
        const int64_t first = task * rows, last = m->rows - first < rows ? m->rows : first + rows;
        const int64_t then = last + (p->threads - 1) * rows;  // the others take the tasks between
        if (p->whole) sapwood_whole_rows(p->whole, m, first, last, then, p->out + m->first + first, p->out_stride);
        else if (p->tokens > 1 && p->tokens <= SMALL) few_rows(p, m, first, last);
        else
            for (int64_t start = 0; start < p->tokens; start += BLOCK) some_rows(p, m, first, last, then, start);
    }
}

// What is computed with a product of at most SMALL tokens.
typedef struct {
    const float *norm;  // the weight of an RMSNorm of x; null: x is not normed
    float eps;
    int64_t gate;  // steps.c's number of a gated activation of the outputs; 0: none
} around;

// The product with a copy of x, normed, in tiles: FEW tokens of each, the last one of FEWER where that is enough, and zeros where
// there are not so many. In a tile LANES numbers of each token lie after another. Returns 1 where there is no memory.
static int small_product(product *p, const around *with, int64_t outputs, parallel run, unsigned threads) {
    const int64_t columns = p->columns, over = p->tokens % FEW, last = over > FEWER || !over ? FEW : FEWER;
    const int64_t rows = p->tokens == 1 ? 1 : p->tokens - (over ? over : FEW) + last;
    float *const out = p->out;
    const int64_t out_stride = p->out_stride;
    const size_t size = sizeof(float) * (size_t)((rows + 1) * columns + (with->gate ? p->tokens * outputs : 0));
    float *x = aligned_alloc(LINE, (size + LINE - 1) / LINE * LINE);
    if (!x) return 1;
    float *const normed = x + rows * columns;
    for (int64_t t = 0; t < rows; t++) {
        const float *from = p->x + p->x_stride * t;
        if (t >= p->tokens) memset(normed, 0, sizeof(float) * (size_t)columns);
        else if (with->norm) sapwood_norm_row(from, with->norm, columns, with->eps, normed);
        else memcpy(normed, from, sizeof(float) * (size_t)columns);
        const int64_t first = t / FEW * FEW, together = rows - first < FEW ? rows - first : FEW;
        for (int64_t k = 0; k < columns; k += LANES)
            store(x + columns * first + k * together + LANES * (t - first), load(normed + k));
    }
    p->x = x;
    p->x_stride = columns;
    if (with->gate) p->out = normed + columns, p->out_stride = outputs;
    if (run && threads > 1) run(multiply, p, threads, 0);
    else multiply(p);
    for (int64_t t = 0; with->gate && t < p->tokens; t++)
        sapwood_gate_row(p->out + outputs * t, outputs / 2, with->gate, out + out_stride * t);
    free(x);
    return 0;
}

// The product with a copy of x, normed, in whole numbers of so many digits. Returns 1 where there is no memory.
static int64_t whole_product(product *p, const around *with, int64_t digits, int64_t outputs, parallel run, unsigned threads) {
    float normed[with->norm ? p->columns : 1];
    float *const out = p->out, *gated = with->gate ? malloc(sizeof(float) * (size_t)(p->tokens * outputs)) : NULL;
    const int64_t out_stride = p->out_stride;
    p->whole = sapwood_whole_tokens(p->tokens, p->columns, digits);
    const int64_t failed = !p->whole || (with->gate && !gated);
    if (gated) p->out = gated, p->out_stride = outputs;
    for (int64_t t = 0; !failed && t < p->tokens; t++) {
        const float *x = p->x + p->x_stride * t;
        if (with->norm) sapwood_norm_row(x, with->norm, p->columns, with->eps, normed);
        sapwood_set_token(p->whole, t, with->norm ? normed : x);
    }
    if (!failed && run && threads > 1) run(multiply, p, threads, 0);
    else if (!failed) multiply(p);
    for (int64_t t = 0; !failed && gated && t < p->tokens; t++)
        sapwood_gate_row(gated + outputs * t, outputs / 2, with->gate, out + out_stride * t);
    free(p->whole);
    free(gated);
    return failed;
}

// How many digits its tokens are rounded to; 0: none, since it is computed in float32.
static int64_t digits_of(const matrix *parts, int64_t count, int64_t tokens, int64_t gate) {
    const int64_t digits = SAPWOOD_WHOLE && tokens ? parts[0].whole : 0;
    if (digits != 3) return gate ? 0 : digits;
    if (tokens <= FEWER || tokens > SMALL) return 0;
    for (int64_t i = 0; i < count; i++)
        if (!sapwood_takes_three_digits(parts[i].type)) return 0;
    return digits;
}

// out[t][part.first + r] = x[t] . row r of the part, for each part, with a norm before and a gate after for at most SMALL tokens.
// Returns 1 where there is no memory, 2 where a norm or a gate is asked for with more tokens.
EXPORT int64_t sapwood_gguf_multiply(
    const matrix *parts, int64_t count, const float *x, int64_t tokens, int64_t columns, int64_t x_stride, float *out,
    int64_t out_stride, const float *norm, float eps, int64_t gate, parallel run, unsigned threads) {
    int64_t outputs = 0;
    for (int64_t i = 0; i < count; i++) outputs += parts[i].rows;
    // Few for each thread: the end of a task has fetched ahead what another thread reads.
    int64_t rows = outputs / (SHARES * (int64_t)threads) / TASK * TASK;
    rows = rows < TASK ? TASK : rows > MOST ? MOST : rows;
    product p = {parts, tokens, columns, x, x_stride, out, out_stride, NULL, 0, rows, threads, 0};
    for (int64_t i = 0; i < count; i++) p.tasks += (parts[i].rows + p.task_rows - 1) / p.task_rows;
    const around with = {norm, eps, gate};
    const int64_t digits = digits_of(parts, count, tokens, gate);
    if (digits) return whole_product(&p, &with, digits, outputs, run, threads);
    if (tokens <= SMALL && (tokens > 1 || norm || gate)) return small_product(&p, &with, outputs, run, threads);
    if (norm || gate) return 2;
    if (run && threads > 1) run(multiply, &p, threads, 0);
    else multiply(&p);
    return 0;
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
