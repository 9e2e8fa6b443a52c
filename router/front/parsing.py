"""Parses the bodies of calls, costly ones in threads, one body per size class at a time; reads long answers in parts.

Parsing takes several times a body's length in memory, and holds Python's global lock for milliseconds per megabyte, so
more threads would not be faster. Owners take turns: a call waits for at most one body of each other owner, not for all
bodies that one owner has sent.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple, TypeVar

from router.api.body.call import Call, Head
from router.api.body.edits import rename, with_cache_salt
from router.api.body.fields import check_vocabulary, check_weight
from router.api.body.multipart import is_form
from router.api.body.steering import refuse_steering
from router.api.families import Family, with_deployment
from router.auth.identity import Identifier, Identity
from router.core.model.prompt_key import PromptHasher
from router.errors import BadRequest, UnknownModel
from router.upstream.connections import ServedModel, WorkerConnections

T = TypeVar("T")

NAME_BYTES: Final = 256
"""Bytes of a model's or user's name at most, as the router keeps these names after their call."""
INLINE_BYTES: Final = 64 * 1024
"""Bodies up to this size are parsed on the event loop unless they have many members, longer ones in a thread."""
INLINE_MEMBERS: Final = 2000
"""Commas and opening brackets at most of a body that is parsed on the event loop. Parsing takes 3 ms at worst, and 7 ms
if the body is parsed again for a salt and an alias."""
UNCOUNTED_BYTES: Final = 4096
"""Bodies up to this size have so few members that counting them would cost more."""
LONG_BYTES: Final = 2**20
"""Bodies longer than this have a thread of their own, so that shorter ones do not wait for them."""


class Isolation(NamedTuple):
    """Settings that keep the cached prefixes of clients or groups apart."""

    by_group: bool
    """Whether the clients of a group share their prefixes."""
    secret: bytes
    """Key of the salts, which clients cannot guess."""

    def cache_scope_of(self, identity: Identity) -> str:
        """Return the name of the client or group whose cached prefixes a client can use."""
        group = identity.group if self.by_group else None
        return f"client {identity.client}" if group is None else f"group {group.name}"


class Sender(NamedTuple):
    """What tells who has sent a body, before it is parsed."""

    headers: Mapping[bytes, bytes]
    address: str | None
    owner: str
    """The owner in whose turn the body is parsed."""


class BodyParser:
    """Parses the body of each call, and finds the model that it names."""

    def __init__(
        self,
        slots: "ParseSlots",
        hasher: PromptHasher,
        identifier: Identifier,
        connections: WorkerConnections,
        isolation: Isolation | None,
        *,
        ids: bool,
        strict: bool,
    ) -> None:
        """`isolation`: how cached prefixes are kept apart, None if all clients share them; `ids`: token ids are wanted
        to continue answers; `strict`: refuse calls that choose for themselves what the router chooses.
        """
        self._slots = slots
        self._hasher = hasher
        self._identifier = identifier
        self._connections = connections
        self._isolation = isolation
        self._ids = ids
        self._strict = strict

    async def parse(
        self, family: Family, head: Head, body: bytes, sender: Sender, deployment: str | None
    ) -> tuple[Call, ServedModel]:
        """Return the call, with an alias replaced by the model's own name, and its model. `deployment`: the model that
        the path named, in place of the body.

        Raises BadRequest, TooManyMembers and UnknownModel, and InvalidKey where the body may say who is calling.
        """
        parse = partial(self._parse, family, head, body, sender, deployment)
        if is_light(body, head.content_type):
            call = parse()
        else:
            call = (await self._slots.run(sender.owner, len(body), parse))._replace(light=False)
        if not call.model:
            call = call._replace(model=self._connections.any_model())
        served = self._connections.served(call.model)
        if served is None:
            raise UnknownModel(call.model)
        if call.largest_id >= 0:
            check_vocabulary(call.largest_id, served.vocabulary)
        return call, served

    def _parse(self, family: Family, head: Head, body: bytes, sender: Sender, deployment: str | None) -> Call:
        if len(body) > INLINE_BYTES:
            check_weight(body)
        if self._strict:
            refuse_steering(body)
        if self._isolation is not None:
            body = self._salted(self._isolation, body, sender)
        if deployment is not None:
            body = with_deployment(body, head.content_type, deployment)
        call = family.parse(head, body, self._hasher, ids=self._ids)
        for param, name in (("model", call.model), ("user", call.user or "")):
            if len(name) > NAME_BYTES or len(name.encode()) > NAME_BYTES:
                message = f"`{param}` is longer than {NAME_BYTES} bytes."
                raise BadRequest(message, param=param, code="string_above_max_length")
        if (model := self._connections.aliases.get(call.model)) is None:
            return call
        return family.parse(head, rename(body, call.content_type, model), self._hasher, ids=self._ids)

    def _salted(self, isolation: Isolation, body: bytes, sender: Sender) -> bytes:
        """Return the body with the cache salt of the client or its group."""

        def cache_scope(user: str | None) -> str:
            return isolation.cache_scope_of(self._identifier.identify(sender.headers, user, sender.address))

        return with_cache_salt(body, cache_scope, isolation.secret)


def is_light(body: bytes, content_type: str) -> bool:
    """Return whether parsing and editing a body takes some milliseconds at most, so that the event loop can do it.

    Commas and brackets in strings count as well, since leaving them out would cost more than a thread.
    """
    size = len(body)
    if size <= UNCOUNTED_BYTES:
        return True
    if size > INLINE_BYTES or is_form(content_type):  # the parser of forms is slow, and most forms have long files
        return False
    return size - len(body.translate(None, b",[{")) <= INLINE_MEMBERS


class ParseSlots:
    """One thread for costly bodies up to `LONG_BYTES`, one for longer bodies, and turns for long answers."""

    def __init__(self) -> None:
        self._short = ParseThread(ThreadPoolExecutor(1, "parse"))
        self._long = ParseThread(ThreadPoolExecutor(1, "parse"))
        self._answer_turns = RoundRobinLock()

    async def run(self, owner: str, size: int, work: Callable[[], T]) -> T:
        """Run `work` on a body of `size` bytes in a thread when its owner's turn comes, and return the result."""
        return await (self._short if size <= LONG_BYTES else self._long).run(owner, work)

    async def read(self, owner: str, block: bytes, read: Callable[[bytes], None]) -> None:
        """Pass a block of a long answer to `read` in parts. Per turn of the event loop, one owner gets one part."""
        for start in range(0, len(block), INLINE_BYTES):
            await self._answer_turns.acquire(owner)
            try:
                read(block[start : start + INLINE_BYTES])
            finally:
                asyncio.get_running_loop().call_soon(self._answer_turns.release)


