"""What the drop-ins of KDA share: the exported index, contracts, and which kernel a call goes to.

Its text is part of every exported `kda.py`, so it imports the standard library alone.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*")


def available() -> list[dict[str, Any]]:
    """What was exported, one row per measured workload: name, group, dtype, constants (K, V, contract),
    sizes, scalars and the id of its kernel."""
    return [dict(row) for row in index()["workloads"]]


@cache
def index() -> Any:
    """The exported directory's manifest."""
    return json.loads((HERE / "manifest.json").read_bytes())


@dataclass(frozen=True)
class Extents:
    """Of one call. T counts the rows of all its N sequences together."""

    dtype: str
    N: int
    T: int
    H: int
    HV: int
    K: int
    V: int

    def __post_init__(self) -> None:
        if self.H == 0 or self.HV == 0 or self.HV % self.H:
            raise ValueError(
                f"v has {self.HV} heads, which is no positive multiple of the {self.H} heads of q"
            )

    @property
    def features(self) -> tuple[float, float, float]:
        return features({"N": self.N, "T": self.T, "HV": self.HV})


def features(sizes: Mapping[str, int]) -> tuple[float, float, float]:
    """What workloads are near each other by."""
    mean_length = sizes["T"] / max(sizes["N"], 1)
    return math.log2(1 + sizes["N"]), math.log2(1 + mean_length), math.log2(1 + sizes["HV"])


def contract_of(flags: Sequence[bool], lower_bound: float | None, A_log: Any, dt_bias: Any) -> str:
    """ "production" or "plain", from the three flags of fla. Raises ValueError for any other mixture."""
    if all(flags):
        if lower_bound is None:
            raise ValueError(
                "use_gate_in_kernel without lower_bound is the unbounded softplus gate, "
                "which no exported kernel computes; give lower_bound"
            )
        return "production"
    if any(flags):
        raise ValueError(
            "use_qk_l2norm_in_kernel, use_gate_in_kernel and use_beta_sigmoid_in_kernel must be all set "
            f"(production) or all unset (plain); {offer()}"
        )
    for name, value in (("lower_bound", lower_bound), ("A_log", A_log), ("dt_bias", dt_bias)):
        if value is not None:
            raise ValueError(
                f"{name} belongs to the gate in the kernel; set use_gate_in_kernel or leave it out"
            )
    return "plain"


def scale_of(scale: float | None, K: int) -> float:
    """The factor on q, K ** -0.5 by default. Raises ValueError unless it is finite."""
    value = K**-0.5 if scale is None else float(scale)
    if not math.isfinite(value):
        raise ValueError(f"scale = {scale} is not finite")
    return value


def offer() -> str:
    """What there is, for a person who asked for something else."""
    rows = {f"{r['dtype']} " + " ".join(f"{n}={v}" for n, v in r["constants"].items()) for r in available()}
    return "exported: " + ("; ".join(sorted(rows)) or "nothing")


@dataclass(frozen=True)
class Choice:
    """A kernel, and its object by the label of what it was compiled for."""

    kernel: str
    label: str


def choose(extents: Extents, contract: str, lower_bound: float | None, kernel: str | None) -> Choice:
    """The kernel for a call: that of the nearest measured workload, or `kernel`. Raises ValueError."""
    wanted = {"K": extents.K, "V": extents.V, "contract": contract}
    rows = [r for r in index()["workloads"] if r["dtype"] == extents.dtype and r["constants"] == wanted]
    if not rows:
        asked = f"{extents.dtype} K={extents.K} V={extents.V} contract={contract}"
        raise ValueError(f"no exported kernel for {asked}; {offer()}")
    verified = sorted({r["scalars"]["lower_bound"] for r in rows})
    if lower_bound is not None and lower_bound not in verified:
        raise ValueError(f"lower_bound = {lower_bound} was never verified; verified: {verified}")
    if kernel is not None:
        if kernel not in index()["kernels"]:
            raise ValueError(f"no kernel {kernel!r}; exported: {', '.join(index()['kernels'])}")
        return Choice(kernel, rows[0]["label"])
    nearest = min(rows, key=lambda r: math.dist(extents.features, features(r["sizes"])))
    return Choice(nearest["kernel"], nearest["label"])


@dataclass(frozen=True)
class Shipped:
    """A kernel's files whose hashes were compared: its manifest, its object's entry there, its library."""

    manifest: Mapping[str, Any]
    built: Mapping[str, Any]
    library: Path


def shipped(choice: Choice) -> Shipped:
    """Raises RuntimeError when a file is not the one that was exported, or the index not its own."""
    folder = HERE / "kernels" / _plain(choice.kernel)
    text = (folder / "manifest.json").read_bytes()
    _same_hash(folder / "manifest.json", text, index()["kernels"][choice.kernel])
    manifest = json.loads(text)
    mine = [o for o in manifest["objects"] if o["label"] == choice.label]
    if len(mine) != 1:
        raise RuntimeError(f"{choice.kernel} has {len(mine)} objects {choice.label}; wanted is one")
    (built,) = mine
    _same_scalars(choice, built["scalars"])
    path = folder / _plain(built["library"]["name"])
    _same_hash(path, path.read_bytes(), built["library"]["sha256"])
    return Shipped(manifest, built, path)


def _same_scalars(choice: Choice, verified: Mapping[str, float]) -> None:
    """`choose` believes the index, of which nobody has a hash."""
    for row in available():
        for name, value in verified.items():
            says = row["scalars"].get(name)
            if row["label"] == choice.label and says != value:
                raise RuntimeError(
                    f"{HERE / 'manifest.json'} gives workload {row['name']!r} {name} = {says}, "
                    f"but {choice.kernel} was verified with {value}: export again"
                )


def _plain(name: str) -> str:
    if not _PLAIN_NAME.fullmatch(name):
        raise RuntimeError(f"{name!r} in a manifest is not a plain file name")
    return name


def _same_hash(path: Path, data: bytes, expected: str) -> None:
    if sha256(data).hexdigest() != expected:
        raise RuntimeError(
            f"{path} is not the file that was exported (sha256 differs); export again and do not load it"
        )
