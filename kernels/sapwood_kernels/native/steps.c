// What a decoder does between its matrix products, in float32: norms, gates, rotation, the cache, attention of decodes.
//
// A step of one token of a small model runs hundreds of these, each of a few microseconds: as one call each they cost less than
// as several of torch's. Definitions: reference.py.

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.h"

// The exponential of numbers of any size: 2^n times a polynomial, n the nearest whole number of x / ln 2.
INLINE floats exp_of(floats x) {
    const floats least = {0}, low = least - 87.0f, high = least + 88.0f;
    const ints under = x < low, over = x > high;
    x = (floats)(((ints)x & ~(under | over)) | ((ints)low & under) | ((ints)high & over));
    const floats whole = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
    const floats r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (floats)((__builtin_convertvector(whole, ints) + 127) << 23);
}

void sapwood_norm_row(const float *x, const float *weight, int64_t width, float eps, float *out) {
    floats squares[2] = {0};
    int64_t i = 0;
    for (; i + 2 * LANES <= width; i += 2 * LANES) {
        const floats a = load(x + i), b = load(x + i + LANES);
        squares[0] += a * a;
        squares[1] += b * b;
    }
    float total = sum(squares[0] + squares[1]);
    for (; i < width; i++) total += x[i] * x[i];
    const float factor = 1.0f / sqrtf(total / (float)width + eps);
    for (i = 0; i < width; i++) out[i] = x[i] * factor * weight[i];
}

typedef struct {
    const float *x;
    const float *weight;
    int64_t rows, width, stride;
    float eps;
    float *out;
    int64_t next;
} norming;

enum { NORMED = 16 };  // rows of a task

static void norm_rows(void *data) {
    norming *n = data;
    for (int64_t first; (first = NORMED * __atomic_fetch_add(&n->next, 1, __ATOMIC_RELAXED)) < n->rows;)
        for (int64_t r = first; r < n->rows && r < first + NORMED; r++)
            sapwood_norm_row(n->x + n->stride * r, n->weight, n->width, n->eps, n->out + n->width * r);
}

// out[r] = the RMSNorm of x[r].
EXPORT void sapwood_norm(
    const float *x, int64_t rows, int64_t width, int64_t stride, const float *weight, float eps, float *out, parallel run,
    unsigned threads) {
    norming n = {x, weight, rows, width, stride, eps, out, 0};
    if (run && threads > 1 && rows > NORMED) run(norm_rows, &n, threads, 0);
    else norm_rows(&n);
}

enum { SILU = 1, GELU_TANH = 2 };

// out = gate(gate_up[: width]) * gate_up[width :]
void sapwood_gate_row(const float *gate_up, int64_t width, int64_t gate, float *out) {
    for (int64_t i = 0; i < width; i += LANES) {
        float both[2][LANES];
        const int64_t count = width - i < LANES ? width - i : LANES;
        if (count < LANES) {  // the last ones
            memset(both, 0, sizeof both);
            for (int64_t k = 0; k < count; k++) both[0][k] = gate_up[i + k], both[1][k] = gate_up[width + i + k];
        }
        const floats g = load(count < LANES ? both[0] : gate_up + i);
        const floats up = load(count < LANES ? both[1] : gate_up + width + i);
        const floats z = gate == SILU ? g : (g + g * g * g * 0.044715f) * 1.5957691216057308f;
        const floats gated = g / (exp_of(-z) + 1.0f) * up;
        if (count < LANES) {
            store(both[0], gated);
            memcpy(out + i, both[0], sizeof(float) * (size_t)count);
        } else store(out + i, gated);
    }
}

// What `store_heads` needs of a layer; sizes and strides are in numbers.
typedef struct {
    int64_t heads, kv_heads, dim, page_size;
    const float *query_weight, *key_weight;  // null: heads are not normed
    float eps;
    float *keys, *values;
    int64_t page_stride, slot_stride, head_stride;
} heads_layer;

typedef struct {
    const heads_layer *layer;
    const float *qkv, *cos, *sin;
    const int64_t *slots;
    int64_t tokens;
    float *out;
    int64_t next;
} storing;

