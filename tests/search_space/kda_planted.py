"""A program that asks a kernel with a race planted in it what every kernel is asked, and says what it finds.

    python -m tests.search_space.kda_planted FOLDER NAME

FOLDER holds the objects (see `kda_objects`), NAME is one of `kda_objects.PLANTED`.
"""

import sys
from pathlib import Path

from tests.search_space.kda_calls import Hang
from tests.search_space.kda_objects import control, load
from tests.search_space.kda_uses import Uses


def main(folder: Path, planted: str) -> None:
    healthy, wrong = (load(configuration, folder) for configuration in control(planted))
    uses = Uses(healthy.configuration.spec, "cuda")
    if difference := uses.repeated(healthy):
        raise SystemExit(f"the healthy one is not repeatable: {difference}")
    print("the healthy one is right", flush=True)  # noqa: T201
    try:
        print(uses.repeated(wrong), uses.against(wrong, healthy), flush=True)  # noqa: T201
    except (Hang, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
