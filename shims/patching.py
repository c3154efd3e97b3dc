"""Apply a plan at speculators' seams, and undo it. The only module that imports wrapt.

vLLM's own objects stay as they are for everyone else: adapters stand in the globals and methods of
speculators' two modules. Only what speculators needs while it is *imported* is offered in the
foreign module itself, and a worker's failure text is completed where the worker sends it.

Nothing is patched before the module in question is loaded. A hook never raises, since wrapt drops a
hook that does and the next import would succeed unpatched: what went wrong is kept, and an object
that raises at its first use is left in place.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import wrapt

from shims.adaptations import Adaptation
from shims.contract import Signature, binds, misfits
from shims.errors import DriftError
from shims.planning import Plan, choices
from shims.touchpoints import GENERATOR_MODULE, TOUCHPOINTS, WORKER_MODULE, Touchpoint, by_key, used_by
from shims.verbs import Moved, Provide, Replace, Substitute, Verb, Wrap, adapted, load, reshape

logger = logging.getLogger("specshim")

_ABSENT = object()


@dataclass
class Patch:
    """One changed name: enough to put it back exactly, and to see whether someone changed it since."""

    owner: Any
    name: str
    original: Any
    replacement: Any

    def undo(self) -> bool:
        """Put the original back; False (and nothing done) if the name holds something else by now."""
        if _own(self.owner, self.name) is not self.replacement:
            return False
        if self.original is _ABSENT:
            _delete(self.owner, self.name)
        else:
            _assign(self.owner, self.name, self.original)
        return True


@dataclass
class Receipt:
    """What `apply` did so far; grows as modules are imported."""

    plan: Plan
    patches: list[Patch] = field(default_factory=list)
    applied: dict[str, str] = field(default_factory=dict)  # row name -> how it was confirmed
    drifted: dict[str, str] = field(default_factory=dict)  # touchpoint key -> what does not fit

    def put(self, owner: Any, name: str, replacement: Any) -> None:
        self.patches.append(Patch(owner, name, _own(owner, name), replacement))
        _assign(owner, name, replacement)


# `sys.modules` is changed by key, everything else by attribute.
def _own(owner: Any, name: str) -> Any:
    return owner.get(name, _ABSENT) if isinstance(owner, dict) else vars(owner).get(name, _ABSENT)


def _assign(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)


def _delete(owner: Any, name: str) -> None:
    if isinstance(owner, dict):
        del owner[name]
    else:
        delattr(owner, name)


_active: Receipt | None = None
_hooked: set[str] = set()


def active() -> Receipt | None:
    """The receipt in force, or None where no shims are installed."""
    return _active


def apply(plan: Plan) -> Receipt:
    """Register the hooks of `plan`; modules that are loaded already are patched at once."""
    global _active
    _active = receipt = Receipt(plan)
    for module in sorted(_modules(plan)):
        if module not in _hooked:
            _hooked.add(module)
            wrapt.register_post_import_hook(_dispatch, module)
        elif module in sys.modules:
            _dispatch(sys.modules[module])
    return receipt


def undo(receipt: Receipt) -> list[str]:
    """Put back everything `receipt` changed, last first.

    Returns:
        Names that were left alone because someone else has changed them since.
    """
    global _active
    _active = None
    kept = [f"{_label(patch.owner)}.{patch.name}" for patch in reversed(receipt.patches) if not patch.undo()]
    receipt.patches.clear()
    return kept


def _label(owner: Any) -> str:
    return "sys.modules" if isinstance(owner, dict) else str(getattr(owner, "__name__", owner))


def _modules(plan: Plan) -> set[str]:
    """The modules whose import the plan waits for."""
    if plan.state == "unsupported":
        return set()
    modules = {_anchor(t.module, plan) for t in _imported(plan)}
    # Without vLLM there is no generator to patch, only speculators to be imported.
    return modules if plan.state == "absent" else modules | {GENERATOR_MODULE, WORKER_MODULE}


def _imported(plan: Plan) -> list[Touchpoint]:
    """Foreign names that speculators needs while it is imported, and those adapted in place."""
    wanted = []
    for t in used_by(plan.stack.speculators) if plan.stack.speculators else ():
        by_name = t.seam.startswith("global:") and t.package == "vllm" and t.kind == "call"
        if by_name or (t.seam == "import" and (t.package == "vllm" or plan.rows_for(t.key))):
            wanted.append(t)
    return wanted


def _anchor(module: str, plan: Plan) -> str:
    """The module after whose import `module` is looked at: its parent, where it is to be provided."""
    provided = {by_key()[row.touchpoint].home for row in plan.adaptations if isinstance(row.verb, Provide)}
    return module.rpartition(".")[0] if module in provided else module


def _dispatch(module: Any) -> None:
    receipt = _active
    if receipt is None:
        return
    name = module.__name__
    try:
        if name == GENERATOR_MODULE:
            _patch_generator(receipt, module)
        elif name == WORKER_MODULE:
            _patch_methods(receipt, module.HiddenStatesWorkerExtension, "worker.")
        else:
            _patch_foreign(receipt, module)
    except Exception as error:
        # See the module's docstring: never out of a hook. The state becomes `drifted`.
        logger.exception("specshim could not adapt %s", name)
        receipt.drifted[name] = f"{type(error).__name__}: {error}"
        _block(receipt, module)


def _block(receipt: Receipt, module: Any) -> None:
    """Let nothing run on a half-patched generator."""
    if module.__name__ == GENERATOR_MODULE:
        receipt.put(module, "VllmHiddenStatesGenerator", _refusal(module.__name__, receipt.drifted[module.__name__]))


def _refusal(what: str, found: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise _drift(what, found)

    return refuse


def _drift(what: str, found: str) -> DriftError:
    plan = _active.plan if _active else None
    return DriftError(
        what,
        f"the shape that the shims know for {plan.stack if plan else 'this stack'}",
        found,
        "use a vLLM release from `specshim plan` that is known, or add a row to shims/adaptations.py "
        "(`nox -s contracts` prints a candidate)",
    )


# --- speculators' own modules -------------------------------------------------------------------


def _patch_generator(receipt: Receipt, module: Any) -> None:
    for name, touchpoints in _globals(receipt.plan).items():
        original = getattr(module, name)
        rows = [row for t in touchpoints for row in receipt.plan.rows_for(t.key)]
        stand_in = next((row for row in rows if isinstance(row.verb, Substitute)), None)
        if stand_in is not None:
            receipt.put(module, name, load(stand_in.verb.reference or "")(original))
            receipt.applied[stand_in.name] = "substituted"
        elif touchpoints[0].kind == "call":
            _patch_call(receipt, module, name, touchpoints[0], original)
        elif rows:
            receipt.put(module, name, wrapt.FunctionWrapper(original, adapted([r.verb for r in rows])))
            receipt.applied.update({row.name: "wrapped" for row in rows})
    _patch_methods(receipt, module.VllmHiddenStatesGenerator, "generator.")
    _refuse_if_drifted(receipt, module.VllmHiddenStatesGenerator)


def _globals(plan: Plan) -> dict[str, list[Touchpoint]]:
    found: dict[str, list[Touchpoint]] = {}
    for t in used_by(plan.stack.speculators):
        if t.seam.startswith("global:"):
            found.setdefault(t.seam.partition(":")[2], []).append(t)
    return found


def _patch_call(receipt: Receipt, module: Any, name: str, touchpoint: Touchpoint, target: Any) -> None:
    """Stand an adapter in for one callable global, confirmed by the callable's live signature."""
    verbs = _confirmed(receipt, touchpoint, target)
    if verbs is None:
        receipt.put(module, name, _refusal(touchpoint.home, receipt.drifted[touchpoint.key]))
        return
    methods = _executor_methods(receipt, target) if touchpoint.key == "MultiprocExecutor" else {}
    receipt.put(module, name, wrapt.FunctionWrapper(target, _with_overrides(touchpoint.key, verbs, methods)))


