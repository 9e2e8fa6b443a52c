"""The prefixes that recent requests share, by worker, in the order in which a cache would evict them.

A radix tree separate from the prefix map: that one tracks what is cached, this one how often it was requested. A node
ends where a prompt ends or two prompts part, so that all requests that pass its first chunk pass its last one too.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from router.core.cache.prefix_node import Node, Residency, Ring, Touch
from router.core.model.prompt_key import HASH_BYTES
from router.core.model.request import WorkerId

UNTIMED: Final = Touch(0.0)
"""Only the order of these residencies matters, not their times."""


class PrefixRun(NamedTuple):
    """Chunks that the same requests share."""

    chunks: int
    requests: int


class RecentPrefixes:
    """The prompts of recent requests, each added and removed once; a prompt is `PromptKey.hashes`.

    Adding and removing cost O(nodes on the path); there are at most two nodes for each prompt.
    """

    def __init__(self) -> None:
        self._root = Node(b"")
        self._requests: dict[Node, dict[WorkerId, int]] = {}
        """How many requests of each worker share each node."""
        self._orders: dict[WorkerId, Ring] = {}

    def __len__(self) -> int:
        """Return the number of nodes."""
        return len(self._requests)

    def add(self, hashes: bytes, worker: WorkerId) -> None:
        """Add the prompt of a request that was placed on a worker; its prefix becomes the most recently used there."""
        order = self._orders.get(worker)
        if order is None:
            order = self._orders[worker] = Ring()
        node = self._end(hashes)
        while node is not self._root:
            residency = node.residencies.get(worker)
            if residency is None:
                residency = node.residencies[worker] = Residency(node, UNTIMED)
            else:
                residency.unlink()
            # Link the end first, so that a prefix is more recent than what follows it.
            residency.link_after(order.newest)
            requests = self._requests[node]
            requests[worker] = requests.get(worker, 0) + 1
            node = node.parent

    def remove(self, hashes: bytes, worker: WorkerId) -> None:
        """Remove one of the requests with this prompt on a worker, because it is no longer recent."""
        node = self._end(hashes)
        while node is not self._root:
            requests, parent = self._requests[node], node.parent
            requests[worker] -= 1
            if not requests[worker]:
                del requests[worker]
                node.residencies.pop(worker).unlink()
            if not requests:
                del self._requests[node], parent.children[node.first]
            elif len(node.children) == 1:
                self._join_child(node)
            node = parent

    def stalest(self, worker: WorkerId, chunks: int) -> Iterator[PrefixRun]:
        """Yield what a worker's cache evicts first to free this many chunks: least recently used, deepest first."""
        order = self._orders.get(worker)
        for residency in order or ():
            if chunks <= 0:
                return
            node = residency.node
            yield PrefixRun(min(chunks, node.chunks), self._requests[node][worker])
            chunks -= node.chunks

    def forget_worker(self, worker: WorkerId) -> None:
        """Forget a worker. All its prompts were removed before."""
        self._orders.pop(worker, None)

    def _end(self, hashes: bytes) -> Node:
        """Return the node that ends with these hashes, created if there is none."""
        node, at = self._root, 0
        while at < len(hashes):
            child = node.children.get(hashes[at : at + HASH_BYTES])
            if child is None:
                return self._append(node, hashes[at:])
            shared = child.shared_bytes(hashes, at)
            node = child if shared == len(child.key) else self._split(child, shared)
            at += shared
        return node

    def _append(self, parent: Node, key: bytes) -> Node:
        node = parent.children[key[:HASH_BYTES]] = Node(key, parent)
        self._requests[node] = {}
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Move the first `at` bytes of a node's key to a new parent, which the same requests share."""
        upper = node.split(at)
        self._requests[upper] = dict(self._requests[node])
        return upper

    def _join_child(self, node: Node) -> None:
        """Merge a node into its only child if the same requests share both: then no prompt ends between them."""
        (child,) = node.children.values()
        if self._requests[child] != self._requests[node]:
            return
        node.join_child()
        del self._requests[node]
