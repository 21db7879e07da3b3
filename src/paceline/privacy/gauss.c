/* out[i] = factor * out[i] + scale * (a normal number), by Box and Muller's method:

       r = sqrt(-2 ln u),  out += r cos(t), r sin(t)

   u comes from the first half of the bits, t from the second. Loops have no branches, so that a
   compiler vectorises them. The polynomials are those of Cephes (S. Moshier), to the precision of
   float32. `bits` holds 2 * pairs numbers; `out` holds n of them, 2 * pairs or 2 * pairs - 1. */

#include <stdint.h>
#include <string.h>

static inline float as_float(int32_t bits) { float value; memcpy(&value, &bits, 4); return value; }
static inline int32_t as_int(float value) { int32_t bits; memcpy(&bits, &value, 4); return bits; }

static inline float natural_log(float u) /* of 2^-32 < u <= 1 */
{
    int32_t k = as_int(u) - 0x3f3504f3; /* mantissas between sqrt(1/2) and sqrt(2) */
    float e = (float)(k >> 23), x = as_float((k & 0x007fffff) + 0x3f3504f3) - 1.0f, z = x * x;
    float p = 7.0376836292e-2f;
    p = p * x - 1.1514610310e-1f;
    p = p * x + 1.1676998740e-1f;
    p = p * x - 1.2420140846e-1f;
    p = p * x + 1.4249322787e-1f;
    p = p * x - 1.6668057665e-1f;
    p = p * x + 2.0000714765e-1f;
    p = p * x - 2.4999993993e-1f;
    p = p * x + 3.3333331174e-1f;
    return x * z * p - 0.5f * z + x + e * 0.69314718056f;
}

static inline void pair(int32_t first, int32_t second, float scale, float *c, float *s)
{
    float u = ((float)(int32_t)((uint32_t)first >> 1) + 0.5f) * 0x1p-31f;
    float square = -2.0f * natural_log(u);
    float r = scale * __builtin_sqrtf(square > 0.0f ? square : 0.0f);
    /* 2^32 is a full turn; this is the nearest quarter of a turn */
    int32_t quarter = (second >> 30) + ((second >> 29) & 1);
    int32_t rest = (int32_t)((uint32_t)second - ((uint32_t)quarter << 30));
    float f = (float)rest * (1.5707963268f * 0x1p-30f), q = f * f;
    float sine = f + f * q * (-1.6666654611e-1f + q * (8.3321608736e-3f - q * 1.9515295891e-4f));
    float cosine = 1.0f - 0.5f * q
        + q * q * (4.1666645683e-2f + q * (-1.3887316255e-3f + q * 2.4433157118e-5f));
    float across = (quarter & 1) ? sine : cosine, up = (quarter & 1) ? cosine : sine;
    *c = r * as_float(as_int(across) ^ (int32_t)((uint32_t)((quarter + 1) & 2) << 30));
    *s = r * as_float(as_int(up) ^ (int32_t)((uint32_t)(quarter & 2) << 30));
}

void add_normal(const int32_t *restrict bits, float *restrict out, int64_t n, float factor,
                float scale)
{
    int64_t pairs = (n + 1) / 2, whole = n / 2;
    float *restrict high = out + pairs;
    const int32_t *restrict turns = bits + pairs;
    for (int64_t i = 0; i < whole; i++) {
        float c, s;
        pair(bits[i], turns[i], scale, &c, &s);
        out[i] = factor * out[i] + c;
        high[i] = factor * high[i] + s;
    }
    if (whole < pairs) {
        float c, s;
        pair(bits[whole], turns[whole], scale, &c, &s);
        out[whole] = factor * out[whole] + c;
    }
}
