"""A layer id is never taken in the wrong convention, order or range."""

from __future__ import annotations

import pytest

from pipeline.engines import check_engine
from pipeline.layers import AFTER, NATIVE, LayerIds, resolve
from shims.errors import UsageError


def test_the_two_conventions_name_the_same_states() -> None:
    assert LayerIds((1, 29, 57, 60), AFTER).native == (2, 30, 58, 61)
    assert LayerIds((2, 30, 58, 61), NATIVE).after == (1, 29, 57, 60)


@pytest.mark.parametrize("layers", [8, 30, 61])
def test_the_defaults_are_what_vllm_serves_and_the_last_state(layers: int) -> None:
    served = (2, layers // 2, layers - 3)
    assert resolve(None, AFTER, layers).native == (*served, layers)
    assert resolve(None, NATIVE, layers).ids == (*served, layers)


def test_ids_are_put_in_ascending_order() -> None:
    assert resolve([60, 2, 58, 30], AFTER, 61).ids == (2, 30, 58, 60)


@pytest.mark.parametrize(
    ("requested", "convention", "layers", "words"),
    [
        ([8], AFTER, 8, "0 to 7"),
        ([9], NATIVE, 8, "0 to 8"),
        ([-1], AFTER, 8, "-1"),
        ([], AFTER, 8, "none"),
        ([1, 1], AFTER, 8, "more than once"),
        ([1], "before", 8, "after or native"),
        (None, AFTER, 6, "at least 8"),
    ],
)
def test_wrong_ids_are_refused(requested: list[int] | None, convention: str, layers: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        resolve(requested, convention, layers)


def test_the_embeddings_are_out_of_the_stock_engines_reach() -> None:
    with pytest.raises(UsageError, match="native 0"):
        check_engine("stock", resolve([0, 4], NATIVE, 8))
    check_engine("stock", resolve([1, 4], NATIVE, 8))
