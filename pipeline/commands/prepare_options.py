"""The options of `specshim prepare` beside the obvious ones, and what it prints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

if TYPE_CHECKING:
    from pipeline.prepare import Prepared
    from pipeline.row_preparation import Refused, Tokenized

Split = Annotated[str | None, typer.Option(help="Of a saved data set that has several.")]
Thinking = Annotated[
    str, typer.Option(help="keep: what the model thinks before an answer is trained on; mask: it is not.")
]
ThinkingEnd = Annotated[str, typer.Option(help="What ends the thinking inside a message.")]
Duplicates = Annotated[str, typer.Option(help="Rows with the tokens of an earlier one: drop, keep or refuse.")]
Workers = Annotated[int, typer.Option(help="Processes to tokenize in.")]
Preview = Annotated[int, typer.Option(help="Print the first N rows, what is trained on in colour; write nothing.")]


def lines_of(result: Prepared, max_seq_len: int, output_dir: object) -> Iterable[str]:
    """The outcome of a run."""
    share = result.trainable_tokens / result.tokens
    yield f"{result.rows} rows, {result.tokens} tokens, {share:.0%} of them the assistant's -> {output_dir}"
    yield result.thinking + (f" ({result.thinking_turns} turns)" if result.thinking_turns else "")
    if result.truncated_rows:
        yield f"{result.truncated_rows} rows were cut at {max_seq_len} tokens"
    if result.rewritten_turns:
        yield (
            f"{result.rewritten_turns} earlier assistant turns are not trained on: "
            "the chat template rewrites them once the conversation goes on"
        )
    if result.duplicate_rows:
        yield f"{result.duplicate_rows} rows have the tokens of an earlier row"
    if result.refused_by_template:
        yield f"{result.refused_by_template} rows left out: the chat template refuses them"
    if result.unusable_rows:
        yield f"{result.unusable_rows} rows left out: unusable"


def shown(tokenizer: Any, row: Tokenized | Refused, coloured: bool) -> Text:
    """A row for ``--preview``, or why there is none."""
    from pipeline.preview import preview
    from pipeline.row_preparation import Refused

    return Text(f"left out: {row}\n") if isinstance(row, Refused) else preview(tokenizer, row, coloured)
