"""Which colour and mark each policy, client and way has, the same in all pictures.

The colours are Okabe and Ito's, which colour-blind readers tell apart; marks and lines tell them apart without colours.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

BLACK, GREY = "#000000", "#767676"
ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, RED, PURPLE, BROWN = "#0072B2", "#D55E00", "#CC79A7", "#7A4B00"
PALETTE: Final = (BLUE, GREEN, ORANGE, RED, PURPLE, SKY, BLACK, BROWN, GREY)
"""Yellow is left out: it is too pale for a line on white. Brown and grey are ours, told apart by how dark they are."""
MARKS: Final = ("o", "s", "^", "v", "P", "D", "X", "<", "*")
LINES: Final = ("-", "--", "-.")


class Look(NamedTuple):
    """How one line of a picture looks."""

    colour: str
    mark: str
    line: str = "-"


POLICIES: Final[Mapping[str, Look]] = {
    "d2lpm printed": Look(SKY, "D", "--"),
    "d2lpm": Look(BLUE, "o"),
    "dlpm": Look(BLUE, "o"),
    "dlpm_home": Look(GREEN, "s"),
    "dlpm_home plain": Look(BLUE, "D", "--"),
    "dlpm_balance": Look(BLUE, "o"),
    "lpm": Look(ORANGE, "^"),
    "lpm 128": Look(BROWN, "<", "--"),
    "rr+lpm": Look(ORANGE, "^"),
    "preble": Look(RED, "v"),
    "vtc": Look(PURPLE, "P"),
    "vtc_predict": Look(SKY, "D"),
    "vtc_oracle": Look(BLUE, "o"),
    "vtc_oracle ±50%": Look(GREEN, "s"),
    "lcf": Look(ORANGE, "^"),
    "fcfs": Look(BLACK, "X"),
    "pooled_fcfs": Look(BLACK, "X"),
    "rpm 5": Look(GREY, "v"),
    "rpm 20": Look(GREY, "<"),
    "rpm 30": Look(GREY, "*"),
    "cache_aware": Look(RED, "v"),
    "sglang-router": Look(RED, "v"),
    "workers in turn": Look(BLACK, "X"),
    "least_requests": Look(GREY, "X"),
    "br0": Look(ORANGE, "^"),
    "brh": Look(PURPLE, "P"),
    "ThunderAgent": Look(ORANGE, "^"),
    "gate": Look(BLUE, "o"),
    "uncontended": Look(BLACK, "X", ":"),
}
"""The policies in the order of the legends. Two that never share a picture may share a look."""
CLIENTS: Final[Mapping[str, Look]] = {
    "heavy": Look(RED, "", "-"),
    "reformed": Look(BLUE, "", "--"),
    "trees": Look(RED, "", "-"),
    "judge": Look(BLUE, "", "--"),
    "light-1": Look(GREEN, "", "-."),
    "light-2": Look(BLACK, "", ":"),
    "chat-1": Look(GREEN, "", "-."),
    "chat-2": Look(BLACK, "", ":"),
}
"""The clients of pictures over time, in the order of the legends."""


def policy_look(name: str) -> Look:
    """Return the look of a policy; a variant, as `br0 beta 48`, has that of its policy, and any other one is grey."""
    known = POLICIES.get(name) or POLICIES.get(name.split(" ", maxsplit=1)[0])
    return known or Look(GREY, "*", ":")


def looks(names: Sequence[str]) -> Mapping[str, Look]:
    """Return looks for names that are no policies, in their order; after nine they begin again."""
    return {
        name: Look(PALETTE[at % len(PALETTE)], MARKS[at % len(MARKS)], LINES[at % len(LINES)])
        for at, name in enumerate(names)
    }
