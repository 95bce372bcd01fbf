// Products in whole numbers by the matrix unit of processors with AMX: the digits of a tile's tokens are the rows of one of its
// tiles, a strip's group is the other, and the sums are those of strips.c's instructions to the bit, 16 by 16 at a time.

#include "rows.h"

#if defined(__AVX512VNNI__)
#include <cpuid.h>
#include <sys/syscall.h>

#include "strips.h"

long syscall(long number, ...);  // unistd.h has another `read`

#define MATRIX_UNIT __attribute__((target("amx-tile,amx-int8")))

// AT_ONCE: groups whose sums are asked for before the first is read, since the unit is quick but far away; SECOND: rows of the
// second tile of three digits.
enum { AT_ONCE = 8, SECOND = TILE };

// Of a group, by token and digit, then by row.
typedef int32_t digit_sums[3 * TILE][STRIP] __attribute__((aligned(LINE)));

// The unit's tiles: 0 to 3: sums, of the first 16 digits and of the others; 4: digits; 5: the others; 6: codes.
#define SUMS_OF(tile, digits_tile, x, sums)                                                                            \
    _tile_zero(tile);                                                                                                  \
    _tile_loadd(digits_tile, x, GROUP);                                                                                \
    _tile_dpbsud(tile, digits_tile, 6);                                                                                \
    _tile_stored(tile, sums, LINE)

INLINE MATRIX_UNIT void ask(const int digits, const strip_group *w, const int8_t *x, const int odd, digit_sums sums) {
    _tile_loadd(6, w->codes, LINE);
    if (odd) {
        SUMS_OF(1, 4, x, sums);
    } else {
        SUMS_OF(0, 4, x, sums);
    }
    if (digits == 2) return;
    if (odd) {
        SUMS_OF(3, 5, x + 2 * TILE * GROUP, sums[2 * TILE]);
    } else {
        SUMS_OF(2, 5, x + 2 * TILE * GROUP, sums[2 * TILE]);
    }
}

INLINE MATRIX_UNIT void multiply(
    const int type, const int digits, strip_bytes in, int64_t groups, const int8_t *x, const digit_scales *scales, ahead from,
    floats *sums) {
    floats total[TILE] = {0};
    while (groups > 0) {
        strip_group w[AT_ONCE];
        digit_sums found[AT_ONCE];
        const int64_t count = groups < AT_ONCE ? groups : AT_ONCE;
        for (int64_t j = 0; j < count; j += groups_of(type), in.first += bytes_of(type)) unpack(type, in, w + j);
        __asm__ volatile("" ::: "memory");  // what is read has been written
        for (int64_t j = 0; j < count; j++, x += digits * TILE * GROUP) {
            fetch(&from);
            ask(digits, w + j, x, j % 2, found[j]);
        }
        for (int64_t j = 0; j < count; j++, scales += TILE)
#pragma GCC unroll 8
            for (int t = 0; t < TILE; t++) {
                const int32_t(*const sum)[STRIP] = found[j] + digits * t;
                const __m512i high = _mm512_slli_epi32(_mm512_load_si512(sum[0]), 8);
                floats whole = (floats)_mm512_cvtepi32_ps(_mm512_add_epi32(high, _mm512_load_si512(sum[1])));
                if (digits == 3) whole = whole * 256.0f + (floats)_mm512_cvtepi32_ps(_mm512_load_si512(sum[2]));
                total[t] += whole * (w[j].scale[0] * scales[t].scale);
                total[t] -= w[j].minus[0] * scales[t].all;
            }
        groups -= count;
    }
    for (int t = 0; t < TILE; t++) sums[t] = total[t];
}

#define FORMAT(type)                                                                                                   \
    static MATRIX_UNIT void two_##type(                                                                                \
        strip_bytes in, int64_t groups, const int8_t *x, const digit_scales *scales, ahead from, floats *sums) {       \
        multiply(type, 2, in, groups, x, scales, from, sums);                                                          \
    }                                                                                                                  \
    static MATRIX_UNIT void three_##type(                                                                              \
        strip_bytes in, int64_t groups, const int8_t *x, const digit_scales *scales, ahead from, floats *sums) {       \
        multiply(type, 3, in, groups, x, scales, from, sums);                                                          \
    }
FORMAT(Q4_0)
FORMAT(Q4_1)
FORMAT(Q5_0)
FORMAT(Q5_1)
FORMAT(Q8_0)
FORMAT(Q4_K)
FORMAT(Q5_K)
#define ENTRY(type) [type] = {two_##type, three_##type}
static by_matrix *const FORMATS[][2] = {
    ENTRY(Q4_0), ENTRY(Q4_1), ENTRY(Q5_0), ENTRY(Q5_1), ENTRY(Q8_0), ENTRY(Q4_K), ENTRY(Q5_K),
};

// Whether there is such a unit, and Linux lets this process use it; asked once.
static int has_matrix(void) {
    static int known;  // 0: not asked yet
    int found = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (!found) {
        unsigned a, b, c, d = 0, low, high;
        found = -1;
        if (__get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 24 & 3) == 3 && __get_cpuid(1, &a, &b, &c, &d) && c >> 27 & 1) {
            __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
            if ((low >> 17 & 3) == 3 && !syscall(SYS_arch_prctl, 0x1023, 18)) found = 1;  // ARCH_REQ_XCOMP_PERM: tiles' data
        }
        __atomic_store_n(&known, found, __ATOMIC_RELAXED);
    }
    return found > 0;
}

by_matrix *sapwood_by_matrix(int64_t type, int64_t digits) {
    return type > Q5_K || !has_matrix() ? NULL : FORMATS[type][digits - 2];
}

MATRIX_UNIT void sapwood_begin_matrix(void) {
    struct {
        uint8_t palette, start, unused[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } __attribute__((aligned(LINE))) shapes = {
        1, 0, {0}, {LINE, LINE, LINE, LINE, GROUP, GROUP, LINE},
        {2 * TILE, 2 * TILE, SECOND, SECOND, 2 * TILE, SECOND, GROUP / 4}};
    __asm__ volatile("" : : "r"(&shapes) : "memory");  // it has been written
    _tile_loadconfig(&shapes);
}

MATRIX_UNIT void sapwood_end_matrix(void) { _tile_release(); }
int sapwood_takes_three_digits(int64_t type) { return type <= Q6_K; }
#else
int sapwood_takes_three_digits(int64_t type) { return (void)type, 0; }
#endif
