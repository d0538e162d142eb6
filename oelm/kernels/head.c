/* The loss of a small head and its gradients, in one call. As matrices in memory the logits were walked over five
   times; here a few rows at a time go through all that is made of them while they are still in L2.

   A group of rows has two phases: by rows its logits and dh, then by classes its part of dw. More threads take larger
   groups, so as to wait for each other less often, but what is summed at once for dw is always as many rows: the bits
   do not depend on the threads. */

#include "cpu.h"
#include "tiles.h"

#include <math.h>

enum {
    CHUNK = WIDE ? 48 : 12, /* rows that go from logits to dh together; so many logits stay in L2 */
    CHUNK_FOR_BLAS = 96, /* which copies the weights anew for each: 0.86 to 0.97 of the time where L2 is 1 MiB */
    SUMMED = 192, /* rows that are summed in registers */
    COPIED = 64, /* columns that it copies at a time */
    LARGEST_GROUP = 1 << 23, /* logits */
};

/* All of b [K × columns] in panels, by all threads; they do not wait for each other. */
static void all_panels(const float *b, long b_k, long b_column, float *panels, long columns, long K) {
    long wide = at_least(columns, TILE_COLUMNS);
#pragma omp for collapse(2) nowait
    for (long k = 0; k < K; k += DEPTH)
        for (long j = 0; j < columns; j += COPIED) {
            long n = least(DEPTH, K - k), some = least(COPIED, columns - j);
            column_panels(b + k * b_k + j * b_column, b_k, b_column, panels + k * wide + j * n, some, n);
        }
}

/* C[rows × wide] = A B, with B in panels, and with room for whole tiles. */
static void by_panels(const float *a, long a_row, const float *panels, float *c, long c_row, long rows, long wide,
                      long K) {
    for (long k = 0; k < K; k += DEPTH)
        for (long j = 0, n = least(DEPTH, K - k); j < wide; j += TILE_COLUMNS)
            for (long i = 0; i < rows; i += TILE_ROWS) {
                const float *left = a + i * a_row + k, *right = panels + k * wide + j * n;
                float *to = c + i * c_row + j;
                tile(left, a_row, 1, right, TILE_COLUMNS, to, c_row, n, k ? to : NULL, c_row);
            }
}

/* The columns from p on of hᵀ p [D × V], added to what is there if `add`; both are read where they lie. Of h as many
   rows are summed in registers as leave what is read of p in L1. Meanwhile, some rows with every tile, the classes that
   come next are called into L2: another thread may have written them. */
static void dw_of_classes(const float *h, long h_row, const float *p, long p_row, float *dw, long dw_row, int add,
                          long rows, long D) {
    for (long k = 0; k < rows; k += SUMMED) {
        const float *here = p + k * p_row, *next = here + TILE_COLUMNS;
        long n = least(SUMMED, rows - k);
        for (long i = 0; i < D; i += TILE_ROWS) {
            float *to = dw + i * dw_row;
            for (long r = n * i / D; r < n * (i + TILE_ROWS) / D; r++)
                for (long j = 0; j < TILE_COLUMNS; j += LANES) __builtin_prefetch(next + r * p_row + j, 0, 2);
            tile(h + k * h_row + i, 1, h_row, here, p_row, to, dw_row, n, add || k ? to : NULL, dw_row);
        }
    }
}

/* The mean cross-entropy `loss` of the logits h wᵀ over all rows whose target is not `ignored`, and its gradients; dh, dw
   or both may be NULL. Returns whether a target is no class; nothing is computed then. */
