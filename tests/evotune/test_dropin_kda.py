"""The drop-in against the float64 recurrence, and its refusals."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from evotune import bundle
from evotune.reference_kda.case import KdaCase, solve
from evotune.reference_kda.problem import LOWER_BOUND
from evotune.reference_kda.workload import Workload
from evotune.search_space.templates.kda_host import KdaHostKnobs
from tests.evotune import exports
from tests.search_space.host_kernel import spec

# K and V differ: a swap of the state's layout cannot pass.
PLAIN = spec(64, 96)
PRODUCTION = spec(64, 96, "production", "bfloat16")
CHUNKED = KdaHostKnobs(algorithm="chunked")
FAST = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


@pytest.fixture(scope="module")
def pareto(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    kernels = [
        exports.kernel("k-recurrent", (PLAIN, PRODUCTION), folder),
        exports.kernel("k-chunked", (PLAIN, PRODUCTION), folder, knobs=CHUNKED),
    ]
    workloads = [
        exports.workload("short", PLAIN, "k-recurrent", N=1, T=16),
        exports.workload("many", PLAIN, "k-chunked", N=8, T=8 * 200, H=4, HV=8),
        exports.workload("half", PRODUCTION, "k-chunked", N=1, T=64),
    ]
    bundle.write(folder / "pareto", exports.index(kernels, workloads), kernels)
    return folder / "pareto"


@pytest.fixture(scope="module")
def kda(pareto: Path) -> Any:
    return exports.load_dropin(pareto)


def case(contract: str = "plain", **changes: Any) -> KdaCase:
    facts: dict[str, Any] = {"lengths": (37,), "heads": 2, "value_heads": 4, "K": 64, "V": 96}
    facts |= {"dtype": "bfloat16" if contract == "production" else "float32", "contract": contract}
    return solve(Workload("w", "w", **facts | changes), 5)


def arguments(solved: KdaCase, B: int = 1) -> dict[str, Any]:
    """fla's arguments, batched; the state stays V-first."""
    x = solved.inputs
    batched = {n: x[n].reshape(B, -1, *x[n].shape[1:]) for n in ("q", "k", "v", "g", "beta")}  # type: ignore[union-attr]
    more: dict[str, Any] = {"output_final_state": True, "scale": solved.scalars["scale"]}
    if B == 1 and len(solved.workload.lengths) != 1:
        more["cu_seqlens"] = x["cu_seqlens"]
    if solved.workload.contract == "production":
        more |= FAST | {"A_log": x["A_log"], "dt_bias": x["dt_bias"], "lower_bound": LOWER_BOUND}
    if x["initial_state"] is not None:
        more["initial_state"] = x["initial_state"]
    return batched | more


def within_bound(solved: KdaCase, o: Any, state: Any) -> bool:
    """`state` V-first."""
    flat = np.asarray(o).reshape(-1, *o.shape[2:])
    return solved.worst({"o": flat, "final_state": state}).ratio <= 1


@pytest.mark.parametrize("contract", ["plain", "production"])
@pytest.mark.parametrize("kernel", ["k-recurrent", "k-chunked"])
@pytest.mark.parametrize("state_v_first", [False, True])
def test_both_state_layouts_equal_the_oracle(
    kda: Any, contract: str, kernel: str, state_v_first: bool
) -> None:
    solved = case(contract, initial_state=True)
    given = arguments(solved)
    if not state_v_first:
        given["initial_state"] = given["initial_state"].swapaxes(-1, -2).copy()
    o, state = kda.kda_forward(**given, state_v_first=state_v_first, kernel=kernel)
    assert o.dtype == given["q"].dtype
    assert o.shape == given["v"].shape
    assert state.shape[-2:] == ((96, 64) if state_v_first else (64, 96))
    assert within_bound(solved, o, state if state_v_first else state.swapaxes(-1, -2))


def test_a_batch_is_independent_sequences(kda: Any) -> None:
    solved = case(lengths=(20, 20, 20))
    o, state = kda.kda_forward(**arguments(solved, B=3), state_v_first=True)
    assert o.shape[:2] == (3, 20)
    assert within_bound(solved, o, state)


def test_packed_sequences_with_an_empty_one(kda: Any) -> None:
    solved = case(lengths=(9, 0, 1, 40), initial_state=True)
    assert within_bound(solved, *kda.kda_forward(**arguments(solved), state_v_first=True))


