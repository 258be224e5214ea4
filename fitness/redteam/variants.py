"""Honest kernels that differ in whatever the mathematics leaves open; each must pass."""

from typing import Any

from evotune.fitness.redteam.entry import Entry, Kind, edits

_POWER = ("float power(float x) { return expf(x); }", "float power(float x) { return %s; }")
_OPERAND = ("float operand(float x) { return x; }", "float operand(float x) { return %s; }")
_SEEN = """#pragma omp simd reduction(+ : seen)
            for (int c = 0; c < K; c++) {
                S[v][c] *= d[c];
                seen += S[v][c] * k[c];
            }"""
_DECAY = "for (int c = 0; c < K; c++) d[c] = expf(log_decay(h, t, c));"
_SOLVE = """    for (int i = 1; i < n; i++)
        for (int j = 0; j < i; j++)
            for (int v = 0; v < V; v++) r[i][v] -= a[i][j] * r[j][v];"""
# X = (1 + a)^-1 by columns, then one product with it.
_INVERSE = """    float X[C][C], out[C][V];
    for (int j = 0; j < n; j++)
        for (int i = j; i < n; i++) {
            X[i][j] = i == j;
            for (int m = j; m < i; m++) X[i][j] -= a[i][m] * X[m][j];
        }
    for (int i = 0; i < n; i++)
        for (int v = 0; v < V; v++) {
            out[i][v] = 0.0f;
            for (int j = 0; j <= i; j++) out[i][v] += X[i][j] * r[j][v];
        }
    memcpy(r, out, (size_t)n * V * sizeof(float));"""
# Halves: substitution inside each, and a product for what the second owes the first.
_HALVES = """    int half = n < C / 2 ? n : C / 2;
    for (int i = 1; i < half; i++)
        for (int j = 0; j < i; j++)
            for (int v = 0; v < V; v++) r[i][v] -= a[i][j] * r[j][v];
    for (int i = half; i < n; i++)
        for (int v = 0; v < V; v++) {
            float owed = 0.0f;
            for (int j = 0; j < half; j++) owed += a[i][j] * r[j][v];
            r[i][v] -= owed;
        }
    for (int i = half + 1; i < n; i++)
        for (int j = half; j < i; j++)
            for (int v = 0; v < V; v++) r[i][v] -= a[i][j] * r[j][v];"""
_PAIR = "float e = power(G[i][c] - G[j][c]) * operand(k[j][c]);"
_ANCHORED = """float A = G[%s][c];
                float e = power(A - G[j][c]) * operand(k[j][c]), f = power(G[i][c] - A);"""
_PRODUCTS = (
    ("kk += operand(k[i][c]) * e;", "kk += operand(k[i][c]) * f * e;"),
    ("qk += operand(q[i][c]) * e;", "qk += operand(q[i][c]) * f * e;"),
)


def _token(name: str, why: str, *pairs: tuple[str, str], **fields: Any) -> Entry:
    return Entry(name, Kind.VARIANT, why, "token_loop", edits(*pairs), **fields)


def _chunk(name: str, why: str, *pairs: tuple[str, str], **fields: Any) -> Entry:
    return Entry(name, Kind.VARIANT, why, "chunk_form", edits(*pairs), **fields)


def _template(name: str, why: str, dtype: str = "float32", contract: str = "plain", **knobs: Any) -> Entry:
    return Entry(name, Kind.VARIANT, why, "template", knobs=knobs, dtype=dtype, contract=contract)


_LENGTH = "#define C 16"
_BF16 = (_OPERAND[0], _OPERAND[1] % "bf16(x)")
_TF32 = (_OPERAND[0], _OPERAND[1] % "tf32(x)")

