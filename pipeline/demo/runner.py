"""Runs stages one after the other, so that the memory of each is free before the next begins."""

from __future__ import annotations

import os
import subprocess

from rich.console import Console

from shims.errors import SpecshimError

console = Console()


class Runner:
    """Runs stages, each in a process of its own.

    Args:
        python: the interpreter, of an environment with vLLM.
        who: runs them, for messages.
    """

    def __init__(self, python: str, who: str) -> None:
        self._python, self._who = python, who
        self._environment = {
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GB; plenty for rows of a few hundred tokens
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONWARNINGS": "ignore",  # those of other libraries, repeated in every worker
        } | os.environ
        # With it set, every vLLM process compiles thousands of files anew: minutes per stage.
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def __call__(self, title: str, module: str, *arguments: object, capture: bool = False) -> str:
        """Run ``python -m module arguments``.

        Returns:
            Its standard output when ``capture``, else "".

        Raises:
            SpecshimError: see :meth:`ended`.
        """
        out = subprocess.PIPE if capture else None
        return self.ended(title, module, *arguments, out=out).stdout or ""

    def ended(
        self,
        title: str,
        module: str,
        *arguments: object,
        accepted: tuple[int, ...] = (0,),
        out: int | None = None,
        errors: int | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """The same, where its exit code is of interest.

        Args:
            accepted: exit codes that are no error.
            out, errors: where its output goes, as `subprocess` has it.

        Raises:
            SpecshimError: it ended with an error; its own message is on the screen.
        """
        console.rule(title)
        command = [self._python, "-m", module, *map(str, arguments)]
        done = subprocess.run(command, env=self._environment, check=False, text=True, stdout=out, stderr=errors)
        if done.returncode not in accepted:
            raise SpecshimError(
                f"{self._who}, {title}",
                f"exit code {' or '.join(map(str, accepted))}",
                f"exit code {done.returncode} from {' '.join(command)}",
                f"see its message above; the {self._who} goes on from here when run again",
            )
        return done
