"""A router that is killed with SIGKILL, and the one that is started after it."""

from pathlib import Path
from typing import Any

import httpx

from router.persistence.state_file import FILE_NAME
from tests.cli.test_main import PATIENCE, serving
from tests.support.running import chat, emulated_workers

KEY = "operator-key-0123456789"


def clients(url: str) -> Any:
    """Return the clients of /fairness without their waiting times, once all calls have ended."""
    while True:
        clients = httpx.get(f"{url}/fairness", timeout=PATIENCE).json()["clients"]
        if not any(entry["queued"] + entry["running"] for entry in clients.values()):
            break
    return {name: (entry["weight"], entry["service"], entry["deficit"]) for name, entry in clients.items()}


def usage(url: str) -> Any:
    """Return what each client used by day and model."""
    answer = httpx.get(f"{url}/usage", headers={"authorization": f"Bearer {KEY}"}, timeout=PATIENCE)
    answer.raise_for_status()
    return answer.json()["usage"]


def saved_at(file: Path) -> int:
    """Return when a file was saved, in nanoseconds since 1970; 0 if it was not yet."""
    return file.stat().st_mtime_ns if file.exists() else 0


def test_what_was_saved_before_a_kill_is_there_after_it(tmp_path: Path) -> None:
    """Service, usage, deficits and prefixes are those of the last save, and the file left by the killed router is
    complete.
    """
    state = tmp_path / "state"
    prompt = "A long document that is asked about again. " * 40
    flags = ("--state", str(state), "--state-interval", "0.05", "--dlpm-home.quantum", "100", "--admin-key", KEY)
    with emulated_workers(1) as (worker,):
        with serving(tmp_path, "--worker", worker, *flags) as router:
            for user in ("ann", "bob"):
                call = chat(f"{user} {prompt}", user=user, max_tokens=20)
                httpx.post(f"{router.url}/v1/chat/completions", json=call, timeout=PATIENCE).raise_for_status()
            before, used = clients(router.url), usage(router.url)
            assert [row["calls"] for row in used] == [1, 1]
            for _ in range(2):  # the first save may have begun before
                saved = saved_at(state / FILE_NAME)
                while saved_at(state / FILE_NAME) == saved:
                    httpx.get(f"{router.url}/health", timeout=PATIENCE)
            router.process.kill()
            router.process.wait(PATIENCE)
        with serving(tmp_path, "--worker", worker, *flags) as router:
            assert (clients(router.url), usage(router.url)) == (before, used)
            assert min(deficit["order"] for _, _, deficits in before.values() for deficit in deficits.values()) < 0
            call = chat(f"bob {prompt}", user="cy", max_tokens=20)
            answer = httpx.post(f"{router.url}/v1/chat/completions", json=call, timeout=PATIENCE)
            assert int(answer.headers["x-d2lpm-predicted-cached-tokens"]) > 200
    assert "broken" not in (tmp_path / "log").read_text()