VARIANTS: tuple[Entry, ...] = (
    _token("token by token", "sums reordered by the compiler"),
    _token("token by token, bfloat16", "the same with bfloat16 io", dtype="bfloat16"),
    _token("token by token, production", "norm, gate and sigmoid inside", contract="production"),
    _token("token by token, production, bfloat16", "all at once", dtype="bfloat16", contract="production"),
    _token(
        "sums in order",
        "no reordering at all",
        ("#pragma omp simd reduction(+ : seen)\n", ""),
        ("#pragma omp simd reduction(+ : out)\n", ""),
    ),
    _token(
        "sums backwards",
        "from the last channel to the first",
        (_SEEN, "for (int c = K - 1; c >= 0; c--) {\n S[v][c] *= d[c];\n seen += S[v][c] * k[c];\n }"),
    ),
    _token(
        "sums in two halves",
        "even channels, then odd ones",
        (
            _SEEN,
            "for (int first = 0; first < 2; first++)\n for (int c = first; c < K; c += 2) {\n"
            " S[v][c] *= d[c];\n seen += S[v][c] * k[c];\n }",
        ),
    ),
    _token(
        "sums in double",
        "more precise than asked for",
        ("float seen = 0.0f, out = 0.0f;", "double seen = 0.0, out = 0.0;"),
        ("float u = beta * (from_io", "float u = (float)(beta * (from_io"),
        (" - seen);", " - seen));"),
        ("to_io(out);", "to_io((float)out);"),
    ),
    _token(
        "decays as powers of two",
        "exp2 of x / ln 2",
        (_DECAY, "for (int c = 0; c < K; c++) d[c] = exp2f(log_decay(h, t, c) * 1.44269504f);"),
    ),
    _token(
        "decays by squaring",
        "exp(x / 2) twice",
        (_DECAY, "for (int c = 0; c < K; c++) { d[c] = expf(0.5f * log_decay(h, t, c)); d[c] *= d[c]; }"),
    ),
    _token(
        "decayed keys beforehand",
        "S^T (d k) in place of (d S)^T k",
        ("seen += S[v][c] * k[c];", "seen += S[v][c] * (d[c] * k[c]);"),
        ("S[v][c] *= d[c];\n", ""),
        ("S[v][c] += u * k[c];", "S[v][c] = S[v][c] * d[c] + u * k[c];"),
    ),
    _token(
        "scale at the end",
        "o scaled, not q",
        ("h->scale, q);", "1.0f, q);"),
        ("to_io(out);", "to_io(out * h->scale);"),
    ),
    _token(
        "state transposed in scratch",
        "S[k][v], as other layouts have it",
        ("float S[V][K];", "float S[K][V];"),
        ("c++) S[v][c] = h->initial", "c++) S[c][v] = h->initial"),
        ("S[v][c] *= d[c];", "S[c][v] *= d[c];"),
        ("seen += S[v][c] * k[c];", "seen += S[c][v] * k[c];"),
        ("S[v][c] += u * k[c];", "S[c][v] += u * k[c];"),
        ("out += S[v][c] * q[c];", "out += S[c][v] * q[c];"),
        ("= S[v][c];", "= S[c][v];"),
    ),
    _token(
        "state in the workspace",
        "not on the stack",
        (
            "static void run_head(const head_t *h) {\n    float S[V][K];",
            "static void run_head(const head_t *h, float (*S)[K]) {",
        ),
        ("run_head(&head);", "run_head(&head, workspace);"),
        ("return 4096;", "return V * K * (int64_t)sizeof(float);"),
    ),
    _token(
        "bfloat16 norms",
        "q and k rounded after their norm, as bfloat16 kernels do",
        ("row[c] = from_io(x[c]) * factor;", "row[c] = bf16(from_io(x[c]) * factor);"),
        ("h->scale, q);", "1.0f, q);"),
        ("to_io(out);", "to_io(out * h->scale);"),
        dtype="bfloat16",
        contract="production",
    ),
    _token(
        "heads from the last to the first",
        "another order of independent work",
        ("hv = 0; hv < HV; hv++", "hv = HV - 1; hv >= 0; hv--"),
    ),
    _token(
        "denormals flushed while it runs",
        "and put back",
        ("/* ON CALL */", "int before = flush_denormals(1);"),
        ("/* AFTER CALL */", "flush_denormals(before);"),
    ),
    _chunk("chunks of 16", "pairwise decays"),
    _chunk("chunks of 8", "shorter", (_LENGTH, "#define C 8")),
    _chunk("chunks of 32", "longer", (_LENGTH, "#define C 32")),
    _chunk("chunks of 64", "as long as the bound knows", (_LENGTH, "#define C 64")),
    _chunk("chunks of 13", "no power of two", (_LENGTH, "#define C 13")),
    _chunk("chunks of 16, powers of two", "exp2", (_POWER[0], _POWER[1] % "exp2f(x * 1.44269504f)")),
    _chunk(
        "anchored in the middle",
        "decays by a quotient of two, whose anchor is the middle row",
        (_PAIR, _ANCHORED % "n / 2"),
        *_PRODUCTS,
    ),
    _chunk(
        "anchored at the start",
        "decays by a quotient of two, whose anchor is the first row",
        (_PAIR, _ANCHORED % "0"),
        *_PRODUCTS,
    ),
    _chunk("inverse, then product", "two passes: X = (1 + a)^-1, u = X r", (_SOLVE, _INVERSE)),
    _chunk(
        "substitution by halves",
        "two passes: inside halves, and between them",
        (_SOLVE, _HALVES),
        (_LENGTH, "#define C 32"),
    ),
    _chunk("bfloat16 operands", "float32 sums and state, as tensor cores have it", _BF16, dtype="bfloat16"),
    _chunk("bfloat16 operands, chunks of 64", "longer", _BF16, (_LENGTH, "#define C 64"), dtype="bfloat16"),
    _chunk("tf32 operands", "where io is bfloat16", _TF32, dtype="bfloat16"),
    _chunk(
        "tf32 operands, anchored in the middle",
        "where io is bfloat16",
        _TF32,
        (_PAIR, _ANCHORED % "n / 2"),
        *_PRODUCTS,
        dtype="bfloat16",
    ),
    _chunk("bfloat16 operands, inverse", "two passes", _BF16, (_SOLVE, _INVERSE), dtype="bfloat16"),
    _chunk(
        "chunks of 16, production", "bfloat16 operands and io", _BF16, dtype="bfloat16", contract="production"
    ),
    _template("template", "as shipped"),
    _template("template, whole state in rows", "another scratch layout", state="rows", order="block_outer"),
    _template(
        "template, factors where used",
        "another loop order",
        factors="per_block",
        order="block_outer",
        exp="polynomial",
    ),
    _template("template, chunked", "small matrix products", algorithm="chunked", chunk=16, value_tile=16),
    _template(
        "template, chunks of 64",
        "longer",
        algorithm="chunked",
        chunk=64,
        value_tile=16,
        pair_block=16,
        exp="libm_exp2",
    ),
    _template(
        "template, chunked, bfloat16",
        "bfloat16 io",
        "bfloat16",
        algorithm="chunked",
        chunk=32,
        value_tile=16,
        exp="polynomial",
    ),
    _template(
        "template, chunked, production",
        "norm and gate inside",
        "bfloat16",
        "production",
        algorithm="chunked",
        value_tile=16,
        pair_block=4,
    ),
    _template("template, four rows at once", "partial sums", key_unroll=4, value_tile=16),
)
