"""Which of the fields that the router adds a worker is assumed to accept."""

import pytest

from router.api.body.call import COMPLETIONS
from router.api.body.edits import ALL_FIELDS, NO_FIELDS, Addition
from router.api.endpoints.chat import PATH as CHAT
from router.upstream.accepted_fields import ACCEPTED_SINCE, AcceptedFields, parse_version, unsalted_paths


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.32.0", (0, 32, 0)),
        ("v0.5.9.post1", (0, 5, 9)),
        ("0.10.2rc1", (0, 10, 2)),
        ("0.10.2+cpu", (0, 10, 2)),
        ("0.1.dev1+g1234567", None),
        ("0.0.0", None),
        ("main", None),
        (None, None),
    ],
)
def test_a_version_is_that_of_a_release(text: str | None, version: tuple[int, ...] | None) -> None:
    """The version numbers of a build between releases are ignored, since they do not show what it contains."""
    assert parse_version(text) == version


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("engine", ACCEPTED_SINCE)
def test_a_field_is_accepted_from_its_version_on(engine: str, path: str) -> None:
    """A field is not accepted by any version before that."""
    for field, since in ACCEPTED_SINCE[engine][path].items():
        if since:
            assert field in AcceptedFields(engine, ".".join(map(str, since)))[path]
            assert field not in AcceptedFields(engine, ".".join(map(str, just_before(since))))[path]


def just_before(version: tuple[int, ...]) -> tuple[int, ...]:
    *first, last = version
    return (*first, last - 1) if last else (*just_before(tuple(first)), 99)


def test_no_streamed_chat_at_sglang_is_asked_for_token_ids() -> None:
    """SGLang's newest version still refuses the field in a streamed chat and accepts it in a completion."""
    newest = AcceptedFields("sglang", None)
    assert newest[CHAT] == ALL_FIELDS - {Addition.TOKEN_IDS}
    assert newest[COMPLETIONS] == ALL_FIELDS
    assert newest.missing == {CHAT: {Addition.TOKEN_IDS}}


def test_an_unknown_engine_is_sent_what_openai_documents() -> None:
    """No field is added on other paths, nor for a worker whose engine is unknown."""
    assert AcceptedFields("generic")[CHAT] == {Addition.USAGE}
    assert AcceptedFields("vllm", "0.32.0")["/v1/responses"] == NO_FIELDS
    assert AcceptedFields()[CHAT] == NO_FIELDS
    assert AcceptedFields().missing == {}


def test_a_refusal_is_remembered_for_its_path_and_version() -> None:
    """A refusal is forgotten once the worker comes back with another version or with none."""
    fields = AcceptedFields("vllm", "0.32.0")
    fields.refuse(CHAT, frozenset({Addition.CHUNK_USAGE}))
    assert Addition.CHUNK_USAGE not in fields[CHAT]
    assert Addition.CHUNK_USAGE in fields[COMPLETIONS]
    assert fields.refused == fields.missing == {CHAT: {Addition.CHUNK_USAGE}}
    fields.set_engine("vllm", "0.32.0")
    assert Addition.CHUNK_USAGE not in fields[CHAT]
    for version in ("0.33.0", None, None):
        fields.set_engine("vllm", version)
        assert fields[CHAT] == ALL_FIELDS
        assert not fields.refused
        fields.refuse(CHAT, frozenset({Addition.CHUNK_USAGE}))


def test_paths_on_which_an_engine_shares_prefixes() -> None:
    """Prefixes are shared on paths without a salt, on all paths of a version too old for it, and at unknown engines."""
    assert unsalted_paths("vllm", "0.32.0") == []
    assert unsalted_paths("vllm", "0.9.2") == [COMPLETIONS, "/v1/responses", "/v1/messages"]
    assert unsalted_paths("sglang", None) == ["/v1/messages"]
    assert unsalted_paths("generic", None) == [CHAT, COMPLETIONS, "/v1/responses", "/v1/messages"]
