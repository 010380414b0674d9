# SPDX-License-Identifier: Apache-2.0
"""The dynamic symbols and libraries of a 64-bit little-endian ELF file: nm -D without binutils."""

import struct
from dataclasses import dataclass
from pathlib import Path

DT_NEEDED, DT_RPATH, DT_RUNPATH = 1, 15, 29
STB_WEAK = 2


@dataclass(frozen=True)
class Symbol:
    name: str
    version: str  # e.g. GLIBC_2.34, or ""
    weak: bool
    defined: bool


class Elf:
    def __init__(self, path):
        self.data = Path(path).read_bytes()
        assert self.data[:6] == b"\x7fELF\x02\x01", f"{path}: no 64-bit little-endian ELF file"
        (at,) = struct.unpack_from("<Q", self.data, 0x28)
        size, count, names = struct.unpack_from("<HHH", self.data, 0x3A)
        places = range(at, at + count * size, size)
        headers = [struct.unpack_from("<IIQQQQIIQQ", self.data, place) for place in places]
        self.sections = {}  # name -> (offset, size)
        for header in headers:
            self.sections[self._text(headers[names][4], header[0])] = header[4], header[5]
        self.strings = self.sections[".dynstr"][0]

    def _text(self, table, offset):
        start = table + offset
        return self.data[start : self.data.index(b"\0", start)].decode()

    def _records(self, section, layout):
        offset, size = self.sections.get(section, (0, 0))
        yield from struct.iter_unpack(layout, self.data[offset : offset + size])

    def dynamic(self, tag):
        """Values of a tag of the dynamic section, as strings."""
        return [
            self._text(self.strings, value)
            for key, value in self._records(".dynamic", "<qQ")
            if key == tag
        ]

    def _versions(self):
        """Version index -> name, of what other libraries must provide."""
        versions, (at, size) = {}, self.sections.get(".gnu.version_r", (0, 0))
        while size:
            _, count, _, aux, following = struct.unpack_from("<HHIII", self.data, at)
            entry = at + aux
            for _ in range(count):
                _, _, index, name, step = struct.unpack_from("<IHHII", self.data, entry)
                versions[index & 0x7FFF] = self._text(self.strings, name)
                entry += step
            if not following:
                break
            at += following
        return versions

    def symbols(self):
        versions = self._versions()
        indices = [index for (index,) in self._records(".gnu.version", "<H")]
        found = []
        for i, (name, info, _, section, _, _) in enumerate(self._records(".dynsym", "<IBBHQQ")):
            version = versions.get(indices[i] & 0x7FFF, "") if indices else ""
            text = self._text(self.strings, name)
            if text:
                found.append(Symbol(text, version, info >> 4 == STB_WEAK, section != 0))
        return found
