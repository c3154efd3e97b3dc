"""What a release that is not installed would do with a draft, from the facts about it."""

from __future__ import annotations

from typing import Any

from pipeline.model_info import ModelInfo
from pipeline.serving import facts
from pipeline.serving.draft_folder import DraftFolder
from pipeline.serving.served import FROM_FACTS, Layers, Served
from shims.errors import UsageError
from shims.versions import base_release, within

_METHOD = "eagle3"
_FLAGS = (("norm_before_fc", "norm-before-fc"), ("fc_norm", "fc-norm"), ("norm_output", "fc-norm"))


def expect(draft: DraftFolder, verifier: ModelInfo, release: str) -> Served:
    """What vLLM ``release`` does with the draft.

    Raises:
        UsageError: the release is older than any that is known here.
    """
    if not within(release, f">={facts.OLDEST}"):
        raise UsageError("--vllm", f"a release from {facts.OLDEST} on", release, "name a newer one")
    release = base_release(release)
    runners = [facts.V1] + ([facts.V2] if facts.holds("runner-v2", release) else [])
    default = Layers(facts.default_layers(verifier.num_layers), "defaults")
    layers = {}
    for runner in runners:
        ids = ids_read(draft, release, runner)
        layers[runner] = Layers(ids, "config") if ids else default
    return Served(
        release=release,
        known_by=FROM_FACTS,
        layers=layers,
        method=draft.method or _METHOD,
        speculative_tokens=draft.speculative_tokens,
        verifier=draft.verifier,
        draft_vocab_size=draft.draft_vocab_size,
        norm_before_residual=_norm_before_residual(draft),
        refusal=_refusal(draft, verifier, release),
        notes=tuple(_notes(release)),
    )


def ids_read(draft: DraftFolder, release: str, runner: str) -> tuple[int, ...] | None:
    """The ids that a runner of this release finds in the draft's config; None where it finds none.

    A speculators config is translated before the runner sees it, and only the top-level key survives that.
    """
    if not facts.holds("ids-in-config", release):
        return None
    if draft.top_level_ids:
        return draft.top_level_ids
    if draft.in_speculators_format:
        return None
    if runner == facts.V1 and facts.holds("nested-ids-v1", release):
        return draft.nested_ids(facts.KEY)
    if runner == facts.V2 and facts.holds("nested-layer-ids-v2", release):
        return draft.nested_ids(facts.NESTED_V2)
    return None


def _refusal(draft: DraftFolder, verifier: ModelInfo, release: str) -> str | None:
    parts = facts.verifiers_of(release)
    kind = str(_text_config(verifier).get("model_type", ""))
    if parts is not None and not any(part in kind for part in parts):
        return f"a verifier of type {kind!r}: it takes {', '.join(parts)}"
    if draft.in_speculators_format:
        layer_kind = str(draft.layer_config.get("model_type", "llama"))
        kinds = ("llama", "qwen3") if facts.holds("qwen3-draft-layers", release) else ("llama",)
        if layer_kind not in kinds:
            return f"draft layers of type {layer_kind!r}: it serves {' and '.join(kinds)}"
        for flag, fact in _FLAGS:
            if draft.config.get(flag) and not facts.holds(fact, release):
                return f"`{flag}` of the draft, which it does not know and leaves out"
    return None


def unreachable(ids: tuple[int, ...], verifier: ModelInfo, release: str) -> str | None:
    """Why a verifier in this release hands out no state for one of the ids; None if it has them all."""
    last = verifier.num_layers
    outside = [i for i in ids if not 0 <= i <= last]
    if outside:
        return f"id {outside[0]} of a verifier with {last} layers"
    if last in ids:
        latent = "kv_lora_rank" in _text_config(verifier)
        fact = "last-layer-latent" if latent else "last-layer"
        if not facts.holds(fact, release):
            return f"id {last}, the state after the last layer, which this release leaves out for this verifier"
    return None


def _norm_before_residual(draft: DraftFolder) -> bool | None:
    if not draft.in_speculators_format:
        return None
    return bool(draft.config.get("norm_before_residual", True))


def _text_config(verifier: ModelInfo) -> dict[str, Any]:
    inner = verifier.config.get("text_config")
    return inner if isinstance(inner, dict) else verifier.config


def _notes(release: str) -> list[str]:
    notes = []
    if not facts.holds("ids-in-config", release):
        notes.append("it ignores the layer ids of a draft and always takes the verifier's defaults")
    if not facts.holds("cpu-speculation", release):
        notes.append("its CPU backend cannot run speculative decoding (from 0.21 on it can)")
    return notes
