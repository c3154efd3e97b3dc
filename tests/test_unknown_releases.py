"""Releases that are in no table: the next one, a nightly, a build from a commit, another platform's fork.

Version selects, signature confirms: what binds runs as `unverified`, what has drifted is refused at first use.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from shims import patching
from shims.adaptations import ADAPTATIONS
from shims.contract import Signature
from shims.errors import DriftError, UsageError
from shims.patching import Receipt
from shims.planning import Plan, select
from shims.releases import known
from shims.touchpoints import by_key
from shims.verbs import Drop
from shims.versions import Stack, is_exact_release, newest_first

_NEXT = "0.34.0"
_NIGHTLY = "0.30.1.dev20261101+gabc"
_COMMIT = "0.16.1rc1.dev7+g0abc"
_FORK = "0.16.0+empty.platform"


def _plan(vllm: str, speculators: str = "0.4.0.1") -> Plan:
    return select(Stack(vllm, speculators))


def _names(plan: Plan) -> set[str]:
    return {row.name for row in plan.adaptations}


@pytest.mark.parametrize("vllm", [_NEXT, _NIGHTLY, _COMMIT, "0.16.0+gdeadbee", "0.33.0rc1", "1.0"])
def test_an_unknown_release_is_unverified_with_one_note(vllm: str) -> None:
    plan = _plan(vllm)
    assert plan.state == "unverified"
    assert vllm in plan.note
    assert known()[-1] in plan.note


@pytest.mark.parametrize(("vllm", "like"), [(_NEXT, "0.33.0"), (_NIGHTLY, "0.30.0"), (_COMMIT, "0.16.0")])
def test_rows_are_those_of_the_release_before(vllm: str, like: str) -> None:
    assert _names(_plan(vllm)) == _names(_plan(like))
    assert _names(_plan(vllm, "0.3.0")) == _names(_plan(like, "0.3.0"))


@pytest.mark.parametrize("vllm", ["0.16.0+cpu", "0.16.0+cu130", "0.16.0", _FORK])
def test_a_label_that_says_how_it_was_built_is_the_release(vllm: str) -> None:
    assert is_exact_release(vllm)
    assert _plan(vllm).state == "adapted"
    assert _names(_plan(vllm)) == _names(_plan("0.16.0"))


def test_a_release_before_the_first_is_not_supported() -> None:
    assert _plan("0.10.2").state == "unsupported"
    assert _plan("0.33.0", "0.2.0").state == "unsupported"


@pytest.mark.parametrize("vllm", ["", "nightly", "0.34.x", "main"])
def test_a_version_that_is_none_is_refused(vllm: str) -> None:
    with pytest.raises(UsageError, match=r"0\.16\.0"):
        _plan(vllm)


def test_versions_are_ordered_as_versions() -> None:
    assert newest_first(["0.9.0", "0.10.0", "junk", "0.10.0rc1"]) == ["0.10.0", "0.10.0rc1", "0.9.0"]
    assert newest_first(["0.10.0rc1", "0.9.0"], final=True) == ["0.9.0"]


# --- the signature decides -----------------------------------------------------------------------


class _RequestWithEos:
    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: Any,
        pooling_params: Any,
        eos_token_id: int | None,
        arrival_time: float | None = None,
        block_hasher: Any = None,
    ) -> None:
        self.given = {"eos_token_id": eos_token_id}


class _RequestWithoutEos:
    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: Any,
        pooling_params: Any,
        arrival_time: float | None = None,
        block_hasher: Any = None,
    ) -> None:
        self.given: dict[str, Any] = {}


class _SchedulerOfTomorrow:
    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, structured_output_manager: Any, block_size: int, novelty: int
    ) -> None:
        raise AssertionError("must not be reached")


def _confirm(vllm: str, key: str, target: Any, speculators: str = "0.4.0.1") -> tuple[Receipt, Any]:
    receipt = Receipt(_plan(vllm, speculators))
    return receipt, patching._confirmed(receipt, by_key()[key], target)


@pytest.mark.parametrize("speculators", ["0.3.0", "0.4.0.1"])
def test_a_build_ahead_of_its_version_is_adapted_by_its_signature(speculators: str) -> None:
    receipt, verbs = _confirm(_COMMIT, "Request", _RequestWithoutEos, speculators)
    assert verbs == [Drop("eos_token_id")]
    assert receipt.applied == {"request-without-eos": "chosen by signature"}
    assert not receipt.drifted


def test_a_build_behind_the_next_release_keeps_the_call() -> None:
    receipt, verbs = _confirm(_COMMIT, "Request", _RequestWithEos)
    assert (verbs, receipt.applied, receipt.drifted) == ([], {}, {})
    # A nightly that counts as a later release but whose code is older: the row that its version selects is left out.
    receipt, verbs = _confirm("0.17.0.dev3+gabc", "Request", _RequestWithEos)
    assert (verbs, receipt.applied, receipt.drifted) == ([], {}, {})


def test_an_exact_release_does_not_search() -> None:
    receipt, verbs = _confirm("0.16.0", "Request", _RequestWithoutEos)
    assert verbs is None
    assert "does not know eos_token_id" in receipt.drifted["Request"]


@pytest.mark.parametrize("vllm", [_NEXT, _NIGHTLY, _COMMIT])
def test_an_unknown_required_parameter_has_drifted(vllm: str) -> None:
    receipt, verbs = _confirm(vllm, "Scheduler", _SchedulerOfTomorrow)
    assert verbs is None
    assert "requires novelty" in receipt.drifted["Scheduler"]


def test_a_name_that_is_gone_has_drifted() -> None:
    receipt, verbs = _confirm(_NEXT, "Scheduler", None)
    assert verbs is None
    assert "does not exist" in receipt.drifted["Scheduler"]


def test_what_cannot_be_compared_is_taken_as_its_version_says() -> None:
    receipt, verbs = _confirm("0.17.0", "Request", dict)  # Python tells no signature of `dict`
    assert Signature.of(dict) is None
    assert verbs == [Drop("eos_token_id")]
    assert receipt.applied == {"request-without-eos": "selected by version"}


def _generator_module(scheduler: Any) -> ModuleType:
    module = ModuleType("stand_in")

    class Generator:
        def __init__(self) -> None:
            self.scheduler = module.Scheduler(
                vllm_config=1, kv_cache_config=2, structured_output_manager=3, block_size=16
            )

    module.Scheduler = scheduler  # type: ignore[attr-defined]
    module.VllmHiddenStatesGenerator = Generator  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("vllm", [_NEXT, _COMMIT])
def test_a_drifted_touchpoint_is_refused_at_first_use(vllm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = _generator_module(_SchedulerOfTomorrow)
    receipt = Receipt(_plan(vllm))
    monkeypatch.setattr(patching, "_active", receipt)
    patching._patch_call(receipt, module, "Scheduler", by_key()["Scheduler"], module.Scheduler)
    patching._refuse_if_drifted(receipt, module.VllmHiddenStatesGenerator)
    with pytest.raises(DriftError) as caught:
        module.VllmHiddenStatesGenerator()
    error = caught.value
    assert error.where == "vllm.v1.core.sched.scheduler:Scheduler"
    assert vllm in error.wanted
    assert "requires novelty" in error.found
    assert "specshim plan" in error.next_step
    # The adapter in the generator's own globals refuses as well, should someone call it directly.
    with pytest.raises(DriftError):
        module.Scheduler()


def test_an_unverified_release_that_binds_warns_once_a_generator(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = _generator_module(lambda **keywords: keywords)
    receipt = Receipt(_plan(_NEXT))
    monkeypatch.setattr(patching, "_active", receipt)
    patching._refuse_if_drifted(receipt, module.VllmHiddenStatesGenerator)
    with caplog.at_level("WARNING", logger="specshim"):
        module.VllmHiddenStatesGenerator()
    assert [record.getMessage() for record in caplog.records] == [f"specshim: {receipt.plan.note}"]


def test_every_row_has_a_link_and_says_when_it_goes() -> None:
    for row in ADAPTATIONS:
        assert row.link.startswith("https://github.com/"), row.name
        assert row.until, row.name
        assert row.why, row.name
