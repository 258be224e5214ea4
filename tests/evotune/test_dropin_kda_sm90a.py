"""The drop-in for a GPU, whose kernels are played by the host's on CPU tensors; all else is the real text."""

import math
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from evotune import bundle
from evotune.reference_kda.case import solve
from evotune.reference_kda.workload import Workload
from evotune.search_space.templates.kda_host import KdaHostKnobs
from tests.evotune import exports
from tests.evotune.ffi_tensors import taken
from tests.evotune.kda_tensors import FAST, arguments, case, tensor, within_bound
from tests.fitness.fake_gpu import Processor
from tests.search_space.host_kernel import spec

# K and V differ: a swap of the state's layout cannot pass.
PLAIN = spec(64, 96)
PRODUCTION = spec(64, 96, "production", "bfloat16")


class Stream:
    """What the drop-in asks torch of CUDA, and counts of it."""

    def __init__(self) -> None:
        self.current = 1
        self.capturing = False


@pytest.fixture(scope="module")
def pareto(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    kernels = [
        exports.kernel("k-recurrent", (PLAIN, PRODUCTION), folder, target="sm_90a"),
        exports.kernel(
            "k-chunked", (PLAIN, PRODUCTION), folder, knobs=KdaHostKnobs(algorithm="chunked"), target="sm_90a"
        ),
    ]
    workloads = [
        exports.workload("short", PLAIN, "k-recurrent", N=1, T=16),
        exports.workload("many", PLAIN, "k-chunked", N=8, T=8 * 200, H=4, HV=8),
        exports.workload("half", PRODUCTION, "k-chunked", N=1, T=64),
    ]
    bundle.write(folder / "pareto", exports.index(kernels, workloads), kernels)
    return folder / "pareto"


class Checked:
    """A host kernel that refuses tensors as the DSL's functions do, and as little: outer strides of an axis
    of any extent are not looked at."""

    _RANKS = {"q": 3, "k": 3, "v": 3, "g": 3, "beta": 2, "A_log": 1, "dt_bias": 2, "initial_state": 4}
    _RANKS |= {"cu_seqlens": 1, "o": 3, "final_state": 4, "workspace": 1}

    def __init__(self, path: Path, entry: str) -> None:
        self._function = Processor().function(str(path), entry)
        label = path.stem
        self._production = "production" in label
        self._dtype = torch.bfloat16 if label.startswith("bfloat16") else torch.float32

    def __call__(self, *arguments: Any) -> None:
        tensors = dict(zip(self._RANKS, arguments, strict=False))
        if not self._production:
            assert tensors.pop("A_log") is tensors.pop("dt_bias") is None
        for name, x in tensors.items():
            if not isinstance(x, torch.Tensor):
                raise TypeError(f"Mismatched type on argument {name}, expected Tensor")
            if x.device.type != "cpu" or x.dtype is not self._wanted(name) or x.dim() != self._RANKS[name]:
                raise ValueError(f"Mismatched Tensor on argument {name}")
            compact = torch.empty(x.shape, device="meta").stride()
            if x.stride()[1:] != compact[1:] or (x.dim() == 1 and x.stride() != (1,)):
                raise ValueError(f"Mismatched strides on argument {name}")
            if name in "qkvgo" and x.data_ptr() % 16:
                raise ValueError(f"Misaligned Tensor data on argument {name}")
        if tensors["k"].shape != tensors["q"].shape or tensors["g"].shape[1:] != (tensors["v"].shape[1], 64):
            raise ValueError("Mismatched shape")
        self._function(*arguments)

    def _wanted(self, name: str) -> Any:
        if name in "qkvo" or (self._production and name in ("g", "beta")):
            return self._dtype
        return {"cu_seqlens": torch.int32, "workspace": torch.uint8}.get(name, torch.float32)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    found = Stream()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.capturing)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Test GPU")
    return found


def framed(path: Path, entry: str) -> Any:
    """A function of TVM FFI, which frames call."""
    tvm_ffi = pytest.importorskip("tvm_ffi")
    checked = Checked(path, entry)
    return tvm_ffi.convert(lambda *arguments: checked(*map(taken, arguments)))


