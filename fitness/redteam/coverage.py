"""The 72 known ways to fool an evaluator of kernels, and what stands for each of them on the host.

The catalogue: published incidents of kernel benchmarks and kernel-writing agents (KernelBench,
reference-kernels, kernelguard, pygpubench, CUDA-L1, Sakana, GEAK, flashinfer-bench and others). An entry of
the corpus names the numbers it stands for; the rest is said here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from evotune.fitness.redteam.entry import Entry

TITLES: tuple[str, ...] = (
    "output cached by pointer, id or shape",
    "output cached by a fingerprint of its inputs",
    "work skipped because outputs persist",
    "freed result of the reference received by allocation",
    "zeros or a constant within tolerance",
    "identity or pass-through",
    "silent launch failure, stale output passes",
    "recurrence truncated, old state dropped",
    "inverse truncated where inputs look nominal",
    "statistical shortcut",
    "distribution detected from a prefix",
    "exact only for checked sizes",
    "shape or seed hard-coded, random stream known",
    "some inputs ignored",
    "part of the calls merged and replayed",
    "output computed when it is compared",
    "reference or library call behind a fig leaf",
    "library reached through renamed symbols",
    "known source pasted",
    "exception falls back to the reference",
    "inherits from the reference",
    "inputs changed in place so that the reference agrees",
    "NaN as a wildcard",
    "expected answer found by walking the process",
    "expected buffer found by its address",
    "heap, stack or /proc/self/mem scanned",
    "validation function replaced",
    "global flags changed, so that the reference changes",
    "tolerance or problem file edited",
    "measurement harness edited",
    "precision lowered",
    "tolerance keyed so that it never applied",
    "reference itself wrong",
    "ill-conditioned problem decides by luck",
    "seeds that are all the same",
    "another dtype or path checked than timed",
    "evolved kernel never loaded",
    "missing harness counts as correct",
    "results scraped from what the candidate prints",
    "race passes by luck",
    "aggregate hides a local failure",
    "reads or writes out of bounds",
    "launched on another stream",
    "work left running",
    "timers patched",
    "event handle, GOT or code patched",
    "results forged through descriptors or exit",
    "warm-up detected, repetitions cut",
    "benchmark mode sniffed",
    "caches warm that should be cold",
    "copies dropped, later calls see warm or changed data",
    "graph replay with stale data",
    "work done at import or warm-up",
    "dispatch cache: fast in the harness, slow cold",
    "launches not waited for",
    "launched on a stream the events do not see",
    "host dispatch dominates",
    "profiler reports no activity",
    "underflow in the aggregate",
    "faster than physics",
    "wrong roofline constant",
    "clock and thermal drift",
    "shared device",
    "weak baseline",
    "wall time of the harness dilutes gains",
    "one side hot, the other cold",
    "other shapes searched than verified",
    "modules replaced, packages installed",
    "harness or hidden plans read",
    "earlier solutions copied from caches",
    "keys stolen",
    "hidden numbers leak to the model",
)

Standing = Literal["covered", "elsewhere", "not applicable", "open"]

_GPU = "a GPU's: the host has neither streams nor events nor graphs"
_ELSEWHERE: dict[int, str] = {
    30: "the judge lies outside every sandbox: tests/fitness/test_sandbox.py",
    33: "two float64 oracles must agree on every case: tests/reference_kda/test_oracles.py",
    37: "what is timed is the object whose digest is recorded: tests/fitness/test_build.py",
    50: "each timed call's inputs were just written by another process: tests/fitness/test_timing.py",
    59: "no time below the floor enters a mean: tests/fitness/test_timing.py",
    62: "pairs take turns in balanced random order: tests/fitness/test_timing.py",
    63: "builds rest while the host is timed; what else runs here burdens both sides of a pair",
    60: "a time below the floor is forged: tests/fitness/test_timing.py",
    64: "the baseline is the template's default, warmed, in the same block; the export adds a numpy form",
    65: "what is timed is the call alone, inside the runner: tests/fitness/test_timing.py",
    66: "both sides of a pair warm up alike, in balanced random order: tests/fitness/test_timing.py",
    72: "a model is shown gate names and first failures, never timed cases: tests/mutators/test_prompt.py",
}
_OPEN: dict[int, str] = {
    19: "a pasted kernel is judged as any other; nothing compares it with known sources",
    61: "the floor uses what no core exceeds (`TimingPlan.bandwidth_gb_s`), not a peak measured here",
}
_NOT_APPLICABLE: dict[int, str] = {
    16: 'outputs are bytes in memory that the judge owns and copies at once; see also "work put off"',
    43: _GPU,
    52: _GPU,
    56: _GPU,
    58: _GPU,
    57: "a host call has no launch; its cost on an empty problem is an objective of its own",
}


DOORS: tuple[str, ...] = (
    "Native code runs in the process that is timed: it may overwrite the runner's Python and let its clock"
    " say anything. The parent's clock bounds the gain: what it finds missing is charged, and beyond 2 ms +"
    " half of the reported time the kernel is FORGED.",
    "A kernel that knows the timed length may use a path there that is right on the study's own regime only:"
    " timed outputs are compared with the truth, but adversarial regimes meet the gate's lengths.",
    "A kernel that is wrong in a small share p of its calls passes with probability (1 - p)^n, n being about"
    " 130 calls of the full gate and 8 timed ones: it gains p of its time.",
)
"""What remains open by design, for a reader of the report."""


@dataclass(frozen=True)
class Known:
    """One way to fool an evaluator. `by`: names of the corpus's entries that stand for it; `why`: else."""

    number: int
    title: str
    standing: Standing
    by: tuple[str, ...]
    why: str = ""


def coverage(entries: Sequence[Entry]) -> tuple[Known, ...]:
    """Every number once, in order. Raises KeyError for a number that nothing and nobody accounts for."""
    return tuple(_known(number, title, entries) for number, title in enumerate(TITLES, start=1))


def _known(number: int, title: str, entries: Sequence[Entry]) -> Known:
    by = tuple(entry.name for entry in entries if number in entry.evolve)
    if by:
        return Known(number, title, "covered", by, _NOT_APPLICABLE.get(number, ""))
    if number in _ELSEWHERE:
        return Known(number, title, "elsewhere", (), _ELSEWHERE[number])
    if number in _NOT_APPLICABLE:
        return Known(number, title, "not applicable", (), _NOT_APPLICABLE[number])
    return Known(number, title, "open", (), _OPEN[number])
