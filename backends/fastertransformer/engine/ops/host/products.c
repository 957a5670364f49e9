/* Products of fp32 activations with matrices that lie in memory as fp32, bf16, fp16 or int8, on an x86-64 CPU.

   A matrix, [outputs, inputs], lies in panels of WIDTH outputs, [panels][inputs][WIDTH], the last one filled up with
   zeros: a product reads it once, from its first number to its last, and widens each on the way into a register. Where
   the processor multiplies pairs of bf16 (PAIRS), bf16 lies as [panels][inputs / 2][WIDTH][2], and activations are
   rounded to bf16. Where it multiplies four bytes at once (QUADS), int8 lies as [panels][inputs / 4][WIDTH][4], filled
   up with zeros, and DEPTH activations of a row share a scale: their largest is 32512, and each is rounded to 256 a + b
   with bytes a and b. A part's sum is exact then, and what is rounded is 1/256 of what the weights' own rounding is.
   To widen each number to fp32 takes six instructions where two bytes of 64 inputs take two.

   Threads take panels one after another; panels.py calls this. The processor fetches a panel's memory ahead by itself:
   to ask for it too made one row 8 to 15% slower (Zen 4).

   A row's sums are made in one order, so that they are the same whatever other rows there are. */

#include <immintrin.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#define MOST_ROWS 12 /* of a tile: its sums, two vectors of each row, stay in registers */
#define MORE_TILES TILE(5) TILE(6) TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define LANES 8
#define MOST_ROWS 4
#define MORE_TILES
#else
#error "needs AVX2, FMA and F16C"
#endif
#ifdef __AVX512BF16__
#define PAIRS 1
#else
#define PAIRS 0
#endif
#ifdef __AVX512VNNI__
#define QUADS 1
#else
#define QUADS 0
#endif
#define WIDTH (2 * LANES)
#define DEPTH 256       /* inputs whose part of a panel stays in a core's cache while tiles of rows pass */
#define ROWS_AT_ONCE 96 /* of a job */
#define QUAD_ROWS 6     /* of a tile of QUADS: four vectors of sums each */
#define LARGEST 32512   /* 256 * 127 */
#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 16")

typedef float vector __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int four_bytes __attribute__((may_alias));
typedef void parallel(void (*)(void *), void *, unsigned, unsigned); /* OpenMP's GOMP_parallel */
enum { FP32, BF16, FP16, INT8 };
enum { NONE, RELU, SILU, GELU };

typedef struct {
    const char *numbers;
    const float *scales, *bias; /* of each output, as many as panels hold; NULL: there are none */
    long inputs, outputs, type;
} matrix;

typedef struct {
    const matrix *matrix, *gate; /* gate: what the first one's activated product is multiplied by, or NULL */
    const float *x;
    float *y;
    const float *norm, *norm_bias;
    float eps;
    int is_rms, activation, adds;
    void *prepared;
    long rows, next_row, next_job;
} product;

INLINE long size_of(long type) { return type == FP32 ? 4 : type == INT8 ? 1 : 2; }

/* A row as a product wants it: fp32, pairs of bf16, or the parts of QUADS. */
INLINE int is_paired(const matrix *m) { return PAIRS && m->type == BF16; }
INLINE int is_in_quads(const matrix *m) { return QUADS && m->type == INT8; }

typedef struct {
    float scale;
    int offset; /* what 128 too much in each weight adds to the sums */
    signed char high[DEPTH], low[DEPTH];
} part;

INLINE long row_bytes(const matrix *m) {
    if (is_in_quads(m)) return (m->inputs + DEPTH - 1) / DEPTH * sizeof(part);
    return m->inputs * (is_paired(m) ? 2 : 4);
}

