"""KDA kernels that are wrong in one place, each as somebody has shipped it or easily could."""

from typing import Any

from evotune.fitness.outcome import Failure
from evotune.fitness.redteam.entry import EDGES, INTEGRITY, LAWS, REGIMES, SMOKE, Entry, Kind, edits

_WRONG = frozenset({Failure.WRONG, Failure.FAULT, Failure.UNSTABLE})
_KEYS = "key_row(h->k + t * h->key_stride, 1.0f, k);"
_DECAY = "for (int c = 0; c < K; c++) d[c] = expf(log_decay(h, t, c));"
_BETA = "float beta = strength(h, t);"
_LOAD = "for (int c = 0; c < K; c++) S[v][c] = h->initial ? h->initial[v * K + c] : 0.0f;"
_FINAL = "if (h->final)\n        for (int v"
_OUT = "h->o[t * h->value_stride + v] = to_io(out);"
_CHUNK = "run_chunk(h, t, h->length - t < C ? (int)(h->length - t) : C, S);"
_RUN = "run_head(&head);"
_SOLVE = """    for (int i = 1; i < n; i++)
        for (int j = 0; j < i; j++)
            for (int v = 0; v < V; v++) r[i][v] -= a[i][j] * r[j][v];"""
_NEUMANN = """    float term[C][V], next[C][V];
    memcpy(term, r, sizeof term);
    for (int order = 1; order <= %s; order++) {
        for (int i = 0; i < n; i++)
            for (int v = 0; v < V; v++) {
                next[i][v] = 0.0f;
                for (int j = 0; j < i; j++) next[i][v] -= a[i][j] * term[j][v];
                r[i][v] += next[i][v];
            }
        memcpy(term, next, sizeof term);
    }"""


def _token(name: str, why: str, *pairs: tuple[str, str], **fields: Any) -> Entry:
    return _mutant(name, why, edits(*pairs), base="token_loop", **fields)


def _chunk(name: str, why: str, *pairs: tuple[str, str], **fields: Any) -> Entry:
    return _mutant(name, why, edits(*pairs), base="chunk_form", **fields)


def _mutant(name: str, why: str, changes: Any, **fields: Any) -> Entry:
    fields = {"caught": SMOKE, "failures": _WRONG, **fields}
    return Entry(name, Kind.MUTANT, why, edits=changes, **fields)


