"""Stacks of packages in small (`mini/`), installed as far as `importlib.metadata` can tell, and processes for them."""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO

HERE = Path(__file__).parent
ROOT = HERE.parent

# What the shims themselves need; the rest of an environment is out of sight in a bare process.
_NEEDED = ("packaging", "wrapt", "tomli")


@dataclass(frozen=True)
class Done:
    """What a process left: exit code, and what it wrote."""

    code: int
    output: str

    def says(self) -> str:
        """The output of a process that succeeded."""
        assert self.code == 0, self.output
        return self.output


def install(folder: Path, torch: bool = True, **versions: str) -> list[str]:
    """The path entries of a stack.

    Args:
        folder: where the metadata go.
        torch: False puts a stand-in for torch there, for what runs where there is none.
        versions: of vllm, speculators and transformers.
    """
    for package, version in versions.items():
        about = folder / f"{package}-{version}.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return [str(folder), str(HERE / "mini"), str(HERE), *([] if torch else [str(HERE / "mini" / "without_torch")])]


@lru_cache(maxsize=1)
def _needed() -> str:
    """A folder with the packages that the shims need, and nothing else of the environment's."""
    folder = tempfile.mkdtemp(prefix="specshim-needed-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in _NEEDED:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            (Path(folder) / name).symlink_to(Path(spec.origin).parent)
    return folder


def run_bare(code: str, path: Iterable[str] = (), *arguments: str, **environment: str) -> Done:
    """Run `code` where of vLLM, torch and so on there is only what `path` holds (see `install`)."""
    entries = [*path, _needed(), str(ROOT)]
    prelude = f"""
import os, sys
def installed(entry):
    return "site-packages" in entry or "dist-packages" in entry or os.path.abspath(entry or ".") == {str(ROOT)!r}
sys.path[:] = {entries!r} + [entry for entry in sys.path if not installed(entry)]
"""
    return run(prelude + code, *arguments, **environment)


def run(code: str, *arguments: str, **environment: str) -> Done:
    """Run `code` in a process of its own, in this environment."""
    kept = {k: v for k, v in os.environ.items() if k != "SHIMS_DISABLE"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**kept, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    return Done(done.returncode, done.stdout)


# Loads torch once; each job runs in a fork, so that it starts with torch and nothing else.
_FORKS = """
import json, os, sys, traceback
import torch
torch.set_num_threads(1)
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if not child:
        out = os.open(job["out"], os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.path[:0] = job["path"]
        os.environ.update(job["environment"])
        code = 1
        try:
            exec(compile(job["code"], "job", "exec"), {"__name__": "__main__"})
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Forks:
    """Runs code beside a torch that is loaded already."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process, self._folder, self._count = process, folder, 0

    def run(self, code: str, path: list[str], environment: Mapping[str, str]) -> Done:
        self._count += 1
        out = self._folder / f"{self._count}.txt"
        job = {"code": code, "path": [*path, str(ROOT)], "environment": dict(environment), "out": str(out)}
        to, back = _pipes(self._process)
        to.write(json.dumps(job) + "\n")
        to.flush()
        return Done(int(back.readline()), out.read_text(encoding="utf-8"))


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


@contextmanager
def forks(folder: Path) -> Iterator[Forks]:
    """A process with torch that runs jobs until the end of the context."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("SHIMS_DISABLE", None)
    command = [sys.executable, "-c", _FORKS]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Forks(process, folder)
    finally:
        _pipes(process)[0].close()
        process.wait(timeout=60)
