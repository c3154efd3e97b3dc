"""DATA: what differs between vLLM releases in how an EAGLE-3 draft is served.

Each row was read in the release's own sources; those marked so were also seen in a run. The test over all releases,
``contract_tests/test_serving_facts.py``, takes the functions named here from the sources and compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shims.versions import within

KEY = "eagle_aux_hidden_state_layer_ids"
"""Where a draft's config names the layers that feed it, in native ids."""
NESTED = "eagle_config"
"""A dictionary of an older kind of config, which may hold that key too."""
NESTED_V2 = "layer_ids"
"""The key in that dictionary which runner V2 reads."""
V1, V2 = "V1", "V2"
"""The two model runners. On a CPU there is V1 alone."""
_SOURCES = "https://github.com/vllm-project/vllm/blob"
_RUNNER = "vllm/v1/worker/gpu_model_runner.py"
_RUNNER_V2 = "vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py"
_SPECULATORS = "vllm/transformers_utils/configs/speculators/algos.py"


@dataclass(frozen=True)
class Fact:
    """One thing that holds in a range of vLLM releases."""

    name: str
    vllm: str
    """The range; "" is every release known."""
    what: str
    link: str
    seen: str = "read"
    """``read`` in the sources, or ``run`` as well."""


def _link(release: str, path: str) -> str:
    return f"{_SOURCES}/v{release}/{path}"


FACTS: tuple[Fact, ...] = (
    Fact("ids-in-config", ">=0.11.1", f"runner V1 reads `{KEY}`", _link("0.11.1", _RUNNER), "run"),
    Fact("runner-v2", ">=0.17", f"there is a runner V2; it reads `{KEY}`", _link("0.17.0", _RUNNER_V2)),
    Fact("nested-ids-v1", ">=0.22", f"runner V1 reads `{NESTED}.{KEY}` as well", _link("0.22.0", _RUNNER)),
    Fact("nested-layer-ids-v2", ">=0.27", f"runner V2 reads `{NESTED}.layer_ids`", _link("0.27.0", _RUNNER_V2)),
    Fact(
        "last-layer",
        ">=0.18",
        "the state after the last of n layers may be asked for, as id n",
        _link("0.18.0", "vllm/model_executor/models/interfaces.py"),
    ),
    Fact(
        "last-layer-latent",
        ">=0.25",
        "the same for DeepSeek and Kimi models, which leave id n out before",
        _link("0.25.0", "vllm/model_executor/models/deepseek_v2.py"),
    ),
    Fact(
        "norm-before-fc", ">=0.19", "`norm_before_fc` of a speculators config is obeyed", _link("0.19.0", _SPECULATORS)
    ),
    Fact("fc-norm", ">=0.25", "`fc_norm` and `norm_output` of it are, too", _link("0.25.0", _SPECULATORS)),
    Fact("qwen3-draft-layers", ">=0.24", "draft layers may be of the kind qwen3", _link("0.24.0", _SPECULATORS)),
    Fact(
        "cpu-speculation",
        ">=0.21",
        "the CPU backend runs greedy speculative decoding; 0.20 tries, and its rejection kernel does not take its call",
        _link("0.21.0", "vllm/utils/cpu_triton_utils.py"),
        "run",
    ),
)

_ALWAYS = ("llama", "qwen", "minicpm", "gpt_oss")
_LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25")
_FROM_016 = (*_ALWAYS, "hunyuan_vl", "hunyuan_v1_dense", "afmoe")
_FROM_017 = (*_FROM_016, "nemotron_h")
_FROM_018 = (*_FROM_017, *_LATENT)

VERIFIERS: tuple[tuple[str, tuple[str, ...] | None], ...] = (
    ("<0.16", _ALWAYS),
    (">=0.16,<0.17", _FROM_016),
    (">=0.17,<0.18", _FROM_017),
    (">=0.18,<0.19.1", _FROM_018),
    (">=0.19.1,<0.21", (*_FROM_018, "minimax_m2", "gemma4")),
    (">=0.21,<0.22", (*_FROM_018, "minimax_m2", "gemma4", "laguna")),
    (">=0.22", None),
)
"""Parts of the verifier's ``model_type`` that a release takes for EAGLE-3; None: it asks the model class instead."""

OLDEST = "0.11.0"
AUXILIARY_STATES = 3
"""Auxiliary states that a draft's input layer is made for, unless its config says otherwise."""


def holds(name: str, release: str) -> bool:
    """Whether a fact holds in a release.

    Raises:
        KeyError: there is no such fact.
    """
    return within(release, {fact.name: fact.vllm for fact in FACTS}[name])


def facts_of(release: str) -> list[Fact]:
    """All that hold in a release."""
    return [fact for fact in FACTS if within(release, fact.vllm)]


def default_layers(num_layers: int) -> tuple[int, ...]:
    """The native ids that every release takes where it reads none, for a verifier of so many layers."""
    return (2, num_layers // 2, num_layers - 3)


def verifiers_of(release: str) -> Sequence[str] | None:
    """Parts of model types that the release takes; None where it asks the model class."""
    return next(parts for range_, parts in VERIFIERS if within(release, range_))
