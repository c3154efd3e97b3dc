"""Chat templates that are awkward in the ways of real ones, conversations, and the mask spelled out by hand.

Each case says which text is trained on, spans separated by a bar; ``answers`` is the same with the thinking left
out, where there is any. The templates are written for these tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One template and what a person would mark in what it renders."""

    template: str
    messages: Messages
    trained: str
    specials: tuple[str, ...]
    answers: str | None = None
    """With ``thinking="mask"``; None: the same."""
    left_out: int = 0
    """Turns that the template rewrites once the conversation goes on."""


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text} | more


CALL = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}

_CHATML = ("<|im_start|>", "<|im_end|>")

# Thinking in an entry of its own; that of earlier turns is dropped.
_THINKS_APART = """\
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.last and m.reasoning_content %}
<think>
{{ m.reasoning_content }}
</think>

{% endif %}
{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# The prompt opens the thinking, and finished turns never show it.
_DROPS_ALL_THINKING = """\
<bos>
{%- for m in messages -%}
{%- if m.role == 'user' %}<|User|>{{ m.content }}
{%- elif m.role == 'system' %}{{ m.content }}
{%- else %}<|Assistant|>{{ m.content.split('</think>')[-1] }}<eos>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|Assistant|><think>
{% endif %}"""

# Headers between tokens, contents trimmed, calls as JSON, a tool's answer under another role, a system turn of its own.
_HEADERS_AND_TOOLS = """\
<bos>
{%- if messages[0].role != 'system' %}<|start_header|>system<|end_header|>

Knowledge ends in 2024.<|eot|>
{%- endif -%}
{%- for m in messages -%}
<|start_header|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header|>

{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content | trim }}{% endif %}<|eot|>
{%- endfor -%}
{%- if add_generation_prompt %}<|start_header|>assistant<|end_header|>

{% endif %}"""

# No system role, strict alternation, the assistant under another name.
_NO_SYSTEM = """\
<bos>
{%- if messages[0].role == 'system' %}{{ raise_exception('there is no system role') }}{% endif -%}
{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('user and assistant in turns') }}{% endif -%}
<turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content | trim }}</turn>
{% endfor -%}
{%- if add_generation_prompt %}<turn>model
{% endif %}"""

# The system text moves in front of the last question, so earlier turns are rendered otherwise later.
_SYSTEM_MOVES = """\
<s>
{%- set told = messages[0].content if messages[0].role == 'system' else '' -%}
{%- set turns = messages[1:] if told else messages -%}
{%- set ns = namespace(last=0) -%}
{%- for m in turns %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in turns -%}
{%- if m.role == 'user' %}[INST] {{ told ~ ' ' if told and loop.index0 == ns.last else '' }}{{ m.content }}[/INST]
{%- else %} {{ m.content }}</s>
{%- endif -%}
{%- endfor -%}"""

# A default system turn, and an end of text behind everything unless a reply is asked for.
_END_OF_TEXT = """\
{%- if messages[0].role != 'system' %}<|system|>
Be helpful.<|end|>
{% endif -%}
{%- for m in messages -%}
<|{{ m.role }}|>
{{ m.content }}<|end|>
{% endfor -%}
{%- if add_generation_prompt %}<|assistant|>
{% else %}<|endoftext|>{% endif %}"""

# Words for headers, and one special token.
_PLAIN_WORDS = """\
{%- for m in messages -%}
{%- if m.role == 'user' %}USER: {{ m.content }} {% elif m.role == 'assistant' %}ASSISTANT: {{ m.content }}</s>
{%- else %}{{ m.content }} {% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}ASSISTANT:{% endif %}"""

# Asks for the next reply in any case.
_ALWAYS_ASKS = """\
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor -%}
<|im_start|>assistant{{ '\n' }}"""

# The same without special tokens.
_ALWAYS_ASKS_IN_WORDS = """\
{%- for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor -%}
assistant:"""

# The beginning of sequence again before every question, and a space before the end.
_BOS_EACH_TURN = """\
{%- for m in messages -%}
{%- if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]{% else %} {{ m.content }} </s>{% endif -%}
{%- endfor -%}"""

# Channels: thinking is a message of its own, gone from earlier turns, and only the last turn ends with <|return|>.
_CHANNELS = """\
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- if m.thinking and loop.last %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif -%}
<|start|>assistant<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

