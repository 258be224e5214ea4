"""Whose kernels are on a GPU that several judge processes share, and what it was used for.

What starts kernels waits for its turn: a timed call never shares the GPU with another's kernel. What runs
beside timed calls was measured on an H200 against calls of 540 and 120 us, medians of hundreds each: contexts
being made without a pause put 1 % of the calls more than 3 % off and left the median where it was; copies
from the host moved it by 0.4 and 0.7 %, when they never ceased; allocating and freeing a gigabyte again and
again by 5 %. So contexts and copies, of which a candidate costs few, are not held back, and large allocations
wait for their turn.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class Turns:
    """One judge process at a time has kernels on the GPU; whoever waits longest is next."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()

    @contextmanager
    def turn(self, *, first: bool = False) -> Iterator[None]:
        """Wait for a turn and have it inside; `first` goes before all who wait. Not reentrant."""
        with self._mutex:
            ours = threading.Lock()
            if self._taken:
                ours.acquire()
                (self._waiting.appendleft if first else self._waiting.append)(ours)
            self._taken = True
        with ours:  # whoever ends a turn opens the next one's lock
            pass
        try:
            yield
        finally:
            with self._mutex:
                self._taken = bool(self._waiting)
                if self._waiting:
                    self._waiting.popleft().release()


@dataclass(frozen=True)
class Spent:
    """What turns on the GPU came to, in seconds.

    Attributes:
        held_s: the turns themselves: no other process could have had kernels on the GPU.
        busy_s: of those, in which kernels worked, by the GPU's own events; kernels that only wait for the
            host (see `_cuda_child.Cuda.sleep`) are left out. What a candidate's process says of itself counts
            no more than its turn took.
    """

    held_s: float = 0.0
    busy_s: float = 0.0

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.held_s + other.held_s, self.busy_s + other.busy_s)

    def __sub__(self, other: "Spent") -> "Spent":
        return Spent(self.held_s - other.held_s, self.busy_s - other.busy_s)


class Usage:
    """What the GPU was used for, by all threads and by each."""

    def __init__(self, turns: Turns | None = None) -> None:
        """`turns` of another, for what stands on the same GPU but is counted apart."""
        self.turns = turns or Turns()
        self.faults = 0
        self._total = Spent()
        self._of_thread = threading.local()
        self._mutex = threading.Lock()

    @property
    def total(self) -> Spent:
        return self._total

    @property
    def mine(self) -> Spent:
        """What was asked for in this thread."""
        found: Spent = getattr(self._of_thread, "spent", Spent())
        return found

    def add(self, held_s: float, busy_s: float) -> None:
        spent = Spent(held_s, min(max(busy_s, 0.0), held_s))
        self._of_thread.spent = self.mine + spent
        with self._mutex:
            self._total += spent

    def fault(self) -> None:
        with self._mutex:
            self.faults += 1