int head_loss(const float *h, const float *w, const int64_t *target, long ignored, float *loss, float *dh, float *dw,
              long N, long V, long D, int threads) {
    long kept = 0;
    for (long r = 0; r < N; kept += target[r++] != ignored)
        if (target[r] != ignored && (target[r] < 0 || target[r] >= V)) return 1;
    float share = kept ? 1.0f / kept : 0, *of_rows = room(N);
    long D_wide = at_least(D, TILE_COLUMNS), V_wide = at_least(V, TILE_COLUMNS);
    long p_row = V_wide + TILE_COLUMNS; /* no power of two: rows so far apart would fight for the same lines of L1 */
    int blas = blas_multiplies();
    long chunk = blas ? CHUNK_FOR_BLAS : CHUNK, group = least(SUMMED * threads, at_least(LARGEST_GROUP / V, SUMMED));
    group = least(group, at_least(N, chunk));
    float *w_by_classes = blas ? NULL : room(D * V_wide), *w_by_channels = dh && !blas ? room(V * D_wide) : NULL;
    float *p = room(group * p_row), *h_shrunk = room(group * D_wide + TILE_ROWS);
    float *dw_columns = dw ? room(at_least(D, TILE_ROWS) * V_wide) : NULL;
#pragma omp parallel num_threads(threads)
    {
        float *h_rows = room(2 * chunk * D_wide), *dh_rows = h_rows + chunk * D_wide, shrink[CHUNK_FOR_BLAS];
        memset(h_rows, 0, chunk * D_wide * sizeof(float));
        if (w_by_classes) all_panels(w, 1, D, w_by_classes, V, D);
        if (w_by_channels) all_panels(w, D, 1, w_by_channels, D, V);
#pragma omp barrier
        for (long first = 0; first < N; first += group) {
            long rows = least(group, N - first);
#pragma omp for schedule(dynamic)
            for (long from = 0; from < rows; from += chunk) {
                long here = least(chunk, rows - from);
                float *x = p + from * p_row;
                for (long r = 0; r < here; r++)
                    memcpy(h_rows + r * D_wide, h + (first + from + r) * D, D * sizeof(float));
                if (blas) product(h_rows, (long[]){D_wide, 1}, w, (long[]){1, D}, x, p_row, NULL, 0, here, V, D, 1);
                else by_panels(h_rows, D_wide, w_by_classes, x, p_row, here, V_wide, D);
                for (long r = 0, n = first + from; r < here; r++, n++) {
                    int counts = target[n] != ignored;
                    float *row = x + r * p_row, *chosen = row + (counts ? target[n] : 0), of_chosen = *chosen;
                    float largest = largest_of(row, V), sum = exponentials_of_row(row, V, largest);
                    of_rows[n] = counts ? logf(sum) + largest - of_chosen : 0;
                    /* Shrunk are the narrow factors and products, sparing a pass over the wide one. */
                    *chosen -= sum, shrink[r] = counts ? share / sum : 0;
                }
                if (dh && blas)
                    product(x, (long[]){p_row, 1}, w, (long[]){D, 1}, dh_rows, D_wide, NULL, 0, here, D, V, 1);
                else if (dh) by_panels(x, p_row, w_by_channels, dh_rows, D_wide, here, D_wide, V);
                for (long r = 0; r < here; r++)
                    for (long k = 0; k < D_wide; k += LANES) {
                        long at = r * D_wide + k;
                        *(vec *)(h_shrunk + from * D_wide + at) = *(vec *)(h_rows + at) * shrink[r];
                        if (dh && k < D)
                            store(*(vec *)(dh_rows + at) * shrink[r], dh + (first + from + r) * D + k, D - k);
                    }
            }
            if (!dw) continue;
#pragma omp for
            for (long c = 0; c < V; c += TILE_COLUMNS)
                dw_of_classes(h_shrunk, D_wide, p + c, p_row, dw_columns + c, V_wide, first > 0, rows, D);
        }
        if (dw)
#pragma omp for
            for (long c = 0; c < V; c += SQUARE)
                for (long k = 0; k < D; k += SQUARE)
                    if (c + SQUARE <= V && k + SQUARE <= D)
                        transpose(dw_columns + k * V_wide + c, V_wide, dw + c * D + k, D);
                    else
                        for (long i = c; i < least(c + SQUARE, V); i++)
                            for (long n = k; n < least(k + SQUARE, D); n++) dw[i * D + n] = dw_columns[n * V_wide + i];
        free(h_rows);
    }
    double sum = 0;
    for (long n = 0; n < N; n++) sum += of_rows[n];
    *loss = sum * share;
    free(w_by_classes), free(w_by_channels), free(p), free(h_shrunk), free(dw_columns), free(of_rows);
    return 0;
}
