"""Reads the service that clients received from /fairness, for tests of endpoints."""

from tests.support.running import RunningRouter


async def service(router: RunningRouter, client: str) -> tuple[int, int, int]:
    """Extend, cached and output tokens that a client was served, once all calls have ended."""
    await router.until_all_ended()
    served = (await router.fairness())["clients"][client]["service"]
    return served["extend"], served["cached"], served["output"]


async def total_service(router: RunningRouter) -> tuple[int, int]:
    """Input and output tokens that all clients together were served, once all calls have ended."""
    await router.until_all_ended()
    served = [entry["service"] for entry in (await router.fairness())["clients"].values()]
    return sum(each["extend"] + each["cached"] for each in served), sum(each["output"] for each in served)
