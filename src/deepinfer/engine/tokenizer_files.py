"""Reading tokenizer.json and the configuration files beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from deepinfer.core.errors import CheckpointMismatch, InvalidRequest

__all__ = ["CHAR_TO_BYTE", "check_byte_level", "check_text", "flat_config", "load_json"]


def load_json(text: str, path: object) -> dict[str, Any]:
    """Parses the text of a JSON file.

    Args:
        text: The text.
        path: Where it came from, for error messages.

    Returns:
        The object in it.

    Raises:
        CheckpointMismatch: It is not valid JSON, or no object.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise CheckpointMismatch(
            f"{path} is not valid JSON: {error}. Check that the file is whole.", found=str(error)
        ) from error
    if not isinstance(data, dict):
        raise CheckpointMismatch(
            f"{path} holds a JSON {type(data).__name__}; it must hold an object.",
            expected="object",
            found=type(data).__name__,
        )
    return data


def flat_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a configuration file that matter here; the published one nests some of them.

    Args:
        values: Contents of the file.

    Returns:
        Option names and values, those of `text_config` among them.
    """
    out = {
        key: value for key, value in values.items() if not isinstance(value, dict) or "token" in key
    }
    text = values.get("text_config")
    if isinstance(text, Mapping):
        for key, value in text.items():
            out.setdefault(key, value)
    if "dspark_noise_token_id" in out:
        out.setdefault("noise_token_id", out["dspark_noise_token_id"])
    return out


def check_byte_level(data: Mapping[str, Any], path: object) -> None:
    """Refuses tokenizers that are not byte-level.

    Args:
        data: Contents of tokenizer.json.
        path: Where it came from, for error messages.

    Raises:
        CheckpointMismatch: Another decoder is set.
    """
    decoder = data.get("decoder") or {}
    parts = decoder.get("decoders") or [decoder]
    kinds = [str(part.get("type")) for part in parts]
    if kinds != ["ByteLevel"]:
        raise CheckpointMismatch(
            f"{path} decodes with {', '.join(kinds)}; only byte-level tokenizers (decoder ByteLevel) are supported, "
            "such as those of DeepSeek checkpoints.",
            expected="ByteLevel",
            found=kinds,
        )


def check_text(text: object) -> None:
    """Refuses what has no UTF-8 form.

    Args:
        text: Anything.

    Raises:
        InvalidRequest: It is not a string, or holds a lone surrogate.
    """
    if not isinstance(text, str):
        raise InvalidRequest(
            f"text is {type(text).__name__}; give a string.", field="text", value=text
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"text holds a lone surrogate U+{ord(text[error.start]):04X} at character {error.start}, which is no "
            "Unicode text; remove it or decode the source with the right encoding.",
            field="text",
            value=text[error.start],
        ) from error


def _char_to_byte() -> dict[str, int]:
    """The usual alphabet of byte-level BPE: printable Latin-1 bytes stand for themselves, others from U+0100 on."""
    table: dict[str, int] = {}
    spare = 0x100
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF:
            table[chr(byte)] = byte
        else:
            table[chr(spare)] = byte
            spare += 1
    return table


CHAR_TO_BYTE = _char_to_byte()
