"""The mathematics of Kimi Delta Attention: oracles, workloads, tolerances. No tuning code."""
