/* Pre-norm transformer blocks in one call forward and one backward. As calls of their own from Python, the
   twenty operations of a block cost a small model more than norms, activations and sums do.

   What backward needs is kept: the input, q, k, v, what the heads read, the stream between the two halves, and
   the MLP's hidden layer before its activation; if that is small, instead the layer after it and the activation's
   slope. Norms are cheaper to compute again than to keep.
   `block.py` fills the structure; its fields are in the same order there. Each takes eight bytes. */

#include "cpu.h"
#include "tiles.h"

#include <string.h>

typedef struct {
    const float *w, *bias; /* a matrix [out × in], or NULL for an identity */
    const int64_t *order;  /* the channels that an identity reads; if NULL, it begins `ahead` channels on */
    const float *a, *b;    /* a low-rank update (x aᵀ) bᵀ, or NULL */
    float *y;              /* the result; NULL where the input itself will do */
    float *dw, *dbias, *da, *db; /* gradients; NULL where none is wanted, as everywhere below */
    long rank, ahead;
    long in_panels; /* whether w is in panels [in × out], as `product` can take them; set below, as `add` is */
} projection;

typedef struct { const float *w, *b; float *dw, *db; } norm;

/* What is added to all queries, or keys: [T × D]. */
typedef struct { const float *value; float *dvalue; } shift;

typedef struct {
    long B, T, H, E, F, rms, causal, by_tanh, threads;
    long add; /* whether gradients of weights are added to what is there */
    long next; /* how many numbers on the next piece's rows of D begin, 0 if there is none; set below */
    double eps;
    const float *cos, *sin; /* [T × E], by which q and k are turned, or NULL */
    norm attention_norm, mlp_norm, final_norm; /* the last of them after the last block, if there is a `stream` */
    projection q, k, v, o, up, down;
    shift q_shift, k_shift;
    const float *x, *dy;
    float *log_sum, *heads, *middle, *active, *few, *stream, *y, *dx;
} block;

/* Channels in another order, forth or, added, back. Several rows share the reading of the order. */
static void reorder(const int64_t *order, const float *x, float *y, long rows, long D) {
#define READ(some) for (long d = 0; d < D; d++) EACH(some) y[(row + r) * D + d] = x[(row + r) * D + order[d]];
    IN_ROWS(0, rows, READ)
#undef READ
}

static void reorder_backward(const int64_t *order, const float *dy, float *dx, long rows, long D) {
#define ADD(some) for (long d = 0; d < D; d++) EACH(some) dx[(row + r) * D + order[d]] += dy[(row + r) * D + d];
    IN_ROWS(0, rows, ADD)
#undef ADD
}

/* What an identity reads of x: all D channels, each once. */
static void read_channels(const projection *p, const float *x, float *y, long N, long D, int threads) {
    long ahead = p->ahead;
    IN_PARTS(N, SIDE_BY_SIDE, threads, {
        if (p->order) reorder(p->order, x + first * D, y + first * D, last - first, D);
        else for (long n = first * D; n < last * D; n += D) {
            memcpy(y + n, x + n + ahead, (D - ahead) * sizeof(float));
            memcpy(y + n + D - ahead, x + n, ahead * sizeof(float));
        }
    })
}

static void read_channels_backward(const projection *p, const float *dy, float *dx, int add, long N, long D,
                                   int threads) {
    long ahead = p->ahead;
    if (dx == dy) return;
    if (!add) memset(dx, 0, N * D * sizeof(float));
    IN_PARTS(N, SIDE_BY_SIDE, threads, {
        if (p->order) reorder_backward(p->order, dy + first * D, dx + first * D, last - first, D);
        else for (long n = first * D; n < last * D; n += D) {
            for (long d = ahead; d < D; d++) dx[n + d] += dy[n + d - ahead];
            for (long d = 0; d < ahead; d++) dx[n + d] += dy[n + D - ahead + d];
        }
    })
}

/* ---- low-rank updates of q, k and v, whose products with x are one: `few` [N × ranks] ---------------- */

static long ranks(const block *s) { return s->q.rank + s->k.rank + s->v.rank; }

