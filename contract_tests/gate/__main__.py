"""`python -m contract_tests.gate TARGET…`, the same as `specshim gate TARGET…`."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from contract_tests.gate.options import Options, parsed
from shims.errors import SpecshimError, UsageError
from shims.explained import explained

# What reads sources; import name -> distribution.
_NEEDED = {"griffe": "griffe", "pypi_simple": "pypi-simple", "remotezip": "remotezip", "requests": "requests"}


def main(arguments: Sequence[str] | None = None, program: str = "python -m contract_tests.gate") -> int:
    """Judge, write, and return the exit code; see `contract_tests.gate.options`."""
    try:
        options = parsed(sys.argv[1:] if arguments is None else arguments, program)
        _refuse_if_incomplete()
        return _gated(options)
    except SpecshimError as error:
        print(error, file=sys.stderr)
        return 2
    except Exception as error:  # noqa: BLE001  a fault of the gate itself is no verdict, and exit code 1 would be one
        traceback.print_exc()
        print(f"could not judge, by a fault of the gate: {type(error).__name__}: {error}", file=sys.stderr)
        return 2


def _gated(options: Options) -> int:
    from contract_tests.gate.formats import FORMATS
    from contract_tests.gate.releases import NOT_READ
    from contract_tests.gate.report import exit_code
    from contract_tests.gate.run import run

    reports = run(options)
    if not reports:
        print("no vLLM bump in this diff: nothing to judge", file=sys.stderr)
    for report in reports:
        if report.state == NOT_READ and options.outputs[0].format != "text":
            print(f"{report.target}: {report.findings[0].why}", file=sys.stderr)
    for output in options.outputs:
        text = FORMATS[output.format](reports, options.fail_on)
        if not output.file:
            _print(text)
            continue
        try:
            Path(output.file).write_text(text, encoding="utf-8")
        except OSError as error:
            found = error.strerror or type(error).__name__
            raise UsageError(output.file, "a file that can be written", found, "name another one") from error
    return exit_code(reports, options.fail_on)


def _print(text: str) -> None:
    """To standard output, at once: what cannot be written is found here, and not while Python ends.

    Raises:
        SpecshimError: it could not be written, on a full disk for one.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # What is left in the buffer would fail once more, and take the exit code with it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return  # who read it had enough (`… | head`); the verdict stands
        found, next_step = error.strerror or type(error).__name__, "write it elsewhere, or to a file with --output"
        raise explained(error) or SpecshimError("standard output", "a place to write to", found, next_step) from error


def _refuse_if_incomplete() -> None:
    missing = [distribution for name, distribution in _NEEDED.items() if find_spec(name) is None]
    if missing:
        wanted, next_step = ", ".join(_NEEDED.values()), "pip install 'specshim[gate]'"
        raise UsageError("specshim gate", wanted, f"not installed: {', '.join(missing)}", next_step)


if __name__ == "__main__":
    sys.exit(main())
