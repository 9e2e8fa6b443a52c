"""Workers by the API of Kubernetes: what slices name, and how changes arrive over a real socket."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from router.errors import ConfigError
from router.upstream.discovery.kubernetes import (
    EndpointSlice,
    KubernetesApi,
    KubernetesWatch,
    kubernetes_api,
    workers_of,
)
from router.upstream.discovery.sources import Workers
from tests.support.kubernetes_api import FakeApi, endpoint_slice, fake_api
from tests.support.running import chat, running_router, until
from tests.support.scripted_engine import scripted_engine

RECORDED: Final[dict[str, Any]] = {
    "addressType": "IPv4",
    "apiVersion": "discovery.k8s.io/v1",
    "kind": "EndpointSlice",
    "metadata": {
        "generateName": "vllm-",
        "labels": {
            "app": "vllm",
            "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
            "kubernetes.io/service-name": "vllm",
            "service.kubernetes.io/headless": "",
        },
        "name": "vllm-4n7wx",
        "namespace": "default",
        "ownerReferences": [{"apiVersion": "v1", "kind": "Service", "name": "vllm", "uid": "b5a4", "controller": True}],
        "resourceVersion": "52114",
    },
    "endpoints": [
        {
            "addresses": ["10.244.1.7"],
            "conditions": {"ready": True, "serving": True, "terminating": False},
            "hostname": "vllm-0",
            "nodeName": "worker-2",
            "targetRef": {"kind": "Pod", "name": "vllm-0", "namespace": "default", "uid": "1c6e"},
        },
        {
            "addresses": ["10.244.2.9"],
            "conditions": {"ready": False, "serving": False, "terminating": False},
            "nodeName": "worker-3",
            "targetRef": {"kind": "Pod", "name": "vllm-1", "namespace": "default", "uid": "77d0"},
        },
    ],
    "ports": [
        {"name": "kv-events", "port": 5557, "protocol": "TCP"},
        {"name": "http", "port": 8000, "protocol": "TCP"},
    ],
}
"""A slice of a headless Service in the form that the API shows."""


def named(*slices: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return id, URL and role of the workers that slices name."""
    found = workers_of([EndpointSlice.model_validate(each) for each in slices])
    return [(worker.id, worker.url, worker.role) for worker in found]


def test_a_recorded_slice_names_its_ready_pods() -> None:
    """A worker has the name of its pod, and the port named http; a pod that is not ready is none."""
    assert named(RECORDED) == [("vllm-0", "http://10.244.1.7:8000", "both")]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"ports": [{"name": "", "port": 30000}]}, [("pod-0", "http://10.0.0.1:30000", "both")]),
        ({"ports": []}, []),
        ({"ports": None, "endpoints": None}, []),
        ({"endpoints": [{"addresses": ["10.0.0.1"]}]}, [("10.0.0.1:8000", "http://10.0.0.1:8000", "both")]),
        ({"endpoints": [{"addresses": ["10.0.0.1"], "conditions": {"ready": True, "terminating": True}}]}, []),
        ({"addressType": "FQDN"}, []),
        (
            {"metadata": {"name": "a", "labels": {"d2lpm-role": "prefill"}}},
            [("pod-0", "http://10.0.0.1:8000", "prefill")],
        ),
        ({"metadata": {"name": "a", "labels": {"d2lpm-role": "cook"}}}, []),
    ],
)
def test_what_a_slice_says_decides(change: dict[str, Any], expected: list[tuple[str, str, str]]) -> None:
    """The first port counts if none is named http, unknown readiness is readiness, a terminating pod is left out."""
    assert named(endpoint_slice("a", "10.0.0.1") | change) == expected


def test_a_pod_with_two_addresses_is_one_worker() -> None:
    """Of a pod that has an IPv4 and an IPv6 address, the IPv4 one counts; a pod with IPv6 alone is a worker, too."""
    both = [endpoint_slice("b", "10.0.0.1"), endpoint_slice("a", "fd00::1", "fd00::2", addressType="IPv6")]
    assert named(*both) == [("pod-0", "http://10.0.0.1:8000", "both"), ("pod-1", "http://[fd00::2]:8000", "both")]


class Reported:
    """Collects what a watch reports."""

    def __init__(self) -> None:
        self.times = 0
        self.urls: list[str] = []

    def take(self, _: str, workers: Workers) -> None:
        """Take the workers of the source."""
        self.times += 1
        self.urls = [worker.url.removeprefix("http://").partition(":")[0] for worker in workers]

    async def until(self, *addresses: str) -> None:
        """Wait until these are the addresses of the workers."""
        await until(lambda: self.urls == [*addresses])


