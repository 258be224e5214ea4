"""Judge processes on a GPU that stand ready ahead of their use.

Importing torch takes 4 s and making a context 0.25 s, so a few processes are started ahead, up to the point
where no candidate's byte is in them.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from evotune.errors import SandboxError
from evotune.fitness.cuda_runner import CudaProcess, Facts


class Spares:
    """A few judge processes ahead of their use. `take` gives one with a context and nothing else."""

    def __init__(self, make: Callable[[], CudaProcess], count: int) -> None:
        self._make = make
        self._open = threading.Lock()  # at once they take four times as long each
        # A sandboxed process dies with the thread that started it: these live as long as the pool.
        self._starters = ThreadPoolExecutor(count, thread_name_prefix="judge-spare")
        self._ready: deque[Future[CudaProcess]] = deque()
        self.facts: Facts | None = None
        for _ in range(count):
            self._start()

    def take(self) -> CudaProcess:
        """A fresh process; its successor starts at once. Raises SandboxError, OSError."""
        while True:
            self._start()  # first: so the queue is never empty, however many take at once
            process = self._ready.popleft().result()
            if process.alive:
                return process
            process.close()

    def close(self) -> None:
        """End those that were not taken."""
        self._starters.shutdown(cancel_futures=True)
        while self._ready:
            future = self._ready.popleft()
            if not future.cancelled():
                with suppress(SandboxError, OSError):
                    future.result().close()

    def _start(self) -> None:
        self._ready.append(self._starters.submit(self._started))

    def _started(self) -> CudaProcess:
        process = self._make()
        with self._open:
            self.facts = process.open()
        return process