/* Between the a of each, or their gradients, and all of them in one matrix [ranks × D]. */
static void join(const block *s, float *all, int apart) {
    long D = s->H * s->E;
    const projection *of[] = {&s->q, &s->k, &s->v};
    for (int i = 0; i < 3; all += of[i++]->rank * D) {
        long size = of[i]->rank * D * sizeof(float);
        if (!apart && size) memcpy(all, of[i]->a, size);
        if (apart && of[i]->da) memcpy(of[i]->da, all, size);
    }
}

static void transposed(const float *x, float *y, long rows, long columns) {
    for (long r = 0; r < rows; r++)
        for (long c = 0; c < columns; c++) y[c * rows + r] = x[r * columns + c];
}

/* What all pieces of a block share, each of the size of all a: these, their columns, whose rows a product reads as they
   are, and the gradients of all a and, transposed, of all b, which is quicker than to compute its few columns. */
typedef struct { float *a, *columns, *da, *db; } updates;

static updates prepared(const block *s) {
    if (!s->few) return (updates){0};
    long D = s->H * s->E, size = at_least(ranks(s) * D, LANES);
    float *all = room(4 * size);
    join(s, all, 0);
    transposed(all, all + size, ranks(s), D);
    return (updates){all, all + size, all + 2 * size, all + 3 * size};
}

static const upcoming NOTHING[] = {{0}};

/* a[M × K] times the K × N numbers of w, as they are or transposed, meanwhile calling what is wanted soon. */
static void multiplied(const projection *p, const float *a, const long *strides, float *c, const float *start,
                       long start_row, const upcoming *soon, long M, long N, long K, int threads) {
    if (p->in_panels && M % TILE_ROWS == 0 && N % TILE_COLUMNS == 0)
        product_by_panels(a, K, p->w, c, N, start, start_row, M, N, K, soon);
    else
        product(a, (long[]){K, 1}, p->w, p->in_panels ? (long[]){0, 0} : strides, c, N, start, start_row, M, N, K, threads);
}

/* y = x wᵀ + start */
static void forwards(const projection *p, const float *x, float *y, const float *start, long start_row,
                     const upcoming *soon, long N, long out, long in, int threads) {
    multiplied(p, x, (long[]){1, in}, y, start, start_row, soon, N, out, in, threads);
}

/* dx = dy w */
static void backwards(const projection *p, const float *dy, float *dx, int add_dx, const upcoming *soon, long N, long out,
                      long in, int threads) {
    multiplied(p, dy, (long[]){in, 1}, dx, add_dx ? dx : NULL, in, soon, N, in, out, threads);
}

/* The gradients of w and of the bias; x may be there in panels too. */
static void weights_backward(const projection *p, const float *dy, const float *x, const float *panels_of_x, int add,
                             long N, long out, long in, int threads) {
    if (panels_of_x && p->dw)
        product(dy, (long[]){1, out}, panels_of_x, (long[]){0, 0}, p->dw, in, add ? p->dw : NULL, in, out, in, N, threads);
    linear_backward(dy, x, NULL, NULL, 0, panels_of_x ? NULL : p->dw, p->dbias, add, N, out, in, threads);
}

/* y = x wᵀ + bias, or what an identity reads of x; to that, few bᵀ is added. */
static void project(const projection *p, const float *x, const upcoming *soon, const float *few, long few_row, long N,
                    long D, int threads) {
    const float *base = p->y;
    if (p->w) forwards(p, x, p->y, p->bias, 0, soon, N, D, D, threads);
    else if (p->a && !p->order && !p->ahead) base = x;
    else read_channels(p, x, p->y, N, D, threads);
    if (p->a)
        product(few, (long[]){few_row, 1}, p->b, (long[]){1, p->rank}, p->y, D, base, D, N, D, p->rank, threads);
}

/* dx is added to what is there if `add_dx`; it may be dy where its channels are the input's. */
static void project_backward(const projection *p, const float *dy, const float *x, const float *panels_of_x, float *dx,
                             int add_dx, const upcoming *soon, const float *few, float *dfew, long few_row, float *db,
                             int add, long N, long D, int threads) {
    if (p->w) {
        backwards(p, dy, dx, add_dx, soon, N, D, D, threads);
        weights_backward(p, dy, x, panels_of_x, add, N, D, D, threads);
    } else read_channels_backward(p, dy, dx, add_dx, N, D, threads);
    if (!p->a) return;
    product(dy, (long[]){D, 1}, p->b, (long[]){p->rank, 1}, dfew, few_row, NULL, 0, N, p->rank, D, threads);
    if (p->db) product(few, (long[]){1, few_row}, dy, (long[]){D, 1}, db, D, add ? db : NULL, D, p->rank, D, N, threads);
}

