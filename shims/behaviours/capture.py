"""Capture of hidden states in a vLLM worker: forward hooks on decoder layers, rows tied to request ids.

The model's own forward stays as it is, so whatever an architecture does there (embedding scale,
extra inputs, renamed members) is kept. Which rows of a step belong to which request is read from
the model runner; then the token ids and positions that really passed through the model are compared
with the request, row by row. Anything that does not agree is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from shims import cpu_norm
from shims.errors import WrongStatesError
from shims.model_parts import (
    adds_residual,
    decoder_stack,
    devices_of,
    embedding_of,
    follow_batches,
    layers_of,
    model_of,
    refuse_missing_layers,
    refuse_partial_layers,
    refuse_scaled_layers,
    runner_kind,
    split_output,
)
from shims.proof import prove

# Replied by a worker whose capture is the shims'; the stock extension replies None.
PROTOCOL = 1


@dataclass
class _Request:
    """What is known and captured of one request.

    `states[i]` is [tokens of the prompt, hidden size] for the i-th captured layer, on the CPU.
    """

    token_ids: list[int]
    states: list[Any] = field(default_factory=list)
    seen: Any = None  # bool [tokens of the prompt]


@dataclass
class _Step:
    """What passed through the model in one step, on the device."""

    order: list[str] | None = None
    token_ids: Any = None
    positions: Any = None
    states: dict[int, Any] = field(default_factory=dict)


class Capture:
    """Follows one model runner. Built in each worker; records on rank 0 only, where states are whole.

    Args:
        worker: vLLM's worker, with the model loaded.
        layer_ids: layers after which the residual stream is taken (convention `after`), ascending.

    Raises:
        WrongStatesError: the model or the runner cannot be followed.
    """

    def __init__(self, worker: Any, layer_ids: Iterable[int]) -> None:
        self.layer_ids = sorted(set(layer_ids))
        self.requests: dict[str, _Request] = {}
        self._step: _Step | None = None
        # Model runner V2 warms its kernels up with requests of its own, decode steps among them: only
        # what follows the generator's first reset is the generator's.
        self.listening = False
        self._runner = worker.model_runner
        self.records = worker.rank == 0
        self.runner = runner_kind(self._runner)
        self.model = type(model_of(self._runner)).__name__
        if self.records:
            self._attach(devices_of(worker))

    def _attach(self, devices: int) -> None:
        base = decoder_stack(model_of(self._runner))
        layers = layers_of(base)
        refuse_missing_layers(base, self.layer_ids)
        refuse_scaled_layers(base, self.layer_ids)
        refuse_partial_layers(base, self.layer_ids, devices)
        layers[self.layer_ids[0]].register_forward_pre_hook(self._before_first, with_kwargs=True)
        for layer_id in self.layer_ids:
            layers[layer_id].register_forward_hook(self._after(layer_id, adds_residual(layers[layer_id])))
        embedding_of(base).register_forward_pre_hook(self._embedding, with_kwargs=True)
        model_of(self._runner).register_forward_pre_hook(self._whole_model, with_kwargs=True)
        self._follow_runner()

    def _follow_runner(self) -> None:
        runner, execute = self._runner, self._runner.execute_model

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            real = self.listening and not kwargs.get("dummy_run") and scheduler_output.total_num_scheduled_tokens
            if not real:
                return execute(scheduler_output, *args, **kwargs)
            for new in scheduler_output.scheduled_new_reqs:
                self.requests[new.req_id] = _Request(list(new.prompt_token_ids or []))
            self._step = _Step()
            try:
                with _configured(runner):
                    result = execute(scheduler_output, *args, **kwargs)
                self._keep(self._step, scheduler_output.num_scheduled_tokens)
                return result
            finally:
                self._step = None

        runner.execute_model = execute_model
        if self.runner == "v2":
            follow_batches(runner, self._ordered)

    def _ordered(self, request_ids: list[str]) -> None:
        if self._step is not None:
            self._step.order = request_ids

    # Hooks. Each does nothing outside a real step: warm-up and profiling pass through them too.

    def _whole_model(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Some models read the embedding's weights without calling the module."""
        ids = kwargs.get("input_ids", args[0] if args else None)
        if self._step is not None and self._step.token_ids is None and ids is not None:
            self._step.token_ids = ids.detach().reshape(-1).clone()

    def _embedding(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Multimodal models embed before the forward, which then sees vectors only."""
        if self._step is not None:
            ids = args[0] if args else next(iter(kwargs.values()))
            self._step.token_ids = ids.detach().reshape(-1).clone()

    def _before_first(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step = self._step
        if step is None:
            return
        if self.runner == "v1":
            step.order = list(self._runner.input_batch.req_ids)
        positions = kwargs.get("positions")
        if positions is None:
            positions = next((a for a in args if not a.is_floating_point()), None)
        if positions is not None:
            # Multimodal rotary embeddings carry one row per axis; on text all rows are equal.
            step.positions = (positions[0] if positions.dim() > 1 else positions).detach().clone()

    def _after(self, layer_id: int, adds: bool) -> Callable[[Any, Any, Any], None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            if self._step is not None:
                self._step.states[layer_id] = residual_stream(output, type(module).__name__, adds)

        return hook

    def _keep(self, step: _Step, scheduled: dict[str, int]) -> None:
        """Move one step's rows to the CPU and hand them to their requests, after checking each."""
        import torch

        total = sum(scheduled.values())
        missing = [i for i in self.layer_ids if i not in step.states]
        if missing or step.order is None or step.token_ids is None or step.positions is None:
            found = [name for name in ("order", "token_ids", "positions") if getattr(step, name) is None]
            raise WrongStatesError(
                f"worker, {self.model} on {type(self._runner).__name__}",
                "every captured layer to run once a step, with token ids and positions",
                f"no output of layers {missing}; not seen: {found or 'nothing else'}",
                "report this model: its layers are called in a way the capture does not know",
            )
        states = [step.states[i][:total].to("cpu") for i in self.layer_ids]
        token_ids = step.token_ids[:total].to("cpu", torch.int64)
        positions = step.positions[:total].to("cpu", torch.int64)
        counts = [scheduled.get(request_id, 0) for request_id in step.order]
        if sum(counts) != total or not all(len(s) == total for s in states):
            raise WrongStatesError(
                "worker, one step", f"{total} rows", f"{sum(counts)} rows of known requests, {len(states[0])} states",
                "report this: the batch holds requests that the scheduler did not send",
            )  # fmt: skip
        start = 0
        for request_id, count in zip(step.order, counts, strict=True):
            rows = slice(start, start + count)
            if count:
                self._give(request_id, [s[rows] for s in states], token_ids[rows], positions[rows])
            start = rows.stop

    def _give(self, request_id: str, states: list[Any], token_ids: Any, positions: Any) -> None:
        import torch

        request = self.requests.get(request_id)
        if request is None:
            return  # began before the last reset: nobody asks for it
        prompt = torch.tensor(request.token_ids, dtype=torch.int64)
        first = prove(request_id, prompt, token_ids, positions, self.runner)
        if not request.states:
            request.states = [torch.empty(len(prompt), s.shape[-1], dtype=s.dtype) for s in states]
            request.seen = torch.zeros(len(prompt), dtype=torch.bool)
        rows = slice(first, first + len(token_ids))
        for whole, part in zip(request.states, states, strict=True):
            whole[rows] = part
        request.seen[rows] = True

    def take(self, request_ids: Iterable[str]) -> dict[str, list[Any]]:
        """The states of whole requests, which are forgotten here; {} on ranks that record nothing.

        Returns:
            request id -> one [tokens, hidden size] CPU tensor for each captured layer, ascending.

        Raises:
            WrongStatesError: a request is unknown or some of its tokens never passed through the model.
        """
        if not self.records:
            return {}
        taken: dict[str, list[Any]] = {}
        for request_id in request_ids:
            request = self.requests.pop(request_id, None)
            have = 0 if request is None or request.seen is None else int(request.seen.sum())
            if request is None or have != len(request.token_ids):
                raise WrongStatesError(
                    f"worker, request {request_id}",
                    f"{len(request.token_ids) if request else 'all'} rows of states",
                    f"{have} rows",
                    "tokens served from a cache never pass through the model: prefix caching must be off",
                )
            taken[request_id] = request.states
        return taken


def _configured(runner: Any) -> AbstractContextManager[Any]:
    """vLLM's configuration as the current one: parts of a model that are built at the first forward ask for it.

    vLLM's own engine sets it for its warm-up; the generator's workers do not warm up.
    """
    module, config = sys.modules.get("vllm.config"), getattr(runner, "vllm_config", None)
    if module is None or config is None:
        return nullcontext()
    context: AbstractContextManager[Any] = module.set_current_vllm_config(config)
    return context


def residual_stream(output: Any, layer: str, adds: bool = True) -> Any:
    """R after one decoder layer: hidden states plus the residual that vLLM's layers return beside them.

    Args:
        output: what the layer returned, see `split_output`.
        layer: class name, for the message.
        adds: see `shims.model_parts.adds_residual`.

    Returns:
        [tokens, hidden size], a tensor of its own.
    """
    hidden, residual = split_output(output, layer, adds)
    return hidden.detach().clone() if residual is None else hidden.detach() + residual.detach()


# The methods below take the place of HiddenStatesWorkerExtension's; `self` is vLLM's worker.


def setup_hidden_states_capture(self: Any, layer_ids: list[int]) -> dict[str, Any]:
    """Attach the capture; the reply tells the parent who captures, and how."""
    cpu_norm.mend()
    self._specshim_capture = capture = Capture(self, layer_ids)
    return {
        "protocol": PROTOCOL,
        "rank": self.rank,
        "runner": capture.runner,
        "runner_class": f"{type(self.model_runner).__module__}.{type(self.model_runner).__name__}",
        "model": capture.model,
    }


def reset_capture(self: Any) -> None:
    """Forget every request, finished or not, and listen for new ones."""
    capture: Capture = self._specshim_capture
    capture.requests.clear()
    capture.listening = True


def get_captured_states(self: Any, request_ids: list[str]) -> dict[str, list[Any]]:
    """See `Capture.take`."""
    capture: Capture = self._specshim_capture
    return capture.take(request_ids)
