"""What a kernel needs, as terms: a bound that is never too small and hardly too large."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product

import pytest

from evotune.errors import StudyError
from evotune.manifest import WORKSPACE_ALIGNMENT, ObjectEntry
from evotune.search_space.space import choices_of
from evotune.search_space.template import Specialization
from evotune.search_space.templates.kda_sm90_chunked import TEMPLATE
from evotune.workspace import terms

NAMES = ("N", "T", "H", "HV")
Sizes = Mapping[str, int]


def total(needs: Callable[[Sizes], int], sizes: Sizes) -> int:
    return sum(term.of(sizes) for term in terms(needs, NAMES))


@pytest.mark.parametrize(
    ("needs", "found"),
    [
        (lambda s: 0, {}),
        (lambda s: 77, {(): 77}),
        (lambda s: 3 * s["T"] * s["HV"] + 5 * s["N"], {("T", "HV"): 3, ("N",): 5}),
        # Rounded up: one chunk more for each head.
        (lambda s: -(-s["T"] // 64) * s["HV"] * 6400, {("T", "HV"): 100, ("HV",): 6300}),
        (lambda s: -(-s["N"] * 4 // 1024) * 1024, {("N",): 4, (): 1020}),
    ],
)
def test_coefficients(needs: Callable[[Sizes], int], found: dict[tuple[str, ...], int]) -> None:
    assert {term.sizes: term.bytes for term in terms(needs, NAMES)} == found


@pytest.mark.parametrize("contract", ["plain", "production"])
def test_it_bounds_what_the_chunked_template_asks(contract: str) -> None:
    spec = Specialization("kda", "bfloat16", (("K", 128), ("V", 128), ("contract", contract)))
    knobs = TEMPLATE.default(spec)
    for choice in choices_of(TEMPLATE.knobs).get("chunk", (None,)):
        chosen = knobs if choice is None else replace(knobs, chunk=choice)

        def needs(sizes: Sizes, chosen: object = chosen) -> int:
            return TEMPLATE.workspace_bytes(chosen, spec, sizes)  # type: ignore[arg-type]

        found = terms(needs, NAMES)
        for N, T, HV in product((0, 1, 3, 130, 999), (0, 1, 15, 17, 4097, 65535), (1, 7, 96)):
            sizes = {"N": N, "T": T, "H": 1, "HV": HV}
            given = sum(term.of(sizes) for term in found)
            assert needs(sizes) <= given
            if T >= 4096:
                assert given <= 1.05 * needs(sizes) + 4096
            exported = ObjectEntry.model_construct(workspace=found).workspace_bytes(sizes)
            assert exported % WORKSPACE_ALIGNMENT == 0, "it would begin anywhere where it ends at a guard"
            assert given <= exported < given + WORKSPACE_ALIGNMENT


@pytest.mark.parametrize(
    "needs", [lambda s: s["T"] ** 2, lambda s: 1 << max(0, s["T"] - 1).bit_length(), lambda s: s["T"] % 7]
)
def test_what_is_no_such_sum_is_refused(needs: Callable[[Sizes], int]) -> None:
    with pytest.raises(StudyError, match="the workspace is no sum of products of sizes"):
        terms(needs, NAMES)
