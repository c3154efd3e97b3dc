"""Entry point `vllm.general_plugins`: vLLM calls it in every process it starts. Idempotent."""

from __future__ import annotations


def load() -> None:
    """Install the shims in this process (importing `shims` does), keep what vLLM says if it fails, and take no pictures
    where the direct engine wants none."""
    import shims
    from shims.behaviours import failures
    from shims.direct import text_only

    shims.install_by_environment()
    failures.listen()
    text_only.where_asked()
