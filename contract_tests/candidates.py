"""A row that might mend a broken touchpoint, found by searching the release. A guess, and marked as one."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from contract_tests.judge import Judgement
from contract_tests.readers.facts import ClassFacts, FunctionFacts, Member, ModuleFacts
from contract_tests.readers.found import ABSENT, FOUND, parsed
from contract_tests.readers.library import Library
from contract_tests.readers.resolve import Resolver
from contract_tests.sources.release import ReleaseTree
from shims.adaptations import ADAPTATIONS
from shims.contract import Call, Signature
from shims.verbs import reshape

# Files beside the old home that are read in search of a name.
_NEIGHBOURS = 60
_ALIKE = 0.6
# Of the names that either of two signatures has, the share that both must have; and how many tell anything at all.
_SAME_SHARE = 0.75
_TELLING = 2


def candidate_rows(
    judgement: Judgement, release: str, speculators: str, library: Library, before: Signature | None = None
) -> list[str]:
    """Rows for `shims/adaptations.py`, as code, best first; empty where nothing was found.

    Args:
        judgement: a broken touchpoint.
        release: vLLM release on which it is broken.
        speculators: release that uses it.
        library: the vLLM release's modules.
        before: what it took when it was last there; what takes the same now is a candidate, whatever its name.
    """
    start = f'Adaptation(name="{_slug(judgement)}", touchpoint="{judgement.touchpoint.key}"'
    return [
        f'{start}, {change}, vllm=">={release}", …)'
        for change in dict.fromkeys(helpful(judgement, speculators, library, before))
    ]


def _slug(judgement: Judgement) -> str:
    return judgement.touchpoint.key.strip("_").replace("_", "-").replace(".", "-").replace(" ", "-").lower()


def helpful(
    judgement: Judgement, speculators: str | None, library: Library, before: Signature | None = None
) -> Iterator[str]:
    """What might mend a broken use, each as `verb=…`, the likeliest first.

    Raises:
        SourceError: a module that is searched cannot be fetched.
    """
    if judgement.found.status == ABSENT:
        yield from _elsewhere(judgement, library)
        yield from _alike_in_shape(judgement, library, before)
        return
    call = judgement.touchpoint.call_for(speculators)
    signature = judgement.found.signature
    if call is None or signature is None:
        return
    call = reshape(call, [row.verb for row in ADAPTATIONS if row.name in judgement.rows])
    unknown = [name for name in call.keywords if name not in signature.names and not signature.takes_any_keyword]
    missing = [p.name for p in signature.parameters if p.required and p.name in _unfilled(signature.names, call)]
    for name in unknown:
        free = [n for n in signature.names if n not in call.keywords]
        # What is required and not given is the likelier new name.
        alike = difflib.get_close_matches(name, missing, 1, _ALIKE) or difflib.get_close_matches(name, free, 1, _ALIKE)
        renamed = alike[0] if alike else missing[0] if len(unknown) == len(missing) == 1 else ""
        if renamed:
            yield f'verb=Rename("{name}", "{renamed}")'
        yield f'verb=Drop("{name}")'
    for name in missing:
        yield f'verb=Fill("{name}", …)'


def _unfilled(names: tuple[str, ...], call: Call) -> set[str]:
    return set(names[call.positional :]) - set(call.keywords)


def _elsewhere(judgement: Judgement, library: Library) -> Iterator[str]:
    """The same name in another module, then similar names in the same place."""
    touchpoint = judgement.touchpoint
    outer, _, inner = touchpoint.qualname.partition(".")
    if not outer:
        yield 'verb=Provide("…")'
        return
    for module in modules_beside(touchpoint.module, library):
        there = f"{module.name}:{touchpoint.qualname}"
        defined = isinstance(module.members.get(outer), (ClassFacts, FunctionFacts))
        if module.name != touchpoint.module and defined and Resolver(library).find(there).status == FOUND:
            yield f'verb=Moved("{module.name}:{touchpoint.qualname}")'
    home = library.module(touchpoint.module)
    if home is None or home.problem:
        return
    owner: Member | ModuleFacts | None = home.members.get(outer) if inner else home
    if isinstance(owner, (ClassFacts, ModuleFacts)):
        place = f"{outer}." if inner else ""
        names = [name for name, member in owner.members.items() if isinstance(member, (ClassFacts, FunctionFacts))]
        for name in difflib.get_close_matches(inner or outer, names, 2, _ALIKE):
            yield f'verb=Moved("{home.name}:{place}{name}")'


def _alike_in_shape(judgement: Judgement, library: Library, before: Signature | None) -> Iterator[str]:
    """Functions beside the old home that take what the lost one took: it may have got a name that is quite another."""
    touchpoint = judgement.touchpoint
    wanted = set(before.names) if before is not None else set()
    if len(wanted) < _TELLING or "." in touchpoint.qualname:
        return
    for module in modules_beside(touchpoint.module, library):
        for name, member in module.members.items():
            if isinstance(member, FunctionFacts):
                takes = set(parsed(member.parameters)[0].names)
                if len(takes & wanted) >= _SAME_SHARE * len(takes | wanted):
                    yield f'verb=Moved("{module.name}:{name}")'


def modules_beside(home: str, library: Library) -> list[ModuleFacts]:
    """The modules read so far, and those beside and below a home.

    Raises:
        SourceError: one of them cannot be fetched.
    """
    folder = home.replace(".", "/")
    places = (f"{folder.rpartition('/')[0]}/", f"{folder}/")
    beside = [
        path
        for path in sorted(library.tree.paths())
        if path.endswith(".py") and any(path.startswith(p) and "/" not in path[len(p) :] for p in places)
    ]
    beside = beside[:_NEIGHBOURS]
    if isinstance(library.tree, ReleaseTree):
        library.tree.prefetch(beside)
    for path in beside:
        library.module(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    return list(library.loaded().values())
