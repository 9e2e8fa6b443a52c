"""The fast path for chunks: parses the form that nearly all chunks of a chat stream have without a JSON parser.

A common chunk has one choice, with index 0; text without quotes as its only output; a finish reason, if any, that is
not a failure; and as its last member the usage that the router asked for, or none if the engine sends no usage in
chunks. The common chunks of one stream differ only in text and usage, so the bytes around the text of one chunk are
matched literally against the next. Chunks of any other form are parsed as JSON.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, TypeGuard

# Atomic groups, as `(?:...)*+` is wrong before Python 3.11.5: where a last repetition fails halfway, it is not undone.
_NULLS: Final = rb'(?>(?:, ?+"\w++": ?+null)*)'
# `_BEFORE` matches up to the quote that opens the text, with no brace or bracket before those of the choices. Bracket
# and brace are checked one after the other, as a class of two characters is ten times slower than a class of one.
# `_AFTER` starts after the quote that closes the text.
_BEFORE: Final = (
    rb'\{(?=[^\[]*+\[\{)[^{]*"choices": ?\[\{"index": ?0, ?"delta": ?\{(?>(?:"\w++": ?+null, ?+)*)"content": ?"'
)
_AFTER: Final = _NULLS + rb"\}" + _NULLS + rb'(?:, ?"finish_reason": ?"(?!abort")(\w+)")?' + _NULLS
# The token ids of the text, if the router asked for them.
_IDS: Final = rb'(?:(, ?"token_ids": ?)\[([\d, ]*+)\])?'
# The usage after its first brace, with at most one object inside, and the end of the root object.
_REST: Final = re.compile(rb"[^}]*\}(?:[^{}]*\})?\}")
# No brace precedes the choices, so they are a member of the root object; so is the usage after them, as the last brace
# of valid JSON closes the root. A string cannot contain an unescaped quote, so a quoted name is a member's name; and an
# escaped quote in the text would be followed by more of the text.
_COMMON: Final = re.compile(
    rb'(%b)([^"]*)"(%b)%b(\}\])(?:(, ?"usage": ?\{)(%b)|\})' % (_BEFORE, _AFTER, _IDS, _REST.pattern)
)


class ChunkRun(NamedTuple):
    """Consecutive chunks of one form."""

    client_bytes: bytes
    """The chunks as plain events, without their usage: what the client gets."""
    text: bytes
    """Their joined text, still escaped as between the quotes of a JSON string."""
    usage: bytes
    """The usage of the last chunk, as JSON. It covers all of them. Empty if they have none."""
    finish_reason: bytes | None
    uncounted: int
    """The chunks with text whose tokens no usage counts: 0, or all of them."""
    ids: bytes | None = None
    """Ids of the tokens up to the last text, each followed by a comma; None if there is text without ids."""
    pending_ids: bytes = b""
    """Ids of the tokens after the last text, whose own text has not arrived."""


new_run: Final = partial(tuple.__new__, ChunkRun)
"""Makes a run of a tuple of all its fields. The class itself takes ten times as long, for every block that arrives."""


@dataclass(slots=True)
class ChunkForm:
    """What the common chunks of one stream have in common. Never changed."""

    before: bytes
    """Everything before the text, including the opening quote."""
    after: bytes
    """From after the closing quote of the text to the end of the choices, as the client sees it."""
    to_ids: bytes
    """From after the closing quote to the first token id; empty if chunks have no ids."""
    to_usage: bytes
    """From there through the first brace of the usage; without usage, to the end of the chunk."""
    finish_reason: bytes | None
    has_usage: bool = True

    def run(self, texts: list[bytes], ids: list[bytes], rest: bytes) -> ChunkRun:
        """Make a run of chunks with these texts. `rest` follows `to_usage` in the last chunk."""
        end = b'"' + self.after + b"}\n\n"
        start = b"data: " + self.before
        client_bytes = start + (end + start).join(texts) + end
        text, usage = b"".join(texts), b"{" + rest[:-1] if self.has_usage else b""
        uncounted = 0 if self.has_usage else len(texts) - texts.count(b"")
        if not self.to_ids:
            return ChunkRun(client_bytes, text, usage, self.finish_reason, uncounted, None if text else b"")
        with_text = len(texts)
        while with_text and not texts[with_text - 1]:
            with_text -= 1
        with_ids, pending = _join_ids(ids[:with_text]), _join_ids(ids[with_text:])
        return ChunkRun(client_bytes, text, usage, self.finish_reason, uncounted, with_ids, pending)


def _join_ids(ids: list[bytes]) -> bytes:
    return b",".join(ids) + b"," if ids else b""


NO_FORM: Final = ChunkForm(b"\n", b"", b"", b"", None)
"""A form that no chunk has."""


class CommonChunks:
    """Splits the chunks of one stream into runs of common chunks and other chunks."""

    __slots__ = ("_end", "_form", "_ids", "_start")

    def __init__(self, ids: bool = True) -> None:
        """`ids`: the router asked for token ids, so chunks with ids count as common and the ids are cut out."""
        self._ids = ids
        self._set_form(NO_FORM)

    def _set_form(self, form: ChunkForm) -> None:
        self._form = form
        """The form of the last common chunk."""
        self._start = b"data: " + (form.before if form.finish_reason is None else NO_FORM.before)
        """What precedes the text of an event that `single_run` takes."""
        self._end = b'"' + form.after + b"}\n\n"

    def single_run(self, block: bytes) -> ChunkRun | None:
        """Return the run of a block that is one event with a chunk of the last form; None if the block is not.

        Most blocks of a stream are one such event, so this does the work of `plain_data` and `split_runs` on it in one
        step. A chunk with a finish reason is left to them.
        """
        text, _, tail = (from_text := block.removeprefix(self._start)).partition(b'"')
        if from_text == block:
            return None
        with_text: bytes | None = None if text else b""
        pending = b""
        if to_ids := self._form.to_ids:
            ids, _, after_ids = (from_ids := tail.removeprefix(to_ids)).partition(b"]")
            tail = after_ids if from_ids != tail else b""
            with_text, pending = (ids + b",", b"") if text else (b"", ids + b",")
        usage = tail.removeprefix(self._form.to_usage)
        if usage == tail or block.find(b"\n") != len(block) - 2 or block.find(b"\r") >= 0:
            return None
        client_bytes = self._start + text + self._end
        if not self._form.has_usage:
            if usage != b"\n\n":
                return None
            return new_run((client_bytes, text, b"", None, 1 if text else 0, with_text, pending))
        if usage.partition(b"}")[2] != b"}\n\n" and not (usage.endswith(b"\n\n") and _REST.fullmatch(usage[:-2])):
            return None
        return new_run((client_bytes, text, b"{" + usage[:-3], None, 0, with_text, pending))

    def split_runs(self, data: Iterable[bytes]) -> list[ChunkRun | bytes]:
        """Return the chunks in order: common ones as runs, each other chunk unchanged on its own."""
        parts: list[ChunkRun | bytes] = []
        form = self._form
        before, to_ids, to_usage, has_usage = form.before, form.to_ids, form.to_usage, form.has_usage
        texts: list[bytes] = []
        ids: list[bytes] = []
        rest = b""
        for chunk in data:
            # `removeprefix` and `partition` cost a third of what `startswith`, `find` or a regular expression do.
            if (from_text := chunk.removeprefix(before)) != chunk:
                text, _, tail = from_text.partition(b'"')
                if to_ids:
                    id_list, _, after_ids = (from_ids := tail.removeprefix(to_ids)).partition(b"]")
                    tail = after_ids if from_ids != tail else b""
                usage = tail.removeprefix(to_usage)
                if usage != tail and (
                    (usage.partition(b"}")[2] == b"}" or _REST.fullmatch(usage)) if has_usage else not usage
                ):
                    texts.append(text)
                    if to_ids:
                        ids.append(id_list)
                    rest = usage
                    continue
            if texts:
                parts.append(form.run(texts, ids, rest))
                texts, ids = [], []
            if not self._is_common(common := _COMMON.fullmatch(chunk)):
                parts.append(chunk)
            else:
                form, text, id_list, rest = _form_of(common)
                before, to_ids, to_usage, has_usage = form.before, form.to_ids, form.to_usage, form.has_usage
                self._set_form(form)
                texts, ids = [text], [id_list]
        if texts:
            parts.append(form.run(texts, ids, rest))
        return parts

    def _is_common(self, match: re.Match[bytes] | None) -> TypeGuard[re.Match[bytes]]:
        """Return whether a chunk that matches like this is common. The JSON parser reads usage before the choices."""
        if match is None or not (self._ids or match[5] is None):
            return False
        return match[8] is not None or match[1].find(b'"usage"') < 0


def _form_of(common: re.Match[bytes]) -> tuple[ChunkForm, bytes, bytes, bytes]:
    """Return the form of a common chunk, and its parts: text, ids, and the rest after the first brace of its usage."""
    before, text, after, finish_reason, name, ids, end, to_usage, rest = common.groups()
    has_usage, to_end = to_usage is not None, end + (to_usage or b"}")
    if name is None:
        return ChunkForm(before, after + end, b"", after + to_end, finish_reason, has_usage), text, b"", rest or b""
    form = ChunkForm(before, after + name + b"null" + end, after + name + b"[", to_end, finish_reason, has_usage)
    return form, text, ids, rest or b""
