"""Every exception that deepinfer raises on purpose.

```
DeepInferError
├── ConfigError(ValueError)              unknown key, value out of range
│   └── AnticipationError                a search would look at drafts that are still to be judged
├── MissingDependency(ImportError)       an optional package is not installed
├── UnsupportedHardware(RuntimeError)    this machine cannot serve the call
├── ShapeError(ValueError)               an array or tensor has the wrong shape or dtype
├── ModelError
│   ├── CheckpointMissing(FileNotFoundError)
│   ├── CheckpointMismatch(ValueError)   a tensor is absent, unexpected, or mis-shaped
│   └── HubOffline(OSError)              a file is not cached and the network is off
├── RequestError
│   ├── InvalidRequest(ValueError)       a field of one request is unusable
│   ├── InvalidLogits(ArithmeticError)   no token can be chosen from the logits of one row
│   ├── RequestTooLong(ValueError)       the prompt or the output cannot fit
│   ├── RequestAborted                   the caller or the engine ended the request
│   └── Unschedulable                    the request could never run on this engine
├── GrammarError
│   ├── UnsupportedKeyword(ValueError)   a schema keyword that cannot be enforced
│   ├── GrammarSyntaxError(ValueError)   the grammar text does not parse
│   ├── EmptyLanguage(ValueError)        the grammar accepts nothing
│   ├── GrammarTooLarge(ValueError)      the grammar needs more states, bytes or time than it may
│   └── VocabularyMismatch(ValueError)   a grammar compiled for another tokenizer
├── CacheError
│   ├── BlockCorrupt                     a stored block fails its checksum
│   ├── StoreUnavailable(OSError)        a cache tier does not answer
│   └── InvariantBroken                  an internal check failed; a bug in deepinfer
├── TransferError
│   ├── PeerLost(ConnectionError)        the other side of a hand-off went away
│   └── TransferTimeout(TimeoutError)    the other side did not answer in time
└── EngineDead(RuntimeError)             the engine stopped; the first cause is `__cause__`
```

Every class takes the message as its one positional argument and its attributes as keywords, so an error
survives pickling between processes. A message says what was found, what the limit is, and what to do.
"""

from __future__ import annotations

from deepinfer.core.error_base import DeepInferError
from deepinfer.core.grammar_errors import (
    EmptyLanguage,
    GrammarError,
    GrammarSyntaxError,
    GrammarTooLarge,
    UnsupportedKeyword,
    VocabularyMismatch,
)

__all__ = [
    "AnticipationError",
    "BlockCorrupt",
    "CacheError",
    "CheckpointMismatch",
    "CheckpointMissing",
    "ConfigError",
    "DeepInferError",
    "EmptyLanguage",
    "EngineDead",
    "GrammarError",
    "GrammarSyntaxError",
    "GrammarTooLarge",
    "HubOffline",
    "InvalidLogits",
    "InvalidRequest",
    "InvariantBroken",
    "MissingDependency",
    "ModelError",
    "PeerLost",
    "RequestAborted",
    "RequestError",
    "RequestTooLong",
    "ShapeError",
    "StoreUnavailable",
    "TransferError",
    "TransferTimeout",
    "Unschedulable",
    "UnsupportedHardware",
    "UnsupportedKeyword",
    "VocabularyMismatch",
]


