"""Compile a part of the router by mypyc while its wheel is built: `make compiled`.

Hatchling calls this only if HATCH_BUILD_HOOK_ENABLE_CUSTOM is set, and without it builds the plain wheel, which needs
no compiler. A compiled wheel has a shared library beside each compiled file; Python prefers it to the file.

Some files stay as they are. Dataclasses that msgspec or pydantic reads: mypyc keeps no annotation like `int | None` and
no docstring. Classes and protocols that interpreted files extend: an interpreted class cannot extend a compiled one.
And classes that extend those of uvicorn or prometheus_client.

The `__init__` of a dataclass and of a NamedTuple is interpreted in a compiled file, too. So what is made there for
every request is a class with an `__init__` of its own.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMPILED: Final = (
    "router/api/answer/*.py",
    "router/api/body/*.py",
    "router/api/continuation.py",
    "router/channel/client.py",
    "router/core/**/*.py",
    "router/front/*.py",
    "router/front/http/response_writer.py",
    "router/upstream/http_client.py",
)
PLAIN: Final = (
    "router/**/__init__.py",
    "router/api/answer/event_reader.py",
    "router/core/clients/rate_limits.py",
    "router/core/fleet/stored_responses.py",
    "router/core/model/*.py",
    "router/core/policies/*/*parameters.py",
    "router/front/call_record.py",
    "router/front/drain.py",
    "router/front/exchange.py",
)


def compiled_files(root: Path) -> list[Path]:
    """Return the files below this checkout that are compiled, sorted."""
    plain = {path for pattern in PLAIN for path in root.glob(pattern)}
    return sorted({path for pattern in COMPILED for path in root.glob(pattern)} - plain)


class CompiledWheel(BuildHookInterface[Any]):
    """Adds the shared libraries to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatchling's signature
        """Compile in a folder that is removed with this object."""
        from mypyc.build import mypycify  # noqa: PLC0415 - only a compiled wheel needs the compiler
        from setuptools import Distribution  # noqa: PLC0415

        self._folder = TemporaryDirectory()
        folder, root = Path(self._folder.name), Path(self.root)
        extensions = mypycify(
            [str(path.relative_to(root)) for path in compiled_files(root)],
            multi_file=True,
            group_name="router",
            debug_level="0",
            target_dir=str(folder / "c"),
        )
        build = Distribution({"ext_modules": extensions}).get_command_obj("build_ext")
        build.build_lib, build.build_temp, build.parallel = str(folder / "lib"), str(folder / "objects"), 2
        build.ensure_finalized()
        build.run()
        for library in (folder / "lib").rglob("*.so"):
            build_data["force_include"][str(library)] = str(library.relative_to(folder / "lib"))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Remove the folder."""
        self._folder.cleanup()
