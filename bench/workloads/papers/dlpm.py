"""The workloads of the DLPM paper's evaluation (its tables 2 and 3).

What the paper does not state is chosen here and can be changed: the number of clients (three, as in figure 9), their
rates, the variation of its Gamma arrivals (`cv`), and how much more often the misbehaving client asks its long-context
questions (four times). A part's rate is that of all its clients together.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from bench.workloads.chat import Chat
from bench.workloads.combined import ChatAndPrograms, Misbehaving, Reforming
from bench.workloads.judge import Judge
from bench.workloads.parts.lengths import Lengths
from bench.workloads.parts.traffic import Workload
from bench.workloads.shared_prefix import SharedPrefix
from bench.workloads.tree_of_thoughts import TreeOfThoughts

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
"""Trees of thoughts (table 2: 546 and 256 tokens).

If all answers had 256 tokens, prompts would have 830 and not 546. So 256 is the max_tokens that clients ask for, and
answers have half of it. `output=256` makes all answers that long.
"""
JUDGE: Final = Judge(client_count=2, rate=0.8, arrivals="gamma")
"""Judgements of articles (table 2: 2701 and 256 tokens)."""
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

DLPM: Final[Mapping[str, Workload]] = {
    # Equal clients: figures 1, 10 and 11.
    "tot": TREES,
    "tot-3": replace(TREES, branches=3, rate=0.05),
    "tot-4": replace(TREES, branches=4, rate=0.02),
    "judge": JUDGE,
    "judge-16": replace(JUDGE, dimensions=16, rate=0.2),
    "qa": QA,
    "arena-chat": ARENA_CHAT,
    # Figure 7: one misbehaving client beside two others (table 3). S1 has more requests, S2 a longer prefix.
    "tot-s1": Misbehaving(heavy=replace(TREES, branches=4, client_count=1, rate=0.05), light=replace(TREES, rate=0.1)),
    "tot-s2": Misbehaving(
        heavy=replace(TREES, question_times=10.0, client_count=1, rate=0.1), light=replace(TREES, rate=0.2)
    ),
    "judge-s1": Misbehaving(
        heavy=replace(JUDGE, dimensions=16, client_count=1, rate=0.4), light=replace(JUDGE, rate=0.8)
    ),
    "judge-s2": Misbehaving(heavy=replace(JUDGE, extra=600, client_count=1, rate=0.4), light=replace(JUDGE, rate=0.8)),
    "qa-s1": Misbehaving(heavy=replace(QA, client_count=1, rate=1.6), light=QA),
    "qa-s2": Misbehaving(heavy=replace(QA, prefix_times=2.0, client_count=1, rate=0.4), light=QA),
    # Figure 9: all trees of three branches, one client with questions ten times as long.
    "tot-fig9": Misbehaving(
        heavy=replace(TREES, branches=3, question_times=10.0, client_count=1, rate=0.05),
        light=replace(TREES, branches=3, rate=0.1),
    ),
    # Figure 8: two clients call far more often than two others, and one of them later behaves like the others.
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
}
"""The workloads by name."""
