"""A description's text as a tree in which every key and value knows its line and column.

YAML goes through ruamel.yaml's event stream and JSON through a tokenizer, both into the same
`Node`s. Built without recursion, so no input can exhaust the stack.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
    SequenceEndEvent,
)
from ruamel.yaml.reader import ReaderError

from mkc.compiler.errors import DescriptionError, Location

MAX_FILE_BYTES = 4 << 20
MAX_DEPTH = 32
MAX_INTEGER = 2**31 - 1

Scalar = str | int | float | bool | None


@dataclass(slots=True)
class Node:
    """A scalar, a list of nodes or a mapping of names to nodes, and where it starts (from 1)."""

    value: Scalar | list[Node] | dict[str, Node]
    location: Location
    key_locations: dict[str, Location] = field(default_factory=dict)

    @property
    def children(self) -> dict[str, Node]:
        """The entries of a mapping, in the file's order; empty for anything else."""
        return self.value if isinstance(self.value, dict) else {}

    def plain(self) -> Any:
        """The value as Python data, lists as tuples."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return tuple(child.plain() for child in self.value)
        return self.value

    def shown(self) -> str:
        """The value as an error message quotes it: short and in ASCII."""
        if isinstance(self.value, dict):
            return "a mapping"
        if isinstance(self.value, list):
            return "a list"
        text = json.dumps(self.value)
        return text if len(text) <= 60 else text[:56] + "..."

    def error(self, code: str, message: str, hint: str | None = None) -> DescriptionError:
        """An error that points at this value."""
        return DescriptionError(code, message, hint, self.location)

    def key_error(
        self, key: str, code: str, message: str, hint: str | None = None
    ) -> DescriptionError:
        """An error that points at the key of one of this mapping's entries."""
        return DescriptionError(code, message, hint, self.key_locations[key])


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` is most likely a misspelling of, None if none is close."""
    folded = {name.lower().replace("-", "_"): name for name in known}
    found = difflib.get_close_matches(word.lower().replace("-", "_"), folded, n=1, cutoff=0.7)
    return folded[found[0]] if found else None


def quoted(word: str) -> str:
    """A key as an error message quotes it: in ASCII, shortened past 60 characters."""
    text = word if len(word) <= 60 else word[:57] + "..."
    return "'" + json.dumps(text)[1:-1].replace('\\"', '"') + "'"


def read_text(path: Path) -> str:
    """The text of a description file, without a byte order mark.

    Raises DescriptionError: MKC101 (unreadable), MKC102 (not UTF-8), MKC103 (empty, too large).
    """
    file = str(path)
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DescriptionError(
            "MKC101", f"cannot read the description: {reason}", location=Location(file)
        ) from error
    if len(data) > MAX_FILE_BYTES:
        raise DescriptionError(
            "MKC103",
            f"the file is larger than {MAX_FILE_BYTES >> 20} MiB",
            "is this a weight file? a description is a few KB of YAML or JSON",
            Location(file),
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = error.object[: error.start]
        line_start = before.rfind(b"\n") + 1
        column = len(before[line_start:].decode("utf-8", "replace")) + 1
        raise DescriptionError(
            "MKC102",
            f"not UTF-8 text: byte 0x{error.object[error.start]:02x} does not belong here",
            "save the file as UTF-8",
            Location(file, before.count(b"\n") + 1, column),
        ) from error
    if not text.strip():
        raise DescriptionError("MKC103", "the file is empty", location=Location(file, 1, 1))
    return text


def parse_yaml(text: str, file: str) -> Node:
    """The one document of a YAML text.

    Plain scalars follow YAML 1.2's core schema (`1e-6` is a number, `yes` is text). Anchors,
    aliases, tags and several documents are refused. Raises DescriptionError (MKC103 to MKC106,
    MKC114).
    """
    builder = _Builder(file)
    try:
        for event in YAML(typ="safe", pure=True).parse(text):
            _take_event(builder, event)
    except ReaderError as error:
        before = text[: error.position]
        raise DescriptionError(
            "MKC104",
            f"the character {quoted(chr(_code_point(error.character)))} is not allowed in YAML",
            None,
            Location(file, before.count("\n") + 1, len(before) - before.rfind("\n")),
        ) from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = Location(file, mark.line + 1, mark.column + 1) if mark else Location(file)
        reason = error.problem or error.context or "syntax error"
        raise DescriptionError("MKC104", f"not valid YAML: {reason}", None, where) from error
    except (YAMLError, ValueError, OverflowError) as error:
        raise DescriptionError(
            "MKC104", f"not valid YAML: {error}", None, Location(file)
        ) from error
    return builder.finish()


def parse_json(text: str, file: str) -> Node:
    """A JSON text. Raises DescriptionError (MKC103 to MKC106, MKC114)."""
    try:
        json.loads(text, parse_int=str)
    except json.JSONDecodeError as error:
        where = Location(file, error.lineno, error.colno)
        raise DescriptionError("MKC104", f"not valid JSON: {error.msg}", None, where) from error
    except RecursionError as error:
        raise DescriptionError(
            "MKC105", "nested too deeply to be a description", None, Location(file)
        ) from error
    builder = _Builder(file)
    for token, location in _json_tokens(text, file):
        if token in "{[":
            builder.open({} if token == "{" else [], location)
        elif token in "}]":
            builder.close()
        elif token.startswith('"'):
            builder.scalar(json.loads(token, strict=False), token, location)
        else:
            builder.scalar(resolve(token, location), token, location)
    return builder.finish()


def resolve(text: str, location: Location | None = None) -> Scalar:
    """What a plain scalar means by YAML 1.2's core schema.

    Raises DescriptionError MKC114 for a number that no description can hold: an integer beyond
    +-(2**31 - 1), an infinity or a NaN.
    """
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE"):
        return True
    if text in ("false", "False", "FALSE"):
        return False
    number: int | float
    if _INTEGER.fullmatch(text):
        digits = text.lstrip("+-0") or "0"
        number = int(text) if len(digits) <= 10 else MAX_INTEGER + 1
        if abs(number) > MAX_INTEGER:
            raise DescriptionError(
                "MKC114",
                f"{_short(text)} is beyond {MAX_INTEGER}, the largest whole number allowed",
                None,
                location,
            )
        return number
    if _FLOAT.fullmatch(text):
        number = float(text)
    elif _NOT_FINITE.fullmatch(text):
        number = math.inf
    else:
        return text
    if not math.isfinite(number):
        raise DescriptionError("MKC114", f"{_short(text)} is not a finite number", None, location)
    return number


_INTEGER = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?(\.inf|\.Inf|\.INF|Infinity)|\.nan|\.NaN|\.NAN|NaN")
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]]|[-+.\w]+')


def _short(text: str) -> str:
    return text if len(text) <= 24 else text[:21] + "..."


def _code_point(character: Any) -> int:
    return character if isinstance(character, int) else ord(character)


def _json_tokens(text: str, file: str) -> Iterator[tuple[str, Location]]:
    """The tokens of a valid JSON text but for colons and commas, which the order implies."""
    line, line_start, done = 1, 0, 0
    for match in _JSON_TOKEN.finditer(text):
        newlines = text.count("\n", done, match.start())
        if newlines:
            line += newlines
            line_start = text.rfind("\n", 0, match.start()) + 1
        done = match.start()
        yield match.group(), Location(file, line, match.start() - line_start + 1)


def _take_event(builder: _Builder, event: Event) -> None:
    """Feed one of ruamel's parser events to the builder, or refuse it."""
    mark = event.start_mark
    location = Location(builder.file, mark.line + 1, mark.column + 1)
    if isinstance(event, DocumentStartEvent):
        if builder.root is not None:
            raise DescriptionError(
                "MKC105", "a description is one YAML document, not several", None, location
            )
    elif isinstance(event, AliasEvent) or (isinstance(event, NodeEvent) and event.anchor):
        raise DescriptionError(
            "MKC105",
            f"YAML anchors and aliases are not supported ({quoted(str(event.anchor))})",
            "write the value out, or give it a name under layer_kinds",
            location,
        )
    elif isinstance(event, (MappingEndEvent, SequenceEndEvent)):
        builder.close()
    elif isinstance(event, NodeEvent):
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise DescriptionError(
                "MKC105", f"YAML tags are not supported ({quoted(str(tag))})", None, location
            )
        if isinstance(event, ScalarEvent):
            is_plain = event.style in (None, "")
            value = event.value
            builder.scalar(resolve(value, location) if is_plain else value, value, location)
        else:
            builder.open({} if isinstance(event, MappingStartEvent) else [], location)


class _Builder:
    """Builds the tree from a flat sequence of opened, closed and scalar nodes."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.root: Node | None = None
        self._open: list[Node] = []
        self._keys: list[str | None] = []

    def scalar(self, value: Scalar, text: str, location: Location) -> None:
        """Add a scalar; in a mapping's key position its text, unquoted, becomes the key."""
        if self._open and isinstance(self._open[-1].value, dict) and self._keys[-1] is None:
            key = value if isinstance(value, str) else text
            self._start_entry(key, location)
        elif self._open and value is None and not text and self._keys[-1] is not None:
            # Nothing stands after the key, and what the parser points at is the next token.
            self._add(Node(None, self._open[-1].key_locations[self._keys[-1]]))
        else:
            self._add(Node(value, location))

    def open(self, value: list[Node] | dict[str, Node], location: Location) -> None:
        """Start a list or mapping; what follows until `close` lies in it."""
        if len(self._open) >= MAX_DEPTH:
            raise DescriptionError(
                "MKC105", f"nested more than {MAX_DEPTH} levels deep", None, location
            )
        if self._open and isinstance(self._open[-1].value, dict) and self._keys[-1] is None:
            raise DescriptionError("MKC105", "a key must be plain text", None, location)
        node = Node(value, location)
        self._add(node)
        self._open.append(node)
        self._keys.append(None)

    def close(self) -> None:
        """End the innermost list or mapping."""
        self._open.pop()
        self._keys.pop()

    def finish(self) -> Node:
        """The whole tree."""
        if self.root is None:
            raise DescriptionError(
                "MKC103", "the file is empty but for comments", None, Location(self.file, 1, 1)
            )
        return self.root

    def _start_entry(self, key: str, location: Location) -> None:
        mapping = self._open[-1]
        first = mapping.key_locations.get(key)
        if first is not None:
            raise DescriptionError(
                "MKC106",
                f"the key {quoted(key)} is given twice",
                f"the first one is at line {first.line}",
                location,
            )
        mapping.key_locations[key] = location
        self._keys[-1] = key

    def _add(self, node: Node) -> None:
        if not self._open:
            self.root = node
            return
        parent = self._open[-1].value
        if isinstance(parent, list):
            parent.append(node)
        elif isinstance(parent, dict):
            key = self._keys[-1]
            assert key is not None
            parent[key] = node
            self._keys[-1] = None
