/* C tokens at a time: a_ij = beta_i sum_c k_i e^(G_i - G_j) k_j (j < i), m_ij the same with q (j <= i),
 * u = (1 + a)^-1 beta (v - k e^G S), o = q e^G S + m u, S <- e^G_last S + (k e^(G_last - G))^T u. */
#define C 16

/* operand of a matrix product */
static inline float operand(float x) { return x; }

static inline float power(float x) { return expf(x); }

/* r [C][V] <- (1 + a)^-1 r */
static void solve(float a[C][C], int n, float r[C][V]) {
    for (int i = 1; i < n; i++)
        for (int j = 0; j < i; j++)
            for (int v = 0; v < V; v++) r[i][v] -= a[i][j] * r[j][v];
}

/* One chunk of n tokens from token t on; S [K][V]. */
static void run_chunk(const head_t *h, int64_t t, int n, float S[K][V]) {
    float q[C][K], k[C][K], G[C][K], a[C][C], m[C][C], r[C][V], p[C][V];
    for (int i = 0; i < n; i++) {
        key_row(h->q + (t + i) * h->key_stride, h->scale, q[i]);
        key_row(h->k + (t + i) * h->key_stride, 1.0f, k[i]);
        for (int c = 0; c < K; c++) G[i][c] = log_decay(h, t + i, c) + (i ? G[i - 1][c] : 0.0f);
    }
    for (int i = 0; i < n; i++)
        for (int j = 0; j <= i; j++) {
            float kk = 0.0f, qk = 0.0f;
#pragma omp simd reduction(+ : kk, qk)
            for (int c = 0; c < K; c++) {
                float e = power(G[i][c] - G[j][c]) * operand(k[j][c]);
                kk += operand(k[i][c]) * e;
                qk += operand(q[i][c]) * e;
            }
            a[i][j] = strength(h, t + i) * kk;
            m[i][j] = qk;
        }
    for (int i = 0; i < n; i++) {
        for (int v = 0; v < V; v++) r[i][v] = p[i][v] = 0.0f;
        for (int c = 0; c < K; c++) {
            float e = power(G[i][c]), ke = operand(k[i][c] * e), qe = operand(q[i][c] * e);
            for (int v = 0; v < V; v++) {
                r[i][v] += ke * S[c][v];
                p[i][v] += qe * S[c][v];
            }
        }
        for (int v = 0; v < V; v++)
            r[i][v] = strength(h, t + i) * (from_io(h->v[(t + i) * h->value_stride + v]) - r[i][v]);
    }
    solve(a, n, r);
    for (int i = 0; i < n; i++)
        for (int v = 0; v < V; v++) {
            for (int j = 0; j <= i; j++) p[i][v] += operand(m[i][j]) * operand(r[j][v]);
            h->o[(t + i) * h->value_stride + v] = to_io(p[i][v]);
        }
    for (int c = 0; c < K; c++) {
        float e = power(G[n - 1][c]);
        for (int v = 0; v < V; v++) S[c][v] *= e;
        for (int j = 0; j < n; j++) {
            float ke = operand(k[j][c] * power(G[n - 1][c] - G[j][c]));
            for (int v = 0; v < V; v++) S[c][v] += ke * operand(r[j][v]);
        }
    }
}

static void run_head(const head_t *h) {
    float S[K][V];
    for (int c = 0; c < K; c++)
        for (int v = 0; v < V; v++) S[c][v] = h->initial ? h->initial[v * K + c] : 0.0f;
    for (int64_t t = 0; t < h->length; t += C)
        run_chunk(h, t, h->length - t < C ? (int)(h->length - t) : C, S);
    if (h->final)
        for (int v = 0; v < V; v++)
            for (int c = 0; c < K; c++) h->final[v * K + c] = S[c][v];
}
