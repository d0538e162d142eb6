/* The loss of a small head and its gradients, in one call. As matrices in memory the logits were walked over five
   times; here a few rows at a time go through all that is made of them while they are still in L2.

   A group of rows has two phases: by rows its logits and dh, then by classes its part of dw. More threads take larger
   groups, so as to wait for each other less often, but what is summed at once for dw is always as many rows: the bits
   do not depend on the threads. */

#include "cpu.h"
#include "tiles.h"

#include <math.h>

enum {
    CHUNK = LARGE_L2 ? 48 : 12, /* rows that go from logits to dh together; so many logits stay in L2 */
    SUMMED = 192, /* rows that are summed in registers */
    CLASSES = 48, /* that a thread takes at a time */
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

/* dw[classes × D] = pᵀ h, or added to it; what is at p is read where it lies. */
static void dw_of_classes(const float *p, long p_row, const float *h_panels, float *dw, int add, long rows,
                          long classes, long D) {
    for (long k = 0; k < rows; k += SUMMED)
        for (long i = 0; i < classes; i += TILE_ROWS)
            for (long j = 0; j < D; j += TILE_COLUMNS) {
                const float *left = p + k * p_row + i, *right = h_panels + j * rows + k * TILE_COLUMNS;
                float *to = dw + i * D + j, *start = add || k ? to : NULL;
                long n = least(SUMMED, rows - k), there = least(TILE_ROWS, classes - i);
                long across = least(TILE_COLUMNS, D - j);
                if (there < TILE_ROWS || across < TILE_COLUMNS)
                    edge_tile(left, 1, p_row, right, TILE_COLUMNS, to, D, n, start, D, there, across);
                else
                    tile(left, 1, p_row, right, TILE_COLUMNS, to, D, n, start, D);
            }
}

/* Each row's cross-entropy `loss` with the logits h wᵀ, and the gradients of their sum, in which each has its
   `share`; dh, dw or both may be NULL. Returns whether a target is no class; nothing is computed then. */
int head_loss(const float *h, const float *w, const int64_t *target, const float *share, float *loss, float *dh,
              float *dw, long N, long V, long D, int threads) {
    for (long r = 0; r < N; r++)
        if (target[r] < 0 || target[r] >= V) return 1;
    long D_wide = at_least(D, TILE_COLUMNS), V_wide = at_least(V, TILE_COLUMNS);
    long p_row = V_wide + TILE_COLUMNS; /* no power of two: rows so far apart would fight for the same lines of L1 */
    long group = least(SUMMED * threads, at_least(LARGEST_GROUP / V, SUMMED));
    group = least(group, at_least(N, CHUNK));
    float *w_by_classes = room(D * V_wide), *w_by_channels = dh ? room(V * D_wide) : NULL;
    float *p = room(group * p_row), *h_panels = room(group * D_wide);
#pragma omp parallel num_threads(threads)
    {
        float *h_rows = room(2 * CHUNK * D_wide), *dh_rows = h_rows + CHUNK * D_wide, shrink[CHUNK];
        memset(h_rows, 0, CHUNK * D_wide * sizeof(float));
        all_panels(w, 1, D, w_by_classes, V, D);
        if (dh) all_panels(w, D, 1, w_by_channels, D, V);
#pragma omp barrier
        for (long first = 0; first < N; first += group) {
            long rows = least(group, N - first);
#pragma omp for schedule(dynamic)
            for (long from = 0; from < rows; from += CHUNK) {
                long here = least(CHUNK, rows - from);
                float *x = p + from * p_row;
                for (long r = 0; r < here; r++)
                    memcpy(h_rows + r * D_wide, h + (first + from + r) * D, D * sizeof(float));
                by_panels(h_rows, D_wide, w_by_classes, x, p_row, here, V_wide, D);
                for (long r = 0, n = first + from; r < here; r++, n++) {
                    float *row = x + r * p_row, *chosen = row + target[n], of_chosen = *chosen;
                    float largest = largest_of(row, V), sum = exponentials_of_row(row, V, largest);
                    loss[n] = logf(sum) + largest - of_chosen;
                    /* Shrunk are the narrow factors and products, sparing a pass over the wide one. */
                    *chosen -= sum, shrink[r] = share[n] / sum;
                }
                if (dh) by_panels(x, p_row, w_by_channels, dh_rows, D_wide, here, D_wide, V);
                for (long r = 0; r < here; r++)
                    for (long k = 0; k < D_wide; k += LANES) {
                        long panel = k / TILE_COLUMNS * TILE_COLUMNS, at = r * D_wide + k;
                        float *in_panel = h_panels + panel * rows + (from + r) * TILE_COLUMNS + k - panel;
                        *(vec *)in_panel = *(vec *)(h_rows + at) * shrink[r];
                        if (dh && k < D)
                            store(*(vec *)(dh_rows + at) * shrink[r], dh + (first + from + r) * D + k, D - k);
                    }
            }
            if (!dw) continue;
#pragma omp for schedule(dynamic)
            for (long c = 0; c < V; c += CLASSES)
                dw_of_classes(p + c, p_row, h_panels, dw + c * D, first > 0, rows, least(CLASSES, V - c), D);
        }
        free(h_rows);
    }
    free(w_by_classes), free(w_by_channels), free(p), free(h_panels);
    return 0;
}
