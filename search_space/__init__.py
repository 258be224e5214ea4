"""Knobs, legality, budgets, branches, samplers, and the templates themselves. Knows code, not devices."""
