"""Where speculators' trainer and the installed torch or transformers do not fit by themselves.

Every function here bridges one difference, named by it. ``train`` reports those it used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.model_info import ModelInfo, tensor_names
from shims.errors import SpecshimError, UsageError

DENSE_ATTENTION = "specshim_dense"
FLEX_ATTENTION = "simple_flex_attention"


@dataclass(frozen=True)
class TrainerParts:
    """What `train` takes from the installed speculators."""

    draft_class: Any
    trainer_class: Any
    config_class: Any
    sampler_class: Any
    noise_class: Any
    collate: Callable[[int], Any]
    """max tokens -> collate function."""
    align: Callable[[dict[str, Any]], dict[str, Any]]


def load_trainer_parts() -> TrainerParts:
    """speculators' own classes.

    Raises:
        SpecshimError: speculators is absent, or of a series whose trainer is not driven yet.
    """
    try:
        import speculators
        from speculators.models.eagle3 import Eagle3DraftModel
        from speculators.train.data import create_collate_fn, shift_batch
        from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
        from speculators.train.noise_transforms import AddUniformNoise
        from speculators.train.trainer import Trainer, TrainerConfig
    except ImportError as error:
        raise SpecshimError(
            "train",
            "speculators 0.4.0 or 0.4.0.1 with its training parts",
            f"{type(error).__name__}: {error}",
            "pip install speculators==0.4.0.1 in an environment for training",
        ) from error
    if not hasattr(Eagle3DraftModel, "from_training_args"):
        raise SpecshimError(
            "train",
            "speculators 0.4.0 or 0.4.0.1",
            f"speculators {speculators.__version__}",
            "install speculators 0.4.0.1",
        )
    return TrainerParts(
        Eagle3DraftModel,
        Trainer,
        TrainerConfig,
        MultipackDistributedBatchSamplerV2,
        AddUniformNoise,
        create_collate_fn,
        shift_batch,
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


def trainer_device(device: str) -> Any:
    """The trainer's ``local_rank``: it is handed to ``Tensor.to``, where an integer means a CUDA device."""
    import torch

    parsed = torch.device(device)
    return (parsed.index or 0) if parsed.type == "cuda" else parsed


def flex_attention_trains(device: str) -> bool:
    """Whether flex_attention can be differentiated on ``device`` (torch 2.13 cannot on a CPU)."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(_b: Any, _h: Any, query: Any, key: Any) -> Any:
        return query >= key

    inputs = [torch.zeros(1, 1, 128, 16, device=device, requires_grad=True) for _ in range(3)]
    try:
        mask = create_block_mask(causal, B=None, H=None, Q_LEN=128, KV_LEN=128, device=device)
        flex_attention(*inputs, block_mask=mask).sum().backward()
    except Exception:  # noqa: BLE001  any failure of the trial means: use the substitute
        return False
    return True


def dense_mask(block_mask: Any, queries: int, keys: int, device: Any) -> Any:
    """The block mask as a boolean tensor [1, 1, queries, keys], True where attention is allowed.

    Blocks the mask does not list are closed, and inside the listed ones its ``mask_mod``
    decides, exactly as flex_attention reads them.
    """
    import torch

    zero = torch.zeros((), dtype=torch.long, device=device)
    query, key = torch.arange(queries, device=device), torch.arange(keys, device=device)
    allowed = block_mask.mask_mod(zero, zero, query[:, None], key[None, :]).expand(queries, keys)
    blocks = block_mask.to_dense()[0, 0].to(device).bool()
    query_block, key_block = block_mask.BLOCK_SIZE
    listed = blocks.repeat_interleave(query_block, 0).repeat_interleave(key_block, 1)[:queries, :keys]
    return (allowed & listed)[None, None]


def dense_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None, **_unused: Any
) -> tuple[Any, None]:
    """The same attention as speculators' flex attention, computed with a dense mask.

    Args:
        query: [B, heads, Q, D].
        key: [B, kv heads, K, D]; value likewise.
        attention_mask: a BlockMask.

    Returns:
        [B, Q, heads, D], and no weights.
    """
    import torch

    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    mask = dense_mask(attention_mask, query.shape[2], key.shape[2], query.device)
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return output.transpose(1, 2).contiguous(), None


def choose_attention(device: str) -> str:
    """Name of the attention to train with: speculators' flex attention, or the dense substitute."""
    if flex_attention_trains(device):
        return FLEX_ATTENTION
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface().register(DENSE_ATTENTION, dense_attention)
    return DENSE_ATTENTION


def draft_layer_config(model: ModelInfo, num_layers: int, attention: str) -> Any:
    """A Llama configuration of the verifier's width for the draft's decoder layers.

    Whatever the verifier's architecture: vLLM serves EAGLE-3 drafts as Llama layers.
    """
    from transformers import LlamaConfig

    text = model.config.get("text_config")
    source: dict[str, Any] = text if isinstance(text, dict) else model.config
    heads = int(source["num_attention_heads"])
    # A latent-attention verifier states head sizes that mean something else.
    latent = "kv_lora_rank" in source
    rope = source.get("rope_parameters") or {}
    options = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": source.get("intermediate_size", 4 * model.hidden_size),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if latent else source.get("num_key_value_heads", heads),
        "head_dim": model.hidden_size // heads if latent else source.get("head_dim") or model.hidden_size // heads,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_positions or 2048,
        "rms_norm_eps": source.get("rms_norm_eps", 1e-6),
        "rope_theta": float(source.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        "initializer_range": source.get("initializer_range", 0.02),
        "attention_bias": False,
        "tie_word_embeddings": False,
        "pad_token_id": None,
    }
    config = LlamaConfig(**options)
    config._attn_implementation = attention
    return config


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