@asynccontextmanager
async def watching(api: FakeApi, token: Path | None = None) -> AsyncIterator[Reported]:
    """Watch the slices of the API."""
    reported = Reported()
    reached = KubernetesApi(api.url, "default", token)
    async with KubernetesWatch("app=vllm", reached, reported.take, pause=0.02):
        yield reported


async def test_changes_arrive_as_they_happen() -> None:
    """What is there at the start is reported at once; slices that come, change and go are reported after that."""
    async with fake_api() as api:
        api.put(endpoint_slice("a", "10.0.0.1"))
        async with watching(api) as reported:
            assert reported.urls == ["10.0.0.1"]
            api.put(endpoint_slice("a", "10.0.0.1", "10.0.0.2"))
            await reported.until("10.0.0.1", "10.0.0.2")
            other = endpoint_slice("b", "10.0.0.9")
            other["endpoints"][0]["targetRef"]["name"] = "pod-9"
            api.put(other)
            await reported.until("10.0.0.1", "10.0.0.2", "10.0.0.9")
            api.delete("a")
            await reported.until("10.0.0.9")
        assert [call["labelSelector"] for call in api.calls] == ["app=vllm"] * 2


async def test_a_version_that_is_too_old_is_listed_again() -> None:
    """After the API's 410, the slices are listed, and the watch goes on from there."""
    async with fake_api() as api, watching(api) as reported:
        api.put(endpoint_slice("a", "10.0.0.1"))
        await reported.until("10.0.0.1")
        api.forget()
        api.put(endpoint_slice("a", "10.0.0.2"))
        await reported.until("10.0.0.2")
        assert sum("watch" not in call for call in api.calls) == 2


async def test_a_watch_that_ends_at_once_is_not_begun_again_at_once() -> None:
    """A proxy that allows no watch must not make the router ask without end: it pauses before the next one."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await asyncio.Event().wait()

    async with fake_api() as api:
        api.ends_watches = True
        reached = KubernetesApi(api.url, "default")
        async with KubernetesWatch("app=vllm", reached, Reported().take, pause=3600.0, sleep=sleep):
            await until(lambda: len(api.calls) > 2 or bool(slept))
        assert slept == [3600.0]
        assert ["watch" in call for call in api.calls] == [False, True]


async def test_a_bookmark_changes_no_worker() -> None:
    """It says which version a later watch may begin with, and reports nothing."""
    async with fake_api() as api, watching(api) as reported:
        api.bookmark()
        api.put(endpoint_slice("a", "10.0.0.1"))
        await reported.until("10.0.0.1")
        assert reported.times == 2


async def test_while_the_api_fails_the_workers_stay(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """An API that fails at the start is asked again, with one line in the log, and with the present token."""
    token = tmp_path / "token"
    token.write_text("old\n")
    with caplog.at_level(logging.WARNING):
        async with fake_api() as api:
            api.failing = True
            api.put(endpoint_slice("a", "10.0.0.1"))
            async with watching(api, token) as reported:
                await until(lambda: len(api.calls) > 2)
                assert reported.times == 0
                token.write_text("new\n")
                api.failing = False
                await reported.until("10.0.0.1")
            assert [api.calls[0]["authorization"], api.calls[-1]["authorization"]] == ["Bearer old", "Bearer new"]
    assert caplog.text.count("the workers stay as they were") == 1


async def test_a_router_serves_by_the_workers_of_a_service() -> None:
    """A router finds its worker by a selector, and drains it when its pod is no longer ready."""
    async with scripted_engine() as engine, fake_api() as api:
        api.put(endpoint_slice("a", "127.0.0.1", port=engine.port))
        found = {"worker_kubernetes": ["app=vllm"], "kubernetes_api": api.url}
        async with running_router(**found) as router:
            async with router.post(chat()) as post:
                await (await engine.call()).answer()
                assert (await post.response()).headers["x-d2lpm-worker"] == "pod-0"
            gone = endpoint_slice("a", "127.0.0.1", port=engine.port)
            gone["endpoints"][0]["conditions"]["ready"] = False
            api.put(gone)
            await until(lambda: not router.directory.endpoints)


def test_a_pod_reaches_the_api_as_kubernetes_says(tmp_path: Path) -> None:
    """Address, namespace, token and certificate come from where a pod has them; elsewhere that is a mistake."""
    (tmp_path / "namespace").write_text("llm\n")
    inside = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    expected = KubernetesApi("https://10.96.0.1:443", "llm", tmp_path / "token", tmp_path / "ca.crt")
    assert kubernetes_api(None, None, inside, tmp_path) == expected
    assert kubernetes_api(None, "other", inside, tmp_path).namespace == "other"
    assert kubernetes_api("http://127.0.0.1:8001", None, {}) == KubernetesApi("http://127.0.0.1:8001", "default")
    with pytest.raises(ConfigError, match="kubernetes_api"):
        kubernetes_api(None, None, {})
