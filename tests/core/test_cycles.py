"""Reference counts alone free ended requests, since the garbage collector rarely looks at old objects."""

import gc

import pytest

from router.core.policies.registry import POLICIES
from tests.core.scenario import Scene


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_of_a_request_is_left_to_the_collector(policy: str) -> None:
    """An ended request leaves no cycle behind, whether its client waits alone, leaves, or returns."""
    scene = Scene(policy)
    gc.collect()
    gc.disable()
    try:
        for turn in range(3):
            for client in ("ada", "bob", "cyd"):
                for text in ("document one", "document two", "else"):
                    scene.arrive(client, f"{text} {turn}")
            scene.cancel(scene.arrive("dan", "document three"))
            scene.serve_all()
        assert gc.collect() == 0
    finally:
        gc.enable()