@pytest.fixture(params=[Checked, framed], ids=["plainly", "framed"])
def kda(pareto: Path, stream: Stream, monkeypatch: pytest.MonkeyPatch, request: Any) -> Any:
    module = exports.load_dropin(pareto)
    monkeypatch.setattr(module, "_DEVICE", "cpu")
    monkeypatch.setattr(module, "_function", request.param)
    monkeypatch.setattr(module, "_current_device", lambda: -1)
    monkeypatch.setattr(module, "_stream", lambda index: stream.current)
    monkeypatch.setattr(module, "_check_versions", lambda kernel: None)
    return module


@pytest.mark.parametrize("contract", ["plain", "production"])
@pytest.mark.parametrize("kernel", ["k-recurrent", "k-chunked"])
@pytest.mark.parametrize("state_v_first", [False, True])
def test_both_state_layouts_equal_the_oracle(
    kda: Any, contract: str, kernel: str, state_v_first: bool
) -> None:
    solved = case(contract, initial_state=True)
    given = arguments(solved)
    if not state_v_first:
        given["initial_state"] = given["initial_state"].mT.contiguous()
    o, state = kda.kda_forward(**given, state_v_first=state_v_first, kernel=kernel)
    assert o.dtype == given["q"].dtype
    assert o.shape == given["v"].shape
    assert state.shape[-2:] == ((96, 64) if state_v_first else (64, 96))
    assert state.is_contiguous()
    assert within_bound(solved, o, state if state_v_first else state.mT.contiguous())


def test_a_batch_is_independent_sequences(kda: Any) -> None:
    solved = case(lengths=(20, 20, 20))
    o, state = kda.kda_forward(**arguments(solved, B=3), state_v_first=True)
    assert o.shape[:2] == (3, 20)
    assert within_bound(solved, o, state)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_sequences_with_an_empty_one(kda: Any, dtype: torch.dtype) -> None:
    solved = case(lengths=(9, 0, 1, 40), initial_state=True)
    given = arguments(solved)
    given["cu_seqlens"] = given["cu_seqlens"].to(dtype)
    for _ in range(2):
        assert within_bound(solved, *kda.kda_forward(**given, state_v_first=True))


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0)])
@pytest.mark.parametrize("contract", ["plain", "production"])
def test_nothing_to_do(kda: Any, contract: str, lengths: tuple[int, ...]) -> None:
    solved = case(contract, lengths=lengths, initial_state=True)
    given = arguments(solved) | {"cu_seqlens": tensor(solved.inputs["cu_seqlens"], "cpu")}
    o, state = kda.kda_forward(**given, state_v_first=True)
    assert o.shape == given["v"].shape
    assert torch.equal(state, given["initial_state"])


def test_an_empty_batch(kda: Any) -> None:
    given = {n: x[:0] for n, x in arguments(case()).items() if n in ("q", "k", "v", "g", "beta")}
    o, state = kda.kda_forward(**given, output_final_state=True)
    assert (o.shape, state.shape) == ((0, 37, 4, 96), (0, 4, 64, 96))


def test_no_initial_state_is_zeros_and_the_final_state_is_optional(kda: Any) -> None:
    solved = case(initial_state=False)
    o, state = kda.kda_forward(**arguments(solved) | {"output_final_state": False})
    again, _ = kda.kda_forward(**arguments(solved), initial_state=torch.zeros(1, 4, 64, 96))
    assert state is None
    assert torch.equal(o, again)


def test_the_default_scale_is_one_over_root_k(kda: Any) -> None:
    given = arguments(case())
    scaled, _ = kda.kda_forward(**given | {"scale": 64**-0.5})
    default, _ = kda.kda_forward(**given | {"scale": None})
    assert torch.equal(scaled, default)


