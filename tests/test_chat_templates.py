"""Awkward chat templates: the mask is the one a person spelled out, and what cannot be masked is refused by name."""

from __future__ import annotations

import pytest
from chat_templates import CASES, REFUSALS, says, user
from pipeline_fixtures import CHATML, CharTokenizer, masked_text, write_model

from pipeline.masking import TemplateRefusal, mask_conversation


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])
@pytest.mark.parametrize("thinking", ["keep", "mask"])
@pytest.mark.parametrize("name", CASES)
def test_the_mask_is_the_one_spelled_out(name: str, thinking: str, fast: bool) -> None:
    case = CASES[name]
    tokenizer = CharTokenizer(case.template, specials=case.specials, fast=fast)
    masked = mask_conversation(tokenizer, case.messages, thinking=thinking)
    wanted = case.answers if thinking == "mask" and case.answers is not None else case.trained
    assert masked_text(tokenizer, case.messages, masked.loss_mask) == wanted
    assert masked.rewritten_turns == case.left_out
    assert bool(masked.thinking_turns) == (thinking == "mask" and case.answers is not None)


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_is_told_from_a_fault_of_the_row(name: str) -> None:
    template, specials, messages, words = REFUSALS[name]
    with pytest.raises(TemplateRefusal, match=words):
        mask_conversation(CharTokenizer(template, specials=specials), messages)


THINKS_INSIDE = CHATML.replace(
    "{{ m['content'] }}",
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}",
)


@pytest.mark.parametrize(
    ("content", "end", "kept", "answer"),
    [
        ("<think>\nhm\n</think>\n\nYes.", "</think>", "<think>\nhm\n</think>\n\nYes.", "Yes."),
        ("[THINK]hm[/THINK]Yes.", "[/THINK]", "[THINK]hm[/THINK]Yes.", "Yes."),
        ("<think>a</think>b</think>Yes.", "</think>", "<think>a</think>b</think>Yes.", "Yes."),
        ("Yes.", "</think>", "Yes.", "Yes."),
        ("<think>never ended", "</think>", "<think>never ended", "<think>never ended"),
    ],
    ids=["with lines", "other tags", "twice", "none", "not ended"],
)
def test_thinking_inside_the_content(content: str, end: str, kept: str, answer: str) -> None:
    tokenizer = CharTokenizer(THINKS_INSIDE)
    messages = [user("Hi"), says(content)]
    for thinking, wanted in (("keep", kept), ("mask", answer)):
        masked = mask_conversation(tokenizer, messages, thinking=thinking, thinking_end=end)
        assert masked_text(tokenizer, messages, masked.loss_mask) == wanted + "<|im_end|>"


def test_thinking_is_masked_within_the_marks_of_the_template(tmp_path) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("transformers")
    from transformers import AutoTokenizer

    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
        "{%- generation -%}{{ m['content'] }}<|im_end|>{%- endgeneration -%}"
        "{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    )
    tokenizer = AutoTokenizer.from_pretrained(write_model(tmp_path / "model", template=template))
    messages = [user("Hi"), says("<think>hm</think>Yes."), user("And?"), says("Nö.")]
    for thinking, wanted in (
        ("keep", "<think>hm</think>Yes.<|im_end|>Nö.<|im_end|>"),
        ("mask", "Yes.<|im_end|>Nö.<|im_end|>"),
    ):
        masked = mask_conversation(tokenizer, messages, thinking=thinking)
        marked = [token for token, bit in zip(masked.input_ids, masked.loss_mask, strict=True) if bit]
        assert tokenizer.decode(marked) == wanted


def test_the_tokenizers_own_bos_is_not_added_to_the_templates(tmp_path) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("transformers")
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    template = "<|im_start|>" + CHATML
    tokenizer = AutoTokenizer.from_pretrained(write_model(tmp_path / "model", template=template))
    bos = tokenizer.convert_tokens_to_ids("<|im_start|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)]
    )
    assert tokenizer("x")["input_ids"][0] == bos, "the tokenizer would add one of its own"
    ids = mask_conversation(tokenizer, [user("Hi"), says("Yes.")]).input_ids
    assert ids[:2] == [bos, bos] and ids[2] != bos, "the template's two, and no third"
