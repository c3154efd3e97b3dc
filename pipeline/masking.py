"""Which tokens of a conversation the assistant wrote.

Policy: a token counts if the model itself would have generated it, that is the reply and
the end-of-turn token, but not the assistant's header (the template puts it there) nor
white space after the end-of-turn token.

Two ways, in this order:

1. The template marks the reply with ``{% generation %}``: its own marks are used as they are.
2. The conversation is rendered up to each assistant turn and the growth is the reply. A
   template may rewrite earlier turns (thinking blocks are often stripped), and then the
   prefix no longer matches the whole: those turns are left out of the mask, the last one is
   kept, and the row says so. Nothing is searched for by pattern.

What the model thinks before it answers is part of the reply, unless ``thinking`` is ``mask``: then
the mask begins where two renderings with the same thinking and different answers part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.conversations import Message, RowFault

Render = Callable[[Sequence[Message], bool], str]
"""(messages, add_generation_prompt) -> text; raises RowFault when the template refuses."""

THINKING = ("keep", "mask")
THINKING_END = "</think>"
"""Ends the thinking inside a message's content; DeepSeek, Qwen and most others use it."""
_THINKING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Entries of a message that hold the thinking apart from its content."""
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Two texts without a common first or last character, so that what they share is the template's.
_PROBES = ("A probe 1", "Z sonde 2")


@dataclass(frozen=True)
class Masked:
    """Token ids of one conversation and the mask over them (1 = the assistant's)."""

    input_ids: list[int]
    loss_mask: list[int]
    turns: int
    """Assistant turns in the mask."""
    rewritten_turns: int
    """Assistant turns left out because the template rewrote them later."""
    thinking_turns: int = 0
    """Turns whose thinking was taken out of the mask."""


class TemplateRefusal(RowFault):
    """The chat template raises an error of its own on the whole conversation, e.g. for its order of roles."""


def mask_conversation(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Any = None,
    thinking: str = "keep",
    thinking_end: str = THINKING_END,
) -> Masked:
    """Render, tokenize and mask one conversation.

    Args:
        thinking: ``keep`` or ``mask``: whether what the model thinks before an answer is trained on.
        thinking_end: what ends the thinking inside a message's content.

    Raises:
        TemplateRefusal: the template refuses the conversation.
        RowFault: no assistant turn can be located.
    """

    def render(part: Sequence[Message], add_generation_prompt: bool) -> str:
        return _render(tokenizer, part, add_generation_prompt, tools)

    try:
        text = render(messages, False)
    except RowFault as fault:
        raise TemplateRefusal(fault.wanted, fault.found) from fault
    if _marks_replies(tokenizer) and tokenizer.is_fast:
        masked = _mask_by_template(tokenizer, messages, tools)
        if thinking == "keep":
            return masked
        spans, _ = assistant_spans(render, messages, text, list(tokenizer.all_special_tokens))
        spans, thought = answers_only(render, messages, text, spans, thinking_end)
        ids, answers = _tokens_and_mask(tokenizer, text, spans)
        if ids != masked.input_ids:
            raise RowFault("the same tokens from the text and from the template", "others")
        both = [a & b for a, b in zip(masked.loss_mask, answers, strict=True)]
        return Masked(ids, both, masked.turns, masked.rewritten_turns, thought)
    spans, rewritten = assistant_spans(render, messages, text, list(tokenizer.all_special_tokens))
    thought = 0
    if thinking == "mask":
        spans, thought = answers_only(render, messages, text, spans, thinking_end)
    ids, mask = _tokens_and_mask(tokenizer, text, spans)
    return Masked(ids, mask, len(spans), rewritten, thought)


def _marks_replies(tokenizer: Any) -> bool:
    """Whether the chat template marks the assistant's words itself."""
    template = tokenizer.chat_template
    template = template.get("default", "") if isinstance(template, dict) else template
    return isinstance(template, str) and _GENERATION.search(template) is not None


def _tokens_and_mask(tokenizer: Any, text: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    if tokenizer.is_fast:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, mask = list(encoded["input_ids"]), mask_from_offsets(text, encoded["offset_mapping"], spans)
    else:

        def encode(part: str) -> list[int]:
            return list(tokenizer(part, add_special_tokens=False)["input_ids"])

        ids = encode(text)
        mask = mask_from_prefixes(text, ids, spans, encode)
    return ids, mask


def _mask_by_template(tokenizer: Any, messages: Sequence[Message], tools: Any) -> Masked:
    try:
        encoded = tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
    except Exception as error:
        raise RowFault("a conversation the chat template accepts", f"{type(error).__name__}: {error}") from error
    mask = [int(bit) for bit in encoded["assistant_masks"]]
    return Masked(list(encoded["input_ids"]), mask, sum(m["role"] == "assistant" for m in messages), 0)


def _render(tokenizer: Any, messages: Sequence[Message], add_generation_prompt: bool, tools: Any) -> str:
    try:
        return str(
            tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )
    except Exception as error:
        raise RowFault("a conversation the chat template accepts", f"{type(error).__name__}: {error}") from error


def assistant_spans(
    render: Render, messages: Sequence[Message], text: str, special_tokens: Sequence[str] = ()
) -> tuple[list[tuple[int, int]], int]:
    """Character spans of ``text`` that the assistant wrote.

    Args:
        render: the chat template.
        messages: the conversation.
        text: ``render(messages, False)``.
        special_tokens: spellings of special tokens; white space after one that ends a turn is dropped.

    Returns:
        Half-open (start, end) spans in order, and how many turns a later rewrite left out.

    Raises:
        RowFault: the last assistant turn cannot be located.
    """
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    spans: list[tuple[int, int]] = []
    rewritten = 0
    for index in turns:
        span = _turn_span(render, messages, index, text, special_tokens)
        if span is not None and (not spans or span[0] >= spans[-1][1]):
            spans.append(span)
        elif index == turns[-1]:
            raise RowFault(
                "an assistant turn that can be told apart in the rendered text",
                "a chat template that rewrites the last assistant turn beyond recognition",
            )
        else:
            rewritten += 1
    return spans, rewritten


def _turn_span(
    render: Render, messages: Sequence[Message], index: int, text: str, special_tokens: Sequence[str]
) -> tuple[int, int] | None:
    """The span of one assistant turn, None where ``text`` does not hold it as rendered alone."""
    # The last turn is taken from the whole text, so messages after it (a tool result) do not matter.
    try:
        done = render(messages[: index + 1], False)
    except RowFault:
        return None
    start = _reply_start(render, messages, index, done)
    if start is None:
        return None
    end = len(done) - _tail_length(render, messages, index, done)
    shared = _shared(text, done)
    if shared < max(end, start) or end < start:
        return None
    whole = _end_of_turn(render, messages, index, done, end, special_tokens)
    # Where the turn goes on it may be ended by another token, which the model did not say.
    return start, whole if shared >= whole else end


def _reply_start(render: Render, messages: Sequence[Message], index: int, done: str) -> int | None:
    """Where the reply begins in ``done``: behind the generation prompt, or behind the header."""
    try:
        prompt = render(messages[:index], True)
    except RowFault:
        prompt = None  # e.g. an assistant turn that opens the conversation
    if prompt and done.startswith(prompt):
        return len(prompt)
    # The template's generation prompt is not what it writes in front of a finished reply
    # (an opened thinking block, say): what two different replies share in front is the header.
    probes = [_probe(render, messages, index, probe) for probe in _PROBES]
    if probes[0] is None or probes[1] is None:
        return None
    start = _shared(probes[0], probes[1])
    return start if done[:start] == probes[0][:start] else None


def _tail_length(render: Render, messages: Sequence[Message], index: int, done: str) -> int:
    """Characters that the template puts after a reply (end-of-turn token, newline)."""
    probes = [_probe(render, messages, index, probe) for probe in _PROBES]
    if probes[0] is None or probes[1] is None:
        return 0
    return min(_shared(probes[0][::-1], probes[1][::-1]), _shared(probes[0][::-1], done[::-1]))


def _probe(render: Render, messages: Sequence[Message], index: int, content: str) -> str | None:
    try:
        return render([*messages[:index], {"role": "assistant", "content": content}], False)
    except RowFault:
        return None


def _end_of_turn(
    render: Render, messages: Sequence[Message], index: int, done: str, end: int, special_tokens: Sequence[str]
) -> int:
    """Where the turn ends that has its last word at ``end``: behind the token that ends it.

    Some templates write the next header in any case; that is no part of the turn.
    """
    tail = done[end:]
    begins = end + len(tail) - len(tail.lstrip())
    ending = [token for token in special_tokens if token and done.startswith(token, begins)]
    if ending:
        return begins + max(map(len, ending))
    try:
        followed = render([*messages[: index + 1], {"role": "user", "content": _PROBES[0]}], False)
    except RowFault:
        followed = done
    shared = max(end, _shared(done, followed))
    # What is left ends in a special token (one that does not follow the reply at once), or is the template's own.
    stripped = done[:shared].rstrip()
    ends_in_special = any(token and stripped.endswith(token) for token in special_tokens)
    return max(end, len(stripped)) if ends_in_special else shared


def answers_only(
    render: Render, messages: Sequence[Message], text: str, spans: Sequence[tuple[int, int]], thinking_end: str
) -> tuple[list[tuple[int, int]], int]:
    """Take the thinking out of spans.

    Args:
        spans: from :func:`assistant_spans`.
        thinking_end: what ends the thinking inside a message's content.

    Returns:
        The spans from the first character of each answer on, and in how many there was thinking before it.
    """
    answers: list[tuple[int, int]] = []
    thought = 0
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    starts = {_answer_start(render, messages, index, text, thinking_end) for index in turns}
    for start, end in spans:
        # White space before an answer is no thinking.
        inside = [place for place in starts if place is not None and start < place <= end and text[start:place].strip()]
        thought += bool(inside)
        answers.append((min(inside, default=start), end))
    return answers, thought


def _answer_start(render: Render, messages: Sequence[Message], index: int, text: str, thinking_end: str) -> int | None:
    """Where the answer of a turn begins, behind its thinking; None where that cannot be told."""
    message = messages[index]
    content = str(message["content"])
    kept = ""
    if thinking_end in content and not any(message.get(key) for key in _THINKING_KEYS):
        answer = content.rpartition(thinking_end)[2].lstrip()
        kept = content[: len(content) - len(answer)]
    try:
        probes = [render([*messages[:index], dict(message) | {"content": kept + probe}], False) for probe in _PROBES]
    except RowFault:
        return None
    if probes[0] == probes[1]:
        return None  # the content of this message is not shown, as beside a tool call
    start = _shared(probes[0], probes[1])
    return start if text[:start] == probes[0][:start] else None


def mask_from_offsets(text: str, offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[int]:
    """Mask from a fast tokenizer's character offsets.

    A token counts when it begins inside a span. One that begins earlier counts only if what
    it takes from outside is white space (tokenizers glue a space to the next word).

    Args:
        offsets: half-open (start, end) per token; empty ones never count.
    """
    mask = [0] * len(offsets)
    current = 0
    for position, (start, end) in enumerate(offsets):
        while current < len(spans) and spans[current][1] <= start:
            current += 1
        if current == len(spans):
            break
        span_start, span_end = spans[current]
        if end <= start or end <= span_start or start >= span_end:
            continue
        if start >= span_start or not text[start:span_start].strip():
            mask[position] = 1
    return mask


def mask_from_prefixes(
    text: str, ids: Sequence[int], spans: Sequence[tuple[int, int]], encode: Callable[[str], list[int]]
) -> list[int]:
    """Mask for a tokenizer without offsets: tokenize the text up to each border.

    A token that straddles the start of a span is left out, one that straddles the end too.

    Raises:
        RowFault: cutting the text at a border changes tokens far before it, so that token
            positions cannot be told.
    """
    mask = [0] * len(ids)
    for start, end in spans:
        borders = []
        for border in (start, end):
            part = encode(text[:border])
            shared = _shared(ids, part)
            if len(part) - shared > 1:
                raise RowFault(
                    "a tokenizer whose tokens before a border do not depend on what follows",
                    f"{len(part) - shared} tokens that change when the text is cut at character {border}",
                )
            borders.append((shared, len(part)))
        (first_shared, first_length), (last_shared, _) = borders
        first = first_shared if first_shared == first_length else first_shared + 1
        for position in range(first, last_shared):
            mask[position] = 1
    return mask


def _shared(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Length of the common beginning of two texts or token lists."""
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length
