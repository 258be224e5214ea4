"""What is asked of a kernel: answers against a truth, and answers to related calls against each other.

The second kind needs no truth and is of bits. A sequence is computed in the same order whatever surrounds it,
so its answer must not depend on its neighbours, on what comes later, on what memory held before, on the size
of the call, or on the stream. Equality of bits finds races that are smaller than any tolerance.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evotune.reference_kda.case import KdaCase, Question
from evotune.reference_kda.workload import Workload, draw_inputs
from evotune.search_space.template import Specialization
from tests.search_space.kda_calls import (
    HUGE,
    NAN,
    ZERO,
    Arguments,
    Memory,
    Truth,
    call,
    excerpt,
    same,
    wait,
)
from tests.search_space.kda_families import JUDGED_TOKENS, Case
from tests.search_space.kda_objects import Kernel
from tests.search_space.kda_table import Finding

REPEATS = 20
PER_TOKEN = ("q", "k", "v", "g", "beta")
NAMES = (*PER_TOKEN, "A_log", "dt_bias", "initial_state", "cu_seqlens", "o", "final_state", "workspace")
"""The entry's tensors in order."""


@dataclass(frozen=True)
class Use:
    """One question. `ask` gives what was found, or only what was wrong, "" for nothing.

    Attributes:
        calls: how often it calls the kernel.
        reports: public bug reports whose trigger this is.
        hard: whether its relative error is of adversarial inputs.
    """

    family: str
    name: str
    ask: Callable[[Kernel], Finding | str]
    reports: tuple[str, ...] = ()
    calls: int = 2
    hard: bool = False


class Judged:
    """A solved case on the device."""

    def __init__(self, case: Case, solved: KdaCase, device: str) -> None:
        self._case = case
        self._arguments, self._truth = Arguments(solved, device), Truth(solved, device)
        # Norms of a few tokens are single random numbers: only the derived bound judges those.
        enough = sum(case.workload.lengths) >= JUDGED_TOKENS
        self._limit = case.limit if enough and case.workload.dtype == "bfloat16" else None

    @property
    def use(self) -> Use:
        case = self._case
        return Use(case.family, case.name, self.ask, case.reports, 1, case.hard)

    def ask(self, kernel: Kernel) -> Finding:
        found = self._truth.judge(self._arguments, call(kernel, self._arguments))
        relative = max(found.relative) if self._limit is not None else None
        failure = found.breach
        if not failure and not found.ratio <= 1:
            failure = f"{found.ratio:.3g} of the bound in {found.where}"
        if not failure and relative is not None and self._limit is not None and not relative <= self._limit:
            failure = f"relative error {relative:.4f} above {self._limit}"
        return Finding(failure, found.ratio, relative)


