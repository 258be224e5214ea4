"""The mathematics of Kimi Delta Attention: oracles, workloads, tolerances. No tuning code.

Symbols, as in Kimi Linear (Moonshot AI, 2025) and flash-linear-attention's `ops/kda/naive.py`:

    T            rows of all sequences, packed one after the other
    N            sequences; sequence n is rows cu_seqlens[n] to cu_seqlens[n + 1]
    H, HV        query/key heads, value heads; HV is a multiple of H, value head hv reads hv // (HV // H)
    K, V         head dims of keys and of values
    C            tokens per chunk
    q, k         [T, H, K] queries, keys
    v, o         [T, HV, V] values, outputs
    g            [T, HV, K] natural log of the decay, in [-5, 0]
    beta         [T, HV] write strength, in [0, 1]
    A_log        [HV] and dt_bias [HV, K], parameters of the production contract's gate
    S            state, K by V in formulas; stored V-first [N, HV, V, K] in float32, initial and final
    scale        factor on q, K^-0.5 unless said
    u            beta (v − Sᵀ k), what a token writes
    G            inclusive sum of g inside a chunk
    L, M         decayed products of keys with keys, of queries with keys
    X            (I + L)⁻¹

Per token: S ← Diag(exp g) S;  u = beta (v − Sᵀ k);  S ← S + k uᵀ;  o = scale Sᵀ q.
"""

from evotune.reference_kda.case import KdaCase, KdaDiscrepancy, Question, case_of, solve
from evotune.reference_kda.chunked import PAIRWISE, Form, Intermediates, chunked, chunked_with_intermediates
from evotune.reference_kda.operator import KDA, KdaOperator
from evotune.reference_kda.problem import LOWER_BOUND, Problem, Result, activate, swap_state_layout
from evotune.reference_kda.recurrent import recurrence
from evotune.reference_kda.regimes import REGIMES
from evotune.reference_kda.symmetry import Symmetry
from evotune.reference_kda.tolerance import Extent, Places, derive
from evotune.reference_kda.workload import Workload, draw_inputs, parse_workload

__all__ = [
    "KDA",
    "LOWER_BOUND",
    "PAIRWISE",
    "REGIMES",
    "Extent",
    "Form",
    "Intermediates",
    "KdaCase",
    "KdaDiscrepancy",
    "KdaOperator",
    "Places",
    "Problem",
    "Question",
    "Result",
    "Symmetry",
    "Workload",
    "activate",
    "case_of",
    "chunked",
    "chunked_with_intermediates",
    "derive",
    "draw_inputs",
    "parse_workload",
    "recurrence",
    "solve",
    "swap_state_layout",
]
