"""Packed batches straight from the rows: each row is copied once, into its place in the batch.

A batch equals what speculators' own dataset and collate function make of the same rows, tensor by
tensor (`tests/live_train.py` compares them in every release's environment); they copy a row three times.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pipeline.formats import DamagedRow, StateRow
from pipeline.formats.stores import Remote, RowStore
from pipeline.lock import leave_to_parent
from pipeline.training_series import Series
from shims.errors import SpecshimError

Batch = dict[str, Any]
_ERROR = "error"
AHEAD = 2
"""Batches that each process which reads ahead has ready."""


class PackedRows:
    """Batches by the positions of their rows, for a torch DataLoader.

    A batch holds, for B packed sequences of T = ``max_tokens`` (B is 1 unless several are stacked):
    ``hidden_states`` [B, T, 3H] (auxiliary layers side by side) and ``verifier_last_hidden_states`` [B, T, H],
    both of ``dtype``; ``input_ids``, ``loss_mask`` and ``position_ids`` int64 [B, T]; the rows' extents as
    ``lengths`` or ``document_ids``. Token t + 1 stands beside the auxiliary states of token t, so a row is one
    shorter than stored. The end is padded with zeros.
    """

    def __init__(
        self,
        store: RowStore,
        rows: Sequence[int],
        lengths: Sequence[int],
        series: Series,
        *,
        max_tokens: int,
        dtype: Any,
        noise: float = 0.0,
        seed: int = 0,
    ) -> None:
        """Take the rows ``rows`` of ``store``.

        Args:
            lengths: tokens of each of these rows, as stored.
            noise: each auxiliary state is moved by up to this, uniformly; the same amount for the same row and
                epoch in any order, process or resumed run.
        """
        self._store, self._rows, self._series = store, list(rows), series
        self._max, self._dtype, self._noise, self._seed = max_tokens, dtype, noise, seed
        self.lengths = [length - 1 for length in lengths]
        self.epoch = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, groups: Sequence[Sequence[int]]) -> Batch:
        """The batch of the given groups of positions, one group for each packed sequence."""
        import torch

        self.expect(groups)
        try:
            packed = [self._pack(group) for group in groups]
        except SpecshimError as error:
            # A loader's process hands on an error's text alone; its four parts go the way of batches.
            return {_ERROR: (error.where, error.wanted, error.found, error.next_step)}
        batch: Batch = {
            name: torch.cat([part[name] for part in packed]) if len(packed) > 1 else packed[0][name]
            for name in packed[0]
            if name != "extents"
        }
        extents = [part["extents"] for part in packed]
        if self._series.documents == "lengths":
            batch["lengths"] = _stacked_lengths(extents)
        else:
            batch["document_ids"] = torch.stack([_document_ids(part, self._max) for part in extents])
        if self._series.counts_errors:
            batch["error_records"] = 0
        batch["tokens"] = sum(map(sum, extents))
        return batch

    def expect(self, groups: Sequence[Sequence[int]]) -> None:
        """Have the rows of a batch fetched that is asked for soon; nothing where they are files."""
        if isinstance(self._store, Remote):
            self._store.expect([self._rows[int(position)] for group in groups for position in group])

    def _pack(self, group: Sequence[int]) -> Batch:
        import torch

        batch: Batch = {"extents": []}
        at = 0
        for position in group:
            row = self._read(self._rows[int(position)])
            length = min(len(row.token_ids) - 1, self._max - at)
            if length <= 0:
                break
            states = row.states
            if at == 0:
                batch |= self._unfilled(states.shape[1] - 1, states.shape[2])
            to, last = slice(at, at + length), slice(1, length + 1)
            auxiliary = batch["hidden_states"].view(self._max, states.shape[1] - 1, states.shape[2])
            auxiliary[to].copy_(states[:length, :-1])
            if self._noise:
                auxiliary[to] += self._moved(self._rows[int(position)], auxiliary[to].shape)
            batch["verifier_last_hidden_states"][0, to].copy_(states[last, -1])
            batch["input_ids"][0, to] = row.token_ids[last]
            batch["loss_mask"][0, to] = row.loss_mask[last]
            batch["position_ids"][0, to] = torch.arange(1, length + 1)
            batch["extents"].append(length)
            at += length
        for name in batch.keys() - {"extents"}:
            batch[name][0, at:].zero_()
        return batch

    def _read(self, index: int) -> StateRow:
        try:
            return self._store.read(index)
        except (DamagedRow, FileNotFoundError) as damage:
            # They were whole when the training began.
            raise SpecshimError(
                f"row {index} in {self._store.locate(index)}",
                "a whole row",
                str(damage),
                "look at the disk and at who writes there; run the same `specshim extract` again to repair it",
            ) from damage

    def _unfilled(self, auxiliary: int, hidden: int) -> Batch:
        import torch

        numbers = ("input_ids", "loss_mask", "position_ids")
        return {
            "hidden_states": torch.empty(1, self._max, auxiliary * hidden, dtype=self._dtype),
            "verifier_last_hidden_states": torch.empty(1, self._max, hidden, dtype=self._dtype),
            **{name: torch.empty(1, self._max, dtype=torch.long) for name in numbers},
        }

    def _moved(self, row: int, shape: Any) -> Any:
        import torch

        name = f"{self._seed} {self.epoch} {row}".encode()
        number = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1
        generator = torch.Generator().manual_seed(number)
        return torch.empty(shape, dtype=self._dtype).uniform_(-self._noise, self._noise, generator=generator)


def _stacked_lengths(extents: Sequence[Sequence[int]]) -> Any:
    """int64 [rows], or for several sequences [B, most rows] with zeros behind: a document of no token is none."""
    import torch

    if len(extents) == 1:
        return torch.tensor(extents[0], dtype=torch.long)
    most = max(map(len, extents))
    return torch.tensor([[*part, *[0] * (most - len(part))] for part in extents], dtype=torch.long)


def _document_ids(extents: Sequence[int], total: int) -> Any:
    """int64 [total]: each token's row, counted from 0; -1 in the padding."""
    import torch

    ids = torch.full((total,), -1, dtype=torch.long)
    at = 0
    for number, length in enumerate(extents):
        ids[at : at + length] = number
        at += length
    return ids


