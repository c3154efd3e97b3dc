"""What `import speculators` needs and newer or older packages do not offer."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any


class _LazyModule(types.ModuleType):
    """Stands for a module that is imported at its first use."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


def lazy_torch() -> types.ModuleType:
    """torch, not imported before an annotation such as `torch.dtype` is resolved."""
    return sys.modules.get("torch") or _LazyModule("torch")


def hashing_module() -> types.ModuleType:
    """`vllm.utils.hashing` for releases that keep its function in `vllm.utils`."""
    module = types.ModuleType("vllm.utils.hashing")
    module.__dict__["get_hash_fn_by_name"] = importlib.import_module("vllm.utils").get_hash_fn_by_name
    return module


def attention_mask_module() -> types.ModuleType:
    """`transformers.modeling_attn_mask_utils` with the one function that speculators imports from it."""
    module = types.ModuleType("transformers.modeling_attn_mask_utils")
    module.__dict__["_prepare_4d_causal_attention_mask"] = causal_mask
    return module


def generator_module() -> types.ModuleType:
    """What stands for `speculators.data_generation.vllm_hidden_states_generator` where that is gone."""
    from shims.direct.generator import VllmHiddenStatesGenerator
    from shims.touchpoints import GENERATOR_MODULE

    module = types.ModuleType(GENERATOR_MODULE, VllmHiddenStatesGenerator.__doc__)
    module.__dict__["VllmHiddenStatesGenerator"] = VllmHiddenStatesGenerator
    return module


def causal_mask(
    attention_mask: Any,
    input_shape: tuple[int, int],
    inputs_embeds: Any,
    past_key_values_length: int,
    sliding_window: int | None = None,
) -> Any:
    """An additive causal mask for eager attention.

    Args:
        attention_mask: [batch, past + query] of 0 and 1 (1 = attend), or None.
        input_shape: (batch, query).
        inputs_embeds: tensor that gives dtype and device.
        past_key_values_length: tokens already in the cache.
        sliding_window: how many of the latest keys a query may see, itself included.

    Returns:
        [batch, 1, query, past + query] in `inputs_embeds`' dtype: 0 where a query may look, the
        dtype's smallest number where it may not.
    """
    import torch

    batch, query = input_shape
    keys = past_key_values_length + query
    device = inputs_embeds.device
    query_positions = torch.arange(past_key_values_length, keys, device=device)[:, None]
    key_positions = torch.arange(keys, device=device)[None, :]
    visible = key_positions <= query_positions
    if sliding_window is not None:
        visible &= key_positions > query_positions - sliding_window
    visible = visible[None, None].expand(batch, 1, query, keys)
    if attention_mask is not None:
        visible = visible & attention_mask.to(device=device, dtype=torch.bool)[:, None, None, :]
    mask = torch.zeros(batch, 1, query, keys, dtype=inputs_embeds.dtype, device=device)
    return mask.masked_fill(~visible, torch.finfo(inputs_embeds.dtype).min)
