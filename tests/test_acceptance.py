"""The arithmetic of acceptance: by hand, and against a plain simulation of greedy speculative decoding."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.evaluation.acceptance import Chain, acceptance, chains_of, on_path, served_acceptance, walk


def test_a_chain_ends_at_the_first_token_that_is_not_the_verifiers() -> None:
    #         place: 0  1  2  3  4  5
    tokens = [9, 8, 7, 6, 5, 4]
    own = [8, 7, 6, 5, 4, 3]  # the text is the verifier's own: own[i] is token i + 1
    mask = [0, 1, 1, 1, 1, 1]
    drafted = [[7, 6, 0, 4], [6, 0, 4, 4], [5, 4, 4, 4]]
    chains = chains_of(drafted, tokens, own, mask)
    # At 0: 7 6 5 are all right. At 1: 6 is right, 0 is not 5. At 2: 0 is not 5. At 3: 4 is right, then the answer ends.
    assert chains == [Chain(0, 3, True), Chain(1, 1, True), Chain(2, 0, True), Chain(3, 1, False)]


def test_a_chain_is_cut_short_where_the_text_leaves_the_verifiers_path() -> None:
    tokens, own, mask = [9, 8, 7, 6, 5], [8, 1, 6, 5, 4], [0, 1, 1, 1, 1]
    # Behind token 8 the verifier says 1, the text goes on with 7.
    right = [[1, 6, 5], [5, 5, 4]]
    assert chains_of(right, tokens, own, mask)[0] == Chain(0, 1, False)
    wrong = [[7, 6, 5], [5, 5, 4]]
    assert chains_of(wrong, tokens, own, mask)[0] == Chain(0, 0, True)
    assert on_path(tokens, own, mask) == (3, 4)


def test_only_the_assistants_tokens_are_guessed() -> None:
    tokens, own, mask = [1, 2, 3, 4, 5, 6, 7], [2, 3, 4, 5, 6, 7, 8], [0, 0, 1, 1, 0, 0, 1]
    chains = chains_of([[3, 4, 5, 6, 7]], tokens, own, mask)
    # A server's first chain has read the first token of the answer; the second answer has one token only.
    assert [chain.start for chain in chains] == [1]


def test_shares_count_the_chains_that_were_judged_at_each_step() -> None:
    chains = [Chain(0, 2, True), Chain(1, 1, True), Chain(2, 0, True), Chain(3, 1, False)]
    found = acceptance(chains, 2)
    # First step: 3 of 4. Second: of the two judged there (the fourth was cut short), one.
    assert found.conditional == (0.75, 0.5)
    assert found.at_risk == (4, 2)
    assert found.length == pytest.approx(1 + 0.75 + 0.375)
    assert found.marginal == pytest.approx((0.75, 0.375))
    # E[n] = 1.125, E[n^2] = 0.75 + 3 * 0.375 = 1.875.
    assert found.error == pytest.approx(math.sqrt((1.875 - 1.125**2) / 4))


def test_nothing_judged_is_no_acceptance() -> None:
    found = acceptance([], 3)
    assert (found.length, found.conditional, found.at_risk) == (1.0, (0.0, 0.0, 0.0), (0, 0, 0))
    assert found.as_dict()["standard_error"] is None


def test_a_servers_counters() -> None:
    found = served_acceptance(10, [6, 3, 0])
    assert found.conditional == pytest.approx((0.6, 0.5, 0.0))
    assert found.length == pytest.approx(1.9)
    assert found.at_risk == (10, 6, 3)
    # 4 chains of 0, 3 of 1, 3 of 2: mean 0.9, mean square 1.5.
    assert found.error == pytest.approx(math.sqrt((1.5 - 0.81) / 10))


def test_a_server_starts_each_chain_behind_what_the_last_one_yielded() -> None:
    chains = [Chain(0, 2, True), Chain(1, 0, True), Chain(2, 3, True), Chain(3, 0, True), Chain(4, 1, True)]
    assert [chain.start for chain in walk(chains)] == [0, 3, 4]
    # A second answer in the row begins anew.
    assert [chain.start for chain in walk([Chain(0, 3, True), Chain(9, 0, True)])] == [0, 9]


@given(st.lists(st.integers(0, 2), min_size=3, max_size=40), st.integers(1, 4), st.integers(0, 9), st.data())
def test_the_walk_is_greedy_speculative_decoding(text: list[int], steps: int, seed: int, data: st.DataObject) -> None:
    """On the verifier's own text: step by step as a server does it, with the same draft."""
    total = len(text)
    own = [*text[1:], data.draw(st.integers(0, 2))]
    drafted = [data.draw(st.lists(st.integers(0, 2), min_size=total - 1, max_size=total - 1)) for _ in range(steps)]
    chains = [chain for chain in walk(chains_of(drafted, text, own, [1] * total)) if chain.complete]

    # The first answer token (place 1) comes from the prompt's last state; then chains of drafts.
    done, simulated = 1, []
    while done < total - 1:
        accepted = 0
        while accepted < steps and done + 1 + accepted < total:
            if drafted[accepted][done - 1] != text[done + 1 + accepted]:
                break
            accepted += 1
        ended = accepted == steps or done + 1 + accepted < total
        if ended:
            simulated.append((done - 1, accepted))
        done += accepted + 1
    assert [(chain.start, chain.accepted) for chain in chains] == simulated