class Uses:
    """All uses for one specialization; inputs are drawn and placed once."""

    def __init__(self, spec: Specialization, device: str) -> None:
        self.device = device
        self._first: dict[Kernel, Memory] = {}
        self._base = Workload(
            "use",
            "gate",
            (),
            heads=2,
            value_heads=2,
            K=spec.integer("K"),
            V=spec.integer("V"),
            dtype=spec.dtype,
            contract=str(spec["contract"]),
            initial_state=True,
        )

    def all(self) -> Iterator[Use]:
        yield Use("5 causality", "later tokens changed", self.later_tokens, ("fla#1240", "fla#1242"), calls=9)
        yield Use("5 causality", "later tokens left out", self.fewer_tokens, ("fla#1240",), calls=8)
        yield Use("5 causality", "neighbours changed", self.neighbours)
        yield Use("5 causality", "alone and in a pack", self.alone)
        yield Use(
            "6 determinism", f"{REPEATS} calls", self.repeated, ("fla#945", "FlashKDA#24"), calls=2 * REPEATS
        )
        yield Use("6 determinism", "inputs refilled in place", self.refilled, calls=3)
        yield Use("1 lengths", "final state not wanted", self.no_final_state, calls=16)
        if self.device == "cuda":
            yield Use(
                "6 determinism", "two streams at once", self.two_streams, ("cudnn-frontend#1017",), calls=12
            )
            yield Use(
                "6 determinism", "graph replay, padded cu_seqlens", self.replayed, ("sglang#27488",), calls=7
            )
        yield Use("7 poison", "what memory held", self.poisoned, ("fla#1134",), calls=3)
        yield Use("8 state", "cut at a chunk's end", self.cut, calls=5)
        yield Use("8 state", "value heads in another order", self.heads_swapped, ("fla#624",))
        yield Use("2 packs", "1,000 sequences of 1 to 3", self.many, ("fla#1077",))
        yield Use("11 strides", "rows with gaps", self.gaps, ("cudnn-frontend#1056",), calls=10)

    # Questions

    @cache  # noqa: B019 - lives as long as the tests of one specialization
    def question(self, lengths: tuple[int, ...], seed: int = 1, **fields: Any) -> Question:
        workload = replace(self._base, lengths=lengths, **fields)
        return Question(workload.name, workload, draw_inputs(workload, seed))

    @cache  # noqa: B019 - likewise
    def placed(self, lengths: tuple[int, ...], seed: int = 1) -> Arguments:
        return Arguments(self.question(lengths, seed), self.device)

    # 5 causality

    def later_tokens(self, kernel: Kernel) -> str:
        length = 150
        before = call(kernel, self.placed((length,)))["o"]
        other = self.question((length,), 2, regime="strong")
        for cut in (1, 7, 15, 16, 17, 47, 64, 101):
            mixed = self.question((length,))
            inputs = dict(mixed.inputs)
            for name in PER_TOKEN:
                inputs[name] = np.concatenate([_some(mixed, name)[:cut], _some(other, name)[cut:]])
            after = call(kernel, Arguments(Question("mixed", mixed.workload, inputs), self.device))["o"]
            if not same(before[:cut], after[:cut]):
                return f"with other tokens from {cut} on, o before: {_apart(before[:cut], after[:cut])}"
            if same(before[cut:], after[cut:]):
                return f"with other tokens from {cut} on, o from there on is the same"
        return ""

    def fewer_tokens(self, kernel: Kernel) -> str:
        whole = self.question((150,))
        before = call(kernel, self.placed((150,)))["o"]
        for cut in (1, 15, 16, 17, 33, 64, 149):
            part = excerpt(whole, slice(cut), whole.inputs["initial_state"])
            after = call(kernel, Arguments(part, self.device))["o"]
            if not same(before[:cut], after):
                return f"the first {cut} of 150 tokens give another o: {_apart(before[:cut], after)}"
        return ""

    def neighbours(self, kernel: Kernel) -> str:
        lengths, middle = (37, 90, 21), slice(37, 127)
        first, other = self.question(lengths), self.question(lengths, 2, regime="strong")
        inputs = dict(first.inputs)
        for name in PER_TOKEN:
            inputs[name] = _some(other, name).copy()
            inputs[name][middle] = _some(first, name)[middle]
        inputs["initial_state"] = _some(other, "initial_state").copy()
        inputs["initial_state"][1] = _some(first, "initial_state")[1]
        for name in ("A_log", "dt_bias"):
            inputs[name] = first.inputs[name]
        one = call(kernel, self.placed(lengths))
        two = call(kernel, Arguments(Question("neighbours", first.workload, inputs), self.device))
        return self._sequence(one, two, middle, 1, middle, 1, "with other neighbours")

    def alone(self, kernel: Kernel) -> str:
        lengths, middle = (37, 90, 21), slice(37, 127)
        pack = self.question(lengths)
        lone = excerpt(pack, middle, _some(pack, "initial_state")[1:2])
        one, two = call(kernel, self.placed(lengths)), call(kernel, Arguments(lone, self.device))
        return self._sequence(one, two, middle, 1, slice(0, 90), 0, "alone")

    @staticmethod
    def _sequence(one: Memory, two: Memory, rows: slice, n: int, other_rows: slice, m: int, how: str) -> str:
        if not same(one["o"][rows], two["o"][other_rows]):
            return f"a sequence {how} has another o: {_apart(one['o'][rows], two['o'][other_rows])}"
        if not same(one["final_state"][n], two["final_state"][m]):
            return f"a sequence {how} has another final state"
        return ""

    # 6 determinism

    def repeated(self, kernel: Kernel) -> str:
        for arguments in (self.placed((700, 0, 33, 1, 260)), self._busy):
            first = call(kernel, arguments)
            for i in range(1, REPEATS):
                if difference := _differ(first, call(kernel, arguments)):
                    return f"call {i + 1} of {REPEATS}: {difference}"
        return ""

    @cached_property
    def _busy(self) -> Arguments:
        """Many blocks, so that multiprocessors are full and blocks start at different times."""
        return Arguments(self.question((333, 128, 64, 500) * 12, heads=4, value_heads=8), self.device)

    def refilled(self, kernel: Kernel) -> str:
        lengths = (130, 61)
        one, two = self.question(lengths), self.question(lengths, 2)
        arguments = Arguments(one, self.device)
        first = call(kernel, arguments)
        arguments.refill(two)
        second = call(kernel, arguments)
        fresh = call(kernel, Arguments(two, self.device))
        if not _differ(first, second):
            return "other inputs in the same memory give the same answer"
        difference = _differ(second, fresh)
        return f"refilled in place and in fresh memory: {difference}" if difference else ""

    def no_final_state(self, kernel: Kernel) -> str:
        for length in (1, 15, 16, 17, 33, 65, 129, 500):
            arguments = self.placed((length,))
            with_state, without = call(kernel, arguments), call(kernel, arguments, final_state=False)
            if not same(with_state["o"], without["o"]):
                return f"{length} tokens: o changes when the final state is not wanted"
        return ""

    def two_streams(self, kernel: Kernel) -> str:
        pair = (self._busy, self.placed((700, 0, 33, 1, 260)))
        alone = [call(kernel, arguments) for arguments in pair]
        streams = [torch.cuda.Stream() for _ in pair]
        answers: list[list[Memory]] = [[a.outputs(kernel) for _ in range(5)] for a in pair]
        bound = [[a.bind(memory) for memory in found] for a, found in zip(pair, answers, strict=True)]
        torch.cuda.synchronize()
        for i in range(5):
            for stream, calls in zip(streams, bound, strict=True):
                with torch.cuda.stream(stream):
                    kernel.function(*calls[i])
        for stream in streams:
            with torch.cuda.stream(stream):
                wait(self.device)
        for expected, found in zip(alone, answers, strict=True):
            for memory in found:
                if difference := _differ(expected, memory):
                    return f"beside another stream: {difference}"
        return ""

    def replayed(self, kernel: Kernel) -> str:
        """A captured call, replayed after its inputs were filled anew with fewer, shorter sequences."""
        full = self.question((96, 70, 64, 33, 20, 17))
        arguments = Arguments(full, self.device)
        outputs = arguments.outputs(kernel)
        bound = arguments.bind(outputs)
        kernel.function(*bound)
        wait(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin()  # torch.cuda.graph would collect garbage and free all memory first
            kernel.function(*bound)
            graph.capture_end()
        for lengths, seed in (
            ((96, 70, 64, 33, 20, 17), 3),
            ((5, 200, 0, 40, 0, 0), 4),
            ((1, 0, 0, 0, 0, 0), 5),
        ):
            question = self.question(lengths, seed, slack=300 - sum(lengths))
            arguments.refill(question)
            outputs.poison()
            graph.replay()
            wait(self.device)
            if difference := _differ(call(kernel, Arguments(question, self.device)), outputs):
                return f"lengths {lengths} through a graph made for {(96, 70, 64, 33, 20, 17)}: {difference}"
        return ""

    # 7 poison

    def poisoned(self, kernel: Kernel) -> str:
        question = self.question((131, 0, 17, 1))
        first = call(kernel, Arguments(question, self.device, NAN), word=NAN)
        for word in (HUGE, ZERO):
            other = call(kernel, Arguments(question, self.device, word), word=word)
            if difference := _differ(first, other):
                return f"with {word:#x} where there was NaN: {difference}"
        return ""

    # 8 state

    def cut(self, kernel: Kernel) -> str:
        """64 and 128 tokens are whole chunks of every length: carrying the state changes no bit."""
        whole = self.question((210,))
        expected = call(kernel, self.placed((210,)))
        for at in (64, 128):
            head = call(
                kernel, Arguments(excerpt(whole, slice(at), whole.inputs["initial_state"]), self.device)
            )
            carried = head["final_state"].cpu().numpy()
            tail = call(kernel, Arguments(excerpt(whole, slice(at, None), carried), self.device))
            if not same(torch.cat([head["o"], tail["o"]]), expected["o"]):
                return f"cut at {at}: o differs"
            if not same(tail["final_state"], expected["final_state"]):
                return f"cut at {at}: the final state differs"
        return ""

    def heads_swapped(self, kernel: Kernel) -> str:
        """Value heads of one group, in another order, with all that belongs to them."""
        first = self.question((90, 21), heads=2, value_heads=6)
        order = np.array([2, 0, 1, 4, 5, 3])
        inputs = dict(first.inputs)
        for name, axis in (
            ("v", 1),
            ("g", 1),
            ("beta", 1),
            ("initial_state", 1),
            ("A_log", 0),
            ("dt_bias", 0),
        ):
            if inputs[name] is not None:
                inputs[name] = np.ascontiguousarray(np.take(_some(first, name), order, axis))
        one = call(kernel, Arguments(first, self.device))
        two = call(kernel, Arguments(Question("swapped", first.workload, inputs), self.device))
        index = torch.from_numpy(order).to(self.device)
        if not same(one["o"][:, index], two["o"]):
            return "o does not follow its head"
        if not same(one["final_state"][:, index], two["final_state"]):
            return "the final state does not follow its head"
        return ""

    def forgotten(self, kernel: Kernel) -> str:
        """After a gate of −∞ comes a sequence of its own; of kernels that take any gate."""
        at, whole = 70, self.question((130,), regime="weak")
        inputs = dict(whole.inputs)
        alone = call(kernel, Arguments(excerpt(whole, slice(at, None)), self.device))
        if not torch.isfinite(alone["o"]).all():
            return "o is not finite"
        for gate in (-np.inf, -2661.0, -1e30):
            inputs["g"] = _some(whole, "g").copy()
            inputs["g"][at] = gate
            found = call(kernel, Arguments(Question("forgotten", whole.workload, inputs), self.device))
            for name, part in (("o", found["o"][at:]), ("final_state", found["final_state"])):
                if not torch.equal(part, alone[name]):
                    return f"after a gate of {gate}: {name} differs, {_apart(part, alone[name])}"
        return ""

    def as_before(self, kernel: Kernel) -> str:
        """The answer of this object's first call."""
        if kernel not in self._first:
            self._first[kernel] = call(kernel, self.placed((130, 61)))
        return _differ(self._first[kernel], call(kernel, self.placed((130, 61))))

    def against(self, kernel: Kernel, other: Kernel) -> str:
        """The same arithmetic in two objects."""
        for arguments in (self.placed((700, 0, 33, 1, 260)), self._busy):
            if difference := _differ(call(other, arguments), call(kernel, arguments)):
                return difference
        return ""

    # 11 strides

    def gaps(self, kernel: Kernel) -> str:
        """Each operand in turn as a slice of wider rows, as a fused projection gives it; `o` too."""
        arguments = self.placed((40, 0, 23))
        expected = call(kernel, arguments)
        for name in (*PER_TOKEN, "initial_state", "o", "final_state"):
            outputs = arguments.outputs(kernel)
            bound = arguments.bind(outputs)
            place = NAMES.index(name)
            bound[place] = spread = _spread(bound[place])
            kernel.function(*bound)
            wait(self.device)
            found = {each: outputs[each] for each in ("o", "final_state")}
            if name in found:
                found[name] = spread
            for each, answer in found.items():
                if not same(expected[each], answer):
                    return (
                        f"{name} with gaps between its rows: {each} differs, {_apart(expected[each], answer)}"
                    )
        return ""

    # 2, 9 sizes

    def many(self, kernel: Kernel) -> str:
        return self.tiled(kernel, 1000)

    def tiled(self, kernel: Kernel, count: int) -> str:
        """`count` sequences, each one of 24, in no order, against those 24."""
        lengths = tuple((1, 2, 3, 1, 2, 3, 1, 2) * 3)
        few = self.question(lengths)
        picks = np.random.default_rng(11).integers(len(lengths), size=count)
        cu = np.asarray(few.workload.cu_seqlens)
        rows = np.concatenate([np.arange(cu[n], cu[n + 1]) for n in picks])
        small = call(kernel, self.placed(lengths))
        large = Tiled(few, self.placed(lengths), picks, rows, self.device)
        answer = large.call(kernel)
        if not same(small["o"][large.rows], answer["o"]):
            return f"o of {count} sequences differs from that of the same ones in a small pack"
        for first in range(0, count, 4096):
            part = slice(first, first + 4096)
            if not same(small["final_state"][large.picks[part]], answer["final_state"][part]):
                return f"the final states of {count} sequences differ from those in a small pack"
        return ""


def _spread(x: Tensor) -> Tensor:
    """The same elements with a gap behind each row of the first axis, NaN in it: three rows wide."""
    wide = torch.full((x.shape[0], 3, *x.shape[1:]), torch.nan, dtype=x.dtype, device=x.device)
    view = wide[:, 0]
    view.copy_(x)
    return view


class Tiled:
    """A pack made on the device of sequences of a small one."""

    def __init__(self, few: Question, placed: Arguments, picks: Any, rows: Any, device: str) -> None:
        w = few.workload
        self.device, self._placed, self._few = device, placed, few
        self.picks, self.rows = (torch.from_numpy(x).to(device) for x in (picks, rows))
        self._sizes = {"N": len(picks), "T": len(rows), "H": w.heads, "HV": w.value_heads}
        lengths = np.asarray(w.lengths)[picks]
        cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        self._inputs: dict[str, Tensor] = {"cu_seqlens": torch.from_numpy(cu).to(device)}
        for name in (*PER_TOKEN, "initial_state", "A_log", "dt_bias"):
            if name in placed.values:
                index = self.picks if name == "initial_state" else self.rows
                given = placed.values[name]
                self._inputs[name] = given if name in ("A_log", "dt_bias") else given[index]

    def call(self, kernel: Kernel) -> dict[str, Tensor]:
        w, HV = self._few.workload, self._sizes["HV"]
        io = getattr(torch, w.dtype)
        made = {
            "o": torch.full((self._sizes["T"], HV, w.V), torch.nan, dtype=io, device=self.device),
            "final_state": torch.full(
                (self._sizes["N"], HV, w.V, w.K), torch.nan, dtype=torch.float32, device=self.device
            ),
            "workspace": torch.full(
                (kernel.configuration.workspace_bytes(self._sizes),),
                255,
                dtype=torch.uint8,
                device=self.device,
            ),
        }
        tensors = {**self._inputs, **made}
        scalars = (self._few.scalars["scale"], self._few.scalars["lower_bound"])
        kernel.function(*(tensors.get(name) for name in NAMES), *self._sizes.values(), *scalars)
        wait(self.device)
        return made


def _some(question: Question, name: str) -> Any:
    array = question.inputs[name]
    assert array is not None
    return array


def _differ(one: Memory, two: Memory) -> str:
    for name in ("o", "final_state"):
        if name in one and name in two and not same(one[name], two[name]):
            return f"{name} differs: {_apart(one[name], two[name])}"
    return ""


def _apart(one: Tensor, two: Tensor) -> str:
    apart = (one.double() - two.double()).abs()
    count = int((one.contiguous().view(-1) != two.contiguous().view(-1)).sum())
    return f"{count} of {one.numel()} elements, by {float(apart.max()):.3g} at most"
