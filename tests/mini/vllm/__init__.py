"""A vLLM in small, of the release that its metadata names: what that release differs in, it differs in."""

from importlib.metadata import version

__version__ = version("vllm")
VERSION = tuple(int(part) for part in __version__.partition("+")[0].split(".")[:3])
