"""`VllmHiddenStatesGenerator`, made to follow each request by id. Runs in the parent process."""

from __future__ import annotations

import logging
import sys
import traceback
import weakref
from collections.abc import Callable
from typing import Any

from shims.behaviours import failures
from shims.behaviours.capture import PROTOCOL
from shims.behaviours.prompts import checked_prompts
from shims.errors import SpecshimError, WrongStatesError

logger = logging.getLogger("specshim")

# What the workers said when a generator set up its capture last; `shims.report()` shows it.
worker_receipts: list[dict[str, Any]] = []

# Executors that failed. Their message queues, when collected, wait for workers that do not read any more.
_failed: list[Any] = []


class EngineError(SpecshimError):
    """vLLM failed underneath the generator; the message carries its type, text and place."""


def construct(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Build the generator; on failure stop the workers and say what failed, never with an empty message."""
    with failures.collected() as folder:
        try:
            wrapped(*args, **kwargs)
        except Exception as error:
            _stop(instance)
            explained = isinstance(error, (SpecshimError, ValueError, TypeError, OSError)) and str(error)
            if explained and not failures.told(folder):
                raise  # an argument of the caller's, or a refusal: it says all there is to say
            raise _engine_error("building the generator", error, failures.told(folder)) from error
    # When the generator is collected, and at the latest before the interpreter's modules go.
    weakref.finalize(instance, _shut_down, instance.executor)


def tell_blocks(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Build the generator, and tell its workers how many blocks the KV cache has, as vLLM's engine core does."""
    wrapped(*args, **kwargs)
    blocks = instance.vllm_config.cache_config.num_gpu_blocks
    instance.executor.collective_rpc("initialize_cache", args=(blocks, 0))


def collected(self: Any) -> None:
    """Nothing: what `construct` has set up stops the workers."""


def _stop(generator: Any) -> None:
    executor = getattr(generator, "executor", None)
    if executor is not None:
        _shut_down(executor)


def _shut_down(executor: Any) -> None:
    try:
        executor.shutdown()
    except Exception:  # the failure that led here matters, not this one
        logger.warning("workers may still be running: shutting the executor down failed", exc_info=True)


def _engine_error(where: str, error: BaseException, worker: str = "") -> EngineError:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" (at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return EngineError(
        where,
        "vLLM to answer without an error",
        f"{type(error).__name__}: {str(error).strip() or '(no message)'}{place}{worker and chr(10)}{worker}",
        "look at the innermost frame named here; `specshim report` shows the stack for a report",
    )


def setup_capture(self: Any) -> None:
    """Have every worker attach its capture and confirm it.

    Raises:
        WrongStatesError: a worker runs without the shims.
    """
    replies = self.executor.collective_rpc("_setup_hidden_states_capture", args=(self.layer_ids,))
    strangers = [i for i, r in enumerate(replies) if not isinstance(r, dict) or r.get("protocol") != PROTOCOL]
    if strangers:
        raise WrongStatesError(
            f"worker processes {strangers} of {len(replies)}",
            "the shims in force in every vLLM process (entry point vllm.general_plugins)",
            "the stock capture of speculators, whose row order is not checked",
            "install the package (pip install specshim, not just a folder on the path), leave SHIMS_DISABLE unset, "
            "and if VLLM_PLUGINS is set, add specshim to it",
        )
    worker_receipts[:] = replies
    logger.info("capture by layer hooks on %s, model runner %s", replies[0]["model"], replies[0]["runner"])


