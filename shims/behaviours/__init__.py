"""Adaptations that need code. Rows in `shims.adaptations` refer to these functions by name.

Nothing here is imported before it is needed; modules may import torch and vLLM.
"""
