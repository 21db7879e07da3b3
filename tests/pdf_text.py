"""Read the text of a PDF that Typst made: enough of the format to check what a reader can copy."""

from __future__ import annotations

import re
import zlib

NUMBERED = re.compile(rb"(?:^|\n)(\d+) 0 obj\s(.*?)\sendobj", re.DOTALL)
TOKEN = re.compile(rb"/(f\d+) [\d.]+ Tf|(T[jJ])\b|(BDC)\b|(\()")
ESCAPE = re.compile(rb"\\([0-7]{1,3}|\r\n|.)", re.DOTALL)
PLAIN = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"b": b"\b", b"f": b"\f", b"\n": b"", b"\r\n": b""}


def pages(pdf: bytes) -> list[str]:
    """Return the text of each page, lines and cells without a space between them."""
    objects = {int(number): body for number, body in NUMBERED.findall(pdf)}
    found = []
    for body in objects.values():
        if re.search(rb"/Type\s*/Page\b", body):
            resources = _dictionary(objects, body, b"Resources")
            fonts = _dictionary(objects, resources, b"Font")
            maps = {
                name: _unicode(objects, objects[int(number)])
                for name, number in re.findall(rb"/(f\d+) (\d+) 0 R", fonts)
            }
            content = _stream(objects[_reference(body, b"Contents")])
            found.append(_text(content, maps))
    return found


def _reference(body: bytes, key: bytes) -> int:
    found = re.search(rb"/" + key + rb"\s*(\d+) 0 R", body)
    assert found, (key, body[:200])
    return int(found[1])


def _dictionary(objects: dict[int, bytes], body: bytes, key: bytes) -> bytes:
    inside = re.search(rb"/" + key + rb"\s*<<(.*?)>>", body, re.DOTALL)
    return inside[1] if inside else objects[_reference(body, key)]


def _stream(body: bytes) -> bytes:
    content = body.partition(b"stream")[2].lstrip(b"\r").removeprefix(b"\n")
    content = content.rpartition(b"endstream")[0]
    return zlib.decompressobj().decompress(content) if b"FlateDecode" in body else content


def _unicode(objects: dict[int, bytes], font: bytes) -> dict[int, str]:
    """Return the characters of each glyph."""
    cmap = _stream(objects[_reference(font, b"ToUnicode")])
    return {
        int(glyph, 16): bytes.fromhex(text.decode()).decode("utf-16-be")
        for glyph, text in re.findall(rb"<([0-9A-F]{4})> <([0-9A-F]+)>\n", cmap)
    }


def _text(content: bytes, maps: dict[bytes, dict[int, str]]) -> str:
    shown: list[str] = []
    font, codes, place = b"", b"", 0
    while token := TOKEN.search(content, place):
        place = token.end()
        name, show, _, string = token.groups()
        if name:
            font = name
        elif string:
            literal, place = _string(content, place)
            codes += _unescaped(literal)
        else:
            glyphs = [codes[i] << 8 | codes[i + 1] for i in range(0, len(codes), 2)] if show else []
            shown += [maps[font].get(glyph, "\ufffd") for glyph in glyphs]
            codes = b""
    return "".join(shown)


def _string(content: bytes, start: int) -> tuple[bytes, int]:
    """Return a string whose bracket was opened before `start`, and where it ends."""
    depth, place = 1, start
    while depth:
        depth += {ord("("): 1, ord(")"): -1}.get(content[place], 0)
        place += 2 if content[place] == ord("\\") else 1
    return content[start : place - 1], place


def _unescaped(literal: bytes) -> bytes:
    return ESCAPE.sub(
        lambda m: bytes([int(m[1], 8)]) if m[1][:1].isdigit() else PLAIN.get(m[1], m[1]), literal
    )
