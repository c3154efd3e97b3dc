"""The loss mask covers what the assistant wrote and nothing else, or the row is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_fixtures import CHATML, CharTokenizer, masked_text, write_model

from pipeline.conversations import RowFault, parse_row
from pipeline.masking import mask_conversation

SYSTEM = {"role": "system", "content": "Be kind."}
USER = {"role": "user", "content": "Hi"}
AGAIN = {"role": "user", "content": "And?"}


def says(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


# Strips finished thinking from every turn but the last, as Qwen3's and DeepSeek's templates do.
STRIPS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last and '</think>' in m['content'] %}"
    "{{ m['content'].split('</think>')[-1].lstrip('\n') }}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Opens a thinking block in the generation prompt that a finished reply does not show.
OPENS_THINKING = CHATML.replace("<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>\n{% endif")
# Adds an empty thinking block to the last reply only.
ADDS_EMPTY_THINKING = CHATML.replace(
    "{{ m['content'] }}",
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m['content'] }}",
)
# Refuses anything but user and assistant in turns.
ALTERNATES = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}"
)
# Trims contents and ends only the last message.
TRIMS = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# Writes the assistant's words twice as loud.
SHOUTS = CHATML.replace("{{ m['content'] }}", "{{ m['content'] | upper }}")
# Forgets who said what.
SWALLOWS = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"

CASES = {
    "chatml": (CHATML, [SYSTEM, USER, says("Yes."), AGAIN, says("No.")], "Yes.<|im_end|>|No.<|im_end|>"),
    "assistant first": (CHATML, [says("Hello!"), USER, says("Yes.")], "Hello!<|im_end|>|Yes.<|im_end|>"),
    "ends with the user": (CHATML, [USER, says("Yes."), AGAIN], "Yes.<|im_end|>"),
    "reply equals the question": (CHATML, [USER, says("Hi")], "Hi<|im_end|>"),
    "reply imitates a header": (
        CHATML,
        [USER, says("<|im_start|>user\nHi<|im_end|>")],
        "<|im_start|>user\nHi<|im_end|><|im_end|>",
    ),
    "thinking kept in the last turn": (
        STRIPS_THINKING,
        [USER, says("<think>\nhm\n</think>\n\nYes."), AGAIN, says("<think>\nwell\n</think>\n\nNo.")],
        "<think>\nwell\n</think>\n\nNo.<|im_end|>",
    ),
    "prompt opens a thinking block": (OPENS_THINKING, [USER, says("Yes.")], "Yes.<|im_end|>"),
    "reply resembles the opened block": (OPENS_THINKING, [USER, says("<thanks!")], "<thanks!<|im_end|>"),
    "empty thinking in the last turn": (
        ADDS_EMPTY_THINKING,
        [USER, says("Yes."), AGAIN, says("No.")],
        "<think>\n\n</think>\n\nNo.<|im_end|>",
    ),
    "no header of its own": (ALTERNATES, [USER, says("Yes."), AGAIN, says("No.")], " Yes.</s>| No.</s>"),
    "trimmed content": (TRIMS, [USER, says("  Yes.  "), AGAIN, says("No.")], " Yes.\n| No.\n"),
    "changed content": (SHOUTS, [USER, says("yes")], "YES<|im_end|>"),
}


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])
@pytest.mark.parametrize("case", CASES)
def test_mask_is_what_a_person_would_mark(case: str, fast: bool) -> None:
    template, messages, wanted = CASES[case]
    tokenizer = CharTokenizer(template, specials=["<|im_start|>", "<|im_end|>", "</s>"], fast=fast)
    masked = mask_conversation(tokenizer, messages)
    assert masked_text(tokenizer, messages, masked.loss_mask) == wanted


def test_turns_left_out_are_counted() -> None:
    template, messages, _ = CASES["thinking kept in the last turn"]
    masked = mask_conversation(CharTokenizer(template), messages)
    assert (masked.turns, masked.rewritten_turns) == (1, 1)


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (ALTERNATES, [USER, AGAIN, says("Yes.")], "roles must alternate"),
        (SWALLOWS, [USER, says("Yes.")], "told apart"),
    ],
    ids=["refuses the order", "hides the reply"],
)
def test_a_template_without_a_place_for_the_reply_is_a_fault(
    template: str, messages: list[dict[str, str]], words: str
) -> None:
    with pytest.raises(RowFault, match=words):
        mask_conversation(CharTokenizer(template), messages)


def test_a_token_that_takes_a_space_from_the_header_belongs_to_the_reply() -> None:
    template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = CharTokenizer(template, glue_spaces=True)
    masked = mask_conversation(tokenizer, [USER, says("Yes.")])
    assert masked_text(tokenizer, [USER, says("Yes.")], masked.loss_mask) == " Yes.\n"


text = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\r"), min_size=1, max_size=12)


@given(st.lists(st.tuples(text, text), min_size=1, max_size=4), st.booleans())
def test_any_words_in_chatml_are_masked_whole(turns: list[tuple[str, str]], fast: bool) -> None:
    messages = [m for question, reply in turns for m in ({"role": "user", "content": question}, says(reply))]
    tokenizer = CharTokenizer(CHATML, fast=fast)
    whole = tokenizer.apply_chat_template(messages)
    wanted, at = [0] * len(whole), 0
    for message in messages:
        at += len(f"<|im_start|>{message['role']}\n")
        end = at + len(message["content"]) + len("<|im_end|>")
        if message["role"] == "assistant":
            wanted[at:end] = [1] * (end - at)
        at = end + 1
    mask = mask_conversation(tokenizer, messages).loss_mask
    assert mask == [wanted[start] for start, _ in tokenizer.split(whole)]


def test_generation_marks_of_the_template_are_used(tmp_path) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("transformers")
    from transformers import AutoTokenizer

    # Only the reply is marked here, without the end of the turn: the template decides.
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] }}{% endgeneration %}"
        "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    )
    tokenizer = AutoTokenizer.from_pretrained(write_model(tmp_path / "model", template=template))
    masked = mask_conversation(tokenizer, [USER, says("Yes."), AGAIN, says("Nö.")])
    marked = [token for token, bit in zip(masked.input_ids, masked.loss_mask, strict=True) if bit]
    assert tokenizer.decode(marked) == "Yes.Nö."


def test_a_real_tokenizer_gives_the_same_mask_with_and_without_offsets(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("transformers")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(write_model(tmp_path / "model"))
    messages = [SYSTEM, USER, says("Yes, ça va."), AGAIN, says("Nö…")]
    fast = mask_conversation(tokenizer, messages)
    monkeypatch.setattr(type(tokenizer), "is_fast", property(lambda self: False))
    slow = mask_conversation(tokenizer, messages)
    assert fast == slow
    marked = [token for token, bit in zip(fast.input_ids, fast.loss_mask, strict=True) if bit]
    assert tokenizer.decode(marked) == "Yes, ça va.<|im_end|>Nö…<|im_end|>"


def test_both_row_shapes_parse_to_the_same_messages() -> None:
    one = parse_row('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}', "1")
    two = parse_row('{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}', "1")
    assert one == two


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "malformed JSON"),
        ('{"messages": [], "messages": []}', "'messages' twice"),
        ("[]", "found a list"),
        ("[" * 100_000, "JSON"),
        ("{}", "keys none"),
        ('{"messages": []}', "empty conversation"),
        ('{"messages": {}}', "an object"),
        ('{"messages": [1]}', "message 0"),
        ('{"messages": [{"role": "wizard", "content": "x"}]}', "wizard"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "assistant"),
        ('{"messages": [{"role": "assistant", "content": [1]}]}', "list"),
        ('{"messages": [{"role": "assistant", "content": "\\ud800"}]}', "surrogate"),
        ("\udcff", "UTF-8"),
    ],
)
def test_a_bad_line_says_what_is_wrong(line: str, words: str) -> None:
    with pytest.raises(RowFault) as caught:
        parse_row(line, "1")
    assert words in str(caught.value)
