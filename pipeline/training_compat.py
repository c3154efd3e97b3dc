"""Where speculators' trainer and the installed torch or transformers do not fit by themselves.

Every function here bridges one difference, named by it. ``train`` reports those it used.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.model_info import ModelInfo, tensor_names
from pipeline.training_series import Series, installed_series
from shims.errors import SpecshimError, UsageError
from shims.versions import installed


@dataclass(frozen=True)
class TrainerParts:
    """What `train` takes from the installed speculators."""

    series: Series
    version: str
    read: bool
    """False for a release newer than those whose source was read."""
    draft_class: Any
    trainer_class: Any
    config_class: Any
    sampler_class: Any


def load_trainer_parts() -> TrainerParts:
    """speculators' own classes.

    Raises:
        SpecshimError: speculators is absent, or of a series that has no such trainer.
    """
    series, read = installed_series()
    version = str(installed("speculators"))
    try:
        from speculators.models.eagle3 import Eagle3DraftModel
        from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
        from speculators.train.trainer import Trainer, TrainerConfig
    except ImportError as error:
        raise SpecshimError(
            "train",
            f"speculators {version} with its training parts and what they import",
            f"{type(error).__name__}: {error}",
            "pip install what is missing, or speculators==0.4.0.1 in an environment for training",
        ) from error
    if not hasattr(Eagle3DraftModel, "from_training_args"):
        raise SpecshimError(
            "train",
            "speculators 0.4.0 to 0.9.0",
            f"speculators {version} without Eagle3DraftModel.from_training_args",
            "install one of these",
        )
    return TrainerParts(
        series, version, read, Eagle3DraftModel, Trainer, TrainerConfig, MultipackDistributedBatchSamplerV2
    )


def let_configs_construct() -> bool:
    """Undo what transformers 5 does to speculators' pydantic configs; returns whether that was needed.

    transformers 5 turns every subclass of its config into a dataclass with an ``__init__`` of its
    own, which never sets pydantic up; and it calls ``validate()`` and iterates over keys, names
    that mean something else in pydantic. speculators mends this itself from 0.5 on.
    """
    from speculators.config import SpeculatorModelConfig
    from transformers import PretrainedConfig

    if "__dataclass_fields__" not in vars(PretrainedConfig):
        return False  # transformers 4
    own = SpeculatorModelConfig.__init__
    replaced = [cls for cls in (SpeculatorModelConfig.registry or {}).values() if cls.__init__ is not own]
    for cls in replaced:
        cls.__init__ = own
    clashing = "validate" in vars(PretrainedConfig) and "validate" not in vars(SpeculatorModelConfig)
    if clashing:

        def validate(_self: Any) -> None:
            """Pydantic has validated the fields already."""

        SpeculatorModelConfig.validate = validate
        SpeculatorModelConfig.__iter__ = PretrainedConfig.__iter__
    return bool(replaced) or clashing


class Steps(int):
    """A number of steps, of which 0 is one, too: 0.4 to 0.6 write ``steps or 1% of all epochs``."""

    def __bool__(self) -> bool:
        return True


def place_trainer(series: Series, device: str) -> dict[str, Any]:
    """Tell the trainer its device; what it calls ``local_rank`` is handed to ``Tensor.to``, where an int means CUDA.

    Returns:
        Fields for the trainer's configuration.
    """
    import torch

    parsed = torch.device(device)
    place: Any = (parsed.index or 0) if parsed.type == "cuda" else parsed
    if series.device_in_config:
        return {"local_rank": place}
    from speculators.train import distributed

    distributed._local_rank = place
    return {}


@contextlib.contextmanager
def quiet_trainer(series: Series, device: str) -> Iterator[None]:
    """While the trainer runs: no second progress bar, and no wait for an accelerator that is not there."""
    from speculators.train import trainer

    def plain(batches: Any, **_options: Any) -> Any:
        return batches

    replaced: dict[str, Any] = {"tqdm": plain}
    if series.autocasts and not device.startswith("cuda"):
        replaced["_StepTimer"] = _clocked(trainer._StepTimer)
    before = {name: getattr(trainer, name) for name in replaced}
    for name, value in replaced.items():
        setattr(trainer, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(trainer, name, value)


def _clocked(timer: Any) -> Any:
    """The trainer's step timer, reading the clock alone."""

    class ClockedTimer(timer):  # type: ignore[misc]
        def mark(self, name: str) -> None:
            self.mark_value(name, time.perf_counter())

        def now(self) -> float | None:
            return time.perf_counter() if self.enabled else None

    return ClockedTimer


@contextlib.contextmanager
def remote_code(allowed: bool) -> Iterator[None]:
    """Let speculators read the configuration of a model that brings its own code, where the user allowed that.

    It reads the verifier's configuration by path; only 0.8 and later can be told.
    """
    from transformers import AutoConfig

    if not allowed:
        yield
        return
    original = AutoConfig.__dict__["from_pretrained"]

    def trusting(_cls: Any, *arguments: Any, **options: Any) -> Any:
        return original.__get__(None, AutoConfig)(*arguments, **{**options, "trust_remote_code": True})

    AutoConfig.from_pretrained = classmethod(trusting)
    try:
        yield
    finally:
        AutoConfig.from_pretrained = original


def refuse_missing_verifier_weights(model: ModelInfo, trust_remote_code: bool) -> None:
    """Check by name that the verifier's embeddings, head and final norm can be found.

    speculators replaces a missing head by the embeddings and a missing norm by ones, and goes on:
    the draft would learn from a verifier that does not exist.

    Raises:
        UsageError: one of them is not in the model's safetensors.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(model.path), trust_remote_code=trust_remote_code)
    tied = bool(getattr(config.get_text_config(), "tie_word_embeddings", False))
    wanted = ["embed_tokens.weight", "model.norm.weight", *([] if tied else ["lm_head.weight"])]
    names = tensor_names(model)
    missing = [name for name in wanted if not any(found.endswith(name) for found in names)]
    if missing:
        raise UsageError(
            f"--model {model.path}",
            f"safetensors with tensors ending in {', '.join(wanted)}",
            f"none ending in {', '.join(missing)}, among {len(names)} tensors",
            "give the model's safetensors checkpoint",
        )


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Silence the loader's log: it calls the absent head of a tied model an error."""
    try:
        from loguru import logger
    except ImportError:
        yield
        return
    logger.disable("speculators")
    try:
        yield
    finally:
        logger.enable("speculators")


@contextlib.contextmanager
def verifier_named(config: Any, model: ModelInfo) -> Iterator[Any]:
    """Let speculators write the verifier's architecture, not the draft layer's, into its config."""
    before = getattr(config, "architectures", None)
    config.architectures = list(model.config.get("architectures") or [])
    try:
        yield config
    finally:
        config.architectures = before
