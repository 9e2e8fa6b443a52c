"""The data sets of the Preble paper, as described in its table 1 and appendix A."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from bench.workloads.combined import ToolsAndVideos
from bench.workloads.embodied import Embodied
from bench.workloads.parts.lengths import Lengths
from bench.workloads.parts.traffic import Workload
from bench.workloads.shared_prefix import SharedPrefix

TOOLBENCH: Final = SharedPrefix(
    rate=6.0,
    groups=200,
    system=165,
    prefix=Lengths(1395, 732, most=4096),
    question=Lengths(275, 120, most=1024),
    output=Lengths(43, 16, most=256),
)
"""Tool instructions (Preble, appendix A.1): 85 % of a prompt are shared, 76 % with prompts of the same tool."""
PROGRAMMING: Final = SharedPrefix(
    rate=2.5,
    groups=160,
    system=2400,
    prefix=Lengths(1355, 1656, most=12_000),
    question=Lengths(116, 30, most=400),
    output=Lengths(190, 343, most=4096),
)
"""Programs for competition problems (Preble, appendix A.3): demonstrations shared by all, problems that are tried
often.
"""
VIDEO: Final = SharedPrefix(
    rate=3.0,
    groups=150,
    system=20,
    prefix=Lengths(9770, 5976, most=32_500),
    question=Lengths(75, 15, most=200),
    output=Lengths(4, 1.5, most=16),
    alone=0.11,
)
"""Questions about videos (Preble, appendix A.4): a video is 99 % of its prompt; some videos have a single question."""
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
"""Long documents (Preble, appendix A.5): 91 % of a prompt are shared; some documents have a single question."""
EMBODIED: Final = Embodied(rate=0.13)

PREBLE: Final[Mapping[str, Workload]] = {
    "toolbench": TOOLBENCH,
    "toolbench-zipf": replace(TOOLBENCH, groups=320, popularity=1.1),
    "embodied": EMBODIED,
    "programming": PROGRAMMING,
    "video": VIDEO,
    "loogle": LOOGLE,
    # The paper's mixed load (figure 4). The paper gives it Azure's arrival times: set `times` of both parts.
    "tools-and-videos": ToolsAndVideos(tools=replace(TOOLBENCH, rate=4.0), videos=replace(VIDEO, rate=1.0)),
}
"""The workloads by name. Groups are those of the paper's runs; the skewed ToolBench is that of its ablation (figure
5).
"""
