"""Ready sessions on the RMSNorm operator, from objects made by a plain compiler call: what the builder and
the link step would refuse must reach the runner here."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from evotune.fitness.gate import GateLimits, Session
from evotune.fitness.operator import specialization
from evotune.fitness.runner import Loadable, Runner, kinds
from evotune.fitness.sandbox import Sandbox
from evotune.search_space.template import Specialization
from tests.rmsnorm import RMS_OPERATOR, RMS_TEMPLATE, RmsKnobs, RmsWorkload

WORKLOAD = RmsWorkload(rows=256, D=64)
SPEC: Specialization = specialization(RMS_OPERATOR, WORKLOAD)
SIGNATURE = RMS_OPERATOR.signature(SPEC)
ARENA_BYTES = 64 << 20


def compile_source(source: str, folder: Path) -> Path:
    """A shared object of an RMSNorm source."""
    stem = folder / sha256(source.encode()).hexdigest()[:16]
    path = stem.with_suffix(".so")
    if not path.exists():
        stem.with_suffix(".c").write_text(source)
        constants = RMS_TEMPLATE.unit(source, RmsKnobs(), SPEC).constants
        defines = [f"-D{name}={value}" for name, value in constants]
        command = [
            "cc",
            "-O2",
            "-w",
            "-shared",
            "-fPIC",
            *defines,
            str(stem.with_suffix(".c")),
            "-o",
            str(path),
        ]
        subprocess.run([*command, "-lm"], check=True, capture_output=True, text=True)
    return path


@dataclass(frozen=True)
class Bench:
    """Makes runners and sessions from sources."""

    sandbox: Sandbox
    folder: Path

    def starter(self, *sources: str) -> Callable[[], Runner]:
        items = [Loadable(compile_source(s, self.folder), "rmsnorm", kinds(SIGNATURE)) for s in sources]
        return lambda: Runner(items, self.sandbox, arena_bytes=ARENA_BYTES, cpu=None)

    @contextmanager
    def runner(self, source: str) -> Iterator[Runner]:
        runner = self.starter(source)()
        try:
            yield runner
        finally:
            runner.close()

    @contextmanager
    def session(self, source: str, limits: GateLimits | None = None) -> Iterator[Session[Runner]]:
        session = Session(self.starter(source), [SIGNATURE], limits or GateLimits(call_timeout_s=0.5))
        try:
            yield session
        finally:
            session.close()
