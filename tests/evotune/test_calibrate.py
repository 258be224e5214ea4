"""Calibration: what it reads off blocks, what it keeps, and that the resolution it states is the test's."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evotune.calibrate import (
    CONFIDENCE,
    POWER,
    Calibration,
    Noise,
    autocorrelation,
    calibrate,
    load,
    path_of,
    upper_rank,
)
from evotune.errors import SandboxError, StudyError
from evotune.fitness.device import Described
from evotune.fitness.evaluation import Fallen
from evotune.fitness.lease import Gpu
from evotune.fitness.outcome import Failed, Failure, Retry, Stage
from evotune.fitness.sequential import power, spending, wins_needed
from evotune.promotion import PromotionPlan
from evotune.setup import Setup
from tests.evotune.toy import ToyDevice, call, run_study, setup_of, study_file

PLAN = PromotionPlan()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return setup_of(study_file(tmp_path))


def noise(log_ratios: list[float], times_us: list[float] | None = None, every_s: float = 1.0) -> Noise:
    n = len(log_ratios)
    ended = tuple(every_s * (i + 1) for i in range(n))
    return Noise(tuple(log_ratios), tuple(times_us or [100.0] * n), ended, 1.0)


def test_noise_is_told_robustly() -> None:
    rng = np.random.default_rng(0)
    drawn = list(0.02 * rng.standard_normal(2000))
    found = noise(drawn)
    assert found.sigma == pytest.approx(0.02, rel=0.1)
    assert found.outlier_fraction < 0.01
    spoiled = noise([*drawn[:1900], *[0.7] * 100])
    assert spoiled.sigma == pytest.approx(0.02, rel=0.15)
    assert spoiled.outlier_fraction > 0.045


def test_drift_is_the_slope_of_times_whatever_the_outliers() -> None:
    seconds = np.arange(60)
    times = list(100 * np.exp(0.1 * seconds / 60))
    times[10] *= 3
    times[40] *= 2
    found = noise([0.0] * 60, times)
    assert found.drift == pytest.approx(0.1, rel=0.05)
    assert found.block_s == 1.0
    assert noise([0.0] * 60).drift == 0


def test_autocorrelation_is_of_ranks() -> None:
    rng = np.random.default_rng(1)
    steps = rng.standard_t(2, 2000)
    kept = [steps[0]]
    for step in steps[1:]:
        kept.append(0.8 * kept[-1] + step)
    assert autocorrelation(kept) > 0.6
    assert abs(autocorrelation(list(steps))) < 0.08
    assert autocorrelation([1.0, -1.0] * 50) < -0.9
    assert autocorrelation([1.0, 2.0]) == 0
    assert autocorrelation([2.0] * 9) == 0


@pytest.mark.parametrize("n", [8, 24, 60])
@pytest.mark.parametrize("quantile", [0.5, 0.72])
def test_the_order_statistic_bounds_the_quantile_as_surely_as_it_says(n: int, quantile: float) -> None:
    rank = upper_rank(n, quantile, 0.9)
    assert rank is not None

    def sure(r: int) -> float:
        """P(the value of that rank is at or above the quantile): at most r of n lie below."""
        return sum(math.comb(n, i) * quantile**i * (1 - quantile) ** (n - i) for i in range(r + 1))

    assert sure(rank) >= 0.9
    assert rank == 0 or sure(rank - 1) < 0.9


def test_too_few_blocks_resolve_nothing() -> None:
    assert upper_rank(4, 0.72, 0.9) is None
    assert noise([0.01] * 4).resolution(0.86) == math.inf
    told = Calibration({}, "now", {"one": noise([0.01] * 4)}).as_json(PLAN)
    assert told["groups"]["one"]["resolution"] is None  # JSON has no infinity


@pytest.mark.parametrize(
    "draw",
    [
        lambda rng, n: 0.015 * rng.standard_normal(n),
        lambda rng, n: 0.01 * rng.standard_t(2, n),
        lambda rng, n: 0.01 * rng.standard_normal(n) + 0.7 * rng.choice([-1, 1, *[0] * 14], n),
    ],
    ids=["normal", "heavy", "outliers"],
)
def test_a_gain_of_the_resolution_is_found_with_the_power_that_is_stated(
    draw: Callable[[np.random.Generator, int], np.ndarray],
) -> None:
    """In nine calibrations of ten, 200 of them: 25 or fewer of them too low come up less often than 94 %."""
    rng, alpha = np.random.default_rng(2), spending(0.05, 5)
    wins = wins_needed(alpha, POWER)
    truth = draw(rng, 400_000)
    found = [noise(list(draw(rng, 48))).resolution(wins) for _ in range(200)]
    powerful = [np.mean(truth > -g) >= wins for g in found]
    assert power(wins, alpha) == pytest.approx(POWER, abs=0.002)
    assert sum(powerful) >= 200 * CONFIDENCE - 25
    least = np.quantile(np.abs(truth), 2 * wins - 1)
    assert np.median(found) < 2 * least, "and not by asking for far more"


def test_calibration_is_kept_for_the_same_study_alone(setup: Setup, tmp_path: Path) -> None:
    said: list[str] = []
    judge = ToyDevice(setup, noise=0.02)
    assert load(setup, judge) is None
    found = calibrate(setup, judge, blocks=30, say=said.append)
    judge.close()
    assert load(setup, judge) == found
    assert [line.split(":")[0] for line in said] == ["long", "short"]
    assert judge.compared == [("long", "promotion"), ("short", "promotion")]
    for group in ("long", "short"):
        assert len(found.groups[group].log_ratios) == 30
        assert 0 < found.resolution(group, PLAN) < 0.2
    (kept,) = path_of(setup, judge).parent.iterdir()
    assert kept == path_of(setup, judge)

    (tmp_path / "other").mkdir()
    other = setup_of(study_file(tmp_path / "other", ("size = 1000", "size = 999")))
    assert load(other, judge) is None
    renamed = setup_of(study_file(tmp_path / "other", ('name = "toy"', 'name = "again"'), ("= 40", "= 50")))
    assert load(renamed, judge) == found


class OnGpu(ToyDevice):
    """Judges on one GPU of several."""

    def __init__(self, setup: Setup, uuid: str) -> None:
        super().__init__(setup)
        self.gpu = Gpu("H200", uuid, 0)


def test_a_calibration_is_of_the_gpu_that_was_leased(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever CUDA_VISIBLE_DEVICES says: it may name several, none, or one by its number."""

    def as_the_driver_says(uuid: str) -> Described:
        names = {"GPU-1": "H200", "GPU-2": "H100", "GPU-3": "H100"}
        return Described(names[uuid], "9.0", "580.1", "13.0")

    monkeypatch.setattr("evotune.calibrate.described", as_the_driver_says)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    first, second, third = (OnGpu(setup, uuid) for uuid in ("GPU-1", "GPU-2", "GPU-3"))
    found = calibrate(setup, second, blocks=12, say=lambda line: None)
    assert found.subject["device"] == "H100 (GPU-2), driver 580.1"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert load(setup, second) == found
    assert load(setup, first) is None
    assert load(setup, third) is None


