"""Who answers: vLLM, or whatever a test puts in its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.config import RegenerateConfig
from pipeline.conversations import Message
from shims.behaviours import failures
from shims.errors import SpecshimError
from shims.guardian import guarding
from shims.precision import keep_float32
from shims.spawning import spawn_workers


@dataclass(frozen=True)
class Reply:
    """What the model said."""

    text: str
    finish: str
    """``stop``: it ended its turn; ``length``: it was cut off."""
    tokens: int = 0
    """How many it took, for the progress."""


class Speaker(Protocol):
    """A loaded model that answers."""

    def replies(self, conversations: Sequence[Sequence[Message]], seeds: Sequence[int]) -> list[Reply | None]:
        """The next assistant turn of each conversation, in order; None where it has no room left."""
        ...


class VllmSpeaker:
    """vLLM's offline chat, with the model's own chat template."""

    def __init__(self, config: RegenerateConfig, model_folder: str, dtype: str) -> None:
        """Load the model.

        Raises:
            SpecshimError: there is no vLLM, or it does not load the model.
        """
        self._config = config
        keep_float32(dtype)
        with failures.collected() as told:
            try:
                from vllm import LLM
                from vllm.platforms import current_platform

                spawn_workers()
                with guarding():
                    self._llm: Any = LLM(
                        model=model_folder,
                        dtype=dtype,
                        max_model_len=config.max_model_len,
                        tensor_parallel_size=config.tp_size,
                        gpu_memory_utilization=config.gpu_memory_utilization,
                        trust_remote_code=config.trust_remote_code,
                        enforce_eager=current_platform.is_cpu(),  # where compiling takes minutes
                    )
            except Exception as error:
                missing = isinstance(error, ModuleNotFoundError)
                raise SpecshimError(
                    f"regenerate, loading {model_folder}",
                    "vLLM to start with this model",
                    failures.described(error, told),
                    "install vllm" if missing else "look at the innermost cause named here; the same command goes on",
                ) from error

    def replies(self, conversations: Sequence[Sequence[Message]], seeds: Sequence[int]) -> list[Reply | None]:
        """See :class:`Speaker`."""
        from vllm import SamplingParams

        tokenizer = self._llm.get_tokenizer()
        room = [self._room(tokenizer, conversation) for conversation in conversations]
        asked = [number for number, tokens in enumerate(room) if tokens > 0]
        sampling = [
            SamplingParams(
                temperature=self._config.temperature,
                top_p=self._config.top_p,
                max_tokens=min(self._config.max_reply_tokens, room[number]),
                seed=seeds[number],
            )
            for number in asked
        ]
        found: list[Reply | None] = [None] * len(conversations)
        if asked:
            outputs = self._chat([list(conversations[number]) for number in asked], sampling)
            for number, output in zip(asked, outputs, strict=True):
                answer = output.outputs[0]
                found[number] = Reply(answer.text, str(answer.finish_reason), len(answer.token_ids))
        return found

    def _chat(self, conversations: list[list[Message]], sampling: list[Any]) -> Any:
        try:
            return self._llm.chat(conversations, sampling, use_tqdm=False)
        except Exception as error:
            raise SpecshimError(
                f"regenerate, {len(conversations)} conversations",
                "their next replies from vLLM",
                f"{type(error).__name__}: {str(error).strip() or 'no message'}",
                "the cause is in vLLM's log above; finished conversations are kept, so the same command goes on",
            ) from error

    def _room(self, tokenizer: Any, conversation: Sequence[Message]) -> int:
        """Tokens that a reply may have."""
        ids = tokenizer.apply_chat_template(
            list(conversation), tokenize=True, add_generation_prompt=True, return_dict=True
        )["input_ids"]
        return self._config.max_model_len - len(ids)


def open_speaker(config: RegenerateConfig, model_folder: str, dtype: str) -> Speaker:
    """Load the model."""
    return VllmSpeaker(config, model_folder, dtype)
