"""The Dockerfile, as far as this project's goes: instructions by stage."""

import json
import re
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]


class Instruction(NamedTuple):
    """One of them, its continued lines joined."""

    stage: int
    name: str
    rest: str

    @property
    def arguments(self) -> list[str]:
        """The arguments, in either form; flags left out."""
        if self.rest.startswith("["):
            listed: list[str] = json.loads(self.rest)
            return listed
        return [word for word in self.rest.split() if not word.startswith("--")]


def instructions() -> list[Instruction]:
    """All of the Dockerfile's; the first stage is 1."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text("utf-8"), flags=re.MULTILINE)
    lines = [line for line in re.sub(r"\s*\\\n\s*", " ", text).splitlines() if line]
    found: list[Instruction] = []
    stage = 0
    for line in lines:
        word, rest = line.split(maxsplit=1)
        stage += word == "FROM"
        found.append(Instruction(stage, word, rest))
    return found


def last_instruction(word: str) -> Instruction:
    """The one of the image that counts; ValueError without any."""
    final = instructions()[-1].stage
    return [one for one in instructions() if one.name == word and one.stage == final][-1]
