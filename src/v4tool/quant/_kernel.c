/* Python bindings of the C extension of v4tool.quant: products of linear.py on packed weights.
 *
 * This file packs x into the order in which the kernel reads it, chooses the instruction set and binds it
 * all to Python; _product.h holds the kernel. Every function takes addresses and sizes that _c_product.py
 * has checked, holds no state and runs without the interpreter lock. Left out: checking, threads,
 * accumulation in FP32.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_kernel.h"
#include <string.h>

static void run(const Product *p)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        v4tool_product_avx2(p);
        return;
    }
#endif
    v4tool_product_any(p);
}

/* ---- x as [blocks of k][m][BLOCK] --------------------------------------------------------------- */

/* act_quant of one block of BF16 values: their E4M3 codes, and the code of the scale as the result.
 *
 * A division by a power of two changes the exponent alone: code_of is indexed by the bits of the BF16
 * quotient without its sign. A subnormal x has no such quotient, but any scale is at least 2^-22, so that
 * it lands where all codes are zero, as it should. */
static uint8_t quantize(const uint16_t *x, ptrdiff_t count, const uint8_t *code_of, uint8_t *codes)
{
    uint16_t most = 0;
    for (ptrdiff_t j = 0; j < count; j++) {
        uint16_t magnitude = x[j] & 0x7FFF;
        most = magnitude > most ? magnitude : most;
    }
    if (most >= 0x7F80) { /* an infinity or a NaN: the scale is NaN */
        memset(codes, 0x7F, (size_t)count);
        return 255;
    }
    union {
        float value;
        uint32_t bits;
    } scale = {(float)bf16_value(most)};
    scale.value = (scale.value < 1e-4f ? 1e-4f : scale.value) * (1.0f / 448);
    int code = (int)(scale.bits >> 23) + ((scale.bits & 0x7FFFFF) != 0);
    int shift = (code - 127) * 128; /* 128 steps of the bits are one of the exponent */
    for (ptrdiff_t j = 0; j < count; j++) {
        int quotient = (x[j] & 0x7FFF) - shift;
        codes[j] = (uint8_t)((quotient < 0 ? 0 : code_of[quotient]) | (x[j] >> 8 & 0x80));
    }
    return (uint8_t)code;
}

/* BF16 rows that lie stride values apart, quantised in groups that divide a block; e4m3 and e8m0 are the
 * values of both codes. */
static void pack_fp8(const uint16_t *x, ptrdiff_t stride, ptrdiff_t group, const uint8_t *code_of,
                     const double *e4m3, const double *e8m0, ptrdiff_t m, ptrdiff_t k, double *out)
{
    uint8_t codes[BLOCK];
    for (ptrdiff_t block = 0; block < k; block += BLOCK)
        for (ptrdiff_t i = 0; i < m; i++, out += BLOCK) {
            ptrdiff_t count = smaller(BLOCK, k - block);
            for (ptrdiff_t at = 0; at < count; at += group) {
                ptrdiff_t some = smaller(group, count - at);
                double scale = e8m0[quantize(x + i * stride + block + at, some, code_of, codes)];
                for (ptrdiff_t j = 0; j < some; j++)
                    out[at + j] = e4m3[codes[j]] * scale;
            }
        }
}

