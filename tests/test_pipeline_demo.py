"""The demo's committed data is what the demo promises; the conversion keeps rotary pairs together."""

from __future__ import annotations

import json

import pytest

from pipeline.conversations import numbered_lines, parse_row
from pipeline.demo.places import CONVERSATIONS


def test_every_committed_question_is_answered() -> None:
    asked = []
    for number, line in numbered_lines(CONVERSATIONS):
        messages = parse_row(line, str(number)).messages
        asked.append(tuple(m["content"] for m in messages if m["role"] == "user"))
        assert all(m["content"].strip() for m in messages)
        assert [m["role"] for m in messages] == ["user", "assistant"] * len(asked[-1])
        assert set(json.loads(line)["finish"]) <= {"stop", "length"}
    assert len(asked) >= 64 and len({turns[0] for turns in asked}) >= 48
    assert CONVERSATIONS.stat().st_size < 1_000_000


def test_rotating_halves_after_the_reorder_equals_rotating_pairs_before() -> None:
    np = pytest.importorskip("numpy")
    from pipeline.demo.model import _halves

    heads, dim, hidden = 3, 8, 5
    generator = np.random.default_rng(0)
    weight, state = generator.normal(size=(heads * dim, hidden)), generator.normal(size=hidden)
    angle = generator.normal(size=dim // 2)

    def rotated_pairs(vector):  # type: ignore[no-untyped-def]
        even, odd = vector[..., 0::2], vector[..., 1::2]
        turned = np.stack([even * np.cos(angle) - odd * np.sin(angle), odd * np.cos(angle) + even * np.sin(angle)], -1)
        return turned.reshape(vector.shape)

    def rotated_halves(vector):  # type: ignore[no-untyped-def]
        low, high = vector[..., : dim // 2], vector[..., dim // 2 :]
        turned = (low * np.cos(angle) - high * np.sin(angle), high * np.cos(angle) + low * np.sin(angle))
        return np.concatenate(turned, -1)

    before = rotated_pairs((weight @ state).reshape(heads, dim))
    after = rotated_halves((_halves(weight, heads) @ state).reshape(heads, dim))
    # Scores are dot products inside a head, so the order inside a head may differ, the products not.
    assert np.allclose(before @ before.T, after @ after.T)
    assert np.allclose(np.sort(before), np.sort(after))
