# SPDX-License-Identifier: Apache-2.0
"""The text (the running Python's standard library) and the byte tokenizer's two files."""

import hashlib
import json
import os
import sysconfig

import torch
from nets import BOS, EOS, PAD, VOCAB

SKIP = {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data", "cjkencodings"}
LARGEST = 300_000  # bytes; larger files are tables
HELD_OUT = 20  # one file in so many


def files(root=None):
    """(relative path, bytes) of every Python source, sorted by path; tables are left out."""
    root = root or sysconfig.get_path("stdlib")
    found = []
    for folder, subs, names in os.walk(root):
        subs[:] = sorted(set(subs) - SKIP)
        for name in names:
            path = os.path.join(folder, name)
            if not name.endswith(".py") or not os.path.isfile(path):
                continue
            with open(path, "rb") as f:
                data = f.read()
            try:
                data.decode("utf-8")
            except UnicodeDecodeError:
                continue
            if data and len(data) <= LARGEST:
                found.append((os.path.relpath(path, root).replace(os.sep, "/"), data))
    return sorted(found)


def held_out(path):
    """Whether a file is held out: by the hash of its path, so a file never changes sides."""
    return int(hashlib.sha256(path.encode()).hexdigest(), 16) % HELD_OUT == 0


def streams(root=None):
    """Training and held-out token streams (int16): BOS, the file's bytes, EOS, file after file."""
    parts = {False: [], True: []}
    for path, data in files(root):
        parts[held_out(path)] += [
            torch.tensor([BOS], dtype=torch.int16),
            torch.frombuffer(bytearray(data), dtype=torch.uint8).to(torch.int16),
            torch.tensor([EOS], dtype=torch.int16),
        ]
    return torch.cat(parts[False]), torch.cat(parts[True])


def windows(stream, count, length, seed):
    """``count`` random windows of ``length`` tokens, int64; the same on any device."""
    g = torch.Generator().manual_seed(seed)
    at = torch.randint(len(stream) - length, (count, 1), generator=g).to(stream.device)
    return stream[at + torch.arange(length, device=stream.device)].long()


def byte_symbols():
    """One printable character for each byte: the alphabet of the ByteLevel pre-tokenizer."""
    keep = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols, extra = {b: chr(b) for b in keep}, 0
    for b in range(256):
        if b not in symbols:
            symbols[b] = chr(256 + extra)
            extra += 1
    return [symbols[b] for b in range(256)]


def write_tokenizer(folder):
    """tokenizer.json and tokenizer_config.json: BPE without merges, so token id = byte."""
    special = {BOS: "<|bos|>", EOS: "<|eos|>", PAD: "<|pad|>"}
    for i in range(256, VOCAB):
        special.setdefault(i, f"<|reserved_{i}|>")
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {c: i for i, c in enumerate(byte_symbols())},
        "merges": [],
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": s, **flags} for i, s in sorted(special.items())],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": model,
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": special[BOS],
        "eos_token": special[EOS],
        "pad_token": special[PAD],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    os.makedirs(folder, exist_ok=True)
    for name, value in (("tokenizer.json", tokenizer), ("tokenizer_config.json", settings)):
        with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
            json.dump(value, f, indent=1, ensure_ascii=False)
            f.write("\n")
