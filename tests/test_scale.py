"""The simulation against what can be reckoned by hand, and the page's figures."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.scale.__main__ import limit_of, main
from pipeline.scale.plan import Model, objects
from pipeline.scale.simulation import Setup, simulate

PLAIN = Setup(tokens=1e6, replicas=4, tokens_per_s=1000, chunk_tokens=1000, start_s=30)


def test_replicas_share_the_work() -> None:
    for replicas in (1, 2, 4, 8):
        outcome = simulate(replace(PLAIN, replicas=replicas))
        assert outcome.seconds == pytest.approx(30 + 1e6 / 1000 / replicas)
        assert outcome.busy_share == pytest.approx(1) and outcome.failures == 0 and outcome.storage_bound_s == 0


def test_slow_storage_sets_the_pace() -> None:
    outcome = simulate(replace(PLAIN, bytes_per_token=100, storage_bytes_per_s=200_000))
    assert outcome.computing_s == pytest.approx(1e6 * 100 / 200_000)
    assert outcome.storage_bound_s == pytest.approx(outcome.computing_s)
    assert limit_of(outcome).startswith("storage")
    half = simulate(replace(PLAIN, bytes_per_token=50, storage_bytes_per_s=200_000))
    assert half.computing_s == pytest.approx(250) and half.storage_bound_s == 0


def test_a_death_costs_the_restart_and_what_was_not_durable() -> None:
    # Two replicas, one away for 50 s: the other alone does 50 s of work in them.
    two = replace(PLAIN, replicas=2, start_s=0, restart_s=50, chunk_tokens=100)
    outcome = simulate(replace(two, deaths=((100.0, 1),)))
    assert outcome.seconds == pytest.approx((1000 + 50) / 2, abs=0.2) and outcome.failures == 1
    lossy = simulate(replace(two, deaths=((100.05, 1),), lost_tokens=1000))
    assert 0 < lossy.recomputed_tokens <= 100
    noticed = simulate(replace(two, replicas=1, deaths=((100.05, 0),), notice_s=80))
    assert noticed.seconds == pytest.approx(1050, abs=0.2)


def test_a_late_replica_helps_from_when_it_is_there() -> None:
    outcome = simulate(replace(PLAIN, replicas=2, ready=(10.0, 110.0)))
    assert outcome.computing_s == pytest.approx((1000 + 100) / 2, abs=1)


def test_a_trainer_reads_along() -> None:
    slow = simulate(replace(PLAIN, trainer_tokens_per_s=2000))
    assert slow.trained_s == pytest.approx(30 + 500) and slow.peak_unread_tokens == pytest.approx(500_000)
    fast = simulate(replace(PLAIN, trainer_tokens_per_s=9000))
    assert fast.trained_s == pytest.approx(fast.seconds) and fast.peak_unread_tokens < 10_000
    shared = simulate(
        replace(PLAIN, trainer_tokens_per_s=4000, bytes_per_token=100, storage_bytes_per_s=400_000)
    )  # writing alone would take all of it
    assert shared.seconds == pytest.approx(30 + 500, rel=0.01) and shared.trained_s == pytest.approx(530, rel=0.01)


@settings(max_examples=60, deadline=None)
@given(
    replicas=st.integers(1, 9),
    mtbf=st.floats(20, 1e4),
    lost=st.floats(0, 500),
    storage=st.floats(1e5, 1e7),
    seed=st.integers(0, 9),
)
def test_nothing_is_lost_and_nothing_is_faster_than_it_can_be(
    replicas: int, mtbf: float, lost: float, storage: float, seed: int
) -> None:
    setup = replace(
        PLAIN, tokens=2e5, replicas=replicas, mtbf_s=mtbf, lost_tokens=lost, bytes_per_token=100,
        storage_bytes_per_s=storage, seed=seed, trainer_tokens_per_s=500,
    )  # fmt: skip
    outcome = simulate(setup)
    rate = min(1000 * replicas, storage / 100)
    assert outcome.computing_s >= (2e5 + outcome.recomputed_tokens) / rate - 1e-6
    assert outcome.recomputed_tokens <= lost * outcome.failures + 1e-6
    assert 0 < outcome.busy_share <= 1 + 1e-9 and outcome.trained_s >= outcome.seconds
    assert outcome == simulate(setup)


def test_a_run_without_work_is_refused() -> None:
    for bad in ({"tokens": 0}, {"replicas": 0}, {"tokens_per_s": 0}, {"storage_bytes_per_s": 0}):
        with pytest.raises(ValueError, match="above 0"):
            simulate(replace(PLAIN, **bad))  # type: ignore[arg-type]


def test_the_arithmetic_is_that_of_the_formats() -> None:
    kimi = Model("Kimi-K2.5", 4, 7168, 32e9, 600e9, 8)
    assert kimi.bytes_per_token("bfloat16") == 4 * 7168 * 2 + 16
    assert kimi.bytes_per_token("float8_e4m3") == 4 * 7168 + 4 * 4 + 16
    assert kimi.tokens_per_s(400e12, 0.5) == pytest.approx(8 * 400e12 * 0.5 / 64e9)
    assert objects(1e9, 2048, 1000) == math.ceil(1e9 / 2048 / 1000)


def test_the_command_prints_a_line_for_each_number_of_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tokens", "1e8", "--replicas", "2", "4", "--trainer-tokens-per-s", "1e4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["2", "4"] and all("trained on once" in line for line in lines)
