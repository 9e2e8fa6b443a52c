"""The table of workloads: each is a small frozen set of parameters that makes up seeded clients.

A new one is a file, and a line here for each set of parameters that deserves a name.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from bench.lengths import Lengths
from bench.traffic import Workload
from bench.workloads.chat import Chat
from bench.workloads.combined import ChatAndPrograms, Misbehaving, Reforming, ToolsAndVideos
from bench.workloads.documents import SharedDocuments
from bench.workloads.embodied import Embodied
from bench.workloads.heavy_light import HeavyAndLight
from bench.workloads.judge import Judge
from bench.workloads.shared_prefix import SharedPrefix
from bench.workloads.tree_of_thoughts import TreeOfThoughts
from bench.workloads.unrelated import Unrelated
from bench.workloads.vtc import VTC_SUITES

TOOLBENCH: Final = SharedPrefix(
    rate=6.0,
    groups=200,
    system=165,
    prefix=Lengths(1395, 732, most=4096),
    question=Lengths(275, 120, most=1024),
    output=Lengths(43, 16, most=256),
)
"""Tools' instructions (Preble, appendix A.1): 85 % of a prompt are shared, 76 % with those of the same tool."""
LOOGLE: Final = SharedPrefix(
    rate=0.6,
    groups=24,
    system=13,
    prefix=Lengths(23_360, 6105, most=32_500),
    question=Lengths(100, 40, most=240),
    output=Lengths(16, 9.9, most=45),
    limit=45,
    alone=0.086,
)
"""Long documents (Preble, appendix A.5): 91 % of a prompt are shared; nobody else asks of some documents."""
VIDEO: Final = SharedPrefix(
    rate=3.0,
    groups=150,
    system=20,
    prefix=Lengths(9770, 5976, most=32_500),
    question=Lengths(75, 15, most=200),
    output=Lengths(4, 1.5, most=16),
    alone=0.11,
)
"""Questions about videos (Preble, appendix A.4): a video is 99 % of its prompt; nobody else asks of some."""
PROGRAMMING: Final = SharedPrefix(
    rate=2.5,
    groups=160,
    system=2400,
    prefix=Lengths(1355, 1656, most=12_000),
    question=Lengths(116, 30, most=400),
    output=Lengths(190, 343, most=4096),
)
"""Programs for competition problems (Preble, appendix A.3): demonstrations for all, a problem that is tried often."""
QA: Final = SharedPrefix(
    client_count=2,
    rate=0.8,
    arrivals="gamma",
    groups=12,
    own=True,
    system=13,
    prefix=Lengths(21_336, 5500, most=32_500),
    question=Lengths(100, 40, most=240),
    output=Lengths(15, 9.9, most=45),
    limit=45,
)
"""Long-context QA of the DLPM paper (table 2): 21 449 and 15 tokens; clients share nothing with each other (9)."""
TREES: Final = TreeOfThoughts(client_count=2, rate=0.2, arrivals="gamma")
JUDGE: Final = Judge(client_count=2, rate=0.8, arrivals="gamma")
ARENA_CHAT: Final = Chat(
    client_count=2,
    rate=1.0,
    systems=1,
    system=0,
    turns=Lengths(1.18, 0.6, most=10),
    question=Lengths(56, 80, most=2048),
    output=Lengths(142, 140, most=1024),
)
"""Chatbot Arena (DLPM paper, table 2): 56 tokens, 142 in an answer, and few conversations of more than one turn."""

WORKLOADS: Final[Mapping[str, Workload]] = MappingProxyType(
    {
        "documents": SharedDocuments(rate=60.0),
        "prefix-1": SharedDocuments(documents=1, tokens=6000, rate=40.0),
        "prefix-4": SharedDocuments(documents=4, tokens=6000, rate=40.0),
        "prefix-40": SharedDocuments(documents=40, tokens=6000, rate=40.0),
        "prefix-400": SharedDocuments(documents=400, tokens=6000, rate=40.0),
        "chat": Chat(rate=2.0),
        "short": Unrelated(input=50, output=8, concurrency=64),
        "slot-bound": Unrelated(input=100, output=300, concurrency=32),
        "kv-bound": Unrelated(input=2000, output=600, concurrency=64),
        "long-prefill": Unrelated(input=8000, output=16, concurrency=4),
        "many-clients": Unrelated(client_count=500, input=300, output=100, rate=40.0),
        "heavy-light": HeavyAndLight(),
        # Preble's five (its table 1), and the one of its ablation.
        "toolbench": TOOLBENCH,
        "toolbench-zipf": replace(TOOLBENCH, groups=320, popularity=1.1),
        "embodied": Embodied(rate=0.13),
        "programming": PROGRAMMING,
        "video": VIDEO,
        "loogle": LOOGLE,
        # Its mixed load, which it gives Azure's arrival times (figure 4): `times` of both parts.
        "tools-and-videos": ToolsAndVideos(tools=replace(TOOLBENCH, rate=4.0), videos=replace(VIDEO, rate=1.0)),
        "generated-shared-prefix": SharedPrefix(rate=8.0),
        # The DLPM paper's (table 2), all clients alike: figures 1, 10 and 11.
        "tot": TREES,
        "tot-3": replace(TREES, branches=3, rate=0.05),
        "tot-4": replace(TREES, branches=4, rate=0.02),
        "judge": JUDGE,
        "judge-16": replace(JUDGE, dimensions=16, rate=0.2),
        "qa": QA,
        "arena-chat": ARENA_CHAT,
        # Figure 7: one misbehaving client beside two others (table 3). S1 has more requests, S2 a longer prefix.
        "tot-s1": Misbehaving(
            heavy=replace(TREES, branches=4, client_count=1, rate=0.05), light=replace(TREES, rate=0.1)
        ),
        "tot-s2": Misbehaving(
            heavy=replace(TREES, question_times=10.0, client_count=1, rate=0.1), light=replace(TREES, rate=0.2)
        ),
        "judge-s1": Misbehaving(
            heavy=replace(JUDGE, dimensions=16, client_count=1, rate=0.4), light=replace(JUDGE, rate=0.8)
        ),
        "judge-s2": Misbehaving(
            heavy=replace(JUDGE, extra=600, client_count=1, rate=0.4), light=replace(JUDGE, rate=0.8)
        ),
        "qa-s1": Misbehaving(heavy=replace(QA, client_count=1, rate=1.6), light=QA),
        "qa-s2": Misbehaving(heavy=replace(QA, prefix_times=2.0, client_count=1, rate=0.4), light=QA),
        # Figure 9: all trees of three branches, one client with questions ten times as long.
        "tot-fig9": Misbehaving(
            heavy=replace(TREES, branches=3, question_times=10.0, client_count=1, rate=0.05),
            light=replace(TREES, branches=3, rate=0.1),
        ),
        # Figure 8: two clients call far more often than two others, and one of them comes to reason.
        "arena-fig8": Reforming(
            light=replace(ARENA_CHAT, rate=1.0),
            heavy=replace(ARENA_CHAT, client_count=1, rate=4.0),
            reformed=replace(ARENA_CHAT, client_count=1, rate=4.0, changes=300.0, change=0.125),
        ),
        # Figure 12: two clients converse, two run programs.
        "mix": ChatAndPrograms(
            chat=ARENA_CHAT,
            trees=replace(TREES, client_count=1, rate=0.05),
            judge=replace(JUDGE, client_count=1, rate=0.2),
        ),
        **VTC_SUITES,
    }
)
"""Every workload by its name, with the parameters that the command line may change."""
