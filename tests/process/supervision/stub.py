"""A stub of the router's processes, which imports little and so starts at once.

It writes each plan that it gets, with its process id, to a file in the plan's folder, and reports that it serves and is
alive. A file NAME-fails in that folder has it exit with code 3 instead, and NAME-hangs has it never serve.
"""

import json
import os
import select
import sys
from pathlib import Path

ALIVE_SECONDS = 0.02


def main() -> int:
    """Serve until the input ends. SIGTERM ends it at once."""
    line = open(0, "rb", buffering=0, closefd=False).readline()  # noqa: SIM115 - not to be closed
    if not line:
        return 0
    plan = json.loads(line)
    name = f"front-{plan['number']}" if plan["number"] else "scheduler"
    folder = Path(plan["folder"])
    if (folder / f"{name}-fails").exists():
        return 3
    started = folder / f"{name}-{plan['restart']}.json"
    half = started.with_suffix(".half")
    half.write_text(json.dumps({"pid": os.getpid(), "connected": plan["connected"]}))
    half.rename(started)
    if not (folder / f"{name}-hangs").exists():
        os.write(1, b"ready\n")
    while not select.select([0], [], [], ALIVE_SECONDS)[0]:
        os.write(1, b"alive\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
