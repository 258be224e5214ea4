"""Whether a kernel's text is somebody else's: what share of it public KDA kernels have too.

A model may write down a kernel that it has read. That is no forgery, the kernel is judged as any other; but
whoever ships it wants to know whose licence it is under. So an export says of each kernel how much of the
text that is not the template's own is also in known public kernels.

Texts are compared by shingles: every run of `SHINGLE` tokens, names and numbers masked, so that renaming
changes nothing; one in `KEPT` of them is kept, by its hash alone. Those of the known kernels lie beside this
module, made by `experiments/fingerprint_kernels.py`; no text of theirs does. Runs with few kinds of tokens,
such as lists of arguments, are left out.
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from hashlib import blake2b
from importlib.resources import files

SHINGLE = 30
KEPT = 16
_KINDS = 9
_HASH_BYTES = 5
FEWEST = 8
"""So many kept shingles of new text, some 130 tokens beyond a run, are the least that a share is told of."""
NOTABLE = 0.1

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*|#(?!\s*(?:if|else|endif|define|include|pragma))[^\n]*", re.DOTALL)
_STRING = re.compile(r'"""(?:.|\n)*?"""|"(?:\\.|[^"\\\n])*"')
_TOKEN = re.compile(r"[A-Za-z_]\w*|\d[\w.]*|[^\s\w]")
_WORDS = frozenset(
    (
        *("if", "else", "elif", "for", "while", "return", "in", "not", "and", "or", "def", "class", "range"),
        *("const", "static", "inline", "struct", "template", "typename", "auto", "void", "int", "float"),
        *("self", "with", "as", "import", "from", "None", "True", "False", "lambda", "assert", "sizeof"),
        *("exp", "exp2", "expf", "exp2f", "rsqrt", "dot", "load", "store", "zeros", "arange", "where", "sum"),
    )
)


def shingles(text: str) -> frozenset[int]:
    """Hashes of the kept shingles of a source in C, CUDA or Python."""
    tokens = [_masked(token) for token in _TOKEN.findall(_STRING.sub('""', _COMMENT.sub(" ", text)))]
    found = set()
    for start in range(len(tokens) - SHINGLE + 1):
        run = tokens[start : start + SHINGLE]
        if len(set(run)) < _KINDS:
            continue
        digest = blake2b(" ".join(run).encode(), digest_size=_HASH_BYTES).digest()
        number = int.from_bytes(digest, "big")
        if number % KEPT == 0:
            found.add(number)
    return frozenset(found)


def _masked(token: str) -> str:
    if token in _WORDS:
        return token
    if token[0].isdigit():
        return "0"
    return "n" if token[0].isalpha() or token[0] == "_" else token


def packed(numbers: frozenset[int]) -> str:
    """As `known_kernels.json` has them."""
    return b"".join(number.to_bytes(_HASH_BYTES, "big") for number in sorted(numbers)).hex()


@cache
def known() -> Mapping[str, frozenset[int]]:
    """Shingles of public kernels, by name, version and licence."""
    data = json.loads(files("evotune").joinpath("known_kernels.json").read_text(encoding="utf-8"))
    step = 2 * _HASH_BYTES
    return {
        name: frozenset(int(text[i : i + step], 16) for i in range(0, len(text), step))
        for name, text in data.items()
    }


def resemblances(text: str, own: str, others: Mapping[str, frozenset[int]] | None = None) -> dict[str, float]:
    """Share of the text not in `own` that each known kernel has too, where it is `NOTABLE`; most alike first.

    Empty where there is next to no new text.
    """
    new = shingles(text) - shingles(own)
    if len(new) < FEWEST:
        return {}
    shares = {name: len(new & theirs) / len(new) for name, theirs in (others or known()).items()}
    ranked = sorted(shares.items(), key=lambda item: -item[1])
    return {name: round(share, 3) for name, share in ranked if share >= NOTABLE}
