"""One answer while it is being generated: what has been generated, and which part has not been sent yet. PURE."""

from typing import Final

from workers.engine.model import NO_TOKEN, FinishReason, Output
from workers.engine.tokenizer import EOS, VOCABULARY, decode

ANSWER_TEXT: Final = {EOS: "", **{token: decode([token]) for token in VOCABULARY}}


class Choice:
    """Answer number `index` of a call. Token counts cover all of it, `text` and `token_ids` only the unsent part."""

    __slots__ = (
        *("cached_tokens", "completion_tokens", "finish", "index", "prompt", "pulled", "sent", "token_ids", "transfer"),
    )

    def __init__(self, index: int, prompt: list[int]) -> None:
        self.index = index
        self.prompt = prompt
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.finish: FinishReason | None = None
        self.token_ids: list[int] = []
        self.sent = False
        self.transfer: object = None
        """What a prefill engine says about the KV that it holds, as vLLM's `kv_transfer_params`."""
        self.pulled = False
        """True if the KV of the prompt came from a prefill engine."""

    def add(self, output: Output) -> None:
        self.finish = output.finish
        self.cached_tokens = output.cached_tokens
        if output.token != NO_TOKEN:
            self.completion_tokens += 1
            self.token_ids.append(output.token)

    def should_send(self, interval: int) -> bool:
        """True if a chunk must be sent now: for the first token, the last one, and every `interval` tokens between."""
        return not self.sent or self.finish is not None or len(self.token_ids) >= interval

    @property
    def text(self) -> str:
        return "".join([ANSWER_TEXT[token] for token in self.token_ids])

    def mark_sent(self) -> None:
        self.sent = True
        self.token_ids = []
