"""A speculators in small: the same calls at the same places as the generator of that release."""

from importlib.metadata import version

from transformers import configuration_utils

from speculators.models import eagle  # noqa: F401

__version__ = version("speculators")
VERSION = tuple(int(part) for part in __version__.split("."))

# As pydantic does it: in the namespace of the module that defines the class.
for annotation in configuration_utils.PreTrainedConfig.__annotations__.values():
    eval(annotation, vars(configuration_utils))