def _begin_reading(_worker: int) -> None:
    leave_to_parent()


class BatchStream:
    """What speculators' trainer takes for its data loader: one epoch at a time, from any batch on.

    The trainer asks for the next batch when the step before it is done, so what is to happen after a step
    happens in between: ``after_step`` is called then, and says whether to go on.
    """

    def __init__(
        self,
        rows: PackedRows,
        samplers: Sequence[Any],
        *,
        workers: int = 0,
        pinned: bool = False,
        before_step: Callable[[int], None] | None = None,
        after_step: Callable[[int], bool] | None = None,
    ) -> None:
        """Stream ``rows`` in the batches of ``samplers``.

        Args:
            samplers: speculators' batch samplers, one for each packed sequence of a batch; equally long.
            workers: processes that read ahead; 0 reads in this one.
            before_step: called with the tokens of the batch that is handed out.
            after_step: called with the number of batches of this epoch that are done; False ends the epoch.
        """
        self._rows, self._samplers, self._workers, self._pinned = rows, list(samplers), workers, pinned
        self._before, self._after = before_step, after_step
        self._skip = 0

    @property
    def batch_sampler(self) -> BatchStream:
        """The trainer sets the epoch through it."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Shuffle and pack anew, the same way for the same epoch."""
        self._rows.epoch = epoch
        for sampler in self._samplers:
            sampler.set_epoch(epoch)

    def skip(self, batches: int) -> None:
        """Leave out the first ``batches`` of the next epoch: they are done."""
        self._skip = batches

    def __len__(self) -> int:
        return min(len(sampler) for sampler in self._samplers)

    def __iter__(self) -> Iterator[Batch]:
        from torch.utils.data import DataLoader

        groups = list(zip(*self._samplers, strict=True))
        done, self._skip = self._skip, 0
        # Workers are made anew for each epoch: they copy the rows' epoch when they start.
        loader = DataLoader(
            self._rows,
            sampler=groups[done:],
            batch_size=None,
            num_workers=self._workers,
            pin_memory=self._pinned,
            prefetch_factor=AHEAD if self._workers else None,
            worker_init_fn=_begin_reading,
        )
        for batch in loader:
            if not self._workers and done + 1 < len(groups):
                self._rows.expect(groups[done + 1])
            if _ERROR in batch:
                raise SpecshimError(*batch[_ERROR])
            tokens = batch.pop("tokens")
            if self._before is not None:
                self._before(tokens)
            yield batch
            done += 1
            if self._after is not None and not self._after(done):
                return
