"""`python -m shims plan` and `python -m shims report`. Needs neither vLLM nor torch."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shims.planning import Plan
    from shims.reporting import Report


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code (2: the request itself is wrong)."""
    import shims
    from shims.errors import UsageError

    parser = argparse.ArgumentParser(prog="python -m shims", description=shims.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    planning = commands.add_parser("plan", help="adaptations for a stack, installed or not")
    planning.add_argument("--vllm", help="version, for example 0.16.0 (default: installed)")
    planning.add_argument("--speculators", help="version, for example 0.3.0 (default: installed)")
    planning.add_argument("--transformers", help="version (default: unknown, or installed)")
    reporting = commands.add_parser("report", help="what is in force in this environment")
    for command in (planning, reporting):
        command.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    try:
        if options.command == "plan":
            result: Plan | Report = shims.plan(options.vllm, options.speculators, options.transformers)
        else:
            result = shims.report()
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(result.as_dict(), indent=2) if options.json else result.render())
    return 0


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # Who read it had enough (`… | head`); Python would complain once more while it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)
