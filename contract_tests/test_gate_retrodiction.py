"""What broke in the past would have been told, and nothing else would have been called broken."""

from __future__ import annotations

import pytest

from contract_tests.gate.retrodiction import SPECULATORS, Step, steps
from shims.releases import known

_MOVED = ("_get_kv_cache_groups_uniform_spec", "get_kv_cache_config_from_groups", "unify_hybrid_kv_cache_specs")
_TRANSFORMERS = (
    "modeling_attn_mask_utils",
    "configuration_utils.torch",
    "transformers.modeling_attn_mask_utils._prepare_4d_causal_attention_mask",
)
# (upgrade, speculators) -> the uses that broke, as real vLLM has shown it (each of these releases was run by hand).
_BROKE = {
    ("0.11.1", "0.3.0"): {"Scheduler"},  # requires block_size
    ("0.11.1", "0.4.0.1"): {"Scheduler"},  # requires again what a row had dropped
    ("0.12.0", "0.3.0"): {"SchedulerConfig", "get_kv_cache_config_from_groups"},
    ("0.12.0", "0.4.0.1"): {"get_kv_cache_config_from_groups"},  # no longer wants what a row had computed
    ("0.17.0", "0.3.0"): {"Request"},
    ("0.17.0", "0.4.0.1"): {"Request"},
    # A patch release, but no false alarm: from here on vLLM admits transformers 5.
    ("0.19.1", "0.3.0"): set(_TRANSFORMERS),
    # speculators 0.4.0.1 bounds transformers itself; from here on nothing suits both.
    ("0.24.0", "0.4.0.1"): set(_TRANSFORMERS),
    ("0.33.0", "0.3.0"): {*_MOVED, "MultiprocExecutor.set_kv_cache_layout"},
    ("0.33.0", "0.4.0.1"): {*_MOVED, "MultiprocExecutor.set_kv_cache_layout"},
}


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str], Step]:
    return {(step.after, step.speculators): step for step in steps()}


@pytest.mark.parametrize("speculators", SPECULATORS)
@pytest.mark.parametrize("release", known()[1:])
def test_exactly_what_broke_is_called_broken(
    found: dict[tuple[str, str], Step], release: str, speculators: str
) -> None:
    broken = {one.touchpoint.key for one in found[release, speculators].broken}
    assert broken == _BROKE.get((release, speculators), set())


def test_the_words_name_what_changed(found: dict[tuple[str, str], Step]) -> None:
    said = {key: " ".join(one.why for one in step.broken) for key, step in found.items()}
    assert "requires block_size" in said["0.11.1", "0.3.0"]
    assert "requires is_encoder_decoder" in said["0.12.0", "0.3.0"]
    assert "does not know kv_cache_specs" in said["0.12.0", "0.3.0"]
    assert "does not know eos_token_id" in said["0.17.0", "0.4.0.1"]
    assert "requires cp_kv_cache_interleave_size" in said["0.33.0", "0.4.0.1"]
    assert "modeling_attn_mask_utils does not exist" in said["0.19.1", "0.3.0"]


@pytest.mark.parametrize(
    ("release", "body"),
    [
        ("0.29.0", "vllm.v1.engine.core:EngineCore._initialize_kv_caches"),  # resolves one KV-cache layout
        ("0.29.0", "vllm.v1.attention.backends.utils:resolve_kv_cache_layout"),
        ("0.33.0", "vllm.v1.engine.core:EngineCore._initialize_kv_caches"),
    ],
)
def test_what_no_signature_shows_is_seen_in_the_bodies(
    found: dict[tuple[str, str], Step], release: str, body: str
) -> None:
    assert body in found[release, "0.4.0.1"].bodies


def test_patch_releases_change_few_bodies(found: dict[tuple[str, str], Step]) -> None:
    patches = [step for step in found.values() if step.is_patch and step.before != "0.11.0"]
    assert len(patches) >= 20
    assert sum(len(step.bodies) for step in patches) / len(patches) < 2


def test_a_change_that_a_call_survives_is_told_as_such(found: dict[tuple[str, str], Step]) -> None:
    step = found["0.33.0", "0.4.0.1"]
    assert any(key == "VllmConfig" and "watchdog_config" in str(what) for key, what in step.changed)
