"""What an emulated engine in virtual time tells of its cache, as the router's subscriber would hand it on."""

from router.core.kv_blocks.block_names import BlockNames
from router.core.kv_blocks.kv_events import CacheEvent, Cleared, Removed, Stored
from router.core.model.block_key import BlockHasher
from router.core.model.events import BlocksChanged, BlocksFollowed
from router.core.model.request import WorkerId
from workers.engine import block_log
from workers.engine.block_log import BlockEvent, publishes_after_step
from workers.engine.engine import Engine


class BlockEvents:
    """Of one worker, from its first step on."""

    def __init__(self, worker: WorkerId, engine: Engine, hasher: BlockHasher) -> None:
        """An engine that has not been used."""
        self._worker = worker
        self._engine = engine
        self._block = engine.config.block_size
        self._log = engine.log_blocks()
        self._names = BlockNames(hasher, engine.capacity)

    @property
    def followed(self) -> BlocksFollowed:
        """What is told of the worker before all else."""
        return BlocksFollowed(self._worker, self._block)

    def after_step(self) -> BlocksChanged | None:
        """What is told after the step that the engine has just taken; None where that is nothing."""
        if not publishes_after_step(self._engine):
            return None
        change = self._names.apply([self._read(event) for event in self._log.take()])
        if not (change.cleared or change.removed or change.stored):
            return None
        return BlocksChanged(self._worker, 0, change.cleared, change.removed, change.stored)

    def _read(self, event: BlockEvent) -> CacheEvent:
        match event:
            case block_log.Stored(hashes, parent, tokens):
                return Stored(hashes, parent, tokens, self._block, unmatchable=False)
            case block_log.Removed(hashes):
                return Removed(hashes)
            case block_log.Cleared():
                return Cleared()
