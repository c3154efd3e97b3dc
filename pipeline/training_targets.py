"""What a draft is taught: the verifier's own logits, whatever norm and head it has.

speculators puts a Llama's norm and a bare head behind the stored last states. Other families add 1 to the weights of
their norm (Gemma, Qwen3-Next, Qwen3.5), subtract a mean (Cohere), or scale or cap their logits (Gemma 2, Cohere,
Granite, MiniCPM): the draft would learn, without an error, from a verifier that does not exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from pipeline.final_norm import FinalNorm
from pipeline.model_info import ModelInfo
from shims.errors import SpecshimError, UsageError

_SAME = 1e-4  # relative; of one computation in float32, done twice
_PROBES = 16
_CAPS = ("final_logit_softcapping", "logits_soft_cap")
# Configuration entry: (families that have it, the factor of the logits). Sources: the models' `forward` in
# transformers; for MiniCPM `scale_width` in
# https://github.com/vllm-project/vllm/blob/v0.25.1/vllm/model_executor/models/minicpm.py
_FACTORS: dict[str, tuple[tuple[str, ...], Callable[[float, dict[str, Any]], float]]] = {
    "logit_scale": (("cohere", "aya"), lambda value, config: value),
    "logits_scaling": (("granite",), lambda value, config: 1 / value),
    "lm_head_multiplier": (("falcon_h1",), lambda value, config: value),
    "dim_model_base": (("minicpm",), lambda value, config: value / config["hidden_size"]),
}


def teach_as_verifier(draft: Any, model: ModelInfo, trust_remote_code: bool) -> list[str]:
    """Give a draft's targets the verifier's own norm and logits, where speculators' are others.

    Args:
        draft: speculators' model, float32 on the CPU, with the verifier's tensors.

    Returns:
        What was adapted, or could not be compared, a line each.

    Raises:
        UsageError: the configuration scales logits in a way that is not known here.
    """
    return [*_own_norm(draft, model, trust_remote_code), *_own_logits(draft, model)]


def _own_norm(draft: Any, model: ModelInfo, trust_remote_code: bool) -> list[str]:
    import torch

    try:
        own = FinalNorm(model, trust_remote_code).module
    except (SpecshimError, ValueError, ImportError, OSError) as error:
        reason = error.found if isinstance(error, SpecshimError) else str(error).strip().split("\n")[0]
        return [f"the verifier's final norm was not compared, and is taken for an RMS norm as Llama's: {reason}"]
    probe = torch.randn(_PROBES, model.hidden_size, generator=torch.Generator().manual_seed(0)) + 0.5
    with torch.no_grad():
        wanted, got = own(probe), draft.verifier_norm(probe)
    if (got - wanted).norm() <= _SAME * wanted.norm():
        return []
    # Buffers, so that no checkpoint gets them: they are the verifier's, and read from it each time.
    for name, parameter in list(own.named_parameters(recurse=False)):
        delattr(own, name)
        own.register_buffer(name, parameter.detach(), persistent=False)
    draft.verifier_norm = own
    return [f"the verifier's own {type(own).__name__} before its head, in place of speculators' norm"]


def _own_logits(draft: Any, model: ModelInfo) -> list[str]:
    import torch

    inner = model.config.get("text_config")
    config: dict[str, Any] = {**model.config, **(inner if isinstance(inner, dict) else {})}
    kind = str(config.get("model_type", ""))
    factor = 1.0
    for entry, (families, of) in _FACTORS.items():
        value = config.get(entry)
        if not isinstance(value, (int, float)) or value in (0, 1):
            continue
        if not kind.startswith(families):
            raise UsageError(
                f"--model {model.path}",
                f"a verifier whose logits are known; `{entry}` is, of {', '.join(families)}",
                f"{entry} = {value} in a model of type {kind or '(none)'}",
                "report this architecture: its draft would be taught other logits than the verifier's",
            )
        factor *= of(float(value), config)
    cap = next((float(config[name]) for name in _CAPS if isinstance(config.get(name), (int, float))), math.inf)
    if factor == 1.0 and cap == math.inf:
        return []

    def as_verifier(module: Any, inputs: Any, logits: Any) -> Any:
        scaled = logits * factor
        return scaled if cap == math.inf else cap * torch.tanh(scaled / cap)

    draft.verifier_lm_head.register_forward_hook(as_verifier)
    said = [f"times {factor:.4g}"] if factor != 1.0 else []
    said += [f"capped at {cap:g}"] if cap != math.inf else []
    return [f"the verifier's logits are {' and '.join(said)}, as its config says"]
