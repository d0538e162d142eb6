/* Tiles of a product, whose sums fill the registers, and the panels that they are computed from. */

#pragma once

#include "vectors.h"

enum {
    TILE_ROWS = 6, TILE_COLUMNS = 16, /* as many sums as fit into 16 vector registers */
    DEPTH = 256, /* of the panels: numbers that a tile multiplies at a time */
};

/* C[6 × 16] = A[6 × n] B[n × 16], added to `start` if there is one. The sums stay in registers: hence no
   arrays. */
INLINE void tile(const float *restrict a, long a_row, long a_k, const float *restrict b, long b_k, float *c,
                 long c_row, long n, const float *start, long start_row) {
#define ROWS(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5)
#define BEGIN(i)                                                                                     \
    vec left##i = {0}, right##i = {0};                                                               \
    if (start) __builtin_prefetch(start + i * start_row);
#define ADD(i) left##i += a[i * a_row] * b_left, right##i += a[i * a_row] * b_right;
#define STORE(i)                                                                                     \
    if (start) left##i += *(vec *)(start + i * start_row);                                           \
    if (start) right##i += *(vec *)(start + i * start_row + LANES);                                  \
    *(vec *)(c + i * c_row) = left##i, *(vec *)(c + i * c_row + LANES) = right##i;
    ROWS(BEGIN)
#pragma GCC unroll 4
    for (long k = 0; k < n; k++, a += a_k, b += b_k) {
        vec b_left = *(vec *)b, b_right = *(vec *)(b + LANES);
        ROWS(ADD)
    }
    ROWS(STORE)
}

/* C[12 × 8] = A[12 × n] B[n × 8] likewise, for a matrix of eight columns, which would leave half of `tile` empty;
   `second` is from row 0 of A to row 6. Only the first `rows` of C are there. */
INLINE void narrow_tile(const float *restrict a, long second, long a_row, long a_k, const float *restrict b, long b_k,
                        float *c, long c_row, long n, const float *start, long start_row, long rows) {
#define BEGIN_NARROW(i) vec upper##i = {0}, lower##i = {0};
#define ADD_NARROW(i) upper##i += a[i * a_row] * right, lower##i += a[second + i * a_row] * right;
#define STORE_NARROW(i)                                                                              \
    if (start && i < rows) upper##i += *(vec *)(start + i * start_row);                              \
    if (start && TILE_ROWS + i < rows) lower##i += *(vec *)(start + (TILE_ROWS + i) * start_row);    \
    if (i < rows) *(vec *)(c + i * c_row) = upper##i;                                                \
    if (TILE_ROWS + i < rows) *(vec *)(c + (TILE_ROWS + i) * c_row) = lower##i;
    ROWS(BEGIN_NARROW)
#pragma GCC unroll 4
    for (long k = 0; k < n; k++, a += a_k, b += b_k) {
        vec right = *(vec *)b;
        ROWS(ADD_NARROW)
    }
    ROWS(STORE_NARROW)
}

/* y[k][i] = x[i][k], 8 × 8. The stores go up: one may run over into the next. */
INLINE void transpose(const float *x, long x_row, float *y, long y_row) {
    vec u[LANES], v[LANES];
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i += 2) {
        vec even = *(vec *)(x + i * x_row), odd = *(vec *)(x + (i + 1) * x_row);
        u[i] = SHUFFLE(even, odd, 0, 8, 1, 9, 4, 12, 5, 13);
        u[i + 1] = SHUFFLE(even, odd, 2, 10, 3, 11, 6, 14, 7, 15);
    }
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i += 4)
#pragma GCC unroll 8
        for (int j = i; j < i + 2; j++) {
            v[i + 2 * (j - i)] = SHUFFLE(u[j], u[j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            v[i + 2 * (j - i) + 1] = SHUFFLE(u[j], u[j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
#pragma GCC unroll 8
    for (int i = 0; i < LANES / 2; i++) *(vec *)(y + i * y_row) = SHUFFLE(v[i], v[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
#pragma GCC unroll 8
    for (int i = 0; i < LANES / 2; i++)
        *(vec *)(y + (i + 4) * y_row) = SHUFFLE(v[i], v[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
}

/* n numbers, a multiple of 16. For so few, memcpy takes its time, and of one vector after the other the compiler
   makes just that. */
INLINE void copy(const float *restrict x, float *restrict y, long n) {
    for (long i = 0; i < n; i += 2 * LANES) {
        vec left = *(vec *)(x + i), right = *(vec *)(x + i + LANES);
        *(vec *)(y + i) = left, *(vec *)(y + i + LANES) = right;
    }
}

/* The columns of b, sixteen by sixteen as panels [n × 16]; zeros where there is no column. */
static void column_panels(const float *b, long b_k, long b_column, float *panels, long columns, long n) {
    long j = 0;
    if (b_column == 1) /* four panels at once: memory likes to be read on and on */
        for (long whole = columns / TILE_COLUMNS * TILE_COLUMNS, to; j < whole; j = to) {
            to = least(j + 4 * TILE_COLUMNS, whole);
            for (long k = 0; k < n; k++)
                for (long i = j; i < to; i += TILE_COLUMNS)
                    copy(b + k * b_k + i, panels + i * n + k * TILE_COLUMNS, TILE_COLUMNS);
        }
    for (; j < columns; j += TILE_COLUMNS) {
        const float *x = b + j * b_column;
        float *panel = panels + j * n;
        long k = 0;
        if (b_k == 1 && j + TILE_COLUMNS <= columns)
            for (; k + LANES <= n; k += LANES)
                for (long i = 0; i < TILE_COLUMNS; i += LANES)
                    transpose(x + i * b_column + k, b_column, panel + k * TILE_COLUMNS + i, TILE_COLUMNS);
        for (; k < n; k++)
            for (long i = 0; i < TILE_COLUMNS; i++)
                panel[k * TILE_COLUMNS + i] = j + i < columns ? x[i * b_column + k * b_k] : 0;
    }
}

/* `tile` where fewer rows or columns are left. */
static void edge_tile(const float *a, long a_row, long a_k, const float *b, float *c, long c_row, long n,
                      const float *start, long start_row, long rows, long columns) {
    float edge[TILE_ROWS * TILE_COLUMNS] = {0};
    for (long r = 0; start && r < rows; r++)
        memcpy(edge + r * TILE_COLUMNS, start + r * start_row, columns * sizeof(float));
    tile(a, a_row, a_k, b, TILE_COLUMNS, edge, TILE_COLUMNS, n, edge, TILE_COLUMNS);
    for (long r = 0; r < rows; r++) memcpy(c + r * c_row, edge + r * TILE_COLUMNS, columns * sizeof(float));
}