def test_production_without_gate_parameters_takes_zeros(kda: Any) -> None:
    given = arguments(case("production"))
    plain, _ = kda.kda_forward(**given | {"A_log": None, "dt_bias": None})
    zeros = {"A_log": torch.zeros(4), "dt_bias": torch.zeros(4 * 64)}
    given_zeros, _ = kda.kda_forward(**given | zeros)
    assert torch.equal(plain, given_zeros)
    assert not torch.equal(plain, kda.kda_forward(**given)[0])


def test_torchs_default_dtype_changes_nothing(kda: Any) -> None:
    """Serving sets it to bfloat16; what the drop-in makes itself stays what the kernel takes."""
    given = arguments(case("production", initial_state=True))
    left_out = {name: x for name, x in given.items() if name not in ("A_log", "dt_bias")}
    wanted = kda.kda_forward(**left_out, state_v_first=True)
    kda._plans.clear()
    kda._constants.clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        for _ in range(2):
            found = kda.kda_forward(**left_out, state_v_first=True)
            assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
    finally:
        torch.set_default_dtype(torch.float32)


def test_half_precision_gates_are_widened_in_the_plain_contract(kda: Any) -> None:
    given = arguments(case())
    given |= {name: given[name].bfloat16() for name in ("g", "beta")}
    wide = given | {name: given[name].float() for name in ("g", "beta")}
    assert torch.equal(kda.kda_forward(**given)[0], kda.kda_forward(**wide)[0])


def test_inputs_stay_as_they_were(kda: Any) -> None:
    given = arguments(case("production", initial_state=True))
    before = {n: x.clone() for n, x in given.items() if isinstance(x, torch.Tensor)}
    kda.kda_forward(**given, state_v_first=True)
    assert all(torch.equal(given[n], x) for n, x in before.items())


def test_what_fla_accepts_and_is_not_needed(kda: Any) -> None:
    given = arguments(case())
    more = {"safe_gate": True, "disable_recompute": True, "use_graph": True, "max_num_seqs": 1}
    assert torch.equal(kda.kda_forward(**given, **more)[0], kda.kda_forward(**given)[0])


def test_threads_do_not_share_a_workspace(kda: Any) -> None:
    solved = [solve(Workload("t", "t", (150,), 1, 2, 64, 96), seed) for seed in range(4)]
    results: dict[int, bool] = {}
    callers = set()

    def work(i: int) -> None:
        callers.add(threading.get_ident())
        given = arguments(solved[i]) | {"kernel": "k-chunked", "state_v_first": True}
        results[i] = all(within_bound(solved[i], *kda.kda_forward(**given)) for _ in range(20))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(4), True)
    (plan,) = kda._plans.values()
    framed = hasattr(plan.function, "__chandle__")
    assert {thread for thread, *_ in plan.frames} == (callers if framed else set())


