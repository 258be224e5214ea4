"""The 72 known ways to fool an evaluator of kernels, and what stands for each of them.

The catalogue: published incidents of kernel benchmarks and kernel-writing agents (KernelBench,
reference-kernels, kernelguard, pygpubench, CUDA-L1, Sakana, GEAK, flashinfer-bench and others). An entry of
the corpus names the numbers it stands for; what no kernel shows, or one shows only in part, is said here.
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

_ELSEWHERE: dict[int, str] = {
    19: "a pasted kernel is judged as any other; its export says how much of its text public kernels have:"
    " tests/evotune/test_resemblance.py::test_a_paste_is_found_by_its_share_of_the_new_text",
    29: "the limits of a comparison are derived from each input, after the build, in a process where no"
    " candidate runs; a build writes nowhere but in its scratch folder:"
    " tests/fitness/test_sandbox.py::test_nothing_outside_scratch_can_be_written",
    30: "the judge's code is no candidate's to write, in a build or in a call:"
    " tests/fitness/test_sandbox.py::test_nothing_outside_scratch_can_be_written",
    33: "two float64 oracles must agree on every case:"
    " tests/reference_kda/test_oracles.py::test_forms_agree_in_every_regime",
    35: "seeds come from the operating system, and no two evaluations have equal inputs:"
    " tests/fitness/redteam/test_corpus.py::test_no_two_evaluations_see_the_same_inputs",
    50: "each timed call's inputs were just written by another process:"
    " tests/fitness/test_timing.py::test_inputs_are_written_after_the_last_call_before_them; a GPU reads"
    " twice its L2 before each",
    57: "a GPU's device time is the objective; what a call costs the host is an objective of its own:"
    " tests/fitness/test_cuda.py::test_a_good_candidate_passes_gate_and_timing",
    59: "no time below the floor enters a mean:"
    " tests/fitness/test_timing.py::test_below_the_physical_floor_is_quarantined",
    60: "a time below the floor is forged:"
    " tests/fitness/test_timing.py::test_below_the_physical_floor_is_quarantined",
    61: "the floor rests on what this machine was measured to copy:"
    " tests/fitness/test_peak.py::test_no_copy_exceeds_what_was_measured; a GPU's on its own copy bandwidth",
    62: "pairs take turns in balanced random order:"
    " tests/fitness/test_timing.py::test_calls_alternate_in_balanced_order",
    63: "builds rest while the host is timed; a GPU has one owner:"
    " tests/fitness/test_lease.py::test_a_taken_gpu_names_its_owner",
    64: "the baseline is the template's default, warmed, in the same block; an export adds a numpy form:"
    " tests/fitness/test_host.py::test_confirm_judges_fully_and_times_against_the_default",
    65: "what is timed is the call alone, inside the judged process:"
    " tests/fitness/test_timing.py::test_samples_are_kept_and_a_slow_kernel_is_slow",
    66: "both sides of a pair warm up alike, in balanced random order:"
    " tests/fitness/test_timing.py::test_calls_alternate_in_balanced_order",
    72: "a model is shown gate names and first failures, never timed cases:"
    " tests/mutators/test_prompt.py::test_of_hidden_cases_only_the_names_are_told",
}
_NOT_APPLICABLE: dict[int, str] = {
    21: "there is no class to inherit from: what a candidate hands over is an object with one function on raw"
    " buffers. A reference called by its name is number 20's",
    58: "no profiler is asked; times are a GPU's events. A captured call without a kernel is refused, never"
    " timed as 0, which only a GPU's tests show (`launches on another stream` of"
    " tests/fitness/test_cuda_gpu.py::test_a_planted_bug_is_caught)",
}
_OPEN: dict[int, str] = {}
_SAID: tuple[tuple[Standing, dict[int, str]], ...] = (
    ("elsewhere", _ELSEWHERE),
    ("not applicable", _NOT_APPLICABLE),
    ("open", _OPEN),
)
"""What is said of a number comes before the entries that try a part of it."""


DOORS: tuple[str, ...] = (
    "Native code runs in the process that is timed: it may overwrite the runner's Python, replace the page"
    " that clocks are read from, or find the number of the request and answer before it is done. The parent's"
    " clock bounds the gain: on the host what it finds missing is charged, and beyond 2 ms + half of the"
    " reported time the kernel is FORGED; an early answer gains what the parent takes to look at the outputs,"
    " about 0.1 ms. On a GPU up to 250 us and a tenth of a call may be left out unseen.",
    "Launch code for a GPU is machine code that a candidate's Python has seen: it calls nothing but what the"
    " DSL's own does, but its instructions are not checked.",
    "Memory of a GPU has no rights by the page: a kernel may keep what it likes beyond its buffers until its"
    " process ends. What that is good for is tried once a block, with values that were never there: a kernel"
    " that gains less than 30 % by it, or knows symmetric images of a problem again, is not told from an"
    " honest one.",
    "All heads of a timed problem on a GPU are images of one or two, which a kernel could find out.",
    "A kernel that is wrong in a small share p of its calls passes with probability (1 - p)^n, n being about"
    " 130 calls of the full gate and 8 timed ones: it gains p of its time.",
    "What an exported kernel does where nobody judges it is decided by its machine code alone. Its source is"
    " exported beside it, and `verify` builds it again; read it before you deploy it.",
)
"""What remains open by design, for a reader of the report."""


@dataclass(frozen=True)
class Known:
    """One way to fool an evaluator.

    Attributes:
        standing: covered by the corpus, elsewhere (`why` names the test that decides), not applicable, open.
        by: the corpus's entries that try it, or a part of it.
        why: what stands for it, where that is not the entries.
    """

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
    for standing, reasons in _SAID:
        if number in reasons:
            return Known(number, title, standing, by, reasons[number])
    if not by:
        raise KeyError(number)
    return Known(number, title, "covered", by)
