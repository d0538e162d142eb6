/* Numbers as many at a time as a vector holds: loads and stores, sums, exponentials, and what is made of them. */

#pragma once

#include "cpu.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#include <immintrin.h>
enum { LANES = 16 /* numbers in a vector */, PARTS = 1 /* whether a part of one is read as quickly */ };
#else
enum { LANES = 8, PARTS = 0 };
#endif
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t order __attribute__((vector_size(4 * LANES)));

#ifdef __clang__
#define SHUFFLE(of, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(of, a, b, ...) __builtin_shuffle(a, b, (of){__VA_ARGS__})
#endif

INLINE vec bits(order x) { return (vec)x; }
INLINE vec every(float x) { return x - (vec){0}; }

#ifdef __AVX512F__

INLINE __mmask16 mask(long n) { return n >= LANES ? 0xffff : n > 0 ? (1 << n) - 1 : 0; }
/* The first n numbers of x, up to a vector of them. */
INLINE vec load(const float *x, long n) { return (vec)_mm512_maskz_loadu_ps(mask(n), x); }
INLINE void store(vec v, float *y, long n) { _mm512_mask_storeu_ps(y, mask(n), (__m512)v); }
/* a where it is larger than b, else b, and so also where either is no number. */
INLINE vec larger(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
/* The first n of x, all or none of them perhaps, and `rest` for the others. */
INLINE vec first_of(vec x, long n, float rest) {
    return (vec)_mm512_mask_mov_ps((__m512)every(rest), mask(n), (__m512)x);
}

/* a where x is negative, else b. */
INLINE vec by_sign(vec x, vec a, vec b) {
    return (vec)_mm512_mask_mov_ps((__m512)b, _mm512_cmp_ps_mask((__m512)x, _mm512_setzero_ps(), _CMP_LT_OQ), (__m512)a);
}

#define HALVES(x, DO) x = DO(x, SHUFFLE(order, x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7))
#define IN_EIGHTS(a, b, c, d, e, f, g, h) a, b, c, d, e, f, g, h, 8 + a, 8 + b, 8 + c, 8 + d, 8 + e, 8 + f, 8 + g, 8 + h

#else

INLINE vec load(const float *x, long n) {
    if (n >= LANES) return *(vec *)x;
    vec v = {0};
    memcpy(&v, x, n * sizeof(float));
    return v;
}

INLINE void store(vec v, float *y, long n) {
    if (n >= LANES) *(vec *)y = v;
    else memcpy(y, &v, n * sizeof(float));
}

/* Compilers make six instructions of that, if they are left to it. */
INLINE vec larger(vec a, vec b) {
#ifdef __AVX__
    return __builtin_ia32_maxps256(a, b);
#else
    for (int i = 0; i < LANES; i++) a[i] = a[i] > b[i] ? a[i] : b[i];
    return a;
#endif
}

INLINE vec first_of(vec x, long n, float rest) {
    order in = (order){0, 1, 2, 3, 4, 5, 6, 7} < (int32_t)n;
    return bits((in & (order)x) | (~in & (order)every(rest)));
}

INLINE vec by_sign(vec x, vec a, vec b) {
    order negative = x < 0;
    return bits((negative & (order)a) | (~negative & (order)b));
}

#define HALVES(x, DO) x
#define IN_EIGHTS(...) __VA_ARGS__

#endif

/* 2^k · exp(f) with |f| ≤ ln 2 / 2, to about 1e-7 of the value, far below 0 to 3e-7; below -87 it stays at exp(-87),
   and x must not be above 88. */
INLINE vec exponential(vec x) {
    x = larger(every(-87.0f), x);
    const float large = 12583039.0f; /* 3 · 2^22 + 127: the last bits of a sum with it are k + 127, an exponent */
    vec sum = x * 1.44269504f + large, f = x - (sum - large) * 0.693147181f;
    vec f2 = f * f, p = 0.0416683908f + 0.00836874521f * f + 0.00138145401f * f2; /* by pairs: in a row takes longer */
    p = p * f2 + (0.499999934f + 0.166665204f * f);
    return (p * f2 + (1 + f)) * bits((order)sum << 23);
}

/* In every lane, the sum or the largest of all. */
#define ACROSS(x, DO)                                                                                \
    HALVES(x, DO), x = DO(x, SHUFFLE(order, x, x, IN_EIGHTS(4, 5, 6, 7, 0, 1, 2, 3))),               \
    x = DO(x, SHUFFLE(order, x, x, IN_EIGHTS(2, 3, 0, 1, 6, 7, 4, 5))),                              \
    x = DO(x, SHUFFLE(order, x, x, IN_EIGHTS(1, 0, 3, 2, 5, 4, 7, 6)))
INLINE vec plus(vec a, vec b) { return a + b; }
INLINE vec sum_across(vec x) { return ACROSS(x, plus); }
INLINE vec largest_across(vec x) { return ACROSS(x, larger); }

INLINE float sum_of(vec x) { return sum_across(x)[0]; }

/* NaN does not count. */
INLINE float largest_of(const float *x, long n) {
    vec each[4] = {every(-INFINITY), every(-INFINITY), every(-INFINITY), every(-INFINITY)}; /* one waits for itself */
    float found = -INFINITY;
    long j = 0;
    for (; j + 4 * LANES <= n; j += 4 * LANES)
        for (int i = 0; i < 4; i++) each[i] = larger(*(vec *)(x + j + i * LANES), each[i]);
    for (; j < n; j++) found = x[j] > found ? x[j] : found;
    vec largest = largest_across(larger(larger(each[0], each[1]), larger(each[2], each[3])));
    return largest[0] > found ? largest[0] : found;
}

/* x becomes exp(x - largest), of which this is the sum. */
INLINE float exponentials_of_row(float *x, long n, float largest) {
    vec sums = {0};
    long j = 0;
    for (; j + LANES <= n; j += LANES) sums += *(vec *)(x + j) = exponential(*(vec *)(x + j) - largest);
    float sum = sum_of(sums);
    if (j < n) {
        vec last = exponential(load(x + j, n - j) - largest);
        store(last, x + j, n - j);
        for (long i = 0; i < n - j; i++) sum += last[i];
    }
    return sum;
}

/* The sum of x y. */
INLINE float dot(const float *x, const float *y, long n) {
    vec sums = {0};
    long k = 0;
    for (; k + LANES <= n; k += LANES) sums += *(vec *)(x + k) * *(vec *)(y + k);
    float sum = sum_of(sums);
    for (; k < n; k++) sum += x[k] * y[k];
    return sum;
}

/* DO with every k of n at which a vector begins, and with how many numbers of it there are. */
#define IN_VECTORS(n, DO)                                                                            \
    {                                                                                                \
        long k = 0;                                                                                  \
        for (; k + LANES <= n; k += LANES) DO(LANES)                                                 \
        if (k < n) DO(n - k)                                                                         \
    }

enum { SIDE_BY_SIDE = 4 /* rows: one alone would be waiting for its own sums */ };
#define EACH(rows) _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++)
/* DO with every row from which on some are taken, up to the last, and with how many of them. */
#define IN_ROWS(first, last, DO)                                                                     \
    {                                                                                                \
        long row = first;                                                                            \
        for (; row + SIDE_BY_SIDE <= last; row += SIDE_BY_SIDE) DO(SIDE_BY_SIDE)                     \
        for (; row < last; row++) DO(1)                                                              \
    }

/* `weighted` and `shifted` are whether there are w and b: no branch may keep a product apart from the sum that it could
   be rounded with, or the bits would depend on how many rows there are. */
INLINE void normalise_so(const float *x, const float *w, int weighted, const float *b, int shifted, float eps, int rms,
                         float *y, float *moments, int rows, long n) {
    vec sums[SIDE_BY_SIDE] = {{0}}, mean[SIDE_BY_SIDE] = {{0}}, shrink[SIDE_BY_SIDE];
    float share = 1.0f / n;
#define SUM(some) EACH(rows) mean[r] += load(x + r * n + k, some);
    if (!rms) IN_VECTORS(n, SUM)
    EACH(rows) mean[r] = every(sum_of(mean[r]) * share);
#define SUM_OF_SQUARES(some)                                                                         \
    EACH(rows) {                                                                                     \
        vec v = first_of(load(x + r * n + k, some) - mean[r], some, 0);                              \
        sums[r] += v * v;                                                                            \
    }
    IN_VECTORS(n, SUM_OF_SQUARES)
    EACH(rows) {
        shrink[r] = every(1 / sqrtf(sum_of(sums[r]) * share + eps));
        if (moments) moments[2 * r] = mean[r][0], moments[2 * r + 1] = shrink[r][0];
    }
#define NORMALISE(some)                                                                              \
    EACH(rows) {                                                                                     \
        vec v = (load(x + r * n + k, some) - mean[r]) * shrink[r];                                   \
        if (weighted) v *= load(w + k, some);                                                        \
        if (shifted) v += load(b + k, some);                                                         \
        store(v, y + r * n + k, some);                                                               \
    }
    IN_VECTORS(n, NORMALISE)
#undef SUM
#undef SUM_OF_SQUARES
#undef NORMALISE
}

/* Up to SIDE_BY_SIDE rows of x brought to variance 1, and to mean 0 unless `rms`, times w, plus b; either may be absent. */
INLINE void normalise_rows(const float *x, const float *w, const float *b, float eps, int rms, float *y,
                           float *moments, int rows, long n) {
    if (w && b) normalise_so(x, w, 1, b, 1, eps, rms, y, moments, rows, n);
    else if (w) normalise_so(x, w, 1, b, 0, eps, rms, y, moments, rows, n);
    else if (b) normalise_so(x, w, 0, b, 1, eps, rms, y, moments, rows, n);
    else normalise_so(x, w, 0, b, 0, eps, rms, y, moments, rows, n);
}

/* ---- GELU: x p, where p is the normal distribution's mass below x, or nearly so by tanh -------------- */

/* The mass (1 + tanh u) / 2 = 1 / (1 + exp(-2u)). */
INLINE vec activated_by_tanh(vec x, vec *slope) {
    vec u = 1.59576912f * x * (1 + 0.044715f * x * x), p = 1 / (1 + exponential(-larger(every(-87.0f), u)));
    *slope = p + x * p * (1 - p) * (1.59576912f + 0.214064488f * x * x);
    return x * p;
}

/* The mass beyond |x| by a polynomial of t = 1 / (1 + |x| / √8) times exp(-x²/2), fitted to 4e-8 of it. Mass and slope on
   the other side of 0 are 1 minus those here. Infinity becomes NaN, as torch's own vectors have it. */
INLINE vec activated_exactly(vec x, vec *slope) {
    vec size = bits((order)x & 0x7fffffff), t = 1 / (1 + 0.353553391f * size);
    vec t2 = t * t, t4 = t2 * t2, p = (-0.2422297f + 0.141629368f * t) + -0.0294002444f * t2;
    p = p * t4 + (-0.0122180907f + 0.137456f * t) * t2;
    p = (p + (0.121671125f + 0.100876287f * t)) * t2 + (0.14104417f + 0.141171068f * t);
    vec bell = exponential(-0.5f * x * x), beyond = p * (t * bell);
    vec below = beyond - 0.398942280f * (size * bell); /* the slope at -|x| */
    *slope = by_sign(x, below, 1 - below);
    return larger(x, every(0)) - size * beyond;
}

/* x p, and its derivative. */
INLINE vec activated_with_slope(vec x, int by_tanh, vec *slope) {
    return by_tanh ? activated_by_tanh(x, slope) : activated_exactly(x, slope);
}

INLINE vec activated(vec x, int by_tanh) {
    vec slope;
    return activated_with_slope(x, by_tanh, &slope);
}
