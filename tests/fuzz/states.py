"""The target for the state file that an earlier run wrote and a router starts with."""

import hashlib
import json
from random import Random
from typing import Any, Final

from router.core.model.cost import Tokens
from router.core.model.events import CacheReport
from router.core.model.request import ClientId, GroupId, WorkerId
from router.core.model.saved import (
    Cache,
    Clients,
    Counters,
    Groups,
    Piece,
    Prefixes,
    SavedClient,
    SavedCounter,
    SavedGroup,
    SavedNode,
    SavedTouch,
)
from router.core.policies.context import Parameters
from router.core.policies.registry import POLICIES
from router.core.scheduler import Scheduler
from router.core.scheduler_settings import SchedulerSettings
from router.core.snapshot import restore, snapshot
from router.persistence.state_file import decode, encode, usable_pieces

from .engine import Target
from .mutation import Mutator

SECRET: Final = b"s" * 16
W: Final = WorkerId("w")
CLIENTS: Final = ("user-a", "user-b", "key-c")
PIECES: Final[tuple[Piece, ...]] = (
    Clients(tuple(SavedClient(ClientId(name), 2.0, Tokens(100, 20, 3)) for name in CLIENTS)),
    Counters("placement", (SavedCounter(ClientId("user-a"), W, -1.5, 10.0),)),
    Counters("order", tuple(SavedCounter(ClientId(name), None, 0.1, 10.0) for name in CLIENTS)),
    Groups((SavedGroup(GroupId("g"), None, -7.5, 10.0), SavedGroup(GroupId("h"), W, 7.5, 10.0))),
    Cache(W, "m", CacheReport(born=1.0, computed_tokens=100.0, block_tokens=16)),
    Prefixes(
        (SavedNode(-1, b"\x00\xff345678" * 2), SavedNode(0, b"abcdefgh"), SavedNode(0, b"ABCDEFGH")),
        (SavedTouch(W, 1, 2.5), SavedTouch(WorkerId("v"), 2, 3.5)),
    ),
)
HEADER: Final[dict[str, Any]] = {
    **{"d2lpm_state": 1, "router": "0.1.0", "saved": 1.0, "policy": "dlpm_home"},
    "hash_secret": SECRET.hex(),
}
LINES: Final[tuple[Any, ...]] = tuple(json.loads(encode(piece)) for piece in PIECES)
NAMES: Final = (
    *("rows", "kind", "nodes", "touches", "worker", "model", "report", "born", "computed_tokens", "d2lpm_state"),
    *("router", "saved", "policy", "hash_secret", "block_tokens", "sha256"),
)
TOKENS: Final = (
    *(
        b"\n",
        b'["Clients",',
        b'["Cache",',
        b'["Prefixes",',
        b"null",
        b"-1",
        b"NaN",
        b'"Infinity"',
        b"1e308",
        b"[",
        b"]",
    ),
    *(b"{", b"}", b'"', b",", b"0", b"AAAAAAAAAAA=", b'"w"', b"\xff", b"\0", b"\\ud800", b"9" * 30),
)


def make_state(random: Random) -> bytes:
    """A mutated state file, in most cases with a valid checksum."""
    mutator = Mutator(random, TOKENS, NAMES)
    header = mutator.tree(HEADER) if random.random() < 0.1 else {**HEADER, "policy": random.choice(list(POLICIES))}
    lines = [mutator.tree(line) if random.random() < 0.3 else line for line in LINES]
    if random.random() < 0.2:
        lines.insert(random.randint(0, len(lines)), random.choice(LINES))
    body = b"".join([mutator.json(line) + b"\n" for line in (header, *lines)])
    if random.random() < 0.3:
        body = mutator.damaged(body)
    if random.random() < 0.9:
        body = body.removesuffix(b"\n") + b"\n"
        return body + b'{"sha256":"%b"}\n' % hashlib.sha256(body).hexdigest().encode()
    return mutator.damaged(body)


def load_state(data: bytes, random: Random) -> bool:
    """A file is rejected as a whole, or restores a consistent state that can be saved and loaded again."""
    policy = random.choice(("dlpm_home", "d2lpm", "vtc", "lcf"))
    scheduler = Scheduler(POLICIES[policy], SchedulerSettings(), Parameters(), Random(0))
    try:
        state = decode(data)
        bytes.fromhex(state.header.hash_secret)
        pieces = list(usable_pieces(state, policy, SECRET))
        restore(scheduler, pieces, 7.0)
    except ValueError:
        return False
    scheduler.ledger.check_conservation()
    scheduler.prefixes.tree.check_integrity()
    lines = [encode(piece) for piece in snapshot(scheduler, 8.0)]
    header = json.dumps(HEADER).encode() + b"\n"
    body = b"".join([header, *lines])
    again = decode(body + b'{"sha256":"%b"}\n' % hashlib.sha256(body).hexdigest().encode())
    copy = Scheduler(POLICIES[policy], SchedulerSettings(), Parameters(), Random(0))
    restore(copy, again.pieces, 8.0)
    return True


STATE: Final = Target("state", make_state, load_state)
