/* A decode step's layers one after another, each as products.c and attention.c compute it; layers.py calls this. What a
   layer costs beside its numbers, the calls from Python and the tensors between them, is then paid once in a step. */

typedef void parallel(void (*)(void *), void *, unsigned, unsigned); /* OpenMP's GOMP_parallel */
typedef struct matrix matrix;
typedef struct rows_of_step rows_of_step;

typedef struct {
    const float *weight, *bias;
    double eps;
    long is_rms;
} norm;

typedef struct {
    const matrix *qkv, *out, *into, *gate, *down; /* gate: NULL where there is none */
    norm before, between;
    float *keys, *values;
} layer;

int multiply(parallel *, int, const matrix *, const matrix *, const float *, long, const float *, const float *, double, int,
             int, float *, int);
int attend(parallel *, int, const rows_of_step *, const float *, long, const float *, long, const float *, long, float *,
           float *, long, long, long, long, float *);

/* x, of as many rows as the step has, is overwritten; scratch holds a layer's queries, keys and values, what attention
   makes of them, and the feed-forward's inner numbers. */
int run_layers(parallel *run, int threads, int attending, const rows_of_step *step, const layer *layers, long count,
               float *x, long rows, long heads, long kv_heads, long size, int activation, float *scratch) {
    const long width = (heads + 2 * kv_heads) * size;
    float *keys = scratch + heads * size, *values = keys + kv_heads * size;
    float *attended = scratch + rows * width, *inner = attended + rows * heads * size;
    for (const layer *l = layers; l < layers + count; l++) {
        const norm *n = &l->before, *m = &l->between;
        if (multiply(run, threads, l->qkv, 0, x, rows, n->weight, n->bias, n->eps, n->is_rms, 0, scratch, 0) ||
            attend(run, attending, step, scratch, width, keys, width, values, width, l->keys, l->values, kv_heads * size,
                   heads, kv_heads, size, attended) ||
            multiply(run, threads, l->out, 0, attended, rows, 0, 0, 0, 0, 0, x, 1) ||
            multiply(run, threads, l->into, l->gate, x, rows, m->weight, m->bias, m->eps, m->is_rms, activation, inner, 0) ||
            multiply(run, threads, l->down, 0, inner, rows, 0, 0, 0, 0, 0, x, 1))
            return 1;
    }
    return 0;
}
