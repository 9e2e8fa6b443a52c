"""The table of workloads: each is a small frozen set of parameters that generates seeded clients.

A new family is a file, and a line here for each set of parameters with a name. The workloads of the papers are in
`papers/`, those of crowds and floods in `crowds.py`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from bench.workloads.chat import Chat
from bench.workloads.crowds import CROWDS
from bench.workloads.documents import OwnDocuments, SharedDocuments
from bench.workloads.heavy_light import HeavyAndLight
from bench.workloads.liars import Liars
from bench.workloads.papers.balance import BALANCE
from bench.workloads.papers.dlpm import DLPM
from bench.workloads.papers.preble import PREBLE
from bench.workloads.papers.servegen import SERVEGEN_MID
from bench.workloads.papers.vtc import VTC_SUITES
from bench.workloads.parts.traffic import Workload
from bench.workloads.shared_prefix import SharedPrefix
from bench.workloads.unrelated import Unrelated

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
        "own-documents": OwnDocuments(),
        "liars": Liars(),
        "generated-shared-prefix": SharedPrefix(rate=8.0),
        "servegen-mid": SERVEGEN_MID,
        **CROWDS,
        **PREBLE,
        **DLPM,
        **VTC_SUITES,
        **BALANCE,
    }
)
"""Every workload by name, with the parameters that the command line can change."""
