/* Shared declarations of the C extension: block sizes, struct Product, small helpers; see _kernel.c. */

#ifndef V4TOOL_KERNEL_H
#define V4TOOL_KERNEL_H

#include <stddef.h>
#include <stdint.h>

enum {
    BLOCK = 128, /* columns of K that x is cut into; a multiple of what one scale covers */
    GROUP4 = 32, /* columns under one scale of an FP4 weight */
    GROUPS4 = BLOCK / GROUP4,
    TILE = 16,   /* rows of the weight that are decoded together */
    TILE4 = 32,  /* the same for an FP4 weight */
    ALONG = 1 << 15, /* values of x that stay in the second-level cache beside the rest */
};

enum kind { FP4, FP8, BF16, F32, BF16_BY_K }; /* _c_product.py knows these numbers */

typedef struct {
    int kind;
    ptrdiff_t m, n, k;
    const void *x;         /* [blocks of k][m][BLOCK]: FP32 for FP4 weights, otherwise binary64 */
    ptrdiff_t block;       /* FP8: rows and columns under one scale of the weight */
    const double *x_scale; /* FP4: [blocks of k][m][groups of a block], half the scale of x */
    const uint8_t *wide;   /* FP4: [blocks of k][m], bit i: group i of the block needs binary64 */
    const void *codes;     /* [n][k], FP4 [n][k / 2], BF16_BY_K [k][n]; of the rows start ... stop - 1 */
    const uint8_t *scale;  /* FP4 [n][ceil(k / 32)], FP8 [ceil(n / block)][ceil(k / block)] */
    const double *table;   /* FP8 [scale][code] */
    ptrdiff_t start, stop; /* the rows of the weight to do */
    double *acc;           /* room for [tiles of start ... stop][m][tile] */
    void *out;             /* [m][n], BF16 or binary64 */
    int out_bf16;
} Product;

void v4tool_product_any(const Product *p);
void v4tool_product_avx2(const Product *p);

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))

INLINE ptrdiff_t smaller(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }
INLINE ptrdiff_t ceil_div(ptrdiff_t a, ptrdiff_t b) { return (a + b - 1) / b; }

INLINE double bf16_value(uint16_t bits)
{
    union {
        uint32_t bits;
        float value;
    } wide = {(uint32_t)bits << 16};
    return wide.value;
}

#endif