INLINE vector widened(const char *from, int type) {
    if (type == FP32) return *(const vector *)from;
#if LANES == 16
    if (type == INT8) return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
    const __m256i halves = _mm256_loadu_si256((const __m256i *)from);
    if (type == BF16) return (vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
    return _mm512_cvtph_ps(halves);
#else
    if (type == INT8) return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
    const __m128i halves = _mm_loadu_si128((const __m128i *)from);
    if (type == BF16) return (vector)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
    return _mm256_cvtph_ps(halves);
#endif
}

/* Add some rows' products with a part of a panel to their sums: x is of fp32, or of pairs of bf16. A part has a sum of
   its own, so that what is rounded grows with the root of a part and not of all inputs. */
INLINE void add_tile(int rows, int type, const float *x, long stride, const char *panel, long steps, vector sums[][2]) {
    const long step = WIDTH * (PAIRS && type == BF16 ? 4 : size_of(type));
    vector own[MOST_ROWS][2];
    UNROLLED for (int row = 0; row < rows; row++) own[row][0] = own[row][1] = (vector){0};
    for (long k = 0; k < steps; k++) {
        const char *at = panel + k * step;
#if PAIRS
        if (type == BF16) {
            const __m512bh first = (__m512bh)_mm512_loadu_si512(at), second = (__m512bh)_mm512_loadu_si512(at + 64);
            UNROLLED for (int row = 0; row < rows; row++) {
                const __m512bh pair = (__m512bh)_mm512_set1_ps(x[row * stride + k]);
                own[row][0] = _mm512_dpbf16_ps(own[row][0], pair, first);
                own[row][1] = _mm512_dpbf16_ps(own[row][1], pair, second);
            }
            continue;
        }
#endif
        const vector first = widened(at, type), second = widened(at + step / 2, type);
        UNROLLED for (int row = 0; row < rows; row++) {
            own[row][0] += x[row * stride + k] * first;
            own[row][1] += x[row * stride + k] * second;
        }
    }
    UNROLLED for (int row = 0; row < rows; row++) sums[row][0] += own[row][0], sums[row][1] += own[row][1];
}

#if QUADS
/* _mm512_dpbusd_epi32: from that, GCC 12 keeps half of a tile's sums on the stack, and 60 rows take twice the time. */
INLINE void add_fours(__m512i *sum, __m512i unsigned_ones, __m512i signed_ones) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(unsigned_ones), "v"(signed_ones));
}

/* Add some rows' products with a part of a panel, of bytes, to their sums. */
INLINE void add_quads(int rows, const char *x, long stride, const char *panel, long steps, vector sums[][2]) {
    __m512i own[QUAD_ROWS][4];
    UNROLLED for (int row = 0; row < rows; row++) UNROLLED for (int i = 0; i < 4; i++) own[row][i] = _mm512_setzero_si512();
    for (long k = 0; k < steps; k++) { /* the instruction wants one side without signs: 128 more than the weights */
        const __m512i first = _mm512_xor_si512(_mm512_loadu_si512(panel + k * 128), _mm512_set1_epi8(-128));
        const __m512i second = _mm512_xor_si512(_mm512_loadu_si512(panel + k * 128 + 64), _mm512_set1_epi8(-128));
        UNROLLED for (int row = 0; row < rows; row++) {
            const part *from = (const part *)(x + row * stride);
            const __m512i high = _mm512_set1_epi32(((const four_bytes *)from->high)[k]);
            const __m512i low = _mm512_set1_epi32(((const four_bytes *)from->low)[k]);
            add_fours(&own[row][0], first, high), add_fours(&own[row][1], second, high);
            add_fours(&own[row][2], first, low), add_fours(&own[row][3], second, low);
        }
    }
    UNROLLED for (int row = 0; row < rows; row++) {
        const part *from = (const part *)(x + row * stride);
        UNROLLED for (int half = 0; half < 2; half++) {
            const __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(own[row][half], 8), own[row][half + 2]);
            sums[row][half] += from->scale * _mm512_cvtepi32_ps(_mm512_sub_epi32(whole, _mm512_set1_epi32(from->offset)));
        }
    }
}

#define QUAD(n) case n: add_quads(n, x, stride, panel, steps, sums); break;
static void quads(int rows, const char *x, long stride, const char *panel, long steps, vector sums[][2]) {
    switch (rows) { QUAD(1) QUAD(2) QUAD(3) QUAD(4) QUAD(5) QUAD(6) }
}

/* Round a part of a row to two bytes each; what is not finite makes the scale, and so the sum, no number. */
static void round_part(const float *x, long count, part *to) {
    float most = 0, finite = 0;
#pragma omp simd reduction(max : most) reduction(+ : finite)
    for (long i = 0; i < count; i++) most = fmaxf(most, fabsf(x[i])), finite += x[i] * 0;
    const float inverse = most > 1e-30f && finite == 0 ? LARGEST / most : 0;
    __m512i sum = _mm512_setzero_si512();
    for (long i = 0; i < DEPTH; i += LANES) {
        const __mmask16 mask = i >= count ? 0 : count - i < LANES ? (1 << (count - i)) - 1 : 0xFFFF;
        const __m512i whole = _mm512_cvtps_epi32(_mm512_maskz_loadu_ps(mask, x + i) * inverse);
        const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
        _mm_storeu_si128((__m128i *)(to->high + i), _mm512_cvtepi32_epi8(high));
        _mm_storeu_si128((__m128i *)(to->low + i), _mm512_cvtepi32_epi8(whole)); /* its last byte, with a sign */
        sum = _mm512_add_epi32(sum, whole);
    }
    to->scale = finite == 0 ? (inverse ? most / LARGEST : 0) : NAN;
    to->offset = 128 * _mm512_reduce_add_epi32(sum);
}
#endif