class ParseThread:
    """One thread that owners use in turn."""

    def __init__(self, executor: Executor) -> None:
        """`executor`: has one thread."""
        self._executor = executor
        self._turns = RoundRobinLock()

    async def run(self, owner: str, work: Callable[[], T]) -> T:
        """Run `work` in the thread and return its result. Cancelling stops it only before it has started.

        Raises RuntimeError if the thread cannot be started.
        """
        await self._turns.acquire(owner)
        try:
            running = asyncio.get_running_loop().run_in_executor(self._executor, work)
        except RuntimeError:
            self._turns.release()
            raise
        running.add_done_callback(lambda _: self._turns.release())
        try:
            return await running
        finally:
            # An error would refer to this frame and the frame to the error: the body in it would stay in memory until
            # the garbage collector runs.
            del running


class RoundRobinLock:
    """A lock that waiting owners get in round-robin order."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Waiters by owner; the order of the owners is the order of their turns."""
        self._taken = False

    async def acquire(self, owner: str) -> None:
        """Wait until it is this owner's turn. The caller must `release` the lock."""
        if not self._taken:
            self._taken = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()
            raise

    def release(self) -> None:
        """Pass the lock to the next owner, skipping waiters that were cancelled."""
        self._taken = False
        while self._waiting:
            owner = next(iter(self._waiting))
            turns = self._waiting.pop(owner)
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns
            if not turn.done():
                self._taken = True
                turn.set_result(None)
                return
