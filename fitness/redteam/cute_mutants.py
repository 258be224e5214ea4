"""CuTe-DSL kernels for Hopper that are wrong in one place, and honest ones that differ: the two templates
after small edits.

The values of the wrong ones are those of `mutants` in another form; the forms that only a GPU has (a barrier
left out, a slot freed too early, blocks that should not know of each other) are here alone.
"""

from typing import Any

from evotune.fitness.outcome import Failure
from evotune.fitness.redteam.entry import (
    EDGES,
    FINAL_STATE,
    HOPPER_IO,
    INTEGRITY,
    REGIMES,
    SMOKE,
    Entry,
    Kind,
    edits,
)

_WRONG = frozenset({Failure.WRONG, Failure.FAULT, Failure.UNSTABLE})
_OUTPUT = "return self.contract(s, q)"
_UPDATE = "            s[j] = s[j] + k[j] * u\n"
_ROWS = "            q, k, g = [self.lane_row(sX[slot, row, None], lane) for sX in ring[:3]]\n"
_OFFSET = "offset = first + self.plan.column_of(tx, c) * p.K + self.plan.key_of(tx, group)"
_PREPARED = (
    "            logit = self.fetch_beta(mBeta, t0 + p.tokens, end, hv, tx)\n"
    "            cute.arch.barrier()\n"
)
_FORGET_FIRST = (
    "                self.forget(columns[c], decay)\n"
    "                us.append(self.correction(columns[c], k, sV[i, self.plan.column_of(tx, c)].to(F32), sBeta[i]))\n"
)
_CORRECT_FIRST = "\n".join(reversed(_FORGET_FIRST.rstrip().split("\n"))) + "\n"


def _token(name: str, why: str, *pairs: tuple[str, str], **fields: Any) -> Entry:
    return _mutant(name, why, "sm90", *pairs, **fields)


def _chunk(name: str, why: str, *pairs: tuple[str, str], **fields: Any) -> Entry:
    return _mutant(name, why, "sm90_chunked", *pairs, **fields)


def _mutant(name: str, why: str, base: Any, *pairs: tuple[str, str], **fields: Any) -> Entry:
    fields = {"caught": SMOKE, "failures": _WRONG, **HOPPER_IO, **fields}
    return Entry(f"{base}: {name}", Kind.MUTANT, why, base, edits(*pairs), **fields)


def _variant(name: str, why: str, base: Any, *pairs: tuple[str, str], **knobs: Any) -> Entry:
    return Entry(f"{base}: {name}", Kind.VARIANT, why, base, edits(*pairs), knobs=knobs, **HOPPER_IO)


