/* What a model reads first: each token's row, plus that of its position. As torch's operations, the sum and the three
   gradients took a small model longer than their numbers do. */

#include "cpu.h"

#include <string.h>

/* y[n] = w[ids[n]] + positions[n % T], of N tokens in sequences of T; `positions` may be NULL. Returns whether an id has
   no row of the V; nothing is read then. */
int embed(const int64_t *ids, const float *w, const float *positions, float *y, long N, long T, long V, long D,
          int threads) {
    for (long n = 0; n < N; n++)
        if (ids[n] < 0 || ids[n] >= V) return 1;
#pragma omp parallel for num_threads(threads)
    for (long n = 0; n < N; n++) {
        const float *row = w + ids[n] * D, *place = positions + n % T * D;
        float *restrict to = y + n * D;
        if (!positions) memcpy(to, row, D * sizeof(float));
        else
            for (long d = 0; d < D; d++) to[d] = row[d] + place[d];
    }
    return 0;
}

/* The gradients dw [V × D] and dpositions [T × D] from that of y; each may be NULL. A thread takes a part of the channels
   of all rows, so that every sum has its order. */
void embed_backward(const int64_t *ids, const float *dy, float *dw, float *dpositions, long N, long T, long V, long D,
                    int threads) {
    long part = at_least((D + threads - 1) / threads, 16);
#pragma omp parallel num_threads(threads)
    {
        if (dw)
#pragma omp for
            for (long v = 0; v < V; v++) memset(dw + v * D, 0, D * sizeof(float));
#pragma omp for
        for (long first = 0; first < D; first += part) {
            long some = least(part, D - first);
            for (long t = 0; dpositions && t < T; t++) memset(dpositions + t * D + first, 0, some * sizeof(float));
            for (long n = 0; n < N; n++) {
                const float *restrict from = dy + n * D + first;
                float *restrict of_token = dw + ids[n] * D + first, *restrict of_place = dpositions + n % T * D + first;
                if (dw)
                    for (long d = 0; d < some; d++) of_token[d] += from[d];
                if (dpositions)
                    for (long d = 0; d < some; d++) of_place[d] += from[d];
            }
        }
    }
}
