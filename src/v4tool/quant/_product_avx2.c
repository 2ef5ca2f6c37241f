/* The product for x86-64 processors with AVX2 and FMA, selected at run time. */

#if defined(__x86_64__)

#include "_kernel.h"
#include <immintrin.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

#define PRODUCT v4tool_product_avx2
/* otherwise GCC reads the vector from memory again for every row of x */
#define IN_REGISTER(v) __asm__("" : "+x"(v))
/* the entries of a table of 16 bytes at 32 indices */
#define LOOK_UP_16(table, index)                                                                      \
    _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(table))),       \
                        (__m256i)(index))
#define FOUR_F64(from) (f64x4)_mm256_cvtps_pd(_mm_loadu_ps(from))
#define WIDEN_8(to, from)                                                                             \
    _mm256_storeu_ps(to, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)(from)))))
#include "_product.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else
typedef int not_for_this_processor;
#endif
