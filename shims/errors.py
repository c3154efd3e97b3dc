"""Errors that say where, what was wanted, what was found, and what to do next."""

from __future__ import annotations


class SpecshimError(Exception):
    """A refusal a person can act on.

    Args:
        where: file and line, flag, object or process in which the problem lies.
        wanted: what would have been right.
        found: what was there instead.
        next_step: what to do now.
    """

    def __init__(self, where: str, wanted: str, found: str, next_step: str) -> None:
        self.where, self.wanted, self.found, self.next_step = where, wanted, found, next_step
        super().__init__(where, wanted, found, next_step)

    def __str__(self) -> str:
        return f"{self.where}\n  wanted: {self.wanted}\n  found:  {self.found}\n  next:   {self.next_step}"


class UsageError(SpecshimError):
    """The request itself is wrong (a flag, an input file): exit code 2, nothing was changed."""


class DriftError(SpecshimError):
    """A touchpoint of the installed vLLM does not look as the plan expects: nothing may run on it."""


class SinkError(SpecshimError):
    """A finished row could not be stored.

    Args:
        errno: the operating system's number of the error, None where it was another one.
    """

    def __init__(self, where: str, wanted: str, found: str, next_step: str, errno: int | None = None) -> None:
        super().__init__(where, wanted, found, next_step)
        self.errno = errno


class WrongStatesError(SpecshimError):
    """Captured hidden states could not be proved to belong to their tokens."""
