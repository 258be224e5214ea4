/* Token by token. */
static void run_head(const head_t *h) {
    float S[V][K];
    for (int v = 0; v < V; v++)
        for (int c = 0; c < K; c++) S[v][c] = h->initial ? h->initial[v * K + c] : 0.0f;
    for (int64_t t = 0; t < h->length; t++) {
        float q[K], k[K], d[K];
        key_row(h->q + t * h->key_stride, h->scale, q);
        key_row(h->k + t * h->key_stride, 1.0f, k);
        for (int c = 0; c < K; c++) d[c] = expf(log_decay(h, t, c));
        float beta = strength(h, t);
        for (int v = 0; v < V; v++) {
            float seen = 0.0f, out = 0.0f;
#pragma omp simd reduction(+ : seen)
            for (int c = 0; c < K; c++) {
                S[v][c] *= d[c];
                seen += S[v][c] * k[c];
            }
            float u = beta * (from_io(h->v[t * h->value_stride + v]) - seen);
#pragma omp simd reduction(+ : out)
            for (int c = 0; c < K; c++) {
                S[v][c] += u * k[c];
                out += S[v][c] * q[c];
            }
            h->o[t * h->value_stride + v] = to_io(out);
        }
    }
    if (h->final)
        for (int v = 0; v < V; v++)
            for (int c = 0; c < K; c++) h->final[v * K + c] = S[v][c];
}
