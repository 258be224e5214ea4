"""The machinery of the families finds what it is for: on the processor, with kernels wrong in one way."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from evotune.reference_kda.chunked import Form, chunked
from evotune.reference_kda.problem import activate
from evotune.reference_kda.tolerance import round_keys
from evotune.search_space.template import Specialization
from tests.search_space.covering import covering, pairs_of
from tests.search_space.kda_calls import Arguments, call
from tests.search_space.kda_families import EDITS, cases, cases_of_float32
from tests.search_space.kda_objects import CHUNKED, MAIN, TEMPLATES, everything, sample, spec_of
from tests.search_space.kda_table import Entry, Finding, Table
from tests.search_space.kda_uses import NAMES, Judged, Use, Uses
from tests.search_space.kda_width import disagreement

SPEC = spec_of((64, 64), "production")


@dataclass(frozen=True)
class Stand:
    """In the place of a `Configuration`."""

    spec: Specialization = SPEC
    label: str = "stand-in"

    def workspace_bytes(self, sizes: Mapping[str, int]) -> int:
        return 1024


class Honest:
    """In the place of a `Kernel`: chunks of 16 with operands in bfloat16, on the processor."""

    label = "stand-in"

    def __init__(self) -> None:
        self.configuration = Stand()
        self.calls = 0

    def function(self, *arguments: Any) -> None:
        self.calls += 1
        given = dict(zip(NAMES, arguments, strict=False))
        scale = arguments[len(NAMES) + 4]
        self.run(given, scale)

    def run(self, given: dict[str, Any], scale: float) -> None:
        o, final = self.answer(given, scale)
        tokens = int(given["cu_seqlens"][-1])
        given["o"][:tokens] = o[:tokens]
        if len(given["final_state"]):
            given["final_state"].copy_(final)

    def answer(self, given: dict[str, Any], scale: float) -> tuple[Tensor, Tensor]:
        inputs = {name: _numpy(given[name]) for name in NAMES[:9]}
        if not len(given["initial_state"]):
            inputs["initial_state"] = None
        problem = round_keys(activate(inputs, "production", scale, np.float32))
        result = chunked(problem, Form(chunk=16, block=16, anchor="before", operands="bfloat16"))
        return torch.from_numpy(result.o).to(torch.bfloat16), torch.from_numpy(result.final_state)


def _numpy(x: Tensor | None) -> Any:
    return None if x is None else (x.float() if x.dtype == torch.bfloat16 else x).numpy()


class SeesTheFuture(Honest):
    """By 2^-20 of the next token: far inside the tolerance."""

    def answer(self, given: dict[str, Any], scale: float) -> tuple[Tensor, Tensor]:
        o, final = super().answer(given, scale)
        wide = o.float()
        wide[:-1] += given["v"][1:].float().nan_to_num() * 2.0**-6 * wide[:-1]
        return wide.to(torch.bfloat16), final


class NotRepeatable(Honest):
    """The seventh call differs in one bit."""

    def run(self, given: dict[str, Any], scale: float) -> None:
        super().run(given, scale)
        if self.calls % 7 == 0 and len(given["o"]):
            given["o"].view(torch.int16)[0, 0, 0] ^= 1


class Remembers(Honest):
    """Answers of the first call of a shape, as a graph does whose inputs were copied when it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[Any, tuple[Tensor, Tensor]] = {}

    def answer(self, given: dict[str, Any], scale: float) -> tuple[Tensor, Tensor]:
        key = given["q"].data_ptr(), tuple(given["q"].shape)
        if key not in self.kept:
            self.kept[key] = super().answer(given, scale)
        return self.kept[key]


class ReadsItsWorkspace(Honest):
    def answer(self, given: dict[str, Any], scale: float) -> tuple[Tensor, Tensor]:
        o, final = super().answer(given, scale)
        left = given["workspace"][:4].view(torch.float32)
        return o, final + torch.where(left.isfinite() & (left != 0), 1e-30 * left, 0.0)


class WritesBehindItsOutput(Honest):
    def run(self, given: dict[str, Any], scale: float) -> None:
        super().run(given, scale)
        if given["o"].numel():
            behind = torch.as_strided(
                given["o"], (1,), (1,), given["o"].storage_offset() + given["o"].numel()
            )
            behind.fill_(1.0)


class ChangesAnInput(Honest):
    def run(self, given: dict[str, Any], scale: float) -> None:
        super().run(given, scale)
        if given["v"].numel():
            given["v"].view(-1)[0] = 0.125


class WritesTheSlack(Honest):
    """Rows of o that belong to no sequence."""

    def run(self, given: dict[str, Any], scale: float) -> None:
        super().run(given, scale)
        given["o"][int(given["cu_seqlens"][-1]) :] = 0


