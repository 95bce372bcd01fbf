// Rows of a matrix, and their products in whole numbers (strips.c).

#ifndef SAPWOOD_ROWS_H
#define SAPWOOD_ROWS_H

#include "blocks.h"

enum { LINE = 64 };  // bytes of a cache line

typedef struct {
    const uint8_t *data;  // the first row
    int64_t stride;       // bytes from row to row
    int64_t width;        // bytes of a row
    int64_t rows;
    int64_t type;   // ggml's number
    int64_t first;  // the output's column of the first row
    int64_t whole;  // digits of whole numbers in which it may be multiplied, as all of its product's parts: 2, or 3 where that pays
} matrix;

// Whether there are products in whole numbers.
#if defined(__AVX512VNNI__)
enum { SAPWOOD_WHOLE = 1 };
#else
enum { SAPWOOD_WHOLE = 0 };
// Whether a type is multiplied by three digits faster than in float32.
int sapwood_takes_three_digits(int64_t type);

#endif

// Tokens in whole numbers.
typedef struct whole_tokens whole_tokens;

// So many tokens of so many digits, which `sapwood_set_token` writes; `free` ends them. Null: there is no memory.
whole_tokens *sapwood_whole_tokens(int64_t count, int64_t columns, int64_t digits_each);
void sapwood_set_token(whole_tokens *to, int64_t token, const float *x);

// out[t][r - first] = token t . row r, for the rows `first` .. `last` - 1. The next such call probably begins with row `then`.
void sapwood_whole_rows(
    const whole_tokens *in, const matrix *m, int64_t first, int64_t last, int64_t then, float *out, int64_t out_stride);

// Whether a type is multiplied by three digits faster than in float32.
int sapwood_takes_three_digits(int64_t type);

#endif