MUTANTS: tuple[Entry, ...] = (
    _token("zeros", "writes zeros everywhere", (_OUTPUT, f"{_OUTPUT} * F32(0.0)"), evolve=(5,)),
    _token(
        "gate of the token before",
        "off by one",
        (
            _ROWS,
            _ROWS + "            g = self.lane_row(ring[2][slot, cutlass.max(row - 1, 0), None], lane)\n",
        ),
    ),
    _token(
        "decay after the update",
        "the new write decays too",
        ("                self.forget(columns[c], decay)\n", ""),
        (
            "                self.update(columns[c], k, us[c])\n",
            "                self.update(columns[c], k, us[c])\n                self.forget(columns[c], decay)\n",
        ),
    ),
    _token("correction reads the undecayed state", "u before the decay", (_FORGET_FIRST, _CORRECT_FIRST)),
    _token(
        "beta ignored",
        "writes at full strength",
        ("return beta * (v - self.contract(s, k))", "return v - self.contract(s, k)"),
        evolve=(14,),
    ),
    _token(
        "beta twice",
        "written with beta squared",
        ("return beta * (v - self.contract(s, k))", "return beta * beta * (v - self.contract(s, k))"),
    ),
    _token(
        "scale missing", "o without scale", ("q[j] = q[j] * scale", "q[j] = q[j] * F32(1.0)"), evolve=(14,)
    ),
    _token(
        "scale assumed",
        "K^-0.5 in place of the argument",
        ("q[j] = q[j] * scale", "q[j] = q[j] * F32(p.K**-0.5)"),
        evolve=(13, 14),
        caught=EDGES,
    ),
    _token(
        "tail chunk skipped",
        "a last chunk that is not full is left out",
        ("(end - begin + (p.tokens - 1)) // p.tokens", "(end - begin) // p.tokens"),
        evolve=(3, 7),
    ),
    _token(
        "grouped heads dealt in turn",
        "hv % H for hv / (HV / H)",
        ("h = hv // (HV // H)", "h = hv % H"),
        caught=EDGES,
    ),
    _token(
        "one gate for all heads",
        "the first head's gates",
        ("(mG, hv, p.K, 0)", "(mG, hv - hv, p.K, 0)"),
        caught=EDGES,
    ),
    _token(
        "initial state ignored",
        "starts from zero",
        ("if cute.size(mInitial, mode=[0]) > 0:", "if cute.size(mInitial, mode=[0]) < 0:"),
        evolve=(14,),
    ),
    _token(
        "state transposed",
        "K-first where V-first is due, in and out",
        ("(n, (I64(hv) * p.V + v0) * p.K)", "(n, I64(hv) * p.V * p.K + v0)"),
        (_OFFSET, "offset = first + self.plan.column_of(tx, c) + self.plan.key_of(tx, group) * p.V"),
        knobs={"vector": 1},
    ),
    _token(
        "final state not written",
        "left as it was",
        ("if cute.size(mFinal, mode=[0]) > 0:", "if cute.size(mFinal, mode=[0]) < 0:"),
        evolve=(3,),
    ),
    _token(
        "empty sequence skipped",
        "its final state is not the initial one but nothing",
        (FINAL_STATE, "        if chunks > 0:\n            self.final_state(mFinal, first, rS, sS, tx)\n"),
        evolve=(3,),
        caught=EDGES,
    ),
    _token(
        "sequence boundary leaked",
        "a sequence begins with the last token of the one before",
        ("begin, end = mCu[n], mCu[n + 1]", "begin, end = cutlass.max(mCu[n] - 1, 0), mCu[n + 1]"),
        caught=EDGES,
    ),
    _token(
        "history cut after 256 tokens",
        "the state is dropped now and then, as if it had decayed",
        (
            "            slot = (slot + 1) % p.stages\n",
            "            slot = (slot + 1) % p.stages\n"
            "            if chunk % 16 == 15:\n"
            "                rS.fill(0.0)\n",
        ),
        evolve=(8,),
        caught=EDGES,
    ),
    _token(
        "norm without epsilon",
        "q and k of a zero row become NaN",
        ("rsqrt(square + F32(NORM_EPSILON)", "rsqrt(square + F32(0.0)"),
        caught=REGIMES,
    ),
    _token(
        "lower bound assumed",
        "-4 for the argument, which is -5",
        ("g[j] = lower_bound * self.sigmoid", "g[j] = F32(-4.0) * self.sigmoid"),
        evolve=(13,),
    ),
    _token(
        "a barrier left out",
        "steps read rows that other warps have yet to prepare",
        (_PREPARED, _PREPARED.replace("            cute.arch.barrier()\n", "")),
        knobs={"warps": 8, "tokens": 8},
        evolve=(40,),
        caught=SMOKE | EDGES | INTEGRITY,
        luck="its warps race, and the call in which they lose tells; sixteen repeats see to it",
    ),
    _token(
        "wrong above 1024 tokens",
        "an index that overflows late",
        (
            "                sBeta[tx] = self.beta(logit)\n",
            "                strength = self.beta(logit)\n"
            "                if t0 - begin >= 1024:\n"
            "                    strength = strength * F32(0.5)\n"
            "                sBeta[tx] = strength\n",
        ),
        evolve=(12,),
        caught=EDGES,
    ),
    _token(
        "writes past the end",
        "one output too many",
        (
            "            (mO.iterator + offset).store(y.to(self.io))\n",
            "            (mO.iterator + offset).store(y.to(self.io))\n"
            "            if t == 0:\n"
            "                (mO.iterator + (I64(T) * HV * self.plan.V + column)).store(y.to(self.io))\n",
        ),
        caught=INTEGRITY,
        evolve=(42,),
    ),
    _chunk(
        "inter-chunk term dropped",
        "q S is left out of the output",
        ('        self.contract(O, entering, base, where + at["qg"], first, turned, lane)\n', ""),
        evolve=(8,),
    ),
    _chunk(
        "correction dropped",
        "values are written without what the state already holds",
        ("R[8 * s + i] = value[i].to(F32) - R[8 * s + i]", "R[8 * s + i] = value[i].to(F32)"),
        knobs={"solve": "recurrence"},
    ),
    _chunk(
        "only the last chunk",
        "outputs of earlier chunks are zero",
        (
            "            self.write(rows, base, chunk, O, w, lane)\n",
            "            if chunk + 1 < chunks:\n"
            "                O.fill(0.0)\n"
            "            self.write(rows, base, chunk, O, w, lane)\n",
        ),
        evolve=(5, 8, 15),
        caught=EDGES,
    ),
    _chunk(
        "Neumann series cut at order 1",
        "1 - L for its inverse",
        ("        x = self.invert(base, first, lane)\n", "        x = self.first_order(base, first, lane)\n"),
        (
            "    # EVOLVE-BEGIN invert\n",
            "    @cute.jit\n"
            "    def first_order(self, base, where, lane):\n"
            "        j = lane % SPAN\n"
            "        x = [F32(0.0) for _ in range(SPAN)]\n"
            "        for c in cutlass.range_constexpr(SPAN):\n"
            "            column = self.lower_column(base, where, c)\n"
            "            if j == c:\n"
            "                x[c] = F32(1.0)\n"
            "                for i in cutlass.range_constexpr(c + 1, SPAN):\n"
            "                    x[i] = -column[i]\n"
            "        return x\n\n"
            "    # EVOLVE-BEGIN invert\n",
        ),
        evolve=(9,),
    ),
    _chunk(
        "wrong triangle",
        "L is read above its diagonal",
        ("if column >= row:\n                    value", "if column <= row:\n                    value"),
    ),
    _chunk(
        "a token does not see itself",
        "M lacks its diagonal",
        (
            "if p.product_column(lane, e, j) > p.product_row(lane, e):",
            "if p.product_column(lane, e, j) >= p.product_row(lane, e):",
        ),
    ),
    _chunk(
        "block below the diagonal dropped",
        "the second half of a chunk does not know of the first one's corrections",
        ("            merged[i] = -merged[i]\n", "            merged[i] = F32(0.0)\n"),
        caught=EDGES,
    ),
    _chunk(
        "state decays after the update",
        "the chunk's own writes decay once more",
        ('        self.forget(S, base, where + at["end"], first, lane)\n', ""),
        (
            '        self.update(S, left, base, where + at["kg"], share * p.keys, lane)\n',
            '        self.update(S, left, base, where + at["kg"], share * p.keys, lane)\n'
            '        self.forget(S, base, where + at["end"], share * p.keys, lane)\n',
        ),
    ),
    _chunk(
        "state between chunks in bfloat16",
        "the master state is rounded once a chunk",
        (
            '        self.update(S, left, base, where + at["kg"], share * p.keys, lane)\n',
            '        self.update(S, left, base, where + at["kg"], share * p.keys, lane)\n'
            "        for j in cutlass.range_constexpr(p.keys // 8):\n"
            "            part = self.block(S, j, 1)\n"
            "            for e in cutlass.range_constexpr(4):\n"
            "                part[e] = part[e].to(BF16).to(F32)\n"
            "            self.keep(S, j, part)\n",
        ),
        evolve=(31, 32),
        caught=REGIMES,
    ),
    _chunk(
        "final state one chunk early",
        "stored before the last chunk",
        (
            "            self.walk(records, rows, S, (mWork, N, T), w, lane, tx)\n"
            "            self.final_state(mFinal, states, S, lane)\n",
            "            self.final_state(mFinal, states, S, lane)\n"
            "            self.walk(records, rows, S, (mWork, N, T), w, lane, tx)\n",
        ),
    ),
)