def generate(self: Any, token_ids: Any) -> list[dict[str, Any]]:
    """Prefill the prompts and return the residual stream after each chosen layer.

    Args:
        token_ids: token ids of each prompt, as lists or a [prompts, tokens] tensor; any number of
            prompts. A prompt longer than max_model_len - 1 is cut, with a warning.

    Returns:
        One dict a prompt, in the order given: `input_ids` int64 [T] (cut as the prompt was),
        `hidden_states`: for each of the generator's layer_ids, in their order, [T, hidden size] on the
        CPU in the model's dtype; id i means after layer i. `loss_mask`: None.

    Raises:
        ValueError: no prompts, an empty prompt, or a token id outside of the vocabulary.
        WrongStatesError: the states of a prompt could not be proved complete and its own.
        EngineError: vLLM failed.
    """
    prompts = checked_prompts(self.vllm_config.model_config, token_ids)
    requests = {}
    try:
        self.executor.collective_rpc("_reset_capture")
        for index, prompt in enumerate(prompts):
            request = _request(self, f"req_{self._request_counter}_{index}", prompt)
            requests[request.request_id] = request
            self.scheduler.add_request(request)
        self._request_counter += 1
        states = _prefill(self, dict(requests))
    except SpecshimError:
        _release(self, requests)
        raise
    except Exception as error:
        _release(self, requests)
        _failed.append(self.executor)
        raise _engine_error(f"prefill of {len(prompts)} prompts", error) from error
    return [_result(self, prompt, states[i]) for i, prompt in zip(requests, prompts, strict=True)]


def _request(generator: Any, request_id: str, prompt: list[int]) -> Any:
    module = sys.modules[type(generator).__module__]  # its globals are adapted to this vLLM
    hasher = {"block_hasher": generator.block_hasher} if hasattr(generator, "block_hasher") else {}
    return module.Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=module.SamplingParams(max_tokens=1, temperature=0.0),
        pooling_params=None,
        eos_token_id=generator.tokenizer.eos_token_id,
        arrival_time=0.0,
        **hasher,
    )


def _prefill(generator: Any, waiting: dict[str, Any]) -> dict[str, list[Any]]:
    """Run steps until each request's prompt has passed through the model; request id -> states.

    A request is released as soon as its prompt is through, so that others get its place and its
    blocks, whatever the batch size; a preempted request starts again and its rows are written again.
    """
    scheduler, executor, states = generator.scheduler, generator.executor, {}
    while waiting:
        step = scheduler.schedule()
        if step.total_num_scheduled_tokens == 0:
            raise _starved(generator, waiting)
        executor.execute_model(step)
        executor.sample_tokens(None)
        through = [i for i in step.num_scheduled_tokens if _is_through(waiting[i])]
        if through:
            _finish(generator, through)
            states.update(executor.collective_rpc("_get_captured_states", args=(through,), unique_reply_rank=0))
            for request_id in through:
                del waiting[request_id]
    return states


def _is_through(request: Any) -> bool:
    return bool(request.num_computed_tokens >= request.num_prompt_tokens)


def _starved(generator: Any, waiting: dict[str, Any]) -> WrongStatesError:
    cache = generator.vllm_config.cache_config
    longest = max(request.num_prompt_tokens for request in waiting.values())
    return WrongStatesError(
        f"scheduler, {len(waiting)} prompts waiting",
        f"room for the next prompt (the longest has {longest} tokens)",
        f"the KV cache holds {cache.num_gpu_blocks} blocks and no step can be made",
        "raise gpu_memory_utilization, or shorten the prompts (max_model_len)",
    )


def _finish(generator: Any, request_ids: list[str]) -> None:
    module = sys.modules[type(generator).__module__]
    generator.scheduler.finish_requests(request_ids, module.RequestStatus.FINISHED_ABORTED)


def _release(generator: Any, requests: dict[str, Any]) -> None:
    """Take a failed call's requests out of the scheduler, so that the next call starts clean."""
    try:
        _finish(generator, list(requests))
    except Exception:  # the failure that led here matters, not this one
        logger.warning("requests of the failed call could not be released", exc_info=True)


def _result(generator: Any, prompt: list[int], states: list[Any]) -> dict[str, Any]:
    import torch

    # Workers answer in ascending order without repeats; the caller's list may be neither.
    by_layer = dict(zip(sorted(set(generator.layer_ids)), states, strict=True))
    wrong = [len(s) for s in states if len(s) != len(prompt)]
    if wrong:
        raise WrongStatesError("worker reply", f"{len(prompt)} rows a layer", f"{wrong} rows", "report this")
    return {
        "input_ids": torch.tensor(prompt, dtype=torch.long),
        "hidden_states": [by_layer[i] for i in generator.layer_ids],
        "loss_mask": None,
    }