class Recorded:
    """Stands for a kernel: keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> None:
        self.calls.append(arguments)

    def argument(self, number: int) -> list[Any]:
        return [call[number] for call in self.calls]


@pytest.fixture
def recorded(kda: Any, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    found = Recorded()
    monkeypatch.setattr(kda, "_function", lambda path, entry: found)
    return found


CU, WORKSPACE, A_LOG = 8, 11, 5


def test_constants_belong_to_a_stream_and_never_to_a_graph(
    kda: Any, recorded: Recorded, stream: Stream
) -> None:
    given = arguments(case("production")) | {"A_log": None}
    for current, capturing in ((1, False), (1, False), (2, False), (1, True), (1, True), (1, False)):
        stream.current, stream.capturing = current, capturing
        kda.kda_forward(**given)
    for number in (CU, A_LOG):
        one, same, other, graph, graph_again, back = (id(x) for x in recorded.argument(number))
        assert one == same == back
        assert len({one, other, graph, graph_again}) == 4
    assert recorded.argument(CU)[0].tolist() == [0, 37]


def test_kept_things_are_bounded(kda: Any, recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kda, "_KEPT", 8)
    for T in range(1, 30):
        x = {
            "q": (1, T, 2, 64),
            "k": (1, T, 2, 64),
            "v": (1, T, 2, 96),
            "g": (1, T, 2, 64),
            "beta": (1, T, 2),
        }
        kda.kda_forward(**{name: torch.zeros(shape) for name, shape in x.items()})
    assert len(kda._plans) <= 8
    assert len(kda._constants) <= 8


def test_the_workspace_is_what_the_manifest_says(kda: Any, recorded: Recorded) -> None:
    kda.kda_forward(**arguments(case(lengths=(9, 0, 1, 40))))
    assert recorded.argument(WORKSPACE)[0].shape == ((1 << 16) + 4096 * 50 * 4 + (1 << 16) * 4 * 4,)


def test_workspaces_belong_to_a_thread_and_a_stream_and_never_to_a_graph(
    kda: Any, recorded: Recorded, stream: Stream
) -> None:
    given = arguments(case())
    for current, capturing in ((1, False), (1, False), (2, False), (1, True), (1, True), (1, False)):
        stream.current, stream.capturing = current, capturing
        kda.kda_forward(**given)
    stream.capturing = False
    thread = threading.Thread(target=lambda: kda.kda_forward(**given))
    thread.start()
    thread.join()
    one, same, other, graph, graph_again, back, elsewhere = (id(x) for x in recorded.argument(WORKSPACE))
    assert one == same == back
    assert len({one, other, graph, graph_again, elsewhere}) == 5
    kda.kda_forward(**arguments(case(lengths=(9, 0, 1, 40))))
    larger = recorded.argument(WORKSPACE)[-1]
    kda.kda_forward(**given)
    assert recorded.argument(WORKSPACE)[-1] is larger
    kda.free_workspaces()
    kda.kda_forward(**given)
    assert recorded.argument(WORKSPACE)[-1] is not larger


def test_a_kernel_is_not_loaded_while_a_graph_is_captured(kda: Any, stream: Stream) -> None:
    stream.capturing = True
    with pytest.raises(RuntimeError, match="call kda_forward once before a graph is captured"):
        kda.kda_forward(**arguments(case()))
    stream.capturing = False
    kda.kda_forward(**arguments(case()))
    stream.capturing = True
    kda.kda_forward(**arguments(case()))


def test_a_call_goes_to_the_nearest_workload(kda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []

    def function(path: Path, entry: str) -> Callable[..., None]:
        return lambda *arguments: used.append(path.parent.name)

    monkeypatch.setattr(kda, "_function", function)
    for B, T, heads in ((1, 16, 1), (6, 150, 8), (1, 16, 1)):
        q, v = torch.zeros(B, T, heads, 64), torch.zeros(B, T, heads, 96)
        kda.kda_forward(q, q, v, q, torch.zeros(B, T, heads))
    assert used == ["k-recurrent", "k-chunked", "k-recurrent"]


def strided(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x], dim=-1)[..., : x.shape[-1]]


def sliced(x: torch.Tensor) -> torch.Tensor:
    """Some heads of more, as slices of a fused projection are: only an outer stride is wrong."""
    return torch.cat([x, x], dim=2)[:, :, : x.shape[2]]


def shifted(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, but beginning in the middle of 16 bytes."""
    return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_strided_inputs_are_refused_with_the_mend(kda: Any, name: str) -> None:
    given = arguments(case())
    with pytest.raises(ValueError, match=rf"{name} is not contiguous \(strides .*\): pass {name}.contiguous"):
        kda.kda_forward(**given | {name: strided(given[name])})
    kda.kda_forward(**given)
    for make in (strided, sliced):
        with pytest.raises(ValueError, match=f"{name} is not contiguous"):
            kda.kda_forward(**given | {name: make(given[name])})
    if name != "beta":
        with pytest.raises(
            ValueError, match=f"{name} does not begin at a multiple of 16 bytes: pass {name}.c"
        ):
            kda.kda_forward(**given | {name: shifted(given[name])})


