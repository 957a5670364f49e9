/* Attention of one token of each row to its row's pages, in fp32: the token's query and key are rotated, its key and
   value are written to the cache, and each head looks at the row's entries; attention.py calls this. All keys and
   values are written before any is read: where drafts are verified, several of the call's tokens are of one row.
   compiled.py says how many tokens a PAGE has.

   Threads take rows one after another, or parts of a row's heads where rows are few. Heads lie side by side in an entry:
   to pass all of a part at once reads memory in order, where head by head took 2 to 5 times as long (Zen 4). */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

void exp_all(float *, long, float); /* products.c */
typedef void parallel(void (*)(void *), void *, unsigned, unsigned); /* OpenMP's GOMP_parallel */

typedef struct {
    const int *tables; /* of each row's pages, table_stride apart */
    const long *positions, *windows;
    const float *sin, *cos; /* of each row, width / 2 and width; NULL: nothing is rotated */
    long table_stride, rows, width, by_pairs;
    double scale;
} rows_of_step;

typedef struct {
    const rows_of_step *step;
    const float *q, *k, *v; /* of each row, heads side by side */
    long q_stride, k_stride, v_stride;
    float *keys, *values; /* of the layer's cache, entry_stride apart */
    long entry_stride, heads, kv_heads, size;
    float *out;
    long parts, next, has_failed; /* parts: of a row's heads, for threads */
} attention;

static void rotate(const rows_of_step *s, long row, const float *x, float *to, long size) {
    memcpy(to, x, 4 * size);
    if (!s->sin) return;
    const long half = s->width / 2, apart = s->by_pairs ? 1 : half, step = s->by_pairs ? 2 : 1;
    const float *sin = s->sin + row * half, *cos = s->cos + row * s->width;
    for (long i = 0; i < half; i++) {
        const long at = i * step;
        to[at] = x[at] * cos[at] - x[at + apart] * sin[i];
        to[at + apart] = x[at + apart] * cos[at + apart] + x[at] * sin[i];
    }
}

INLINE float dot(const float *a, const float *b, long size) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < size; i++) sum += a[i] * b[i];
    return sum;
}

/* Return where an entry's head is in the cache's keys, and in its values. */
static long place_of(const attention *a, long row, long entry, long head) {
    const int page = a->step->tables[row * a->step->table_stride + entry / PAGE];
    return ((long)page * PAGE + entry % PAGE) * a->entry_stride + head * a->size;
}

/* Turn scores into weights that sum up to 1; where one is no number, none is. */
static void soften(float *scores, long length) {
    float highest = -INFINITY, sum = 0;
#pragma omp simd reduction(max : highest)
    for (long i = 0; i < length; i++) highest = scores[i] > highest ? scores[i] : highest;
    exp_all(scores, length, highest);
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < length; i++) sum += scores[i];
    const float inverse = 1 / sum;
    for (long i = 0; i < length; i++) scores[i] *= inverse;
}

/* Attend with the queries that share some of a row's heads of keys and values, from the first to before the last. */
INLINE void attend_sized(const attention *a, long row, long first, long last, long size) {
    const rows_of_step *s = a->step;
    const long group = a->heads / a->kv_heads, window = s->windows[row], position = s->positions[row];
    const long length = position + 1 < window ? position + 1 : window, count = (last - first) * group;
    float *scores = malloc(4 * count * (length + size)), *queries = scores + count * length;
    float *out = a->out + (row * a->heads + first * group) * size;
    if (!scores) {
        __atomic_store_n(&((attention *)a)->has_failed, 1, __ATOMIC_RELAXED);
        return;
    }
    for (long i = 0; i < count; i++)
        rotate(s, row, a->q + row * a->q_stride + (first * group + i) * size, queries + i * size, size);
    for (long entry = 0; entry < length; entry++) {
        const float *key = a->keys + place_of(a, row, entry, first);
        for (long i = 0; i < count; key += size)
            for (const long end = i + group; i < end; i++)
                scores[i * length + entry] = (float)s->scale * dot(queries + i * size, key, size);
    }
    for (long i = 0; i < count; i++) soften(scores + i * length, length);
    memset(out, 0, 4 * count * size);
    for (long entry = 0; entry < length; entry++) {
        const float *value = a->values + place_of(a, row, entry, first);
        for (long i = 0; i < count; value += size)
            for (const long end = i + group; i < end; i++) {
                const float weight = scores[i * length + entry];
                float *to = out + i * size;
#pragma omp simd
                for (long n = 0; n < size; n++) to[n] += weight * value[n];
            }
    }
    free(scores);
}

/* With a width that the compiler knows, a quarter of the time goes. */
static void attend_heads(const attention *a, long row, long first, long last) {
    if (a->size == 64) attend_sized(a, row, first, last, 64);
    else if (a->size == 128) attend_sized(a, row, first, last, 128);
    else attend_sized(a, row, first, last, a->size);
}

static void write_entry(const attention *a, long row, long head) {
    const long size = a->size, own = place_of(a, row, a->step->positions[row] % a->step->windows[row], head);
    rotate(a->step, row, a->k + row * a->k_stride + head * size, a->keys + own, size);
    memcpy(a->values + own, a->v + row * a->v_stride + head * size, 4 * size);
}

static void work(void *given) {
    attention *a = given;
    for (long job; (job = __atomic_fetch_add(&a->next, 1, __ATOMIC_RELAXED)) < a->step->rows * a->parts;) {
        const long part = job % a->parts;
        attend_heads(a, job / a->parts, part * a->kv_heads / a->parts, (part + 1) * a->kv_heads / a->parts);
    }
}

int attend(parallel *run, int threads, const rows_of_step *step, const float *q, long q_stride, const float *k,
           long k_stride, const float *v, long v_stride, float *keys, float *values, long entry_stride, long heads,
           long kv_heads, long size, float *out) {
    const long wanted = (2 * threads + step->rows - 1) / step->rows, parts = wanted < kv_heads ? wanted : kv_heads;
    attention a = {step, q, k, v, q_stride, k_stride, v_stride, keys, values, entry_stride, heads, kv_heads, size, out,
                   threads > 1 ? parts : 1};
    for (long job = 0; job < step->rows * kv_heads; job++) write_entry(&a, job / kv_heads, job % kv_heads);
    if (threads > 1) run(work, &a, threads, 0);
    else work(&a);
    return a.has_failed;
}