/* Pairs of channels turned by position, forth or, with sign -1, back. */
static void rotate(const block *s, float *x, float sign) {
    long D = s->H * s->E, half = s->E / 2;
    IN_PARTS(s->B * s->T, 1, s->threads, for (long n = first; n < last; n++) {
        const float *cos = s->cos + n % s->T * s->E, *sin = s->sin + n % s->T * s->E;
        for (float *left = x + n * D; left < x + (n + 1) * D; left += s->E) {
            float *right = left + half;
            for (long e = 0; e < half; e++) {
                float l = left[e], r = right[e];
                left[e] = l * cos[e] - sign * sin[e] * r;
                right[e] = r * cos[half + e] + sign * sin[half + e] * l;
            }
        }
    })
}

/* Queries or keys that are shifted and turned. */
static void place(const block *s, const shift *by, float *x) {
    long D = s->H * s->E;
    if (by->value)
        IN_PARTS(s->B * s->T, 1, s->threads, for (long n = first; n < last; n++)
            for (long d = 0; d < D; d++) x[n * D + d] += by->value[n % s->T * D + d])
    if (s->cos) rotate(s, x, 1);
}

static void place_backward(const block *s, const shift *by, float *dx) {
    long D = s->H * s->E;
    if (s->cos) rotate(s, dx, -1);
    if (by->dvalue)
        IN_PARTS(s->T, 1, s->threads, for (long t = first; t < last; t++) {
            float *sum = by->dvalue + t * D;
            if (!s->add) memset(sum, 0, D * sizeof(float));
            for (long b = 0; b < s->B; b++)
                for (long d = 0; d < D; d++) sum[d] += dx[(b * s->T + t) * D + d];
        })
}

static void add_to_rows(const float *x, const float *bias, float *y, long N, long n, int threads) {
    IN_PARTS(N, 1, threads, for (long r = first; r < last; r++)
        for (long i = 0; i < n; i++) y[r * n + i] = x[r * n + i] + bias[i])
}

static void multiply(float *x, const float *by, long n, int threads) {
    IN_PARTS(n, LINE, threads, for (long i = first; i < last; i++) x[i] *= by[i])
}

/* y = rest + x wᵀ + bias */
static void project_onto(const projection *p, const float *rest, const float *x, float *y, const upcoming *soon, long N,
                         long out, long in, int threads) {
    if (p->bias) add_to_rows(rest, p->bias, y, N, out, threads);
    forwards(p, x, y, p->bias ? y : rest, out, soon, N, out, in, threads);
}

static void piece_forward(const block *s, const updates *of_rank) {
    long N = s->B * s->T, D = s->H * s->E, F = s->F, by_heads[3] = {s->T * D, s->E, D};
    /* Keys that are read where they lie begin some heads on, and so do their gradients. */
    long ahead = s->k.y ? 0 : s->k.ahead / s->E;
    int threads = s->threads;
    float *normed = room(N * D), *active = s->active ? s->active : room(N * F);
    const projection *of[] = {&s->q, &s->k, &s->v};
    const float *qkv[3];

    normalise(s->x, s->attention_norm.w, s->attention_norm.b, s->eps, s->rms, normed, NULL, N, D, threads);
    float *few = s->few;
    long R = ranks(s);
    if (few) product(normed, (long[]){D, 1}, of_rank->columns, (long[]){R, 1}, few, R, NULL, 0, N, R, D, threads);
    upcoming soon[3];
    int called = 0;
    for (int i = 0; i < 3; few += of[i++]->rank) {
        /* Without a product of its own, what is written would have to wait for its lines. */
        if (of[i]->y && !of[i]->w && s->next) soon[called++] = (upcoming){of[i]->y + s->next, s->next};
        soon[called] = (upcoming){0};
        if (of[i]->y) project(of[i], normed, soon, few, R, N, D, threads);
        if (of[i]->w) called = 0;
        if (of[i]->y && i < 2) place(s, i ? &s->k_shift : &s->q_shift, of[i]->y);
        qkv[i] = of[i]->y ? of[i]->y : normed;
    }
    long strides[4][3];
    for (int i = 0; i < 4; i++) memcpy(strides[i], by_heads, sizeof by_heads);
    attention(qkv[0], qkv[1], qkv[2], s->heads, s->log_sum, s->B, s->H, s->T, s->E, (const long(*)[3])strides, ahead,
              1 / __builtin_sqrtf(s->E), s->causal, threads);
    project_onto(&s->o, s->x, s->heads, s->middle, NOTHING, N, D, D, threads);

    normalise(s->middle, s->mlp_norm.w, s->mlp_norm.b, s->eps, s->rms, normed, NULL, N, D, threads);
    forwards(&s->up, normed, s->up.y, s->up.bias, 0, NOTHING, N, F, D, threads);
    gelu(s->up.y, active, s->active ? s->up.y : NULL, N * F, s->by_tanh, threads);
    project_onto(&s->down, s->middle, active, s->stream ? s->stream : s->y, (upcoming[]){{s->x + s->next, s->next}, {0}},
                 N, D, F, threads);
    if (s->stream)
        normalise(s->stream, s->final_norm.w, s->final_norm.b, s->eps, s->rms, s->y, NULL, N, D, threads);
    if (!s->active) free(active);
    free(normed);
}

