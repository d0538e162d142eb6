/* Tiles of a product, whose sums fill the registers, and the panels that they are computed from. */

#pragma once

#include "vectors.h"

/* A tile has two vectors in a row, and as many rows as there are registers for: of 16, or of 32 with AVX-512. */
#ifdef __AVX512F__
#define ROWS(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)
enum { TILE_ROWS = 8 };
#else
#define ROWS(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5)
enum { TILE_ROWS = 6 };
#endif

enum {
    TILE_COLUMNS = 2 * LANES,
    WIDE = LANES == 16, /* processors with such vectors have 1 MiB of L2 */
    LARGE_L2 = WIDE && L2_IS_LARGE, /* or 2 */
    DEPTH = WIDE ? 512 : 256, /* of the panels: numbers that a tile multiplies at a time */
    SQUARE = 8, /* numbers on a side of what is transposed at once */
};
typedef float octet __attribute__((vector_size(4 * SQUARE), aligned(4), may_alias));
typedef int32_t octet_order __attribute__((vector_size(4 * SQUARE)));

/* A tile of C = A[rows × n] B[n × columns], added to `start` if there is one. The sums stay in registers: hence no
   arrays. Meanwhile `calls` lines of memory from `soon` on, up to n / 4, are called into L2: not at once, for then what
   is multiplied would be waiting behind them. */
INLINE void calling_tile(const float *restrict a, long a_row, long a_k, const float *restrict b, long b_k, float *c,
                         long c_row, long n, const float *start, long start_row, const float *soon, long calls) {
#define BEGIN(i)                                                                                     \
    vec left##i = {0}, right##i = {0};                                                               \
    if (start) __builtin_prefetch(start + i * start_row);
#define ADD(i) left##i += a[i * a_row] * b_left, right##i += a[i * a_row] * b_right;
#define STEP                                                                                         \
    vec b_left = *(vec *)b, b_right = *(vec *)(b + LANES);                                           \
    ROWS(ADD)                                                                                        \
    a += a_k, b += b_k;
#define STORE(i)                                                                                     \
    if (start) left##i += *(vec *)(start + i * start_row);                                           \
    if (start) right##i += *(vec *)(start + i * start_row + LANES);                                  \
    *(vec *)(c + i * c_row) = left##i, *(vec *)(c + i * c_row + LANES) = right##i;
    ROWS(BEGIN)
    long k = 0;
    for (; k < 4 * calls; k += 4) {
        __builtin_prefetch(soon + k * LINE / 4, 0, 2);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) { STEP }
    }
#pragma GCC unroll 4
    for (; k < n; k++) { STEP }
    ROWS(STORE)
#undef BEGIN
#undef ADD
#undef STEP
#undef STORE
}

INLINE void tile(const float *a, long a_row, long a_k, const float *b, long b_k, float *c, long c_row, long n,
                 const float *start, long start_row) {
    calling_tile(a, a_row, a_k, b, b_k, c, c_row, n, start, start_row, NULL, 0);
}

/* The same with one vector in a row and twice the rows, for a matrix of so few columns, which would leave half of
   `tile` empty; `second` is from the first row of A to the one in its middle. Only the first `rows` and `columns` of C
   are there. */
INLINE void narrow_tile(const float *restrict a, long second, long a_row, long a_k, const float *restrict b, long b_k,
                        float *c, long c_row, long n, const float *start, long start_row, long rows, long columns) {
#define BEGIN_NARROW(i) vec upper##i = {0}, lower##i = {0};
#define ADD_NARROW(i) upper##i += a[i * a_row] * right, lower##i += a[second + i * a_row] * right;
#define STORE_NARROW(i)                                                                              \
    if (start && i < rows) upper##i += load(start + i * start_row, columns);                         \
    if (start && TILE_ROWS + i < rows) lower##i += load(start + (TILE_ROWS + i) * start_row, columns); \
    if (i < rows) store(upper##i, c + i * c_row, columns);                                           \
    if (TILE_ROWS + i < rows) store(lower##i, c + (TILE_ROWS + i) * c_row, columns);
    ROWS(BEGIN_NARROW)
#pragma GCC unroll 4
    for (long k = 0; k < n; k++, a += a_k, b += b_k) {
        vec right = load(b, columns);
        ROWS(ADD_NARROW)
    }
    ROWS(STORE_NARROW)
}

/* y[k][i] = x[i][k], 8 × 8. The stores go up: one may run over into the next. */
INLINE void transpose(const float *x, long x_row, float *y, long y_row) {
    octet u[SQUARE], v[SQUARE];
#pragma GCC unroll 8
    for (int i = 0; i < SQUARE; i += 2) {
        octet even = *(octet *)(x + i * x_row), odd = *(octet *)(x + (i + 1) * x_row);
        u[i] = SHUFFLE(octet_order, even, odd, 0, 8, 1, 9, 4, 12, 5, 13);
        u[i + 1] = SHUFFLE(octet_order, even, odd, 2, 10, 3, 11, 6, 14, 7, 15);
    }
#pragma GCC unroll 8
    for (int i = 0; i < SQUARE; i += 4)
#pragma GCC unroll 8
        for (int j = i; j < i + 2; j++) {
            v[i + 2 * (j - i)] = SHUFFLE(octet_order, u[j], u[j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            v[i + 2 * (j - i) + 1] = SHUFFLE(octet_order, u[j], u[j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
#pragma GCC unroll 8
    for (int i = 0; i < SQUARE / 2; i++)
        *(octet *)(y + i * y_row) = SHUFFLE(octet_order, v[i], v[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
#pragma GCC unroll 8
    for (int i = 0; i < SQUARE / 2; i++)
        *(octet *)(y + (i + 4) * y_row) = SHUFFLE(octet_order, v[i], v[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
}

/* n numbers, a multiple of 16. For so few, memcpy takes its time, and of one vector after the other the compiler
   makes just that. */
INLINE void copy(const float *restrict x, float *restrict y, long n) {
    for (long i = 0; i < n; i += 2 * SQUARE) {
        octet left = *(octet *)(x + i), right = *(octet *)(x + i + SQUARE);
        *(octet *)(y + i) = left, *(octet *)(y + i + SQUARE) = right;
    }
}

/* The columns of b, in panels as wide as a tile [n × columns]; zeros where there is no column. */
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
            for (; k + SQUARE <= n; k += SQUARE)
                for (long i = 0; i < TILE_COLUMNS; i += SQUARE)
                    transpose(x + i * b_column + k, b_column, panel + k * TILE_COLUMNS + i, TILE_COLUMNS);
        for (; k < n; k++)
            for (long i = 0; i < TILE_COLUMNS; i++)
                panel[k * TILE_COLUMNS + i] = j + i < columns ? x[i * b_column + k * b_k] : 0;
    }
}

/* `tile` where fewer rows or columns are left. */
static void edge_tile(const float *a, long a_row, long a_k, const float *b, long b_k, float *c, long c_row, long n,
                      const float *start, long start_row, long rows, long columns) {
    float edge[TILE_ROWS * TILE_COLUMNS] = {0};
    for (long r = 0; start && r < rows; r++)
        memcpy(edge + r * TILE_COLUMNS, start + r * start_row, columns * sizeof(float));
    tile(a, a_row, a_k, b, b_k, edge, TILE_COLUMNS, n, edge, TILE_COLUMNS);
    for (long r = 0; r < rows; r++) memcpy(c + r * c_row, edge + r * TILE_COLUMNS, columns * sizeof(float));
}
