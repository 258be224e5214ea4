"""Spare judge processes stand ready for all who take one."""

import threading
from collections.abc import Iterator

import pytest

from evotune.fitness.spares import Spares


class Spare:
    """Stands in for a judge process."""

    alive = True

    def open(self) -> None:
        """Ready at once."""

    def close(self) -> None:
        """Nothing to end."""


@pytest.fixture
def spares() -> Iterator[Spares]:
    found = Spares(Spare, 1)  # type: ignore[arg-type]
    yield found
    found.close()


def test_spares_are_enough_for_all_who_take_at_once(spares: Spares, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every one starts its successor before it takes its own."""
    start, together, taken = spares._start, threading.Barrier(6), []

    def starting() -> None:
        together.wait(5)  # all six are between the two steps
        start()

    def take() -> None:
        taken.append(spares.take())

    monkeypatch.setattr(spares, "_start", starting)
    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, taken))) == 6
