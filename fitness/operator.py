"""The seam between the judge and the mathematics: what an operator must bring.

The study, the gate's machinery and the judge know these protocols and nothing of KDA. `reference_kda`
implements them without importing this module; a small RMSNorm operator in the tests does too.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from evotune.search_space.template import Constant, Specialization

Array = npt.NDArray[Any]
Level = Literal["screen", "full"]
Role = Literal["input", "output", "workspace", "size", "scalar"]


class Parameter(Protocol):
    """One argument of the compiled entry, in call order.

    `role` "input", "output", "workspace" are pointers (NULL when a case lacks the buffer), "size" an int64,
    "scalar" a float. `ctype` is the element type: "float32", "bfloat16", "int64", "uint8".
    """

    @property
    def name(self) -> str: ...
    @property
    def role(self) -> Role: ...
    @property
    def ctype(self) -> str: ...


class Discrepancy(Protocol):
    """The first place where outputs leave the bound.

    `ratio` is error over bound (> 1; inf when not finite); `detail` one line: output, head, chunk, how much.
    """

    @property
    def ratio(self) -> float: ...
    @property
    def detail(self) -> str: ...


class Workload(Protocol):
    """A problem shape with a regime. Equal workloads have equal names."""

    @property
    def name(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def constants(self) -> Mapping[str, Constant]:
        """Facts an object is compiled for; see `Specialization`."""
        ...


class Question(Protocol):
    """Sizes and scalars of a call, by parameter name."""

    @property
    def sizes(self) -> Mapping[str, int]: ...
    @property
    def scalars(self) -> Mapping[str, float]: ...


class Placeable(Question, Protocol):
    """What the layout of a call follows from."""

    @property
    def inputs(self) -> Mapping[str, Array | None]:
        """C-contiguous arrays by parameter name; None where the case leaves the argument out."""
        ...

    @property
    def outputs(self) -> Mapping[str, tuple[tuple[int, ...], str] | None]:
        """(shape, ctype) by parameter name; None where the output is not wanted."""
        ...


class Case(Placeable, Protocol):
    """A solved problem: inputs in the io dtype, truth in float64, a bound derived on this very input."""

    @property
    def name(self) -> str: ...

    def worst(self, outputs: Mapping[str, Array]) -> Discrepancy:
        """Compare with the truth: the worst place, whether inside the bound (`ratio` <= 1) or not."""
        ...

    def fresh(self, rng: np.random.Generator) -> "Case":
        """Another solved problem with other input values and, through the operator's symmetries, a truth that
        follows exactly; costs no new solution."""
        ...


class Law(Protocol):
    """A property that needs no reference: related inputs, outputs compared with outputs.

    `check` is given `call`, which runs the compiled kernel on a case's inputs and returns outputs by name.
    """

    @property
    def name(self) -> str: ...

    def check(self, call: Callable[[Case], Mapping[str, Array]], rng: np.random.Generator) -> Discrepancy: ...


Rung = Literal["smoke", "edges", "regimes"]


class GateEntry(Protocol):
    """One entry of a rung: a workload under the name that users see."""

    @property
    def rung(self) -> Rung: ...
    @property
    def name(self) -> str: ...
    @property
    def workload(self) -> Workload: ...


@dataclass(frozen=True)
class GateCase:
    """A `GateEntry`, for operators that may import this module."""

    rung: Rung
    name: str
    workload: Workload


class Operator(Protocol):
    """All that evotune knows of what is being computed.

    Parameters typed Any are the operator's own `Workload` and `Case`, which it is never given another's of.
    """

    @property
    def name(self) -> str: ...

    @property
    def entry(self) -> str:
        """The exported function's name, such as "kda_forward"."""
        ...

    def signature(self, spec: Specialization) -> Sequence[Parameter]: ...

    def workload(self, table: Mapping[str, Any]) -> Workload:
        """From a `[[workload]]` table of study.toml. Raises StudyError that names the key and the mend."""
        ...

    def gate_cases(self, spec: Specialization, level: Level) -> Iterator[GateEntry]:
        """Cases of the rungs smoke, edges, regimes, cheap and telling first."""
        ...

    def hostile(self, workload: Any) -> Workload | None:
        """A problem of the same shapes with values that are hard to get right; None where none are.

        A kernel may know a timed problem by its shape: it meets such values there too before it is promoted.
        """
        ...

    def laws(self, spec: Specialization, level: Level) -> Sequence[Law]: ...

    def solve(self, workload: Any, seed: int) -> Case:
        """Draw inputs and compute truth and bound. Deterministic in (workload, seed)."""
        ...

    def question(self, workload: Any) -> "Question":
        """What a call on it is told beside its arrays; nothing is drawn or solved."""
        ...

    def empty(self, spec: Specialization) -> Case:
        """A problem with nothing to do, on which the host cost of a call is measured."""
        ...

    def work(self, workload: Any) -> tuple[float, str]:
        """Amount of work and its unit, such as (1024.0, "token-heads"), for throughput."""
        ...

    def naive_time_us(self, case: Any) -> float:
        """Time of the numpy form a user would write, measured now, for the ratio in reports."""
        ...

    def floor_us(self, workload: Any, bytes_per_us: float) -> float:
        """Physical floor: bytes that must move over the device's bandwidth."""
        ...


