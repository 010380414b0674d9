# SPDX-License-Identifier: Apache-2.0
"""The tiny real model pair: a byte-level target and its draft heads, as checkpoint folders.

For tests and examples: SGLang and transformers load the folders as they are. The model card is
``tiny/README.md``; the models are trained by ``models/train_tiny.py`` of the source tree.
"""

from pathlib import Path

TINY = Path(__file__).resolve().parent / "tiny"
NAMES = ("target", "eagle3", "eagle")


def path(name: str = "target") -> str:
    """The folder of ``target`` (with its tokenizer), ``eagle3`` or ``eagle``."""
    if name not in NAMES:
        raise ValueError(f"no tiny model {name!r}: there are {', '.join(NAMES)}")
    folder = TINY / name
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(f"{folder} has no weights: models/train_tiny.py makes them")
    return str(folder)


def encode(text: str | bytes) -> list[int]:
    """Token ids of a text: its UTF-8 bytes. The same as the tokenizer's, without loading one."""
    return list(text.encode() if isinstance(text, str) else text)


def decode(ids: list[int]) -> str:
    """Text of token ids; special tokens (256 and above) are left out."""
    return bytes(i for i in ids if i < 256).decode("utf-8", "replace")
