/* Template of PRODUCT(p): some rows of a product, summed in the order that linear.py defines.
 *
 * For every element of the result the products of one group along K are summed in increasing k, the sums
 * of the groups in increasing order. The lanes of a vector are different rows of the weight, so no sum
 * ever crosses lanes. Every product is exact in the format that it is computed in, so fused and separate
 * multiply-add give the same bits.
 *
 * How: a tile of weight rows is decoded, one block of K at a time, into a scratch laid out [k][row] that
 * stays in the first-level cache, and every row of x is multiplied with it from there, up to three at a
 * time in registers. Written with the vector types of GCC and Clang, and compiled once for each
 * instruction set by the files that include it.
 *
 * FP4 weights are summed in FP32 within a group of 32, which is exact unless the x values of the group
 * spread very far (`wide`, found when x was packed); then they are summed in binary64. All other weights
 * are summed in binary64 throughout.
 */

#include "_kernel.h"
#include <string.h>

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(type, a, b, ...) __builtin_shuffle(a, b, (type){__VA_ARGS__})
#endif

/* What some compilers make too much of: eight bytes with sign to FP32, four FP32 to binary64. */
#ifndef WIDEN_8
#define WIDEN_8(to, from)                                                                             \
    for (int n = 0; n < 8; n++)                                                                       \
    (to)[n] = (from)[n]
#define FOUR_F64(from) ((f64x4){(from)[0], (from)[1], (from)[2], (from)[3]})
#endif

#ifndef IN_REGISTER
#define IN_REGISTER(v) (void)0
#endif