@pytest.mark.parametrize("again", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("dt_bias", lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]]),  # of a fused parameter
        ("dt_bias", lambda x: x[:1].expand(x.shape)),
        ("dt_bias", lambda x: x.mT.contiguous().mT),
        ("dt_bias", lambda x: torch.stack([x.flatten()] * 2, dim=1)[:, 0]),
        ("dt_bias", lambda x: x.flatten()[:1].expand(x.numel())),
        ("A_log", lambda x: torch.stack([x, x], dim=1)[:, 0]),
        ("A_log", lambda x: x[:1].expand(x.shape)),
        ("cu_seqlens", lambda x: torch.stack([x, x], dim=1)[:, 0]),
        ("cu_seqlens", lambda x: x[:1].expand(x.shape)),
    ],
)
def test_strided_parameters_are_never_taken_as_compact(
    kda: Any, name: str, make: Callable[[torch.Tensor], torch.Tensor], again: bool
) -> None:
    """Not where `view` leaves strides alone, nor where the function of the kernel sees inner ones only."""
    given = arguments(case("production")) | {"cu_seqlens": torch.tensor([0, 37], dtype=torch.int32)}
    if again:
        kda.kda_forward(**given)
    odd = make(given[name])
    assert not odd.is_contiguous()
    with pytest.raises(ValueError, match=f"{name} is not contiguous"):
        kda.kda_forward(**given | {name: odd})


def test_strides_of_axes_of_one_element_may_be_anything(kda: Any) -> None:
    solved = case(lengths=(1,), initial_state=True)
    given = arguments(solved)
    wanted = kda.kda_forward(**given, state_v_first=True)
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        x = given[name]
        given[name] = x.as_strided(x.shape, (12345, 777, *x.stride()[2:]) if x.shape[1] == 1 else x.stride())
    given["initial_state"] = given["initial_state"].as_strided((1, 4, 96, 64), (5, 96 * 64, 64, 1))
    found = kda.kda_forward(**given, state_v_first=True)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


def test_a_final_state_is_compact_whatever_strides_the_initial_one_has(kda: Any) -> None:
    """An axis of one element may have any: its state's twin must not, which the kernel would refuse."""
    given = arguments(case(initial_state=True, heads=1, value_heads=1))
    wanted = kda.kda_forward(**given, state_v_first=True)
    given["initial_state"] = given["initial_state"].as_strided((1, 1, 96, 64), (96 * 64, 5, 64, 1))
    for _ in range(2):
        found = kda.kda_forward(**given, state_v_first=True)
        assert found[1].stride() == wanted[1].stride()
        assert torch.equal(found[1], wanted[1])


def test_strides_of_states(kda: Any) -> None:
    solved = case(initial_state=True)
    given = arguments(solved)
    state = given.pop("initial_state")
    wanted, _ = kda.kda_forward(**given, initial_state=state, state_v_first=True)
    for x in (state.mT, state.mT.contiguous(), strided(state.mT)):
        assert torch.equal(kda.kda_forward(**given, initial_state=x)[0], wanted)
    with pytest.raises(ValueError, match="initial_state is not contiguous"):
        kda.kda_forward(**given, initial_state=strided(state), state_v_first=True)


