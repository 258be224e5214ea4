"""What the drop-in of an export for a GPU costs beside its kernel.

    python experiments/bench_dropin.py pareto [--out FILE.json]

For every exported contract, on small problems that the GPU ends long before the host issues the next: host
time of a call through `kda_forward` in the forms people call it, and of the same kernel's function on
prepared arguments. On every measured workload: device time through `kda_forward` and of the function, in
turns, from a cold L2. Times are medians over rounds; the least is given beside the host's. Needs the GPU, and
nothing of evotune.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

import torch

FAST = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
DEVICE = "cuda"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
CALLS, ROUNDS = 200, 15
PAIRS = 15
SLEEP_CYCLES = 400_000  # 0.2 ms at 2 GHz: the host has issued a call before the GPU wakes up


def arguments(row: dict[str, Any], lengths: list[int], H: int, HV: int) -> dict[str, Any]:
    """Of `kda_forward` for packed sequences, with both states, V-first."""
    K, V, contract = (row["constants"][name] for name in ("K", "V", "contract"))
    production = contract == "production"
    io, gate = DTYPES[row["dtype"]], DTYPES[row["dtype"]] if production else torch.float32
    T, N = sum(lengths), len(lengths)

    def normal(*shape: int, dtype: torch.dtype = io) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE).to(dtype)

    g, beta = normal(1, T, HV, K, dtype=gate), normal(1, T, HV, dtype=gate)
    found: dict[str, Any] = {
        "q": normal(1, T, H, K),
        "k": normal(1, T, H, K),
        "v": normal(1, T, HV, V),
        "g": g if production else -g.abs().clamp(max=5),
        "beta": beta if production else beta.sigmoid(),
        "cu_seqlens": torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32),
        "initial_state": normal(N, HV, V, K, dtype=torch.float32),
        "output_final_state": True,
        "state_v_first": True,
    }
    if not production:
        found["k"] = torch.nn.functional.normalize(found["k"].float(), dim=-1).to(io)
        return found
    more = {"A_log": normal(HV, dtype=torch.float32), "dt_bias": normal(HV, K, dtype=torch.float32)}
    return found | FAST | more | {"lower_bound": row["scalars"]["lower_bound"]}


def forms(given: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Ways to call it, the cheapest first."""
    whole = {name: x for name, x in given.items() if name != "cu_seqlens"}
    bare = {name: x for name, x in whole.items() if name not in ("initial_state", "output_final_state")}
    yield "one sequence, no states", bare
    yield "one sequence, states V-first", whole
    yield "packed, int32, states V-first", given
    yield "packed, int64, states V-first", given | {"cu_seqlens": given["cu_seqlens"].long()}
    k_first = {"initial_state": given["initial_state"].mT.contiguous(), "state_v_first": False}
    yield "packed, int32, states K-first", given | k_first
    yield "packed, int64, no states", bare | {"cu_seqlens": given["cu_seqlens"].long()}


def host_us(call: Callable[[], object]) -> tuple[float, float]:
    """(median, least) over rounds of the time to issue a call, as serving does: without gradients."""
    times = []
    with torch.inference_mode():
        for _ in range(20):
            call()
        for _ in range(ROUNDS):
            torch.cuda.synchronize()
            start = perf_counter_ns()
            for _ in range(CALLS):
                call()
            times.append((perf_counter_ns() - start) / CALLS / 1e3)
    torch.cuda.synchronize()
    return median(times), min(times)


def device_us(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Medians of device time, in turns."""
    cold = torch.zeros(2 * torch.cuda.get_device_properties(0).L2_cache_size // 4, device=DEVICE)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for i in range(PAIRS):
        for name, call in calls.items() if i % 2 else reversed(calls.items()):
            cold.amax()
            torch.cuda._sleep(SLEEP_CYCLES)
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) * 1e3)
    return {name: median(found) for name, found in times.items()}


def function_of(module: Any, given: dict[str, Any]) -> Callable[[], object]:
    """A call of the kernel's own function with the arguments that `kda_forward` gives it.

    What the drop-in keeps of a call is no promise of it: a test holds this to the drop-in as it is.
    """
    seen: list[tuple[Any, ...]] = []
    module._plans.clear()
    module.kda_forward(**given)  # leaves its plan
    ((key, plan),) = module._plans.items()
    spied = replace(plan, function=lambda *arguments: seen.append(arguments), frames={})
    module._plans[key] = spied  # a function of Python's has no frame
    module.kda_forward(**given)
    module._plans[key] = plan
    (prepared,) = seen
    return lambda: plan.function(*prepared)


def small(row: dict[str, Any], module: Any) -> Iterator[dict[str, Any]]:
    given = arguments(row, [64], 2, 4)
    direct, least = host_us(function_of(module, given))
    yield {"what": "the kernel's function, prepared arguments", "host_us": direct, "least_us": least}
    calls = {name: partial(module.kda_forward, **form) for name, form in forms(given)}

    def unseen() -> None:
        module._plans.clear()
        module.kda_forward(**given)

    for name, call in {**calls, "packed, a length not seen yet": unseen}.items():
        cost, least = host_us(call)
        yield {"what": name, "host_us": cost, "least_us": least, "over_us": cost - direct}


def large(row: dict[str, Any], module: Any) -> dict[str, Any]:
    s = row["sizes"]
    each, rest = divmod(s["T"], max(s["N"], 1))
    lengths = [each + (n < rest) for n in range(s["N"])]
    given = arguments(row, lengths, s["H"], s["HV"])
    calls = {"function": function_of(module, given), "kda_forward": lambda: module.kda_forward(**given)}
    return {"what": row["name"], "kernel": row["kernel"]} | {
        f"{n}_us": t for n, t in device_us(calls).items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    sys.path.insert(0, str(chosen.directory.resolve()))
    module = importlib.import_module("kda")
    rows = module.available()
    host = [
        {"dtype": row["dtype"], **row["constants"], **found}
        for row in {row["label"]: row for row in rows}.values()
        for found in small(row, module)
    ]
    for found in host:
        over = f"{found['over_us']:+7.1f}" if "over_us" in found else ""
        label = f"{found['dtype']} {found['contract']} {found['K']}x{found['V']}"
        print(f"{label:34s}{found['what']:44s}{found['host_us']:7.1f} us{over}")
    device = [large(row, module) for row in rows]
    for found in device:
        times = f"function {found['function_us']:9.1f} us   kda_forward {found['kda_forward_us']:9.1f} us"
        print(f"{found['what']:34s}{times}")
    if chosen.out is not None:
        gpu = torch.cuda.get_device_name()
        text = json.dumps({"gpu": gpu, "torch": torch.__version__, "host": host, "device": device}, indent=1)
        chosen.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
