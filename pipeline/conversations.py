"""Conversation rows in the two shapes found in the wild, turned into one.

``{"messages": [{"role": ..., "content": ...}]}`` and ShareGPT's
``{"conversations": [{"from": ..., "value": ...}]}``. Anything else is a fault with a reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Message = dict[str, Any]

_ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}


_ONE_OBJECT = "one JSON object on the line"
# How files of other kinds begin, as ``surrogateescape`` decodes them.
_NOT_UTF8 = ((("\udcff\udcfe", "\udcfe\udcff"), "UTF-16 text"), (("\x1f\udc8b",), "a gzip file"))


class RowFault(Exception):
    """One row cannot be used; the message says what was wanted and found."""

    def __init__(self, wanted: str, found: str) -> None:
        self.wanted, self.found = wanted, found
        super().__init__(f"wanted {wanted}, found {found}")


@dataclass(frozen=True)
class Conversation:
    """One parsed row: its id and its messages, roles in the chat-template spelling."""

    row_id: str
    messages: tuple[Message, ...]
    tools: Any = None


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of a JSONL file with their numbers (from 1), blank ones left out.

    Only ``\\n`` ends a line: JSON text may hold other Unicode line separators.
    """
    with path.open("rb") as handle:
        for number, raw in enumerate(handle, start=1):
            text = raw.decode("utf-8", errors="surrogateescape").strip(" \t\r\n")
            if text:
                yield number, text


def parse_row(text: str, fallback_id: str) -> Conversation:
    """Parse one JSONL line.

    Args:
        text: the line.
        fallback_id: used when the row has no ``id``.

    Raises:
        RowFault: not JSON, no conversation, an unknown role, content that is not text.
    """
    return conversation_of(load_object(text), fallback_id)


def conversation_of(row: Mapping[str, Any], fallback_id: str, answered: bool = True) -> Conversation:
    """A conversation from a row of any kind of file.

    Args:
        row: its fields.
        fallback_id: used when the row has no ``id``.
        answered: whether it needs a message of the assistant.

    Raises:
        RowFault: no conversation, an unknown role, content that is not text.
    """
    key = "messages" if row.get("messages") is not None else "conversations"
    turns = row.get(key)
    if turns is None:
        empty = [name for name in ("messages", "conversations") if name in row]
        found = f"`{empty[0]}` is null" if empty else f"keys {', '.join(row) or 'none'}"
        raise RowFault("a list `messages` or `conversations`", found)
    if not isinstance(turns, list):
        raise RowFault(f"`{key}` to be a list", kind_of(turns))
    if not turns:
        raise RowFault("at least one user and one assistant message", "an empty conversation")
    messages = tuple(_message(turn, index) for index, turn in enumerate(turns))
    if answered and not any(message["role"] == "assistant" for message in messages):
        raise RowFault("at least one assistant message", f"roles {', '.join(str(m['role']) for m in messages)}")
    row_id = row.get("id", row.get("conversation_id"))
    return Conversation(fallback_id if row_id is None else str(row_id), messages, row.get("tools"))


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; of a name that is there twice, Python's own would silently take the second."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RowFault("each name once in an object", f"{twice!r} twice")
    return found


def load_object(text: str) -> dict[str, Any]:
    """Parse one line of JSONL, decoded with ``surrogateescape``; a byte order mark before it is dropped.

    Raises:
        RowFault: not UTF-8, not JSON, or not an object.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        known = (kind for starts, kind in _NOT_UTF8 if text.startswith(starts))
        raise RowFault("UTF-8 text", next(known, "bytes that are not UTF-8")) from None
    try:
        row = json.loads(text.removeprefix("\ufeff"), object_pairs_hook=_each_once)
    except json.JSONDecodeError as error:
        # Its own line number would count within this line.
        raise RowFault(_ONE_OBJECT, f"malformed JSON ({error.msg} at character {error.pos + 1})") from None
    except ValueError as error:
        raise RowFault(_ONE_OBJECT, f"malformed JSON ({error})") from None
    except RecursionError:
        raise RowFault(_ONE_OBJECT, "JSON nested too deep") from None
    if not isinstance(row, dict):
        raise RowFault(_ONE_OBJECT, kind_of(row))
    return row


def kind_of(value: Any) -> str:
    """What a parsed value is, in words."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    for kind, words in ((dict, "an object"), (list, "a list"), (str, "a text")):
        if isinstance(value, kind):
            return words
    return "a number" if isinstance(value, (int, float)) else type(value).__name__


def _message(turn: Any, index: int) -> Message:
    if not isinstance(turn, dict):
        raise RowFault(f"message {index} to be an object", kind_of(turn))
    role = turn.get("role", turn.get("from"))
    if not isinstance(role, str) or role.lower() not in _ROLES:
        raise RowFault(
            f"message {index} to have a role among {', '.join(sorted(_ROLES))}",
            repr(role) if isinstance(role, str) else kind_of(role),
        )
    content = turn.get("content", turn.get("value"))
    if content is None and turn.get("tool_calls"):
        content = ""
    if isinstance(content, list) and content and all(_is_text_part(part) for part in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise RowFault(f"message {index} ({role}) to have text content", kind_of(content))
    try:
        content.encode("utf-8")
    except UnicodeEncodeError:
        raise RowFault(f"message {index} to be valid Unicode", "an unpaired surrogate escape") from None
    # Tables have every field in every row; one without a value is no field.
    rest = {k: v for k, v in turn.items() if k not in {"role", "from", "content", "value"} and v is not None}
    return {"role": _ROLES[role.lower()], "content": content} | rest


def _is_text_part(part: Any) -> bool:
    """One of the parts that a content is given in where pictures may stand between texts."""
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
