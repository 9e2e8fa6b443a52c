"""Hardware, KV capacity, loads and seeds of all experiments, fixed before the first run and not tuned afterwards.

What the papers do not state is chosen here, with its reason. Conditions of the VTC paper alone are in `vtc_conditions`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from bench.sim.scenario import WorkerSpec
from bench.workloads.combined import Misbehaving
from bench.workloads.papers.dlpm import ARENA_CHAT, JUDGE, QA, TREES
from bench.workloads.papers.preble import EMBODIED, LOOGLE, PROGRAMMING, TOOLBENCH, VIDEO
from bench.workloads.parts.lengths import Lengths
from bench.workloads.parts.pace import RatedWorkload
from bench.workloads.parts.traffic import Rated, Workload
from bench.workloads.shared_prefix import SharedPrefix
from router.core.clients.queue_limits import WaitingLimits
from router.core.policies.dlpm.dlpm_parameters import D2lpmParameters, DlpmParameters, LpmParameters
from router.core.policies.preble.preble_parameters import PrebleParameters
from router.core.scheduler_settings import SchedulerSettings

SEEDS: Final = (0, 1, 2, 3, 4)
QUICK_SEEDS: Final = (0,)
SCREEN_SEEDS: Final = (0, 1)
"""For all policies on all workloads: enough to choose the policies of the full grid, which has five seeds."""

A100: Final = WorkerSpec(hardware="a100-mistral-7b")
"""As in the DLPM paper's main comparison: 8 B on A100s, whose KV takes as much memory per token."""
A10G_3B: Final = WorkerSpec(hardware="a10g-llama-7b", speed=2.2, kv_tokens=130_000)
"""A model of 3 B on an A10G, as in the paper's figures 8, 11 and 12.

Weights of 6.4 GB instead of 14 are read 2.2 times faster; 0.9 of 24 GB less those weights holds 130 k tokens of 112
KiB.
"""

OVERLOAD: Final = 1.5
"""The load of figures 7 to 10, as a multiple of the most that the workers can serve of it (`SATURATING`)."""


def fleet(spec: WorkerSpec, workers: int) -> tuple[WorkerSpec, ...]:
    """Return `workers` equal workers."""
    return (replace(spec),) * workers


class Contender:
    """A policy with its name in a table and the parameters of its families."""

    __slots__ = ("parameters", "policy")

    def __init__(self, policy: str, *parameters: object) -> None:
        self.policy = policy
        self.parameters = parameters


PRINTED: Final = (
    D2lpmParameters(charge_full_input=True, steal_loss=-1, by_service_rate=False),
    DlpmParameters(sparse_first=False, head_start=0.0),
)
"""D²LPM as printed in the paper: full charge at the placement, no stealing, equal quanta, no priority among clients.
The refill is ours: it also tops up clients with a positive deficit.
"""

CONTENDERS: Final[Mapping[str, Contender]] = {
    "d2lpm printed": Contender("d2lpm", *PRINTED),
    "d2lpm": Contender("d2lpm"),
    "dlpm_home": Contender("dlpm_home"),
    "rr+lpm": Contender("rr+lpm"),
    "preble": Contender("preble"),
    "vtc": Contender("vtc"),
}
"""The policies of the main comparison (figure 7), with defaults for all else."""
ALL: Final[Mapping[str, Contender]] = {
    **CONTENDERS,
    **{
        name: Contender(name)
        for name in (
            "vtc_predict",
            "vtc_oracle",
            "lcf",
            "rpm",
            "rr+dlpm",
            "cache_aware",
            "consistent_hash",
            "least_requests",
            "two_choices",
            "random",
            "round_robin",
            "pooled_fcfs",
        )
    },
}
"""All policies: those of the main comparison and the rest."""


@dataclass(frozen=True, slots=True)
class Span:
    """The length of a simulation and of its warm-up, in seconds."""

    seconds: float
    warmup: float = 0.0