/* dx may be dy, but not if there is a `stream`. */
static void mlp_backward(const block *s) {
    long N = s->B * s->T, D = s->H * s->E, F = s->F;
    int threads = s->threads, add = s->add;
    float *normed = room(N * D), *moments = room(2 * N), *dnormed = room(N * D), *dx = s->dx;
    float *active = s->active ? s->active : room(N * F), *dwide = room(N * F);
    const float *dy = s->dy;
    if (s->stream) {
        normalise(s->stream, s->final_norm.w, s->final_norm.b, s->eps, s->rms, normed, moments, N, D, threads);
        memset(dx, 0, N * D * sizeof(float));
        normalise_backward(dy, s->stream, moments, s->final_norm.w, s->rms, dx, s->final_norm.dw, s->final_norm.db, add,
                           N, D, threads);
        dy = dx;
    }
    backwards(&s->down, dy, dwide, 0, (upcoming[]){{s->up.y, N * F}, {s->middle, N * D}, {0}}, N, D, F, threads);
    if (s->active) multiply(dwide, s->up.y, N * F, threads);
    else gelu_backward(s->up.y, dwide, dwide, active, N * F, s->by_tanh, threads);
    normalise(s->middle, s->mlp_norm.w, s->mlp_norm.b, s->eps, s->rms, normed, moments, N, D, threads);
    backwards(&s->up, dwide, dnormed, 0, (upcoming[]){{active, s->active ? N * F : 0}, {0}}, N, F, D, threads);
    weights_backward(&s->down, dy, active, NULL, add, N, D, F, threads);
    weights_backward(&s->up, dwide, normed, NULL, add, N, F, D, threads);
    if (!s->active) free(active);
    free(dwide);
    if (dx != dy) memcpy(dx, dy, N * D * sizeof(float));
    normalise_backward(dnormed, s->middle, moments, s->mlp_norm.w, s->rms, dx, s->mlp_norm.dw, s->mlp_norm.db, add, N,
                       D, threads);
    free(normed), free(moments), free(dnormed);
}

