/* The operations that torch leaves slow on CPUs, in float32: products, attention, GELU, the softmax of the
   loss. Built on first use by `library.py`, with the files that are made of them.

   Every result is computed by one thread from start to end, so its bits do not depend on how many there
   are; but torch's BLAS, which multiplies in place of our products on some processors, adds up parts of another
   size in another order. NaN and infinity pass through: the build must not use -ffinite-math-only. */

#include "cpu.h"
#include "tiles.h"

#include <math.h>

enum {
    BLOCK = 48, /* rows of queries at a time: a multiple of a tile's */
    SUMS = 512, /* columns that are summed at a time, by one thread: memory likes to be read on and on */
    /* What a product copies at a time: of b half a megabyte, or all of one, to stay in L2, of a up to 200 KiB beside it. */
    STRIP_ROWS = 96, STRIP_COLUMNS = WIDE && !LARGE_L2 ? 256 : 512,
    FAR = 1 << 18, /* numbers: a matrix beyond L2, whose lines are better called before they are needed */
    SMALL = LARGE_L2 ? 1 << 19 : WIDE ? 1 << 17 : 0, /* numbers that are better read down their columns than copied */
    FOR_BLAS = 1 << 20, /* multiplications: with fewer, a call of it costs too much */
    PANEL = DEPTH * TILE_ROWS + SQUARE, /* the rows of a tile, and room for a last store to run over */
};

/* ---- products ------------------------------------------------------------------------------------ */

/* The `rows` first of `all` rows of a, in panels as high as a tile [n × rows]; zeros where there is no row. */
static void row_panels(const float *a, long a_row, long a_k, float *panels, long rows, long all, long n) {
    /* An octet may take more numbers than a panel is high: those must be there to be read. */
    long by_octets = least(rows, all - (SQUARE - TILE_ROWS)) / TILE_ROWS, together = 8;
    for (long first = 0; a_row == 1 && first < by_octets; first += together)
        for (long k = 0; k < n; k++)
            for (long p = first; p < least(first + together, by_octets); p++)
                *(octet *)(panels + p * PANEL + k * TILE_ROWS) = *(octet *)(a + p * TILE_ROWS + k * a_k);
    for (long p = a_row == 1 ? by_octets : 0; p * TILE_ROWS < rows; p++) {
        const float *x = a + p * TILE_ROWS * a_row;
        float *panel = panels + p * PANEL;
        long k = 0;
        for (; a_k == 1 && p < by_octets && k + SQUARE <= n; k += SQUARE)
            transpose(x + k, a_row, panel + k * TILE_ROWS, TILE_ROWS);
        for (; k < n; k++)
            for (long r = 0; r < TILE_ROWS; r++)
                panel[k * TILE_ROWS + r] = p * TILE_ROWS + r < rows ? x[r * a_row + k * a_k] : 0;
    }
}

/* As many numbers in every pass, so that none has few; sums with few columns are made in the same order. */
static long depth_of_pass(long K) {
    long passes = (K + DEPTH - 1) / DEPTH;
    return passes ? at_least((K + passes - 1) / passes, SQUARE) : DEPTH;
}

/* The product of torch's BLAS, if that is the quicker. */
typedef void blas_product(const char *, const char *, const int *, const int *, const int *, const float *, const float *,
                          const int *, const float *, const int *, const float *, float *, const int *);
static blas_product *sgemm;
void multiply_by(blas_product *function) { sgemm = function; }
int blas_multiplies(void) { return sgemm != NULL; }

/* BLAS takes matrices by columns, and so computes Cᵀ = Bᵀ Aᵀ. */
static void product_by_blas(const float *a, long a_row, long a_k, const float *b, long b_k, long b_column, float *c,
                            long c_row, const float *start, long start_row, long M, long N, long K) {
    int m = N, n = M, k = K, b_lead = b_column == 1 ? b_k : b_column, a_lead = a_k == 1 ? a_row : a_k, c_lead = c_row;
    float one = 1, keep = start != NULL;
    for (long r = 0; start && start != c && r < M; r++) memcpy(c + r * c_row, start + r * start_row, N * sizeof(float));
    sgemm(b_column == 1 ? "N" : "T", a_k == 1 ? "N" : "T", &m, &n, &k, &one, b, &b_lead, a, &a_lead, &keep, c, &c_lead);
}

