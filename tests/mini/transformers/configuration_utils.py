from transformers import VERSION

if VERSION < (5, 4):
    import torch


class PreTrainedConfig:
    dtype: "torch.dtype"
