"""How vLLM starts its processes."""

from __future__ import annotations

import os


def spawn_workers() -> None:
    """Have vLLM start processes anew on a GPU, where nobody has said otherwise.

    A process that has as much as asked CUDA whether there is a GPU cannot be forked; vLLM only looks for one that has
    initialised it (https://docs.vllm.ai/en/latest/usage/troubleshooting.html#python-multiprocessing). On a CPU its own
    choice stays. To go once vLLM spawns by itself on every known release.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