class ConfigError(DeepInferError, ValueError):
    """An option is unknown, of the wrong type, or out of range.

    Attributes:
        field: Name of the option, dotted when nested, or None.
        value: What was given.
        limit: What would have been accepted, in words, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        value: object = None,
        limit: str | None = None,
    ) -> None:
        super().__init__(message)
        self.field = field
        self.value = value
        self.limit = limit


class AnticipationError(ConfigError):
    """A decision would be taken by looking at what it decides about, which changes the law of sampled tokens."""


class MissingDependency(DeepInferError, ImportError):
    """An optional package is needed and not installed.

    Attributes:
        package: Name of the package to install.
        extra: The deepinfer extra that brings it, or None.
        command: The command that installs it.
    """

    def __init__(
        self,
        message: str,
        *,
        package: str | None = None,
        extra: str | None = None,
        command: str | None = None,
    ) -> None:
        super().__init__(message)
        self.package = package
        self.extra = extra
        self.command = command


class UnsupportedHardware(DeepInferError, RuntimeError):
    """This machine, or the backend asked for, cannot serve the call.

    Attributes:
        needed: What the call needs, in words.
        found: What is there.
        fallback: How to select a path that works, or None when there is none.
    """

    def __init__(
        self,
        message: str,
        *,
        needed: str | None = None,
        found: str | None = None,
        fallback: str | None = None,
    ) -> None:
        super().__init__(message)
        self.needed = needed
        self.found = found
        self.fallback = fallback


class ShapeError(DeepInferError, ValueError):
    """An array has the wrong shape or dtype.

    Attributes:
        argument: Name of the argument.
        expected: Expected shape or dtype, with axis names.
        found: Actual shape or dtype.
    """

    def __init__(
        self,
        message: str,
        *,
        argument: str | None = None,
        expected: object = None,
        found: object = None,
    ) -> None:
        super().__init__(message)
        self.argument = argument
        self.expected = expected
        self.found = found


class ModelError(DeepInferError):
    """Base of the errors about models and checkpoints."""


class CheckpointMissing(ModelError, FileNotFoundError):
    """A checkpoint, or a file of it, does not exist.

    Attributes:
        path: Path or repository that was looked at.
    """

    def __init__(self, message: str, *, path: object = None) -> None:
        super().__init__(message)
        self.path = path


class CheckpointMismatch(ModelError, ValueError):
    """A checkpoint does not fit the model: a tensor is absent, unexpected, or of another shape or dtype.

    Attributes:
        tensor: Name of the first offending tensor, or None.
        expected: Expected shape, dtype or presence.
        found: What the checkpoint holds.
    """

    def __init__(
        self,
        message: str,
        *,
        tensor: str | None = None,
        expected: object = None,
        found: object = None,
    ) -> None:
        super().__init__(message)
        self.tensor = tensor
        self.expected = expected
        self.found = found


class HubOffline(ModelError, OSError):
    """A file is not in the local cache and the network may not be used.

    Attributes:
        repo: Repository id.
        file: File that was needed, or None.
    """

    def __init__(self, message: str, *, repo: str | None = None, file: str | None = None) -> None:
        super().__init__(message)
        self.repo = repo
        self.file = file


class RequestError(DeepInferError):
    """Base of the errors that concern one request only; the engine stays usable.

    Attributes:
        rid: Id of the request, or None before it has one.
    """

    def __init__(self, message: str, *, rid: str | None = None) -> None:
        super().__init__(message)
        self.rid = rid


class InvalidRequest(RequestError, ValueError):
    """A field of a request, or of its sampling parameters, is unusable.

    Attributes:
        field: Name of the field, or None.
        value: What was given.
        limit: What would have been accepted, in words, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        rid: str | None = None,
        field: str | None = None,
        value: object = None,
        limit: str | None = None,
    ) -> None:
        super().__init__(message, rid=rid)
        self.field = field
        self.value = value
        self.limit = limit


class InvalidLogits(RequestError, ArithmeticError):
    """A row of logits from which no token can be chosen; other rows are not concerned.

    Attributes:
        kind: "nan", "all_masked" or "infinite".
    """

    def __init__(self, message: str, *, rid: str | None = None, kind: str = "nan") -> None:
        super().__init__(message, rid=rid)
        self.kind = kind


class RequestTooLong(RequestError, ValueError):
    """Prompt plus output does not fit.

    Attributes:
        limit_tokens: The most tokens that fit, or None.
        asked_tokens: The tokens asked for, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        rid: str | None = None,
        limit_tokens: int | None = None,
        asked_tokens: int | None = None,
    ) -> None:
        super().__init__(message, rid=rid)
        self.limit_tokens = limit_tokens
        self.asked_tokens = asked_tokens


class RequestAborted(RequestError):
    """The request was ended before it finished."""


class Unschedulable(RequestError):
    """The request could never run here: it would not fit an empty cache or an empty step."""


class CacheError(DeepInferError):
    """Base of the errors about key-value caches and stores."""


class BlockCorrupt(CacheError):
    """A stored block does not match its checksum.

    Attributes:
        key: Key of the block, or None.
    """

    def __init__(self, message: str, *, key: bytes | None = None) -> None:
        super().__init__(message)
        self.key = key


class StoreUnavailable(CacheError, OSError):
    """A cache tier or store does not answer."""


class InvariantBroken(CacheError):
    """An internal consistency check failed: a bug in deepinfer or in a part plugged into it."""


class TransferError(DeepInferError):
    """Base of the errors about moving state between processes.

    Attributes:
        peer: The other side, or None.
    """

    def __init__(self, message: str, *, peer: str | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class PeerLost(TransferError, ConnectionError):
    """The other side of a transfer went away."""


class TransferTimeout(TransferError, TimeoutError):
    """The other side of a transfer did not answer in time."""


class EngineDead(DeepInferError, RuntimeError):
    """The engine has stopped and takes no more work; the first cause is in `__cause__`."""
