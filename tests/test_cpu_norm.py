"""A kernel that takes strided rows for dense ones is given dense ones; a right one is left alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
vllm = pytest.importorskip("vllm")
platforms = pytest.importorskip("vllm.platforms")

from shims import cpu_norm  # noqa: E402


def _right(out: Any, rows: Any, weight: Any, epsilon: float) -> None:
    out.copy_(torch.nn.functional.rms_norm(rows, rows.shape[-1:], weight, epsilon))


def _dense(out: Any, rows: Any, weight: Any, epsilon: float) -> None:
    _right(out, torch.as_strided(rows, rows.shape, (rows.shape[-1], 1)), weight, epsilon)


@pytest.mark.parametrize(
    ("kernel", "release", "on_cpu", "mended"),
    [
        (_dense, "0.13.0", True, True),
        (_right, "0.13.0", True, False),
        (_dense, "0.13.0", False, False),
        (_dense, "0.14.0", True, False),
    ],
)
def test_the_kernel_that_needs_it(
    monkeypatch: pytest.MonkeyPatch, kernel: Any, release: str, on_cpu: bool, mended: bool
) -> None:
    operations = SimpleNamespace(rms_norm=kernel)
    monkeypatch.setattr(vllm, "_custom_ops", operations, raising=False)
    monkeypatch.setattr(platforms, "current_platform", SimpleNamespace(is_cpu=lambda: on_cpu))
    monkeypatch.setattr(cpu_norm, "detect", lambda: SimpleNamespace(vllm=release))
    assert cpu_norm.mend() is mended
    rows, out = torch.randn(5, 48)[:, :16], torch.empty(5, 16)
    operations.rms_norm(out, rows, torch.ones(16), 1e-6)
    right = torch.nn.functional.rms_norm(rows, (16,), torch.ones(16), 1e-6)
    assert torch.allclose(out, right) is (mended or kernel is _right)