static void store_tokens(void *data) {
    storing *s = data;
    const heads_layer *l = s->layer;
    const int64_t dim = l->dim, half = dim / 2, all = l->heads + 2 * l->kv_heads;
    float normed[dim];
    for (int64_t first; (first = NORMED * __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED)) < s->tokens;)
        for (int64_t t = first; t < s->tokens && t < first + NORMED; t++) {
            const float *cos = s->cos + dim * t, *sin = s->sin + dim * t;
            const int64_t slot = s->slots[t], at = slot / l->page_size * l->page_stride + slot % l->page_size * l->slot_stride;
            for (int64_t h = 0; h < all; h++) {
                const float *x = s->qkv + dim * (all * t + h);
                const int64_t key = h - l->heads, value = key - l->kv_heads;
                if (value >= 0) {
                    memcpy(l->values + at + l->head_stride * value, x, sizeof(float) * (size_t)dim);
                    continue;
                }
                if (l->query_weight) {
                    sapwood_norm_row(x, key < 0 ? l->query_weight : l->key_weight, dim, l->eps, normed);
                    x = normed;
                }
                float *to = key < 0 ? s->out + dim * (l->heads * t + h) : l->keys + at + l->head_stride * key;
                for (int64_t i = 0; i < half; i++) {
                    to[i] = x[i] * cos[i] + x[i + half] * sin[i];
                    to[i + half] = x[i + half] * cos[i + half] + x[i] * sin[i + half];
                }
            }
        }
}

// Norms and rotates query and key heads of qkv [T, (H + 2K) * D], writes keys and values to their slots, queries to out.
EXPORT void sapwood_store_heads(
    const heads_layer *layer, const float *qkv, const float *cos, const float *sin, const int64_t *slots, int64_t tokens,
    float *out, parallel run, unsigned threads) {
    storing s = {layer, qkv, cos, sin, slots, tokens, out, 0};
    if (run && threads > 1 && tokens > NORMED) run(store_tokens, &s, threads, 0);
    else store_tokens(&s);
}

// What attention needs of a layer; strides are in numbers.
typedef struct {
    const float *keys, *values;
    int64_t page_stride, slot_stride, head_stride;
    int64_t heads, kv_heads, dim, page_size, window;  // 0: no window
    float scale, softcap;                             // 0: no cap
    const float *sinks;                               // null: none
    int64_t chunked;                                  // a token sees keys from the latest multiple of the window on
} attention_layer;

// The first of its keys that a token sees, the last of so many.
static int64_t oldest_seen(const attention_layer *l, int64_t keys) {
    if (!l->window || keys <= l->window) return 0;
    return l->chunked ? (keys - 1) / l->window * l->window : keys - l->window;
}

enum { SPLIT = 512, CHUNK = 64 };  // keys of a task; keys whose scores are computed before their values are summed

typedef struct {
    const attention_layer *layer;
    const float *query;
    const int32_t *pages;  // of each token, `pages_stride` apart
    const int64_t *lengths;
    int64_t tokens, pages_stride, splits;
    float *parts;  // [T, K, splits, H / K, D + 2]: a sum of values, the largest score, the sum of weights
    int64_t next;
} attending;

