"""What the tests of the families of endpoints share: what a client was served, and what a call of it was predicted."""

from tests.support.running import RunningRouter


async def service(router: RunningRouter, client: str) -> tuple[int, int, int]:
    """Extend, cached and output tokens of a client."""
    served = (await router.fairness())["clients"][client]["service"]
    return served["extend"], served["cached"], served["output"]


async def total_service(router: RunningRouter) -> tuple[int, int]:
    """Input and output tokens of all clients together."""
    served = [entry["service"] for entry in (await router.fairness())["clients"].values()]
    return sum(each["extend"] + each["cached"] for each in served), sum(each["output"] for each in served)
