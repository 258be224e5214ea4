"""Who may have kernels on a GPU, and what is counted of it."""

import threading
import time

import pytest

from evotune.fitness.turns import Turns, Usage


def test_one_process_at_a_time_has_its_turn() -> None:
    """Whoever waits longest is next, but a timed call goes before all who wait."""
    turns, order, waiting = Turns(), [], threading.Barrier(2)

    def work(name: str, first: bool) -> None:
        waiting.wait()
        with turns.turn(first=first):
            order.append(name)

    threads = []
    with turns.turn():
        for name, first in (("gate", False), ("layout", False), ("timed", True)):
            threads.append(threading.Thread(target=work, args=(name, first)))
            threads[-1].start()
            waiting.wait()
            while len(turns._waiting) < len(threads):
                time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert order == ["timed", "gate", "layout"]
    with turns.turn():
        pass  # nobody is left who keeps it


def test_a_turn_ends_with_an_error_too() -> None:
    turns = Turns()
    with pytest.raises(KeyError), turns.turn():
        raise KeyError
    with turns.turn():
        pass


def test_use_is_counted_by_thread_and_never_beyond_the_turn() -> None:
    usage = Usage()
    thread = threading.Thread(target=usage.add, args=(1.0, 50.0))
    thread.start()
    thread.join()
    usage.add(2.0, 0.5)
    assert (usage.mine.held_s, usage.mine.busy_s) == (2.0, 0.5)
    assert (usage.total.held_s, usage.total.busy_s) == (3.0, 1.5)