SATURATING: Final[Mapping[str, tuple[RatedWorkload, int]]] = {
    "chat": (ARENA_CHAT, 256),
    "tree": (TREES, 32),
    "long tree": (replace(TREES, question_times=10.0), 32),
    "tree of 3": (replace(TREES, branches=3), 12),
    "long tree of 3": (replace(TREES, branches=3, question_times=10.0), 12),
    "tree of 4": (replace(TREES, branches=4), 6),
    "judge": (JUDGE, 64),
    "judge +600": (replace(JUDGE, extra=600), 64),
    "judge of 16": (replace(JUDGE, dimensions=16), 16),
    "qa": (QA, 24),
    "qa x2": (replace(QA, prefix_times=2.0), 24),
    "tool": (TOOLBENCH, 128),
    "program": (PROGRAMMING, 128),
    "video": (VIDEO, 48),
    "document": (LOOGLE, 24),
    "task": (EMBODIED, 32),
}
"""Each kind of session, and how many of them saturate a worker: twice as many raise throughput no further."""
SATURATION_SPAN: Final = Span(90.0, 30.0)


# Worker seconds per session, measured by `experiment saturation`.
ON_A100: Final[Mapping[str, float]] = {
    "tree": 0.596,
    "long tree": 0.869,
    "tree of 4": 7.066,
    "judge": 0.384,
    "judge +600": 0.427,
    "judge of 16": 2.81,
    "qa": 0.085,
    "qa x2": 0.667,
    "chat": 0.017,
    "tool": 0.037,
    "program": 0.097,
    "video": 0.496,
    "document": 0.6,
    "task": 0.542,
}
ON_A10G: Final[Mapping[str, float]] = {
    "chat": 0.033,
    "tree": 1.443,
    "long tree": 2.276,
    "tree of 3": 6.149,
    "long tree of 3": 9.231,
    "judge": 0.878,
}

# Figure 7 of the DLPM paper.
FIG7_SESSIONS: Final[Mapping[str, tuple[str, str]]] = {
    "tot-s1": ("tree of 4", "tree"),
    "tot-s2": ("long tree", "tree"),
    "judge-s1": ("judge of 16", "judge"),
    "judge-s2": ("judge +600", "judge"),
    "qa-s1": ("qa", "qa"),
    "qa-s2": ("qa x2", "qa"),
}
"""The sessions of the misbehaving client, and those of the others."""
FIG7_SPAN: Final = Span(60.0, 10.0)
"""For trees and judgements: half of a light client's take 25 to 35 seconds beside the misbehaving client."""
FIG7_LARGE_SPAN: Final = Span(20.0, 6.0)
"""With eight workers: long enough for throughput, shares and hit rates; latencies have only a lower bound."""
FIG7_QUICK_SPAN: Final = Span(32.0, 8.0)
FIG7_DOCUMENTS_SPAN: Final = Span(36.0, 14.0)
"""Documents take long to become cached, and the questions about them little."""
FIG7_SEEDS: Final = (0, 1, 2)
"""Five seeds would take eight minutes more than `make results` may."""


def fig7_span(workload: str, workers: int, *, quick: bool) -> Span:
    """Return the length of a simulation of figure 7, which has most of the work of all experiments."""
    if workload.startswith("qa"):
        return FIG7_DOCUMENTS_SPAN
    if quick:
        return FIG7_QUICK_SPAN
    return FIG7_LARGE_SPAN if workers == 8 else FIG7_SPAN


# Every policy on every workload, and what changes with each parameter.
PLAIN_SESSIONS: Final[Mapping[str, str]] = {
    "tot": "tree",
    "judge": "judge",
    "qa": "qa",
    "arena-chat": "chat",
    "toolbench": "tool",
    "toolbench-zipf": "tool",
    "programming": "program",
    "video": "video",
    "loogle": "document",
    "embodied": "task",
}
"""Workloads of equal clients, and their sessions: two of the DLPM paper's, eight of the Preble paper's."""
POLICIES_WORKERS: Final = 2
POLICIES_SPAN: Final = Span(36.0, 6.0)

