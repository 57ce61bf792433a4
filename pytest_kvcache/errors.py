"""Every error that a user can meet, as one tree.

::

    KvError                       something a user can act on; carries what, where, and what to try
    ├── UsageError                what was asked cannot be meant (option, file, name)            exit 2
    ├── CannotJudge               the evidence needed is not there                               exit 3
    │   ├── UnknownEngine         no dialect reads what this server says
    │   └── UnknownSchema         a record of a version that this build does not know
    ├── InvalidEvidence           the evidence is there and is unsound                           exit 4
    └── Broken                    the server or the tool broke                                   exit 5
        ├── EndpointUnreachable   nobody answers there
        ├── EndpointRefused       somebody answers, and says no (401, 403, 404, wrong model)
        ├── LaunchFailed          a server that we started did not become ready
        ├── LoadFailed            the load process broke, or left no complete rows file
        └── CannotWrite           a file or folder of ours cannot be written
    GateFailed(AssertionError)    a gate did not pass; raised by the assert_* helpers
"""

from __future__ import annotations

from typing import Any


class KvError(Exception):
    """Something went wrong that a user can act on.

    ``what`` says what happened, ``where`` names the address, file or option, ``hint`` what to try.
    ``str()`` gives the three as readable lines. ``exit_code`` is what the command line returns.
    """

    exit_code = 5

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what = what
        self.where = where
        self.hint = hint
        super().__init__(what)

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.hint:
            lines.append(f"  try:   {self.hint}")
        return "\n".join(lines)


class UsageError(KvError):
    """What was asked for cannot be meant: an option, a file or a name is wrong."""

    exit_code = 2


class CannotJudge(KvError):
    """The evidence that a judgement needs is not there."""

    exit_code = 3


class UnknownEngine(CannotJudge):
    """No dialect reads what this server says."""


class UnknownSchema(CannotJudge):
    """A record was written by a version whose layout this build does not know."""


class InvalidEvidence(KvError):
    """Evidence exists and is unsound, so no verdict may rest on it."""

    exit_code = 4


class Broken(KvError):
    """The server or the tool itself broke."""

    exit_code = 5


class EndpointUnreachable(Broken):
    """Nobody answers at the address."""


class EndpointRefused(Broken):
    """The server answers and says no: wrong key, wrong path, a model that it does not serve."""


class LaunchFailed(Broken):
    """A server that we started did not become ready."""


class LoadFailed(Broken):
    """The load process broke, or left no complete rows file."""


class CannotWrite(Broken):
    """A file or folder of ours cannot be written."""


class GateFailed(AssertionError):
    """A gate did not pass. ``gate`` is the judged gate (``records.GateRecord``), where one exists."""

    def __init__(self, message: str, gate: Any = None) -> None:
        self.gate = gate
        super().__init__(message)