MUTANTS: tuple[Entry, ...] = (
    _token("zeros", "writes zeros everywhere", (_OUT, _OUT.replace("out", "0.0f * out")), evolve=(5,)),
    _token(
        "values passed through",
        "o = v",
        (_OUT, "h->o[t * h->value_stride + v] = h->v[t * h->value_stride + v];"),
        evolve=(6,),
    ),
    _chunk(
        "only the last chunk",
        "outputs of earlier chunks are zero",
        (
            "h->o[(t + i) * h->value_stride + v] = to_io(p[i][v]);",
            "h->o[(t + i) * h->value_stride + v] = to_io(t + n == h->length ? p[i][v] : 0.0f);",
        ),
        evolve=(5, 8, 15),
        caught=EDGES,
    ),
    _chunk(
        "inter-chunk term dropped",
        "q S is left out of the output",
        ("p[i][v] += qe * S[c][v];", "p[i][v] += 0.0f * qe;"),
        evolve=(8,),
    ),
    _chunk(
        "correction dropped",
        "values are written without what the state already holds",
        ("r[i][v] += ke * S[c][v];", "r[i][v] += 0.0f * ke;"),
    ),
    _chunk("Neumann series cut at order 1", "1 - a for its inverse", (_SOLVE, _NEUMANN % "1"), evolve=(9,)),
    _chunk(
        "Neumann series cut at order 3", "right to four factors of a", (_SOLVE, _NEUMANN % "3"), evolve=(9,)
    ),
    _chunk(
        "Neumann series of full order",
        "exact in real arithmetic, but powers of a explode for repeated keys",
        (_SOLVE, _NEUMANN % "C"),
        ("#define C 16", "#define C 32"),
        evolve=(9, 34),
        caught=REGIMES,
    ),
    _chunk(
        "Neumann series in short chunks",
        "the same where powers of a explode less: only keys that repeat show it",
        (_SOLVE, _NEUMANN % "C"),
        evolve=(9, 34),
        caught=REGIMES,
    ),
    _chunk(
        "wrong triangle",
        "a is read transposed in the substitution",
        ("r[i][v] -= a[i][j] * r[j][v];", "r[i][v] -= a[j][i] * r[j][v];"),
        ("q[C][K], k[C][K], G[C][K], a[C][C]", "q[C][K], k[C][K], G[C][K], a[C][C] = {{0}}"),
    ),
    _chunk(
        "a token does not see itself",
        "m lacks its diagonal",
        ("for (int j = 0; j <= i; j++) p[i][v]", "for (int j = 0; j < i; j++) p[i][v]"),
    ),
    _token(
        "gate of the token before",
        "off by one",
        ("expf(log_decay(h, t, c))", "expf(log_decay(h, t ? t - 1 : 0, c))"),
    ),
    _token(
        "decay after the update",
        "the new write decays too",
        ("S[v][c] *= d[c];", ""),
        ("S[v][c] += u * k[c];", "S[v][c] = (S[v][c] + u * k[c]) * d[c];"),
    ),
    _token(
        "correction reads the undecayed state",
        "u is formed before the decay",
        (
            "S[v][c] *= d[c];\n                seen += S[v][c] * k[c];",
            "seen += S[v][c] * k[c];\n S[v][c] *= d[c];",
        ),
    ),
    _token("beta ignored", "writes at full strength", (_BETA, "float beta = 1.0f;"), evolve=(14,)),
    _token("beta twice", "written with beta squared", (_BETA, _BETA + " beta *= beta;")),
    _token("scale missing", "o without scale", ("h->scale, q);", "1.0f, q);"), evolve=(14,)),
    _token(
        "scale assumed",
        "K^-0.5 in place of the argument",
        ("h->scale, q);", "1.0f / sqrtf((float)K), q);"),
        evolve=(13, 14),
        caught=EDGES,
    ),
    _token(
        "bfloat16 state",
        "the master state is rounded at every token",
        ("S[v][c] += u * k[c];", "S[v][c] = bf16(S[v][c] + u * k[c]);"),
        evolve=(31, 32),
    ),
    _chunk(
        "bfloat16 state between chunks",
        "the state is rounded once a chunk",
        (
            "S[c][v] += ke * operand(r[j][v]);",
            "S[c][v] += ke * r[j][v];\n for (int v = 0; v < V; v++) S[c][v] = bf16(S[c][v]);",
        ),
        evolve=(31,),
    ),
    _chunk(
        "bfloat16 operands under float32 io",
        "matrix products of rounded numbers where full ones are due",
        ("float operand(float x) { return x; }", "float operand(float x) { return bf16(x); }"),
        evolve=(31, 32),
    ),
    _chunk(
        "bfloat16 state between chunks under bfloat16 io",
        "as some bfloat16 kernels have it: only long memory and keys that repeat tell",
        (
            "S[c][v] += ke * operand(r[j][v]);",
            "S[c][v] += ke * operand(r[j][v]);\n for (int v = 0; j == n - 1 && v < V; v++) S[c][v] = bf16(S[c][v]);",
        ),
        ("float operand(float x) { return x; }", "float operand(float x) { return bf16(x); }"),
        dtype="bfloat16",
        evolve=(31, 32),
        caught=REGIMES,
    ),
    _chunk(
        "Neumann series cut at order 3 under bfloat16 io",
        "right to four factors of a, whatever the values",
        (_SOLVE, _NEUMANN % "3"),
        dtype="bfloat16",
        evolve=(9,),
    ),
    _chunk(
        "tf32 operands under float32 io",
        "as tensor cores do when nobody looks",
        ("float operand(float x) { return x; }", "float operand(float x) { return tf32(x); }"),
        evolve=(28, 31),
    ),
    _chunk(
        "tail chunk skipped",
        "a last chunk that is not full is left out",
        ("t < h->length; t += C", "t + C <= h->length; t += C"),
        evolve=(3, 7),
    ),
    _token(
        "heads swapped",
        "value head hv reads the keys of another",
        ("key_head = hv / (HV / H)", "key_head = H - 1 - hv / (HV / H)"),
        caught=EDGES,
    ),
    _token(
        "grouped heads dealt in turn",
        "hv % H for hv / (HV / H)",
        ("key_head = hv / (HV / H)", "key_head = hv % H"),
        caught=EDGES,
    ),
    _token(
        "one gate for all heads",
        "the first head's gates",
        (".g = g + (begin * HV + hv) * K", ".g = g + begin * HV * K"),
        caught=EDGES,
    ),
    _token(
        "initial state ignored",
        "starts from zero",
        (_LOAD, "for (int c = 0; c < K; c++) S[v][c] = 0.0f;"),
        evolve=(14,),
    ),
    _token(
        "initial state transposed",
        "K-first where V-first is due",
        ("h->initial[v * K + c]", "h->initial[c * V + v]"),
    ),
    _token(
        "final state transposed",
        "K-first where V-first is due",
        ("h->final[v * K + c]", "h->final[c * V + v]"),
    ),
    _token(
        "final state not written",
        "left as it was",
        (_FINAL, "if (h->final && h->length < 0)\n        for (int v"),
        evolve=(3,),
    ),
    _chunk(
        "final state one chunk early",
        "stored before the last chunk",
        (_CHUNK, _CHUNK + "\n if (h->length > C) return;"),
        (
            "    for (int64_t t = 0; t < h->length; t += C)",
            "    for (int64_t t = 0; t < h->length; t += C) { if (h->final && t + C >= h->length) for (int v = 0; v < V; v++)"
            " for (int c = 0; c < K; c++) h->final[v * K + c] = S[c][v];",
        ),
        (
            "(int)(h->length - t) : C, S);\n if (h->length > C) return;",
            "(int)(h->length - t) : C, S); }\n    if (h->length) return;",
        ),
    ),
    _token(
        "sequence boundary leaked",
        "the state runs on into the next sequence of the pack",
        (
            "static void run_head(const head_t *h) {\n    float S[V][K];",
            "static void run_head(const head_t *h, float (*S)[K]) {",
        ),
        (
            _LOAD,
            "for (int c = 0; c < K; c++) S[v][c] = h->sequence ? S[v][c] : h->initial ? h->initial[v * K + c] : 0.0f;",
        ),
        (
            "for (int64_t n = 0; n < N; n++)\n        for (int64_t hv = 0; hv < HV; hv++) {",
            "for (int64_t hv = 0; hv < HV; hv++) { float S[V][K];\n        for (int64_t n = 0; n < N; n++) {",
        ),
        (_RUN + "\n        }", "run_head(&head, S);\n        } }"),
        caught=EDGES,
    ),
    _token(
        "empty sequence skipped",
        "its final state is not the initial one but nothing",
        (_RUN, f"if (head.length) {_RUN}"),
        evolve=(3,),
        caught=EDGES,
    ),
    _token(
        "empty sequence zeroed",
        "its final state is zero",
        (_LOAD, _LOAD.replace("h->initial ?", "h->initial && h->length ?")),
        caught=EDGES,
    ),
    _token(
        "history cut after 256 tokens",
        "the state is dropped now and then, as if it had decayed",
        (_BETA, _BETA + " if (t % 256 == 255) memset(S, 0, sizeof S);"),
        evolve=(8,),
        caught=EDGES,
    ),
    _token(
        "weak memories cut off",
        "decays below 2 % count as zero",
        (_DECAY, _DECAY + " for (int c = 0; c < K; c++) if (d[c] < 0.02f) d[c] = 0.0f;"),
        evolve=(10,),
    ),
    _token(
        "norm without epsilon",
        "q and k of a zero row become NaN",
        ("squares + 1e-6f", "squares"),
        contract="production",
        caught=REGIMES,
    ),
    _token(
        "epsilon outside the root",
        "x / (norm + 1e-6)",
        ("scale / sqrtf(squares + 1e-6f)", "scale / (sqrtf(squares) + 1e-6f)"),
        contract="production",
        caught=REGIMES,
    ),
    _token(
        "lower bound assumed",
        "-4 for the argument, which is -5",
        ("return h->lower_bound /", "return -4.0f /"),
        contract="production",
        evolve=(13,),
    ),
    _chunk(
        "quotients of decays",
        "e^G_i / e^G_j, which overflows where gates are strong",
        (
            "power(G[i][c] - G[j][c]) * operand(k[j][c])",
            "power(G[i][c]) * (operand(k[j][c]) / power(G[j][c]))",
        ),
        ("#define C 16", "#define C 64"),
        evolve=(34,),
        caught=EDGES,
    ),
    _token(
        "right by luck",
        "adds what the stack happens to hold",
        (
            "float seen = 0.0f, out = 0.0f;",
            "float seen, out; volatile float luck[64]; seen = luck[v % 64]; out = luck[63 - v % 64];",
        ),
        ("static void run_head", "__attribute__((noinline)) static void run_head"),
        evolve=(40,),
    ),
    _token(
        "now and then a race",
        "one call in 16 loses an update, by the processor's clock",
        (_BETA, _BETA + " if (t == 1 && (ticks() >> 4) % 16 == 0) beta = 0.0f;"),
        evolve=(40,),
        caught=SMOKE | EDGES | REGIMES,
        luck="the clock picks the calls that lose an update, and the first of them tells",
    ),
    _token(
        "wrong above 1024 tokens",
        "an index that overflows late",
        (_BETA, _BETA + " if (t >= 1024) beta *= 0.5f;"),
        evolve=(12,),
        caught=EDGES,
    ),
    _token(
        "wrong for odd lengths",
        "the last of an odd number of tokens",
        (_BETA, _BETA + " if (h->length % 2 && t == h->length - 1) beta = 0.0f;"),
    ),
    _token(
        "wrong in the last head only",
        "one of several heads is a little off",
        (_BETA, _BETA + " if (h->head == h->heads - 1 && h->heads > 2) beta *= 1.01f;"),
        evolve=(41,),
        caught=EDGES,
    ),
    _token(
        "wrong in one element",
        "a single output of thousands is off by a thousandth",
        (_OUT, "h->o[t * h->value_stride + v] = to_io(v == V - 1 && t == 40 ? out * 1.001f + 1e-4f : out);"),
        evolve=(41,),
        caught=EDGES,
    ),
    _token(
        "values clipped",
        "a bound on v that ordinary data does not reach",
        (
            "float u = beta * (from_io(h->v[t * h->value_stride + v]) - seen);",
            "float x = from_io(h->v[t * h->value_stride + v]); x = x > 8.0f ? 8.0f : x; float u = beta * (x - seen);",
        ),
        evolve=(10,),
        caught=EDGES,
    ),
    _chunk(
        "one exponent for a chunk's values",
        "a large value costs its neighbours their last bits",
        (
            "    for (int i = 0; i < n; i++) {\n        for (int v = 0; v < V; v++) r[i][v] = p[i][v] = 0.0f;",
            "    float step = 1e-30f;\n    for (int i = 0; i < n; i++)\n        for (int v = 0; v < V; v++)"
            " step = fmaxf(step, fabsf(from_io(h->v[(t + i) * h->value_stride + v])) / 4096);\n"
            "    for (int i = 0; i < n; i++) {\n        for (int v = 0; v < V; v++) r[i][v] = p[i][v] = 0.0f;",
        ),
        (
            "(from_io(h->v[(t + i) * h->value_stride + v]) - r[i][v])",
            "(step * rintf(from_io(h->v[(t + i) * h->value_stride + v]) / step) - r[i][v])",
        ),
        dtype="bfloat16",
        evolve=(10, 41),
        caught=LAWS,
    ),
    _token(
        "looks one token ahead",
        "the last token of a pack reads the one after it",
        ("log_decay(h, t, c))", "log_decay(h, t + (t == 20 && t + 1 < h->length), c))"),
        caught=EDGES,
    ),
    _token(
        "reads past the end",
        "beta of a token that is not there",
        (
            "/* ON CALL */",
            "volatile float beyond = *(const volatile float *)((const char *)(beta + T * HV) + 64); (void)beyond;",
        ),
        caught=INTEGRITY,
        evolve=(42,),
    ),
    _token(
        "writes past the end",
        "one output too many",
        ("/* ON CALL */", "o[T * HV * V] = to_io(0.0f);"),
        caught=INTEGRITY,
        evolve=(42,),
    ),
    _token(
        "scratch in its inputs",
        "scales q in place and does not put it back",
        (
            "key_row(h->q + t * h->key_stride, h->scale, q);",
            "key_row(h->q + t * h->key_stride, h->scale, q);\n if (h->head % 2 == 0) ((io_t *)h->v)[t * h->value_stride] = to_io(0.0f);",
        ),
    ),
    _token(
        "more workspace than it asked for",
        "writes 8 KiB, asked for 4",
        ("/* ON CALL */", "memset(workspace, 0, 8192);"),
        caught=INTEGRITY,
        evolve=(42,),
    ),
    _token(
        "denormals flushed for good",
        "its caller computes otherwise afterwards",
        ("/* ON CALL */", "flush_denormals(1);"),
        evolve=(28,),
    ),
    _token(
        "uninitialised workspace",
        "counts on zeros there",
        (_RUN, _RUN.replace("&head", "&head") + " final_state = final_state;"),
        ("/* AFTER CALL */", "if (T && HV) o[0] = to_io(from_io(o[0]) + *(float *)workspace);"),
        evolve=(3,),
    ),
)
