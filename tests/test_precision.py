"""A run in float32 is one in its kernels, too; what the user set is left alone."""

import os

import pytest

import shims
from shims.precision import VARIABLE, keep_float32


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")  # so that it is put back afterwards
    monkeypatch.delenv(VARIABLE)


def test_float32_is_multiplied_in_full() -> None:
    keep_float32("float32")
    assert os.environ[VARIABLE] == "ieee"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "auto", "None"])
def test_other_dtypes_change_nothing(dtype: str) -> None:
    keep_float32(dtype)
    assert VARIABLE not in os.environ


def test_a_setting_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "tf32x3")
    keep_float32("float32")
    assert os.environ[VARIABLE] == "tf32x3"


def test_the_stock_generator_in_float32_too() -> None:
    with shims.overrides(trust_remote_code=True):
        assert VARIABLE not in os.environ
    with shims.overrides(dtype="float32"):
        assert os.environ[VARIABLE] == "ieee"