#define TILE(n) case n: add_tile(n, type, x, stride, panel, steps, sums); break;
#define TILES(name, of)                                                                                               \
    static void name(int rows, const float *x, long stride, const char *panel, long steps, vector sums[][2]) {         \
        enum { type = of };                                                                                            \
        switch (rows) { TILE(1) TILE(2) TILE(3) TILE(4) MORE_TILES }                                                   \
    }
TILES(tiles_fp32, FP32)
TILES(tiles_bf16, BF16)
TILES(tiles_fp16, FP16)
TILES(tiles_int8, INT8)

/* Multiply some rows, as row_bytes says, by a panel. */
static void multiply_panel(const matrix *m, long panel, const char *x, long rows, vector sums[][2]) {
    static void (*const tiles[])(int, const float *, long, const char *, long, vector[][2]) = {
        tiles_fp32, tiles_bf16, tiles_fp16, tiles_int8};
    const int in_quads = is_in_quads(m), most = in_quads ? QUAD_ROWS : MOST_ROWS;
    const long each = in_quads ? 4 : is_paired(m) ? 2 : 1, steps = (m->inputs + each - 1) / each;
    const long step = WIDTH * each * size_of(m->type), stride = row_bytes(m), long_part = in_quads ? DEPTH / 4 : DEPTH;
    const char *numbers = m->numbers + panel * steps * step;
    memset(sums, 0, sizeof(sums[0]) * rows);
    for (long k = 0; k < steps; k += long_part) {
        const long depth = steps - k < long_part ? steps - k : long_part;
        long tiles_left = (rows + most - 1) / most, count;
        for (long row = 0; row < rows; row += count, tiles_left--) {
            count = (rows - row + tiles_left - 1) / tiles_left;
            const char *from = x + row * stride;
#if QUADS
            if (in_quads) {
                quads(count, from + k / long_part * sizeof(part), stride, numbers + k * step, depth, sums + row);
                continue;
            }
#endif
            tiles[m->type](count, (const float *)from + k, steps, numbers + k * step, depth, sums + row);
        }
    }
    for (long row = 0; row < rows; row++)
        for (int half = 0; half < 2; half++) {
            const long column = panel * WIDTH + half * LANES;
            if (m->scales) sums[row][half] *= *(const vector *)(m->scales + column);
            if (m->bias) sums[row][half] += *(const vector *)(m->bias + column);
        }
}

INLINE vector exp_of(vector x) { /* within 2 units in the last place, between e^-88 and e^88 */
#if LANES == 16
    x = _mm512_max_ps(_mm512_set1_ps(-88), _mm512_min_ps(_mm512_set1_ps(88), x));
    const __m512i n = _mm512_cvtps_epi32(x * 1.44269504f);
    const vector whole = _mm512_cvtepi32_ps(n), power = (vector)_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23);
#else
    x = _mm256_max_ps(_mm256_set1_ps(-88), _mm256_min_ps(_mm256_set1_ps(88), x));
    const __m256i n = _mm256_cvtps_epi32(x * 1.44269504f);
    const vector whole = _mm256_cvtepi32_ps(n), power = (vector)_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23);
#endif
    const vector r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    vector sum = r * 1.9875691500e-4f + 1.3981999507e-3f;
    sum = sum * r + 8.3334519073e-3f;
    sum = sum * r + 4.1665795894e-2f;
    sum = sum * r + 1.6666665459e-1f;
    sum = sum * r + 5.0000001201e-1f;
    return (sum * r * r + r + 1) * power;
}

/* x = e^(x - less) */
void exp_all(float *x, long count, float less) {
    for (; count >= LANES; count -= LANES, x += LANES) *(vector *)x = exp_of(*(vector *)x - less);
    vector rest = {0};
    memcpy(&rest, x, 4 * count);
    rest = exp_of(rest - less);
    memcpy(x, &rest, 4 * count);
}

INLINE vector activated(vector x, int activation) {
    if (activation == SILU) return x / (1 + exp_of(-x));
    if (activation == GELU) return x / (1 + exp_of(-1.5957691216f * (x + 0.044715f * x * x * x))); /* by tanh */
    if (activation == RELU) return (vector)(~(x < 0) & (__typeof__(x < 0))x); /* what is no number stays none */
    return x;
}

