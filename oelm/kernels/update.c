/* What follows the gradients, for all tensors in one call: torch's operations take each tensor by itself, and a
   small model has many small ones. */

#include "cpu.h"
#include "vectors.h"

enum { PIECE = 4096 /* numbers that a thread takes at a time */ };

static long pieces_of(long size) { return (size + PIECE - 1) / PIECE; }

/* The sum of the squares of all numbers. The sums of pieces are added in their order, whoever made them. */
double sum_of_squares(const float *const *x, const long *sizes, long tensors, int threads) {
    long pieces = 0;
    for (long t = 0; t < tensors; t++) pieces += pieces_of(sizes[t]);
    float *sums = malloc((pieces + 1) * sizeof(float));
#pragma omp parallel num_threads(threads)
    for (long t = 0, before = 0; t < tensors; before += pieces_of(sizes[t++])) {
#pragma omp for nowait
        for (long i = 0; i < pieces_of(sizes[t]); i++) {
            const float *piece = x[t] + i * PIECE;
            sums[before + i] = dot(piece, piece, least(PIECE, sizes[t] - i * PIECE));
        }
    }
    double sum = 0;
    for (long i = 0; i < pieces; i++) sum += sums[i];
    free(sums);
    return sum;
}

/* A step of AdamW with `shrink` times the gradients. Each tensor has its own number of steps, from which its averages
   are known to be young. */
void adamw(float *const *x, const float *const *dx, float *const *mean, float *const *square, float *const *step,
           const long *sizes, long tensors, double shrink, double lr, double beta1, double beta2, double eps,
           double decay, int threads) {
    for (long t = 0; t < tensors; t++) *step[t] += 1;
#pragma omp parallel num_threads(threads)
    for (long t = 0; t < tensors; t++) {
        float forget1 = 1 - beta1, forget2 = 1 - beta2, keep = 1 - lr * decay, small = eps, by = shrink;
        float rate = lr / (1 - pow(beta1, *step[t])), grow = 1 / sqrt(1 - pow(beta2, *step[t]));
#pragma omp for nowait
        for (long first = 0; first < sizes[t]; first += PIECE) {
            float *restrict xt = x[t] + first, *restrict m = mean[t] + first, *restrict v = square[t] + first;
            const float *restrict d = dx[t] + first;
            for (long i = 0; i < least(PIECE, sizes[t] - first); i++) {
                float di = by * d[i];
                m[i] += forget1 * (di - m[i]);
                v[i] += forget2 * (di * di - v[i]);
                xt[i] = keep * xt[i] - rate * m[i] / (sqrtf(v[i]) * grow + small);
            }
        }
    }
}
