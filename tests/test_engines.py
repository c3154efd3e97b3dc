"""Which engine is taken, and what each refuses before a model is loaded."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from pipeline import engines
from pipeline.engines import ENGINES, EngineOptions, check_engine, chosen, native, why
from pipeline.layers import AFTER, NATIVE, LayerIds
from pipeline.model_info import ModelInfo
from shims.errors import UsageError
from shims.releases import proved_direct
from shims.versions import Stack


def _stack(monkeypatch: pytest.MonkeyPatch, vllm: str | None, speculators: str | None) -> None:
    for module in (engines, native):
        monkeypatch.setattr(module, "detect", lambda: Stack(vllm, speculators))


def _options(layers: LayerIds, tp_size: int = 1, architecture: str = "LlamaForCausalLM") -> EngineOptions:
    config = {"architectures": [architecture]}
    model = ModelInfo(Path("model"), config, 8, 16, 100, 512, "float32", needs_remote_code=False)
    return EngineOptions(model, layers, 64, "float32", tp_size, 0.5, trust_remote_code=False)


def test_auto_is_direct_where_it_was_seen_to_be_right(monkeypatch: pytest.MonkeyPatch) -> None:
    proved = sorted(proved_direct())[0]
    for version in (proved, f"{proved}.post2+cpu"):
        _stack(monkeypatch, version, "0.4.0.1")
        assert chosen("auto") == "direct"
    assert why("auto", "direct") == "chosen"
    _stack(monkeypatch, "0.34.0", "0.4.0.1")
    assert chosen("auto") == "stock"
    # Five times slower: nobody should be that without a word.
    assert "--engine direct" in why("auto", "stock")


@pytest.mark.parametrize("speculators", [None, "0.5.0", "0.9.0"])
def test_auto_is_direct_where_there_is_no_generator(monkeypatch: pytest.MonkeyPatch, speculators: str | None) -> None:
    _stack(monkeypatch, "0.34.0", speculators)
    assert chosen("auto") == "direct"


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_that_was_named_is_taken(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    _stack(monkeypatch, "0.34.0", None)
    assert chosen(name) == name


def test_an_unknown_engine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="auto or direct or stock or native"):
        chosen("fast")


def test_embeddings_are_for_the_other_engines() -> None:
    embeddings = LayerIds((0, 3), NATIVE)
    check_engine("direct", embeddings)
    with pytest.raises(UsageError, match="leave out id 0"):
        check_engine("stock", embeddings)


@pytest.mark.parametrize(
    ("vllm", "options", "word"),
    [
        ("0.17.1", _options(LayerIds((1,), AFTER)), "0.18"),
        ("0.24.0", _options(LayerIds((1, 7), AFTER), architecture="DeepseekV3ForCausalLM"), "0.25"),
        ("0.24.0", _options(LayerIds((1, 8), NATIVE), architecture="KimiK25ForConditionalGeneration"), "0.25"),
        ("0.30.0", _options(LayerIds((1,), AFTER), tp_size=2), "0.31"),
        ("0.33.0", _options(LayerIds((1,), AFTER), tp_size=8, architecture="GlmMoeDsaForCausalLM"), "share"),
        ("0.20.2", _options(LayerIds((1,), AFTER)), "CUDA"),
        ("0.32.0", _options(LayerIds((1,), AFTER)), "CUDA"),
    ],
)
def test_what_the_connector_gets_wrong_is_refused(
    monkeypatch: pytest.MonkeyPatch, vllm: str, options: EngineOptions, word: str
) -> None:
    _stack(monkeypatch, vllm, None)
    monkeypatch.setattr(native, "_on_cuda", lambda: word != "CUDA")
    with pytest.raises(UsageError, match=word) as caught:
        native.check_native(options)
    assert "--engine direct" in str(caught.value)


@pytest.mark.parametrize(
    ("vllm", "options"),
    [
        ("0.18.0", _options(LayerIds((1, 7), AFTER))),
        ("0.24.0", _options(LayerIds((1, 6), AFTER), architecture="DeepseekV3ForCausalLM")),
        ("0.25.1", _options(LayerIds((1, 7), AFTER), architecture="DeepseekV3ForCausalLM")),
        ("0.31.0", _options(LayerIds((1,), AFTER), tp_size=8)),
        ("0.33.0", _options(LayerIds((1,), AFTER), architecture="GlmMoeDsaForCausalLM")),
    ],
)
def test_what_the_connector_does_is_not_refused(
    monkeypatch: pytest.MonkeyPatch, vllm: str, options: EngineOptions
) -> None:
    _stack(monkeypatch, vllm, None)
    monkeypatch.setattr(native, "_on_cuda", lambda: True)
    native.check_native(options)


def test_a_file_of_the_connector_is_read_when_its_writer_is_through(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    path, lock = tmp_path / "rows", tmp_path / "rows.lock"
    handle: Any = lock.open("w")
    fcntl.flock(handle, fcntl.LOCK_EX)

    def finish() -> None:
        path.write_bytes(b"whole")
        handle.close()

    path.write_bytes(b"")
    timer = threading.Timer(0.3, finish)
    timer.start()
    assert native._read_when_written(path) == b"whole"
    assert not lock.exists()
