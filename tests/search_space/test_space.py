"""Knob grids: legality, sampling, neighbours, JSON."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from evotune.errors import LegalityError, StudyError
from evotune.search_space.space import Space, choices_of, knob
from evotune.search_space.template import Language, Specialization, Unit

FP32 = Specialization("toy", "float32", (("K", 64),))
BF16 = Specialization("toy", "bfloat16", (("K", 64),))


@dataclass(frozen=True)
class Knobs:
    tile: int = knob(16, choices=(8, 16, 32, 64), doc="value tile")
    lanes: int = knob(4, choices=(1, 4, 8), doc="vector lanes")
    order: str = knob("kv", choices=("kv", "vk"), doc="loop order")
    fast: bool = knob(False, choices=(False, True), doc="fast exp")


class Toy:
    """Legal when tile × lanes ≤ budget; in bfloat16 one lane is not allowed."""

    name = "toy"
    operator = "toy"
    target = "host"
    language: Language = "c"
    knobs: type[Any] = Knobs
    source = ""

    def __init__(self, budget: int = 128) -> None:
        self.budget_limit = budget

    def default(self, spec: Specialization) -> Knobs:
        return Knobs()

    def why_not(self, knobs: Any, spec: Specialization) -> str | None:
        if knobs.tile * knobs.lanes > self.budget_limit:
            return f"{knobs.tile} × {knobs.lanes} registers exceed {self.budget_limit}"
        if spec.dtype == "bfloat16" and knobs.lanes == 1:
            return "bfloat16 needs lanes in pairs"
        return None

    def budget(self, knobs: Any, spec: Specialization) -> Mapping[str, int]:
        return {}

    def unit(self, source: str, knobs: Any, spec: Specialization, *, debug: bool = False) -> Unit:
        return Unit("c", source, "toy", (), debug)

    def layouts(self, knobs: Any, spec: Specialization) -> str:
        return ""


def legal_count(space: Space) -> int:
    return sum(1 for _ in space.legal())


def test_a_grid_and_its_legal_part() -> None:
    space = Space(Toy(), [FP32])
    assert (space.size, space.names) == (48, ("tile", "lanes", "order", "fast"))
    by_hand = sum(t * lanes <= 128 for t in (8, 16, 32, 64) for lanes in (1, 4, 8)) * 4
    assert legal_count(space) == by_hand
    assert all(space.why_not(knobs) is None for knobs in space.legal())


def test_every_specialization_must_allow_it() -> None:
    both = Space(Toy(), [FP32, BF16])
    assert both.why_not(Knobs(lanes=1)) == "bfloat16 needs lanes in pairs"
    assert all(knobs.lanes != 1 for knobs in both.legal())


def test_sampling_is_uniform_over_what_is_legal() -> None:
    space = Space(Toy(), [FP32])
    rng = np.random.default_rng(0)
    counts = Counter(space.cell(space.sample(rng)) for _ in range(8000))
    expected = 8000 / legal_count(space)
    assert len(counts) == legal_count(space)
    # Five standard deviations of a binomial count.
    assert max(abs(n - expected) for n in counts.values()) < 5 * expected**0.5


def test_a_large_grid_is_sampled_without_listing_it() -> None:
    fields = {f"k{i}": knob(0, choices=tuple(range(8)), doc="") for i in range(8)}
    big = dataclass(frozen=True)(type("Big", (), {"__annotations__": dict.fromkeys(fields, int), **fields}))

    class Rare(Toy):
        knobs = big

        def why_not(self, knobs: Any, spec: Specialization) -> str | None:
            return None if sum(vars(knobs).values()) % 16 == 3 else "wrong residue"

    space = Space(Rare(), [FP32])
    cells = space.sample_cells(np.random.default_rng(1), 500)
    assert len(set(cells)) > 480
    assert all(sum(cell) % 16 == 3 for cell in cells)


def test_neighbours_differ_in_one_knob_and_are_legal() -> None:
    space = Space(Toy(), [FP32])
    start = Knobs(tile=32, lanes=4)
    found = space.neighbours(start)
    assert start not in found
    for knobs in found:
        changed = [name for name in space.names if getattr(knobs, name) != getattr(start, name)]
        assert len(changed) == 1
    assert {k.tile for k in found} == {8, 16, 32}  # 64 × 4 is over budget
    assert {k.lanes for k in found} == {1, 4}


def test_json_round_trip() -> None:
    space = Space(Toy(), [FP32])
    for knobs in space.legal(20):
        assert space.decode(json.loads(json.dumps(space.encode(knobs)))) == knobs


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"tile": 16, "lanes": 4, "order": "kv", "fast": False, "tiles": 1},
            "no knob tiles; did you mean tile",
        ),
        ({"tile": 16, "lanes": 4, "order": "kv"}, "no value for knob fast"),
        (
            {"tile": 17, "lanes": 4, "order": "kv", "fast": False},
            "tile cannot be 17; choices are 8, 16, 32, 64",
        ),
        ({"tile": "16", "lanes": 4, "order": "kv", "fast": False}, "tile cannot be '16'"),
        ({"tile": 16, "lanes": 4, "order": "kv", "fast": 0}, "fast cannot be 0"),
        ({"tile": 16, "lanes": True, "order": "kv", "fast": False}, "lanes cannot be True"),
        ({"tile": [16], "lanes": 4, "order": "kv", "fast": False}, "tile cannot be"),
    ],
)
def test_what_is_not_in_the_space_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(StudyError, match=message):
        Space(Toy(), [FP32]).decode(values)


def test_nothing_legal_says_why() -> None:
    space = Space(Toy(budget=4), [FP32])
    for use in (lambda: space.sample(np.random.default_rng(0)), lambda: list(space.legal()), space.default):
        with pytest.raises(
            LegalityError, match=r"no configuration of toy is legal.*8 × 1 registers exceed 4"
        ):
            use()


def test_an_illegal_default_gives_way_to_a_legal_cell() -> None:
    assert Space(Toy(), [FP32]).default() == Knobs()
    space = Space(Toy(budget=32), [FP32])
    assert space.why_not(Knobs()) is not None
    assert space.why_not(space.default()) is None


def test_vectors_keep_the_order_of_choices() -> None:
    space = Space(Toy(), [FP32])
    assert space.to_vector(Knobs(tile=8, lanes=8, order="vk", fast=True)).tolist() == [0, 1, 1, 1]


def test_knobs_must_come_from_knob() -> None:
    @dataclass(frozen=True)
    class Plain:
        tile: int = field(default=1)

    with pytest.raises(TypeError, match=r"Plain\.tile was not made by knob"):
        choices_of(Plain)
    with pytest.raises(ValueError, match="not among the choices"):
        knob(3, choices=(1, 2), doc="")


def test_the_legal_share_is_exact_or_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = Space(Toy(budget=128), [FP32])
    exact = sum(listed.why_not(knobs) is None for knobs in listed.legal()) / listed.size
    assert listed.legal_share() == exact
    assert 0 < exact < 1
    monkeypatch.setattr("evotune.search_space.space._LISTED_GRID", 0)
    drawn = Space(Toy(budget=128), [FP32])
    assert drawn.legal_share() == drawn.legal_share() == pytest.approx(exact, abs=0.03)
