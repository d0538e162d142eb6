/* The next token of a few sequences, through a whole GPT in one call. With so few rows a step is mostly reading
   weights, and all threads read each matrix together, once; between two matrices they only wait for each other.
   `token.py` fills the structures; their fields are in the same order there. */

#include "cpu.h"
#include "vectors.h"

#include <omp.h>

typedef struct { const float *w, *b; } affine; /* a norm, or a matrix [out × in]; b may be NULL */

typedef struct {
    affine attention_norm, qkv, o, mlp_norm, up, gate, down; /* no gate but in SwiGLU */
    const float *q_norm, *k_norm;   /* [D], or NULL as all below */
    const float *q_shift, *k_shift; /* what is added to queries and keys at this position [D] */
    const float *relative;          /* a bias of each head and distance [H × distances] */
    float *keys, *values;           /* [B, H, S, E]; this token's go to position `at` */
} layer;

typedef struct {
    long layers, B, H, E, F, V, S, at, distances, rms, activation, threads;
    double eps, qk_eps;
    const float *cos, *sin; /* [E]: how far q and k are turned at this position, or NULL */
    affine final_norm, head;
    const layer *of;
    const float *x; /* [B × D] */
    float *logits;  /* [B × V] */
} token;

enum { PLAIN, GELU, GELU_BY_TANH }; /* activations */

/* y[rows × 4] = x[rows × n] wᵀ[n × 4], with the rows of w, and the columns of y, so far apart. */
INLINE void dots(const float *restrict x, int rows, const float *restrict w, long apart, long n, float *restrict y,
                 long y_row, long y_apart) {
    vec sum[3][4] = {{{0}}};
#define ADD(some)                                                                                    \
    _Pragma("GCC unroll 3") for (int b = 0; b < rows; b++)                                           \
        _Pragma("GCC unroll 4") for (int o = 0; o < 4; o++)                                          \
            sum[b][o] += load(x + b * n + k, some) * load(w + o * apart + k, some);
    IN_VECTORS(n, ADD)
#undef ADD
    for (int b = 0; b < rows; b++)
        for (int o = 0; o < 4; o++) y[b * y_row + o * y_apart] = sum_of(sum[b][o]);
}

/* This thread's columns of y[B × out] = activation(x[B × in] wᵀ + bias) + rest. */
static void product_of_few(const float *x, affine m, int activation, const float *rest, float *y, long B, long in,
                           long out, long thread, long threads) {
    long part = at_least((out + threads - 1) / threads, LANES), first = thread * part;
    long rows = least(part, out - first), apart = rows / 4;
    /* Four rows of w at a time, a quarter of the thread's part from each other: where one comes to the end of a
       page of memory and waits, others go on. Next to each other they would come to it together. */
    for (long o = first; o < first + apart; o++) {
        long b = 0;
        for (; b + 3 <= B; b += 3)
            dots(x + b * in, 3, m.w + o * in, apart * in, in, y + b * out + o, out, apart);
        for (; b < B; b++) dots(x + b * in, 1, m.w + o * in, apart * in, in, y + b * out + o, out, apart);
    }
    for (long b = 0; b < B; b++) {
        for (long o = first + 4 * apart; o < first + rows; o++) /* four times the same, for the same bits */
            dots(x + b * in, 1, m.w + o * in, 0, in, y + b * out + o, out, 0);
        for (long o = first; o < first + rows; o += LANES) {
            long n = first + rows - o;
            vec v = load(y + b * out + o, n);
            if (m.b) v += load(m.b + o, n);
            if (activation) v = activated(v, activation == GELU_BY_TANH);
            if (rest) v += load(rest + b * out + o, n);
            store(v, y + b * out + o, n);
        }
    }
}

/* y[B × out] = x wᵀ, of one matrix. */
void few_rows(const float *x, const float *w, float *y, long B, long in, long out, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int i = 0; i < threads; i++) product_of_few(x, (affine){w, NULL}, PLAIN, NULL, y, B, in, out, i, threads);
}

/* A head's query or key, normed, shifted and turned. */
static void place(const token *s, const float *x, const float *norm, const float *shift, long h, float *y) {
    long E = s->E, half = E / 2;
    if (norm) normalise_rows(x, norm + h * E, NULL, s->qk_eps, 1, y, NULL, 1, E);
    else memcpy(y, x, E * sizeof(float));
    for (long e = 0; shift && e < E; e++) y[e] += shift[h * E + e];
    for (long e = 0; s->cos && e < half; e++) {
        float left = y[e], right = y[half + e];
        y[e] = left * s->cos[e] - right * s->sin[e];
        y[half + e] = right * s->cos[half + e] + left * s->sin[half + e];
    }
}

