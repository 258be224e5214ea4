"""Named configurations of the chunked Hopper template, compiled for `bench_peers.py`. Needs no GPU.

    python experiments/build_objects.py experiments/kda_h200/objects.toml FOLDER

Each table of the file names a configuration and the knobs that differ from the default. FOLDER gets, for both
contracts at K = V = 128 in bfloat16, the linked objects NAME-CONTRACT.so and a manifest.json with their knobs
and resources.
"""

import argparse
import json
import os
import tomllib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from evotune.fitness.build import Builder, BuildPlan
from evotune.fitness.cache import Cache
from evotune.fitness.cuda_link import CudaLinker
from evotune.fitness.cute_toolchain import CuteToolchain
from evotune.fitness.outcome import Artifact
from evotune.fitness.sandbox import Sandbox
from evotune.search_space.template import Specialization
from evotune.search_space.templates.kda_sm90_chunked import TEMPLATE

CONTRACTS = ("production", "plain")
_DIM = 128


def build(wanted: Mapping[str, Mapping[str, Any]], out: Path) -> None:
    """Compile, link and list all of them. SystemExit names the first that cannot be had."""
    out.mkdir(parents=True, exist_ok=True)
    sandbox = Sandbox.detect()
    linker = CudaLinker(sandbox)
    workers = len(os.sched_getaffinity(0))
    with (
        TemporaryDirectory() as cache,
        Builder(CuteToolchain(), sandbox, Cache(Path(cache)), BuildPlan(workers=workers), linker) as builder,
        ThreadPoolExecutor(workers) as pool,
    ):
        jobs = [(name, contract) for name in wanted for contract in CONTRACTS]
        entries = list(pool.map(lambda job: _one(job[0], job[1], wanted[job[0]], builder, linker, out), jobs))
    (out / "manifest.json").write_text(json.dumps(entries, indent=1))


def _one(
    name: str, contract: str, changed: Mapping[str, Any], builder: Builder, linker: CudaLinker, out: Path
) -> dict[str, Any]:
    """Write one object; its entry in the manifest."""
    spec = Specialization("kda", "bfloat16", (("K", _DIM), ("V", _DIM), ("contract", contract)))
    try:
        knobs = TEMPLATE.knobs(**{**vars(TEMPLATE.default(spec)), **changed})
    except TypeError as error:
        raise SystemExit(f"{name}: {error}") from None
    if (reason := TEMPLATE.why_not(knobs, spec)) is not None:
        raise SystemExit(f"{name}, {contract}: {reason}")
    built = builder.build(TEMPLATE.unit(TEMPLATE.source, knobs, spec)).result()
    if not isinstance(built, Artifact):
        raise SystemExit(f"{name}, {contract}: {built}")
    linked = linker.link_bytes(built.object_path.read_bytes(), built.entry)
    if not isinstance(linked, bytes):
        raise SystemExit(f"{name}, {contract}: {linked}")
    label = f"{name}-{contract}"
    (out / f"{label}.so").write_bytes(linked)
    facts = {"K": _DIM, "V": _DIM, "contract": contract, "debug": False, "template": TEMPLATE.name}
    return {"label": label, **facts, "knobs": vars(knobs), "resources": dict(built.resources.values)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("configurations", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    build(tomllib.loads(given.configurations.read_text()), given.folder)


if __name__ == "__main__":
    main()
