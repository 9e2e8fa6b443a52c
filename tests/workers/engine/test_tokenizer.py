"""The tokenizer: it is reversible, and stable where answers come back as prompts."""

import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from workers.engine.sampling import initial_state, next_token
from workers.engine.tokenizer import EOS, VOCABULARY, decode, encode, render_chat

texts = st.text(st.characters(codec="utf-8"))
answers = st.lists(st.sampled_from(VOCABULARY))
prompts = st.builds("".join, st.lists(st.one_of(texts, st.sampled_from(["<|im|>", "<|end|>", "<|", " ", "word"]))))


@given(texts)
def test_decode_gives_the_text_back(text: str) -> None:
    """No text is lost or changed, whatever its script."""
    assert decode(encode(text)) == text


@given(prompts, answers)
def test_an_answer_tokenises_to_itself_behind_any_prompt(prompt: str, answer: list[int]) -> None:
    """Prompt and answer as one text have the ids of the prompt, followed by those of the answer."""
    assert encode(prompt + decode(answer)) == encode(prompt) + answer


@given(texts, answers, texts)
def test_the_next_turn_begins_with_this_turn_and_its_answer(question: str, answer: list[int], more: str) -> None:
    """A chat that sends an answer back starts with the ids that the engine has computed, the end marker included."""
    first = [{"role": "user", "content": question}]
    turn = [*first, {"role": "assistant", "content": decode(answer)}, {"role": "user", "content": more}]
    seen = [*encode(render_chat(first)), *answer, EOS]
    assert encode(render_chat(turn))[: len(seen)] == seen


def test_english_takes_little_more_than_one_token_per_word() -> None:
    """The counts are of the order that a real tokenizer gives."""
    text = "The worker keeps the prefix of every conversation in its cache until memory runs out."
    assert 15 <= len(encode(text)) <= 24


def test_ids_are_the_same_in_another_process() -> None:
    """No id and no answer depends on the process's hash seed."""
    program = (
        "import workers.engine.sampling as s, workers.engine.tokenizer as t; "
        "print(t.encode('a b'), s.initial_state(1, [2], 3))"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1


@given(st.integers(0, (1 << 57) - 1))
@example(0)
@example(1)
def test_every_id_decodes_to_something(token: int) -> None:
    """An id without text decodes to the replacement character, and every other id to its text."""
    text = decode([token])
    assert text == "\ufffd" or int.from_bytes(b"\x01" + text.encode(), "big") == token or "\ufffd" in text


def test_messages_render_parts_tools_and_calls() -> None:
    """Everything in a message is part of the prompt, so that it counts and can hit the cache."""
    messages: list[dict[str, object]] = [
        {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": "x.png"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1"}]},
    ]
    text = render_chat(messages, [{"name": "search"}])
    for expected in ("look", "x.png", '"c1"', '"search"'):
        assert expected in text
    assert text.endswith("<|im|>assistant\n")


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_answers_have_non_ascii_text_and_end_only_where_allowed(ignore_eos: bool) -> None:
    """A long answer contains every word; the end marker appears at about one token in 256, or never."""
    state, tokens = initial_state(0, [1, 2, 3], 0), []
    for _ in range(20_000):
        token, state = next_token(state, ignore_eos)
        tokens.append(token)
    assert set(VOCABULARY) <= set(tokens)
    assert not decode(tokens).isascii()
    assert (tokens.count(EOS) == 0) if ignore_eos else (40 < tokens.count(EOS) < 120)
