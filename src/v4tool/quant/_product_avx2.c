/* The product for x86-64 processors with AVX2 and FMA, chosen when it runs. */

#if defined(__x86_64__)

#include "_kernel.h"
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

#define PRODUCT v4tool_product_avx2
/* otherwise GCC reads the vector from memory again for every row of x */
#define IN_REGISTER(v) __asm__("" : "+x"(v))
#include "_product.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else
typedef int not_for_this_processor;
#endif
