"""Contracts between speculators and vLLM: what is used, and whether each release still offers it.

Reads sources without importing or installing them. Imports `shims`; `shims` never imports this.
"""
