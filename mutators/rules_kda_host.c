// Other ways to write single stages of search_space/templates/kda_host.c, for the mutator `rules`.
//
//     // RULE <stage> <name> [knob=value ...]
//     // what is different, in one line
//     the whole function, with helpers of its own where it needs any
//
// knob=value: the stage is compiled only where the knobs say so. Helpers carry the stage's name, so that any
// two rules fit into one source. The order is that of the stages in the template.

// RULE exponential base_two
// 2^n 2^f with log2(e) in two parts: one step of range reduction fewer
static inline vf exponential(vf x) {
    vi normal = x >= -86.6f;
    x = pick(normal, x, splat(-86.6f));
    x = pick(x <= 88.0f, x, splat(88.0f));
    vf shifted = x * 1.44269502f + 12582912.0f;
    vi n = (vi)shifted - 0x4b400000;
    vf f = x * 1.44269502f - (shifted - 12582912.0f);
    f = f + x * 1.92596299e-8f;
    vf p = f * 1.53532586e-4f + 1.33990031e-3f;
    p = p * f + 9.61843878e-3f;
    p = p * f + 5.55033199e-2f;
    p = p * f + 2.40226477e-1f;
    p = p * f + 6.93147182e-1f;
    p = p * f + 1.0f;
    return (vf)(normal & ((vi)p + (n << 23)));
}

// RULE exponential estrin
// the polynomial by Estrin's scheme: half the chain of dependent operations
static inline vf exponential(vf x) {
    vi normal = x >= -86.6f;
    x = pick(normal, x, splat(-86.6f));
    x = pick(x <= 88.0f, x, splat(88.0f));
    vf shifted = x * 1.44269504f + 12582912.0f;
    vi n = (vi)shifted - 0x4b400000;
    vf whole = shifted - 12582912.0f;
    vf r = x - whole * 0.693145752f;
    r = r - whole * 1.42860677e-6f;
    vf r2 = r * r;
    vf low = r * 1.66665182e-1f + 0.5f;
    vf high = r * 8.36895313e-3f + 4.16662060e-2f;
    high = r2 * 1.39506021e-3f + high;
    vf p = (high * r2 + low) * r2 + r + 1.0f;
    return (vf)(normal & ((vi)p + (n << 23)));
}

// RULE exponential fourth_power
// exp(x / 4) by a shorter polynomial, squared twice: three coefficients fewer, four times the rounding error
static inline vf exponential(vf x) {
    vi normal = x >= -86.6f;
    x = pick(normal, x, splat(-86.6f));
    x = pick(x <= 88.0f, x, splat(88.0f));
    vf shifted = x * 1.44269504f + 12582912.0f;
    vi n = (vi)shifted - 0x4b400000;
    vf whole = shifted - 12582912.0f;
    vf r = x - whole * 0.693145752f;
    r = (r - whole * 1.42860677e-6f) * 0.25f;
    vf p = r * 4.16825637e-2f + 1.66721150e-1f;
    p = p * r + 0.499999970f;
    p = p * (r * r) + r; /* exp - 1, so that squaring loses nothing near 0 */
    p = p * p + 2.0f * p;
    p = p * p + 2.0f * p + 1.0f;
    return (vf)(normal & ((vi)p + (n << 23)));
}

// RULE exponential libmvec
// glibc's vector expf (4 ulp); needs libmvec at link time
#if LANES == 16
extern vf _ZGVeN16v_expf(vf);
#define EXPONENTIAL_LIBMVEC _ZGVeN16v_expf
#elif LANES == 8
extern vf _ZGVdN8v_expf(vf);
#define EXPONENTIAL_LIBMVEC _ZGVdN8v_expf
#else
extern vf _ZGVbN4v_expf(vf);
#define EXPONENTIAL_LIBMVEC _ZGVbN4v_expf
#endif
static inline vf exponential(vf x) { return EXPONENTIAL_LIBMVEC(x); }

// RULE key_row registers
// the row stays in registers between norm and scaling, squares in four partial sums
static inline void key_row(const io_t *x, float scale, float *row) {
    vf part[KV], squares[4] = {0};
    for (int c = 0; c < KV; c++) {
        part[c] = load_io(x + c * LANES);
        squares[c % 4] += part[c] * part[c];
    }
#if PRODUCTION
    scale /= sqrtf(sum((squares[0] + squares[1]) + (squares[2] + squares[3])) + 1e-6f);
#endif
    for (int c = 0; c < KV; c++) store(row + c * LANES, part[c] * scale);
}