typedef double f64x4 __attribute__((vector_size(32)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef int8_t i8x32 __attribute__((vector_size(32)));
typedef int16_t i16x16 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef int64_t i64x4 __attribute__((vector_size(32)));
typedef uint8_t u8x32 __attribute__((vector_size(32)));

INLINE f64x4 load(const double *from)
{
    f64x4 v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE f32x8 load4(const float *from)
{
    f32x8 v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE u8x32 load_pair(const void *low, const void *high)
{
    int64_t a[2], b[2];
    memcpy(a, low, sizeof a);
    memcpy(b, high, sizeof b);
    return (u8x32)(i64x4){a[0], a[1], b[0], b[1]};
}

INLINE void store4(float *to, f32x8 v) { memcpy(to, &v, sizeof v); }

INLINE void store(double *to, f64x4 v) { memcpy(to, &v, sizeof v); }

/* ---- decoding: a tile of rows, `count` columns from k0 -> w[count][tile] ------------------------ */

/* Rows beyond the last are computed as copies of the last one, and not stored. */
INLINE const void *row_at(const Product *p, ptrdiff_t row, ptrdiff_t row_bytes)
{
    return (const char *)p->codes + smaller(row, p->stop - 1) * row_bytes;
}

/* Rows row ... and columns k ... of the weight, decoded together. */
typedef struct {
    ptrdiff_t row, k;
} Tile;

/* The tile after t: the next one of the same columns or, where all of x stays in the second-level cache,
 * of the same rows, in the order in which the codes lie in memory. */
INLINE Tile after(const Product *p, Tile t, int rows)
{
    if (p->m * p->k <= ALONG) {
        t.k += BLOCK;
        return t.k < p->k ? t : (Tile){t.row + rows, 0};
    }
    t.row += rows;
    return t.row < p->stop ? t : (Tile){p->start, t.k + BLOCK};
}

INLINE int within(const Product *p, Tile t) { return t.row < p->stop && t.k < p->k; }

/* The codes of a tile, `bits` bits each, -> to[rows][width]; the processor is told of the next tile's.
 * Rows lie a power of two apart: read in place, piece by piece, they push each other out of the
 * first-level cache. */
INLINE void gather(const Product *p, Tile t, const int rows, const int bits, uint8_t *to)
{
    const int width = BLOCK * bits / 8;
    ptrdiff_t row_bytes = p->k * bits / 8, at = t.k * bits / 8;
    ptrdiff_t bytes = smaller(width, row_bytes - at);
    Tile next = after(p, t, rows);
    for (int r = 0; r < rows; r++) {
        const uint8_t *ahead = row_at(p, next.row + r, row_bytes);
        if (within(p, next))
            for (int i = 0; i < width; i += 64)
                __builtin_prefetch(ahead + next.k * bits / 8 + i);
        const uint8_t *from = row_at(p, t.row + r, row_bytes);
        if (bytes == width)
            memcpy(to + width * r, from + at, (size_t)width);
        else
            memcpy(to + width * r, from + at, (size_t)bytes);
    }
}

INLINE const double *fp8_table(const Product *p, ptrdiff_t row, ptrdiff_t k)
{
    ptrdiff_t at = smaller(row, p->stop - 1) / p->block * ceil_div(p->k, p->block) + k / p->block;
    return p->table + 256 * (ptrdiff_t)p->scale[at];
}

/* Interleave the first or the last elements of each half of a and b. */
#define LOW(a, b)                                                                                     \
    SHUFFLE(u8x32, a, b, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 16, 48, 17, 49, 18,  \
            50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55)
#define HIGH(a, b)                                                                                    \
    SHUFFLE(u8x32, a, b, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47, 24, 56, 25,    \
            57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63)
#define LOW16(a, b) SHUFFLE(i16x16, a, b, 0, 16, 1, 17, 2, 18, 3, 19, 8, 24, 9, 25, 10, 26, 11, 27)
#define HIGH16(a, b)                                                                                  \
    SHUFFLE(i16x16, a, b, 4, 20, 5, 21, 6, 22, 7, 23, 12, 28, 13, 29, 14, 30, 15, 31)
#define LOW32(a, b) SHUFFLE(i32x8, a, b, 0, 8, 1, 9, 4, 12, 5, 13)
#define HIGH32(a, b) SHUFFLE(i32x8, a, b, 2, 10, 3, 11, 6, 14, 7, 15)

/* Transpose the 16 x 16 bytes in the lower halves of v, and those in the upper halves. */
INLINE void transpose(u8x32 v[16])
{
    u8x32 t[16];
    for (int step = 0; step < 4; step++) {
        for (int i = 0; i < 8; i++) {
            t[2 * i] = LOW(v[i], v[i + 8]);
            t[2 * i + 1] = HIGH(v[i], v[i + 8]);
        }
        for (int i = 0; i < 16; i++)
            v[i] = t[i];
    }
}

/* Any codes and scales, by table: columns start ... stop of the block, which have one scale in each row,
 * -> w[column][16]. */
INLINE void look_up_fp8(const Product *p, ptrdiff_t row, ptrdiff_t k0, const uint8_t *code,
                        ptrdiff_t start, ptrdiff_t stop, double *w)
{
    for (int r = 0; r < TILE; r++) {
        const double *table = fp8_table(p, row + r, k0 + start);
        for (ptrdiff_t k = start; k < stop; k++)
            w[TILE * k + r] = table[code[BLOCK * r + k]];
    }
}

/* Whether any code is zero, subnormal or NaN: these are not a mere shift away from binary64. */
INLINE int any_special(const u8x32 v[16])
{
    u8x32 special = {0};
    for (int i = 0; i < 16; i++)
        special |= (u8x32)((v[i] & 0x7F) - 8 > 0x76);
    uint64_t word[4];
    memcpy(word, &special, sizeof word);
    return (word[0] | word[1] | word[2] | word[3]) != 0;
}

/* 16 normal codes of one column, in their place in the low or the high eight bytes of either half of
 * `code`, to binary64 of exponent + bias. Each interleaving with zeros from below doubles the width and
 * moves the code up; the sign is then at the top, exponent and mantissa are brought down to theirs. */
INLINE void widen_fp8(i16x16 code, int16_t bias, double *w)
{
    i16x16 none = {0};
    i16x16 h = ((code >> 7) & (int16_t)0x80FE) + bias;
    i16x16 low = LOW16(none, h), high = HIGH16(none, h);
    store(w, (f64x4)LOW32((i32x8)none, (i32x8)low));
    store(w + 4, (f64x4)HIGH32((i32x8)none, (i32x8)low));
    store(w + 8, (f64x4)LOW32((i32x8)none, (i32x8)high));
    store(w + 12, (f64x4)HIGH32((i32x8)none, (i32x8)high));
}

/* 32 columns of 16 rows of one common scale -> w[32][16]; 0 if the table must do it.
 *
 * Vector r holds 16 bytes of a row in each half; the rows are chosen such that after the transposition
 * and the interleavings of widen_fp8, which work on halves, four neighbours in a vector are four
 * neighbouring rows. */
INLINE int decode_normal_fp8(const uint8_t *code, int16_t bias, double *w)
{
    u8x32 v[16], none = {0};
    for (int r = 0; r < 16; r++) {
        int row = 4 * (r % 8 / 2) + r % 2;
        const uint8_t *column = code + r / 8 * 16;
        v[r] = load_pair(column + BLOCK * row, column + BLOCK * (row + 2));
    }
    if (any_special(v))
        return 0;
    transpose(v);
    for (int i = 0; i < 16; i++) {
        widen_fp8((i16x16)LOW(none, v[i]), bias, w + TILE * i);
        widen_fp8((i16x16)HIGH(none, v[i]), bias, w + TILE * (i + 16));
    }
    return 1;
}

/* Columns start ... stop of a block, which have one scale in each row. */
INLINE void decode_scaled_fp8(const Product *p, ptrdiff_t row, ptrdiff_t k0, const uint8_t *code,
                              ptrdiff_t start, ptrdiff_t stop, double *w)
{
    const double *table = fp8_table(p, row, k0 + start);
    ptrdiff_t scale = (table - p->table) / 256, k = start;
    /* 3 ... 246: where BF16(element * scale) is the product itself, so that any table agrees */
    if (scale >= 3 && scale <= 246 && fp8_table(p, row + TILE - 1, k0 + start) == table) {
        int16_t bias = (int16_t)((1023 - 7 + scale - 127) << 4);
        for (; k + 32 <= stop; k += 32)
            if (!decode_normal_fp8(code + k, bias, w + TILE * k))
                look_up_fp8(p, row, k0, code, k, k + 32, w);
    }
    look_up_fp8(p, row, k0, code, k, stop, w);
}

INLINE void decode_fp8(const Product *p, ptrdiff_t row, ptrdiff_t k0, ptrdiff_t count, double *w)
{
    _Alignas(64) uint8_t code[TILE * BLOCK];
    gather(p, (Tile){row, k0}, TILE, 8, code);
    for (ptrdiff_t k = 0; k < count; k += p->block)
        decode_scaled_fp8(p, row, k0, code, k, smaller(k + p->block, count), w);
}

INLINE void decode_bf16(const Product *p, ptrdiff_t row, ptrdiff_t k0, ptrdiff_t count, double *w)
{
    for (int r = 0; r < TILE; r += 4) {
        const uint16_t *a = (const uint16_t *)row_at(p, row + r, 2 * p->k) + k0;
        const uint16_t *b = (const uint16_t *)row_at(p, row + r + 1, 2 * p->k) + k0;
        const uint16_t *c = (const uint16_t *)row_at(p, row + r + 2, 2 * p->k) + k0;
        const uint16_t *d = (const uint16_t *)row_at(p, row + r + 3, 2 * p->k) + k0;
        for (ptrdiff_t k = 0; k < count; k++) {
            f64x4 v = {bf16_value(a[k]), bf16_value(b[k]), bf16_value(c[k]), bf16_value(d[k])};
            memcpy(w + TILE * k + r, &v, sizeof v);
        }
    }
}

/* A weight that lies in memory as [k][n]. */
INLINE void decode_bf16_by_k(const Product *p, ptrdiff_t row, ptrdiff_t k0, ptrdiff_t count, double *w)
{
    const uint16_t *from = (const uint16_t *)p->codes + k0 * p->n + row;
    ptrdiff_t rows = smaller(TILE, p->stop - row);
    for (ptrdiff_t k = 0; k < count; k++, from += p->n, w += TILE)
        if (rows == TILE)
            for (int r = 0; r < TILE; r++)
                w[r] = bf16_value(from[r]);
        else
            for (int r = 0; r < TILE; r++)
                w[r] = r < rows ? bf16_value(from[r]) : 0;
}

INLINE void decode_f32(const Product *p, ptrdiff_t row, ptrdiff_t k0, ptrdiff_t count, double *w)
{
    for (int r = 0; r < TILE; r++) {
        const float *a = (const float *)row_at(p, row + r, 4 * p->k) + k0;
        for (ptrdiff_t k = 0; k < count; k++)
            w[TILE * k + r] = a[k];
    }
}

/* Twice the value of 32 E2M1 codes, an integer. */
INLINE i8x32 twice_e2m1(u8x32 code)
{
#ifdef LOOK_UP_16
    static const int8_t twice[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    return (i8x32)LOOK_UP_16(twice, code);
#else
    i8x32 m = (i8x32)(code & 7);
    i8x32 above = m - 4;
    m += (above & (above > 0)) - ((m == 7) + (m == 7)); /* 0 1 2 3 4 6 8 12 */
    i8x32 sign = (i8x32)((code & 8) != 0);
    return (m ^ sign) - sign;
#endif
}

/* The same as FP32. */
INLINE void decode_nibbles(u8x32 code, float *w)
{
    i8x32 twice = twice_e2m1(code);
    int8_t value[32];
    memcpy(value, &twice, sizeof twice);
    for (int i = 0; i < 32; i += 8)
        WIDEN_8(w + i, value + i);
}

/* 16 bytes from each of 32 rows: one group of columns -> w[32][32]. */
INLINE void decode_group4(const uint8_t *code, float *w)
{
    u8x32 v[16];
    for (int r = 0; r < 16; r++)
        v[r] = load_pair(code + BLOCK / 2 * r, code + BLOCK / 2 * (r + 16));
    transpose(v);
    for (int i = 0; i < 16; i++) {
        decode_nibbles(v[i] & 15, w + 2 * TILE4 * i);
        decode_nibbles(v[i] >> 4, w + 2 * TILE4 * i + TILE4);
    }
}

/* One block of columns -> w[groups][32][32]; a shorter last group is filled with zeros. */
INLINE void decode_fp4(const Product *p, ptrdiff_t row, ptrdiff_t k0, ptrdiff_t count, float *w)
{
    _Alignas(64) uint8_t code[TILE4 * BLOCK / 2];
    if (count < BLOCK)
        memset(code, 0, sizeof code);
    gather(p, (Tile){row, k0}, TILE4, 4, code);
    for (ptrdiff_t k = 0; k < count; k += GROUP4)
        decode_group4(code + k / 2, w + TILE4 * k);
}

/* The scales of the same block -> scale[groups][32]: 2^(code - 127), NaN for code 255. */
INLINE void scale_fp4(const Product *p, ptrdiff_t row, ptrdiff_t k0, int groups, double *scale)
{
    ptrdiff_t columns = ceil_div(p->k, GROUP4);
    uint8_t code[GROUPS4][TILE4];
    for (int r = 0; r < TILE4; r++)
        for (int g = 0; g < groups; g++)
            code[g][r] = p->scale[smaller(row + r, p->stop - 1) * columns + k0 / GROUP4 + g];
    for (int g = 0; g < groups; g++)
        for (int r = 0; r < TILE4; r++) {
            uint64_t bits = code[g][r] == 255 ? 0x7FF8ull << 48 : (code[g][r] + 1023ull - 127) << 52;
            memcpy(scale + TILE4 * g + r, &bits, sizeof bits);
        }
}

/* ---- the binary64 kernel ------------------------------------------------------------------------ */

/* acc[rows][16] += the sum over count columns; x has rows of BLOCK values. */
INLINE void multiply(const double *x, const double *w, ptrdiff_t count, double *acc, const int rows)
{
    f64x4 s[3][4];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < 4; j++)
            s[i][j] = (f64x4){0};
    for (ptrdiff_t k = 0; k < count; k++)
        for (int j = 0; j < 4; j++) {
            f64x4 v = load(w + TILE * k + 4 * j);
            IN_REGISTER(v);
            for (int i = 0; i < rows; i++)
                s[i][j] += v * x[BLOCK * i + k];
        }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < 4; j++)
            store(acc + TILE * i + 4 * j, load(acc + TILE * i + 4 * j) + s[i][j]);
}

/* Functions of their own, so that nothing else competes for the registers. */
static NOINLINE void multiply_3(const double *x, const double *w, ptrdiff_t count, double *acc)
{
    multiply(x, w, count, acc, 3);
}

static NOINLINE void multiply_2(const double *x, const double *w, ptrdiff_t count, double *acc)
{
    multiply(x, w, count, acc, 2);
}

static NOINLINE void multiply_1(const double *x, const double *w, ptrdiff_t count, double *acc)
{
    multiply(x, w, count, acc, 1);
}

/* How many rows of x to take next: three where that leaves no single row, whose sums would wait. */
INLINE int next_rows(ptrdiff_t left) { return left == 1 ? 1 : left == 2 || left == 4 ? 2 : 3; }

static void multiply_all(const double *x, const double *w, ptrdiff_t m, ptrdiff_t count, double *acc)
{
    for (ptrdiff_t i = 0; i < m;) {
        int rows = next_rows(m - i);
        (rows == 3 ? multiply_3 : rows == 2 ? multiply_2 : multiply_1)(x, w, count, acc);
        i += rows;
        x += BLOCK * rows;
        acc += TILE * rows;
    }
}

INLINE void product_f64(const Product *p)
{
    _Alignas(64) double w[BLOCK * TILE];
    for (Tile t = {p->start, 0}; within(p, t); t = after(p, t, TILE)) {
        ptrdiff_t count = smaller(BLOCK, p->k - t.k);
        if (p->kind == FP8)
            decode_fp8(p, t.row, t.k, count, w);
        else if (p->kind == BF16)
            decode_bf16(p, t.row, t.k, count, w);
        else if (p->kind == BF16_BY_K)
            decode_bf16_by_k(p, t.row, t.k, count, w);
        else
            decode_f32(p, t.row, t.k, count, w);
        multiply_all((const double *)p->x + t.k * p->m, w, p->m, count,
                     p->acc + (t.row - p->start) * p->m);
    }
}

/* ---- the FP4 kernel ----------------------------------------------------------------------------- */

/* sum[rows][32] = the sums over one group, in FP32. */
INLINE void sum4(const float *x, const float *w, float *sum, const int rows)
{
    f32x8 s[3][4];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < 4; j++)
            s[i][j] = (f32x8){0};
    for (int k = 0; k < GROUP4; k++)
        for (int j = 0; j < 4; j++) {
            f32x8 v = load4(w + TILE4 * k + 8 * j);
            IN_REGISTER(v);
            for (int i = 0; i < rows; i++)
                s[i][j] += v * x[BLOCK * i + k];
        }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < 4; j++)
            store4(sum + TILE4 * i + 8 * j, s[i][j]);
}

static NOINLINE void sum4_3(const float *x, const float *w, float *sum) { sum4(x, w, sum, 3); }
static NOINLINE void sum4_2(const float *x, const float *w, float *sum) { sum4(x, w, sum, 2); }
static NOINLINE void sum4_1(const float *x, const float *w, float *sum) { sum4(x, w, sum, 1); }

/* acc[rows][32] += sum * scale * x_scale, of one group after the other: sum [groups][3][32], x_scale
 * [rows][GROUPS4]. */
static NOINLINE void add_scaled(double *restrict acc, const float *restrict sum,
                                const double *restrict scale, const double *restrict x_scale,
                                int groups, int rows)
{
    for (int i = 0; i < rows; i++, acc += TILE4, sum += TILE4) {
        f64x4 a[TILE4 / 4];
        for (int j = 0; j < TILE4 / 4; j++)
            a[j] = load(acc + 4 * j);
        for (int g = 0; g < groups; g++)
            for (int j = 0; j < TILE4 / 4; j++)
                a[j] += FOUR_F64(sum + 3 * TILE4 * g + 4 * j) *
                        (load(scale + TILE4 * g + 4 * j) * x_scale[GROUPS4 * i + g]);
        for (int j = 0; j < TILE4 / 4; j++)
            store(acc + 4 * j, a[j]);
    }
}

/* acc[rows][32] += (the sums over `groups` groups) * scale * x_scale. */
INLINE void multiply4(const float *x, const double *x_scale, const float *w, const double *scale,
                      int groups, double *acc, int rows)
{
    _Alignas(32) float sum[GROUPS4][3 * TILE4];
    for (int g = 0; g < groups; g++, x += GROUP4, w += GROUP4 * TILE4)
        (rows == 3 ? sum4_3 : rows == 2 ? sum4_2 : sum4_1)(x, w, sum[g]);
    add_scaled(acc, sum[0], scale, x_scale, groups, rows);
}

/* The same for one row of x, the sums in binary64. */
static NOINLINE void multiply4_wide(const float *restrict x, double x_scale, const float *restrict w,
                                    const double *restrict scale, double *restrict acc)
{
    double s[TILE4] = {0};
    for (int k = 0; k < GROUP4; k++)
        for (int j = 0; j < TILE4; j++)
            s[j] += (double)w[TILE4 * k + j] * x[k];
    for (int j = 0; j < TILE4; j++)
        acc[j] += s[j] * (scale[j] * x_scale);
}

/* The groups of one block for up to three rows of x. */
static void multiply4_block(const float *x, const double *x_scale, const uint8_t *wide, const float *w,
                            const double *scale, int groups, double *acc, int rows)
{
    int any = 0;
    for (int i = 0; i < rows; i++)
        any |= wide[i];
    if (!any) {
        multiply4(x, x_scale, w, scale, groups, acc, rows);
        return;
    }
    for (int g = 0; g < groups; g++, x += GROUP4, w += GROUP4 * TILE4, scale += TILE4)
        for (int i = 0; i < rows; i++)
            if (wide[i] >> g & 1)
                multiply4_wide(x + BLOCK * i, x_scale[GROUPS4 * i + g], w, scale, acc + TILE4 * i);
            else
                multiply4(x + BLOCK * i, x_scale + GROUPS4 * i + g, w, scale, 1, acc + TILE4 * i, 1);
}

static void multiply4_all(const float *x, const double *x_scale, const uint8_t *wide, const float *w,
                          const double *scale, int groups, ptrdiff_t m, double *acc)
{
    for (ptrdiff_t i = 0; i < m;) {
        int rows = next_rows(m - i);
        multiply4_block(x, x_scale + GROUPS4 * i, wide + i, w, scale, groups, acc, rows);
        i += rows;
        x += BLOCK * rows;
        acc += TILE4 * rows;
    }
}

INLINE void product_fp4(const Product *p)
{
    _Alignas(64) float w[BLOCK * TILE4];
    _Alignas(64) double scale[GROUPS4 * TILE4];
    for (Tile t = {p->start, 0}; within(p, t); t = after(p, t, TILE4)) {
        ptrdiff_t count = smaller(BLOCK, p->k - t.k), block = t.k / BLOCK;
        int groups = (int)ceil_div(count, GROUP4);
        decode_fp4(p, t.row, t.k, count, w);
        scale_fp4(p, t.row, t.k, groups, scale);
        multiply4_all((const float *)p->x + t.k * p->m, p->x_scale + GROUPS4 * block * p->m,
                      p->wide + block * p->m, w, scale, groups, p->m,
                      p->acc + (t.row - p->start) * p->m);
    }
}

/* ---- results ------------------------------------------------------------------------------------ */

/* To FP32, then to BF16, both to nearest even; every NaN is 0x7FC0. */
INLINE uint16_t to_bf16(double value)
{
    union {
        float value;
        uint32_t bits;
    } single = {(float)value};
    uint32_t rounded = (single.bits + 0x7FFF + (single.bits >> 16 & 1)) >> 16;
    return value != value ? 0x7FC0 : (uint16_t)rounded;
}

INLINE double one_nan(double value)
{
    union {
        uint64_t bits;
        double value;
    } quiet = {0x7FF8000000000000};
    return value != value ? quiet.value : value;
}

INLINE void round_and_store(const Product *p, const ptrdiff_t tile)
{
    for (ptrdiff_t row = p->start; row < p->stop; row += tile) {
        ptrdiff_t count = smaller(tile, p->stop - row);
        const double *acc = p->acc + (row - p->start) * p->m;
        for (ptrdiff_t i = 0; i < p->m; i++, acc += tile) {
            if (p->out_bf16) {
                uint16_t *out = (uint16_t *)p->out + i * p->n + row;
                for (ptrdiff_t j = 0; j < count; j++)
                    out[j] = to_bf16(acc[j]);
            } else {
                double *out = (double *)p->out + i * p->n + row;
                for (ptrdiff_t j = 0; j < count; j++)
                    out[j] = one_nan(acc[j]);
            }
        }
    }
}

void PRODUCT(const Product *p)
{
    ptrdiff_t tile = p->kind == FP4 ? TILE4 : TILE;
    ptrdiff_t rows = ceil_div(p->stop - p->start, tile) * tile;
    memset(p->acc, 0, (size_t)(rows * p->m) * sizeof *p->acc);
    if (p->kind == FP4)
        product_fp4(p);
    else
        product_f64(p);
    round_and_store(p, tile);
}