def _with_overrides(key: str, verbs: list[Verb], methods: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    from shims.behaviours.executor import AdaptedExecutor
    from shims.behaviours.overrides import chosen

    call = adapted(verbs, lambda: chosen(key))

    def adapter(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = call(wrapped, instance, args, kwargs)
        return AdaptedExecutor(result, methods) if methods else result

    return adapter


def _executor_methods(receipt: Receipt, executor: Any) -> dict[str, Callable[..., Any]]:
    """Adapters for the executor's methods; a method that does not fit becomes one that refuses."""
    methods: dict[str, Callable[..., Any]] = {}
    for t in TOUCHPOINTS:
        if not t.seam.startswith("executor."):
            continue
        name = t.seam.partition(".")[2]
        provided = [row for row in receipt.plan.rows_for(t.key) if isinstance(row.verb, Provide)]
        if provided and not hasattr(executor, name):
            methods[name] = load(provided[0].verb.reference or "")
            receipt.applied[provided[0].name] = "provided"
            continue
        verbs = _confirmed(receipt, t, getattr(executor, name, None))
        if verbs is None:
            methods[name] = _refusal(t.home, receipt.drifted[t.key])
        elif verbs:
            methods[name] = adapted(verbs)
    return methods


def _confirmed(receipt: Receipt, touchpoint: Touchpoint, target: Any) -> list[Verb] | None:
    """The verbs for this touchpoint, if the live signature agrees with them; None if it has drifted.

    On a build that is not an exact release (a nightly, a commit) the code may be ahead of its version:
    there the rows of neighbouring releases are tried too, and the one whose call binds is taken.
    """
    plan, call = receipt.plan, touchpoint.call_for(receipt.plan.stack.speculators)
    rows = [row for row in plan.rows_for(touchpoint.key) if not isinstance(row.verb, (Moved, Provide))]
    signature = Signature.of(target) if target is not None else None
    if target is None:
        receipt.drifted[touchpoint.key] = f"{touchpoint.home} does not exist"
        return None
    if call is None or signature is None:  # not called by this release, or built at run time: nothing to compare
        receipt.applied.update({row.name: "selected by version" for row in rows})
        return [row.verb for row in rows]
    for choice in choices(plan, touchpoint.key):
        if binds(signature, reshape(call, [row.verb for row in choice])):
            how = "confirmed by signature" if choice == rows else "chosen by signature"
            receipt.applied.update({row.name: how for row in choice})
            return [row.verb for row in choice]
    shape = reshape(call, [row.verb for row in rows])
    receipt.drifted[touchpoint.key] = f"{touchpoint.home}{signature}: {', '.join(misfits(signature, shape))}"
    return None


def _patch_methods(receipt: Receipt, owner: Any, prefix: str) -> None:
    for t in TOUCHPOINTS:
        if not t.seam.startswith(prefix):
            continue
        name = t.seam.removeprefix(prefix)
        for row in receipt.plan.rows_for(t.key):
            original = getattr(owner, name)
            if isinstance(row.verb, Replace):
                receipt.put(owner, name, load(row.verb.function))
            elif isinstance(row.verb, Wrap):
                receipt.put(owner, name, wrapt.FunctionWrapper(original, load(row.verb.function)))
            receipt.applied[row.name] = "in place"


def _refuse_if_drifted(receipt: Receipt, generator: Any) -> None:
    """A generator with a drifted touchpoint refuses when it is built, before a model is loaded."""
    inner = generator.__init__

    def check(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for key, found in receipt.drifted.items():
            raise _drift(by_key()[key].home if key in by_key() else key, found)
        if receipt.plan.state == "unverified":
            logger.warning("specshim: %s", receipt.plan.note)
        return wrapped(*args, **kwargs)

    receipt.put(generator, "__init__", wrapt.FunctionWrapper(inner, check))


# --- foreign modules ----------------------------------------------------------------------------


def _patch_foreign(receipt: Receipt, module: Any) -> None:
    """Offer in `module` what speculators imports from it and it does not have."""
    name = module.__name__
    missing: dict[str, Callable[[], Any]] = {}
    for t in _imported(receipt.plan):
        rows = receipt.plan.rows_for(t.key)
        if t.kind == "module":
            if t.module.rpartition(".")[0] == name:
                _provide_module(receipt, module, t, rows)
        elif t.module == name:
            _patch_name(receipt, module, t, rows, missing)
    if missing:
        receipt.put(module, "__getattr__", _lookup(module, missing))


def _provide_module(receipt: Receipt, parent: Any, touchpoint: Touchpoint, rows: list[Adaptation]) -> None:
    for row in rows:
        if importlib.util.find_spec(touchpoint.module) is None:
            provided = load(row.verb.reference or "")()
            receipt.put(sys.modules, touchpoint.module, provided)
            receipt.put(parent, touchpoint.module.rpartition(".")[2], provided)
            receipt.applied[row.name] = "provided"


def _patch_name(
    receipt: Receipt,
    module: Any,
    touchpoint: Touchpoint,
    rows: list[Adaptation],
    missing: dict[str, Callable[[], Any]],
) -> None:
    owner, _, name = touchpoint.qualname.rpartition(".")
    holder = getattr(module, owner) if owner else module
    for row in rows:
        if isinstance(row.verb, Wrap) and touchpoint.seam == "import":
            receipt.put(holder, name, wrapt.FunctionWrapper(getattr(holder, name), load(row.verb.function)))
            receipt.applied[row.name] = "in place"
        elif isinstance(row.verb, Provide) and not hasattr(holder, name):
            receipt.put(holder, name, load(row.verb.function)())
            receipt.applied[row.name] = "provided"
        elif isinstance(row.verb, Moved) and not hasattr(holder, name):
            missing[name] = _moved(row.verb.home)
            receipt.applied[row.name] = "offered at its old home"
    if not owner and name not in missing and not hasattr(module, name):
        receipt.drifted[touchpoint.key] = f"{touchpoint.home} does not exist"
        missing[name] = _refusal(touchpoint.home, receipt.drifted[touchpoint.key])


def _moved(home: str) -> Callable[[], Any]:
    return lambda: load(home)


def _lookup(module: Any, missing: dict[str, Callable[[], Any]]) -> Callable[[str], Any]:
    """A module `__getattr__` (PEP 562): looked up late, since the new home may import the old one."""
    before = vars(module).get("__getattr__")

    def lookup(name: str) -> Any:
        if name in missing:
            return missing[name]()
        if before is not None:
            return before(name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    return lookup