class ReadsTheSlack(Honest):
    """The last tile whole: 0 · NaN of the rows behind it gets into the final state."""

    def answer(self, given: dict[str, Any], scale: float) -> tuple[Tensor, Tensor]:
        o, final = super().answer(given, scale)
        tokens = int(given["cu_seqlens"][-1])
        behind = given["v"][tokens : tokens + 16].float()
        return o, final + 0 * behind.sum()


class ForgetsItsState(Honest):
    def answer(self, given: dict[str, Any], scale: float) -> tuple[Tensor, Tensor]:
        state = given["initial_state"]
        return super().answer({**given, "initial_state": torch.zeros_like(state)}, scale)


class SwapsItsState(Honest):
    """K-first where V-first is due, in and out: shapes are the same where K = V."""

    def answer(self, given: dict[str, Any], scale: float) -> tuple[Tensor, Tensor]:
        state = given["initial_state"].transpose(-1, -2).contiguous()
        o, final = super().answer({**given, "initial_state": state}, scale)
        return o, final.transpose(-1, -2).contiguous()


class ReadsAsPacked(Honest):
    """q's rows one behind the other, whatever its strides."""

    def answer(self, given: dict[str, Any], scale: float) -> tuple[Tensor, Tensor]:
        q = given["q"]
        packed = torch.as_strided(q, q.shape, torch.empty(q.shape).stride(), q.storage_offset())
        return super().answer({**given, "q": packed.nan_to_num()}, scale)


class MixesNeighbours(Honest):
    """The last sequence's decay depends on the first token of all, by one part in 2^7."""

    def answer(self, given: dict[str, Any], scale: float) -> tuple[Tensor, Tensor]:
        o, final = super().answer(given, scale)
        if len(given["cu_seqlens"]) > 2 and given["v"].numel():
            final = final * (1 + 2.0**-20 * given["v"].view(-1)[0].float())
        return o, final


class CountsIn16Bits(Honest):
    """Of more than 500 sequences the later ones get the states of the earlier ones."""

    def answer(self, given: dict[str, Any], scale: float) -> tuple[Tensor, Tensor]:
        o, final = super().answer(given, scale)
        return o, final[torch.arange(len(final)) % 500]


class Confused(Honest):
    """Value heads of a group in another order."""

    def answer(self, given: dict[str, Any], scale: float) -> tuple[Tensor, Tensor]:
        swapped = {**given, "g": given["g"].roll(1, 1)} if given["g"].shape[1] > 2 else given
        return super().answer(swapped, scale)


# What finds each, by the name of a use or of a case.
FOUND_BY: Mapping[type[Honest], str] = {
    SeesTheFuture: "later tokens changed",
    NotRepeatable: "20 calls",
    Remembers: "inputs refilled in place",
    ReadsItsWorkspace: "what memory held",
    WritesBehindItsOutput: "17 tokens, h0",
    ChangesAnInput: "17 tokens, h0",
    WritesTheSlack: "384 rows, NaN behind the last sequence",
    ReadsTheSlack: "384 rows, NaN behind the last sequence",
    ForgetsItsState: "17 tokens, h0",
    SwapsItsState: "17 tokens, h0",
    ReadsAsPacked: "rows with gaps",
    MixesNeighbours: "neighbours changed",
    CountsIn16Bits: "1,000 sequences of 1 to 3",
    Confused: "value heads in another order",
}
SMALL = ("17 tokens, h0", "384 rows, NaN behind the last sequence", "two empty", "beta ±30")


@pytest.fixture(scope="module")
def uses() -> dict[str, Use]:
    """By name: all uses, and a few cases, at 64 channels on the processor."""
    found = {use.name: use for use in Uses(SPEC, "cpu").all()}
    listed = {case.name: case for case in cases(SPEC, main=False)}
    return found | {name: Judged(listed[name], listed[name].solve(), "cpu").use for name in SMALL}


def said(use: Use, kernel: Honest) -> str:
    found = use.ask(kernel)  # type: ignore[arg-type]
    return found if isinstance(found, str) else found.failure


def test_an_honest_kernel_is_not_blamed(uses: dict[str, Use]) -> None:
    kernel = Honest()
    for name, use in uses.items():
        if name != "20 calls":  # its second problem takes seconds here
            assert (name, said(use, kernel)) == (name, "")


@pytest.mark.parametrize("wrong", FOUND_BY, ids=lambda kind: kind.__name__)
def test_a_wrong_kernel_is_found(uses: dict[str, Use], wrong: type[Honest]) -> None:
    assert said(uses[FOUND_BY[wrong]], wrong())


