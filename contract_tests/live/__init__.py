"""Live contracts: real vLLM, the stock generator of an installed speculators, tiny float32 models."""
