/* Kimi Delta Attention, forward, one CPU thread.
 *
 * Per value head, with state S [K, V] and log decay g_t <= 0 per key channel:
 *
 *     S <- diag(exp(g_t)) S;   u_t = beta_t (v_t - S^T k_t);   S <- S + k_t u_t^T;   o_t = scale S^T q_t
 *
 * Tokens go through in blocks of CHUNK, value columns in tiles of VALUE_TILE. A block is prepared once (keys,
 * queries, decays, and in the chunked form the C x C scores) and then serves every tile. The state of a tile is
 * held transposed, S[k][column], columns in vector lanes; in memory it is V-first, [V][K].
 *
 * The chunked form (D_i: product of the decays of tokens 0..i of the block, D_{j..i}: of tokens j+1..i):
 *
 *     kw_i = D_i k_i        qg_i = D_i q_i        kg_j = D_{j..last} k_j
 *     a_ij = beta_i sum_k k_i D_{j..i} k_j  (j < i)       m_ij = sum_k q_i D_{j..i} k_j  (j <= i)
 *     r = beta (v - kw S);   u = (1 + a)^-1 r;   o = qg S + m u;   S <- diag(D_last) S + kg^T u
 *
 * Every decay factor is a product of numbers <= 1, never a quotient, so that no gate, however strong, overflows.
 *
 * Compile-time facts: K, V, PRODUCTION, IO_BF16, the knobs below, and DEBUG. A debug build writes, at the start
 * of the workspace and each padded to 64 bytes: decay [T, HV, K], u [T, HV, V], and the state after each block,
 * state [T / CHUNK + N, HV, V, K], where the block of sequence n that starts at token t of the pack has index
 * t / CHUNK + n. All fp32.
 *
 * Compile without gcc's ISO modes (-std=c11): they forbid fused multiply-add, which is a third of the speed.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

/* Objects hide what they do not export by name. */
#define EXPORT __attribute__((visibility("default")))

#define RECURRENT 0
#define CHUNKED 1
#define TILE 0 /* STATE: compact [K][VALUE_TILE] on the stack */
#define ROWS 1 /* STATE: rows of the whole [K][V] in the workspace */
#define LIBM_EXP 0
#define LIBM_EXP2 1
#define POLYNOMIAL 2
#define TILE_OUTER 0
#define BLOCK_OUTER 1
#define PER_SEQUENCE 0 /* FACTORS: all blocks prepared into the workspace before the first tile */
#define PER_BLOCK 1    /* FACTORS: prepared where used */

#define KV (K / LANES)          /* vectors in a key row */
#define NV (VALUE_TILE / LANES) /* vectors in a row of a tile */
#define TILES (V / VALUE_TILE)
#define STRIDE (STATE == TILE ? VALUE_TILE : V) /* floats from S[k] to S[k + 1] */
#define PAD16(n) (((n) + 15) / 16 * 16)
#define TINY 1e-30f /* products of decays below are zero: they change nothing and denormals cost 150 cycles */

/* Before a loop that must stay one: strided copies, unrolled, cost gcc half a second and gain nothing. */
#if defined(__clang__)
#define ROLLED _Pragma("clang loop unroll(disable)")
#else
#define ROLLED _Pragma("GCC unroll 1")
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef float vf_mem __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#if IO_BF16
typedef uint16_t io_t;
#else
typedef float io_t;
#endif
#if PRODUCTION
typedef io_t gate_t;
#else
typedef float gate_t;
#endif

/* What a block of tokens brings to every tile; rows past its end are zero, with decay one. */
typedef struct {
#if ALGORITHM == CHUNKED
    float kw[CHUNK * K], qg[CHUNK * K], kg[CHUNK * K];
    float a[CHUNK * CHUNK], m[CHUNK * CHUNK];
    float end[K]; /* D_last */
#else
    float k[CHUNK * K], q[CHUNK * K], d[CHUNK * K], kd[CHUNK * K]; /* kd = decay * k */
#endif
    float beta[PAD16(CHUNK)];
} __attribute__((aligned(64))) block_t;

