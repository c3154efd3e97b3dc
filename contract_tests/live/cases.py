"""The acceptance cases, each as a function of a built generator; a failed case raises `Failed`."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from contract_tests.live.models import CONTEXT, LAYERS
from contract_tests.live.reference import Reference

# After the layers; the last one among them, as a trainer wants it.
LAYER_IDS = [1, 3, 4, 7]
TOLERANCE = 1e-5


class Failed(AssertionError):
    """A case did not hold; the message says where."""


@dataclass
class Bench:
    """A generator, its reference, and the worst error seen so far.

    Args:
        generate: `generate(prompts)` of the generator under test.
        tolerance: largest relative error of a prompt.
        rounding: largest relative error of most tokens.
    """

    generate: Callable[[list[list[int]]], list[dict[str, Any]]]
    reference: Reference
    layer_ids: list[int]
    tolerance: float = TOLERANCE
    rounding: float = TOLERANCE
    worst: float = 0.0
    token_errors: list[float] = field(default_factory=list)
    """Of each token after each layer: where rounding turns the choice of an expert, a few of them are large."""

    def compare(self, what: str, prompts: list[list[int]]) -> None:
        """Each result is its own prompt's, whole, and equal to a solo run in the reference."""
        results = self.generate(prompts)
        if len(results) != len(prompts):
            raise Failed(f"{what}: {len(results)} results for {len(prompts)} prompts")
        wrong = []
        for index, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
            if result["input_ids"].tolist() != prompt:
                wrong.append(f"{index} carries other token ids")
                continue
            error = self.reference.error(prompt, self.layer_ids, result["hidden_states"])
            self.worst = max(self.worst, error)
            if math.isfinite(error):
                self.token_errors += self.reference.token_errors(prompt, self.layer_ids, result["hidden_states"])
            if not error <= self.tolerance:
                wrong.append(f"{index} off by {error:.1e}")
        if wrong:
            raise Failed(f"{what}: {len(wrong)} of {len(prompts)} wrong: {'; '.join(wrong[:4])}")
        median = statistics.median(self.token_errors)
        if not median <= self.rounding:
            raise Failed(f"{what}: half of the tokens are off by more than {median:.1e}, wanted {self.rounding:.0e}")


def prompts_of(lengths: list[int], seed: int) -> list[list[int]]:
    """Random prompts of the given lengths; the same for the same seed."""
    dice = random.Random(seed)
    return [[dice.randrange(2, 500) for _ in range(length)] for length in lengths]


def _mixed(count: int, seed: int, longest: int = 300) -> list[list[int]]:
    dice = random.Random(seed)
    return prompts_of([dice.randint(5, longest) for _ in range(count)], seed)


def identity(bench: Bench) -> None:
    """Case 1: result i is prompt i's, in any batch, order, repetition and call."""
    eleven = _mixed(11, seed=1)
    bench.compare("one", _mixed(1, seed=2))
    bench.compare("eleven", eleven)
    bench.compare("eleven, reversed", eleven[::-1])
    bench.compare("thirty-three", _mixed(33, seed=3))
    bench.compare("one-token prompts", prompts_of([5, 1, 33, 1, 7, 2], seed=4))
    shared = prompts_of([64], seed=5)[0]
    tails = prompts_of([10, 20, 5], seed=6)
    bench.compare("shared prefix", [shared + tail for tail in tails] + [shared, shared])
    bench.compare("eleven, fifth call and later", eleven)


def identity_large(bench: Bench) -> None:
    """Case 1 at size: a hundred prompts in a call, and more tokens than one step takes."""
    bench.compare("a hundred", _mixed(100, seed=7, longest=80))
    long = prompts_of([480] * 20, seed=8)
    bench.compare("9600 tokens", long)
    bench.compare("9600 tokens, reversed", long[::-1])


def row_count(bench: Bench) -> None:
    """Case 2: a prompt past the limit is cut, ids and states alike."""
    prompt = prompts_of([CONTEXT + 40], seed=9)[0]
    result = bench.generate([prompt])[0]
    kept = result["input_ids"].tolist()
    if kept != prompt[: CONTEXT - 1]:
        raise Failed(f"a prompt of {len(prompt)} came back with {len(kept)} token ids, wanted the first {CONTEXT - 1}")
    rows = [len(h) for h in result["hidden_states"]]
    if rows != [len(kept)] * len(rows):
        raise Failed(f"{len(kept)} token ids with {rows} rows of states")


def row_count_starved(bench: Bench) -> None:
    """Case 2: a KV cache too small for the batch, then for one prompt: right, or refused; never short."""
    bench.compare("more prompts than the KV cache holds", _mixed(12, seed=10, longest=300))
    whole_context = prompts_of([CONTEXT - 1], seed=11)
    try:
        bench.compare("a prompt that just may not fit", whole_context)
    except Failed:
        raise
    except Exception as refusal:
        if "KV cache" not in str(refusal):
            raise Failed(f"refused without naming the KV cache: {refusal!r}") from refusal
    bench.compare("after the refusal", _mixed(3, seed=12))


def layer_identity(bench: Bench) -> None:
    """Case 3: on the marker model, the state after layer i has components 0 to i at 1, the rest of them at 0."""
    result = bench.generate(prompts_of([7], seed=13))[0]
    for layer_id, states in zip(bench.layer_ids, result["hidden_states"], strict=True):
        marks = states[:, :LAYERS].round().int().tolist()
        wanted = [1] * (layer_id + 1) + [0] * (LAYERS - layer_id - 1)
        if any(row != wanted for row in marks):
            raise Failed(f"asked for the state after layer {layer_id}: marks {marks[0]}, wanted {wanted}")


def last_layer(bench: Bench) -> None:
    """Case 4: norm and head on the saved last state give the model's own next tokens."""
    for prompt in prompts_of([5, 40, 120], seed=14):
        result = bench.generate([prompt])[0]
        got = bench.reference.logits(result["hidden_states"][-1]).argmax(-1)
        wanted = bench.reference.run(prompt)[1]
        top = wanted.max(-1).values
        # Of two logits closer than rounding moves them, either may be the larger. Each may be off by twice what the
        # states are off by as a whole, in relation to their size.
        short = top - wanted.gather(-1, got[:, None])[:, 0]
        differ = short > 4 * bench.tolerance * wanted.norm(dim=-1) / wanted.shape[-1] ** 0.5
        if bool(differ.any()):
            raise Failed(f"{int(differ.sum())} of {len(prompt)} next tokens differ from the model's own")


def content(bench: Bench) -> None:
    """Case 6: finite rows that are neither zero nor constant."""
    import torch

    for result in bench.generate(_mixed(4, seed=15)):
        for layer_id, states in zip(bench.layer_ids, result["hidden_states"], strict=True):
            if not bool(torch.isfinite(states).all()):
                raise Failed(f"NaN or Inf after layer {layer_id}")
            if bool((states.float().std(dim=-1) < 1e-6).any()):
                raise Failed(f"a zero or constant row after layer {layer_id}")
