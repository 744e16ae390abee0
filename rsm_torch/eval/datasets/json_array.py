"""Reading a JSON array one element at a time: some files hold gigabytes in one array."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from rsm_torch.eval.datasets.episode import DatasetError
from rsm_torch.eval.datasets.fields import not_text, unreadable

CHUNK = 1 << 20  # characters read at first; an element that needs more doubles what is held
_SPACE = re.compile(r"[ \t\n\r]*")
# An element cut by the end of what is held fails there, or where its last string begins.
_MARGIN = 16


def json_array(path: Path) -> Iterator[tuple[str, Any]]:
    """Each element of the array in a file, with its place ("file, [3]") for error messages.

    No more of the file is held than about twice the longest element.

    Raises:
        DatasetError: the file is not UTF-8 or holds no array; or, once it is reached, an element
            that is not valid JSON, or the end of a file that was cut short.
    """
    with path.open(encoding="utf-8-sig") as file:
        try:
            yield from _elements(_Text(file), path)
        except UnicodeDecodeError as error:
            raise not_text(path, error) from None


class _Text:
    """What is held of a file, and how far it is consumed."""

    def __init__(self, file: TextIO):
        self.file, self.held, self.at, self.ended = file, "", 0, False

    def peek(self) -> str:
        """The next character that is no white space; "" at the end of the file."""
        while True:
            self.at = self._past_space(self.at)
            if self.at < len(self.held) or self.ended:
                return self.held[self.at : self.at + 1]
            self._more()

    def value(self, place: str) -> Any:
        """The JSON value that comes next."""
        decoder = json.JSONDecoder()
        while True:
            try:
                value, end = decoder.raw_decode(self.held, self.at)
            except json.JSONDecodeError as error:
                if self.ended or not self._may_be_cut(error):
                    raise DatasetError(
                        f"{place}: not valid JSON ({error.msg}); is the file cut short?"
                    ) from None
            except (ValueError, RecursionError) as error:
                raise unreadable(place, error) from None
            else:
                if self.ended or self._is_whole(value, end):
                    self.at = end
                    return value
            self._more()

    def _more(self) -> None:
        left = self.held[self.at :]
        read = self.file.read(max(CHUNK, len(left)))
        self.held, self.at, self.ended = left + read, 0, not read

    def _past_space(self, start: int) -> int:
        found = _SPACE.match(self.held, start)
        return found.end() if found else start

    def _is_whole(self, value: Any, end: int) -> bool:
        """A value that ends where the held text ends may go on; so may a number before "e+"."""
        more = 2 if isinstance(value, (int, float)) else 0
        return self._past_space(end) + more < len(self.held)

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        after = self._past_space(error.pos + 1)  # the place may be that before white space
        return after >= len(self.held) - _MARGIN or error.msg.startswith("Unterminated string")


def _elements(text: _Text, path: Path) -> Iterator[tuple[str, Any]]:
    if (mark := text.peek()) != "[":
        raise DatasetError(f"{path}: expected a JSON array, it begins with {mark!r}")
    text.at += 1
    if text.peek() == "]":
        return
    number = 0
    while True:
        text.peek()
        place = f"{path}, [{number}]"
        yield place, text.value(place)
        mark = text.peek()
        if mark == "]":
            return
        if mark != ",":
            after = f"got {mark!r}" if mark else "the file ends"
            raise DatasetError(
                f"{place}: expected ',' or ']' after it, {after}; is the file cut short?"
            )
        text.at += 1
        number += 1