static void norm_row(const product *p, const float *x, float *to) {
    const long width = p->matrix->inputs;
    float mean = 0, squares = 0;
    if (!p->is_rms) {
#pragma omp simd reduction(+ : mean)
        for (long i = 0; i < width; i++) mean += x[i];
        mean /= width;
    }
#pragma omp simd reduction(+ : squares)
    for (long i = 0; i < width; i++) squares += (x[i] - mean) * (x[i] - mean);
    const float factor = 1 / sqrtf(squares / width + p->eps);
    for (long i = 0; i < width; i++)
        to[i] = (x[i] - mean) * factor * p->norm[i] + (p->norm_bias ? p->norm_bias[i] : 0);
}

/* Norm rows, and round them to pairs of bf16 or to parts of bytes, as far as a product wants it. */
static void prepare(void *given) {
    product *p = given;
    const long width = p->matrix->inputs;
    const int is_rounded = is_paired(p->matrix) || is_in_quads(p->matrix);
    float *scratch = p->norm && is_rounded ? malloc(4 * width) : NULL;
    for (long row; (row = __atomic_fetch_add(&p->next_row, 1, __ATOMIC_RELAXED)) < p->rows;) {
        const float *x = p->x + row * width;
        char *prepared = (char *)p->prepared + row * row_bytes(p->matrix);
        float *to = scratch ? scratch : (float *)prepared;
        if (p->norm) norm_row(p, x, to), x = to;
#if QUADS
        if (is_in_quads(p->matrix))
            for (long i = 0; i < width; i += DEPTH)
                round_part(x + i, width - i < DEPTH ? width - i : DEPTH, (part *)prepared + i / DEPTH);
#endif
#if PAIRS
        if (is_paired(p->matrix)) {
            for (long i = 0; i < width; i += LANES) {
                const __mmask16 mask = width - i < LANES ? (1 << (width - i)) - 1 : 0xFFFF;
                const __m256bh some = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, x + i));
                _mm256_mask_storeu_epi16(prepared + 2 * i, mask, (__m256i)some);
            }
        }
#endif
    }
    free(scratch);
}

static void compute(void *given) {
    product *p = given;
    const long outputs = p->matrix->outputs, panels = (outputs + WIDTH - 1) / WIDTH;
    const long parts = (p->rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    vector sums[ROWS_AT_ONCE][2], gates[ROWS_AT_ONCE][2];
    for (long job; (job = __atomic_fetch_add(&p->next_job, 1, __ATOMIC_RELAXED)) < panels * parts;) {
        const long panel = job / parts, begin = job % parts * ROWS_AT_ONCE, column = panel * WIDTH;
        const long rows = p->rows - begin < ROWS_AT_ONCE ? p->rows - begin : ROWS_AT_ONCE;
        const long width = outputs - column < WIDTH ? outputs - column : WIDTH;
        const char *x = (const char *)(p->prepared ? p->prepared : p->x) + begin * row_bytes(p->matrix);
        multiply_panel(p->matrix, panel, x, rows, sums);
        if (p->gate) multiply_panel(p->gate, panel, x, rows, gates);
        for (long row = 0; row < rows; row++) {
            float *y = p->y + (begin + row) * outputs + column;
            vector results[2];
            for (int half = 0; half < 2; half++) {
                results[half] = activated(sums[row][half], p->activation);
                if (p->gate) results[half] *= gates[row][half];
            }
            for (long i = 0; i < width; i++) y[i] = ((float *)results)[i] + (p->adds ? y[i] : 0);
        }
    }
}

int panel_width(void) { return WIDTH; }
int multiplies_pairs(void) { return PAIRS; }
int multiplies_quads(void) { return QUADS; }

/* y = activation(norm(x) @ matrix) * (norm(x) @ gate), or that is added to y. */
int multiply(parallel *run, int threads, const matrix *m, const matrix *gate, const float *x, long rows, const float *norm,
             const float *norm_bias, double eps, int is_rms, int activation, float *y, int adds) {
    product p = {m, gate, x, y, norm, norm_bias, eps, is_rms, activation, adds, NULL, rows, 0, 0};
    const int is_prepared = norm || is_paired(m) || is_in_quads(m);
    if (is_prepared && !(p.prepared = malloc(rows * row_bytes(m)))) return 1;
    if (is_prepared && threads > 1 && rows > 8) run(prepare, &p, threads, 0);
    else if (is_prepared) prepare(&p);
    if (threads > 1) run(compute, &p, threads, 0);
    else compute(&p);
    free(p.prepared);
    return 0;
}
