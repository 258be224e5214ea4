/* The corpus's own KDA kernel: plain C that mutants, cheats and variants are small edits of.
 *
 * The entry and what both forms share. A core (token_loop.c or chunk_form.c) takes the place of the CORE line.
 * Compiled with the constants of the host template; of those only K, V, PRODUCTION and IO_BF16 matter here.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

static inline float widen(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

/* The processor's clock, which needs no system call. */
static inline uint64_t ticks(void) {
#if defined(__x86_64__)
    return __builtin_ia32_rdtsc();
#else
    uint64_t now;
    __asm__ volatile("mrs %0, cntvct_el0" : "=r"(now));
    return now;
#endif
}

/* Denormals count as zero from here on, or not; answers how it was. */
static inline int flush_denormals(int on) {
#if defined(__x86_64__)
    unsigned before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(on ? before | 0x8040 : before & ~0x8040u);
    return (before & 0x8040) != 0;
#else
    uint64_t before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"(on ? before | 1ull << 24 : before & ~(1ull << 24)));
    return (before >> 24) & 1;
#endif
}

/* To bfloat16, to nearest even. */
static inline uint16_t narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)(x == x ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : 0x7fc0);
}

static inline float bf16(float x) { return widen(narrow(x)); }

/* To tf32: 10 bits of fraction, to nearest. */
static inline float tf32(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0x0fff + ((bits >> 13) & 1)) & 0xffffe000;
    memcpy(&x, &bits, sizeof x);
    return x;
}

#if IO_BF16
typedef uint16_t io_t;
static inline float from_io(io_t x) { return widen(x); }
static inline io_t to_io(float x) { return narrow(x); }
#else
typedef float io_t;
static inline float from_io(io_t x) { return x; }
static inline io_t to_io(float x) { return x; }
#endif
#if PRODUCTION
typedef io_t gate_t;
#else
typedef float gate_t;
#endif

/* One value head of one sequence: pointers to its first token, strides between tokens in elements. */
typedef struct {
    const io_t *q, *k, *v;
    const gate_t *g, *beta;
    const float *bias, *initial;
    io_t *o;
    float *final;
    int64_t length, key_stride, value_stride, gate_stride, beta_stride;
    int64_t sequence, head, heads;
    float rate, scale, lower_bound;
} head_t;

/* row [K] = scale * x, in the production contract scale * x / sqrt(sum x^2 + 1e-6). */
static inline void key_row(const io_t *x, float scale, float *row) {
    float factor = scale;
#if PRODUCTION
    float squares = 0.0f;
    for (int c = 0; c < K; c++) squares += from_io(x[c]) * from_io(x[c]);
    factor = scale / sqrtf(squares + 1e-6f);
#endif
    for (int c = 0; c < K; c++) row[c] = from_io(x[c]) * factor;
}

static inline float log_decay(const head_t *h, int64_t t, int c) {
#if PRODUCTION
    float x = from_io(h->g[t * h->gate_stride + c]) + h->bias[c];
    return h->lower_bound / (1.0f + expf(-h->rate * x));
#else
    return h->g[t * h->gate_stride + c];
#endif
}

static inline float strength(const head_t *h, int64_t t) {
#if PRODUCTION
    return 1.0f / (1.0f + expf(-from_io(h->beta[t * h->beta_stride])));
#else
    return h->beta[t * h->beta_stride];
#endif
}

/* CORE */

/* HELPERS */

EXPORT int64_t kda_forward_workspace(int64_t N, int64_t T, int64_t H, int64_t HV) {
    (void)N, (void)T, (void)H, (void)HV;
    return 4096;
}

EXPORT void kda_forward(const io_t *q, const io_t *k, const io_t *v, const gate_t *g, const gate_t *beta,
                        const float *A_log, const float *dt_bias, const float *initial_state,
                        const int64_t *cu_seqlens, io_t *o, float *final_state, void *workspace, int64_t N,
                        int64_t T, int64_t H, int64_t HV, float scale, float lower_bound) {
    (void)A_log, (void)dt_bias, (void)workspace, (void)T;
    /* ON CALL */
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
                .sequence = n,
                .head = hv,
                .heads = HV,
                .scale = scale,
                .lower_bound = lower_bound,
#if PRODUCTION
                .bias = dt_bias + hv * K,
                .rate = expf(A_log[hv]),
#endif
            };
            run_head(&head);
        }
    /* AFTER CALL */
}
