/* What book-keeping needs of matrices with one row per sample. In a linear layer `a` are the inputs
   and `g` the gradients of the outputs:

       squares[i] = |row_i|^2                               squared lengths of kept gradients
       squares[i] = |g_i|^2 (|a_i|^2 + bias)                squared length of sample i's gradient
       weighted_i = c_i g_i,  sums = sum_i c_i g_i          for the sum of the clipped gradients

   LANES partial sums run side by side: a compiler can vectorise them, and they lose fewer digits
   than a single sum. */

#include <stdint.h>

#define LANES 32

static inline float square_of(const float *restrict row, int64_t n)
{
    float lanes[LANES] = {0}, sum = 0.0f;
    int64_t j = 0;
    for (; j + LANES <= n; j += LANES)
        for (int k = 0; k < LANES; k++)
            lanes[k] += row[j + k] * row[j + k];
    for (; j < n; j++)
        sum += row[j] * row[j];
    for (int half = LANES / 2; half; half /= 2)
        for (int k = 0; k < half; k++)
            lanes[k] += lanes[k + half];
    return sum + lanes[0];
}

void row_squares(const float *rows, int64_t count, int64_t width, float *squares)
{
    for (int64_t i = 0; i < count; i++)
        squares[i] = square_of(rows + i * width, width);
}

void linear_squares(const float *a, const float *g, int64_t rows, int64_t in, int64_t out,
                    float bias, float *squares)
{
    for (int64_t i = 0; i < rows; i++)
        squares[i] = square_of(g + i * out, out) * (square_of(a + i * in, in) + bias);
}

void weigh_rows(const float *g, const float *factors, int64_t rows, int64_t out,
                float *restrict weighted, float *restrict sums)
{
    for (int64_t j = 0; j < out; j++)
        sums[j] = 0.0f;
    for (int64_t i = 0; i < rows; i++) {
        const float *restrict row = g + i * out;
        float *restrict made = weighted + i * out, factor = factors[i];
        for (int64_t j = 0; j < out; j++) {
            made[j] = factor * row[j];
            sums[j] += made[j];
        }
    }
}
