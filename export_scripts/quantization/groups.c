/* Numbers of fp32, fp16 or bf16 become codes of 8 or 4 bits, group by group; groups.py says what is given.

   No sum is contracted and nothing is reassociated but the sums of squares: codes are those of groups.py to the bit.
*/
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { FP32, FP16, BF16 };  /* of the numbers, as groups.py counts them */
enum { E4M3, E2M1, INT4 };  /* of the codes */
#define LANES 32            /* numbers that are encoded at a time: the smallest group */
#define INLINE static inline __attribute__((always_inline))

INLINE float number(uint32_t bits) { float found; memcpy(&found, &bits, 4); return found; }
INLINE uint32_t bits_of(float value) { uint32_t found; memcpy(&found, &value, 4); return found; }

/* The magnitude of a number that is given by its bits without the sign. */
INLINE float widened(uint32_t bits, int type) {
    if (type == BF16) return number(bits << 16);
    if (type == FP32) return number(bits);
    /* The bias of fp16 is less by 112; its infinities and NaN stay what they are. */
    return bits < 0x7C00 ? number(bits << 13) * 0x1p112f : number(bits << 13 | 0x7F800000);
}

INLINE uint32_t loaded(const void *values, long place, int type) {
    uint32_t wide = 0;
    uint16_t narrow = 0;
    if (type == FP32) memcpy(&wide, (const char *)values + place * 4, 4);
    else memcpy(&narrow, (const char *)values + place * 2, 2);
    return type == FP32 ? wide : narrow;
}

/* Magnitudes are ordered as their bits are. */
INLINE void find_peaks(const void *values, int type, long rows, long columns, long group_rows, long group_columns,
                       float *peaks) {
    uint32_t sign = type == FP32 ? 0x7FFFFFFF : 0x7FFF;
    long across = (columns + group_columns - 1) / group_columns;
    for (long row = 0; row < rows; row++) {
        for (long group = 0; group < across; group++) {
            long end = (group + 1) * group_columns < columns ? (group + 1) * group_columns : columns;
            uint32_t most = 0;
            for (long column = group * group_columns; column < end; column++) {
                uint32_t each = loaded(values, row * columns + column, type) & sign;
                most = each > most ? each : most;
            }
            float *peak = peaks + row / group_rows * across + group, found = widened(most, type);
            /* Not "found > *peak": NaN is greater than all. */
            if (row % group_rows == 0 || !(found <= *peak)) *peak = found;
        }
    }
}

/* Round a magnitude to a type of some digits, whose least number with all of them is given, as float_rounding.py does;
   return its code. */
INLINE uint32_t small_float(float value, int digits, float least, float largest, float *rounded) {
    float by = (float)(1 << (23 - digits)), high = value * by;
    high = high > 1.5f * by * least ? high : 1.5f * by * least;
    float nearest = high - (high - value);
    nearest = nearest > largest ? largest : nearest;
    *rounded = nearest;
    /* Below that number codes are multiples; fp32's own numbers of few digits take a processor a hundred times as long. */
    uint32_t first = (bits_of(least) >> (23 - digits)) - (1 << digits);
    uint32_t few = (uint32_t)(int32_t)(nearest * ((float)(1 << digits) / least));
    return nearest < least ? few : (bits_of(nearest) >> (23 - digits)) - first;
}