static inline vf load(const float *x) { return *(const vf_mem *)x; }
static inline void store(float *x, vf value) { *(vf_mem *)x = value; }
static inline vf splat(float x) { return x - (vf){0}; }
static inline vf pick(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
static inline vf flush(vf x) { return (vf)(((vf)((vi)x & 0x7fffffff) >= TINY) & (vi)x); }

/* Sum of the lanes, halves first. */
static inline float sum(vf x) {
    typedef float v4 __attribute__((vector_size(16)));
#if LANES == 4
    v4 quarter = x;
#else
    typedef float v8 __attribute__((vector_size(32)));
#if LANES == 8
    v8 half = x;
#else
    union { vf whole; v8 half[2]; } of16 = {x};
    v8 half = of16.half[0] + of16.half[1];
#endif
    union { v8 whole; v4 half[2]; } of8 = {half};
    v4 quarter = of8.half[0] + of8.half[1];
#endif
    return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

/* to [4] = sums of the lanes of four vectors, together. */
static inline void sum4(vf a, vf b, vf c, vf d, float *to) {
    typedef float v4 __attribute__((vector_size(16)));
    union { vf whole; v4 part[LANES / 4]; } of[4] = {{a}, {b}, {c}, {d}};
    v4 x[4];
    for (int i = 0; i < 4; i++) {
        x[i] = of[i].part[0];
        for (int p = 1; p < LANES / 4; p++) x[i] += of[i].part[p];
    }
    v4 ab = __builtin_shufflevector(x[0], x[1], 0, 4, 1, 5) + __builtin_shufflevector(x[0], x[1], 2, 6, 3, 7);
    v4 cd = __builtin_shufflevector(x[2], x[3], 0, 4, 1, 5) + __builtin_shufflevector(x[2], x[3], 2, 6, 3, 7);
    v4 all = __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
    memcpy(to, &all, sizeof all);
}

#if IO_BF16
static inline vf load_io(const io_t *x) {
    vh half;
    memcpy(&half, x, sizeof half);
    return (vf)(__builtin_convertvector(half, vu) << 16);
}
/* Round to nearest even; a NaN keeps its sign and becomes quiet. */
static inline void store_io(io_t *x, vf value) {
    vu bits = (vu)value;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vu mask = (vu)(value == value);
    vh half = __builtin_convertvector((mask & rounded) | (~mask & ((bits >> 16) | 0x40)), vh);
    memcpy(x, &half, sizeof half);
}
static inline float scalar_io(io_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
#else
static inline vf load_io(const io_t *x) { return load(x); }
static inline void store_io(io_t *x, vf value) { store(x, value); }
static inline float scalar_io(io_t x) { return x; }
#endif
#if PRODUCTION
static inline vf load_gate(const gate_t *x) { return load_io(x); }
#else
static inline vf load_gate(const gate_t *x) { return load(x); }
#endif

/* exp(x) per lane; 0 where it would be below 2^-125, inf-free above 2^127. */
// EVOLVE-BEGIN exponential
static inline vf exponential(vf x) {
#if EXP == POLYNOMIAL
    /* x = n ln2 + r, |r| <= ln2 / 2; exp(r) = 1 + r + r^2 p(r), minimax, 3e-9 relative. */
    vi normal = x >= -86.6f;
    x = pick(normal, x, splat(-86.6f));
    x = pick(x <= 88.0f, x, splat(88.0f));
    vf shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the low bits become round(x / ln2) */
    vi n = (vi)shifted - 0x4b400000;
    vf whole = shifted - 12582912.0f;
    vf r = x - whole * 0.693145752f;
    r = r - whole * 1.42860677e-6f;
    vf p = r * 1.39506021e-3f + 8.36895313e-3f;
    p = p * r + 4.16662060e-2f;
    p = p * r + 1.66665182e-1f;
    p = p * r + 0.5f;
    p = p * (r * r) + r + 1.0f;
    return (vf)(normal & ((vi)p + (n << 23)));
#else
    union { vf v; float f[LANES]; } u = {x};
    for (int i = 0; i < LANES; i++) u.f[i] = EXP == LIBM_EXP2 ? exp2f(u.f[i] * 1.44269504f) : expf(u.f[i]);
    return u.v;
#endif
}
// EVOLVE-END exponential

/* row [K] = scale * x, in the production contract scale * x / sqrt(sum x^2 + 1e-6). */
// EVOLVE-BEGIN key_row
static inline void key_row(const io_t *x, float scale, float *row) {
#if PRODUCTION
    vf squares = {0};
    for (int c = 0; c < K; c += LANES) {
        vf part = load_io(x + c);
        squares += part * part;
    }
    scale /= sqrtf(sum(squares) + 1e-6f);
#endif
    for (int c = 0; c < K; c += LANES) store(row + c, load_io(x + c) * scale);
}
// EVOLVE-END key_row

/* d [K] = exp(log decay). Production: log decay = lower_bound * sigmoid(rate * (g + bias)), rate = exp(A_log). */
// EVOLVE-BEGIN decay_row
static inline void decay_row(const gate_t *g, const float *bias, float rate, float lower_bound, float *d) {
    for (int c = 0; c < K; c += LANES) {
        vf x = load_gate(g + c);
#if PRODUCTION
        x = lower_bound / (1.0f + exponential((x + load(bias + c)) * -rate));
#endif
        store(d + c, exponential(x));
    }
}
// EVOLVE-END decay_row

/* S of one tile from VALUE_TILE rows of K, or zeros. */
// EVOLVE-BEGIN load_state
static inline void load_state(const float *restrict from, float *restrict s) {
    ROLLED for (int k = 0; k < K; k++)
        ROLLED for (int c = 0; c < VALUE_TILE; c++) s[k * STRIDE + c] = from ? from[c * K + k] : 0.0f;
}
// EVOLVE-END load_state

/* VALUE_TILE rows of K from S of one tile. */
// EVOLVE-BEGIN store_state
static inline void store_state(const float *restrict s, float *restrict to) {
    ROLLED for (int c = 0; c < VALUE_TILE; c++)
        ROLLED for (int k = 0; k < K; k++) to[c * K + k] = s[k * STRIDE + c];
}
// EVOLVE-END store_state

/* Touch `rows` rows of `bytes` bytes that will be read PREFETCH blocks later. */
// EVOLVE-BEGIN prefetch_rows
static inline void prefetch_rows(const void *from, int64_t stride_bytes, int64_t rows, int bytes) {
    for (int64_t i = 0; i < rows; i++)
        for (int b = 0; b < bytes; b += 64) __builtin_prefetch((const char *)from + i * stride_bytes + b);
}
// EVOLVE-END prefetch_rows

#if ALGORITHM == RECURRENT
/* u = beta (v - S^T kd): S is not yet decayed, kd is. */
// EVOLVE-BEGIN delta
static inline void delta(const float *restrict s, const float *restrict kd, const vf *v, float beta, vf *u) {
    vf acc[KEY_UNROLL][NV] = {0};
    for (int k = 0; k < K; k += KEY_UNROLL)
        for (int j = 0; j < KEY_UNROLL; j++)
            for (int n = 0; n < NV; n++) acc[j][n] += load(s + (k + j) * STRIDE + n * LANES) * kd[k + j];
    for (int n = 0; n < NV; n++) {
        vf total = acc[0][n];
        for (int j = 1; j < KEY_UNROLL; j++) total += acc[j][n];
        u[n] = (v[n] - total) * beta;
    }
}
// EVOLVE-END delta

/* S <- d S + k u^T;  o = S^T q. */
// EVOLVE-BEGIN update
static inline void update(float *restrict s, const float *restrict d, const float *restrict k_row,
                          const float *restrict q, const vf *u, vf *o) {
    vf acc[KEY_UNROLL][NV] = {0};
    for (int k = 0; k < K; k += KEY_UNROLL)
        for (int j = 0; j < KEY_UNROLL; j++)
            for (int n = 0; n < NV; n++) {
                float *at = s + (k + j) * STRIDE + n * LANES;
                vf row = load(at) * d[k + j] + u[n] * k_row[k + j];
                store(at, row);
                acc[j][n] += row * q[k + j];
            }
    for (int n = 0; n < NV; n++) {
        o[n] = acc[0][n];
        for (int j = 1; j < KEY_UNROLL; j++) o[n] += acc[j][n];
    }
}
// EVOLVE-END update

#else
/* a, m [CHUNK][CHUNK] of the first `rows` tokens. Sub-blocks of PAIR_BLOCK tokens: inside one, running products
 * of decays; between two, products of a row's and a column's factor, met at the boundary between them. */
// EVOLVE-BEGIN scores
static inline void scores(const float *restrict q, const float *restrict k, const float *restrict d,
                          const float *restrict beta, int rows, float *restrict a, float *restrict m) {
    float columns[CHUNK * K]; /* k_j decayed up to the current boundary */
    for (int begin = 0; begin < rows; begin += PAIR_BLOCK) {
        int end = begin + PAIR_BLOCK < rows ? begin + PAIR_BLOCK : rows;
        vf open[KV];
        for (int x = 0; x < KV; x++) open[x] = splat(1.0f);
        for (int i = begin; i < end; i++) {
            vf kr[KV], qr[KV];
            for (int x = 0; x < KV; x++) {
                open[x] *= load(d + i * K + x * LANES);
                kr[x] = open[x] * load(k + i * K + x * LANES);
                qr[x] = open[x] * load(q + i * K + x * LANES);
            }
            for (int j = 0; j < begin; j += 2) {
                vf k0 = {0}, q0 = {0}, k1 = {0}, q1 = {0};
                for (int x = 0; x < KV; x++) {
                    vf first = load(columns + j * K + x * LANES), second = load(columns + (j + 1) * K + x * LANES);
                    k0 += kr[x] * first;
                    q0 += qr[x] * first;
                    k1 += kr[x] * second;
                    q1 += qr[x] * second;
                }
                float total[4];
                sum4(k0, q0, k1, q1, total);
                a[i * CHUNK + j] = beta[i] * total[0];
                m[i * CHUNK + j] = total[1];
                a[i * CHUNK + j + 1] = beta[i] * total[2];
                m[i * CHUNK + j + 1] = total[3];
            }
        }
        for (int j = 0; j < begin; j++)
            for (int x = 0; x < KV; x++) {
                vf column = load(columns + j * K + x * LANES);
                store(columns + j * K + x * LANES, flush(column * open[x]));
            }
        for (int j = begin; j < end; j++) {
            vf column[KV], aq = {0};
            for (int x = 0; x < KV; x++) {
                column[x] = load(k + j * K + x * LANES);
                aq += column[x] * load(q + j * K + x * LANES);
            }
            m[j * CHUNK + j] = sum(aq);
            for (int i = j + 1; i < end; i++) {
                vf ak = {0}, aq = {0};
                for (int x = 0; x < KV; x++) {
                    column[x] *= load(d + i * K + x * LANES);
                    ak += column[x] * load(k + i * K + x * LANES);
                    aq += column[x] * load(q + i * K + x * LANES);
                }
                a[i * CHUNK + j] = beta[i] * sum(ak);
                m[i * CHUNK + j] = sum(aq);
            }
            for (int x = 0; x < KV; x++) store(columns + j * K + x * LANES, column[x]);
        }
    }
}
// EVOLVE-END scores

/* kw, qg, kg [rows][K] and end [K] from q, k and the decays d. */
// EVOLVE-BEGIN factors
static inline void factors(const float *restrict q, const float *restrict k, const float *restrict d, int rows,
                           float *restrict kw, float *restrict qg, float *restrict kg, float *restrict end) {
    vf open[KV];
    for (int x = 0; x < KV; x++) open[x] = splat(1.0f);
    for (int i = 0; i < rows; i++)
        for (int x = 0; x < KV; x++) {
            int at = i * K + x * LANES;
            open[x] = flush(open[x] * load(d + at));
            store(kw + at, load(k + at) * open[x]);
            store(qg + at, load(q + at) * open[x]);
        }
    for (int x = 0; x < KV; x++) {
        store(end + x * LANES, open[x]);
        open[x] = splat(1.0f);
    }
    for (int i = rows - 1; i >= 0; i--)
        for (int x = 0; x < KV; x++) {
            int at = i * K + x * LANES;
            store(kg + at, load(k + at) * open[x]);
            open[x] = flush(open[x] * load(d + at));
        }
}
// EVOLVE-END factors

/* r holds v on entry; r <- beta (v - kw S), p <- qg S; r, p [rows][NV], rows a multiple of ROW_BLOCK. */
// EVOLVE-BEGIN residual
static inline void residual(const float *restrict s, const float *restrict kw, const float *restrict qg,
                            const float *restrict beta, int rows, vf *restrict r, vf *restrict p) {
    for (int i = 0; i < rows; i += ROW_BLOCK) {
        vf ar[ROW_BLOCK][NV] = {0}, ap[ROW_BLOCK][NV] = {0};
        for (int k = 0; k < K; k++)
            for (int n = 0; n < NV; n++) {
                vf row = load(s + k * STRIDE + n * LANES);
                for (int j = 0; j < ROW_BLOCK; j++) {
                    ar[j][n] += row * kw[(i + j) * K + k];
                    ap[j][n] += row * qg[(i + j) * K + k];
                }
            }
        for (int j = 0; j < ROW_BLOCK; j++)
            for (int n = 0; n < NV; n++) {
                r[(i + j) * NV + n] = (r[(i + j) * NV + n] - ar[j][n]) * beta[i + j];
                p[(i + j) * NV + n] = ap[j][n];
            }
    }
}
// EVOLVE-END residual

/* r <- u: forward substitution, u_i = r_i - sum_{j < i} a_ij u_j. */
// EVOLVE-BEGIN solve
static inline void solve(const float *restrict a, int rows, vf *restrict r) {
    for (int i = 1; i < rows; i++) {
        vf acc[NV];
        for (int n = 0; n < NV; n++) acc[n] = r[i * NV + n];
        for (int j = 0; j < i; j++)
            for (int n = 0; n < NV; n++) acc[n] -= r[j * NV + n] * a[i * CHUNK + j];
        for (int n = 0; n < NV; n++) r[i * NV + n] = acc[n];
    }
}
// EVOLVE-END solve

/* p <- o: o_i = p_i + sum_{j <= i} m_ij u_j. */
// EVOLVE-BEGIN output
static inline void output(const float *restrict m, const vf *restrict u, int rows, vf *restrict p) {
    for (int i = 0; i < rows; i++) {
        vf acc[NV];
        for (int n = 0; n < NV; n++) acc[n] = p[i * NV + n];
        for (int j = 0; j <= i; j++)
            for (int n = 0; n < NV; n++) acc[n] += u[j * NV + n] * m[i * CHUNK + j];
        for (int n = 0; n < NV; n++) p[i * NV + n] = acc[n];
    }
}
// EVOLVE-END output

/* S <- diag(end) S + kg^T u. */
// EVOLVE-BEGIN advance
static inline void advance(float *restrict s, const float *restrict end, const float *restrict kg,
                           const vf *restrict u, int rows) {
    for (int k = 0; k < K; k += KEY_UNROLL) {
        vf acc[KEY_UNROLL][NV];
        for (int j = 0; j < KEY_UNROLL; j++)
            for (int n = 0; n < NV; n++) acc[j][n] = load(s + (k + j) * STRIDE + n * LANES) * end[k + j];
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < KEY_UNROLL; j++)
                for (int n = 0; n < NV; n++) acc[j][n] += u[i * NV + n] * kg[i * K + k + j];
        for (int j = 0; j < KEY_UNROLL; j++)
            for (int n = 0; n < NV; n++) store(s + (k + j) * STRIDE + n * LANES, acc[j][n]);
    }
}
// EVOLVE-END advance
#endif

/* One value head of one sequence: pointers to its first token, strides between tokens in elements. */
typedef struct {
    const io_t *q, *k, *v;
    const gate_t *g, *beta;
    const float *bias;
    const float *initial;
    io_t *o;
    float *final;
    int64_t length;
    int64_t key_stride, value_stride, gate_stride, beta_stride;
    float rate, scale, lower_bound;
#if DEBUG
    float *debug_decay, *debug_u, *debug_state; /* debug_state: of the sequence's first block */
    int64_t debug_state_stride;
#endif
} head_t;

static inline int rows_of(const head_t *h, int64_t t) {
    return h->length - t < CHUNK ? (int)(h->length - t) : CHUNK;
}

static inline int padded(int rows) {
    return ALGORITHM == CHUNKED ? (rows + ROW_BLOCK - 1) / ROW_BLOCK * ROW_BLOCK : rows;
}

static inline float beta_of(const head_t *h, int64_t t) {
#if PRODUCTION
    return 1.0f / (1.0f + expf(-scalar_io(h->beta[t * h->beta_stride])));
#else
    return h->beta[t * h->beta_stride];
#endif
}

/* Tokens t .. t + CHUNK - 1 of a head, as every tile needs them. */
static void prepare(const head_t *h, int64_t t, block_t *block) {
    int rows = rows_of(h, t);
#if ALGORITHM == CHUNKED
    float q[CHUNK * K] __attribute__((aligned(64))), k[CHUNK * K] __attribute__((aligned(64)));
    float d[CHUNK * K] __attribute__((aligned(64)));
#else
    float *q = block->q, *k = block->k, *d = block->d;
#endif
#if PREFETCH
    int64_t ahead = t + PREFETCH * CHUNK;
    if (ahead < h->length) {
        int64_t rows_ahead = rows_of(h, ahead);
        prefetch_rows(h->q + ahead * h->key_stride, h->key_stride * sizeof(io_t), rows_ahead, K * sizeof(io_t));
        prefetch_rows(h->k + ahead * h->key_stride, h->key_stride * sizeof(io_t), rows_ahead, K * sizeof(io_t));
        prefetch_rows(h->g + ahead * h->gate_stride, h->gate_stride * sizeof(gate_t), rows_ahead,
                      K * sizeof(gate_t));
    }
#endif
    for (int i = 0; i < rows; i++) {
        key_row(h->q + (t + i) * h->key_stride, h->scale, q + i * K);
        key_row(h->k + (t + i) * h->key_stride, 1.0f, k + i * K);
        decay_row(h->g + (t + i) * h->gate_stride, h->bias, h->rate, h->lower_bound, d + i * K);
        block->beta[i] = beta_of(h, t + i);
#if DEBUG
        memcpy(h->debug_decay + (t + i) * h->gate_stride, d + i * K, K * sizeof(float));
#endif
    }
#if ALGORITHM == CHUNKED
    for (int i = rows; i < padded(rows); i++) {
        block->beta[i] = 0.0f;
        for (int c = 0; c < K; c++) {
            q[i * K + c] = k[i * K + c] = 0.0f;
            d[i * K + c] = 1.0f;
        }
    }
    scores(q, k, d, block->beta, rows, block->a, block->m);
    factors(q, k, d, padded(rows), block->kw, block->qg, block->kg, block->end);
#else
    for (int c = 0; c < rows * K; c += LANES) store(block->kd + c, load(d + c) * load(k + c));
#endif
}

static inline void load_values(const head_t *h, int64_t t, int column, vf *v) {
    for (int n = 0; n < NV; n++) v[n] = load_io(h->v + t * h->value_stride + column + n * LANES);
}

static inline void store_values(const head_t *h, int64_t t, int column, const vf *o) {
    for (int n = 0; n < NV; n++) store_io(h->o + t * h->value_stride + column + n * LANES, o[n]);
}

static inline void debug_values(const head_t *h, int64_t t, int column, const vf *u) {
#if DEBUG
    for (int n = 0; n < NV; n++) store(h->debug_u + t * h->value_stride + column + n * LANES, u[n]);
#endif
}

/* A prepared block goes through the tile whose first value column is `column`. */
static inline void run_tile(const head_t *h, int64_t t, const block_t *block, int column, float *s) {
    int rows = rows_of(h, t);
#if PREFETCH
    int64_t ahead = t + PREFETCH * CHUNK;
    if (ahead < h->length)
        prefetch_rows(h->v + ahead * h->value_stride + column, h->value_stride * sizeof(io_t), rows_of(h, ahead),
                      VALUE_TILE * sizeof(io_t));
#endif
#if ALGORITHM == CHUNKED
    vf r[CHUNK * NV], p[CHUNK * NV];
    for (int i = 0; i < rows; i++) load_values(h, t + i, column, r + i * NV);
    for (int i = rows * NV; i < padded(rows) * NV; i++) r[i] = (vf){0};
    residual(s, block->kw, block->qg, block->beta, padded(rows), r, p);
    solve(block->a, rows, r);
    output(block->m, r, rows, p);
    advance(s, block->end, block->kg, r, rows);
    for (int i = 0; i < rows; i++) {
        store_values(h, t + i, column, p + i * NV);
        debug_values(h, t + i, column, r + i * NV);
    }
#else
    for (int i = 0; i < rows; i++) {
        vf v[NV], u[NV], o[NV];
        load_values(h, t + i, column, v);
        delta(s, block->kd + i * K, v, block->beta[i], u);
        update(s, block->d + i * K, block->k + i * K, block->q + i * K, u, o);
        store_values(h, t + i, column, o);
        debug_values(h, t + i, column, u);
    }
#endif
#if DEBUG
    store_state(s, h->debug_state + t / CHUNK * h->debug_state_stride + column * K);
#endif
}

/* All tokens of one value head of one sequence. `blocks`: room for the blocks of a sequence, or NULL;
 * `rows`: room for a [K][V] state, or NULL. */
static void run_head(const head_t *h, block_t *blocks, float *rows) {
    int64_t count = (h->length + CHUNK - 1) / CHUNK;
#if FACTORS == PER_SEQUENCE
    for (int64_t b = 0; b < count; b++) prepare(h, b * CHUNK, blocks + b);
#else
    block_t local;
#endif
#if ORDER == TILE_OUTER
#if STATE == TILE
    float s[K * VALUE_TILE] __attribute__((aligned(64)));
#endif
    for (int column = 0; column < V; column += VALUE_TILE) {
#if STATE == ROWS
        float *s = rows + column;
#endif
        load_state(h->initial ? h->initial + column * K : NULL, s);
        for (int64_t b = 0; b < count; b++) {
#if FACTORS == PER_BLOCK
            prepare(h, b * CHUNK, &local);
            run_tile(h, b * CHUNK, &local, column, s);
#else
            run_tile(h, b * CHUNK, blocks + b, column, s);
#endif
        }
        if (h->final) store_state(s, h->final + column * K);
    }
#else
#if STATE == TILE
    float whole[K * V] __attribute__((aligned(64)));
    const int step = K; /* floats from the state of one column to the next, between tiles */
#else
    float *whole = rows;
    const int step = 1;
#endif
    for (int column = 0; column < V; column += VALUE_TILE)
        load_state(h->initial ? h->initial + column * K : NULL, whole + column * step);
    for (int64_t b = 0; b < count; b++) {
#if FACTORS == PER_BLOCK
        prepare(h, b * CHUNK, &local);
        const block_t *block = &local;
#else
        const block_t *block = blocks + b;
#endif
        for (int column = 0; column < V; column += VALUE_TILE)
            run_tile(h, b * CHUNK, block, column, whole + column * step);
    }
    if (h->final)
        for (int column = 0; column < V; column += VALUE_TILE)
            store_state(whole + column * step, h->final + column * K);
#endif
}

static int64_t debug_floats(int64_t N, int64_t T, int64_t HV) {
    if (!DEBUG) return 0;
    return PAD16(T * HV * K) + PAD16(T * HV * V) + (T / CHUNK + N) * HV * K * V;
}

EXPORT int64_t kda_forward_workspace(int64_t N, int64_t T, int64_t H, int64_t HV) {
    (void)H;
    int64_t bytes = PAD16(debug_floats(N, T, HV)) * (int64_t)sizeof(float);
    if (STATE == ROWS) bytes += K * V * (int64_t)sizeof(float);
    if (FACTORS == PER_SEQUENCE) bytes += (T + CHUNK - 1) / CHUNK * (int64_t)sizeof(block_t);
    return bytes;
}

EXPORT void kda_forward(const io_t *q, const io_t *k, const io_t *v, const gate_t *g, const gate_t *beta,
                 const float *A_log, const float *dt_bias, const float *initial_state, const int64_t *cu_seqlens,
                 io_t *o, float *final_state, void *workspace, int64_t N, int64_t T, int64_t H, int64_t HV,
                 float scale, float lower_bound) {
    float *room = (float *)workspace + PAD16(debug_floats(N, T, HV));
    float *rows = room;
    if (STATE == ROWS) room += K * V;
    for (int64_t n = 0; n < N; n++)
        for (int64_t hv = 0; hv < HV; hv++) {
            int64_t begin = cu_seqlens[n], key_head = hv / (HV / H), state = (n * HV + hv) * K * V;
            head_t head = {
                .q = q + (begin * H + key_head) * K,
                .k = k + (begin * H + key_head) * K,
                .v = v + (begin * HV + hv) * V,
                .g = g + (begin * HV + hv) * K,
                .beta = beta + begin * HV + hv,
                .o = o + (begin * HV + hv) * V,
                .initial = initial_state ? initial_state + state : NULL,
                .final = final_state ? final_state + state : NULL,
                .length = cu_seqlens[n + 1] - begin,
                .key_stride = H * K,
                .value_stride = HV * V,
                .gate_stride = HV * K,
                .beta_stride = HV,
                .scale = scale,
#if PRODUCTION
                .bias = dt_bias + hv * K,
                .rate = expf(A_log[hv]),
                .lower_bound = lower_bound,
#endif
            };
#if DEBUG
            head.debug_decay = (float *)workspace + (begin * HV + hv) * K;
            head.debug_u = (float *)workspace + PAD16(T * HV * K) + (begin * HV + hv) * V;
            head.debug_state_stride = HV * K * V;
            head.debug_state = (float *)workspace + PAD16(T * HV * K) + PAD16(T * HV * V) +
                               ((begin / CHUNK + n) * HV + hv) * K * V;
#endif
            run_head(&head, (block_t *)room, rows);
        }
}
