def _prepare_4d_causal_attention_mask(*args, **kwargs):
    raise NotImplementedError