# Figures 1 and 8 to 12, all on A10G_3B. The paper says neither their loads nor how long they ran, nor which workload
# figures 1, 10 and 11 show: trees of thoughts here, as in figure 9, which its text sets beside figure 10.
BACKLOG: Final = 3.0
"""In place of OVERLOAD if each client asks for about as much as any other: every client must be backlogged, and a
tree's later calls arrive only after its first are answered.
"""

ONE_WORKER: Final[Mapping[str, Contender]] = {
    "dlpm": Contender("rr+dlpm"),
    "lpm": Contender("rr+lpm", LpmParameters(cut_off=0)),
    "lpm 128": Contender("rr+lpm"),
    "vtc": Contender("vtc"),
}
"""For one worker, where only the order matters: LPM as the DLPM paper describes it, and with SGLang's cut-off."""

FIG1_RATE: Final = BACKLOG * 3 / (2 * ON_A10G["tree"] + ON_A10G["long tree"])
"""Trees per second of three clients, one with long questions: with equal clients, nothing would be unfair."""
FIG1_QUANTA: Final = (2_000, 5_000, 20_000, 50_000, 200_000)
FIG1_QUICK_QUANTA: Final = (2_000, 20_000, 200_000)
FIG1_SPAN: Final = Span(90.0, 30.0)

FIG8_RATE: Final = OVERLOAD * 2 / ON_A10G["chat"]
"""Conversations per second while two clients misbehave; 0.92 of what the two workers can serve after one has
reformed.
"""
FIG8_SPAN: Final = Span(60.0)
"""One client reforms after half of it."""
FIG8_CONTENDERS: Final = {name: CONTENDERS[name] for name in ("d2lpm", "dlpm_home", "rr+lpm", "vtc")}

FIG9_RATE: Final = OVERLOAD * 4 * 3 / (2 * ON_A10G["tree of 3"] + ON_A10G["long tree of 3"])
"""Trees per second of all three clients; figure 10 has the same."""
FIG9_TREES: Final = 8
"""Trees of each client; they arrive within 29 seconds."""
FIG9_SPAN: Final = Span(800.0)
"""Several times what the trees take without a cache; once all have ended, nothing more happens."""

FIG10_RATE: Final = OVERLOAD * 4 / ON_A10G["tree of 3"]
"""Trees per second if no client misbehaves."""
FIG10_QUANTA: Final = (2_000, 20_000, 200_000)
FIG10_SPAN: Final = Span(28.0, 8.0)

FIG11_RATE: Final = BACKLOG / ON_A10G["tree"]
"""Trees per second of all clients together, however many there are."""
FIG11_CLIENTS: Final = (5, 20, 50)
FIG11_SPAN: Final = Span(60.0, 20.0)

FIG12_CHAT_RATE: Final = 0.4 / ON_A10G["chat"]
"""Conversations per second of both clients: each asks for 0.2 of the worker, less than its share of a quarter ..."""
FIG12_TREE_RATE, FIG12_JUDGE_RATE = 0.55 / ON_A10G["tree"], 0.55 / ON_A10G["judge"]
"""... and the two with programs ask for more than twice their share each."""
FIG12_ARRIVING, FIG12_QUICK_ARRIVING = 60.0, 30.0
"""Seconds in which sessions arrive; what has arrived is then run to its end."""
FIG12_SPAN: Final = Span(600.0)
"""Several times that long."""

PATIENT: Final = SchedulerSettings(waiting=WaitingLimits(requests=100_000, time_to_live=1e9))
"""No call is rejected, however long the queue, as in the VTC and the Preble paper."""