ONES = torch.ones(1, 37, 4, 64)
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"use_gate_in_kernel": True}, "all set"),
    (FAST, "softplus"),
    (FAST | {"lower_bound": -5.0}, "no exported kernel for float32 K=64 V=96 contract=production; exported"),
    ({"allow_neg_eigval": True}, "allow_neg_eigval"),
    ({"return_intermediate_states": True}, "return_intermediate_states"),
    ({"cp_context": object()}, "cp_context"),
    ({"A_log": torch.zeros(4)}, "set use_gate_in_kernel"),
    ({"kernel": "k-none"}, "no kernel 'k-none'; exported: k-recurrent, k-chunked"),
    ({"cu_seqlens": torch.tensor([[0, 37]])}, "cu_seqlens has shape"),
    ({"cu_seqlens": torch.tensor([0.0, 37.0])}, "wanted int32 or int64"),
    ({"scale": float("nan")}, "finite"),
    ({"g": torch.zeros(1, 37, 4, 64, dtype=torch.float64)}, "g is torch.float64"),
    ({"q": torch.zeros(1, 37, 2, 64, dtype=torch.float64)}, "must all be bfloat16 or all float32"),
    ({"k": torch.zeros(1, 37, 2, 64, dtype=torch.bfloat16)}, "k is torch.bfloat16"),
    ({"q": torch.zeros(37, 2, 64)}, "wanted \\[B, T, H, K\\]"),
    ({"v": torch.zeros(1, 37, 3, 96)}, "no positive multiple"),
    ({"v": torch.zeros(1, 37, 2, 96)}, "g has shape"),
    ({"v": torch.zeros(1, 36, 4, 96)}, "v has shape"),
    ({"k": torch.zeros(1, 37, 4, 64)}, "k has shape"),
    ({"beta": torch.zeros(1, 37, 4, 1)}, "beta has shape"),
    # As many elements as there should be.
    ({"k": torch.zeros(1, 37, 64, 2)}, r"k has shape \(1, 37, 64, 2\)"),
    ({"g": torch.zeros(1, 37, 64, 4)}, r"g has shape \(1, 37, 64, 4\)"),
    ({"beta": torch.zeros(1, 4, 37)}, r"beta has shape \(1, 4, 37\)"),
    ({"initial_state": torch.zeros(1, 64, 4, 96)}, r"initial_state has shape \(1, 64, 4, 96\)"),
    ({"initial_state": torch.zeros(1, 4, 96, 64)}, "initial_state has shape"),
    ({"initial_state": torch.zeros(1, 4, 64, 96).double()}, "initial_state is torch.float64"),
    ({"k": torch.empty(1, 37, 2, 64, device="meta")}, "k is on meta, q on cpu"),
    ({"q": torch.empty(1, 37, 2, 64, device="meta")}, "q is on meta; these kernels run on"),
    ({"g": (-ONES).requires_grad_()}, "g requires grad and there is no backward pass"),
]


@pytest.mark.parametrize("again", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize(("change", "message"), REFUSALS, ids=[message for _, message in REFUSALS])
def test_refusals_say_what_is_wrong(kda: Any, change: dict[str, Any], message: str, again: bool) -> None:
    """Also where an honest call before has left its plan."""
    given = arguments(case())
    if again:
        kda.kda_forward(**given)
    with pytest.raises(ValueError, match=message):
        kda.kda_forward(**given | change)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state", "cu_seqlens"])
def test_an_array_is_not_a_tensor(kda: Any, name: str) -> None:
    given = arguments(case(initial_state=True)) | {"cu_seqlens": torch.tensor([0, 37])}
    kda.kda_forward(**given, state_v_first=True)
    with pytest.raises(TypeError, match=f"{name} must be a torch tensor, not ndarray"):
        kda.kda_forward(**given | {name: given[name].numpy()}, state_v_first=True)


def test_a_lower_bound_that_was_not_verified_is_refused(kda: Any) -> None:
    given = arguments(case("production"))
    kda.kda_forward(**given)
    with pytest.raises(ValueError, match=r"lower_bound = -3.0 was never verified; verified: \[-5.0\]"):
        kda.kda_forward(**given | {"lower_bound": -3.0})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"g": ONES}, "g spans 1.0 to 1.0; verified are"),
        ({"g": -6 * ONES}, "g spans -6.0 to -6.0"),
        ({"g": ONES * float("nan")}, "g spans nan"),
        ({"beta": torch.full((1, 37, 4), 2.0)}, "beta spans 2.0"),
        ({"cu_seqlens": torch.tensor([0, 30, 20, 37])}, "ascend"),
        ({"cu_seqlens": torch.tensor([0, 38])}, "ascend"),
        ({"cu_seqlens": torch.tensor([1, 37])}, "ascend"),
    ],
)
def test_values_are_looked_at_when_asked(
    kda: Any, recorded: Recorded, change: dict[str, Any], message: str
) -> None:
    given = arguments(case())
    kda.kda_forward(**given, check_values=True)
    kda.kda_forward(**given | change)
    with pytest.raises(ValueError, match=message):
        kda.kda_forward(**given | change, check_values=True)
    # Rows after the last sequence may hold anything.
    for last in (0, 30):
        late = torch.where(torch.arange(37)[:, None, None] < last, -ONES, math.nan)
        kda.kda_forward(**given | {"g": late, "cu_seqlens": torch.tensor([0, last])}, check_values=True)
        kda.kda_forward(
            **given | {"beta": late[..., 0].abs(), "cu_seqlens": torch.tensor([0, last])}, check_values=True
        )


