"""Where the token ids of prompts come from, judged by the engines' own counts of tokens."""

import logging
from collections import OrderedDict
from enum import IntEnum
from typing import Final

from router.core.model.request import ClientId

log = logging.getLogger(__name__)

MAX_MISCOUNTS: Final = 5
"""Prompts in a row that an engine counted differently, after which their source of ids is given up."""
PAIRS_KEPT: Final = 4096
"""Pairs of model and client whose miscounts are remembered; the one not seen for longest is forgotten first."""


class TokenSource(IntEnum):
    """Where token ids come from; the next source is used once one is found wrong."""

    LOCAL = 0
    WORKER = 1
    NONE = 2


class TokenSources:
    """The source of each model's ids, for each client.

    An engine counts otherwise than a source if the tokenizer differs, or because of members of the body that the source
    does not know. Only some clients may send these, so what is given up is given up for the client alone.
    """

    def __init__(self, first: TokenSource) -> None:
        """`first`: the source of all until it is found wrong."""
        self._first = first
        self._seen: OrderedDict[tuple[str, ClientId], tuple[TokenSource, int]] = OrderedDict()
        """Source and miscounts in a row of each model and client that has had a miscount."""
        self._told: set[tuple[str, TokenSource]] = set()

    def of(self, model: str, client: ClientId) -> TokenSource:
        """Return the source for a client's calls to a model."""
        source, _ = self._seen.get((model, client), (self._first, 0))
        return source

    def compare(self, model: str, client: ClientId, source: TokenSource, expected: int, reported: int) -> None:
        """Compare the tokens that a source expected in a prompt with those that its engine reported."""
        pair = model, client
        current, miscounts = self._seen.get(pair, (self._first, 0))
        if source is not current:
            return
        miscounts = 0 if expected == reported else miscounts + 1
        if miscounts == MAX_MISCOUNTS:
            self._tell(model, source, expected, reported)
            current, miscounts = TokenSource(source + 1), 0
        if (current, miscounts) == (self._first, 0):
            self._seen.pop(pair, None)
            return
        self._seen[pair] = current, miscounts
        self._seen.move_to_end(pair)
        if len(self._seen) > PAIRS_KEPT:
            self._seen.popitem(last=False)

    def _tell(self, model: str, source: TokenSource, expected: int, reported: int) -> None:
        """Log that a source is given up, once for a model: other clients may follow."""
        if (model, source) in self._told:
            return
        self._told.add((model, source))
        log.warning(
            "model %s: the engine counted %d prompts of a client in a row differently (%d tokens, not %d, in the last "
            "one): its tokenizer may differ. From now on %s",
            model,
            MAX_MISCOUNTS,
            reported,
            expected,
            "its workers are asked for that client"
            if source is TokenSource.LOCAL
            else "that client's requests are matched by their bytes",
        )
