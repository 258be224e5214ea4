"""Solved cases as `kda_forward` of a GPU's export takes them."""

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import torch

from evotune.reference_kda.case import KdaCase, solve
from evotune.reference_kda.problem import LOWER_BOUND
from evotune.reference_kda.workload import Workload

FAST = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
NAMES = ("q", "k", "v", "g", "beta")


@cache
def case(contract: str = "plain", **changes: Any) -> KdaCase:
    """37 tokens with grouped value heads, if not told otherwise."""
    facts: dict[str, Any] = {"lengths": (37,), "heads": 2, "value_heads": 4, "K": 64, "V": 96}
    facts |= {"dtype": "bfloat16" if contract == "production" else "float32", "contract": contract}
    return solve(Workload("w", "w", **facts | changes), 5)


def tensor(array: Any, device: str) -> Any:
    """A copy on a device; None stays."""
    if array is None:
        return None
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16).to(device)
    return torch.from_numpy(array.copy()).to(device)


def arguments(solved: KdaCase, B: int = 1, device: str = "cpu") -> dict[str, Any]:
    """fla's arguments, batched; the state stays V-first."""
    x = {name: tensor(array, device) for name, array in solved.inputs.items()}
    batched = {n: x[n].view(B, -1, *x[n].shape[1:]) for n in NAMES}
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
    flat = o.reshape(-1, *o.shape[2:]).cpu()
    half = flat.dtype == torch.bfloat16
    array = flat.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) if half else flat.numpy()
    return solved.worst({"o": array, "final_state": state.cpu().numpy()}).ratio <= 1
