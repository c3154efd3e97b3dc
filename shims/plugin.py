"""Entry point `vllm.general_plugins`: vLLM calls it in every process it starts. Idempotent."""

from __future__ import annotations


def load() -> None:
    """Install the shims in this process (importing `shims` does)."""
    import shims

    shims.install_by_environment()
