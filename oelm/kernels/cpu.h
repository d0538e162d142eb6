/* What the kernels share, and those that a block is made of; each is explained where it is written. */

#pragma once

#include <stdint.h>
#include <stdlib.h>

#define INLINE static inline __attribute__((always_inline))

INLINE long least(long a, long b) { return a < b ? a : b; }
INLINE long at_least(long n, long unit) { return (n + unit - 1) / unit * unit; }
INLINE float *room(long n) { return aligned_alloc(64, at_least(n * sizeof(float), 64)); }

enum { LINE = 16 /* numbers in a line of memory */ };

/* What is to be done from `first` up to `last` of n, for every thread's part, a multiple of `unit`. If one part is all,
   OpenMP is not called: it would make a team, of one thread if need be, which takes more than half a microsecond. */
#define IN_PARTS(n, unit, threads, ...)                                                              \
    {                                                                                                \
        long n_ = n, team_ = threads, part_ = at_least((n_ + team_ - 1) / team_, unit);              \
        if (part_ >= n_) {                                                                           \
            long first = 0, last = n_;                                                               \
            __VA_ARGS__;                                                                             \
        } else                                                                                       \
            _Pragma("omp parallel for num_threads(team_)") for (long first = 0; first < n_; first += part_) { \
                long last = least(n_, first + part_);                                                \
                __VA_ARGS__;                                                                         \
            }                                                                                        \
    }

/* Numbers that are read soon; of several the last has none. */
typedef struct { const float *x; long n; } upcoming;

int blas_multiplies(void);
void linear_backward(const float *dy, const float *x, const float *w, float *dx, int add_dx, float *dw, float *dbias,
                     int add, long N, long out, long in, int threads);
void product(const float *a, const long *a_stride, const float *b, const long *b_stride, float *c, long c_row,
             const float *start, long start_row, long M, long N, long K, int threads);
void product_by_panels(const float *a, long a_row, const float *panels, float *c, long c_row, const float *start,
                       long start_row, long M, long N, long K, const upcoming *soon);
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
