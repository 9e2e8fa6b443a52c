"""The chart's tests need helm, kubectl and kubernetes-validate: `make test-chart`."""

import pytest

from .environment import program, validator


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of the long run."""
    parser.addoption("--all", action="store_true", help="render every combination of values, not every pair of them")


@pytest.fixture(scope="session", autouse=True)
def programs() -> None:
    """Stop the session if a tool is missing, rather than skip tests."""
    if program("helm") is None or program("kubectl") is None or validator() is None:
        pytest.exit("helm, kubectl or kubernetes-validate is missing; `make test-chart` gets them", returncode=1)
