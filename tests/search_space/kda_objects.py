"""Compiled KDA kernels for tests on a GPU: which ones, where they come from, how they are called.

The sample covers the knobs of both Hopper templates (see `covering`). Its objects are compiled where the
CuTe-DSL is, or taken from a folder that was filled elsewhere, for a machine that has a GPU and no DSL:

    python -m tests.search_space.kda_objects FOLDER       compile the sample and the planted mistakes
    EVOTUNE_KDA_OBJECTS=FOLDER python -m pytest -m gpu    use them; libcute_dsl_runtime.so on LD_LIBRARY_PATH

A file is named by the digest of its unit, text included, so objects of an older source are never used.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from evotune.errors import StudyError
from evotune.fitness.cuda_link import CudaLinker, share_runtime
from evotune.fitness.cute_toolchain import CuteToolchain
from evotune.fitness.outcome import Failed
from evotune.fitness.sandbox import Limits, Sandbox
from evotune.fitness.toolchain import Compiled
from evotune.search_space.space import choices_of
from evotune.search_space.template import Constant, Specialization, Unit
from evotune.search_space.templates import kda_sm90, kda_sm90_chunked
from tests.search_space.covering import Row, covering

FOLDER_VARIABLE = "EVOTUNE_KDA_OBJECTS"
TEMPLATES: Mapping[str, Any] = {t.name: t for t in (kda_sm90_chunked.TEMPLATE, kda_sm90.TEMPLATE)}
CHUNKED, TOKEN = TEMPLATES
CONTRACTS = ("production", "plain")
MAIN = (128, 128)
DIMS = {f"{K}x{V}": (K, V) for K, V in (MAIN, (64, 64), (64, 128), (128, 64))}


@dataclass(frozen=True)
class Planted:
    """A race to be planted in a template's text.

    Attributes:
        edits: (text that stands there once, what takes its place).
        knobs: where it shows, beside the default's.
    """

    template: str
    edits: tuple[tuple[str, str], ...]
    knobs: Mapping[str, Constant]


_ENTER = "            U, O = self.enter(S, base, "
_WRITE = "            self.write(rows, base, chunk, O, w, lane)\n"
_FULL = "                cute.arch.mbarrier_wait(full + slot, phase)\n            else:\n"
_FREE = "                    cute.arch.mbarrier_arrive(free + last)\n"
_MEET = "        cute.arch.barrier(barrier_id=1 + w // p.key_warps, number_of_threads=WARP * p.key_warps)\n"
_FETCHED = "            logit = self.fetch_beta(mBeta, t0 + p.tokens, end, hv, tx)\n"
PLANTED: Mapping[str, Planted] = {
    "a slot is freed before it is read": Planted(
        CHUNKED,
        (
            (
                _ENTER,
                "            cute.arch.mbarrier_arrive(free + slot)\n" + _ENTER,
            ),
            (_FREE, "                    pass\n"),
        ),
        {"stages": 3},
    ),
    "a slot is read before it is known to be full": Planted(
        CHUNKED,
        (
            (_FULL, "                pass\n            else:\n"),
            (_WRITE, _WRITE + "            cute.arch.mbarrier_wait(full + slot, phase)\n"),
        ),
        {"stages": 3},
    ),
    "warps do not wait for each other's copies": Planted(
        CHUNKED,
        (
            (
                _FULL + "                cute.arch.barrier()\n",
                _FULL + "                cute.arch.sync_warp()\n",
            ),
        ),
        {"copy": "cp.async", "loader": "inline", "stages": 3},
    ),
    "warps of a strip do not meet": Planted(
        CHUNKED,
        ((_MEET, "        cute.arch.sync_warp()\n"),),
        {"key_warps": 2},
    ),
    "tokens are used before they are prepared": Planted(
        TOKEN,
        ((_FETCHED + "            cute.arch.barrier()\n", _FETCHED),),
        {},
    ),
}


@dataclass(frozen=True)
class Configuration:
    """One object: a template's knobs, the facts it is compiled for, and a mistake planted in its text."""

    template: str
    knobs: Any
    spec: Specialization
    planted: str = ""

    @property
    def label(self) -> str:
        default = TEMPLATES[self.template].default(self.spec)
        changed = [f"{k}={v}" for k, v in vars(self.knobs).items() if v != getattr(default, k)]
        planted = [self.planted] if self.planted else []
        return " ".join([self.template, self.spec.label, *changed, *planted])

    @property
    def dims(self) -> tuple[int, int]:
        return self.spec.integer("K"), self.spec.integer("V")

    @property
    def unit(self) -> Unit:
        template = TEMPLATES[self.template]
        text = template.source
        for old, new in PLANTED[self.planted].edits if self.planted else ():
            if text.count(old) != 1:
                raise ValueError(
                    f"{self.planted}: the text to change stands {text.count(old)} times in {self.template}"
                )
            text = text.replace(old, new)
        unit: Unit = template.unit(text, self.knobs, self.spec)
        return unit

    @property
    def file(self) -> str:
        return f"{self.unit.digest[:24]}.so"

    def workspace_bytes(self, sizes: Mapping[str, int]) -> int:
        needs = getattr(TEMPLATES[self.template], "workspace_bytes", None)
        return 0 if needs is None else int(needs(self.knobs, self.spec, sizes))


