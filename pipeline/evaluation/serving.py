"""Engines one after the other, each in a process of its own, so that memory is free before the next one starts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.atomic import write_text
from pipeline.evaluation.request import EngineAnswer, EngineRequest
from pipeline.progress import heartbeat
from pipeline.serving.facts import V1, V2
from shims.errors import SpecshimError
from shims.guardian import guarding

_ERROR = re.compile(r"^(?:\([^)]*\) )?(?:ERROR [^\]]*\] )?((?:[\w.]+(?:Error|Exception|Failure)|AssertionError)\b.*)$")
_LAYERS = re.compile(r"\[(?P<file>\w+)\.py:\d+\] Using (?:Eagle3 )?auxiliary layers from [\w ]+: \((?P<ids>[\d, ]+)\)")
_RUNNERS = {"gpu_model_runner": V1, "eagle3_utils": V2}
_LAST_LINES = 400


def ask(request: EngineRequest, folder: Path, name: str) -> EngineAnswer:
    """Start an engine, wait for its answer, and end it.

    Args:
        folder: for the request, the answer and the log of the process.
        name: of these files.

    Raises:
        SpecshimError: the engine did not start or did not answer; with the reason it gave.
    """
    folder.mkdir(parents=True, exist_ok=True)
    asked, answered, log = (folder / f"{name}.{ending}" for ending in ("request.json", "answer.json", "log"))
    write_text(asked, json.dumps(request.as_dict()))
    answered.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pipeline.evaluation.engine", str(asked), str(answered)]
    with log.open("w", encoding="utf-8") as output, heartbeat(f"{request.kind}: vLLM"):
        code = _run(command, output)
    if code or not answered.is_file():
        raise SpecshimError(
            f"vLLM, {request.kind}",
            "answers",
            f"exit code {code}: {reason(log.read_text(encoding='utf-8', errors='replace'))}",
            f"read {log}; what is finished is kept",
        )
    layers, runner = layers_said(log.read_text(encoding="utf-8", errors="replace"))
    answer = EngineAnswer(**json.loads(answered.read_text(encoding="utf-8")))
    return replace(answer, layers=layers, runner=runner)


def layers_said(log: str) -> tuple[list[int], str | None]:
    """The verifier's layers that the server says it feeds its draft, and the runner that says so; empty if none does.

    Runner V1 says it of layers that a draft's config names (from 0.11.1 on), V2 of all.
    """
    found = _LAYERS.search(log)
    if found is None:
        return [], None
    return [int(number) for number in found["ids"].replace(",", " ").split()], _RUNNERS.get(found["file"])


def reason(log: str) -> str:
    """What an engine died of: the first error it named, since later ones are about the first.

    Errors without a word of their own come with the line above them, which is the code that raised.
    """
    lines = [line.rstrip() for line in log.splitlines()[-_LAST_LINES:] if line.strip()]
    for place, line in enumerate(lines):
        found = _ERROR.match(line.strip())
        if found and "Traceback" not in line:
            said = found[1]
            return said if ":" in said else f"{said} at {lines[place - 1].strip() if place else 'an unknown place'}"
    return lines[-1] if lines else "no message"


def _run(command: list[str], output: Any) -> int:
    with guarding():
        process = subprocess.Popen(
            command, env=_environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        with _ended_with_us(process):
            code = process.wait()
        if code:
            # One that crashed may leave processes behind that keep the device's memory from the next engine.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return code


@contextlib.contextmanager
def _ended_with_us(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """An engine has processes of its own: all of them end when this block is left early."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        raise


def _environment() -> dict[str, str]:
    environment = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    } | os.environ
    # What it says goes to a file, and some of it is wanted.
    environment["VLLM_LOGGING_LEVEL"] = "INFO"
    # With it set, each process of vLLM compiles thousands of files anew.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment
