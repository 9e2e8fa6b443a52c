"""The router that the chart renders starts natively: its arguments, its configuration, its keys, its probes."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tests.engine.processes import free_ports, wait_until
from tests.support.kubernetes_api import FakeApi, endpoint_slice, fake_api
from tests.support.running import emulated_workers

from .rendering import CHOICES, KEY, VLLM, Objects, of_kind, render

START_SECONDS = 60.0


@contextmanager
def api_with(url: str) -> Iterator[FakeApi]:
    """Run the API of Kubernetes in a thread, with a slice for the worker at this URL."""
    host, port = url.removeprefix("http://").split(":")
    loop, ready, end = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    made: list[FakeApi] = []

    async def serve() -> None:
        async with fake_api() as api:
            api.put(endpoint_slice("a", host, port=int(port)))
            made.append(api)
            ready.set()
            await end.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(START_SECONDS)
        yield made[0]
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()
        loop.close()


def placed(objects: Objects, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Write the files that the router's pod has into a folder. Returns its arguments and its environment."""
    pod = of_kind(objects, "Deployment")["spec"]["template"]["spec"]
    container, secrets = pod["containers"][0], {}
    for one in objects:
        if one["kind"] == "Secret":
            secrets[one["metadata"]["name"]] = one["stringData"]
    contents: dict[str, dict[str, str]] = {}
    for volume in pod["volumes"]:
        if "configMap" in volume:
            contents[volume["name"]] = of_kind(objects, "ConfigMap", volume["configMap"]["name"])["data"]
        elif "secret" in volume:
            contents[volume["name"]] = secrets[volume["secret"]["secretName"]]
    here = {mount["mountPath"]: folder / mount["mountPath"].lstrip("/") for mount in container["volumeMounts"]}
    for mount in container["volumeMounts"]:
        here[mount["mountPath"]].mkdir(parents=True, exist_ok=True)
        for name, text in contents.get(mount["name"], {}).items():
            (here[mount["mountPath"]] / name).write_text(_moved(text, folder))
    variables = {
        one["name"]: secrets[one["valueFrom"]["secretKeyRef"]["name"]][one["valueFrom"]["secretKeyRef"]["key"]]
        for one in container.get("env", [])
    }
    return [_moved(word, folder) for word in container["args"]], variables


def _moved(text: str, folder: Path) -> str:
    """Return a text whose paths lead into a folder."""
    return text.replace("/etc/d2lpm", f"{folder}/etc/d2lpm").replace("/var/lib/d2lpm", f"{folder}/var/lib/d2lpm")


def probed(objects: Objects, ports: dict[str, int]) -> dict[str, str]:
    """Return the URL of each probe."""
    container = of_kind(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    probes: dict[str, Any] = {name: container[name]["httpGet"] for name in container if name.endswith("Probe")}
    return {name: f"http://127.0.0.1:{ports[probe['port']]}{probe['path']}" for name, probe in probes.items()}


def test_the_rendered_router_serves(tmp_path: Path) -> None:
    """With the rendered arguments, files and variables it starts, finds its worker by the API, and answers at both
    ports; nothing is overridden but the addresses.
    """
    objects = render(tmp_path, {"workers": {"vllm": VLLM}, **CHOICES["keys"]["given"]})
    arguments, variables = placed(objects, tmp_path / "pod")
    ports = {"http": free_ports(2)}
    ports["admin"] = ports["http"] + 1
    with emulated_workers(1) as (worker,), api_with(worker) as api:
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("D2LPM_")},
            **variables,
            "D2LPM_PORT": str(ports["http"]),
            "D2LPM_ADMIN_PORT": str(ports["admin"]),
            "D2LPM_HOST": "127.0.0.1",
            "D2LPM_KUBERNETES_API": api.url,
        }
        command = [sys.executable, "-m", "router", *arguments]
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
            try:
                for url in probed(objects, ports).values():
                    wait_until(partial(answers, url), START_SECONDS, f"{url} answers")
                base, operators = f"http://127.0.0.1:{ports['http']}", f"http://127.0.0.1:{ports['admin']}"
                body = {"model": "m", "prompt": "Hello", "max_tokens": 3}
                assert httpx.post(f"{base}/v1/completions", json=body).status_code == 401, "clients need a key"
                assert "d2lpm_build_info" in httpx.get(f"{operators}/metrics").text
                assert httpx.get(f"{base}/metrics").status_code == 404
                bearer = {"authorization": f"Bearer {KEY}"}
                assert httpx.get(f"{operators}/config", headers=bearer).json()["log_format"] == "json"
                assert [one["id"] for one in httpx.get(f"{operators}/workers").json()["workers"]] == ["pod-0"]
                assert api.calls[0]["labelSelector"] == "d2lpm-router=d2lpm-d2lpm-router"
            finally:
                process.terminate()
                assert process.stderr is not None
                log = process.stderr.read()
    assert '"message":"stopped"' in log, log
    assert (tmp_path / "pod/var/lib/d2lpm").exists()
    assert any((tmp_path / "pod/var/lib/d2lpm").iterdir()), "the state was saved"


def answers(url: str) -> bool:
    """Return whether a URL answers with 200."""
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False