def spec_of(dims: tuple[int, int], contract: str, dtype: str = "bfloat16") -> Specialization:
    return Specialization("kda", dtype, (("K", dims[0]), ("V", dims[1]), ("contract", contract)))


@cache
def sample(template: str) -> tuple[Configuration, ...]:
    """Every legal pair of knob values, contracts included, at K = V = 128; every knob value at other dims.

    The token template's sample has both io dtypes and is pairwise over dims too: its objects are small.
    """
    if template == TOKEN:
        return _sampled(TOKEN, tuple(DIMS), ("bfloat16", "float32"), None)
    others = tuple(name for name, dims in DIMS.items() if dims != MAIN)
    main = _sampled(CHUNKED, ("128x128",), ("bfloat16",), None)
    return (*main, *_sampled(CHUNKED, others, ("bfloat16",), "dims"))


def _sampled(
    template: str, dims: Sequence[str], dtypes: Sequence[str], hub: str | None
) -> tuple[Configuration, ...]:
    facts: dict[str, Sequence[Constant]] = {"dims": dims, "contract": CONTRACTS, "dtype": dtypes}
    subject = TEMPLATES[template]

    def configuration(row: Row) -> Configuration:
        spec = spec_of(DIMS[str(row["dims"])], str(row["contract"]), str(row["dtype"]))
        knobs = {name: value for name, value in row.items() if name not in facts}
        return Configuration(template, subject.knobs(**knobs), spec)

    def legal(row: Row) -> bool:
        found = configuration(row)
        return subject.why_not(found.knobs, found.spec) is None

    first = spec_of(DIMS[dims[0]], CONTRACTS[0], dtypes[0])
    default = {"dims": dims[0], "contract": CONTRACTS[0], "dtype": dtypes[0], **vars(subject.default(first))}
    found = covering({**facts, **choices_of(subject.knobs)}, legal, start=[default], hub=hub)
    return tuple(configuration(row) for row in found.rows)


def control(planted: str) -> tuple[Configuration, Configuration]:
    """An object that is right, and the same with a race planted in it, which the tests must find."""
    spec, race = spec_of(MAIN, "production"), PLANTED[planted]
    knobs = replace(TEMPLATES[race.template].default(spec), **race.knobs)
    right, wrong = (Configuration(race.template, knobs, spec, name) for name in ("", planted))
    return right, wrong


