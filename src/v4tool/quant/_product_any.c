/* The product for whatever instruction set the compiler takes for granted (SSE2, NEON). */

#define PRODUCT v4tool_product_any
#include "_product.h"