// RULE decay_row two_passes
// all gates first, then all exponentials: independent chains side by side
static inline void decay_row(const gate_t *g, const float *bias, float rate, float lower_bound, float *d) {
    for (int c = 0; c < K; c += LANES) {
        vf x = load_gate(g + c);
#if PRODUCTION
        x = exponential((x + load(bias + c)) * -rate);
#endif
        store(d + c, x);
    }
    for (int c = 0; c < K; c += LANES) {
        vf x = load(d + c);
#if PRODUCTION
        x = lower_bound / (1.0f + x);
#endif
        store(d + c, exponential(x));
    }
}

// RULE load_state transposed
// 8 x 8 blocks transposed in registers, zeros by memset
static inline void load_state_8x8(const float *restrict from, float *restrict to) {
    typedef float v8 __attribute__((vector_size(32)));
    typedef float v8_mem __attribute__((vector_size(32), aligned(4), may_alias));
    v8 r[8], t[8];
    for (int i = 0; i < 8; i++) r[i] = *(const v8_mem *)(from + i * K);
    for (int i = 0; i < 8; i += 2) {
        t[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        t[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = i; j < i + 2; j++) {
            r[j] = __builtin_shufflevector(t[j], t[j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            r[j + 2] = __builtin_shufflevector(t[j], t[j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int i = 0; i < 4; i++) {
        *(v8_mem *)(to + i * STRIDE) = __builtin_shufflevector(r[i], r[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        *(v8_mem *)(to + (i + 4) * STRIDE) = __builtin_shufflevector(r[i], r[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}
static inline void load_state(const float *restrict from, float *restrict s) {
    if (!from) {
        for (int k = 0; k < K; k++) memset(s + k * STRIDE, 0, VALUE_TILE * sizeof(float));
        return;
    }
    ROLLED for (int c = 0; c < VALUE_TILE; c += 8)
        ROLLED for (int k = 0; k < K; k += 8) load_state_8x8(from + c * K + k, s + k * STRIDE + c);
}

// RULE load_state row_order
// reads each row of K to its end; the scattered side are the writes, into the first-level cache
static inline void load_state(const float *restrict from, float *restrict s) {
    ROLLED for (int c = 0; c < VALUE_TILE; c++)
        ROLLED for (int k = 0; k < K; k++) s[k * STRIDE + c] = from ? from[c * K + k] : 0.0f;
}

// RULE store_state transposed
// 8 x 8 blocks transposed in registers
static inline void store_state_8x8(const float *restrict from, float *restrict to) {
    typedef float v8 __attribute__((vector_size(32)));
    typedef float v8_mem __attribute__((vector_size(32), aligned(4), may_alias));
    v8 r[8], t[8];
    for (int i = 0; i < 8; i++) r[i] = *(const v8_mem *)(from + i * STRIDE);
    for (int i = 0; i < 8; i += 2) {
        t[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        t[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = i; j < i + 2; j++) {
            r[j] = __builtin_shufflevector(t[j], t[j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            r[j + 2] = __builtin_shufflevector(t[j], t[j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int i = 0; i < 4; i++) {
        *(v8_mem *)(to + i * K) = __builtin_shufflevector(r[i], r[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        *(v8_mem *)(to + (i + 4) * K) = __builtin_shufflevector(r[i], r[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}
static inline void store_state(const float *restrict s, float *restrict to) {
    ROLLED for (int c = 0; c < VALUE_TILE; c += 8)
        ROLLED for (int k = 0; k < K; k += 8) store_state_8x8(s + k * STRIDE + c, to + c * K + k);
}

// RULE delta column_order algorithm=recurrent
// one vector of columns at a time through all keys: fewer live sums, more of them per column
static inline void delta(const float *restrict s, const float *restrict kd, const vf *v, float beta, vf *u) {
    for (int n = 0; n < NV; n++) {
        vf acc[8] = {0};
        for (int k = 0; k < K; k += 8)
            for (int j = 0; j < 8; j++) acc[j] += load(s + (k + j) * STRIDE + n * LANES) * kd[k + j];
        vf total = ((acc[0] + acc[1]) + (acc[2] + acc[3])) + ((acc[4] + acc[5]) + (acc[6] + acc[7]));
        u[n] = (v[n] - total) * beta;
    }
}

// RULE update decayed_read algorithm=recurrent
// o = S_decayed^T q + (q . k) u: the sums do not wait for the written row
static inline void update(float *restrict s, const float *restrict d, const float *restrict k_row,
                          const float *restrict q, const vf *u, vf *o) {
    vf acc[KEY_UNROLL][NV] = {0}, products = {0};
    for (int k = 0; k < K; k += LANES) products += load(q + k) * load(k_row + k);
    for (int k = 0; k < K; k += KEY_UNROLL)
        for (int j = 0; j < KEY_UNROLL; j++)
            for (int n = 0; n < NV; n++) {
                float *at = s + (k + j) * STRIDE + n * LANES;
                vf row = load(at) * d[k + j];
                acc[j][n] += row * q[k + j];
                store(at, row + u[n] * k_row[k + j]);
            }
    float qk = sum(products);
    for (int n = 0; n < NV; n++) {
        o[n] = u[n] * qk;
        for (int j = 0; j < KEY_UNROLL; j++) o[n] += acc[j][n];
    }
}

// RULE update column_order algorithm=recurrent
// one vector of columns at a time through all keys, its u in one register
static inline void update(float *restrict s, const float *restrict d, const float *restrict k_row,
                          const float *restrict q, const vf *u, vf *o) {
    for (int n = 0; n < NV; n++) {
        vf acc[4] = {0}, un = u[n];
        for (int k = 0; k < K; k += 4)
            for (int j = 0; j < 4; j++) {
                float *at = s + (k + j) * STRIDE + n * LANES;
                vf row = load(at) * d[k + j] + un * k_row[k + j];
                store(at, row);
                acc[j] += row * q[k + j];
            }
        o[n] = (acc[0] + acc[1]) + (acc[2] + acc[3]);
    }
}

// RULE scores two_rows algorithm=chunked
// running products throughout, two rows at once: shared loads, four sums reduced together
static inline void scores(const float *restrict q, const float *restrict k, const float *restrict d,
                          const float *restrict beta, int rows, float *restrict a, float *restrict m) {
    float four[4];
    for (int j = 0; j < rows; j++) {
        vf column[KV], diagonal = {0};
        for (int x = 0; x < KV; x++) {
            column[x] = load(k + j * K + x * LANES);
            diagonal += column[x] * load(q + j * K + x * LANES);
        }
        m[j * CHUNK + j] = sum(diagonal);
        int i = j + 1;
        for (; i + 1 < rows; i += 2) {
            vf ka = {0}, qa = {0}, kb = {0}, qb = {0};
            for (int x = 0; x < KV; x++) {
                int at = i * K + x * LANES;
                column[x] *= load(d + at);
                ka += column[x] * load(k + at);
                qa += column[x] * load(q + at);
                column[x] *= load(d + at + K);
                kb += column[x] * load(k + at + K);
                qb += column[x] * load(q + at + K);
            }
            sum4(ka, qa, kb, qb, four);
            a[i * CHUNK + j] = beta[i] * four[0];
            m[i * CHUNK + j] = four[1];
            a[(i + 1) * CHUNK + j] = beta[i + 1] * four[2];
            m[(i + 1) * CHUNK + j] = four[3];
        }
        if (i < rows) {
            vf ka = {0}, qa = {0};
            for (int x = 0; x < KV; x++) {
                int at = i * K + x * LANES;
                column[x] *= load(d + at);
                ka += column[x] * load(k + at);
                qa += column[x] * load(q + at);
            }
            a[i * CHUNK + j] = beta[i] * sum(ka);
            m[i * CHUNK + j] = sum(qa);
        }
    }
}

// RULE factors column_order algorithm=chunked
// one vector of channels at a time through all tokens, its running product in one register
static inline void factors(const float *restrict q, const float *restrict k, const float *restrict d, int rows,
                           float *restrict kw, float *restrict qg, float *restrict kg, float *restrict end) {
    for (int c = 0; c < K; c += LANES) {
        vf open = splat(1.0f);
        for (int at = c; at < rows * K; at += K) {
            open = flush(open * load(d + at));
            store(kw + at, load(k + at) * open);
            store(qg + at, load(q + at) * open);
        }
        store(end + c, open);
        open = splat(1.0f);
        for (int at = (rows - 1) * K + c; at >= 0; at -= K) {
            store(kg + at, load(k + at) * open);
            open = flush(open * load(d + at));
        }
    }
}

// RULE factors unflushed algorithm=chunked
// products may become denormal: two operations fewer per element, slow where gates are strong and chunks long
static inline void factors(const float *restrict q, const float *restrict k, const float *restrict d, int rows,
                           float *restrict kw, float *restrict qg, float *restrict kg, float *restrict end) {
    vf open[KV], close[KV];
    for (int x = 0; x < KV; x++) open[x] = close[x] = splat(1.0f);
    for (int i = 0; i < rows; i++)
        for (int x = 0; x < KV; x++) {
            int at = i * K + x * LANES, back = (rows - 1 - i) * K + x * LANES;
            open[x] *= load(d + at);
            store(kw + at, load(k + at) * open[x]);
            store(qg + at, load(q + at) * open[x]);
            store(kg + back, load(k + back) * close[x]);
            close[x] *= load(d + back);
        }
    for (int x = 0; x < KV; x++) store(end + x * LANES, open[x]);
}

// RULE residual one_product_at_a_time algorithm=chunked
// kw S and qg S in two sweeps over the state: half the accumulators, so wider row blocks stay in registers
static inline void residual_product(const float *restrict s, const float *restrict rows_of_k, vf acc[ROW_BLOCK][NV]) {
    for (int j = 0; j < ROW_BLOCK; j++)
        for (int n = 0; n < NV; n++) acc[j][n] = (vf){0};
    for (int k = 0; k < K; k++)
        for (int n = 0; n < NV; n++) {
            vf row = load(s + k * STRIDE + n * LANES);
            for (int j = 0; j < ROW_BLOCK; j++) acc[j][n] += row * rows_of_k[j * K + k];
        }
}
static inline void residual(const float *restrict s, const float *restrict kw, const float *restrict qg,
                            const float *restrict beta, int rows, vf *restrict r, vf *restrict p) {
    for (int i = 0; i < rows; i += ROW_BLOCK) {
        vf acc[ROW_BLOCK][NV];
        residual_product(s, kw + i * K, acc);
        for (int j = 0; j < ROW_BLOCK; j++)
            for (int n = 0; n < NV; n++) r[(i + j) * NV + n] = (r[(i + j) * NV + n] - acc[j][n]) * beta[i + j];
        residual_product(s, qg + i * K, acc);
        for (int j = 0; j < ROW_BLOCK; j++)
            for (int n = 0; n < NV; n++) p[(i + j) * NV + n] = acc[j][n];
    }
}

// RULE residual fetched_state algorithm=chunked
// the state's rows are fetched eight ahead: they come from the second-level cache when blocks are outer
static inline void residual(const float *restrict s, const float *restrict kw, const float *restrict qg,
                            const float *restrict beta, int rows, vf *restrict r, vf *restrict p) {
    for (int i = 0; i < rows; i += ROW_BLOCK) {
        vf ar[ROW_BLOCK][NV] = {0}, ap[ROW_BLOCK][NV] = {0};
        for (int k = 0; k < K; k++) {
            if (i == 0)
                for (int c = 0; c < VALUE_TILE; c += 16) __builtin_prefetch(s + (k + 8) * STRIDE + c, 1);
            for (int n = 0; n < NV; n++) {
                vf row = load(s + k * STRIDE + n * LANES);
                for (int j = 0; j < ROW_BLOCK; j++) {
                    ar[j][n] += row * kw[(i + j) * K + k];
                    ap[j][n] += row * qg[(i + j) * K + k];
                }
            }
        }
        for (int j = 0; j < ROW_BLOCK; j++)
            for (int n = 0; n < NV; n++) {
                r[(i + j) * NV + n] = (r[(i + j) * NV + n] - ar[j][n]) * beta[i + j];
                p[(i + j) * NV + n] = ap[j][n];
            }
    }
}

// RULE solve right_looking algorithm=chunked
// each solved row is subtracted from all later rows at once: no chain of sums
static inline void solve(const float *restrict a, int rows, vf *restrict r) {
    for (int j = 0; j + 1 < rows; j++) {
        vf u[NV];
        for (int n = 0; n < NV; n++) u[n] = r[j * NV + n];
        for (int i = j + 1; i < rows; i++)
            for (int n = 0; n < NV; n++) r[i * NV + n] -= u[n] * a[i * CHUNK + j];
    }
}

// RULE solve four_rows algorithm=chunked
// four rows together through all earlier ones, then the triangle among the four in registers
static inline void solve(const float *restrict a, int rows, vf *restrict r) {
    for (int i = 0; i < rows; i += 4) {
        int count = rows - i < 4 ? rows - i : 4;
        vf acc[4][NV];
        for (int b = 0; b < 4; b++)
            for (int n = 0; n < NV; n++) acc[b][n] = r[(i + (b < count ? b : 0)) * NV + n];
        for (int j = 0; j < i; j++)
            for (int n = 0; n < NV; n++) {
                vf u = r[j * NV + n];
                for (int b = 0; b < 4; b++) acc[b][n] -= u * a[(i + (b < count ? b : 0)) * CHUNK + j];
            }
        for (int b = 0; b < 4; b++) {
            if (b >= count) break;
            for (int c = 0; c < b; c++)
                for (int n = 0; n < NV; n++) acc[b][n] -= acc[c][n] * a[(i + b) * CHUNK + i + c];
            for (int n = 0; n < NV; n++) r[(i + b) * NV + n] = acc[b][n];
        }
    }
}

// RULE output four_rows algorithm=chunked
// four rows share each load of u
static inline void output(const float *restrict m, const vf *restrict u, int rows, vf *restrict p) {
    int i = 0;
    for (; i + 4 <= rows; i += 4) {
        vf acc[4][NV];
        for (int b = 0; b < 4; b++)
            for (int n = 0; n < NV; n++) acc[b][n] = p[(i + b) * NV + n];
        for (int j = 0; j <= i; j++)
            for (int n = 0; n < NV; n++) {
                vf un = u[j * NV + n];
                for (int b = 0; b < 4; b++) acc[b][n] += un * m[(i + b) * CHUNK + j];
            }
        for (int b = 1; b < 4; b++)
            for (int c = 1; c <= b; c++)
                for (int n = 0; n < NV; n++) acc[b][n] += u[(i + c) * NV + n] * m[(i + b) * CHUNK + i + c];
        for (int b = 0; b < 4; b++)
            for (int n = 0; n < NV; n++) p[(i + b) * NV + n] = acc[b][n];
    }
    for (; i < rows; i++)
        for (int j = 0; j <= i; j++)
            for (int n = 0; n < NV; n++) p[i * NV + n] += u[j * NV + n] * m[i * CHUNK + j];
}

// RULE advance eight_tokens algorithm=chunked
// eight rows of u at a time meet all keys: the state streams, nothing else is reloaded
static inline void advance(float *restrict s, const float *restrict end, const float *restrict kg,
                           const vf *restrict u, int rows) {
    for (int k = 0; k < K; k++)
        for (int n = 0; n < NV; n++) {
            float *at = s + k * STRIDE + n * LANES;
            store(at, load(at) * end[k]);
        }
    int i = 0;
    for (; i + 8 <= rows; i += 8)
        for (int k = 0; k < K; k++)
            for (int n = 0; n < NV; n++) {
                float *at = s + k * STRIDE + n * LANES;
                vf even = load(at), odd = {0};
                for (int j = 0; j < 8; j += 2) {
                    even += u[(i + j) * NV + n] * kg[(i + j) * K + k];
                    odd += u[(i + j + 1) * NV + n] * kg[(i + j + 1) * K + k];
                }
                store(at, even + odd);
            }
    for (; i < rows; i++)
        for (int k = 0; k < K; k++)
            for (int n = 0; n < NV; n++) {
                float *at = s + k * STRIDE + n * LANES;
                store(at, load(at) + u[i * NV + n] * kg[i * K + k]);
            }
}