/* dx is that of the stream between the halves, and becomes that of x. */
static void heads_backward(const block *s, const updates *of_rank) {
    long N = s->B * s->T, D = s->H * s->E, by_heads[3] = {s->T * D, s->E, D};
    /* Keys that are read where they lie begin some heads on, and so do their gradients. */
    long ahead = s->k.y ? 0 : s->k.ahead / s->E;
    int threads = s->threads, add = s->add;
    float *normed = room(N * D), *moments = room(2 * N), *dnormed = room(N * D), *dx = s->dx;
    float *dheads = dnormed, *dqkv[3];
    const projection *of[] = {&s->q, &s->k, &s->v};
    const float *qkv[3];
    backwards(&s->o, dx, dheads, 0, (upcoming[]){{s->heads, N * D}, {s->x, N * D}, {0}}, N, D, D, threads);
    weights_backward(&s->o, dx, s->heads, NULL, add, N, D, D, threads);
    normalise(s->x, s->attention_norm.w, s->attention_norm.b, s->eps, s->rms, normed, moments, N, D, threads);
    for (int i = 0; i < 3; i++) qkv[i] = of[i]->y ? of[i]->y : normed, dqkv[i] = room(N * D);
    long strides[8][3];
    for (int i = 0; i < 8; i++) memcpy(strides[i], by_heads, sizeof by_heads);
    attention_backward(qkv[0], qkv[1], qkv[2], s->heads, s->log_sum, dheads, dqkv[0], dqkv[1], dqkv[2], s->B, s->H,
                       s->T, s->E, (const long(*)[3])strides, ahead, 1 / __builtin_sqrtf(s->E), s->causal, threads);
    /* Where queries are the input, their gradient is the first of those that are added. */
    if (!s->q.w && !s->q.order && !s->q.ahead) free(dnormed), dnormed = dqkv[0];
    /* What q, k and v have read is multiplied by the gradient of each. */
    int shared = s->v.in_panels && N <= DEPTH;
    float *panels = shared ? room(N * at_least(D, TILE_COLUMNS)) : NULL;
    if (shared) column_panels(normed, D, 1, panels, D, N);
    upcoming soon[4];
    int called = 0;
    long R = ranks(s);
    float *dfew = room(N * R), *few = s->few, *dfew_here = dfew, *db = of_rank->db;
    for (int i = 0; i < 3; few += of[i]->rank, dfew_here += of[i]->rank, db += of[i++]->rank * D) {
        if (i < 2) place_backward(s, i ? &s->k_shift : &s->q_shift, dqkv[i]);
        projection in_place = {0};
        if (of[i]->y && s->next) soon[called++] = (upcoming){qkv[i] + s->next, s->next};
        soon[called] = (upcoming){0};
        project_backward(of[i]->y ? of[i] : &in_place, dqkv[i], normed, panels, dnormed, i > 0, soon, few, dfew_here, R,
                         db, add, N, D, threads);
        if (of[i]->w) called = 0; /* else what follows has the product that calls them */
        if (dqkv[i] != dnormed) free(dqkv[i]);
    }
    if (s->few) {
        float *da = of_rank->da;
        product(dfew, (long[]){R, 1}, of_rank->a, (long[]){D, 1}, dnormed, D, dnormed, D, N, D, R, threads);
        product(dfew, (long[]){1, R}, normed, (long[]){D, 1}, da, D, add ? da : NULL, D, R, D, N, threads);
    }
    free(dfew), free(panels);
    normalise_backward(dnormed, s->x, moments, s->attention_norm.w, s->rms, dx, s->attention_norm.dw,
                       s->attention_norm.db, add, N, D, threads);
    free(normed), free(moments), free(dnormed);
}

/* One of so many parts of the sequences. Its gradients are `size` numbers on for every part before it. */
static block share(const block *whole, long part, long parts, long size) {
    block s = *whole;
    s.B /= parts, s.threads = s.threads > parts ? s.threads / parts : 1;
    long N = s.B * s.T, D = s.H * s.E;
    s.next = part + 1 < parts ? N * D : 0;
#define MOVE(pointer, by) if (pointer) pointer += part * (by)
    float **rows[] = {&s.heads, &s.middle, &s.stream, &s.y, &s.dx, &s.q.y, &s.k.y, &s.v.y};
    for (unsigned i = 0; i < sizeof rows / sizeof *rows; i++) MOVE(*rows[i], N * D);
    MOVE(s.x, N * D);
    MOVE(s.dy, N * D);
    MOVE(s.up.y, N * s.F);
    MOVE(s.active, N * s.F);
    MOVE(s.few, N * ranks(&s));
    MOVE(s.log_sum, N * s.H);
    projection *of[] = {&s.q, &s.k, &s.v, &s.o, &s.up, &s.down};
    for (unsigned i = 0; i < sizeof of / sizeof *of; i++) {
        MOVE(of[i]->dw, size);
        MOVE(of[i]->dbias, size);
        MOVE(of[i]->da, size);
        MOVE(of[i]->db, size);
    }
    float **others[] = {&s.attention_norm.dw, &s.attention_norm.db, &s.mlp_norm.dw,    &s.mlp_norm.db,
                        &s.final_norm.dw,     &s.final_norm.db,     &s.q_shift.dvalue, &s.k_shift.dvalue};
    for (unsigned i = 0; i < sizeof others / sizeof *others; i++) MOVE(*others[i], size);
#undef MOVE
    return s;
}

/* ---- one block, in pieces: some sequences after the others, whose numbers stay in L2 -------------------- */