# A token between name and words, and calls between tokens of their own before the end.
_MIDDLE = """\
{%- for m in messages -%}
<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}
{%- if m.tool_calls %}<|calls|>{{ m.tool_calls[0].function.name }}<|args|>
{{- m.tool_calls[0].function.arguments | tojson }}<|/calls|>{% endif -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""

_TURNS = ("<bos>", "<turn>", "</turn>")
_CHANNEL_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")
_MIDDLE_NAMES = ("im_user", "im_assistant", "im_tool", "im_middle", "im_end", "calls", "args", "/calls")
_MIDDLE_TOKENS = tuple(f"<|{name}|>" for name in _MIDDLE_NAMES)

CASES = {
    "thinking in an entry of its own": Case(
        _THINKS_APART,
        [user("Hi"), says("Yes.", reasoning_content="hm"), user("And?"), says("No.", reasoning_content="well")],
        "<think>\nwell\n</think>\n\nNo.<|im_end|>",
        _CHATML,
        answers="No.<|im_end|>",
        left_out=1,
    ),
    "no thinking, same template": Case(
        _THINKS_APART, [user("Hi"), says("Yes."), user("And?"), says("No.")], "Yes.<|im_end|>|No.<|im_end|>", _CHATML
    ),
    "thinking never shown": Case(
        _DROPS_ALL_THINKING,
        [system("Be kind."), user("Hi"), says("<think>\nhm\n</think>Yes."), user("And?"), says("No.")],
        "Yes.<eos>|No.<eos>",
        ("<bos>", "<eos>", "<|User|>", "<|Assistant|>"),
    ),
    "tool calls": Case(
        _HEADERS_AND_TOOLS,
        [
            user("What time is it?"),
            says("", tool_calls=[CALL]),
            {"role": "tool", "content": "12:00"},
            says("  Noon. "),
            user("Thanks"),
            says("Sure."),
        ],
        '{"name": "clock", "arguments": {"zone": "UTC"}}<|eot|>|Noon.<|eot|>|Sure.<|eot|>',
        ("<bos>", "<|start_header|>", "<|end_header|>", "<|eot|>"),
    ),
    "no system role, forced alternation": Case(
        _NO_SYSTEM, [user(" Hi "), says("Yes.\n"), user("And?"), says("No.")], "Yes.</turn>|No.</turn>", _TURNS
    ),
    "the system text moves to the last question": Case(
        _SYSTEM_MOVES,
        [system("Be kind."), user("Hi"), says("Yes."), user("And?"), says("No.")],
        " No.</s>",
        ("<s>", "</s>"),
        left_out=1,
    ),
    "end of text behind everything": Case(
        _END_OF_TEXT,
        [user("Hi"), says("Yes."), user("And?"), says("No.")],
        "Yes.<|end|>|No.<|end|>",
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
    ),
    "headers in plain words": Case(
        _PLAIN_WORDS,
        [system("A chat."), user("Hi"), says("Yes. ASSISTANT: USER:"), user("And?"), says("No.")],
        " Yes. ASSISTANT: USER:</s>| No.</s>",
        ("</s>",),
    ),
    "trailing generation prompt": Case(
        _ALWAYS_ASKS, [user("Hi"), says("Yes."), user("And?"), says("No.")], "Yes.<|im_end|>|No.<|im_end|>", _CHATML
    ),
    "trailing generation prompt in words": Case(
        _ALWAYS_ASKS_IN_WORDS, [user("Hi"), says("Yes."), user("And?"), says("No.")], " Yes.\n| No.\n", ()
    ),
    "bos before every question": Case(
        _BOS_EACH_TURN, [user("Hi"), says("Yes."), user("And?"), says("No.")], " Yes. </s>| No. </s>", ("<s>", "</s>")
    ),
    "channels": Case(
        _CHANNELS,
        [user("Hi"), says("Yes.", thinking="hm"), user("And?"), says("No.", thinking="well")],
        "<|channel|>analysis<|message|>well<|end|><|start|>assistant<|channel|>final<|message|>No.<|return|>",
        _CHANNEL_TOKENS,
        answers="No.<|return|>",
        left_out=1,
    ),
    "channels without thinking, another end in between": Case(
        _CHANNELS,
        [user("Hi"), says("Yes."), user("And?"), says("No.")],
        "<|channel|>final<|message|>Yes.|<|channel|>final<|message|>No.<|return|>",
        _CHANNEL_TOKENS,
        answers="Yes.|No.<|return|>",
    ),
    "calls between tokens, words before them": Case(
        _MIDDLE,
        [user("Time?"), says("Let me see.", tool_calls=[CALL]), {"role": "tool", "content": "12:00"}, says("Noon.")],
        'Let me see.<|calls|>clock<|args|>{"zone": "UTC"}<|/calls|><|im_end|>|Noon.<|im_end|>',
        _MIDDLE_TOKENS,
    ),
}

REFUSALS = {
    "a system turn": (_NO_SYSTEM, _TURNS, [system("x"), user("Hi"), says("Yes.")], "there is no system role"),
    "two questions in a row": (_NO_SYSTEM, _TURNS, [user("Hi"), user("Hi"), says("Yes.")], "in turns"),
    "the assistant first": (_NO_SYSTEM, _TURNS, [says("Yes."), user("Hi")], "in turns"),
}
