"""The conditions of the VTC paper's experiments, fixed like those of `conditions`."""

from collections.abc import Mapping
from typing import Final

from bench.lab.frame.conditions import Contender
from bench.sim.scenario import WorkerSpec
from bench.workloads.papers.vtc import Suite, steady
from router.core.policies.simple.simple_parameters import RpmParameters
from router.core.policies.vtc.vtc_parameters import OracleParameters

A10G: Final = WorkerSpec(hardware="a10g-llama-7b", kv_tokens=10_000)
"""As in the paper's sections 5.2 and 5.3: Llama 2 7B, and a pool of 10,000 tokens. By the profile of its artifact it
ends 1.6 calls per second of 256 tokens in and out, so all suites that the paper calls overloads are overloads.
"""
VTC_SECONDS, VTC_LONG_SECONDS, VTC_SHIFT_SECONDS = 300.0, 600.0, 900.0
"""Half of the paper's ten minutes; all of them for the 27 clients; the three phases of figure 10 take fifteen."""
VTC_WARMUP: Final = 30.0
VTC_POLICIES: Final[Mapping[str, Contender]] = {
    "fcfs": Contender("pooled_fcfs"),
    "lcf": Contender("lcf"),
    "vtc": Contender("vtc"),
}
"""For every suite."""
VTC_FORESEEING: Final[Mapping[str, Contender]] = {
    "vtc_predict": Contender("vtc_predict"),
    "vtc_oracle ±50%": Contender("vtc_oracle", OracleParameters(error=0.5)),
    "vtc_oracle": Contender("vtc_oracle"),
}
"""For the suites for which the artifact has figures of them: two clients, eight and 27."""
VTC_LIMITS: Final[Mapping[str, Contender]] = {
    f"rpm {limit}": Contender("rpm", RpmParameters(limit)) for limit in (5, 20, 30)
}
"""For the 27 clients, as in the paper's figures 12 and 13."""
A100_13B: Final = WorkerSpec(hardware="a100-mistral-7b", speed=0.56)
"""Llama 2 13B on an A100, as in the paper's figure 14: 26 GB of weights instead of 14.5. The KV of a token is six times
as large as this hardware's, so steps are shorter here than there; the pools are those of the paper.
"""
POOLS: Final[Mapping[str, tuple[int, Suite]]] = {
    "35,000 256+256": (35_000, Suite(steady(6.0, 12.0))),
    "65,000 256+256": (65_000, Suite(steady(6.0, 12.0))),
    "35,000 512+512": (35_000, Suite(steady(3.0, 6.0, input=512, output=512))),
    "35,000 768+768": (35_000, Suite(steady(2.0, 4.0, input=768, output=768))),
}
"""The pools of figure 14. The paper states no rates. A pool of 35,000 tokens runs 68 calls of 256 + 256 at a time and
one of 65,000 127, in steps of about 26 and 31 ms: 8 and 11 calls per second. Each client asks for more than half of
that.
"""
POOL_SECONDS: Final = 200.0