def test_a_compiled_function_calls_it_as_one_operator(kda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    solved = case("production", lengths=(9, 0, 28), initial_state=True)
    given = arguments(solved)

    monkeypatch.setitem(sys.modules, kda.__name__, kda)

    def user(**given: Any) -> tuple[Any, Any]:
        o, state = kda.kda_forward(**given, state_v_first=True)
        return o * 2, state

    with torch.no_grad():
        o, state = torch.compile(user, backend="aot_eager", fullgraph=True)(**given)
        wanted = kda.kda_forward(**given, state_v_first=True)
    assert torch.equal(o, wanted[0] * 2)
    assert torch.equal(state, wanted[1])


def test_a_compiled_call_looks_at_values_too(kda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments(case())
    monkeypatch.setitem(sys.modules, kda.__name__, kda)
    compiled = torch.compile(kda.kda_forward, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        wanted = kda.kda_forward(**given)
        assert torch.equal(compiled(**given, check_values=True)[0], wanted[0])
        compiled(**given | {"g": ONES})
        with pytest.raises(ValueError, match="g spans 1.0 to 1.0"):
            compiled(**given | {"g": ONES}, check_values=True)


def test_another_gpu_is_named(kda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    with pytest.raises(RuntimeError, match=r"for compute capability 9.0 \(Test GPU\); cpu is Test GPU, 10.0"):
        kda.kda_forward(**arguments(case()))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Other GPU")
    with pytest.warns(UserWarning, match="timed on Test GPU, this is Other GPU"):
        kda.kda_forward(**arguments(case()))


def test_a_changed_library_is_not_loaded(kda: Any, pareto: Path) -> None:
    path = pareto / "kernels" / "k-recurrent" / f"{PLAIN.label}.so"
    kept = path.rename(path.with_suffix(".kept"))  # it is loaded: cutting the file short would cut its pages
    try:
        path.write_bytes(kept.read_bytes() + b" ")
        with pytest.raises(RuntimeError, match="sha256 differs"):
            kda.kda_forward(**arguments(case()), kernel="k-recurrent")
    finally:
        kept.replace(path)


class TestRuntimeLibrary:
    def test_the_installed_package_has_it(self, pareto: Path) -> None:
        pytest.importorskip("tvm_ffi")
        module = exports.load_dropin(pareto)
        path = module._runtime_path()
        assert path.name == "libcute_dsl_runtime.so"
        assert "stubs" not in path.parts

    def test_the_environment_goes_first(
        self, pareto: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "libcute_dsl_runtime.so").touch()
        monkeypatch.setenv("CUTE_DSL_LIBS", f"/nowhere/libother.so:{tmp_path}/libcute_dsl_runtime.so")
        assert exports.load_dropin(pareto)._runtime_path().parent == tmp_path

    def test_none_is_told_with_the_mend(self, pareto: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        module = exports.load_dropin(pareto)
        monkeypatch.delenv("CUTE_DSL_LIBS", raising=False)
        monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(RuntimeError, match="pip install nvidia-cutlass-dsl"):
            module._runtime_path()

    def test_without_tvm_ffi_the_mend_is_named(self, pareto: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "tvm_ffi", None)
        with pytest.raises(RuntimeError, match="pip install apache-tvm-ffi"):
            exports.load_dropin(pareto)._function(pareto, "kda_forward")

    def test_another_version_is_a_warning(self, pareto: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        module = exports.load_dropin(pareto)
        monkeypatch.setattr(module.importlib.metadata, "version", lambda name: "9.9")
        with pytest.warns(UserWarning, match=r"judged with nvidia-cutlass-dsl None, installed is 9.9"):
            module._check_versions(module.shipped(module.Choice("k-chunked", PLAIN.label)))