VARIANTS: tuple[Entry, ...] = (
    _variant("as shipped", "token by token", "sm90"),
    _variant("state in shared memory", "another home of the state", "sm90", state="shared", unroll=2),
    _variant("two lanes a column", "long sums in a thread", "sm90", value_tile=64, warps=4, key_split=2),
    _variant("sums over a whole warp", "32 lanes a column", "sm90", key_split=32, vector=2, partials=1),
    _variant("exact exponentials", "denormals kept", "sm90", exp="exact", tokens=8, stages=4),
    _variant("not pipelined", "one slot", "sm90", stages=1, tokens=32, unroll=4),
    _variant(
        "scale at the end",
        "o scaled, not q",
        "sm90",
        ("                q[j] = q[j] * scale\n", "                q[j] = q[j] * F32(1.0)\n"),
        (
            "out = (mO, mWork, T, HV, hv, v0, t0 + i, end)",
            "out = (mO, mWork, T, HV, hv, v0, t0 + i, end, scale)",
        ),
        ("mO, mWork, T, HV, hv, v0, t, end = out", "mO, mWork, T, HV, hv, v0, t, end, scale = out"),
        (
            "            (mO.iterator + offset).store(y.to(self.io))\n",
            "            (mO.iterator + offset).store((y * scale).to(self.io))\n",
        ),
    ),
    _variant("as shipped", "chunks, two kernels", "sm90_chunked"),
    _variant("inverse by halves", "8 × 8 blocks and their merge", "sm90_chunked", inverse="halves"),
    _variant("one exponential", "e^-G as 1 / e^G", "sm90_chunked", exp="reciprocal", partials=2),
    _variant(
        "copied by all threads", "cp.async", "sm90_chunked", copy="cp.async", loader="inline", value_tile=32
    ),
    _variant("state in shared memory", "another home", "sm90_chunked", state="shared", value_tile=32),
    _variant("kernels that overlap", "dependent launch", "sm90_chunked", start="early", sweep="backward"),
    _variant("chunks of 16", "shorter", "sm90_chunked", chunk=16, units=2),
    _variant("solved by the recurrence", "X (V - KW S) there", "sm90_chunked", solve="recurrence"),
    _variant("solved by prepare", "W for KW in the record", "sm90_chunked", solve="prepare"),
    _variant("two warps a strip", "each with half of K", "sm90_chunked", key_warps=2),
    _variant("longest sequences first", "another order", "sm90_chunked", order="longest", units=1),
)
