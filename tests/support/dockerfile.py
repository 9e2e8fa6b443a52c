"""Parses the Dockerfile into its instructions by stage, as far as this project needs it."""

import json
import re
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]


class Instruction(NamedTuple):
    """One instruction, with continued lines joined."""

    stage: int
    name: str
    rest: str

    @property
    def arguments(self) -> list[str]:
        """The arguments without flags, from the shell form or the JSON form."""
        if self.rest.startswith("["):
            listed: list[str] = json.loads(self.rest)
            return listed
        return [word for word in self.rest.split() if not word.startswith("--")]


def instructions() -> list[Instruction]:
    """All instructions of the Dockerfile. The first stage is 1."""
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
    """The last instruction of this name in the final stage. Raises IndexError if there is none."""
    final = instructions()[-1].stage
    return [one for one in instructions() if one.name == word and one.stage == final][-1]
