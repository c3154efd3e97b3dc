"""The command line of the gate, as data."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shims.errors import UsageError
from shims.versions import parse

FORMATS = ("text", "markdown", "json", "junit", "sarif", "github", "html")
_SUFFIXES = {".txt": "text", ".md": "markdown", ".json": "json", ".xml": "junit", ".sarif": "sarif", ".html": "html"}
_DESCRIPTION = "Is this vLLM safe to merge? Reads its sources; needs neither vLLM nor torch, and installs nothing."
_EPILOG = """\
TARGET is vllm==X, vllm==latest, a wheel or sdist file, a URL, a git checkout, `installed`, or `all` known releases.
exit codes: 0 holds or adapted; 1 falls short of --fail-on; 2 could not be judged (the reason is printed).
environment: the index and certificates that pip or uv use; SPECSHIM_CACHE, SPECSHIM_OFFLINE.
"""


@dataclass(frozen=True)
class Output:
    """A file to write, '' for standard output."""

    file: str
    format: str


@dataclass(frozen=True)
class Options:
    """What was asked for.

    Args:
        targets: as named by the user.
        from_diff: a diff file, `-` for standard input, '' to ask git; None where the targets are named.
        base: commit or branch that git compares with.
        baseline: vLLM release to compare with, '' for the default.
        speculators: releases whose uses are judged; empty for the default; `none` for none.
        consumers: other projects whose uses are judged.
        outputs: what to write, and where.
        fail_on: see `Report.exit_code`.
        version: what to take the target for, '' to read it there.
        pre: whether `latest` may be a pre-release.
        offline: whether to answer from the cache alone.
        timeout: seconds for the whole run.
    """

    targets: tuple[str, ...]
    from_diff: str | None
    base: str
    baseline: str
    speculators: tuple[str, ...]
    consumers: tuple[str, ...]
    outputs: tuple[Output, ...]
    fail_on: str
    version: str
    pre: bool
    offline: bool
    timeout: float


def parsed(arguments: Sequence[str], program: str) -> Options:
    """The options that the arguments mean.

    Raises:
        UsageError: they contradict each other.
        SystemExit: they cannot be parsed (2), or ask for help (0).
    """
    given = _parser(program).parse_intermixed_args(arguments)
    if bool(given.target) == (given.from_diff is not None):
        found = "both" if given.target else "neither"
        raise UsageError("arguments", "TARGETs, or --from-diff", found, f"{program} vllm==latest, for example")
    for flag, version in (("--baseline", given.baseline), ("--version", given.version)):
        if version:
            parse(version, flag)
    for version in given.speculators:
        if version not in ("none", "all"):
            parse(version, "--speculators")
    if "none" in given.speculators and not given.consumer:
        # Without any use every vLLM would hold.
        next_step = "name a --consumer, or leave --speculators none out"
        raise UsageError("--speculators none", "a --consumer whose uses are judged instead", "none", next_step)
    return Options(
        tuple(given.target),
        given.from_diff,
        given.base,
        given.baseline,
        tuple(given.speculators),
        tuple(given.consumer),
        _outputs(given.format, given.output),
        given.fail_on,
        given.version,
        given.pre,
        given.offline,
        given.timeout,
    )


def _outputs(chosen: str | None, files: Sequence[str]) -> tuple[Output, ...]:
    """`FORMAT=FILE` is written beside standard output; a bare FILE takes what standard output would get."""
    outputs, bare = [], False
    for text in files:
        name, equals, file = text.partition("=")
        if equals and name in FORMATS:
            outputs.append(Output(file, name))
        else:
            bare = True
            outputs.append(Output(text, chosen or _SUFFIXES.get(Path(text).suffix, "text")))
    return tuple(outputs if bare else [Output("", chosen or "text"), *outputs])


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program, description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("target", nargs="*", metavar="TARGET", help="what to judge, see below")
    add("--from-diff", nargs="?", const="", metavar="DIFF", help="find the vLLM bump in a diff (a file, or - for "
        "standard input; without a value, git's against --base)")  # fmt: skip
    add("--base", default="", metavar="REF", help="for --from-diff: what git compares with (default: the branch that "
        "the merge request goes to)")  # fmt: skip
    add("--baseline", default="", metavar="VERSION", help="vLLM release to compare with (default: the version before "
        "the bump, else the newest verified one at or below the target)")  # fmt: skip
    add("--speculators", action="append", default=[], metavar="X", help="release whose uses are judged, repeatable; "
        "`all`, `none` (default: the installed one, else the newest with a generator)")  # fmt: skip
    add("--consumer", action="append", default=[], metavar="PATH", help="another project that uses vLLM: a folder, a "
        "wheel or sdist, or NAME==VERSION; its uses are judged too; repeatable")  # fmt: skip
    add("--format", choices=FORMATS, help="of what is printed (default: text)")
    add("--output", action="append", default=[], metavar="[FORMAT=]FILE", help="write to FILE; FORMAT=FILE writes one "
        "more form beside what is printed; repeatable")  # fmt: skip
    add("--fail-on", choices=("broken", "unverified", "drift"), default="broken", help="unverified: also a release "
        "that nobody ran live, and changed bodies; drift: also whatever changed (default: broken)")  # fmt: skip
    add("--version", default="", metavar="VERSION", help="what to take a folder or file for that does not tell")
    add("--pre", action="store_true", help="vllm==latest may be a pre-release")
    add("--offline", action="store_true", help="answer from the cache alone")
    add("--timeout", type=seconds, default=300.0, metavar="SECONDS", help="for the whole run (default: 300)")
    return parser


def seconds(text: str) -> float:
    given = float(text)
    if not 0 < given < 1e6:
        raise argparse.ArgumentTypeError("more than 0 seconds are needed")
    return given