/* Encode LANES numbers of one group; squares are added to sums for each lane. */
INLINE void encode_lanes(const void *restrict values, int type, int form, long begin, float scale,
                         uint8_t *restrict codes, float *restrict errors, float *restrict squares) {
    uint32_t sign = type == FP32 ? 0x80000000 : 0x8000;
    for (int lane = 0; lane < LANES; lane++) {
        uint32_t bits = loaded(values, begin + lane, type), is_negative = (bits & sign) != 0, code;
        float value = widened(bits & ~sign, type) / scale, rounded;
        if (form == INT4) {
            value = is_negative ? -value : value;
            rounded = rintf(value);
            rounded = rounded > 7 ? 7 : rounded;
            rounded = rounded < -8 ? -8 : rounded;
            code = (uint32_t)((int32_t)rounded + 8);
        } else if (form == E2M1) {
            code = small_float(value, 1, 1, 6, &rounded) | is_negative << 3;
        } else {
            code = small_float(value, 3, 0x1p-6f, 448, &rounded) | is_negative << 7;
        }
        codes[lane] = (uint8_t)code;
        errors[lane] += (rounded - value) * (rounded - value);
        squares[lane] += value * value;
    }
}

INLINE double sum_of(const float *each) {
    float found[LANES];
    memcpy(found, each, sizeof found);
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) found[lane] += found[lane + half];
    return found[0];
}

/* Encode numbers of one group of one row; codes of 4 bits are of an even number. */
INLINE void encode_group(const void *values, int type, int form, long begin, long end, float scale, uint8_t *codes,
                         double *squared_error, double *square) {
    float errors[LANES] = {0}, squares[LANES] = {0};
    uint8_t made[LANES];
    for (; begin < end; begin += LANES) {
        long count = end - begin < LANES ? end - begin : LANES;
        if (count == LANES) {
            encode_lanes(values, type, form, begin, scale, made, errors, squares);
        } else {
            uint32_t rest[LANES] = {0}; /* zeros are encoded exactly */
            long size = type == FP32 ? 4 : 2;
            memcpy(rest, (const char *)values + begin * size, count * size);
            encode_lanes(rest, type, form, 0, scale, made, errors, squares);
        }
        if (form == E4M3) {
            memcpy(codes + begin, made, count);
        } else {
            for (long pair = 0; pair < count / 2; pair++)
                codes[begin / 2 + pair] = made[2 * pair] | made[2 * pair + 1] << 4;
        }
    }
    *squared_error += sum_of(errors) * scale * scale;
    *square += sum_of(squares) * scale * scale;
}

INLINE void encode_all(const void *values, int type, int form, long rows, long columns, long group_rows,
                       long group_columns, const float *scales, uint8_t *codes, double *squared_errors,
                       double *squares) {
    long across = (columns + group_columns - 1) / group_columns;
    for (long row = 0; row < rows; row++) {
        double squared_error = 0, square = 0;
        for (long group = 0; group < across; group++) {
            long end = (group + 1) * group_columns < columns ? (group + 1) * group_columns : columns;
            encode_group(values, type, form, row * columns + group * group_columns, row * columns + end,
                         scales[row / group_rows * across + group], codes, &squared_error, &square);
        }
        squared_errors[row] = squared_error;
        squares[row] = square;
    }
}

void peaks(const void *values, int type, long rows, long columns, long group_rows, long group_columns, float *found) {
    if (type == BF16) find_peaks(values, BF16, rows, columns, group_rows, group_columns, found);
    if (type == FP16) find_peaks(values, FP16, rows, columns, group_rows, group_columns, found);
    if (type == FP32) find_peaks(values, FP32, rows, columns, group_rows, group_columns, found);
}

#define ENCODE(type_, form_)                                                                                 \
    if (type == type_ && form == form_)                                                                      \
        encode_all(values, type_, form_, rows, columns, group_rows, group_columns, scales, codes, squared_errors, squares)

void encode(const void *values, int type, int form, long rows, long columns, long group_rows, long group_columns,
            const float *scales, uint8_t *codes, double *squared_errors, double *squares) {
    ENCODE(BF16, E4M3);
    ENCODE(BF16, E2M1);
    ENCODE(BF16, INT4);
    ENCODE(FP16, E4M3);
    ENCODE(FP16, E2M1);
    ENCODE(FP16, INT4);
    ENCODE(FP32, E4M3);
    ENCODE(FP32, E2M1);
    ENCODE(FP32, INT4);
}
