"""``--preview N``: the first rows as the trainer will see them, what is trained on in colour."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from pipeline.row_preparation import Tokenized

_TRAINED, _GIVEN = "bold green", "dim"


def preview(tokenizer: Any, row: Tokenized, coloured: bool) -> Text:
    """One row's tokens.

    Args:
        coloured: green is trained on; without colours it stands between ``[[`` and ``]]``.
    """
    text = Text()
    text.append(f"{row.row_id}: {len(row.input_ids)} tokens, {sum(row.loss_mask)} trained on\n", "bold")
    position = 0
    while position < len(row.input_ids):
        end = position
        while end < len(row.input_ids) and row.loss_mask[end] == row.loss_mask[position]:
            end += 1
        trained = bool(row.loss_mask[position])
        # Whole runs: a character may be made of several tokens.
        words = tokenizer.decode(row.input_ids[position:end], skip_special_tokens=False)
        text.append(words if coloured or not trained else f"[[{words}]]", _TRAINED if trained else _GIVEN)
        position = end
    text.append("\n")
    return text