def test_no_initial_state_is_zeros_and_the_final_state_is_optional(kda: Any) -> None:
    solved = case(initial_state=False)
    o, state = kda.kda_forward(**arguments(solved) | {"output_final_state": False})
    zeros = np.zeros((1, 4, 64, 96), np.float32)
    again, _ = kda.kda_forward(**arguments(solved), initial_state=zeros)
    assert state is None
    assert np.array_equal(o, again)


def test_strided_and_misaligned_inputs_are_copied(kda: Any) -> None:
    solved = case(initial_state=True)
    given = arguments(solved)
    wanted, _ = kda.kda_forward(**given, state_v_first=True)
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        wide = np.zeros((*given[name].shape[:-1], given[name].shape[-1] + 1), given[name].dtype)
        wide[..., 1:] = given[name]
        given[name] = wide[..., 1:]
        assert not given[name].flags.c_contiguous
    o, _ = kda.kda_forward(**given, state_v_first=True)
    assert np.array_equal(o, wanted)


def test_the_default_scale_is_one_over_root_k(kda: Any) -> None:
    given = arguments(case())
    scaled, _ = kda.kda_forward(**given | {"scale": 64**-0.5})
    default, _ = kda.kda_forward(**given | {"scale": None})
    assert np.array_equal(scaled, default)


def test_production_without_gate_parameters_takes_zeros(kda: Any) -> None:
    given = arguments(case("production"))
    plain, _ = kda.kda_forward(**given | {"A_log": None, "dt_bias": None})
    zeros = {"A_log": np.zeros(4, np.float32), "dt_bias": np.zeros(4 * 64, np.float32)}
    given_zeros, _ = kda.kda_forward(**given | zeros)
    assert np.array_equal(plain, given_zeros)
    assert not np.array_equal(plain, kda.kda_forward(**given)[0])


def test_inputs_stay_as_they_were(kda: Any) -> None:
    given = arguments(case("production", initial_state=True))
    before = {n: x.tobytes() for n, x in given.items() if isinstance(x, np.ndarray)}
    kda.kda_forward(**given, state_v_first=True)
    assert before == {n: x.tobytes() for n, x in given.items() if isinstance(x, np.ndarray)}


def test_threads_do_not_share_a_workspace(kda: Any) -> None:
    solved = [solve(Workload("t", "t", (150,), 1, 2, 64, 96), seed) for seed in range(4)]
    results: dict[int, bool] = {}

    def work(i: int) -> None:
        given = arguments(solved[i]) | {"kernel": "k-chunked", "state_v_first": True}
        results[i] = all(within_bound(solved[i], *kda.kda_forward(**given)) for _ in range(20))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(4), True)


