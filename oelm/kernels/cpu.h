/* What the kernels share, and those that a block is made of; each is explained where it is written. */

#pragma once

#include <stdint.h>
#include <stdlib.h>

#define INLINE static inline __attribute__((always_inline))

INLINE long least(long a, long b) { return a < b ? a : b; }
INLINE long at_least(long n, long unit) { return (n + unit - 1) / unit * unit; }
INLINE float *room(long n) { return aligned_alloc(64, at_least(n * sizeof(float), 64)); }

enum { PIECE = 4096 /* numbers that a thread takes at a time */ };

int blas_multiplies(void);
void linear_backward(const float *dy, const float *x, const float *w, float *dx, int add_dx, float *dw, float *dbias,
                     int add, long N, long out, long in, int threads);
void column_sums(const float *d, const float *x, const float *moments, float *sums, int add, long rows, long n,
                 int threads);
void product(const float *a, const long *a_stride, const float *b, const long *b_stride, float *c, long c_row,
             const float *start, long start_row, long M, long N, long K, int threads);
void attention(const float *q, const float *k, const float *v, float *y, float *lse, long B, long H, long T,
               long E, const long (*stride)[3], long ahead, float scale, int causal, int threads);
void attention_backward(const float *q, const float *k, const float *v, const float *y, const float *lse,
                        const float *dy, float *dq, float *dk, float *dv, long B, long H, long T, long E,
                        const long (*stride)[3], long ahead, float scale, int causal, int threads);
void gelu(const float *x, float *y, float *slope, long n, int by_tanh, int threads);
void gelu_backward(const float *x, const float *dy, float *dx, float *y, long n, int by_tanh, int threads);
void normalise(const float *x, const float *w, const float *b, float eps, int rms, float *y, float *moments,
               long rows, long n, int threads);
void normalise_backward(const float *dy, const float *x, const float *moments, const float *w, int rms, float *dx,
                        float *dw, float *db, int add, long rows, long n, int threads);
