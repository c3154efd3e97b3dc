"""Entry point `vllm.general_plugins`: vLLM calls it in every process it starts. Idempotent."""

from __future__ import annotations


def load() -> None:
    """Install the shims in this process (importing `shims` does), and keep what vLLM says if it fails."""
    import shims
    from shims.behaviours import failures

    shims.install_by_environment()
    failures.listen()
