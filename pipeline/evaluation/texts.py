"""The parts of an evaluation that need no server: a draft on held-out rows, and on a server's own answers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from pipeline import manifest
from pipeline.devices import computing_dtype
from pipeline.evaluation.held_out import HeldOut, Recomputed, Row, States
from pipeline.evaluation.request import DRAFT, NONE
from pipeline.evaluation.results import HELD_OUT, REPLAY, Results, name_of
from pipeline.evaluation.task import FILES, Task, chosen_rows, facts_of
from pipeline.model_info import sha256_file
from pipeline.progress import console, stage_progress
from pipeline.serving.draft_folder import DraftFolder
from shims.errors import SpecshimError


def teacher_force(task: Task, results: Results, drafts: Mapping[str, DraftFolder]) -> None:
    """Measure the drafts on the held-out rows, at the layers that the server uses."""
    held_out = task.held_out
    if held_out is None:
        results.not_run["teacher-forced"] = "no --data"
        return
    rows = chosen_rows(task)
    stored = held_out.holds([*task.layers, task.verifier.num_layers])
    if not stored:
        console.print(
            f"the folder holds native layers {' '.join(map(str, held_out.layers.native))}: those of "
            f"{' '.join(map(str, task.layers))} are computed anew, with transformers",
            highlight=False,
            soft_wrap=True,
        )

    def states() -> Iterator[States]:
        return _stored_states(task, held_out, rows) if stored else _recomputed(task).states(rows)

    for kind, draft in drafts.items():
        name = name_of(HELD_OUT, kind)
        made_from = facts_of(task, draft) | {
            "rows": [row.index for row in rows],
            # Extracted anew, the same rows may have other states.
            "data": sha256_file(held_out.folder / manifest.FILE_NAME),
            "computed_in": None if stored else _dtype(task),
        }
        try:
            results.teacher_forced[name] = task.parts.get(
                f"held_out_{FILES[kind]}", made_from, partial(_measured, task, draft, states, len(rows))
            )
        except SpecshimError as error:
            # A server's environment may lack what computes a draft outside of it, and still serve.
            if not task.config.serve:
                raise
            results.not_run[f"teacher-forced, {name}"] = error.found
            console.print(str(error), highlight=False, markup=False, soft_wrap=True)
    _free_memory(task)


def replay(task: Task, results: Results, prompts: Sequence[Sequence[int]]) -> None:
    """Teacher-force the verifier's own greedy answers: the very texts that the server's draft has worked on."""
    base = results.engines.get(NONE)
    if not task.config.replay or base is None or DRAFT not in results.engines:
        return
    rows = [
        Row(number, [*prompt, *said], [0] * len(prompt) + [1] * len(said))
        for number, (prompt, said) in enumerate(zip(prompts, base.outputs, strict=True))
    ]
    made_from = facts_of(task, task.fed) | {"rows": [row.tokens for row in rows], "computed_in": _dtype(task)}
    try:
        results.teacher_forced[name_of(REPLAY, DRAFT)] = task.parts.get(
            "replay_draft", made_from,
            lambda: _measured(task, task.fed, lambda: _recomputed(task).states(rows), len(rows)),
        )  # fmt: skip
    except SpecshimError as error:
        results.not_run[REPLAY] = error.found


def _stored_states(task: Task, held_out: HeldOut, rows: list[Row]) -> Iterator[States]:
    from pipeline.evaluation.verifier_head import VerifierHead

    head = VerifierHead(
        task.verifier, task.device, normed=held_out.normed, trust_remote_code=task.config.trust_remote_code
    )
    for row in rows:
        # A server hands them out in ascending order, whatever the order in which they were named.
        auxiliary, last = held_out.states(row.index, sorted(task.layers), task.verifier.num_layers)
        yield States(row, auxiliary, head.next_tokens(last))


def _recomputed(task: Task) -> Recomputed:
    return Recomputed(
        task.verifier,
        task.layers,
        dtype=_dtype(task),
        device=task.device,
        trust_remote_code=task.config.trust_remote_code,
    )


def _dtype(task: Task) -> str:
    return computing_dtype(task.config.dtype, task.verifier.dtype)


def _measured(task: Task, draft: DraftFolder, states: Callable[[], Iterator[States]], rows: int) -> dict[str, Any]:
    import torch

    from pipeline.evaluation.draft_model import load_draft
    from pipeline.evaluation.teacher_forced import measure

    try:
        model = load_draft(draft, task.verifier, task.device, task.config.trust_remote_code)
        with stage_progress("teacher-forced", rows) as progress:
            return measure(model, states(), task.steps, progress).as_dict()
    except torch.cuda.OutOfMemoryError as error:
        # Servers may spread a verifier over several devices, of which this is one.
        raise SpecshimError(
            f"teacher-forced, --device {task.device}",
            "memory for the draft and for what is computed of the verifier, in float32",
            str(error).partition("\n")[0],
            "give --device cpu; for the servers' own answers, --no-replay leaves this out",
        ) from error


def _free_memory(task: Task) -> None:
    """What torch keeps of a device: the engines that follow want it, and find it taken."""
    import torch

    if task.device != "cpu":
        gc.collect()  # a model's own code may have cycles
        torch.cuda.empty_cache()
