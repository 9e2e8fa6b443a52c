"""The KV events of an emulated engine in virtual time, in the form in which the router's subscriber reports them."""

from router.core.kv_blocks.block_names import BlockNames
from router.core.kv_blocks.kv_events import CacheEvent, Cleared, Removed, Stored
from router.core.model.block_key import BlockHasher
from router.core.model.events import BlocksChanged, BlocksFollowed
from router.core.model.request import WorkerId
from workers.engine import block_log
from workers.engine.block_log import BlockEvent, publishes_after_step
from workers.engine.engine import Engine


class BlockEvents:
    """Collects the KV events of one worker from its first step on."""

    def __init__(self, worker: WorkerId, engine: Engine, hasher: BlockHasher) -> None:
        """`engine` must not have been used."""
        self._worker = worker
        self._engine = engine
        self._block = engine.config.block_size
        self._log = engine.log_blocks()
        self._names = BlockNames(hasher, engine.capacity)

    @property
    def followed(self) -> BlocksFollowed:
        """Return the first event about the worker."""
        return BlocksFollowed(self._worker, self._block)

    def after_step(self) -> BlocksChanged | None:
        """Return the event about the step that the engine has just run; None if it publishes nothing now."""
        if not publishes_after_step(self._engine):
            return None
        change = self._names.apply([self._read(event) for event in self._log.take()])
        if not (change.cleared or change.removed or change.stored):
            return None
        return BlocksChanged(self._worker, 0, change.cleared, change.removed, change.stored)

    def _read(self, event: BlockEvent) -> CacheEvent:
        match event:
            case block_log.Stored(hashes, parent, tokens):
                return Stored(hashes, parent, tokens, self._block, matchable=len(hashes))
            case block_log.Removed(hashes):
                return Removed(hashes)
            case block_log.Cleared():
                return Cleared()
