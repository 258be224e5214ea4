"""What an exported directory says of itself, and how to read one that somebody else wrote.

    pareto/manifest.json                 `Index`: workloads, who serves which, sha256 of every manifest
    pareto/kernels/<id>/manifest.json    `KernelManifest`: knobs, lineage, evidence, sha256 of every file

A directory may be hostile. `Folder` opens plain names only, relative to an open directory and never through
a link, reads regular files up to a limit, and compares hashes before anything is used. JSON is the only
format that is parsed, into strict models.
"""

import json
import os
import platform
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from evotune.errors import StudyError

MANIFEST = "manifest.json"
KERNELS = "kernels"
MANIFEST_LIMIT = 8 * 2**20
FILE_LIMIT = 64 * 2**20
LARGEST = 2**40
WORKSPACE_ALIGNMENT = 128  # bytes

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,120}")

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._+-]{0,120}$")]
Text = Annotated[str, Field(max_length=20_000)]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Constant = int | float | Annotated[str, Field(max_length=200)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class FileEntry(_Model):
    """A file beside the manifest."""

    name: Name
    sha256: Hash
    size_bytes: Annotated[int, Field(ge=0, le=FILE_LIMIT)]

    @classmethod
    def of(cls, name: str, data: bytes) -> Self:
        return cls(name=name, sha256=sha256(data).hexdigest(), size_bytes=len(data))


class SpecializationEntry(_Model):
    """As `search_space.template.Specialization`. Sizes are bounded, since `verify` makes cases of them."""

    operator: Name
    dtype: Literal["float32", "bfloat16"]
    constants: dict[Name, Annotated[int, Field(ge=1, le=1024)] | Annotated[str, Field(max_length=40)]]


class WorkspaceTerm(_Model):
    """`bytes` times the product of the sizes named, such as 864 · T · HV."""

    bytes: Annotated[int, Field(ge=0, le=LARGEST)]
    sizes: Annotated[tuple[Name, ...], Field(max_length=8)]

    def of(self, sizes: Mapping[str, int]) -> int:
        """For a call of these sizes. Raises KeyError for a size that the operator does not have."""
        return self.bytes * prod(sizes[name] for name in self.sizes)


class ObjectEntry(_Model):
    """One compiled specialization.

    Attributes:
        specialization: facts of the problem it was compiled for; `label` is their short name.
        constants: everything the compiler was given, knobs and specialization.
        object: what the compiler wrote; `verify` judges this.
        library: linked from it; the drop-in loads this.
        reproducible: whether this build and the one the study judged have the same bytes; None when the
            study's object is gone.
        resources: read from the object, unit in the name.
        scalars: parameters to which every case of the gate gives this one value, such as lower_bound: it was
            verified for no other.
        workspace: terms whose sum is what a caller hands over, at least what the kernel needs, beginning at a
            multiple of `WORKSPACE_ALIGNMENT` bytes; None where the library tells it itself.
    """

    label: Name
    specialization: SpecializationEntry
    constants: dict[Name, Constant]
    object: FileEntry
    library: FileEntry
    reproducible: bool | None
    resources: dict[Name, int]
    scalars: Annotated[dict[Name, float], Field(max_length=16)]
    workspace: Annotated[tuple[WorkspaceTerm, ...], Field(max_length=64)] | None = None

    def workspace_bytes(self, sizes: Mapping[str, int]) -> int:
        """For a call of these sizes; 0 where the library tells. Raises KeyError as `WorkspaceTerm.of`.

        Whole alignments, as templates ask for: a judge lets a buffer end at a guard, and so must it begin.
        """
        total = sum(term.of(sizes) for term in self.workspace or ())
        return -(-total // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT


class Interval(_Model):
    """A ratio with its uncertainty: the median over blocks and an order-statistic interval of that median.

    Attributes:
        confidence: the least coverage, exact for independent blocks whatever their distribution.
    """

    low: float
    median: float
    high: float
    confidence: Annotated[float, Field(ge=0, le=1)]


class Block(_Model):
    """Interleaved calls in one judge process, with inputs of its own. Microseconds, in call order."""

    samples_us: tuple[float, ...]
    baseline_samples_us: tuple[float, ...]
    naive_us: Annotated[float, Field(gt=0)]


class Timing(_Model):
    """One workload of one kernel, timed at export on inputs that no choice was made with.

    Attributes:
        time_us: median over blocks of the block's median.
        speedup: the default configuration's time over this kernel's.
        naive_ratio: the numpy form's time over this kernel's.
    """

    workload: Text
    group: Text
    time_us: float
    speedup: Interval
    naive_ratio: Interval
    blocks: tuple[Block, ...]


class SanitizerEntry(_Model):
    """What compute-sanitizer found when the kernel ran some gate cases under it, at export.

    Attributes:
        found: tool, such as "racecheck" → its first complaint; "" for none.
        absent: why it was not run; "" when it was.
    """

    found: Annotated[dict[Name, Text], Field(max_length=16)]
    absent: Text = ""

    @property
    def complaint(self) -> str:
        """The first; "" when there is none. In a line that a terminal can be trusted with."""
        told = next(((name, what) for name, what in self.found.items() if what), None)
        return f"compute-sanitizer's {told[0]} found {_quoted(told[1])}" if told else ""

    @property
    def line(self) -> str:
        """All of it, as `complaint`."""
        if self.complaint:
            return self.complaint
        if self.absent or not self.found:
            return f"compute-sanitizer was not run at export: {_quoted(self.absent or 'nobody says why')}"
        return f"compute-sanitizer at export: {', '.join(self.found)} found nothing"


def _quoted(text: str) -> str:
    return repr(text[:400])


class Evidence(_Model):
    """Why to believe it.

    Attributes:
        level: of the gate it passed after the rebuild.
        gate_seeds: how many independently seeded passes of the gate; seeds come from the operating system
            after the build.
        worst_error: largest error over its derived bound, at most 1.
        host_call_us: cost of a call on an empty problem.
        sanitizer: None for a target that has no such tool.
    """

    level: Literal["full"]
    gate_seeds: Annotated[int, Field(ge=1)]
    worst_error: Annotated[float, Field(ge=0, le=1)]
    host_call_us: Annotated[float, Field(ge=0)]
    timings: tuple[Timing, ...]
    sanitizer: SanitizerEntry | None = None


class Ancestor(_Model):
    """One branch on the way from the seed to the kernel."""

    branch: Name
    origin: Text
    note: Text


class Cpu(_Model):
    """The processor that the objects were built for and timed on."""

    machine: Text
    model: Text
    flags: tuple[Name, ...]

    @property
    def label(self) -> str:
        return self.model


class Gpu(_Model):
    """The GPU that the objects were judged and timed on.

    Attributes:
        driver: version of NVIDIA's driver.
        cuda: version of CUDA that the driver brings.
    """

    name: Text
    compute_capability: Annotated[str, Field(pattern=r"^\d+\.\d+$")]
    driver: Text
    cuda: Text

    @property
    def label(self) -> str:
        return f"{self.name}, driver {self.driver}"


class KernelManifest(_Model):
    """One exported kernel.

    Attributes:
        number: the candidate's number in its study.
        candidate: digest of branch source and knobs.
        lineage: from the seed to this kernel's branch.
        front: whether it is on the study's Pareto front.
        fastest_on: workloads on which the study measured it fastest.
        versions: of evotune, Python and libraries.
        cpu: of the machine it was exported on; for the host target, what the objects were built for.
        gpu: what it was judged and timed on; None for the host target.
        resembles: share of the text beyond the template's own that public kernels have too (`resemblance`).
    """

    format: Literal["evotune-kernel/1"] = "evotune-kernel/1"
    id: Name
    number: int
    candidate: Hash
    template: Name
    target: Name
    language: Literal["c", "cute"]
    entry: Name
    branch: Name
    parents: tuple[Name, ...]
    origin: Text
    note: Text
    lineage: tuple[Ancestor, ...]
    knobs: dict[Name, Constant]
    front: bool
    fastest_on: tuple[Text, ...]
    source: FileEntry
    objects: Annotated[tuple[ObjectEntry, ...], Field(min_length=1, max_length=64)]
    toolchain: Text
    versions: dict[Name, Text]
    cpu: Cpu
    gpu: Gpu | None = None
    evidence: Evidence
    licence: Text
    resembles: Annotated[dict[Text, Annotated[float, Field(ge=0, le=1)]], Field(max_length=100)] = Field(
        default_factory=dict
    )

    @model_validator(mode="after")
    def _nothing_twice(self) -> Self:
        """Whoever reads one of two takes his pick: what was judged might not be what is loaded."""
        _once("object", (built.label for built in self.objects))
        _once("file", (MANIFEST, *(entry.name for entry in self.files())))
        return self

    @property
    def likeness(self) -> str:
        """What it resembles most, in a phrase that a terminal can be trusted with; "" for nothing."""
        if not self.resembles:
            return ""
        name, share = max(self.resembles.items(), key=lambda item: item[1])
        others = f" and {len(self.resembles) - 1} more" if len(self.resembles) > 1 else ""
        return f"resembles {_quoted(name[:100])} ({share:.0%} of its new text){others}"

    def files(self) -> Iterator[FileEntry]:
        yield self.source
        for built in self.objects:
            yield built.object
            yield built.library


class WorkloadEntry(_Model):
    """A measured problem; the drop-in sends a call to the kernel of the nearest one.

    Attributes:
        sizes: size parameters of the entry, such as N, T, H, HV.
        scalars: scalar parameters of its calls.
        kernel: id of the kernel with the lowest time at export.
    """

    name: Text
    group: Text
    label: Name
    dtype: Literal["float32", "bfloat16"]
    constants: dict[Name, Constant]
    sizes: dict[Name, int]
    scalars: dict[Name, float]
    kernel: Name


class LeftOut(_Model):
    """A kernel that was chosen and did not hold."""

    id: Name
    number: int
    reason: Text


class Index(_Model):
    """The directory. All kernels are for one target."""

    format: Literal["evotune-pareto/1"] = "evotune-pareto/1"
    evotune: Text
    created: Text
    study: Text
    operator: Name
    template: Name
    target: Name = "host"
    cpu: Cpu
    gpu: Gpu | None = None
    kernels: Annotated[dict[Name, Hash], Field(max_length=1000)]
    workloads: tuple[WorkloadEntry, ...]
    left_out: tuple[LeftOut, ...]

    @model_validator(mode="after")
    def _nothing_twice(self) -> Self:
        _once("workload", (workload.name for workload in self.workloads))
        return self


def _once(kind: str, names: Iterable[str]) -> None:
    """Raises ValueError for a name that is there twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{kind} {name[:120]!r} is there twice")
        seen.add(name)


def to_json(model: BaseModel) -> bytes:
    return (model.model_dump_json(indent=1) + "\n").encode()


_M = TypeVar("_M", bound=BaseModel)


def parse(model: type[_M], data: bytes, where: str) -> _M:
    """Raises StudyError that names the first wrong field, or a key given twice: readers differ in which one
    they take."""
    try:
        found = model.model_validate_json(data)
        json.loads(data, object_pairs_hook=lambda pairs: _once("key", (key for key, _ in pairs)))
        return found
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part)[:60] for part in first["loc"])
        raise StudyError(f"{where}: {place + ': ' if place else ''}{first['msg'][:200]}") from None
    except ValueError as error:
        raise StudyError(f"{where}: {error}") from None


def plain_name(name: str) -> str:
    """The name, when it is fit to be one path component; raises StudyError otherwise."""
    if not _PLAIN.fullmatch(name):
        raise StudyError(f"{name[:80]!r} is not a plain file name")
    return name


@dataclass(frozen=True)
class Folder:
    """An open directory whose content is not trusted. Nothing is followed out of it."""

    fd: int
    where: str

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[Self]:
        """Raises StudyError when `path` is not a directory that can be read."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise StudyError(f"{path}: {error.strerror}") from None
        try:
            yield cls(fd, str(path))
        finally:
            os.close(fd)

    @contextmanager
    def folder(self, name: str) -> Iterator["Folder"]:
        """A directory directly inside. Raises StudyError for a link or anything else."""
        where = f"{self.where}/{plain_name(name)}"
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, dir_fd=self.fd)
        except OSError as error:
            raise StudyError(f"{where}: not a directory of its own ({error.strerror})") from None
        try:
            yield Folder(fd, where)
        finally:
            os.close(fd)

    def names(self) -> list[str]:
        """What lies directly inside, sorted."""
        return sorted(os.listdir(self.fd))

    def read(self, name: str, limit: int) -> bytes:
        """A regular file directly inside, whole. Raises StudyError for a link, a device, a pipe, a file above
        `limit` bytes or one that is absent."""
        where = f"{self.where}/{plain_name(name)}"
        # O_NONBLOCK: opening a pipe without a writer would wait for ever.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, dir_fd=self.fd)
        except OSError as error:
            raise StudyError(f"{where}: cannot be read as a plain file ({error.strerror})") from None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise StudyError(f"{where}: not a regular file")
        with os.fdopen(fd, "rb") as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise StudyError(f"{where}: larger than the {limit} bytes allowed")
        return data

    def checked(self, entry: FileEntry) -> bytes:
        """A file with the size and hash that a manifest gives it; raises StudyError otherwise."""
        data = self.read(entry.name, FILE_LIMIT)
        if sha256(data).hexdigest() != entry.sha256 or len(data) != entry.size_bytes:
            raise StudyError(f"{self.where}/{entry.name}: its sha256 is not the one in {MANIFEST}")
        return data


def read_index(folder: Folder) -> Index:
    return parse(Index, folder.read(MANIFEST, MANIFEST_LIMIT), f"{folder.where}/{MANIFEST}")


def read_kernel(folder: Folder, kernel: str, expected: str) -> KernelManifest:
    """The manifest of the kernel in `folder`, checked against the hash in the index. Raises StudyError."""
    data = folder.read(MANIFEST, MANIFEST_LIMIT)
    where = f"{folder.where}/{MANIFEST}"
    if sha256(data).hexdigest() != expected:
        raise StudyError(f"{where}: its sha256 is not the one in the index")
    manifest = parse(KernelManifest, data, where)
    if manifest.id != kernel:
        raise StudyError(f"{where}: names itself {manifest.id}, the index says {kernel}")
    return manifest


# Flags of the instruction set, which -march=native compiles for; the others tell of the system's kernel.
_INSTRUCTIONS = re.compile(
    r"(s?sse|avx|amx|fma|bmi|asimd|sve|sm4|sha|v?aes)\w*|"
    r"f16c|popcnt|abm|lzcnt|movbe|adx|gfni|v?pclmulqdq|xop|tbm"
)


def this_cpu() -> Cpu:
    """The processor of this machine, from /proc/cpuinfo; elsewhere without flags."""
    model = platform.processor() or "unknown"
    flags: tuple[str, ...] = ()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    for line in text.split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = tuple(sorted(flag for flag in set(value.split()) if _INSTRUCTIONS.fullmatch(flag)))
    return Cpu(machine=platform.machine(), model=model, flags=flags)
