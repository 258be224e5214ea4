"""Hopeless candidates are stopped early, keep their estimate, and the time saved is told."""

import math

import numpy as np
import pytest

from evotune.fitness.racing import Heat, Racing, log_speedup

NOISE = 0.02


def learned(racing: Racing, kernels: int, workload: str = "long") -> Racing:
    """After so many kernels of eight pairs each."""
    rng = np.random.default_rng(4)
    for _ in range(kernels):
        heat = racing.heat(workload, 8)
        heat.start()
        for log in NOISE * rng.standard_normal(8):
            assert not heat.pair(math.exp(log), 1.0)
        heat.learn()
    return racing


def pairs_until_stopped(heat: Heat, speedup: float, rng: np.random.Generator) -> int:
    heat.start()
    for done in range(1, heat.planned + 1):
        if heat.pair(speedup * math.exp(NOISE * rng.standard_normal()), 1.0):
            return done
    return heat.planned


def test_far_below_the_bar_two_pairs_are_enough_once_the_noise_is_known() -> None:
    racing, rng = learned(Racing(0.05), 20), np.random.default_rng(5)
    assert pairs_until_stopped(racing.heat("long", 8, {"long": 3.0}), 1.0, rng) == 2
    assert pairs_until_stopped(racing.heat("long", 8, {"long": 3.0}), 3.0, rng) == 8
    unknown = racing.heat("short", 8, {"short": 3.0})
    assert 2 < pairs_until_stopped(unknown, 1.0, rng) < 8


def test_without_a_bar_or_an_error_nothing_is_stopped() -> None:
    rng = np.random.default_rng(6)
    assert pairs_until_stopped(learned(Racing(0.05), 20).heat("long", 8), 1e-3, rng) == 8
    never = learned(Racing(0.0), 20)
    assert pairs_until_stopped(never.heat("long", 8, {"long": 3.0}), 1e-3, rng) == 8


def test_the_stated_error_holds_for_a_candidate_at_the_margin() -> None:
    """A candidate exactly 5 % below the bar is stopped in one of twenty races at most."""
    racing, rng = learned(Racing(0.05), 40), np.random.default_rng(7)
    bars = {"long": 2.0}
    stopped = sum(pairs_until_stopped(racing.heat("long", 8, bars), 1.9, rng) < 8 for _ in range(2000))
    assert stopped <= 100


def test_what_was_left_out_is_told_at_the_pace_of_what_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.5, 11.0])
    monkeypatch.setattr("evotune.fitness.racing.time.perf_counter", lambda: next(clock))
    heat = learned(Racing(0.05), 0).heat("long", 8)
    assert heat.saved_s == 0.0
    heat.start()
    heat.pair(1.0, 1.0)
    heat.pair(1.0, 1.0)
    assert heat.saved_s == pytest.approx(6 * 0.5)


def test_a_clock_that_says_nothing_is_a_number_still() -> None:
    assert math.isfinite(log_speedup(0.0, 1.0))
    assert math.isfinite(log_speedup(1.0, 0.0))
    assert log_speedup(2.0, 1.0) == pytest.approx(math.log(2))
