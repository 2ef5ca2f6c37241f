/* The quantised products straight from their packed bytes, on a CPU.
 *
 * What it follows: the order of accumulation that linear.py defines. For every output element the
 * products of one group along K are summed in increasing k, the group sums in increasing group order;
 * the lanes of a vector are different rows of the weight, so no sum ever crosses lanes. Every product
 * is exact in the format that it is computed in, so fused and separate multiply-add give the same bits.
 *
 * How: a tile of weight rows is decoded, one block of K at a time, into a scratch laid out [k][row] that
 * stays in the cache, and every row of x is multiplied with it from there. Plain C with the vector types
 * of GCC and Clang: the same source is AVX2 and FMA on x86-64 (chosen when it runs) and NEON on ARM.
 *
 * Two kernels. FP4 weights (tile of 32 rows) are summed in FP32 within a group of 32, which is exact unless
 * the x values of the group spread very far: pack_fp4_x finds those groups, and they are summed in
 * binary64. All other weights (tile of 16 rows) are summed in binary64 throughout.
 *
 * The functions take addresses and sizes that linear.py has checked; they hold no state and run without
 * the interpreter lock. Left out: checking, threads, FP32 accumulation.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi" /* wide vectors pass between inlined functions only */
#endif

#if defined(__clang__) || (defined(__GNUC__) && __GNUC__ >= 12)
#define SHUFFLE32(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE32(a, b, ...) __builtin_shuffle(a, b, (u8x32){__VA_ARGS__})
#endif

typedef double f64x4 __attribute__((vector_size(32)));
typedef float f32x4 __attribute__((vector_size(16)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef int8_t i8x32 __attribute__((vector_size(32)));
typedef uint8_t u8x32 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));

enum {
    KB = 512,    /* columns of K that are decoded at a time: a multiple of both groups */
    GROUP = 128, /* summed on their own before they join the accumulator */
    GROUP4 = 32, /* the same for FP4 weights: the columns of one scale */
    TILE = 16,   /* weight rows of a tile of the binary64 kernel */
    TILE4 = 32,  /* the same of the FP4 kernel */
};

enum kind { FP4, FP8, BF16, F32 }; /* _c_product.py knows these numbers */

typedef struct {
    int kind;
    ptrdiff_t m, n, k;
    const void *x;         /* [ceil(k / KB)][m][KB] as pack_* left it: FP32 for FP4 weights, else binary64 */
    const double *x_scale; /* FP4: [ceil(k / GROUP)][m], half the scale of x */
    const uint8_t *wide;   /* FP4: [ceil(k / GROUP4)][m], which sums need binary64 */
    const void *codes;     /* [n][k], FP4 [n][k / 2] */
    const uint8_t *scale;  /* FP4 [n][ceil(k / 32)], FP8 [ceil(n / 128)][ceil(k / 128)] */
    const double *table;   /* FP4 [scale], FP8 [scale][code] */
    ptrdiff_t start, stop; /* the rows of the weight to do */
    double *acc;           /* room for [tiles of start ... stop][m][tile] */
    void *out;             /* [m][n], BF16 or binary64 */
    int out_bf16;
} Product;

INLINE ptrdiff_t min(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }
INLINE ptrdiff_t ceil_div(ptrdiff_t a, ptrdiff_t b) { return (a + b - 1) / b; }
INLINE f64x4 splat(double v) { return (f64x4){v, v, v, v}; }
INLINE f32x8 splat4(float v) { return (f32x8){v, v, v, v, v, v, v, v}; }

/* ---- decoding: a tile of 16 rows, count columns from k0 -> w[count][16] -------------------------- */

/* Rows beyond the last are computed as copies of the last one, and not stored. */
INLINE const void *row_at(const Product *p, ptrdiff_t row, ptrdiff_t row_bytes)
{
    return (const char *)p->codes + min(row, p->n - 1) * row_bytes;
}

