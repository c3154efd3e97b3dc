"""What `--engine native` takes a release's connector for, against the release's own sources."""

from __future__ import annotations

import re

import pytest

from contract_tests.sources import Settings, open_release
from pipeline.engines import native
from shims.releases import known

_CONNECTOR = "vllm/distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py"
_CONFIG = "vllm/config/vllm.py"


_ALWAYS_NEW_BLOCKS = "assert new_block_ids is not None"
_REFUSED = "ExampleHiddenStatesConnector does not support chunked prefill"


@pytest.mark.network
@pytest.mark.parametrize("release", known())
def test_the_connector_is_used_where_its_sources_allow_it(release: str) -> None:
    tree = open_release("vllm", release, Settings.from_environment())
    tree.prefetch([_CONFIG, _CONNECTOR])
    connector, config = (tree.read(p).decode() if p in tree.paths() else "" for p in (_CONNECTOR, _CONFIG))
    tree.save()
    assert native.usable(release) == bool(connector and _ALWAYS_NEW_BLOCKS not in connector)
    # On a GPU, in 0.22 and 0.23: a refusal of vLLM's own, met only when a model is loaded.
    assert not (_REFUSED in config and native.takes_chunks(release))


_REGISTRY = "vllm/model_executor/models/registry.py"
_SHARES = re.compile(
    r"class \w+DecoderLayer\b(?:(?!\nclass ).)*?(?:fused_allreduce|DeepseekV32DecoderLayer)", re.DOTALL
)
_REGISTERED = re.compile(r'"(\w+For(?:CausalLM|ConditionalGeneration))": \(\s*"vllm\.models\.(\w+)"')


@pytest.mark.network
@pytest.mark.parametrize("release", [r for r in known() if native.several_devices(r)])
def test_architectures_whose_layers_return_a_share_are_known(release: str) -> None:
    tree = open_release("vllm", release, Settings.from_environment())
    classes = [p for p in tree.paths() if re.fullmatch(r"vllm/models/\w+/nvidia/model\.py", p)]
    tree.prefetch([_REGISTRY, *classes])
    partial = {p.split("/")[2] for p in classes if _SHARES.search(tree.read(p).decode())}
    registered = _REGISTERED.findall(tree.read(_REGISTRY).decode())
    tree.save()
    named = {name for name, package in registered if package in partial}
    assert named and all(name.startswith(native.PARTIAL) for name in named), named
    assert not {name for name, package in registered if package not in partial and name.startswith(native.PARTIAL)}