/* BF16 rows that lie stride values apart. */
static void pack_bf16(const uint16_t *bits, ptrdiff_t stride, ptrdiff_t m, ptrdiff_t k, double *out)
{
    for (ptrdiff_t block = 0; block < k; block += BLOCK)
        for (ptrdiff_t i = 0; i < m; i++, out += BLOCK)
            for (ptrdiff_t j = 0; j < smaller(BLOCK, k - block); j++)
                out[j] = bf16_value(bits[i * stride + block + j]);
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

/* As pack_fp8, for FP4 weights: without the scale, and what else product_fp4 reads. */
static void pack_fp8_for_fp4(const uint16_t *x, ptrdiff_t stride, ptrdiff_t group,
                             const uint8_t *code_of, const double *e4m3, const double *e8m0,
                             ptrdiff_t m, ptrdiff_t k, float *out, double *x_scale, uint8_t *wide)
{
    uint8_t codes[BLOCK];
    for (ptrdiff_t block = 0; block < k; block += BLOCK)
        for (ptrdiff_t i = 0; i < m; i++, out += BLOCK, x_scale += GROUPS4, wide++) {
            ptrdiff_t count = smaller(BLOCK, k - block);
            memset(out, 0, BLOCK * sizeof *out); /* the last group is computed in full */
            *wide = 0;
            for (ptrdiff_t at = 0; at < count; at += group) {
                ptrdiff_t some = smaller(group, count - at);
                /* half, for the values of the weight are doubled */
                double scale = 0.5 * e8m0[quantize(x + i * stride + block + at, some, code_of, codes)];
                for (ptrdiff_t j = 0; j < some; j++)
                    out[at + j] = (float)e4m3[codes[j]];
                for (ptrdiff_t j = 0; j < some; j += GROUP4) {
                    ptrdiff_t number = (at + j) / GROUP4;
                    x_scale[number] = scale;
                    *wide |= (uint8_t)(needs_binary64(codes + j, smaller(GROUP4, some - j)) << number);
                }
            }
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
    if (!PyArg_ParseTuple(args, "innnnKKKKKKnnKKp", &p.kind, &p.block, &p.m, &p.n, &p.k, &x, &x_scale,
                          &wide, &codes, &scale, &table, &p.start, &p.stop, &acc, &out, &p.out_bf16))
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
    Address x, code_of, e4m3, e8m0, out;
    Py_ssize_t stride, group, m, k;
    (void)self;
    if (!PyArg_ParseTuple(args, "KnnKKKnnK", &x, &stride, &group, &code_of, &e4m3, &e8m0, &m, &k, &out))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    pack_fp8(AT(uint16_t, x), stride, group, AT(uint8_t, code_of), AT(double, e4m3), AT(double, e8m0), m,
             k, AT(double, out));
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *py_pack_fp8_for_fp4(PyObject *self, PyObject *args)
{
    Address x, code_of, e4m3, e8m0, out, x_scale, wide;
    Py_ssize_t stride, group, m, k;
    (void)self;
    if (!PyArg_ParseTuple(args, "KnnKKKnnKKK", &x, &stride, &group, &code_of, &e4m3, &e8m0, &m, &k, &out,
                          &x_scale, &wide))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    pack_fp8_for_fp4(AT(uint16_t, x), stride, group, AT(uint8_t, code_of), AT(double, e4m3),
                     AT(double, e8m0), m, k, AT(float, out), AT(double, x_scale), AT(uint8_t, wide));
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

/* `count` products by themselves: those of BF16 rows of x that lie x_row values apart, x_next from one
 * product to the next, with BF16 weights w_next apart; packed and acc are room for one of them. */
static PyObject *py_batched(PyObject *self, PyObject *args)
{
    Address x, w, packed, acc, out;
    Py_ssize_t count, x_next, x_row, w_next;
    Product p = {0};
    (void)self;
    if (!PyArg_ParseTuple(args, "nnnnKnniKnKKK", &count, &p.m, &p.n, &p.k, &x, &x_next, &x_row, &p.kind,
                          &w, &w_next, &packed, &acc, &out))
        return NULL;
    p.x = AT(void, packed);
    p.stop = p.n;
    p.acc = AT(double, acc);
    Py_BEGIN_ALLOW_THREADS;
    for (Py_ssize_t i = 0; i < count; i++) {
        pack_bf16(AT(uint16_t, x) + i * x_next, x_row, p.m, p.k, AT(double, packed));
        p.codes = AT(uint16_t, w) + i * w_next;
        p.out = AT(double, out) + i * p.m * p.n;
        run(&p);
    }
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"product", py_product, METH_VARARGS, "Some rows of a product; see Product in _kernel.c."},
    {"batched", py_batched, METH_VARARGS, "Several products of BF16 x and BF16 weights."},
    {"pack_fp8", py_pack_fp8, METH_VARARGS, "BF16 x, quantised, for FP8 weights."},
    {"pack_fp8_for_fp4", py_pack_fp8_for_fp4, METH_VARARGS, "BF16 x, quantised, for FP4 weights."},
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
    if (self && (PyModule_AddIntConstant(self, "INTERFACE", 2) < 0 || /* linear.py: KERNEL_INTERFACE */
                 PyModule_AddIntConstant(self, "BLOCK", BLOCK) < 0 ||
                 PyModule_AddIntConstant(self, "GROUPS", GROUPS4) < 0 ||
                 PyModule_AddIntConstant(self, "TILE", TILE4) < 0)) {
        Py_DECREF(self);
        return NULL;
    }
    return self;
}
