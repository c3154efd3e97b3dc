"""Where a name went that is no longer at its home: read in the new tree, or taken from a row that knows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from contract_tests.candidates import helpful, modules_beside
from contract_tests.gate.changes import Change, changes
from contract_tests.gate.releases import Release
from contract_tests.gate.report import Finding
from contract_tests.judge import Judgement, judge
from contract_tests.readers.facts import ClassFacts, FunctionFacts, ModuleFacts
from contract_tests.readers.found import FOUND, Found, Reading, parsed
from contract_tests.readers.resolve import Resolver
from contract_tests.sources import SourceError
from shims.adaptations import ADAPTATIONS
from shims.contract import Verdict
from shims.planning import select
from shims.touchpoints import Touchpoint
from shims.verbs import Moved
from shims.versions import Stack, within


def explained(target: Release, baseline: Release, old: Found, after: Judgement, removed: list[Change]) -> list[Change]:
    """`removed`, or what says more: that the name moved, and what changed about it on the way.

    Args:
        target, baseline: the two releases.
        old: what the baseline has at the touchpoint's home.
        after: the judgement on the target.
        removed: what the readings alone say.
    """
    name = after.touchpoint.qualname or after.touchpoint.module
    try:
        new_home = _by_row(after) or _by_search(after.touchpoint, target)
        if not new_home:
            return _renamed(after, target, old) or removed
        new = target.reading.found.get(new_home) or Resolver(target.library).find(new_home)
    except SourceError:
        return removed  # the verdict stands; where it went cannot be told without the sources
    moved = Change("moved", name, f"{after.touchpoint.module} -> {new_home}")
    inside = [change for change in changes(old, new) if change.kind != "defined elsewhere"]
    return [moved, *inside, *_namesakes(target, new_home, old)]


def _by_row(after: Judgement) -> str:
    own = [row for row in ADAPTATIONS if row.name in after.rows and row.touchpoint == after.touchpoint.key]
    return next((row.verb.home for row in own if isinstance(row.verb, Moved)), "")


def _by_search(touchpoint: Touchpoint, target: Release) -> str:
    outer = touchpoint.qualname.partition(".")[0]
    for module in modules_beside(touchpoint.module, target.library) if outer else ():
        if module.name != touchpoint.module and isinstance(module.members.get(outer), (ClassFacts, FunctionFacts)):
            found = Resolver(target.library).find(f"{module.name}:{touchpoint.qualname}")
            if found.status == FOUND:
                return f"{module.name}:{touchpoint.qualname}"
    return ""


def _renamed(after: Judgement, target: Release, old: Found) -> list[Change]:
    """That it has another name in the same module now: a guess, by the name or by what it takes."""
    touchpoint = after.touchpoint
    for text in helpful(after, None, target.library, old.signature):
        match = re.fullmatch(r'verb=Moved\("([^:"]+):([^"]+)"\)', text)
        if match and match[1] == touchpoint.module:
            return [Change("renamed", touchpoint.qualname, f"-> {match[2]}, a guess")]
    return []


def _namesakes(target: Release, new_home: str, old: Found) -> Iterator[Change]:
    """Methods of the new module that bear the same name and take something else: the way vLLM itself may go now."""
    module, _, name = new_home.partition(":")
    try:
        facts = target.library.module(module)
    except SourceError:
        return  # told where the sources are at hand
    wanted = set(old.signature.names) if old.signature is not None else set()
    for owner, member in facts.members.items() if facts is not None and wanted else ():
        method = member.members.get(name) if isinstance(member, ClassFacts) else None
        if isinstance(method, FunctionFacts):
            takes = set(parsed(method.parameters)[0].names[1:])
            more, less = ", ".join(sorted(takes - wanted)), ", ".join(sorted(wanted - takes))
            if more or less:
                detail = f"takes {more or 'nothing else'}{f', not {less}' if less else ''}"
                yield Change("namesake differs", f"{module}:{owner}.{name}", detail)


def companions(target: Release, baseline: Release, findings: Iterable[Finding]) -> list[str]:
    """Notes: which other names went the same way as those that moved."""
    ways: dict[tuple[str, str], None] = {}
    for finding in findings:
        for change in finding.changes:
            if change.kind == "moved":
                old, _, new = change.detail.partition(" -> ")
                ways[(old, new.partition(":")[0])] = None
    notes = []
    for old_module, new_module in ways:
        try:
            names = _gone_from(baseline.library.module(old_module), target.library.module(old_module))
            there = _defined(target.library.module(new_module))
        except SourceError as error:
            notes.append(f"what else moved from {old_module} to {new_module} is not known: {error.found}")
            continue
        together = [name for name in names if name in there]
        together.sort(key=lambda name: name.startswith("_"))
        if together:
            notes.append(f"moved from {old_module} to {new_module}: {', '.join(together)}")
    return notes


def _gone_from(old: ModuleFacts | None, new: ModuleFacts | None) -> list[str]:
    left = set(new.members) if new is not None else set()
    return [name for name in _defined(old) if name not in left]


def _defined(module: ModuleFacts | None) -> list[str]:
    members = module.members.items() if module is not None else ()
    return [name for name, member in members if isinstance(member, (ClassFacts, FunctionFacts))]


def ready_rows(after: Judgement, speculators: str, reading: Reading) -> list[str]:
    """Rows of the table that would mend it, but whose range leaves this release out."""
    touchpoint = after.touchpoint
    chosen = list(select(Stack(reading.release, speculators)).adaptations)
    found = []
    for row in ADAPTATIONS:
        if row.touchpoint != touchpoint.key or row in chosen or not within(speculators, row.speculators):
            continue
        if judge(touchpoint, speculators, [*chosen, row], reading.at).verdict is Verdict.HOLDS:
            found.append(f'row "{row.name}" makes it fit; widen its range (now {row.range})')
    return found
