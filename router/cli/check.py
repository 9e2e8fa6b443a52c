"""The command `d2lpm check`, which checks a settings file and its workers."""

import argparse
import asyncio
import os
from collections.abc import Iterator, Sequence
from typing import Final

from router.auth.keys_file import load as load_clients
from router.cluster.handshake import read_secret
from router.cluster.tls import cluster_tls
from router.config.addresses import WorkerAddress
from router.config.policy_names import BALANCING
from router.config.settings import Settings
from router.config.sources import load
from router.config.template import given, unread
from router.errors import ConfigError
from router.process.server import build_tls
from router.upstream.discovery.kubernetes import KubernetesWatch, kubernetes_api
from router.upstream.discovery.sources import DnsSource, Workers, read_workers, resolve
from router.upstream.flag_check import WorkerCheck, check_workers
from router.upstream.flag_rules import Finding, RouterNeeds, connector_finding, tier_findings
from router.upstream.ranks.rank_rules import RankRules
from router.upstream.worker_registry import endpoint_of

LARGE_FLEET: Final = 8
"""Workers that together stream enough tokens, some 2,000 per second each, to fill the core of a router."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `check`."""
    parser.epilog = (
        "Sends each worker two prompts of a few hundred tokens, for one token each. Exits with 0 if nothing should be "
        "changed, with 1 if something should, and with 2 if a file has a mistake."
    )
    parser.add_argument("file", metavar="FILE", help="as for `serve --config`; the environment counts as it does there")
    parser.set_defaults(run=lambda options: _check(str(options["file"])))


def _check(file: str) -> int:
    """Return 1 if anything should be changed, otherwise 0. Raises ConfigError for an invalid file."""
    settings = load({"--config": file}, os.environ)
    _read_files(settings)
    for line in settings_lines(file, settings):
        print(line)
    workers, findings = asyncio.run(_workers(settings))
    for finding in findings:
        print(f"{finding.seen}; {finding.change}")
    endpoints = [endpoint_of(worker, settings) for worker in workers]
    rules = RankRules(settings.ranks, settings.barrier)
    needs = RouterNeeds(settings.min_match_tokens, settings.isolate != "none", rules, settings.handoff_seconds)
    checks = asyncio.run(check_workers(endpoints, needs))
    parts = [check.part for check in checks if check.card]
    unfit = dict.fromkeys(connector_finding(part, parts) for part in parts)
    misfits = [*(each for each in unfit if each is not None), *tier_findings(parts)]
    for line in (*worker_lines(checks), *(f"{seen}; {change}" for seen, change in misfits), *fleet_lines(checks)):
        print(line)
    return 1 if findings or misfits or any(worker.findings for worker in checks) else 0


def _read_files(settings: Settings) -> None:
    """Read the files that `serve` reads at its start and that can have a mistake. Raises ConfigError for one."""
    if settings.clients is not None:
        load_clients(settings.clients)
    build_tls(settings)
    if settings.cluster_secret_file is not None:
        read_secret(settings.cluster_secret_file)
    cluster_tls(settings)


def settings_lines(file: str, settings: Settings) -> Iterator[str]:
    """Yield the lines that list the settings changed from their defaults, each with its description."""
    changed = list(given(settings))
    yield f"{file}: valid; settings changed from their defaults: {len(changed)}"
    for name, value, about in changed:
        yield f"  {name}: {value}"
        yield f"      {about}"
    policies = (settings.policy,) if "policy" in settings.model_fields_set else (settings.policy, BALANCING)
    for name in unread(settings, *policies):
        yield f"{name} has no effect: the policy {' or '.join(policies)} does not read it"


def worker_lines(checks: Sequence[WorkerCheck]) -> Iterator[str]:
    """Yield a line for each worker that answers, one for each of its notes and one for each of its findings."""
    for worker, card, findings, notes, _ in checks:
        if card:
            yield f"{worker}: {card}{'' if findings else '; its flags fit'}"
        for note in notes:
            yield f"{worker}: {note}"
        for seen, change in findings:
            yield f"{worker}: {seen}; {change}"


def fleet_lines(checks: Sequence[WorkerCheck]) -> Iterator[str]:
    """Yield what helps a router with many workers, which no worker reports. Nothing that must be changed."""
    alive = sum(bool(check.card) for check in checks)
    if alive >= LARGE_FLEET:
        yield (
            f"{alive} workers: if the router lacks CPU time, start them with --stream-interval 10, so that an event "
            "carries ten tokens"
        )


async def _workers(settings: Settings) -> tuple[Sequence[WorkerAddress], Sequence[Finding]]:
    """Return the listed and the discovered workers, each once, and a finding for each failed lookup."""
    named = list(settings.workers())
    findings = []
    if settings.workers_file is not None:
        named += read_workers(settings.workers_file)
    for url in settings.worker_dns:
        try:
            named += await DnsSource(url, resolve).read()
        except OSError as error:
            findings.append(
                Finding(f"{url}: its host has no address ({error})", "correct worker_dns, or start a worker")
            )
    if settings.worker_kubernetes:
        pods, failures = await _pods(settings)
        named += pods
        findings += failures
    found: dict[str, WorkerAddress] = {}
    for worker in named:
        found.setdefault(worker.url, worker)
    if not found and not settings.emulate and not findings:
        raise ConfigError("there is no worker: name some under worker, worker_dns, worker_kubernetes or workers_file")
    return list(found.values()), findings


async def _pods(settings: Settings) -> tuple[Sequence[WorkerAddress], Sequence[Finding]]:
    """Return the workers that Kubernetes names, and a finding for each selector that finds none."""
    try:
        api = kubernetes_api(settings.kubernetes_api, settings.kubernetes_namespace, os.environ)
    except ConfigError as error:
        return [], [Finding(str(error), "or run this check in a pod of the router")]
    found: dict[str, Workers] = {}
    findings = []
    for selector in settings.worker_kubernetes:
        async with KubernetesWatch(selector, api, found.__setitem__) as watch:
            pass  # it has asked once
        if not found.get(watch.name):
            seen = f"{selector}: no headless Service with this label has a ready pod"
            findings.append(Finding(seen, "correct worker_kubernetes, or start a worker"))
    return [worker for workers in found.values() for worker in workers], findings