enum { ENOUGH_ROWS = 64, SMALL_BLOCK = 1 << 18 /* numbers: 1 MiB */ };

/* In how many: a sequence each, or as many as have enough rows, if all matrices leave room beside them; else in one. */
static long pieces_of(const block *s) {
    long D = s->H * s->E, F = s->F, pieces = s->B;
    if (!WIDE || s->threads > 1 || D > DEPTH || F > DEPTH || 4 * D * D + 2 * D * F > SMALL_BLOCK) return 1;
    while (pieces > 1 && (s->B % pieces || s->B / pieces * s->T < ENOUGH_ROWS)) pieces--;
    return pieces;
}

/* All matrices of a block in panels, which each product would make anew: transposed as it multiplies forward, or as
   they are. To be freed. */
static float *in_panels(block *s, int forward) {
    long D = s->H * s->E, F = s->F, wide = at_least(D, TILE_COLUMNS);
    float *panels = room((4 * wide + at_least(F, TILE_COLUMNS)) * D + wide * F), *here = panels;
    projection *of[] = {&s->q, &s->k, &s->v, &s->o, &s->up, &s->down};
    for (int i = 0; i < 6; i++) {
        long out = i == 4 ? F : D, in = i == 5 ? F : D;
        if (!of[i]->w) continue;
        if (forward) column_panels(of[i]->w, 1, in, here, out, in);
        else column_panels(of[i]->w, in, 1, here, in, out);
        of[i]->w = here, of[i]->in_panels = 1;
        here += forward ? at_least(out, TILE_COLUMNS) * in : at_least(in, TILE_COLUMNS) * out;
    }
    return panels;
}

static void block_forward(const block *s) {
    long pieces = pieces_of(s);
    block whole = *s;
    updates of_rank = prepared(s);
    float *panels = pieces > 1 ? in_panels(&whole, 1) : NULL;
    for (long i = 0; i < pieces; i++) {
        block piece = share(&whole, i, pieces, 0);
        piece_forward(&piece, &of_rank);
    }
    free(panels), free(of_rank.a);
}

/* By halves, so that one's matrices and their gradients fit into L2. */
static void block_backward(const block *s) {
    long D = s->H * s->E, pieces = pieces_of(s);
    block whole = *s;
    updates of_rank = prepared(s);
    float *panels = pieces > 1 ? in_panels(&whole, 0) : NULL;
    for (int half = 0; half < 2; half++)
        for (long i = 0; i < pieces; i++) {
            block piece = share(&whole, i, pieces, 0);
            piece.add = i > 0;
            if (half) heads_backward(&piece, &of_rank);
            else mlp_backward(&piece);
        }
    free(panels);
    if (!s->few) return;
    join(s, of_rank.da, 1);
    const projection *of[] = {&s->q, &s->k, &s->v};
    const float *db = of_rank.db;
    for (int i = 0; i < 3; db += of[i++]->rank * D)
        if (of[i]->db) transposed(db, of[i]->db, of[i]->rank, D);
    free(of_rank.a);
}

/* ---- several blocks, in lanes: each takes its share of the sequences through all of them, alone --------- */

/* One lane is no parallel region, in which its operations could have no threads of their own. */
void blocks_forward(const block *blocks, long n, long lanes) {
    if (lanes == 1)
        for (long i = 0; i < n; i++) block_forward(blocks + i);
    else
#pragma omp parallel for num_threads(lanes)
        for (long lane = 0; lane < lanes; lane++)
            for (long i = 0; i < n; i++) {
                block s = share(blocks + i, lane, lanes, 0);
                block_forward(&s);
            }
}

/* `gradients` are those of all weights, `size` numbers for each lane; the sum takes the place of the first. */
void blocks_backward(const block *blocks, long n, long lanes, float *gradients, long size) {
    if (lanes == 1) {
        for (long i = n; i--;) block_backward(blocks + i);
        return;
    }
#pragma omp parallel num_threads(lanes)
    {
#pragma omp for
        for (long lane = 0; lane < lanes; lane++)
            for (long i = n; i--;) {
                block s = share(blocks + i, lane, lanes, size);
                block_backward(&s);
            }
#pragma omp for
        for (long i = 0; i < size; i++)
            for (long lane = 1; lane < lanes; lane++) gradients[i] += gradients[lane * size + i];
    }
}