# The Preble paper's.
A6000: Final = WorkerSpec(hardware="a6000-mistral-7b", dialect="sglang")
PREBLE_WORKERS: Final = 2
PREBLE_RATES: Final[Mapping[str, tuple[float, ...]]] = {
    "toolbench": (3.0, 9.0, 18.0),
    "embodied": (5.0, 6.0, 7.0),
    "programming": (2.5, 3.5, 4.5),
    "video": (3.0, 5.0, 7.0),
    "loogle": (0.3, 0.6, 1.2),
}
"""Calls per second on two A6000: the ends and the middle of the ranges of the paper's runs."""
CALLS_PER_TASK: Final = 48.0
"""Calls per task of an embodied agent: its sessions are that many times rarer."""
PREBLE_SPAN: Final = Span(100.0, 30.0)
PREBLE_POLICIES: Final[Mapping[str, Contender]] = {
    "rr+lpm": Contender("rr+lpm"),
    "preble": Contender("preble"),
    "d2lpm": Contender("d2lpm"),
    "dlpm_home": Contender("dlpm_home"),
}
"""The first is the paper's baseline: SGLang with its data-parallel round robin."""
ABLATION_WORKERS: Final = 4
ABLATION_RATE: Final = 36.0
"""The highest rate of ToolBench for as many workers; figure 5 states none."""
E2_ALONE: Final = PrebleParameters(decode_ratio=0.0, balance_ratio=0.0, copy_slowdown=0.0)
ABLATION: Final[Mapping[str, Contender]] = {
    "rr+lpm": Contender("rr+lpm"),
    "+ E2": Contender("preble+lpm", E2_ALONE),
    "+ rebalancing": Contender("preble+lpm", PrebleParameters(decode_ratio=0.0)),
    "+ prefill/decode": Contender("preble+lpm"),
    "+ priority groups": Contender("preble"),
}
"""Part by part, each with those before it, in the order of the paper's figure 5."""

# Our own, about what a queue in the proxy is good for.
SGLANG_A10G: Final = WorkerSpec(hardware="a10g-llama-7b", kv_tokens=10_000, dialect="sglang")
BACKLOGGED: Final = Misbehaving(
    heavy=SharedPrefix(
        client_count=1,
        concurrency=1280,
        groups=4,
        own=True,
        prefix=Lengths(256),
        question=Lengths(64),
        output=Lengths(128),
    ),
    light=SharedPrefix(
        client_count=1,
        concurrency=320,
        groups=4,
        own=True,
        prefix=Lengths(256),
        question=Lengths(64),
        output=Lengths(128),
    ),
)
"""Two clients that always wait, one with four times as many open calls.

Such a worker runs about 41 of them: 10,000 tokens less eight prefixes, over 64 + 128 tokens. So both clients wait in
every queue, behind every window below.
"""
WINDOW_REQUESTS: Final = (8, 16, 32, 64, 128, 256)
"""From too few for the engine to six times as many as it can run."""
WINDOW_QUICK_REQUESTS: Final = (16, 256)
UNLIMITED_TOKENS: Final = 10**9
FAIR_SPAN: Final = Span(150.0, 30.0)
UNMODIFIED_WORKERS: Final = 2


def at_rate(workload: Workload, sessions: float) -> Workload:
    """Return the workload with `sessions` per second of all clients. Raises ValueError if it cannot have a rate."""
    if not isinstance(workload, Rated):
        raise ValueError("a workload that has its own times has no rate")
    return workload.at_rate(sessions)


# Figure 4 of the DLPM paper: what one decision costs, measured.
FIG4_POLICIES: Final = ("d2lpm", "dlpm_home")
FIG4_WORKERS: Final = (1, 2, 4, 8, 16)
FIG4_WAITING: Final = (10, 100, 200, 1_000, 10_000)
FIG4_QUEUE, FIG4_FLEET, FIG4_BATCH = 200, 8, 25
"""The queue if the workers vary, the workers if the queue does, and each worker's batch: the figure's own."""
FIG4_CLIENTS: Final = 10
FIG4_CONTEXT: Final = 1024
"""Tokens of each call in the batch, for the decode step with which a decision is compared."""
FIG4_ROUNDS, FIG4_QUICK_ROUNDS, FIG4_TURNS = 9, 3, 300

# Where a public trace is given: figures 11 to 13 of the VTC paper on its own 27 clients, and figure 4 of the Preble
# paper, tools and videos with Azure's arrival times. Of what it mixes the one trace has only the conversations: here
# every fifth call of those is about a video, as in the mix of its workloads.
AZURE_WORKERS: Final = 4
AZURE_VIDEOS: Final = 5