/* One head's reading of its cache, after its own key and value have gone there; `work` has room for a weight of
   each position and a query. */
static void attend(const token *s, const layer *l, long b, long h, const float *qkv, float *y, float *work) {
    long E = s->E, D = s->H * E, at = s->at;
    float *keys = l->keys + (b * s->H + h) * s->S * E, *values = l->values + (b * s->H + h) * s->S * E;
    float *weights = work, *query = work + at_least(s->S, LANES), scale = 1 / sqrtf(E), largest = -INFINITY, sum = 0;
    const float *own = qkv + b * 3 * D + h * E;
    place(s, own, l->q_norm, l->q_shift, h, query);
    place(s, own + D, l->k_norm, l->k_shift, h, keys + at * E);
    memcpy(values + at * E, own + 2 * D, E * sizeof(float));
    for (long t = 0; t <= at; t++) {
        weights[t] = dot(keys + t * E, query, E) * scale;
        if (l->relative) weights[t] += l->relative[h * s->distances + at - t];
        largest = weights[t] > largest ? weights[t] : largest;
    }
    for (long t = 0; t <= at; t += LANES) {
        vec weight = exponential(load(weights + t, at + 1 - t) - largest);
        store(weight, weights + t, at + 1 - t);
        for (long i = 0; i < least(LANES, at + 1 - t); i++) sum += weight[i];
    }
    memset(y, 0, E * sizeof(float));
    for (long t = 0; t <= at; t++)
        for (long e = 0; e < E; e += LANES)
            store(load(y + e, E - e) + weights[t] / sum * load(values + t * E + e, E - e), y + e, E - e);
}

static void normalise_few(const token *s, affine norm, const float *x, float *y) {
    long D = s->H * s->E;
    for (long b = 0; b < s->B; b++) normalise_rows(x + b * D, norm.w, norm.b, s->eps, s->rms, y + b * D, NULL, 1, D);
}

void next_logits(const token *s) {
    long B = s->B, D = s->H * s->E, F = s->F, each = at_least(s->S, LANES) + s->E + B * D;
    float *shared = room(6 * B * D + 2 * B * F);
    float *qkv = shared, *read = qkv + 3 * B * D, *streams[2] = {read + B * D, read + 2 * B * D};
    float *wide = streams[1] + B * D, *gates = wide + B * F;
    memcpy(streams[0], s->x, B * D * sizeof(float));
#pragma omp parallel num_threads(s->threads)
    {
        long thread = omp_get_thread_num(), threads = omp_get_num_threads();
        float *work = malloc(each * sizeof(float)), *normed = work, *own = work + B * D;
        float *x = streams[0], *next = streams[1];
        for (const layer *l = s->of; l < s->of + s->layers; l++) {
            normalise_few(s, l->attention_norm, x, normed); /* every thread for itself: that is quicker than to wait */
            product_of_few(normed, l->qkv, PLAIN, NULL, qkv, B, D, 3 * D, thread, threads);
#pragma omp barrier
            for (long bh = thread; bh < B * s->H; bh += threads)
                attend(s, l, bh / s->H, bh % s->H, qkv, read + bh * s->E, own);
#pragma omp barrier
            product_of_few(read, l->o, PLAIN, x, next, B, D, D, thread, threads);
#pragma omp barrier
            normalise_few(s, l->mlp_norm, next, normed);
            product_of_few(normed, l->up, s->activation, NULL, wide, B, D, F, thread, threads);
            if (l->gate.w) {
                product_of_few(normed, l->gate, PLAIN, NULL, gates, B, D, F, thread, threads);
#pragma omp barrier
                for (long i = thread * LANES; i < B * F; i += threads * LANES) {
                    vec gate = load(gates + i, B * F - i), few = larger(every(-87.0f), gate);
                    store(load(wide + i, B * F - i) * gate / (1 + exponential(-few)), wide + i, B * F - i);
                }
            }
#pragma omp barrier
            product_of_few(wide, l->down, PLAIN, next, x, B, F, D, thread, threads);
#pragma omp barrier
        }
        normalise_few(s, s->final_norm, x, normed);
        product_of_few(normed, s->head, PLAIN, NULL, s->logits, B, D, s->V, thread, threads);
        free(work);
    }
    free(shared);
}
