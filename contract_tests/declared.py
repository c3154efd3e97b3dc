"""Is every use in a consumer's source declared as a touchpoint, with the shape in which it is called?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

from contract_tests.sources import SourceTree
from contract_tests.uses import UNKNOWN, Use, uses_in
from shims.contract import Call
from shims.touchpoints import TOUCHPOINTS, Touchpoint, used_by

# The files that run inside of vLLM, or drive it: there, an attribute of an object whose class cannot be told
# counts as well.
ENGINE_FILES = ("data_generation/vllm_hidden_states_generator.py", "data_generation/custom_worker.py")
# What of torch matters here: devices and their memory.
_TORCH = ("torch.cuda", "torch.accelerator", "torch.get_device_module")
_TORCH_FILES = (*ENGINE_FILES, "utils/util.py")

# Attributes in ENGINE_FILES that are Python's, torch's, a tokenizer's or a transformers config's.
_OTHERS_ATTRIBUTES = frozenset(
    (
        *("append", "fromkeys", "get", "items", "keys", "startswith", "__name__"),
        *("Tensor", "as_tensor", "cat", "clone", "cpu", "cuda", "long", "tolist"),
        *("debug", "getLogger", "info", "warning", "MethodType"),
        *("eos_token_id", "from_pretrained", "num_hidden_layers", "text_config"),
        # Set by speculators on the model that it patches, and its method.
        *("_extension", "_layer_ids", "_store_captured_states", "forward"),
    )
)


def uses_of(tree: SourceTree, root: str = "speculators") -> list[Use]:
    """What one release of a consumer uses of vLLM, transformers and torch's devices.

    Args:
        tree: the release's files.
        root: the consumer's import package.

    Raises:
        SourceError: a file cannot be fetched.
    """
    found: list[Use] = []
    for path in sorted(p for p in tree.paths() if p.startswith(f"{root}/") and p.endswith(".py")):
        file = str(PurePosixPath(path).relative_to(root))
        code = tree.read(path).decode("utf-8")
        found += (use for use in uses_in(code, file, ("vllm", "transformers", "torch")) if _matters(use))
    return found


def _matters(use: Use) -> bool:
    if use.name.startswith(f"{UNKNOWN}."):
        return use.file in ENGINE_FILES and use.name.partition(".")[2] not in _OTHERS_ATTRIBUTES
    if use.name.startswith("transformers"):
        # Imports: what is then done with the objects is Python's business, or the pipeline's.
        return use.call is None
    if use.name.startswith("torch"):
        return use.file in _TORCH_FILES and use.name.startswith(_TORCH)
    return True


def undeclared(uses: Iterable[Use], speculators: str, touchpoints: Iterable[Touchpoint] = TOUCHPOINTS) -> Iterator[str]:
    """The uses that no touchpoint declares, one line each with what is missing.

    Args:
        uses: of one speculators release.
        speculators: which one.
        touchpoints: the table.
    """
    own = used_by(speculators, touchpoints)
    names = {t.home.replace(":", ".") for t in own}
    attributes = {t.home.rpartition(".")[2].rpartition(":")[2] for t in own}
    calls: dict[str, list[Call]] = {}
    for touchpoint in own:
        call = touchpoint.call_for(speculators)
        if call is not None:
            calls.setdefault(touchpoint.home.replace(":", "."), []).append(call)
    for use in uses:
        if use.name.startswith(f"{UNKNOWN}."):
            if use.name.partition(".")[2] not in attributes:
                yield f"{use}: no touchpoint ends in this attribute"
        elif use.name.startswith(("transformers.", "torch.")):
            if not any(use.name == name or use.name.startswith(f"{name}.") for name in names) and not _prefix(
                use, names
            ):
                yield f"{use}: not declared"
        elif use.name not in names:
            yield f"{use}: not declared"
        elif use.call is not None and not any(_covers(call, use.call) for call in calls.get(use.name, [])):
            yield f"{use}: declared as {' or '.join(map(str, calls.get(use.name, []))) or 'a name, not as a call'}"


def _prefix(use: Use, names: set[str]) -> bool:
    """Whether the use is only the way to a declared name, as `torch.cuda` is to `torch.cuda.empty_cache`."""
    return any(name.startswith(f"{use.name}.") for name in names)


def _covers(declared: Call, made: Call) -> bool:
    """Whether a call as declared gives everything that the call made gives."""
    return declared.positional == made.positional and set(made.keywords) <= set(declared.keywords)
