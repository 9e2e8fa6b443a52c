"""The form that nearly all chunks of a chat stream have, taken apart as text: the fast way through the per-chunk path.

One choice, the first; text without quotes and nothing else said, but for the reason of its end, which is no failure;
usage, which we asked for, as the last member. Such chunks of one stream differ only in their text and their usage, so
what the last one had around its text is looked for in the next as it stands. Whatever has any other form is read as
JSON.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

_NULLS: Final = rb'(?:, ?"\w+": ?null)*+'
# Up to the quote before the text, with no brace or bracket before those of the choices: one is looked for after the
# other, since a class of two characters takes ten times as long as one of a single one. From the quote behind the text.
_BEFORE: Final = rb'\{(?=[^\[]*+\[\{)[^{]*"choices": ?\[\{"index": ?0, ?"delta": ?\{(?:"\w+": ?null, ?)*+"content": ?"'
_AFTER: Final = _NULLS + rb"\}" + _NULLS + rb'(?:, ?"finish_reason": ?"(?!abort")(\w+)")?' + _NULLS
# What the text consists of, where we asked for that.
_IDS: Final = rb'(?:(, ?"token_ids": ?)\[([\d, ]*+)\])?'
# Usage behind its first brace, which holds at most one object, and the end of the root.
_REST: Final = re.compile(rb"[^}]*\}(?:[^{}]*\})?\}")
# Before the choices there is no other brace, so they are a member of the root, and so is the usage after them: of valid
# JSON the last brace closes the root. A raw quote cannot stand inside a string, so names are names; and an escaped one
# in the text would be followed by more of the text.
_COMMON: Final = re.compile(rb'(%b)([^"]*)"(%b)%b(\}\])(, ?"usage": ?\{)(%b)' % (_BEFORE, _AFTER, _IDS, _REST.pattern))


@dataclass(slots=True)
class ChunkRun:
    """Chunks of one form in a row. Made for every block that comes, and not changed."""

    client_bytes: bytes
    """They as plain events, without their usage."""
    text: bytes
    """What they say together, as it stands between the quotes of a JSON string."""
    usage: bytes
    """The usage of the last, as JSON: it counts for all of them."""
    finish_reason: bytes | None
    ids: bytes | None = None
    """Of the tokens up to the last text, each with a comma behind; None where text has no ids."""
    pending_ids: bytes = b""
    """Of those behind it, whose text is still to come."""


@dataclass(slots=True)
class ChunkForm:
    """What the common chunks of one stream share. Not changed either."""

    before: bytes
    """All before the text, its quote included."""
    behind: bytes
    """From the quote behind the text to the end of the choices, as the client sees it."""
    to_ids: bytes
    """From that quote to the first id; empty where chunks have none."""
    to_usage: bytes
    """From there to the usage, its name and its first brace included."""
    finish_reason: bytes | None

    def run(self, texts: list[bytes], ids: list[bytes], rest: bytes) -> ChunkRun:
        """The chunks that say these texts; `rest` is what the last has behind the first brace of its usage."""
        end = b'"' + self.behind + b"}\n\n"
        start = b"data: " + self.before
        seen = start + (end + start).join(texts) + end
        text, usage = b"".join(texts), b"{" + rest[:-1]
        if not self.to_ids:
            return ChunkRun(seen, text, usage, self.finish_reason, None if text else b"")
        said = len(texts)
        while said and not texts[said - 1]:
            said -= 1
        return ChunkRun(seen, text, usage, self.finish_reason, _join_ids(ids[:said]), _join_ids(ids[said:]))


def _join_ids(ids: list[bytes]) -> bytes:
    return b",".join(ids) + b"," if ids else b""


NO_FORM: Final = ChunkForm(b"\n", b"", b"", b"", None)
"""No chunk has this."""


class CommonChunks:
    """Finds the common chunks of one stream."""

    __slots__ = ("_form", "_ids")

    def __init__(self, ids: bool = True) -> None:
        """`ids`: we asked for those of the tokens, so that chunks with some are common and lose them."""
        self._ids = ids
        self._form = NO_FORM
        """Of the last one."""

    def split_runs(self, data: Iterable[bytes]) -> Iterator[ChunkRun | bytes]:
        """Chunks in their order: the common ones run by run, each other by itself and as it is."""
        form = self._form
        before, to_ids, to_usage = form.before, form.to_ids, form.to_usage
        texts: list[bytes] = []
        ids: list[bytes] = []
        rest = b""
        for chunk in data:
            # `removeprefix` and `partition` cost a third of what `startswith`, `find` or a regular expression do.
            if (said := chunk.removeprefix(before)) != chunk:
                text, _, behind = said.partition(b'"')
                if to_ids:
                    listed, _, after = (told := behind.removeprefix(to_ids)).partition(b"]")
                    behind = after if told != behind else b""
                usage = behind.removeprefix(to_usage)
                if usage != behind and (usage.partition(b"}")[2] == b"}" or _REST.fullmatch(usage)):
                    texts.append(text)
                    if to_ids:
                        ids.append(listed)
                    rest = usage
                    continue
            if texts:
                yield form.run(texts, ids, rest)
                texts, ids = [], []
            if (common := _COMMON.fullmatch(chunk)) is None or not (self._ids or common[5] is None):
                yield chunk
            else:
                form, text, listed, rest = _form_of(common)
                before, to_ids, to_usage = form.before, form.to_ids, form.to_usage
                self._form = form
                texts, ids = [text], [listed]
        if texts:
            yield form.run(texts, ids, rest)


def _form_of(common: re.Match[bytes]) -> tuple[ChunkForm, bytes, bytes, bytes]:
    """The form of a common chunk, and what it has of its own: text, ids, all behind the first brace of its usage."""
    before, text, behind, finish_reason, name, ids, end, to_usage, rest = common.groups()
    if name is None:
        return ChunkForm(before, behind + end, b"", behind + end + to_usage, finish_reason), text, b"", rest
    form = ChunkForm(before, behind + name + b"null" + end, behind + name + b"[", end + to_usage, finish_reason)
    return form, text, ids, rest
