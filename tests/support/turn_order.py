"""The order in which round robin takes scripted engines: that of the answers to the router's first polls."""

from .running import RunningRouter, chat, until
from .scripted_engine import ScriptedEngine


async def in_turn(router: RunningRouter, *engines: ScriptedEngine) -> list[ScriptedEngine]:
    """Return the engines in the order of their turns under `rr`: each is sent a call, and the first is next again."""
    found = []
    for _ in engines:
        async with router.post(chat("Whose turn is it?", user="turns")) as post:
            await until(lambda: not all(each.calls.empty() for each in engines))
            found += [each for each in engines if not each.calls.empty()]
            await (await found[-1].call()).answer()
            await post.read()
    return found
