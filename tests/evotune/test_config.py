"""study.toml: defaults, every fault in one line, what a resumed study may change."""

import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from evotune.config import StudyConfig, changes, load, parse
from evotune.errors import LegalityError, StudyError
from evotune.setup import resolve
from tests.evotune.toy import STUDY, study_file

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"


def load_text(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "study.toml"
    path.write_text(text)
    return resolve(load(path), tmp_path)


def test_defaults_and_overrides(tmp_path: Path) -> None:
    path = study_file(tmp_path)
    config = load(path, {"study.trials": 5, "study.time_limit_s": None})
    assert (config.study.trials, config.study.time_limit_s) == (5, None)
    assert (config.search.sampler, config.mutation.max_branches) == ("pool", 8)
    assert config.timing_plan.samples > 0
    assert resolve(config, tmp_path).directory == tmp_path / "toy.study"


FAULTS = [
    ("trials = 40", "trails = 40", r"\[study\] unknown key trails; did you mean trials\?"),
    ("trials = 40", 'trials = "many"', r"\[study\] trials should be a valid integer, but is 'many'"),
    ("trials = 40", "trials = 2.5", r"\[study\] trials should be a valid integer, but is 2.5"),
    ("trials = 40", "trials = 0", r"\[study\] trials should be greater than 0, but is 0"),
    ("trials = 40", "time_limit_s = 0", r"\[study\] time_limit_s should be greater than 0"),
    ("[search]", "[serach]", r"unknown key serach; did you mean search\?"),
    ("batch = 4", 'sampler = "poll"', r"\[search\] no sampler named poll; did you mean pool\?"),
    ("batch = 4", "batch = true", r"\[search\] batch should be a valid integer, but is True"),
    ('template = "tests.evotune.toy:TEMPLATE"', "", r"\[study\] the key template is missing"),
    ("tests.evotune.toy:TEMPLATE", "kda_hots", r"no template named kda_hots; did you mean kda_host\?"),
    (
        "tests.evotune.toy:TEMPLATE",
        "tests.evotune.toy:NONE",
        r"toy:NONE cannot be loaded",
    ),
    ("tests.evotune.toy:TEMPLATE", "no.such:T", r"template no.such:T cannot be loaded: No module named 'no'"),
    ("tests.evotune.toy:mutator", "ruels", r"no mutation operator named ruels; did you mean rules\?"),
    ("every = 8\nstagnation = 12", "every = 0\nstagnation = 0", r"every and stagnation are both 0"),
    ("every = 8", "max_branches = 0", r"\[mutation\] max_branches should be greater than 0"),
    ("tests.evotune.toy:mutator", "llm", r"operators has llm, so \[mutation.llm\] is needed"),
    (
        "[mutation]",
        '[mutation.llm]\nmodle = "x"\n[mutation]',
        r"unknown key modle; did you mean model",
    ),
    ("[search]", '[objectives]\nnames = ["speed"]\n[search]', r"no objective named 'speed'"),
    ("[search]", "[objectives]\nnames = []\n[search]", r"\[objectives\] names List should have at least 1"),
    ("[search]", "[timing]\nsamples = 1.5\n[search]", r"\[timing\] samples should be a valid integer"),
    ("[search]", "[gate]\ntolerance = 3\n[search]", r"\[gate\] unknown key tolerance"),
    ("[search]", "[timing]\nsamples = 0\n[search]", r"\[timing\] samples should be greater than 0, but is 0"),
    ("[search]", "[gate]\ncall_timeout_s = nan\n[search]", r"\[gate\] call_timeout_s should be"),
    ("[search]", "[build]\nworkers = 0\n[search]", r"\[build\] workers should be greater than 0"),
    ("[search]", "[build.limits]\nwall_s = -1.0\n[search]", r"\[build.limits\] wall_s should be greater"),
    ("seed = 7", "time_limit_s = inf", r"\[study\] time_limit_s should be a finite number"),
    ('name = "toy"', 'name = "../toy"', r"\[study\] name String should match"),
    ("size = 10\n", "size = 10\nsizes = 3\n", r"\[\[workload\]\] number 2: unknown key sizes"),
    ('name = "short"', 'name = "long"', r"two workloads are named long"),
    ("seed = 7", "seed = -1", r"\[study\] seed should be greater than or equal to 0"),
    ("seed = 7", "seed = ", r"is not TOML: .*line 6"),
]


@pytest.mark.parametrize(("old", "new", "message"), FAULTS, ids=range(len(FAULTS)))
def test_every_fault_is_one_clear_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in STUDY
    with pytest.raises(StudyError, match=message) as caught:
        load_text(tmp_path, STUDY.replace(old, new))
    assert "\n" not in str(caught.value)


def test_two_faults_are_two_lines(tmp_path: Path) -> None:
    with pytest.raises(StudyError) as caught:
        load_text(tmp_path, STUDY.replace("seed", "sede").replace("batch", "bacth"))
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_text(""), "is empty; `python -m evotune init`"),
        (lambda path: path.write_text("# nothing\n"), "is empty"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "is not UTF-8"),
        (lambda path: path.mkdir(), "cannot read"),
        (lambda path: None, "cannot read .*No such file"),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, make: Callable[[Path], Any], message: str) -> None:
    make(tmp_path / "study.toml")
    with pytest.raises(StudyError, match=message):
        load(tmp_path / "study.toml")


def test_no_legal_configuration(tmp_path: Path) -> None:
    with pytest.raises(LegalityError, match="no configuration of toy is legal.*the toy allows nothing"):
        load_text(tmp_path, STUDY.replace("toy:TEMPLATE", "toy:EMPTY_TEMPLATE"))


def test_what_may_change(tmp_path: Path) -> None:
    before = load(study_file(tmp_path)).as_json()
    after = load(study_file(tmp_path, ("trials = 40", "trials = 99\ntime_limit_s = 5.0"))).as_json()
    assert changes(before, after) == []
    after = load(study_file(tmp_path, ("batch = 4", "batch = 5"), ("size = 10\n", "size = 11\n"))).as_json()
    found = changes(before, after)
    assert found[0] == "search.batch 4 → 5"
    assert len(found) == 2


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of every key that a study file may have, the workloads' apart."""
    for name, field in model.model_fields.items():
        inner = [a for a in (field.annotation, *get_args(field.annotation)) if isinstance(a, type)]
        tables = [a for a in inner if issubclass(a, BaseModel)]
        if tables:
            yield from keys_of(tables[0], f"{prefix}{name}.")
        else:
            yield prefix + name


def test_the_reference_explains_every_key_and_shows_the_defaults() -> None:
    path = EXPERIMENTS / "reference.toml"
    text = path.read_text()
    uncommented = re.sub(r"^# (\[mutation\.llm\]|\w+ = .*)$", r"\1", text, flags=re.MULTILINE)
    given = tomllib.loads(uncommented)
    for dotted in keys_of(StudyConfig):
        table: Any = given
        for part in dotted.split("."):
            assert part in table, f"reference.toml does not explain {dotted}"
            table = table[part]
    config = load(path).as_json()
    default = parse({"study": {"name": "x", "template": "y"}, "workload": [{}]}, "here").as_json()
    apart = {"study.name", "study.template", "study.time_limit_s", "mutation.operators", "workload"}
    found = {line.split(" ")[0] for line in changes(default, config)} - apart
    assert found == {"build.budget.code_bytes"}


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_study_file_fits_its_template(path: Path) -> None:
    setup = resolve(load(path), path.parent)
    assert setup.space.why_not(setup.space.default()) is None
    assert setup.columns