INLINE const double *fp8_table(const Product *p, ptrdiff_t row, ptrdiff_t k)
{
    uint8_t scale = p->scale[min(row, p->n - 1) / 128 * ceil_div(p->k, 128) + k / 128];
    return p->table + 256 * (ptrdiff_t)scale;
}

INLINE void decode_fp8(const Product *p, ptrdiff_t row, ptrdiff_t k0, ptrdiff_t count, double *w)
{
    for (ptrdiff_t done = 0; done < count; done += 128)
        for (int r = 0; r < TILE; r += 4) {
            const uint8_t *code[4];
            const double *table[4];
            for (int i = 0; i < 4; i++) {
                code[i] = (const uint8_t *)row_at(p, row + r + i, p->k) + k0;
                table[i] = fp8_table(p, row + r + i, k0 + done);
            }
            for (ptrdiff_t k = done; k < min(count, done + 128); k++) {
                f64x4 v = {table[0][code[0][k]], table[1][code[1][k]], table[2][code[2][k]],
                           table[3][code[3][k]]};
                memcpy(w + TILE * k + r, &v, sizeof v);
            }
        }
}

INLINE double bf16_value(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

INLINE void decode_bf16(const Product *p, ptrdiff_t row, ptrdiff_t k0, ptrdiff_t count, double *w)
{
    for (int r = 0; r < TILE; r += 4) {
        const uint16_t *bits[4];
        for (int i = 0; i < 4; i++)
            bits[i] = (const uint16_t *)row_at(p, row + r + i, 2 * p->k) + k0;
        for (ptrdiff_t k = 0; k < count; k++) {
            f64x4 v = {bf16_value(bits[0][k]), bf16_value(bits[1][k]), bf16_value(bits[2][k]),
                       bf16_value(bits[3][k])};
            memcpy(w + TILE * k + r, &v, sizeof v);
        }
    }
}

INLINE void decode_f32(const Product *p, ptrdiff_t row, ptrdiff_t k0, ptrdiff_t count, double *w)
{
    for (int r = 0; r < TILE; r++) {
        const float *a = (const float *)row_at(p, row + r, 4 * p->k) + k0;
        for (ptrdiff_t k = 0; k < count; k++)
            w[TILE * k + r] = a[k];
    }
}

/* ---- the binary64 kernel ---------------------------------------------------------------------- */

/* acc[rows][16] += the sum over count columns; x has rows of KB values. */
INLINE void multiply(const double *x, const double *w, ptrdiff_t count, double *acc, const int rows)
{
    f64x4 s[3][4] = {{{0}}};
    for (ptrdiff_t k = 0; k < count; k++) {
        f64x4 factor[3] = {{0}};
        for (int i = 0; i < rows; i++)
            factor[i] = splat(x[KB * i + k]);
        for (int j = 0; j < 4; j++) {
            f64x4 v;
            memcpy(&v, w + TILE * k + 4 * j, sizeof v);
            for (int i = 0; i < rows; i++)
                s[i][j] += v * factor[i];
        }
    }
    for (int i = 0; i < rows; i++) {
        f64x4 a[4];
        memcpy(a, acc + TILE * i, sizeof a);
        for (int j = 0; j < 4; j++)
            a[j] += s[i][j];
        memcpy(acc + TILE * i, a, sizeof a);
    }
}

/* One decoded block of K times all rows of x; x is [m][KB], acc [m][16]. */
INLINE void multiply_all(const double *x, const double *w, ptrdiff_t m, ptrdiff_t count, double *acc)
{
    for (ptrdiff_t i = 0; i < m;) {
        ptrdiff_t left = m - i;
        int rows = left == 1 ? 1 : left == 2 || left == 4 ? 2 : 3;
        for (ptrdiff_t k = 0; k < count; k += GROUP) {
            ptrdiff_t group = min(GROUP, count - k);
            const double *xk = x + KB * i + k, *wk = w + TILE * k;
            if (rows == 3)
                multiply(xk, wk, group, acc + TILE * i, 3);
            else if (rows == 2)
                multiply(xk, wk, group, acc + TILE * i, 2);
            else
                multiply(xk, wk, group, acc + TILE * i, 1);
        }
        i += rows;
    }
}

INLINE void product_f64(const Product *p)
{
    _Alignas(64) double w[KB * TILE];
    for (ptrdiff_t k = 0; k < p->k; k += KB) {
        ptrdiff_t count = min(KB, p->k - k);
        const double *x = (const double *)p->x + (size_t)k * p->m;
        for (ptrdiff_t row = p->start; row < p->stop; row += TILE) {
            if (p->kind == FP8)
                decode_fp8(p, row, k, count, w);
            else if (p->kind == BF16)
                decode_bf16(p, row, k, count, w);
            else
                decode_f32(p, row, k, count, w);
            multiply_all(x, w, p->m, count, p->acc + (row - p->start) * p->m);
        }
    }
}

/* ---- the FP4 kernel --------------------------------------------------------------------------- */

/* One step of a 16 x 16 transposition in each half of 32 bytes: interleave the first or last eight. */
#define LOW(a, b)                                                                                     \
    SHUFFLE32(a, b, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 16, 48, 17, 49, 18, 50,   \
              19, 51, 20, 52, 21, 53, 22, 54, 23, 55)
#define HIGH(a, b)                                                                                    \
    SHUFFLE32(a, b, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47, 24, 56, 25, 57, 26, \
              58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63)

INLINE void transpose(u8x32 v[16])
{
    u8x32 t[16];
    for (int step = 0; step < 4; step++) {
        for (int i = 0; i < 8; i++) {
            t[2 * i] = LOW(v[i], v[i + 8]);
            t[2 * i + 1] = HIGH(v[i], v[i + 8]);
        }
        memcpy(v, t, sizeof t);
    }
}

/* Twice the value of 32 E2M1 codes, an integer, as FP32. */
INLINE void decode_nibbles(u8x32 code, float *w)
{
    i8x32 m = (i8x32)(code & 7);
    i8x32 above = m - 4;
    m += (above & (above > 0)) - ((m == 7) + (m == 7)); /* 0 1 2 3 4 6 8 12 */
    i8x32 sign = (i8x32)((code & 8) != 0);
    m = (m ^ sign) - sign;
    int8_t value[32];
    memcpy(value, &m, sizeof m);
    for (int i = 0; i < 32; i++)
        w[i] = value[i];
}

/* 32 rows, one group of columns from k0 -> w[32][32]; a shorter last group is filled with zeros. */
INLINE void decode_fp4(const Product *p, ptrdiff_t row, ptrdiff_t k0, float *w)
{
    size_t bytes = (size_t)p->k / 2, count = (size_t)min(GROUP4, p->k - k0) / 2;
    uint8_t block[16][32] = {{0}};
    u8x32 v[16];
    for (int r = 0; r < 16; r++) {
        const uint8_t *low = (const uint8_t *)row_at(p, row + r, bytes) + k0 / 2;
        const uint8_t *high = (const uint8_t *)row_at(p, row + r + 16, bytes) + k0 / 2;
        if (count == 16) {
            memcpy(block[r], low, 16);
            memcpy(block[r] + 16, high, 16);
        } else {
            memcpy(block[r], low, count);
            memcpy(block[r] + 16, high, count);
        }
    }
    memcpy(v, block, sizeof v);
    transpose(v);
    for (int i = 0; i < 16; i++) {
        decode_nibbles(v[i] & 15, w + 64 * i);
        decode_nibbles(v[i] >> 4, w + 64 * i + 32);
    }
}

INLINE void scale_fp4(const Product *p, ptrdiff_t row, ptrdiff_t k0, double *scale)
{
    ptrdiff_t columns = ceil_div(p->k, GROUP4);
    for (int r = 0; r < TILE4; r++)
        scale[r] = p->table[p->scale[min(row + r, p->n - 1) * columns + k0 / GROUP4]];
}

/* acc[rows][32] += (the sum over one group, in FP32) * scale * x_scale. */
INLINE void multiply4(const float *x, const double *x_scale, const float *w, const double *scale,
                      double *acc, const int rows)
{
    f32x8 s[3][4] = {{{0}}};
    for (int k = 0; k < GROUP4; k++) {
        f32x8 factor[3] = {{0}};
        for (int i = 0; i < rows; i++)
            factor[i] = splat4(x[KB * i + k]);
        for (int j = 0; j < 4; j++) {
            f32x8 v;
            memcpy(&v, w + TILE4 * k + 8 * j, sizeof v);
            for (int i = 0; i < rows; i++)
                s[i][j] += v * factor[i];
        }
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < 4; j++) {
            f32x4 half[2];
            f64x4 a[2], f[2];
            memcpy(half, &s[i][j], sizeof half);
            memcpy(a, acc + TILE4 * i + 8 * j, sizeof a);
            memcpy(f, scale + 8 * j, sizeof f);
            for (int h = 0; h < 2; h++)
                a[h] += __builtin_convertvector(half[h], f64x4) * (f[h] * x_scale[i]);
            memcpy(acc + TILE4 * i + 8 * j, a, sizeof a);
        }
}

/* The same for one row of x whose sum needs binary64. */
INLINE void multiply4_wide(const float *x, double x_scale, const float *w, const double *scale, double *acc)
{
    double s[TILE4] = {0};
    for (int k = 0; k < GROUP4; k++)
        for (int j = 0; j < TILE4; j++)
            s[j] += (double)w[TILE4 * k + j] * x[k];
    for (int j = 0; j < TILE4; j++)
        acc[j] += s[j] * (scale[j] * x_scale);
}

/* One decoded group times all rows of x: x [m][KB], x_scale and wide [m], acc [m][32]. */
INLINE void multiply4_all(const float *x, const double *x_scale, const uint8_t *wide, const float *w,
                          const double *scale, ptrdiff_t m, double *acc)
{
    for (ptrdiff_t i = 0; i < m;) {
        ptrdiff_t left = m - i;
        int rows = left == 1 ? 1 : left == 2 || left == 4 ? 2 : 3;
        if (wide[i]) {
            rows = 1;
            multiply4_wide(x + KB * i, x_scale[i], w, scale, acc + TILE4 * i);
        } else if (rows == 3 && !wide[i + 1] && !wide[i + 2]) {
            multiply4(x + KB * i, x_scale + i, w, scale, acc + TILE4 * i, 3);
        } else if (rows >= 2 && !wide[i + 1]) {
            rows = 2;
            multiply4(x + KB * i, x_scale + i, w, scale, acc + TILE4 * i, 2);
        } else {
            rows = 1;
            multiply4(x + KB * i, x_scale + i, w, scale, acc + TILE4 * i, 1);
        }
        i += rows;
    }
}

INLINE void product_fp4(const Product *p)
{
    _Alignas(64) float w[GROUP4 * TILE4];
    _Alignas(64) double scale[TILE4];
    for (ptrdiff_t block = 0; block < p->k; block += KB) {
        const float *x = (const float *)p->x + (size_t)block * p->m;
        ptrdiff_t count = min(KB, p->k - block);
        for (ptrdiff_t row = p->start; row < p->stop; row += TILE4)
            for (ptrdiff_t k = 0; k < count; k += GROUP4) {
                ptrdiff_t at = block + k;
                decode_fp4(p, row, at, w);
                scale_fp4(p, row, at, scale);
                multiply4_all(x + k, p->x_scale + at / GROUP * p->m, p->wide + at / GROUP4 * p->m, w,
                              scale, p->m, p->acc + (row - p->start) * p->m);
            }
    }
}

/* ---- results ---------------------------------------------------------------------------------- */

/* To FP32, then to BF16, both to nearest even; every NaN is 0x7FC0. */
INLINE uint16_t to_bf16(double value)
{
    float single = (float)value;
    uint32_t bits;
    memcpy(&bits, &single, sizeof bits);
    return value != value ? 0x7FC0 : (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

INLINE double one_nan(double value)
{
    const uint64_t quiet = 0x7FF8000000000000;
    double nan;
    memcpy(&nan, &quiet, sizeof nan);
    return value != value ? nan : value;
}

INLINE void store(const Product *p, const ptrdiff_t tile)
{
    for (ptrdiff_t row = p->start; row < p->stop; row += tile) {
        ptrdiff_t count = min(tile, p->stop - row);
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

INLINE void product(const Product *p)
{
    ptrdiff_t tile = p->kind == FP4 ? TILE4 : TILE;
    size_t rows = (size_t)(ceil_div(p->stop - p->start, tile) * tile);
    memset(p->acc, 0, rows * (size_t)p->m * sizeof *p->acc);
    if (p->kind == FP4)
        product_fp4(p);
    else
        product_f64(p);
    store(p, tile);
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) static void product_avx2(const Product *p) { product(p); }
#endif

static void product_any(const Product *p) { product(p); }

static void run(const Product *p)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        product_avx2(p);
        return;
    }
#endif
    product_any(p);
}

/* ---- x in the order in which the kernels read it: [ceil(k / KB)][m][KB], zeros at the end -------- */

INLINE const uint8_t *x_scale_at(const uint8_t *scale, ptrdiff_t i, ptrdiff_t k, ptrdiff_t at)
{
    return scale + i * ceil_div(k, GROUP) + at / GROUP;
}

/* E4M3 codes [m][k] and scale codes [m][ceil(k / 128)], with the values of both. */
static void pack_fp8(const uint8_t *codes, const uint8_t *scale, const double *e4m3,
                     const double *e8m0, ptrdiff_t m, ptrdiff_t k, double *out)
{
    for (ptrdiff_t block = 0; block < k; block += KB)
        for (ptrdiff_t i = 0; i < m; i++, out += KB) {
            ptrdiff_t count = min(KB, k - block);
            for (ptrdiff_t j = 0; j < count; j++)
                out[j] = e4m3[codes[i * k + block + j]] * e8m0[*x_scale_at(scale, i, k, block + j)];
            memset(out + count, 0, (size_t)(KB - count) * sizeof *out);
        }
}

/* BF16 rows that lie stride values apart. */
static void pack_bf16(const uint16_t *bits, ptrdiff_t stride, ptrdiff_t m, ptrdiff_t k, double *out)
{
    for (ptrdiff_t block = 0; block < k; block += KB)
        for (ptrdiff_t i = 0; i < m; i++, out += KB) {
            ptrdiff_t count = min(KB, k - block);
            for (ptrdiff_t j = 0; j < count; j++)
                out[j] = bf16_value(bits[i * stride + block + j]);
            memset(out + count, 0, (size_t)(KB - count) * sizeof *out);
        }
}

/* An E4M3 magnitude in units of 2^-9. */
INLINE uint32_t e4m3_units(uint8_t code)
{
    uint32_t exponent = code >> 3 & 15, mantissa = code & 7;
    return exponent ? (8 + mantissa) << (exponent - 1) : mantissa;
}

/* Whether a sum of products with doubled E2M1 values (at most 12) may leave the 24 bits of FP32: every
 * partial sum is a multiple of the lowest bit set in any x and at most 12 * sum |x|. */
INLINE uint8_t needs_binary64(const uint8_t *codes, ptrdiff_t count)
{
    uint32_t all = 0, sum = 0;
    for (ptrdiff_t j = 0; j < count; j++) {
        uint32_t units = e4m3_units(codes[j]);
        all |= units;
        sum += units;
    }
    uint32_t lowest = all & (0 - all);
    return 12 * (uint64_t)sum > (uint64_t)lowest << 24;
}

/* As pack_fp8, for FP4 weights: FP32 without the scale, and what else product_fp4 reads. */
static void pack_fp8_for_fp4(const uint8_t *codes, const uint8_t *scale, const double *e4m3,
                             const double *e8m0, ptrdiff_t m, ptrdiff_t k, float *out,
                             double *x_scale, uint8_t *wide)
{
    for (ptrdiff_t block = 0; block < k; block += KB)
        for (ptrdiff_t i = 0; i < m; i++, out += KB) {
            ptrdiff_t count = min(KB, k - block);
            for (ptrdiff_t j = 0; j < count; j++)
                out[j] = (float)e4m3[codes[i * k + block + j]];
            memset(out + count, 0, (size_t)(KB - count) * sizeof *out);
        }
    for (ptrdiff_t i = 0; i < m; i++) {
        for (ptrdiff_t at = 0; at < k; at += GROUP) /* half, for the weights' values are doubled */
            x_scale[at / GROUP * m + i] = 0.5 * e8m0[*x_scale_at(scale, i, k, at)];
        for (ptrdiff_t at = 0; at < k; at += GROUP4)
            wide[at / GROUP4 * m + i] = needs_binary64(codes + i * k + at, min(GROUP4, k - at));
    }
}

/* ---- the module: every argument is an address or a size ------------------------------------------- */

typedef unsigned long long Address;
#define AT(type, address) ((type *)(uintptr_t)(address))

static PyObject *py_product(PyObject *self, PyObject *args)
{
    Address x, x_scale, wide, codes, scale, table, acc, out;
    Product p = {0};
    (void)self;
    if (!PyArg_ParseTuple(args, "innnKKKKKKnnKKp", &p.kind, &p.m, &p.n, &p.k, &x, &x_scale, &wide,
                          &codes, &scale, &table, &p.start, &p.stop, &acc, &out, &p.out_bf16))
        return NULL;
    p.x = AT(void, x);
    p.x_scale = AT(double, x_scale);
    p.wide = AT(uint8_t, wide);
    p.codes = AT(void, codes);
    p.scale = AT(uint8_t, scale);
    p.table = AT(double, table);
    p.acc = AT(double, acc);
    p.out = AT(void, out);
    Py_BEGIN_ALLOW_THREADS;
    run(&p);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *py_pack_fp8(PyObject *self, PyObject *args)
{
    Address codes, scale, e4m3, e8m0, out;
    Py_ssize_t m, k;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKKKnnK", &codes, &scale, &e4m3, &e8m0, &m, &k, &out))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    pack_fp8(AT(uint8_t, codes), AT(uint8_t, scale), AT(double, e4m3), AT(double, e8m0), m, k,
             AT(double, out));
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *py_pack_fp8_for_fp4(PyObject *self, PyObject *args)
{
    Address codes, scale, e4m3, e8m0, out, x_scale, wide;
    Py_ssize_t m, k;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKKKnnKKK", &codes, &scale, &e4m3, &e8m0, &m, &k, &out, &x_scale,
                          &wide))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    pack_fp8_for_fp4(AT(uint8_t, codes), AT(uint8_t, scale), AT(double, e4m3), AT(double, e8m0), m,
                     k, AT(float, out), AT(double, x_scale), AT(uint8_t, wide));
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *py_pack_bf16(PyObject *self, PyObject *args)
{
    Address bits, out;
    Py_ssize_t stride, m, k;
    (void)self;
    if (!PyArg_ParseTuple(args, "KnnnK", &bits, &stride, &m, &k, &out))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    pack_bf16(AT(uint16_t, bits), stride, m, k, AT(double, out));
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"product", py_product, METH_VARARGS, "Some rows of a product; see Product in _kernel.c."},
    {"pack_fp8", py_pack_fp8, METH_VARARGS, "Quantised x, for FP8 weights."},
    {"pack_fp8_for_fp4", py_pack_fp8_for_fp4, METH_VARARGS, "Quantised x, for FP4 weights."},
    {"pack_bf16", py_pack_bf16, METH_VARARGS, "BF16 x, for weights in BF16, F32 and BF16(FP8)."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_kernel", "The products of linear.py in C.", -1, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernel(void)
{
    PyObject *self = PyModule_Create(&module);
    if (self && (PyModule_AddIntConstant(self, "KB", KB) < 0 ||
                 PyModule_AddIntConstant(self, "TILE", TILE4) < 0)) {
        Py_DECREF(self);
        return NULL;
    }
    return self;
}
