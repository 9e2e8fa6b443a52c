"""The part of Prometheus' text format that the emulated engines need. PURE."""


class Exposition:
    """Collects samples under one name prefix and one set of base labels."""

    def __init__(self, prefix: str, **labels: str) -> None:
        self._prefix = prefix
        self._labels = labels
        self._families: dict[str, list[str]] = {}
        """The lines of each metric, its type first: all its samples stand together, whoever adds them."""

    def gauge(self, name: str, value: float, **labels: str) -> None:
        self._sample(name, "gauge", value, labels)

    def counter(self, name: str, value: float, **labels: str) -> None:
        """Add a sample of a counter; `name` ends in _total, as scrapers see it."""
        self._sample(name, "counter", value, labels)

    def labelled(self, **labels: str) -> "Exposition":
        """Return this exposition with more base labels for what is added through it."""
        other = Exposition(self._prefix, **self._labels, **labels)
        other._families = self._families
        return other

    def text(self) -> bytes:
        return "".join(f"{line}\n" for lines in self._families.values() for line in lines).encode()

    def _sample(self, name: str, kind: str, value: float, labels: dict[str, str]) -> None:
        full = self._prefix + name
        lines = self._families.setdefault(full, [f"# TYPE {full} {kind}"])
        pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in (self._labels | labels).items())
        lines.append(f"{full}{{{pairs}}} {float(value)}")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
