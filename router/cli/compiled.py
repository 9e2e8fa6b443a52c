"""Whether this is a compiled build (`make compiled`)."""

from importlib.util import find_spec


def is_compiled(module: str = "router.core.scheduler") -> bool:
    """Return whether a module is compiled, by the file that its import loads. Imports its package only."""
    spec = find_spec(module)
    return spec is not None and spec.origin is not None and not spec.origin.endswith(".py")