def test_the_truth_on_the_device_is_the_oracles_in_every_place() -> None:
    """One wrong element, wherever it is, has the ratio that `KdaCase.worst` gives it."""
    case = next(c for c in cases(SPEC, main=False) if c.name == "three ragged")
    solved = case.solve()
    arguments, truth = Arguments(solved, "cpu"), Judged(case, solved, "cpu")._truth
    outputs = call(Honest(), arguments)  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    for _ in range(20):
        where = tuple(int(rng.integers(n)) for n in outputs["o"].shape)
        kept = outputs["o"][where].clone()
        outputs["o"][where] += 0.5
        found = truth.judge(arguments, outputs)
        arrays = {"o": outputs["o"].float().numpy(), "final_state": outputs["final_state"].numpy()}
        assert found.ratio == pytest.approx(solved.worst(arrays).ratio, rel=1e-9)
        outputs["o"][where] = kept
    outputs["final_state"][2, 1, 5, 7] = torch.nan
    found = truth.judge(arguments, outputs)
    assert found.ratio == np.inf
    assert found.where == "final_state, sequence 2 head 1 block 0"


def test_the_truth_of_the_widest_problem_is_the_recurrence() -> None:
    for contract in ("production", "plain"):
        assert disagreement(spec_of((64, 64), contract), "cpu", 130) < 1e-10


def test_every_list_names_its_cases_once_and_knows_its_edits() -> None:
    for listed in (
        cases(spec_of(MAIN, "plain"), main=True),
        cases_of_float32(spec_of(MAIN, "plain", "float32")),
    ):
        names = [(case.family, case.name) for case in listed]
        assert len(set(names)) == len(names)
        assert {case.edit for case in listed} - {""} <= set(EDITS)
    asked = cases(spec_of(MAIN, "production"), main=True)
    families = {case.family for case in asked} | {use.family for use in Uses(SPEC, "cuda").all()}
    assert {family.partition(" ")[0] for family in families} >= {*"12345678", "10"}
    assert max(sum(case.workload.lengths) for case in asked) == 16384


class TestCovering:
    FACTORS: Mapping[str, tuple[int, ...]] = {"a": (0, 1, 2), "b": (0, 1), "c": (0, 1, 2, 3), "d": (0, 1)}

    @staticmethod
    def legal(row: Mapping[str, Any]) -> bool:
        return not (row["a"] == 2 and row["b"] == 1) and not (row["c"] == 3 and row["d"] == 0)

    def pairs(self, legal: Callable[[Mapping[str, Any]], bool]) -> set[Any]:
        rows = [dict(zip(self.FACTORS, values, strict=True)) for values in product(*self.FACTORS.values())]
        return set().union(*(pairs_of(row) for row in rows if legal(row)))

    def test_every_pair_that_some_legal_row_has_is_in_a_row(self) -> None:
        found = covering(self.FACTORS, self.legal)
        assert set().union(*map(pairs_of, found.rows)) == self.pairs(self.legal)
        assert len(found.impossible) == 2
        assert all(self.legal(row) for row in found.rows)
        assert len(found.rows) < 20 < 36  # of 48, 36 of them legal

    def test_a_hub_meets_every_value(self) -> None:
        found = covering(self.FACTORS, self.legal, hub="c")
        wanted = {pair for pair in self.pairs(self.legal) if "c" in (pair[0][0], pair[1][0])}
        assert wanted <= set().union(*map(pairs_of, found.rows))

    def test_it_begins_with_what_it_is_given_and_repeats(self) -> None:
        start = [{"a": 1, "b": 1, "c": 2, "d": 1}]
        assert covering(self.FACTORS, self.legal, start).rows[0] == start[0]
        assert covering(self.FACTORS, self.legal, start) == covering(self.FACTORS, self.legal, start)


def test_the_sample_is_legal_and_has_every_value_of_every_knob() -> None:
    chosen = sample(CHUNKED)
    template = TEMPLATES[CHUNKED]
    assert all(template.why_not(c.knobs, c.spec) is None for c in chosen)
    for name, field in template.knobs.__dataclass_fields__.items():
        at_main = {getattr(c.knobs, name) for c in chosen if c.dims == MAIN}
        assert at_main == set(field.metadata["choices"]), name
    assert {c.dims for c in chosen} == {(128, 128), (64, 64), (64, 128), (128, 64)}
    assert len({c.file for c in everything()}) == len(everything())


def test_the_table_has_a_line_for_each_family(tmp_path: Any) -> None:
    entries = [
        Entry("2 packs", "short", "a", Finding("", 0.5, 0.004)),
        Entry("2 packs", "short", "b", Finding("2 of the bound", 2.0, 0.5), hard=True, reports=("x#1",)),
        Entry("10 screen gate", "one", "a", Finding(), 3),
    ]
    Table(entries).write(tmp_path / "families.md")
    lines = (tmp_path / "families.md").read_text().splitlines()
    assert lines[2] == "| 2 packs | 1 | 2 | 2 | 2.00 | 0.0040 | 0.5000 | 1 |"
    assert lines[3] == "| 10 screen gate | 1 | 1 | 3 | equal bits |  |  | 0 |"
    assert "b: 2 of the bound" in (tmp_path / "families.csv").read_text()
