"""A program for compute-sanitizer to watch: a few kernels, one small ragged problem, memory of its own for
every tensor.

    compute-sanitizer --tool TOOL python -m tests.search_space.kda_sanitized FOLDER TOOL
    compute-sanitizer --tool racecheck python -m tests.search_space.kda_sanitized FOLDER NAME

FOLDER holds the objects (see `kda_objects`); NAME is one of the planted races, in place of healthy kernels.
"""

import sys
from pathlib import Path

import torch

from tests.search_space.kda_calls import as_tensor
from tests.search_space.kda_objects import PLANTED, Configuration, control, load, sanitized
from tests.search_space.kda_uses import Uses
from tests.search_space.kda_width import called

LENGTHS = (150, 0, 17, 1)


def watch(configuration: Configuration, folder: Path) -> None:
    """One call, in memory that nothing has written but what the call must find."""
    kernel = load(configuration, folder)
    question = Uses(configuration.spec, "cuda").question(LENGTHS, value_heads=4)
    inputs = {n: as_tensor(x, "cuda") for n, x in question.inputs.items() if x is not None}
    inputs["cu_seqlens"] = inputs["cu_seqlens"].int()
    print(f"== {configuration.label}", flush=True)  # noqa: T201
    called(kernel, question.workload, inputs, 1, poison=False)
    torch.cuda.synchronize()


if __name__ == "__main__":
    folder, subject = sys.argv[1:]
    for each in control(subject)[1:] if subject in PLANTED else sanitized(subject):
        watch(each, Path(folder))