def test_a_call_goes_to_the_nearest_workload(kda: Any) -> None:
    def chosen(N: int, T: int, HV: int) -> str:
        extents = kda.Extents("float32", N, T, 1, HV, 64, 96)
        return str(kda.choose(extents, "plain", None, None).kernel)

    assert chosen(1, 16, 1) == "k-recurrent"
    assert chosen(1, 60, 1) == "k-recurrent"
    assert chosen(6, 900, 8) == "k-chunked"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_gate_in_kernel": True}, "all set"),
        (FAST, "softplus"),
        (
            FAST | {"lower_bound": -5.0},
            "no exported kernel for float32 K=64 V=96 contract=production; exported",
        ),
        ({"allow_neg_eigval": True}, "allow_neg_eigval"),
        ({"A_log": np.zeros(4, np.float32)}, "set use_gate_in_kernel"),
        ({"kernel": "k-none"}, "no kernel 'k-none'; exported: k-recurrent, k-chunked"),
        ({"cu_seqlens": [0, 30, 20, 37]}, "ascend"),
        ({"cu_seqlens": [0, 30]}, "ascend"),
        ({"cu_seqlens": [0.0, 37.0]}, "integers"),
        ({"scale": float("nan")}, "finite"),
        ({"g": np.ones((1, 37, 4, 64), np.float32)}, "log decay"),
        ({"g": np.full((1, 37, 4, 64), np.nan, np.float32)}, "log decay"),
        ({"beta": np.full((1, 37, 4), 2, np.float32)}, "beta spans"),
        ({"g": np.zeros((1, 37, 4, 64))}, "g is float64"),
        ({"q": np.zeros((1, 37, 2, 64))}, "float32 or all bfloat16"),
        ({"k": np.zeros((1, 37, 2, 64), ml_dtypes.bfloat16)}, "k is bfloat16"),
        ({"q": np.zeros((37, 2, 64), np.float32)}, "wanted \\[B, T, H, K\\]"),
        ({"v": np.zeros((1, 37, 3, 96), np.float32)}, "g has shape"),
        ({"initial_state": np.zeros((1, 4, 96, 64), np.float32)}, "initial_state has shape"),
        ({"initial_state": np.zeros((1, 4, 64, 96))}, "states are float32"),
    ],
)
def test_refusals_say_what_is_wrong(kda: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kda.kda_forward(**arguments(case()) | change)


def test_heads_that_do_not_divide_are_refused(kda: Any) -> None:
    x = {n: np.zeros((1, 5, 2, 64), np.float32) for n in "qk"}
    v, g = np.zeros((1, 5, 3, 96), np.float32), np.zeros((1, 5, 3, 64), np.float32)
    with pytest.raises(ValueError, match="no positive multiple"):
        kda.kda_forward(**x, v=v, g=g, beta=np.zeros((1, 5, 3), np.float32))


def test_a_lower_bound_that_was_not_verified_is_refused(kda: Any) -> None:
    with pytest.raises(ValueError, match=r"lower_bound = -3.0 was never verified; verified: \[-5.0\]"):
        kda.kda_forward(**arguments(case("production")) | {"lower_bound": -3.0})


def test_a_list_is_not_an_array(kda: Any) -> None:
    with pytest.raises(TypeError, match="q must be a numpy array"):
        kda.kda_forward(**arguments(case()) | {"q": [[1.0]]})


def tampered(pareto: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "pareto"
    subprocess.run(["cp", "-r", str(pareto), str(copy)], check=True)
    return copy


@pytest.mark.parametrize("name", [f"{PLAIN.label}.so", "manifest.json"])
def test_a_changed_file_is_not_loaded(pareto: Path, tmp_path: Path, name: str) -> None:
    copy = tampered(pareto, tmp_path)
    for kernel in (copy / "kernels").iterdir():
        data = (kernel / name).read_bytes()
        (kernel / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(RuntimeError, match="sha256 differs"):
        exports.load_dropin(copy).kda_forward(**arguments(case()))


@pytest.mark.parametrize("contract", ["plain", "production"])
def test_an_index_that_offers_what_was_not_verified_is_not_believed(
    pareto: Path, tmp_path: Path, contract: str
) -> None:
    """Its kernels' manifests are hashed, it is not: a lower_bound written into it is no evidence."""
    copy = tampered(pareto, tmp_path)
    index = json.loads((copy / "manifest.json").read_text())
    for row in index["workloads"]:
        row["scalars"]["lower_bound"] = -8.0
    (copy / "manifest.json").write_text(json.dumps(index))
    more = {"lower_bound": -8.0} if contract == "production" else {}
    with pytest.raises(RuntimeError, match=r"gives workload '\w+' lower_bound = -8.0, but k-\w+ was .* -5.0"):
        exports.load_dropin(copy).kda_forward(**arguments(case(contract)) | more)


def test_another_processor_is_named_with_the_mend(pareto: Path, tmp_path: Path) -> None:
    module = exports.load_dropin(tampered(pareto, tmp_path))
    machine, _, flags = module._processor()
    with pytest.raises(RuntimeError, match="which has avx9999 that this one lacks.*export again"):
        module._check_processor({"machine": machine, "model": "Other", "flags": [*flags, "avx9999"]})
    with pytest.warns(UserWarning, match="timed on Other"):
        module._check_processor({"machine": machine, "model": "Other", "flags": []})
    with pytest.raises(RuntimeError, match="export again"):
        module._check_processor({"machine": "sparc", "model": "Other", "flags": []})


def test_the_package_stands_alone(pareto: Path, tmp_path: Path) -> None:
    """Imported in a process that cannot see evotune."""
    program = """
import sys
sys.modules["evotune"] = None  # importing it raises ImportError
import json, numpy as np
from pareto import available, kda_forward
q = k = np.ones((1, 3, 1, 64), np.float32)
o, state = kda_forward(q, k, np.ones((1, 3, 1, 96), np.float32), np.zeros((1, 3, 1, 64), np.float32),
                       np.zeros((1, 3, 1), np.float32), output_final_state=True)
print(json.dumps([float(abs(o).sum()), list(state.shape), len(available()), "ml_dtypes" in sys.modules]))
"""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(pareto.parent)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [0.0, [1, 1, 64, 96], 3, False]
