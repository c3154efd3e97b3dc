"""The benchmark's own arithmetic and settings; its figures are never tested."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from benchmarks import training_devices
from benchmarks.models import SHAPES, prompts, write
from benchmarks.run import measure, rows
from benchmarks.way import TP_VARIABLE
from contract_tests.performance_page import WAYS, measurements


def test_a_share_is_of_the_compiled_run_of_the_same_model() -> None:
    measured = [
        {"way": "plain-eager", "model": "a", "tok_s": 50},
        {"way": "plain-compiled", "model": "a", "tok_s": 100},
        {"way": "direct-files", "model": "a", "tok_s": 97},
        {"way": "plain-eager", "model": "b", "tok_s": 10},
        {"way": "stock", "model": "b", "tok_s": 2},
        {"way": "native-files", "model": "b", "reason": "no CUDA"},
    ]
    assert [row["of_plain"] for row in rows(measured)] == [0.5, 1.0, 0.97, 1.0, 0.2, None]


@pytest.mark.parametrize("name", SHAPES)
def test_the_states_taken_exist_and_the_prompts_fit(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    config = json.loads((write(name, tmp_path) / "config.json").read_text(encoding="utf-8"))
    assert max(shape.layers) <= config["num_hidden_layers"] and list(shape.layers) == sorted(set(shape.layers))
    made = prompts(shape)
    assert made == prompts(shape) and len(made) == shape.prompts
    assert all(len(row) == shape.length and max(row) < config["vocab_size"] for row in made)


def test_the_rows_are_written_as_extract_writes_them(tmp_path: Path) -> None:
    """Settings of the sink travel as plain values: one that was forgotten would show on a GPU only."""
    pytest.importorskip("torch")
    from benchmarks.way import _row_sink
    from pipeline.engines.row_sink import RowSink, RowSinkSettings

    settings = _row_sink(SHAPES["tiny"], tmp_path)
    assert settings.keys() == {field.name for field in fields(RowSinkSettings)}
    RowSink(**settings)


def test_a_way_that_does_not_start_is_a_row_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others' figures of a long run are kept."""
    pytest.importorskip("transformers")
    monkeypatch.setenv(TP_VARIABLE, "1")
    (row,) = measure(["transformers"], "tiny", tmp_path / "nowhere", tmp_path)
    assert row["way"] == "transformers" and "nowhere" in row["reason"] and "tok_s" not in row


_ASKED = """
import pathlib, signal, sys, time
def told(*_):
    pathlib.Path(sys.argv[1]).touch()
    sys.exit()
signal.signal(signal.SIGTERM, told)
print(flush=True)
time.sleep(60)
"""


def test_a_training_that_takes_too_long_is_asked_to_end_its_processes(tmp_path: Path) -> None:
    """Killed, torchrun leaves them on the devices, and the next way is measured beside them."""
    asked = tmp_path / "asked"
    with subprocess.Popen([sys.executable, "-c", _ASKED, str(asked)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        training_devices.end(process)
    assert asked.exists()


def test_each_committed_measurement_can_be_shown() -> None:
    assert measurements()
    for run in measurements():
        assert {"device", "date", "stack", "rows"} <= run.keys()
        assert all(row["way"] in WAYS and ("tok_s" in row or row["reason"]) for row in run["rows"])
