"""Which rows were never trained on, and what is in them at the layers that a server uses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import manifest
from pipeline.formats import DamagedRow
from pipeline.formats.registry import NORMED, RESIDUAL, open_rows, wanted_row
from pipeline.layers import NATIVE, LayerIds
from pipeline.model_info import ModelInfo
from pipeline.reference import Reference
from pipeline.training_data import split_rows
from shims.errors import UsageError


@dataclass(frozen=True)
class Row:
    """One held-out row."""

    index: int
    tokens: list[int]
    mask: list[int]


@dataclass(frozen=True)
class States:
    """What a draft and the verifier's head read of a row."""

    row: Row
    auxiliary: Any
    """[T, 3 H], ascending layers side by side."""
    own: list[int]
    """The verifier's greedy choice behind each token."""


class HeldOut:
    """The held-out rows of a folder of states."""

    def __init__(self, folder: Path, training: dict[str, Any] | None, which: str = "held-out") -> None:
        """Find them.

        Args:
            training: the draft's manifest; it tells the split.
            which: ``held-out``, or ``all`` for data that no row of was trained on.

        Raises:
            UsageError: no states there, or nobody tells which rows were held out.
        """
        self.record = manifest.require_rows(folder, "--data")
        self.folder = folder
        self.layers = LayerIds(tuple(self.record["layers"]["ids"]), self.record["layers"]["convention"])
        self.normed = self.record.get("last_state", RESIDUAL) == NORMED
        self.fingerprint = str(self.record["model"]["fingerprint"])
        self._store = open_rows(folder, self.record)
        self._checked: set[int] = set()
        self.rows = self._chosen(training, which)

    def _chosen(self, training: dict[str, Any] | None, which: str) -> list[int]:
        left_out = {bad["row"] for bad in self.record.get("bad_rows", [])}
        there = [index for index in range(int(self.record["counts"]["rows"])) if index not in left_out]
        if which == "all":
            return [index for index in there if self._first_trainable(index)]
        if training is None:
            raise UsageError(
                "--rows held-out", "a draft with the manifest of its training, which tells the split", "no manifest",
                "give states that were not trained on, with --rows all",
            )  # fmt: skip
        mine = manifest.rows_identity(self.record)
        if training.get("inputs", {}).get("prepared_data") != mine:
            raise UsageError(
                f"--data {self.folder}", "the data that the draft was trained on, whose split is known",
                "other prepared data", "if no row of it was trained on, say so: --rows all",
            )  # fmt: skip
        # The trainer draws its split from the rows with a trainable token in what it keeps of them.
        limit = int(training["max_seq_len"]) + 1
        drawn = [index for index in there if 0 < self._first_trainable(index) < limit]
        stated = training.get("inputs", {}).get("rows", len(drawn))
        if stated != len(drawn):
            raise UsageError(
                f"--data {self.folder}", f"the {stated} rows that the training drew its held-out rows from",
                f"{len(drawn)} of them: the split would be another one, with rows that were trained on",
                "give the states that the draft was trained on, or others that it was not, with --rows all",
            )  # fmt: skip
        return split_rows(drawn, float(training["val_share"]), int(training["seed"]))[1]

    def _first_trainable(self, index: int) -> int:
        """Place of a row's first token to train on; 0 where there is none, since the first token is never predicted."""
        return next((place for place, bit in enumerate(self.row(index).mask) if bit and place), 0)

    def row(self, index: int) -> Row:
        """Tokens and mask of a row.

        Raises:
            UsageError: it is missing, damaged, or another row.
        """
        with self._told(index):
            # A row under another's number would be held out in its place.
            if index not in self._checked:
                self._store.check(index, wanted_row(self.record, index))
                self._checked.add(index)
            tokens, mask = self._store.tokens(index)
        return Row(index, tokens, mask if mask is not None else [1] * len(tokens))

    @contextlib.contextmanager
    def _told(self, index: int) -> Iterator[None]:
        try:
            yield
        except (DamagedRow, FileNotFoundError) as error:
            raise UsageError(
                f"row {index} in {self._store.locate(index)}", "a whole row", str(error) or "missing",
                "run the same `specshim extract` again to repair it",
            ) from error  # fmt: skip

    def each(self) -> Iterator[Row]:
        """All held-out rows."""
        for index in self.rows:
            yield self.row(index)

    def holds(self, native: Sequence[int]) -> bool:
        """Whether the folder holds the states of these native layers."""
        return set(native) <= set(self.layers.native)

    def states(self, index: int, auxiliary: Sequence[int], last: int) -> tuple[Any, Any]:
        """(auxiliary states [T, len * H], last states [T, H]) of a row, from the folder."""
        with self._told(index):
            stored = self._store.read(index).states
        column = {layer: place for place, layer in enumerate(self.layers.native)}
        return stored[:, [column[layer] for layer in auxiliary]].flatten(1), stored[:, column[last]]


class Recomputed:
    """States of any row at any layers, from transformers: where a folder does not hold them."""

    def __init__(
        self, verifier: ModelInfo, auxiliary: Sequence[int], *, dtype: str, device: str, trust_remote_code: bool
    ) -> None:
        layers = LayerIds(tuple(sorted(auxiliary)), NATIVE)
        self._reference = Reference(
            verifier, layers, weights_dtype=dtype, device=device, trust_remote_code=trust_remote_code
        )

    def states(self, rows: Sequence[Row]) -> Iterator[States]:
        """The rows with their states; the verifier's choice is that of the same run."""
        for row in rows:
            states, own = self._reference.states(row.tokens)
            yield States(row, states.flatten(1), own.tolist())
