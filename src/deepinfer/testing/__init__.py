"""Test doubles and checks that users of deepinfer can run their own parts against."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.core.lazy import lazy_exports

if TYPE_CHECKING:
    from deepinfer.testing.toy_model import ToyCache as ToyCache
    from deepinfer.testing.toy_model import ToyConfig as ToyConfig
    from deepinfer.testing.toy_model import ToyDraft as ToyDraft
    from deepinfer.testing.toy_model import ToyModel as ToyModel
    from deepinfer.testing.toy_tokenizer import ToyTokenizer as ToyTokenizer

_EXPORTS = {
    "ToyCache": "deepinfer.testing.toy_model",
    "ToyConfig": "deepinfer.testing.toy_model",
    "ToyDraft": "deepinfer.testing.toy_model",
    "ToyModel": "deepinfer.testing.toy_model",
    "ToyTokenizer": "deepinfer.testing.toy_tokenizer",
}

__all__ = [*sorted(_EXPORTS)]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
