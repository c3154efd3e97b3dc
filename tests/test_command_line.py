"""What the command says where the environment, not the request, is short of something."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

from pipeline.__main__ import main
from shims.direct.engine import DirectEngine, DirectOptions
from shims.errors import SpecshimError


@pytest.mark.parametrize(
    ("package", "words"), [("transformers", "pip install 'specshim[data]'"), ("torch", "install torch")]
)
def test_a_package_that_is_yours_to_bring_is_named_with_what_brings_it(
    package: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    model.mkdir()
    config = {"num_hidden_layers": 8, "hidden_size": 4, "vocab_size": 300}
    (model / "config.json").write_text(json.dumps(config))
    rows.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    monkeypatch.setitem(sys.modules, package, None)
    command = ["prepare", "--model-path", str(model), "--input", str(rows), "--output-dir", str(tmp_path / "out")]
    if package == "torch":
        command = ["vocab", "--prepared", str(_prepared(tmp_path)), "--draft-vocab-size", "2"]
    with pytest.raises(SystemExit) as ended:
        main(command)
    said = capsys.readouterr().err
    assert ended.value.code == 1
    assert "Traceback" not in said
    assert f"the package {package}, which this command needs" in said
    assert words in said


def _prepared(root: Path) -> Path:
    from pipeline import manifest
    from pipeline.model_info import sha256_file

    folder = root / "prepared"
    folder.mkdir()
    (folder / "token_freq.pt").write_bytes(b"counts")
    model = {"path": "m", "fingerprint": "0" * 64, "num_layers": 8, "hidden_size": 4, "vocab_size": 300}
    outputs = {"token_freq.pt": sha256_file(folder / "token_freq.pt")}
    manifest.write(folder, manifest.compose("prepare", model=model, counts={"rows": 1}, inputs={}, outputs=outputs))
    return folder


def test_a_module_of_our_own_that_is_missing_is_no_package_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pipeline.vocab", None)
    with pytest.raises(SystemExit):
        main(["vocab", "--prepared", "x", "--draft-vocab-size", "2"])
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["I/O error: No space left on device (os error 28)", "Disk quota exceeded"])
def test_a_full_disk_that_a_library_tells_of_is_one(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build_vocab(config: object) -> None:
        raise RuntimeError(f"Error while serializing: {words}")

    monkeypatch.setattr("pipeline.vocab.build_vocab", build_vocab)
    with pytest.raises(SystemExit):
        main(["vocab", "--prepared", "x", "--draft-vocab-size", "2"])
    said = capsys.readouterr().err
    assert "space on the disk" in said and "Traceback" not in said


def test_a_terminal_that_does_not_know_a_letter_ends_nothing() -> None:
    """Names of files and texts of rows are anyone's."""
    told = "from pipeline.__main__ import _print, main\ntry:\n main(['--version'])\nexcept SystemExit:\n _print('ü☃')"
    environment = os.environ | {"PYTHONIOENCODING": "ascii:strict"}
    done = subprocess.run([sys.executable, "-c", told], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, r"\xfc\u2603"), done.stderr


def test_the_direct_engine_without_vllm_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shims.direct.engine.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    options = DirectOptions("m", (2,), "x:y", {}, 16)
    with pytest.raises(SpecshimError, match="vLLM in this environment") as refused:
        DirectEngine(options)
    assert "--engine" not in refused.value.next_step, "no engine runs without vLLM"
