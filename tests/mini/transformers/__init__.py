"""A transformers in small: what `import speculators` meets in it."""

from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

__version__ = version("transformers")
VERSION = tuple(int(part) for part in __version__.split("."))

if VERSION < (5, 24):
    __path__ = [*__path__, str(Path(__file__).with_name("before_5_24"))]


class AutoConfig:
    @classmethod
    def from_pretrained(cls, path, trust_remote_code=False):
        return SimpleNamespace(num_hidden_layers=6, remote_code=trust_remote_code)


class AutoTokenizer:
    @classmethod
    def from_pretrained(cls, path, trust_remote_code=False):
        return SimpleNamespace(eos_token_id=1, remote_code=trust_remote_code)
