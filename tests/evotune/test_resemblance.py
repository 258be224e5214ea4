"""Pasted text is known again under other names; text of one's own is not taken for somebody else's."""

import re

import pytest

from evotune.mutators.rules import rules_for
from evotune.resemblance import FEWEST, known, resemblances, shingles
from evotune.search_space.branch import replace_stage
from evotune.search_space.templates import kda_host, kda_sm90, kda_sm90_chunked

THEIRS = kda_sm90_chunked.TEMPLATE.source
OWN = kda_sm90.TEMPLATE.source
SOMEBODY = {"somebody's kernel": shingles(THEIRS)}
# A stretch of their kernel that is code, not its plan.
PASTED = THEIRS[len(THEIRS) // 2 : len(THEIRS) // 2 + 8000]


def renamed(text: str) -> str:
    """Other names for everything that starts with a small letter."""
    kept = {"self", "def", "if", "else", "for", "in", "return", "range", "not", "and", "or"}
    return re.sub(r"\b[a-z]\w*", lambda word: word[0] if word[0] in kept else f"my_{word[0]}", text)


def test_a_paste_is_found_by_its_share_of_the_new_text() -> None:
    (share,) = resemblances(OWN + PASTED, OWN, SOMEBODY).values()
    assert share > 0.9
    (diluted,) = resemblances(OWN + PASTED + kda_host.TEMPLATE.source, OWN, SOMEBODY).values()
    assert 0.1 <= diluted < share


def test_other_names_comments_and_numbers_change_little() -> None:
    disguised = "# mine\n" + renamed(PASTED).replace("16", "15")
    (share,) = resemblances(OWN + disguised, OWN, SOMEBODY).values()
    assert share > 0.5


def test_next_to_no_new_text_says_nothing() -> None:
    assert resemblances(OWN, OWN, SOMEBODY) == {}
    assert len(shingles(PASTED[:200])) < FEWEST
    assert resemblances(OWN + PASTED[:200], OWN, SOMEBODY) == {}


@pytest.mark.parametrize("template", [kda_host, kda_sm90, kda_sm90_chunked])
def test_what_ships_is_nobody_elses(template: object) -> None:
    source = template.TEMPLATE.source  # type: ignore[attr-defined]
    assert len(shingles(source)) > 10 * FEWEST
    assert resemblances(source, "") == {}


def test_rules_are_nobody_elses() -> None:
    seed = kda_host.TEMPLATE.source
    every = "".join(rule.body for rule in rules_for("kda_host"))
    assert resemblances(seed + every, seed) == {}
    one = rules_for("kda_host")[0]
    assert resemblances(replace_stage(seed, one.stage, one.body), seed) == {}


def test_the_known_kernels_are_named_with_their_licences() -> None:
    assert len(known()) >= 3
    for name, theirs in known().items():
        assert re.search(r"\((MIT|Apache-2.0)", name)
        assert len(theirs) > 300
