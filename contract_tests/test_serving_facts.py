"""The facts about serving a draft, against the releases' own functions: taken from the sources and run."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from contract_tests.sources import Settings, open_release
from pipeline.serving import facts
from pipeline.serving.draft_folder import DraftFolder
from pipeline.serving.expected import ids_read
from shims.releases import known

_RUNNERS = {
    facts.V1: ("vllm/v1/worker/gpu_model_runner.py", "_get_eagle3_aux_layers_from_config"),
    facts.V2: ("vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py", "get_eagle3_aux_layers_from_config"),
}
_SPECULATORS = "vllm/transformers_utils/configs/speculators/algos.py"
_CONFIG = "vllm/config/speculative.py"
_MODELS = "vllm/model_executor/models"
_DEFAULTS = (f"{_MODELS}/interfaces.py", f"{_MODELS}/llama.py")
_CPU = "vllm/v1/worker/cpu_model_runner.py"
_CPU_KERNELS, _SAMPLER = "vllm/utils/cpu_triton_utils.py", "vllm/v1/sample/rejection_sampler.py"
_DEEPSEEK = f"{_MODELS}/deepseek_v2.py"
_DRAFT = f"{_MODELS}/llama_eagle3.py"
_PATHS = [path for path, _ in _RUNNERS.values()] + [
    _SPECULATORS,
    _CONFIG,
    *_DEFAULTS,
    _CPU,
    _CPU_KERNELS,
    _SAMPLER,
    _DEEPSEEK,
    _DRAFT,
]
_TOP, _NESTED = [1, 14, 26], [3, 16, 28]
_FLAT: dict[str, dict[str, Any]] = {
    "top": {facts.KEY: _TOP},
    "nested": {"eagle_config": {facts.KEY: _NESTED}},
    "nested, another name": {"eagle_config": {"layer_ids": _NESTED}},
    "both": {facts.KEY: _TOP, "eagle_config": {facts.KEY: _NESTED, "layer_ids": _NESTED}},
    "neither": {"eagle_config": {"use_aux_hidden_state": True}},
}


class _Sources:
    """Files of a release, and single functions out of them."""

    def __init__(self, release: str) -> None:
        self._tree = open_release("vllm", release, Settings.from_environment())
        self._tree.prefetch(_PATHS)
        self._paths = self._tree.paths()

    def text(self, path: str) -> str:
        return self._tree.read(path).decode("utf-8") if path in self._paths else ""

    def function(self, path: str, name: str) -> Callable[..., Any] | None:
        """A function of that name, without its decorators and annotations; None where there is none."""
        for node in ast.walk(ast.parse(self.text(path))):
            if isinstance(node, ast.FunctionDef) and node.name == name and len(node.body) > 1:
                node.decorator_list, node.returns = [], None
                for argument in [*node.args.args, *node.args.kwonlyargs]:
                    argument.annotation = None
                scope: dict[str, Any] = {}
                exec(compile(ast.Module([node], []), f"{path}:{name}", "exec"), scope)
                found: Callable[..., Any] = scope[name]
                return found
        return None

    def save(self) -> None:
        self._tree.save()


def _draft(config: dict[str, Any]) -> DraftFolder:
    return DraftFolder(Path("draft"), {"architectures": ["LlamaForCausalLMEagle3"], **config}, {})


def _read(read: Callable[..., Any], runner: str, config: dict[str, Any]) -> tuple[int, ...] | None:
    speculative = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=SimpleNamespace(**config)))
    found = read(SimpleNamespace(speculative_config=speculative)) if runner == facts.V1 else read(speculative)
    return tuple(found) if found else None


@pytest.mark.network
@pytest.mark.parametrize("release", known())
def test_what_is_said_of_a_release_is_what_its_sources_do(release: str) -> None:
    sources = _Sources(release)
    for runner, (path, name) in _RUNNERS.items():
        read = sources.function(path, name)
        assert (read is not None) == facts.holds("ids-in-config" if runner == facts.V1 else "runner-v2", release)
        for case, config in _FLAT.items():
            if read is not None:
                assert _read(read, runner, config) == ids_read(_draft(config), release, runner), (runner, case)
    _translated(sources, release)
    _defaults(sources)
    assert _cpu_speculates(sources) == facts.holds("cpu-speculation", release)
    latent = "if self.end_layer in self.aux_hidden_state_layers" in sources.text(_DEEPSEEK)
    assert latent == facts.holds("last-layer-latent", release)
    dense = "idx + 1, hidden_states, residual" in " ".join(sources.text(f"{_MODELS}/llama.py").split())
    assert dense == facts.holds("last-layer", release)
    assert _verifiers(sources) == facts.verifiers_of(release)
    assert 'name.replace("d2t", "draft_id_to_target_id")' in sources.text(_DRAFT)
    sources.save()


def _translated(sources: _Sources, release: str) -> None:
    """A speculators config, as the runner gets to see it."""
    update = sources.function(_SPECULATORS, "update_eagle3")
    assert update is not None
    flags = {"norm_before_fc": True, "fc_norm": True, "norm_output": True}
    given = {facts.KEY: _TOP, "eagle_config": {facts.KEY: _NESTED}, "draft_vocab_size": 9, **flags}
    seen: dict[str, Any] = {"model_type": "llama"}
    update(given, seen)
    assert (seen.get(facts.KEY) == _TOP) == facts.holds("ids-in-config", release)
    assert "eagle_config" not in seen
    assert seen["architectures"] == ["Eagle3LlamaForCausalLM"]
    assert ("norm_before_fc" in seen) == facts.holds("norm-before-fc", release)
    assert ("fc_norm" in seen and "norm_output" in seen) == facts.holds("fc-norm", release)
    other: dict[str, Any] = {"model_type": "qwen3"}
    update(given, other)
    assert (other["architectures"] == ["Eagle3Qwen3ForCausalLM"]) == facts.holds("qwen3-draft-layers", release)


def _defaults(sources: _Sources) -> None:
    """Where the class of the common models has them: at first in each model, then in the interface."""
    names = ("get_eagle3_default_aux_hidden_state_layers", "get_eagle3_aux_hidden_state_layers")
    found = [sources.function(path, name) for path in _DEFAULTS for name in names]
    asked = [function for function in found if function is not None]
    values = [function(SimpleNamespace(model=SimpleNamespace(layers=range(61)))) for function in asked]
    # The interface of the older releases declares it without a body.
    assert {value for value in values if value is not None} == {facts.default_layers(61)}


def _cpu_speculates(sources: _Sources) -> bool:
    """The CPU runner lets it start, and the CPU form of the rejection kernel takes what the sampler hands it."""
    if "spec decode is not supported" in sources.text(_CPU):
        return False
    return "SYNTHETIC_MODE" in sources.text(_CPU_KERNELS) or "SYNTHETIC_MODE" not in sources.text(_SAMPLER)


def _verifiers(sources: _Sources) -> tuple[str, ...] | None:
    for node in ast.walk(ast.parse(sources.text(_CONFIG))):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name in ("eagle3_target_supported", "aux_hidden_states_supported"):
                return tuple(ast.literal_eval(node.value))
    return None