@runtime_checkable
class Shrinks(Protocol):
    """What an operator may have beside `Operator`: how its failures become small enough to understand."""

    def smaller(self, workload: Any) -> Generator[Any, bool, None]:
        """Ever smaller workloads, hashable; sent for each whether the failure shows there too.

        The last one that failed is the smallest. One may be asked about twice.
        """
        ...

    def table(self, workload: Any) -> Mapping[str, Any]:
        """The workload as a `[[workload]]` table of study.toml has it."""
        ...


@runtime_checkable
class ShrinkingLaw(Protocol):
    """What a law may have beside `Law`, of an operator that `Shrinks`."""

    @property
    def drawn(self) -> Sequence[Workload]:
        """The workloads that `check` has asked about so far."""
        ...

    def on(self, workload: Any) -> Law:
        """The same law, on problems of this workload alone."""
        ...

    def smaller(self, workload: Any) -> Generator[Any, bool, None]:
        """As `Shrinks.smaller`, of workloads that the law speaks of."""
        ...


class DeviceParameter(Parameter, Protocol):
    """An argument of an entry that takes tensors in a GPU's memory."""

    @property
    def absent(self) -> tuple[int | str, ...] | None:
        """Shape of the empty tensor that stands for a buffer a case lacks, sizes by name; None for None."""
        ...


class Gather(Protocol):
    """New element j of each row is old element `index[j]` of it, times `factor[j]` (None: ones).

    A row is what follows the first `lead` axes, flattened. `index` is int32, `factor` float32.
    """

    @property
    def lead(self) -> int: ...
    @property
    def index(self) -> Array: ...
    @property
    def factor(self) -> Array | None: ...


class Spread(Placeable, Protocol):
    """A large problem made of exact images of a small solved one, so that its answer is known in parts.

    `inputs` tell shapes and types only; their numbers are gathered from `sources`, on the device.
    """

    @property
    def name(self) -> str: ...
    @property
    def sources(self) -> Mapping[str, Array | None]: ...
    @property
    def gathers(self) -> Mapping[str, Gather]:
        """By argument name; an argument without one is its source as it is."""
        ...

    @property
    def copies(self) -> int: ...

    def copy(self, number: int) -> Case:
        """One image as a case of its own."""
        ...

    def worst(self, number: int, outputs: Mapping[str, Array]) -> Discrepancy:
        """As `copy(number).worst` says."""
        ...

    def place(self, number: int) -> Mapping[str, tuple[int, int, int]]:
        """Where an image's outputs lie in the whole problem's: name → (axis, begin, end)."""
        ...


class DeviceOperator(Operator, Protocol):
    """An operator whose kernels also run on GPUs, on problems too large to be solved whole."""

    def device_signature(self, spec: Specialization) -> Sequence[DeviceParameter]: ...

    def pool(self, workload: Any) -> Workload:
        """The small problem that `spread` makes a workload's inputs of."""
        ...

    def spread(self, workload: Any, pool: Any, rng: np.random.Generator) -> Spread:
        """A fresh problem of a workload from the solved case of its pool."""
        ...


def specialization(operator: Operator, workload: Workload) -> Specialization:
    """The object this workload needs."""
    return Specialization(operator.name, workload.dtype, tuple(sorted(workload.constants.items())))