static void product_of_one(const float *a, long a_row, long a_k, const float *b, long b_k, long b_column, float *c,
                           long c_row, const float *start, long start_row, long M, long N, long K) {
    float *panels_of_a = room(STRIP_ROWS / TILE_ROWS * PANEL);
    float *panels_of_b = room(DEPTH * STRIP_COLUMNS);
    /* Rows that are short, or used for few columns, are read where they lie; with wide vectors all rows are,
       and small matrices too. */
    int a_lies = a_k == 1 ? WIDE || N < STRIP_COLUMNS || K <= DEPTH : M * K <= SMALL;
    int b_lies = b_column == 1 && N % TILE_COLUMNS == 0 && N * K <= SMALL / 2, in_panels = !b_k;
    long right_k = b_lies ? b_k : TILE_COLUMNS;
    int far = M * N > FAR; /* a tile calls the left half of what it is added to itself */
    long depth = depth_of_pass(K);
    for (long k = 0; k < K; k += depth)
        for (long column = 0; column < N; column += STRIP_COLUMNS) {
            long n = least(depth, K - k), columns = least(STRIP_COLUMNS, N - column);
            const float *b_here = b + k * b_k + column * (in_panels ? K : b_column);
            const float *panels = in_panels ? b_here : panels_of_b;
            if (!b_lies && !in_panels) column_panels(b_here, b_k, b_column, panels_of_b, columns, n);
            /* Along a row of tiles, c is written on and on, but all of b is read for each: if it is small enough. */
            int along = (WIDE && a_lies) || columns * n <= DEPTH * STRIP_COLUMNS / 2;
            for (long row = 0; row < M; row += STRIP_ROWS) {
                const float *left = a + row * a_row + k * a_k;
                long rows = least(STRIP_ROWS, M - row), lie = a_lies ? rows / TILE_ROWS * TILE_ROWS : 0;
                row_panels(left + lie * a_row, a_row, a_k, panels_of_a, rows - lie, M - row - lie, n);
                long tall = (rows + TILE_ROWS - 1) / TILE_ROWS, wide = (columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
                for (long outer = 0; outer < (along ? tall : wide); outer++)
                    for (long inner = 0; inner < (along ? wide : tall); inner++) {
                        long i = (along ? outer : inner) * TILE_ROWS, j = (along ? inner : outer) * TILE_COLUMNS;
                        const float *panel = panels_of_a + (i - lie) / TILE_ROWS * PANEL;
                        const float *right = b_lies ? b_here + j : panels + j * n;
                        float *to = c + (row + i) * c_row + column + j;
                        const float *from = k ? to : start ? start + (row + i) * start_row + column + j : NULL;
                        long from_row = k ? c_row : start_row;
                        long there = least(TILE_ROWS, rows - i), across = least(TILE_COLUMNS, columns - j);
                        for (long r = 0; far && from && r < there; r++)
                            __builtin_prefetch(from + r * from_row + LANES);
                        if (there < TILE_ROWS || across < TILE_COLUMNS)
                            edge_tile(i < lie ? left + i * a_row : panel, i < lie ? a_row : 1, i < lie ? a_k : TILE_ROWS,
                                      right, right_k, to, c_row, n, from, from_row, there, across);
                        else if (i >= lie)
                            tile(panel, 1, TILE_ROWS, right, right_k, to, c_row, n, from, from_row);
                        else if (a_k == 1)
                            tile(left + i * a_row, a_row, 1, right, right_k, to, c_row, n, from, from_row);
                        else
                            tile(left + i, 1, a_k, right, right_k, to, c_row, n, from, from_row);
                    }
            }
        }
    free(panels_of_a), free(panels_of_b);
}

/* With at most a vector of columns, which are read where they lie. */
static void narrow_product_of_one(const float *a, long a_row, long a_k, const float *b, long b_k, float *c, long c_row,
                                  const float *start, long start_row, long M, long N, long K) {
    float *panels = room(STRIP_ROWS / TILE_ROWS * PANEL);
    long depth = depth_of_pass(K);
    for (long k = 0; k < K; k += depth)
        for (long row = 0; row < M; row += STRIP_ROWS) {
            const float *left = a + row * a_row + k * a_k, *right = b + k * b_k;
            long n = least(depth, K - k), rows = least(STRIP_ROWS, M - row), step = 2 * TILE_ROWS;
            long lie = a_k == 1 ? rows / step * step : 0;
            row_panels(left + lie * a_row, a_row, a_k, panels, rows - lie, M - row - lie, n);
            for (long i = 0; i < rows; i += step) {
                float *to = c + (row + i) * c_row;
                const float *from = k ? to : start ? start + (row + i) * start_row : NULL;
                long from_row = k ? c_row : start_row;
                if (i < lie)
                    narrow_tile(left + i * a_row, TILE_ROWS * a_row, a_row, 1, right, b_k, to, c_row, n, from, from_row,
                                step, N);
                else
                    narrow_tile(panels + (i - lie) / TILE_ROWS * PANEL, PANEL, 1, TILE_ROWS, right, b_k, to, c_row, n,
                                from, from_row, rows - i, N);
            }
        }
    free(panels);
}

/* With all of b in panels, each of which stays in L1 for all rows, and whole tiles only: what a tile is asked to do may
   then not take long. What is wanted `soon` is called into L2 meanwhile. */
void product_by_panels(const float *a, long a_row, const float *panels, float *c, long c_row, const float *start,
                       long start_row, long M, long N, long K, const upcoming *soon) {
    long lines = 0, called = 0;
    for (const upcoming *s = soon; s->n; s++) lines += at_least(s->n, LINE) / LINE;
    long tiles = M / TILE_ROWS * (N / TILE_COLUMNS), calls = least(K / 4, (lines + tiles - 1) / tiles);
    for (long j = 0; j < N; j += TILE_COLUMNS)
        for (long i = 0; i < M; i += TILE_ROWS) {
            calling_tile(a + i * a_row, a_row, 1, panels + j * K, TILE_COLUMNS, c + i * c_row + j, c_row, K,
                         start ? start + i * start_row + j : NULL, start_row, soon->x + called, soon->n ? calls : 0);
            if (soon->n && (called += calls * LINE) >= soon->n) soon++, called = 0;
        }
}

/* What one thread does of a product. */
static void product_of_part(const float *a, const long *a_stride, const float *b, const long *b_stride, float *c,
                            long c_row, const float *start, long start_row, long M, long N, long K) {
    long a_row = a_stride[0], a_k = a_stride[1], b_k = b_stride[0], b_column = b_stride[1];
    int in_panels = !b_k;
    if ((PARTS ? N <= LANES : N == LANES) && b_column == 1)
        narrow_product_of_one(a, a_row, a_k, b, b_k, c, c_row, start, start_row, M, PARTS ? N : LANES, K);
    else if (sgemm && !in_panels && M * N * K >= FOR_BLAS)
        product_by_blas(a, a_row, a_k, b, b_k, b_column, c, c_row, start, start_row, M, N, K);
    else
        product_of_one(a, a_row, a_k, b, b_k, b_column, c, c_row, start, start_row, M, N, K);
}

/* C[M × N] = A[M × K] B[K × N], added to `start` if there is one: a matrix like C, such as C itself, or, with rows
   of length 0, a vector. Of the two strides of A, and of B, one is 1; or both of B are 0, and it is in panels, as
   `column_panels` makes them of at most DEPTH rows. Each thread takes a part of the longer side of C. */
void product(const float *a, const long *a_stride, const float *b, const long *b_stride, float *c, long c_row,
             const float *start, long start_row, long M, long N, long K, int threads) {
    int by_rows = M >= N;
    IN_PARTS((by_rows ? M : N), (by_rows ? TILE_ROWS : TILE_COLUMNS), threads, {
        long row = by_rows ? first : 0, column = by_rows ? 0 : first;
        product_of_part(a + row * a_stride[0], a_stride, b + column * (b_stride[0] ? b_stride[1] : K), b_stride,
                        c + row * c_row + column, c_row, start ? start + row * start_row + column : NULL, start_row,
                        by_rows ? last - first : M, by_rows ? N : last - first, K);
    })
}

/* y[N × out] = x[N × in] wᵀ + bias */
void linear(const float *x, const float *w, const float *bias, float *y, long N, long out, long in, int threads) {
    product(x, (long[]){in, 1}, w, (long[]){1, in}, y, out, bias, 0, N, out, in, threads);
}

typedef vec sums_of_columns[SUMS / LANES];

/* Of some rows, which are added to the sums of d and of d · x̂. */
INLINE void add_rows(const float *d, const float *x, const float *moments, sums_of_columns sums, sums_of_columns along,
                     int rows, long row, long n) {
#define ADD(some)                                                                                    \
    EACH(rows) {                                                                                     \
        vec v = load(d + r * row + k, some);                                                         \
        sums[k / LANES] += v;                                                                        \
        if (x) along[k / LANES] += v * (load(x + r * row + k, some) - moments[2 * r]) * moments[2 * r + 1]; \
    }
    IN_VECTORS(n, ADD)
#undef ADD
}

static void store_sums(const sums_of_columns found, float *sums, int add, long n) {
#define STORE(some) store(found[k / LANES] + (add ? load(sums + k, some) : every(0)), sums + k, some);
    IN_VECTORS(n, STORE)
#undef STORE
}

/* Of at most SUMS columns of the n that a row has. */
static void sum_columns(const float *d, const float *x, const float *moments, float *sums, float *sums_along, int add,
                        long rows, long n, long columns) {
    sums_of_columns all = {{0}}, all_along = {{0}};
    for (long from = 0; from < rows; from += BLOCK) { /* sums of sums lose less */
        sums_of_columns some = {{0}}, some_along = {{0}};
#define ADD(number)                                                                                  \
    add_rows(d + row * n, x ? x + row * n : NULL, x ? moments + 2 * row : NULL, some, some_along, number, n, columns);
        IN_ROWS(from, least(rows, from + BLOCK), ADD)
#undef ADD
        for (long i = 0; i * LANES < columns; i++) {
            all[i] += some[i];
            if (x) all_along[i] += some_along[i];
        }
    }
    if (sums) store_sums(all, sums, add, columns);
    if (sums_along) store_sums(all_along, sums_along, add, columns);
}

/* The sums of the columns of d [rows × n] and, if there is an x, which its `moments` bring to x̂, of d · x̂; either
   sums may be NULL. They are added to what is there if `add`. */
static void column_sums(const float *d, const float *x, const float *moments, float *sums, float *sums_along, int add,
                        long rows, long n, int threads) {
    IN_PARTS(n, LINE, threads, for (long at = first; at < last; at += SUMS)
        sum_columns(d + at, x ? x + at : NULL, moments, sums ? sums + at : NULL, sums_along ? sums_along + at : NULL, add,
                    rows, n, least(SUMS, last - at)))
}

/* The gradients that are wanted, from that of y; dx is added to what is there if `add_dx`, the others if `add`. */
void linear_backward(const float *dy, const float *x, const float *w, float *dx, int add_dx, float *dw, float *dbias,
                     int add, long N, long out, long in, int threads) {
    if (dx) product(dy, (long[]){out, 1}, w, (long[]){in, 1}, dx, in, add_dx ? dx : NULL, in, N, in, out, threads);
    if (dw) product(dy, (long[]){1, out}, x, (long[]){in, 1}, dw, in, add ? dw : NULL, in, out, in, N, threads);
    if (dbias) column_sums(dy, NULL, NULL, dbias, NULL, add, N, out, threads);
}

/* ---- attention ----------------------------------------------------------------------------------- */

/* One head of a tensor [B, H, T, E] whose last stride is 1. */
INLINE float *head(const float *x, const long *stride, long b, long h) {
    return (float *)x + b * stride[0] + h * stride[1];
}

/* Rows of E numbers next to each other, each with zeros up to `wide` of them, and zeros up to `all` rows. */
static void gather(const float *x, long stride, float *rows, long n, long all, long E, long wide) {
    for (long t = 0; t < n; t++) {
        copy(x + t * stride, rows + t * wide, E);
        for (long e = E; e < wide; e++) rows[t * wide + e] = 0;
    }
    memset(rows + n * wide, 0, (all - n) * wide * sizeof(float));
}

static void scatter(const float *rows, float *x, long stride, long n, long E, long wide) {
    for (long t = 0; t < n; t++) copy(rows + t * wide, x + t * stride, E);
}

/* The same as columns [E × all]; E and all are multiples of 8. */
static void columns(const float *x, long stride, float *y, long n, long all, long E) {
    long t = 0;
    for (; t + SQUARE <= n; t += SQUARE)
        for (long e = 0; e < E; e += SQUARE) transpose(x + t * stride + e, stride, y + e * all + t, all);
    for (; t < all; t++)
        for (long e = 0; e < E; e++) y[e * all + t] = t < n ? x[t * stride + e] : 0;
}

#define EACH_ROW _Pragma("GCC unroll 8") for (long r = 0; r < TILE_ROWS; r++)
#define AT (*(vec *)(w + r * row + j))
#define D_AT (*(vec *)(d + r * row + j))
#define SEEN (seen - j + (causal ? r : 0)) /* from j on */

/* Rows of a tile at w, side by side: one alone would be waiting for its own sums. Row r sees `seen` numbers, with
   `causal` r more, and becomes exp(scale · (x - its largest)) there, and 0 from there to the end of the vector
   that holds the last before `until`; every lane of `largest` and `sum` holds that of a row. */
INLINE void exponentials(float *w, long row, long seen, long until, int causal, float scale, vec *largest, vec *sum) {
    long by_all = seen / LANES * LANES, j;
    EACH_ROW largest[r] = every(-INFINITY), sum[r] = (vec){0};
    for (j = 0; j < by_all; j += LANES) EACH_ROW largest[r] = larger(AT, largest[r]);
    for (; j < until; j += LANES) EACH_ROW largest[r] = larger(first_of(AT, SEEN, -INFINITY), largest[r]);
    EACH_ROW largest[r] = largest_across(largest[r]);
    for (j = 0; j < by_all; j += LANES) EACH_ROW sum[r] += AT = exponential((AT - largest[r]) * scale);
    for (; j < until; j += LANES) EACH_ROW sum[r] += AT = first_of(exponential((AT - largest[r]) * scale), SEEN, 0);
    EACH_ROW sum[r] = sum_across(sum[r]);
}

/* From logits w and the gradient d of the weights that are made of them: these weights, and the logits' gradient. */
INLINE void dlogits_of_rows(float *w, float *d, long row, long seen, long until, int causal, float scale,
                            const float *log_sum, const float *dy, long dy_row, const float *const *y, long E) {
    long by_all = seen / LANES * LANES, j;
    vec mean[TILE_ROWS] = {0};
    for (long e = 0; e < E; e += LANES) EACH_ROW mean[r] += *(vec *)(dy + r * dy_row + e) * *(vec *)(y[r] + e);
    EACH_ROW mean[r] = sum_across(mean[r]);
    for (j = 0; j < by_all; j += LANES) EACH_ROW {
        vec weight = AT = exponential(AT * scale - log_sum[r]);
        D_AT = weight * (D_AT - mean[r]) * scale;
    }
    for (; j < until; j += LANES) EACH_ROW {
        vec weight = AT = first_of(exponential(AT * scale - log_sum[r]), SEEN, 0);
        D_AT = first_of(weight * (D_AT - mean[r]) * scale, SEEN, 0);
    }
}

#undef EACH_ROW
#undef AT
#undef D_AT
#undef SEEN

/* Of a causal row only what it sees is computed, in steps of a tile. */
static void attention_of_heads(long from, long to, const float *q, const float *k, const float *v, float *y, float *lse,
                               long H, long T, long E, const long (*stride)[3], long ahead, float scale, int causal) {
    long all = at_least(T, TILE_COLUMNS), wide = at_least(E, TILE_COLUMNS);
    float *work = room(all * E + T * (wide + 1) + BLOCK * (all + 2 * wide));
    float *k_columns = work, *v_rows = k_columns + all * E, *weights = v_rows + T * wide;
    float *q_rows = weights + BLOCK * all, *y_rows = q_rows + BLOCK * wide, *sums = y_rows + BLOCK * wide;
    for (long bh = from; bh < to; bh++) {
        const float *qh = head(q, stride[0], bh / H, bh % H);
        float *log_sum = lse + bh * T;
        columns(head(k, stride[1], bh / H, (bh + ahead) % H), stride[1][2], k_columns, T, all, E);
        gather(head(v, stride[2], bh / H, bh % H), stride[2][2], v_rows, T, T, E, wide);
        for (long first = 0; first < T; first += BLOCK) {
            long rows = least(BLOCK, T - first);
            gather(qh + first * stride[0][2], stride[0][2], q_rows, rows, at_least(rows, TILE_ROWS), E, wide);
            for (long i = 0; i < rows; i += TILE_ROWS) {
                long seen = causal ? first + i + 1 : T, seen_by_last = causal ? least(first + i + TILE_ROWS, T) : T;
                float *tile_weights = weights + i * all, *tile_y = y_rows + i * wide;
                for (long j = 0; j < seen_by_last; j += TILE_COLUMNS)
                    tile(q_rows + i * wide, wide, 1, k_columns + j, all, tile_weights + j, all, E, NULL, 0);
                vec largest[TILE_ROWS], sum[TILE_ROWS];
                exponentials(tile_weights, all, seen, seen_by_last, causal, scale, largest, sum);
                for (long r = 0; r < TILE_ROWS && first + i + r < T; r++) {
                    log_sum[first + i + r] = largest[r][0] * scale;
                    sums[first + i + r] = sum[r][0];
                }
                for (long e = 0; e < E; e += TILE_COLUMNS)
                    tile(tile_weights, all, 1, v_rows + e, wide, tile_y + e, wide, seen_by_last, NULL, 0);
                for (long r = 0; r < TILE_ROWS; r++)
                    for (long e = 0; e < E; e += LANES) *(vec *)(tile_y + r * wide + e) *= 1 / sum[r];
            }
            scatter(y_rows, head(y, stride[3], bh / H, bh % H) + first * stride[3][2], stride[3][2], rows, E, wide);
        }
        for (long t = 0; t < T; t++) log_sum[t] += logf(sums[t]);
    }
    free(work);
}

/* y = softmax(scale · q kᵀ) v, where head h reads the keys of head h + ahead, and `lse`, the logarithm of each row's
   sum, from which backward makes the weights anew. */
void attention(const float *q, const float *k, const float *v, float *y, float *lse, long B, long H, long T,
               long E, const long (*stride)[3], long ahead, float scale, int causal, int threads) {
    IN_PARTS(B * H, 1, threads,
             attention_of_heads(first, last, q, k, v, y, lse, H, T, E, stride, ahead, scale, causal))
}

static void attention_of_heads_backward(long from, long to, const float *q, const float *k, const float *v,
                                        const float *y, const float *lse, const float *dy, float *dq, float *dk,
                                        float *dv, long H, long T, long E, const long (*stride)[3], long ahead,
                                        float scale, int causal) {
    long high = at_least(T, TILE_ROWS), all = at_least(T, TILE_COLUMNS), wide = at_least(E, TILE_COLUMNS);
    float *work = room(2 * all * E + (T + 2 * high) * wide + BLOCK * (2 * all + 3 * wide));
    float *k_columns = work, *v_columns = k_columns + all * E, *k_rows = v_columns + all * E;
    float *dk_rows = k_rows + T * wide, *dv_rows = dk_rows + high * wide;
    float *weights = dv_rows + high * wide, *dlogits = weights + BLOCK * all;
    float *q_rows = dlogits + BLOCK * all, *dy_rows = q_rows + BLOCK * wide, *dq_rows = dy_rows + BLOCK * wide;
    for (long bh = from; bh < to; bh++) {
        long b = bh / H, h = bh % H, of_keys = (h + ahead) % H;
        columns(head(k, stride[1], b, of_keys), stride[1][2], k_columns, T, all, E);
        columns(head(v, stride[2], b, h), stride[2][2], v_columns, T, all, E);
        gather(head(k, stride[1], b, of_keys), stride[1][2], k_rows, T, T, E, wide);
        memset(dk_rows, 0, 2 * high * wide * sizeof(float));
        for (long first = 0; first < T; first += BLOCK) {
            long rows = least(BLOCK, T - first), in_tiles = at_least(rows, TILE_ROWS);
            long seen_by_all = causal ? first + rows : T;
            gather(head(q, stride[0], b, h) + first * stride[0][2], stride[0][2], q_rows, rows, in_tiles, E, wide);
            gather(head(dy, stride[4], b, h) + first * stride[4][2], stride[4][2], dy_rows, rows, in_tiles, E, wide);
            for (long i = 0; i < rows; i += TILE_ROWS) {
                long seen = causal ? first + i + 1 : T, seen_by_last = causal ? least(first + i + TILE_ROWS, T) : T;
                float *tile_weights = weights + i * all, *tile_dlogits = dlogits + i * all;
                for (long j = 0; j < seen_by_last; j += TILE_COLUMNS) {
                    tile(q_rows + i * wide, wide, 1, k_columns + j, all, tile_weights + j, all, E, NULL, 0);
                    tile(dy_rows + i * wide, wide, 1, v_columns + j, all, tile_dlogits + j, all, E, NULL, 0);
                }
                const float *y_rows[TILE_ROWS];
                float log_sums[TILE_ROWS];
                for (long r = 0; r < TILE_ROWS; r++) { /* rows beyond the last have no gradient: 0 comes of them */
                    long t = least(first + i + r, T - 1);
                    y_rows[r] = head(y, stride[3], b, h) + t * stride[3][2];
                    log_sums[r] = t == first + i + r ? lse[bh * T + t] : 0;
                }
                dlogits_of_rows(tile_weights, tile_dlogits, all, seen, seen_by_last, causal, scale, log_sums,
                                dy_rows + i * wide, wide, y_rows, E);
                for (long e = 0; e < E; e += TILE_COLUMNS)
                    tile(tile_dlogits, all, 1, k_rows + e, wide, dq_rows + i * wide + e, wide, seen_by_last, NULL, 0);
            }
            for (long j = 0; j < seen_by_all; j += TILE_ROWS) {
                long skip = causal && j > first ? j - first : 0, n = in_tiles - skip;
                const float *q_seen = q_rows + skip * wide, *dy_seen = dy_rows + skip * wide;
                for (long e = 0; e < E; e += TILE_COLUMNS) {
                    float *dk_tile = dk_rows + j * wide + e, *dv_tile = dv_rows + j * wide + e;
                    tile(dlogits + skip * all + j, 1, all, q_seen + e, wide, dk_tile, wide, n, dk_tile, wide);
                    tile(weights + skip * all + j, 1, all, dy_seen + e, wide, dv_tile, wide, n, dv_tile, wide);
                }
            }
            scatter(dq_rows, head(dq, stride[5], b, h) + first * stride[5][2], stride[5][2], rows, E, wide);
        }
        scatter(dk_rows, head(dk, stride[6], b, of_keys), stride[6][2], T, E, wide);
        scatter(dv_rows, head(dv, stride[7], b, h), stride[7][2], T, E, wide);
    }
    free(work);
}

/* The gradients dq, dk, dv from that of y, with the weights made anew. */
void attention_backward(const float *q, const float *k, const float *v, const float *y, const float *lse,
                        const float *dy, float *dq, float *dk, float *dv, long B, long H, long T, long E,
                        const long (*stride)[3], long ahead, float scale, int causal, int threads) {
    IN_PARTS(B * H, 1, threads,
             attention_of_heads_backward(first, last, q, k, v, y, lse, dy, dq, dk, dv, H, T, E, stride, ahead, scale,
                                         causal))
}

/* ---- GELU: x p, where p is the normal distribution's mass below x, or nearly so by tanh -------------- */

/* y = gelu(x), and the slope there, times `by` if there is one. Inlined, with NULL for what is not wanted. */
INLINE void gelu_vector(const float *x, const float *by, float *y, float *slope, long n, int by_tanh) {
    vec here, active = activated_with_slope(load(x, n), by_tanh, &here);
    if (by) here *= load(by, n);
    if (slope) store(here, slope, n);
    if (y) store(active, y, n);
}

INLINE void gelu_of_kind(const float *x, const float *by, float *y, float *slope, long n, int by_tanh) {
#define GELU(some) gelu_vector(x + k, by ? by + k : NULL, y ? y + k : NULL, slope ? slope + k : NULL, some, by_tanh);
    IN_VECTORS(n, GELU)
#undef GELU
}

static void gelu_of_part(const float *x, const float *by, float *y, float *slope, long n, int by_tanh) {
    if (by_tanh && slope) gelu_of_kind(x, by, y, slope, n, 1);
    else if (by_tanh) gelu_of_kind(x, NULL, y, NULL, n, 1);
    else if (slope) gelu_of_kind(x, by, y, slope, n, 0);
    else gelu_of_kind(x, NULL, y, NULL, n, 0);
}

/* With the slope at x, if it is wanted; it may take the place of x. */
void gelu(const float *x, float *y, float *slope, long n, int by_tanh, int threads) {
    IN_PARTS(n, LINE, threads,
             gelu_of_part(x + first, NULL, y + first, slope ? slope + first : NULL, last - first, by_tanh))
}

/* dx may be dy. If y is wanted, it is computed once more. */
void gelu_backward(const float *x, const float *dy, float *dx, float *y, long n, int by_tanh, int threads) {
    IN_PARTS(n, LINE, threads,
             gelu_of_part(x + first, dy + first, y ? y + first : NULL, dx + first, last - first, by_tanh))
}

/* ---- norms --------------------------------------------------------------------------------------- */

static void normalise_part(const float *x, const float *w, const float *b, float eps, int rms, float *y, float *moments,
                           long rows, long n) {
#define NORMALISE(number) \
    normalise_rows(x + row * n, w, b, eps, rms, y + row * n, moments ? moments + 2 * row : NULL, number, n);
    IN_ROWS(0, rows, NORMALISE)
#undef NORMALISE
}

/* Of every row; `moments`, if wanted, are each row's mean and the factor that shrinks it. */
void normalise(const float *x, const float *w, const float *b, float eps, int rms, float *y, float *moments,
               long rows, long n, int threads) {
    IN_PARTS(rows, SIDE_BY_SIDE, threads,
             normalise_part(x + first * n, w, b, eps, rms, y + first * n, moments ? moments + 2 * first : NULL,
                            last - first, n))
}

/* `weighted` is whether there is a w: no branch may keep a product apart from the sum that it could be rounded with. */
INLINE void normalise_rows_backward(const float *dy, const float *x, const float *moments, const float *w, int weighted,
                                    int rms, float *dx, int rows, long n) {
    vec sums[SIDE_BY_SIDE] = {{0}}, sums_along[SIDE_BY_SIDE] = {{0}};
#define VALUES(some)                                                                                 \
    vec d = load(dy + r * n + k, some), x_k = load(x + r * n + k, some) - moments[2 * r];            \
    if (weighted) d *= load(w + k, some);
#define SUM(some) EACH(rows) { VALUES(some) sums[r] += d, sums_along[r] += d * x_k; }
    IN_VECTORS(n, SUM)
    EACH(rows) {
        float shrink = moments[2 * r + 1];
        sums[r] = every(rms ? 0 : sum_of(sums[r]) / n);
        sums_along[r] = every(sum_of(sums_along[r]) * (shrink * shrink / n));
    }
#define ADD(some)                                                                                    \
    EACH(rows) {                                                                                     \
        VALUES(some)                                                                                 \
        float *to = dx + r * n + k;                                                                  \
        store(load(to, some) + moments[2 * r + 1] * (d - sums[r] - x_k * sums_along[r]), to, some);  \
    }
    IN_VECTORS(n, ADD)
#undef VALUES
#undef SUM
#undef ADD
}

static void normalise_part_backward(const float *dy, const float *x, const float *moments, const float *w, int rms,
                                    float *dx, long rows, long n) {
#define BACKWARD(number, weighted) \
    normalise_rows_backward(dy + row * n, x + row * n, moments + 2 * row, w, weighted, rms, dx + row * n, number, n);
#define WEIGHTED(number) BACKWARD(number, 1)
#define PLAIN(number) BACKWARD(number, 0)
    if (w) IN_ROWS(0, rows, WEIGHTED)
    else IN_ROWS(0, rows, PLAIN)
#undef BACKWARD
#undef WEIGHTED
#undef PLAIN
}

/* dx, added to what is there, from the gradient of y and the moments; dw and db if they are wanted, added if `add`. */
void normalise_backward(const float *dy, const float *x, const float *moments, const float *w, int rms, float *dx,
                        float *dw, float *db, int add, long rows, long n, int threads) {
    IN_PARTS(rows, SIDE_BY_SIDE, threads,
             normalise_part_backward(dy + first * n, x + first * n, moments + 2 * first, w, rms, dx + first * n,
                                     last - first, n))
    if (dw || db) column_sums(dy, dw ? x : NULL, moments, db, dw, add, rows, n, threads);
}

/* ---- the loss ------------------------------------------------------------------------------------ */

/* Rows of logits become softmax(row) - onehot(target), the gradient of each row's cross-entropy `loss`.
   Returns whether a target is no class; nothing is changed then. */
int cross_entropy(float *logits, long row_stride, const int64_t *target, float *loss, long rows, long V,
                  int gradient, int threads) {
    for (long r = 0; r < rows; r++)
        if (target[r] < 0 || target[r] >= V) return 1;
    IN_PARTS(rows, 1, threads, for (long r = first; r < last; r++) {
        float *x = logits + r * row_stride, chosen = x[target[r]], largest = largest_of(x, V);
        float sum = exponentials_of_row(x, V, largest);
        loss[r] = logf(sum) + largest - chosen;
        if (!gradient) continue;
        float shrink = 1 / sum;
        for (long j = 0; j < V; j++) x[j] *= shrink;
        x[target[r]] -= 1;
    })
    return 0;
}