def sanitized(tool: str = "") -> tuple[Configuration, ...]:
    """Those that a tool of compute-sanitizer looks at: every way of copying and of keeping the state.

    initcheck does not see what a bulk copy writes, and would report cp.async's reads of it. That no call
    depends on what its workspace held is asked elsewhere (`Uses.poisoned`).
    """
    spec, plain = (spec_of(MAIN, contract) for contract in CONTRACTS)
    chunked, token = (TEMPLATES[name].default(spec) for name in (CHUNKED, TOKEN))
    changes: tuple[dict[str, Constant], ...] = (
        {},
        {"loader": "inline", "stages": 3},
        {"chunk": 16, "copy": "cp.async", "loader": "inline", "fetch": "before", "value_tile": 32},
        {"key_warps": 2, "solve": "prepare"},
        {"state": "shared", "stages": 3, "value_tile": 32},
        {"state": "shared", "loader": "inline", "order": "longest", "start": "early", "units": 1},
        {
            "copy": "cp.async",
            "loader": "inline",
            "state": "shared",
            "inverse": "halves",
            "key_warps": 2,
            "value_tile": 32,
            "stages": 3,
        },
    )
    found = [Configuration(CHUNKED, replace(chunked, **change), spec) for change in changes]
    four = replace(chunked, chunk=16, sweep="backward", units=4, prepare_blocks=2)
    found.append(Configuration(CHUNKED, four, plain))
    found.append(Configuration(TOKEN, token, spec))
    found.append(Configuration(TOKEN, replace(token, unroll=2, state="shared", stages=1), plain))
    for each in found:
        assert TEMPLATES[each.template].why_not(each.knobs, each.spec) is None, each.label
    return tuple(c for c in found if tool != "initcheck" or getattr(c.knobs, "copy", "") != "cp.async")


Function = Callable[..., object]


@dataclass(frozen=True)
class Kernel:
    """A loaded object."""

    configuration: Configuration
    function: Function

    @property
    def label(self) -> str:
        return self.configuration.label


def load(configuration: Configuration, folder: Path) -> Kernel:
    """Raises FileNotFoundError when the folder has no object of this very text and these knobs."""
    path = folder / configuration.file
    if not path.exists():
        raise FileNotFoundError(
            f"{folder} has no object of {configuration.label}; fill it with "
            f"python -m tests.search_space.kda_objects {folder}"
        )
    share_runtime()
    import tvm_ffi

    return Kernel(configuration, tvm_ffi.load_module(str(path)).get_function("kda_forward"))


def compile_into(folder: Path, configurations: Iterable[Configuration]) -> None:
    """Compile what the folder lacks, on all processors. Raises StudyError without the DSL or a linker,
    RuntimeError for a configuration that does not compile."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [each for each in configurations if not (folder / each.file).exists()]
    if not wanted:
        return
    toolchain, sandbox = CuteToolchain(), Sandbox.detect()
    linker = CudaLinker(sandbox)

    def build(configuration: Configuration) -> None:
        unit = configuration.unit
        with sandbox.scratch() as scratch:
            compiled = toolchain.compile(unit, scratch, sandbox, Limits(wall_s=120))
        if not isinstance(compiled, Compiled):
            raise RuntimeError(f"{configuration.label}: {compiled}")
        linked = linker.link_bytes(compiled.object, unit.entry)
        if isinstance(linked, Failed):
            raise RuntimeError(f"{configuration.label}: {linked}")
        part = folder / f"{configuration.file}.part"
        part.write_bytes(linked)
        part.replace(folder / configuration.file)

    try:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(build, wanted))
    finally:
        toolchain.close()


def everything() -> tuple[Configuration, ...]:
    return tuple(
        dict.fromkeys((*sample(CHUNKED), *sample(TOKEN), *sanitized(), *chain(*map(control, PLANTED))))
    )


def folder_given() -> Path | None:
    """The folder of prebuilt objects that the environment names."""
    name = os.environ.get(FOLDER_VARIABLE)
    return Path(name) if name else None


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    try:
        compile_into(Path(sys.argv[1]), everything())
    except StudyError as error:
        raise SystemExit(str(error)) from error