def test_a_study_asks_for_the_resolution_of_the_gpu_that_it_leased(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evotune.calibrate.described", lambda uuid: Described(uuid, "9.0", "580.1", "13.0"))
    found = calibrate(setup, OnGpu(setup, "GPU-2"), say=lambda line: None)
    for uuid in ("GPU-2", "GPU-1"):
        device = OnGpu(setup, uuid)
        other = setup_of(setup.base / "toy.toml", trials=12, directory=f"{uuid}.study")
        told = [c for c in run_study(other, device).history.confirmations if c.blocks]
        wanted = {c.group: found.resolution(c.group, PLAN) if uuid == "GPU-2" else None for c in told}
        assert {c.group: c.resolution for c in told} == wanted != {}


@pytest.mark.parametrize("text", ["", "{}", '{"format": 0, "calibration": null}', "\udcff"])
def test_a_damaged_calibration_is_none(setup: Setup, text: str) -> None:
    judge = ToyDevice(setup)
    path_of(setup, judge).parent.mkdir(parents=True)
    path_of(setup, judge).write_text(text, errors="surrogateescape")
    assert load(setup, judge) is None


def test_a_default_that_fails_is_the_users_to_know(setup: Setup) -> None:
    wrong = Failed(Failure.WRONG, Stage.EDGES, "o, head 0: 3 × the bound")
    for fate in (wrong, Fallen("it fails while it is timed")):
        with pytest.raises(StudyError, match="default kernel fails"):
            calibrate(setup, ToyDevice(setup, fates={0: fate}), say=lambda line: None)
    assert load(setup, ToyDevice(setup)) is None


def test_trouble_is_tried_again_and_told_when_it_stays(setup: Setup) -> None:
    busy = Retry("no room on the device")
    found = calibrate(setup, ToyDevice(setup, fates={0: busy, 1: busy}), blocks=12, say=lambda line: None)
    assert len(found.groups["long"].log_ratios) == 12
    with pytest.raises(SandboxError, match="no room on the device"):
        calibrate(setup, ToyDevice(setup, fates=dict.fromkeys(range(3), busy)), say=lambda line: None)


def test_a_place_that_cannot_be_written_is_named(setup: Setup, cache: Path) -> None:
    cache.write_text("a file where the directory should be")
    with pytest.raises(StudyError, match="cannot keep the calibration in"):
        calibrate(setup, ToyDevice(setup), blocks=12, say=lambda line: None)


def test_the_fewer_blocks_a_test_has_the_coarser_it_is(setup: Setup) -> None:
    found = Calibration({}, "", {"g": noise([0.001 * i for i in range(60)])})
    assert found.resolution("g", replace(PLAN, most_blocks=16)) > found.resolution("g", PLAN)


def test_a_study_with_another_alpha_reads_a_resolution_of_its_own(setup: Setup, tmp_path: Path) -> None:
    """The machine's noise is measured once; a test at a smaller level needs a larger gain."""
    found = calibrate(setup, ToyDevice(setup), say=lambda line: None)
    (tmp_path / "strict").mkdir()
    strict_plan = ("stagnation = 12", "stagnation = 12\n\n[promotion]\nalpha = 0.01")
    strict = setup_of(study_file(tmp_path / "strict", strict_plan), trials=12)
    confirmed = [c for c in run_study(strict).history.confirmations if c.blocks]
    assert confirmed
    for told in confirmed:
        assert told.resolution == found.resolution(told.group, strict.promotion)
        assert told.resolution is not None
        assert told.resolution > found.resolution(told.group, PLAN)
    for plan in (PLAN, strict.promotion):
        assert found.as_json(plan)["tests"] == {"alpha": plan.alpha, "most_blocks": plan.most_blocks}


def test_the_command_prints_one_table(tmp_path: Path) -> None:
    path = study_file(tmp_path)
    shown = call("calibrate", path, "--blocks", "20")
    assert shown.returncode == 0, shown.stderr
    for word in ("long", "short", "resolution", "drift", "autocorrelation", "noise", "alpha 0.05"):
        assert word in shown.stdout
    assert "20 blocks" in shown.stderr
    told = json.loads(call("calibrate", path, "--blocks", "20", "--json").stdout)
    assert set(told["groups"]) == {"long", "short"}
    assert 0 < told["groups"]["long"]["resolution"] < 0.5
    assert told["subject"]["template"] == "toy"
    names = "outlier_fraction", "lag1_autocorrelation", "time_lag1_autocorrelation"
    assert told["groups"]["long"].keys() >= set(names)
