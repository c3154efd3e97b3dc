from transformers.modeling_attn_mask_utils import _prepare_4d_causal_attention_mask  # noqa: F401
