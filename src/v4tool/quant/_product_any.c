/* The product for the compiler's baseline instruction set (SSE2, NEON). */

#define PRODUCT v4tool_product_any
#include "_product.h"
