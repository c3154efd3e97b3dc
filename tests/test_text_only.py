"""An engine for text alone makes no processor of pictures, in any of its processes; others keep theirs."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from shims.direct import text_only as module
from shims.direct.text_only import text_only, where_asked


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    class MultiModalRegistry:
        def supports_multimodal_inputs(self, model_config: str) -> bool:
            raise ValueError("You cannot pass text prompts when `skip_tokenizer_init=True`")

        def create_processor(self, model_config: str, *, tokenizer: None = None) -> object:
            raise ValueError("no tokenizer")

    monkeypatch.setitem(sys.modules, "vllm.multimodal", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.multimodal.registry", SimpleNamespace(MultiModalRegistry=MultiModalRegistry))
    return MultiModalRegistry


def installed(monkeypatch: pytest.MonkeyPatch, vllm: str) -> None:
    monkeypatch.setattr(module, "detect", lambda: SimpleNamespace(vllm=vllm))


def asks(registry: Any) -> bool:
    with pytest.raises(ValueError):
        registry().create_processor("model", tokenizer=None)
    with pytest.raises(ValueError):
        registry().supports_multimodal_inputs("model")
    return True


@pytest.mark.parametrize("vllm", ["0.16.0", "0.20.2", "0.23.0"])
def test_nothing_is_asked_while_an_engine_starts(registry: Any, monkeypatch: pytest.MonkeyPatch, vllm: str) -> None:
    installed(monkeypatch, vllm)
    with pytest.raises(RuntimeError, match="the model does not load"), text_only():
        assert registry().supports_multimodal_inputs("model") is False
        assert registry().create_processor("model", tokenizer=None) is None
        raise RuntimeError("the model does not load")
    assert asks(registry) and "SPECSHIM_TEXT_ONLY" not in os.environ


@pytest.mark.parametrize("vllm", ["0.12.0", "0.24.0", "0.32.0"])
def test_where_vllm_copes_it_is_left_alone(registry: Any, monkeypatch: pytest.MonkeyPatch, vllm: str) -> None:
    installed(monkeypatch, vllm)
    with text_only():
        assert asks(registry) and "SPECSHIM_TEXT_ONLY" not in os.environ


def test_a_process_of_the_engine_asks_nothing(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    where_asked()
    assert asks(registry), "another engine's process"
    installed(monkeypatch, "0.20.2")
    with text_only():
        told = os.environ["SPECSHIM_TEXT_ONLY"]
    monkeypatch.setenv("SPECSHIM_TEXT_ONLY", told)
    where_asked()
    assert registry().supports_multimodal_inputs("model") is False