static void attend_part(const attending *a, int64_t token, int64_t kv, int64_t split) {
    const attention_layer *l = a->layer;
    const int64_t dim = l->dim, shared = l->heads / l->kv_heads, end = a->lengths[token];
    const int64_t start = oldest_seen(l, end);
    const int64_t first = start + SPLIT * split, last = first + SPLIT < end ? first + SPLIT : end;
    float *parts = a->parts + ((token * l->kv_heads + kv) * a->splits + split) * shared * (dim + 2);
    for (int64_t h = 0; h < shared; h++) {
        memset(parts + h * (dim + 2), 0, sizeof(float) * (size_t)dim);
        parts[h * (dim + 2) + dim] = -INFINITY;
        parts[h * (dim + 2) + dim + 1] = 0;
    }
    const float *query = a->query + (token * l->heads + kv * shared) * dim;
    const int32_t *pages = a->pages + a->pages_stride * token;
    for (int64_t chunk = first; chunk < last; chunk += CHUNK) {
        const int64_t count = last - chunk < CHUNK ? last - chunk : CHUNK;
        int64_t at[CHUNK];
        for (int64_t i = 0; i < count; i++)
            at[i] = pages[(chunk + i) / l->page_size] * l->page_stride + (chunk + i) % l->page_size * l->slot_stride +
                    kv * l->head_stride;
        for (int64_t h = 0; h < shared; h++) {
            float scores[CHUNK] __attribute__((aligned(64)));
            const float *q = query + dim * h;
            float largest = -INFINITY;
            for (int64_t i = 0; i < count; i++) {
                const float *key = l->keys + at[i];
                floats both[2] = {0};
                for (int64_t d = 0; d < dim; d += 2 * LANES) {
                    both[0] += load(q + d) * load(key + d);
                    if (d + LANES < dim) both[1] += load(q + d + LANES) * load(key + d + LANES);
                }
                float score = sum(both[0] + both[1]) * l->scale;
                if (l->softcap > 0) score = l->softcap * tanhf(score / l->softcap);
                scores[i] = score;
                largest = score > largest ? score : largest;
            }
            float *out = parts + h * (dim + 2), before = out[dim];
            if (largest < before) largest = before;
            const float kept = before == -INFINITY ? 0.0f : expf(before - largest);
            for (int64_t i = count; i % LANES; i++) scores[i] = -INFINITY;
            floats weights = {0};
            for (int64_t i = 0; i < count; i += LANES) {
                floats weight = exp_of(load(scores + i) - largest);
                for (int64_t k = count - i; k < LANES; k++) weight[k] = 0;
                weights += weight;
                store(scores + i, weight);
            }
            out[dim] = largest;
            out[dim + 1] = out[dim + 1] * kept + sum(weights);
            for (int64_t d = 0; d < dim; d += 4 * LANES) {
                floats total[4];
                const int64_t width = dim - d < 4 * LANES ? (dim - d) / LANES : 4;
                for (int64_t v = 0; v < width; v++) total[v] = load(out + d + LANES * v) * kept;
                if (width == 4)
                    for (int64_t i = 0; i < count; i++)
                        for (int v = 0; v < 4; v++) total[v] += load(l->values + at[i] + d + LANES * v) * scores[i];
                else
                    for (int64_t i = 0; i < count; i++)
                        for (int64_t v = 0; v < width; v++)
                            total[v] += load(l->values + at[i] + d + LANES * v) * scores[i];
                for (int64_t v = 0; v < width; v++) store(out + d + LANES * v, total[v]);
            }
        }
    }
}

static void attend(void *data) {
    attending *a = data;
    const int64_t kv_heads = a->layer->kv_heads, tasks = a->tokens * kv_heads * a->splits;
    for (int64_t task; (task = __atomic_fetch_add(&a->next, 1, __ATOMIC_RELAXED)) < tasks;)
        attend_part(a, task / a->splits / kv_heads, task / a->splits % kv_heads, task % a->splits);
}

// out[t] = attention of the query [T, H, D] of one token a request over all `lengths[t]` keys that it has in the cache.
// Returns 1 where there is no memory for what the parts give.
EXPORT int64_t sapwood_attend(
    const attention_layer *layer, const float *query, const int32_t *pages, int64_t pages_stride, const int64_t *lengths,
    int64_t tokens, float *out, parallel run, unsigned threads) {
    const int64_t dim = layer->dim, shared = layer->heads / layer->kv_heads;
    int64_t longest = 1, all = 0;
    for (int64_t t = 0; t < tokens; t++) {
        const int64_t seen = lengths[t] - oldest_seen(layer, lengths[t]);
        longest = seen > longest ? seen : longest;
        all += seen;
    }
    attending a = {layer, query, pages, lengths, tokens, pages_stride, (longest + SPLIT - 1) / SPLIT, NULL, 0};
    const size_t each = (size_t)(shared * (dim + 2));
    a.parts = malloc(sizeof(float) * each * (size_t)(tokens * layer->kv_heads * a.splits));
    if (!a.parts) return 1;
    if (run && threads > 1 && all * layer->heads * dim > 1 << 18) run(attend, &a, threads, 0);
    else attend(&a);
    for (int64_t row = 0; row < tokens * layer->heads; row++) {
        const int64_t head = row % layer->heads;
        const float *part = a.parts + ((row / layer->heads * layer->kv_heads + head / shared) * a.splits * shared +
                                       head % shared) * (dim + 2);
        const int64_t step = shared * (dim + 2);
        float largest = layer->sinks ? layer->sinks[head] : -INFINITY;
        for (int64_t s = 0; s < a.splits; s++) largest = part[s * step + dim] > largest ? part[s * step + dim] : largest;
        float total = layer->sinks ? expf(layer->sinks[head] - largest) : 0;
        for (int64_t s = 0; s < a.splits; s++)
            total += expf(part[s * step + dim] - largest) * part[s * step + dim + 1];
        float *to = out + dim * row;
        for (int64_t s = 0; s < a.splits; s++) {
            const float factor = expf(part[s * step + dim] - largest) / total;
            for (int64_t d = 0; d < dim; d++) to[d] = part[s * step + d] * factor + (s ? to[d] : 0);
        }
    }
    free(a.parts);
    return 0;
}
