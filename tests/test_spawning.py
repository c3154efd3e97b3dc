"""On a GPU vLLM's processes are started anew: one that has asked CUDA anything cannot be forked."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

platforms = pytest.importorskip("vllm.platforms")

from shims.spawning import spawn_workers  # noqa: E402

NAME = "VLLM_WORKER_MULTIPROC_METHOD"


@pytest.mark.parametrize(
    ("on_cpu", "chosen", "wanted"),
    [(False, None, "spawn"), (False, "fork", "fork"), (True, None, None)],
)
def test_the_start_method(
    monkeypatch: pytest.MonkeyPatch, on_cpu: bool, chosen: str | None, wanted: str | None
) -> None:
    monkeypatch.setattr(platforms, "current_platform", SimpleNamespace(is_cpu=lambda: on_cpu))
    monkeypatch.delenv(NAME, raising=False)
    if chosen:
        monkeypatch.setenv(NAME, chosen)
    spawn_workers()
    assert os.environ.get(NAME) == wanted
    monkeypatch.delenv(NAME, raising=False)
