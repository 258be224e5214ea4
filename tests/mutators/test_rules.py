"""Stage alternatives for the host template: each one compiles to another object and is right."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from evotune.errors import ProposalError
from evotune.fitness.outcome import Measurement, Passed
from evotune.mutators.mutator import Mutator, Request, Standing
from evotune.mutators.rules import Rule, Rules, parse, rules_for
from evotune.reference_kda.case import KdaCase, solve
from evotune.reference_kda.workload import Workload
from evotune.search_space.branch import Branch, replace_stage, stages
from evotune.search_space.template import digest
from evotune.search_space.templates.kda_host import TEMPLATE, KdaHostKnobs
from tests.mutators.contract import MutatorContract
from tests.mutators.toys import SEED as TOY_SEED
from tests.mutators.toys import request as toy_request
from tests.mutators.toys import standing as toy_standing
from tests.search_space.host_kernel import compile_unit, kernel, spec

RULES = rules_for("kda_host")
IDS = [f"{rule.stage}/{rule.name}" for rule in RULES]
SEED = Branch("b00", TEMPLATE.source, None, "seed", "seed")
CHUNKED = dataclasses.replace(KdaHostKnobs(), algorithm="chunked", value_tile=16, chunk=32)
# Links against libmvec, which not every toolchain brings: a study learns whether it may.
NEEDS_LIBMVEC = "exponential/libmvec"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@cache
def solved(contract: str) -> KdaCase:
    w = Workload("ragged", "ragged", (3, 0, 1, 70, 33), value_heads=2, K=64, V=96, contract=contract)
    return solve(dataclasses.replace(w, initial_state=True), 5)


def knobs_for(rule: Rule) -> KdaHostKnobs:
    return dataclasses.replace(CHUNKED, exp="polynomial", **rule.when)


def asked_for(*standings: Standing, seed: int = 0) -> Request:
    return Request(TEMPLATE, (spec(),), standings, frozenset(s.branch.digest for s in standings), seed)


def passed() -> Passed:
    return Passed("screen", 0.5, (Measurement("w", "long", (50.0,), (100.0,)),), 0.5, (), {})


class TestRules(MutatorContract):
    @pytest.fixture
    def make(self) -> Callable[[], Mutator]:
        return Rules

    @pytest.fixture
    def asked(self) -> Request:
        rule = next(r for r in RULES if r.stage == "solve")
        child = Branch("b01", replace_stage(SEED.source, rule.stage, rule.body), "b00", "rules", rule.note)
        return asked_for(Standing(SEED, ((CHUNKED, passed()),), (), 1), Standing(child))


def test_there_are_enough_rules() -> None:
    assert len(RULES) >= 14
    assert len(set(IDS)) == len(IDS)
    assert {rule.stage for rule in RULES} <= set(stages(TEMPLATE.source))
    assert len({rule.stage for rule in RULES}) >= 9


@pytest.mark.parametrize("rule", RULES, ids=IDS)
def test_a_rule_changes_the_object(rule: Rule, folder: Path) -> None:
    facts = spec(64, 96, "production")
    sources = (TEMPLATE.source, replace_stage(TEMPLATE.source, rule.stage, rule.body))
    units = [TEMPLATE.unit(source, knobs_for(rule), facts) for source in sources]
    first, second = (compile_unit(unit, folder).read_bytes() for unit in units)
    assert first != second


@pytest.mark.parametrize("contract", ["plain", "production"])
@pytest.mark.parametrize("rule", [r for r, i in zip(RULES, IDS, strict=True) if i != NEEDS_LIBMVEC], ids=str)
def test_a_rule_is_right(rule: Rule, contract: str, folder: Path) -> None:
    case = solved(contract)
    source = replace_stage(TEMPLATE.source, rule.stage, rule.body)
    worst = case.worst(kernel(knobs_for(rule), case, folder, source)(case).outputs)
    assert worst.ratio <= 1, worst.detail


def test_rules_of_all_stages_go_together(folder: Path) -> None:
    source = TEMPLATE.source
    for rule in RULES:
        if f"{rule.stage}/{rule.name}" != NEEDS_LIBMVEC:
            source = replace_stage(source, rule.stage, rule.body)
    for algorithm in ("recurrent", "chunked"):
        case = solved("production")
        knobs = dataclasses.replace(CHUNKED, algorithm=algorithm)
        assert case.worst(kernel(knobs, case, folder, source)(case).outputs).ratio <= 1


def test_the_better_branch_is_asked_more_often() -> None:
    child = dataclasses.replace(SEED, id="b01", source=SEED.source + "\n")
    parents = Counter(
        Rules().propose(asked_for(Standing(SEED), Standing(child), seed=seed)).parent for seed in range(200)
    )
    assert parents["b00"] > parents["b01"] > 20


def test_rules_for_the_chosen_algorithm_come_first() -> None:
    """A rule that the best knobs leave out starts from knobs that compile it."""
    request = asked_for(Standing(SEED, ((CHUNKED, passed()),), (), 1))
    proposals = [Rules().propose(dataclasses.replace(request, seed=seed)) for seed in range(200)]
    idle = [p for p in proposals if p.extra["rule"].split("/")[0] in ("delta", "update")]
    assert 0 < len(idle) < 20
    assert all(p.start == dataclasses.replace(CHUNKED, algorithm="recurrent") for p in idle)
    assert all(p.start is None for p in proposals if p not in idle)


def test_a_rule_applies_whatever_the_stage_holds_now() -> None:
    first, second = (rule for rule in RULES if rule.stage == "solve")
    child = Branch("b01", replace_stage(SEED.source, "solve", first.body), "b00", "rules", first.note)
    tried = {digest(replace_stage(child.source, r.stage, r.body)) for r in RULES if r is not second}
    request = dataclasses.replace(asked_for(Standing(child)), tried=frozenset(tried))
    assert stages(Rules().propose(request).source)["solve"] == second.body


def test_a_template_without_rules_is_a_proposal_error() -> None:
    with pytest.raises(ProposalError, match="none for template toy"):
        Rules().propose(toy_request(0, toy_standing(TOY_SEED)))


def test_the_form_of_a_rule() -> None:
    text = (
        "// free text\n\n// RULE solve by_name chunk=16 algorithm=chunked\n// says why\nint a;\n\nint b;\n\n"
    )
    assert list(parse(text)) == [
        Rule("solve", "by_name", "says why", {"chunk": 16, "algorithm": "chunked"}, "int a;\n\nint b;\n")
    ]
