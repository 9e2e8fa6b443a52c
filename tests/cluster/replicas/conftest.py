"""A network for the replicas of a test."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from tests.cluster.replicas.network import CannotBuildError, Network, network


@pytest.fixture
async def net() -> AsyncIterator[Network]:
    """A network that can be parted."""
    async with AsyncExitStack() as stack:
        try:
            made = await stack.enter_async_context(network())
        except CannotBuildError as reason:
            pytest.skip(f"this machine makes no network namespaces: {reason}")
        yield made
