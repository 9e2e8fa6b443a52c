"""The part of Prometheus' text format that the emulated engines need. PURE."""


class Exposition:
    """Collects samples under one name prefix and one set of base labels."""

    def __init__(self, prefix: str, **labels: str) -> None:
        self._prefix = prefix
        self._labels = labels
        self._lines: list[str] = []
        self._typed: set[str] = set()

    def gauge(self, name: str, value: float, **labels: str) -> None:
        self._sample(name, "gauge", value, labels)

    def counter(self, name: str, value: float, **labels: str) -> None:
        """Add a sample of a counter; `name` ends in _total, as scrapers see it."""
        self._sample(name, "counter", value, labels)

    def text(self) -> bytes:
        return "".join(f"{line}\n" for line in self._lines).encode()

    def _sample(self, name: str, kind: str, value: float, labels: dict[str, str]) -> None:
        full = self._prefix + name
        if full not in self._typed:
            self._typed.add(full)
            self._lines.append(f"# TYPE {full} {kind}")
        pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in (self._labels | labels).items())
        self._lines.append(f"{full}{{{pairs}}} {float(value)}")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
