"""Makes evotune/known_kernels.json: shingles of public KDA kernels, to which exported ones are compared.

    python experiments/fingerprint_kernels.py "fla-core 0.6.0, KDA (MIT)=FOLDER" … > known_kernels.json

FOLDER has the sources (.py, .cu, .cuh, .h). Those of the shipped file came from the wheels of fla-core 0.6.0
(fla/ops/kda, fla/ops/gated_delta_rule) and nvidia-cudnn-frontend 1.32.0 (cudnn/linear_attention, files of
KDA), and from MoonshotAI/FlashKDA at 1ce47ea (csrc).
"""

import json
import sys
from pathlib import Path

from evotune.resemblance import packed, shingles

SUFFIXES = {".py", ".cu", ".cuh", ".h"}


def main() -> None:
    found = {}
    for argument in sys.argv[1:]:
        name, _, folder = argument.rpartition("=")
        sources = sorted(path for path in Path(folder).rglob("*") if path.suffix in SUFFIXES)
        texts = (path.read_text(encoding="utf-8", errors="replace") for path in sources)
        found[name] = packed(frozenset().union(*map(shingles, texts)))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
