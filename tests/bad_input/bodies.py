"""Bad inputs in the body of a call."""

import gzip
from typing import Final

from tests.bad_input.inputs import (
    COMPLETIONS,
    GOOD,
    HELLO,
    BadInput,
    Reply,
    chat,
    chunks,
    forwarded,
    invalid_json,
    not_an_object,
    post,
    text,
    wrong_type,
    wrong_value,
)

EMPTY: Final = Reply(400, "invalid_json", None, "The body is empty; it must be a JSON object.")
OTHER_TYPE: Final = Reply(400, "unsupported_content_type", None, "The content-type must be application/json.")
NO_VALUE: Final = "valid JSON: unexpected character, expected a JSON value"
DEEP: Final = b"[" * 900 + b"]" * 900

JSON: Final = (
    BadInput("an empty body", post(b""), EMPTY),
    BadInput("neither a length nor chunks", chunks(b"", b"x: y"), EMPTY),
    invalid_json("a truncated body", GOOD[:-1], "valid JSON: unexpected end of data: line 1 column 66 (char 65)"),
    invalid_json(
        "text after the body", GOOD + b"x", "valid JSON: unexpected content after document: line 1 column 67 (char 66)"
    ),
    not_an_object("a list", b"[]"),
    not_an_object("null", b"null"),
    not_an_object("a string", b'"Hello"'),
    not_an_object("a number", b"1"),
    invalid_json("a form", b"model=m&prompt=Hello", f"{NO_VALUE}: line 1 column 1 (char 0)"),
    invalid_json("100 NULs", bytes(100), f"{NO_VALUE}: line 1 column 1 (char 0)"),
    BadInput("`content-type: text/plain`", post(GOOD, b"content-type: text/plain"), OTHER_TYPE),
    BadInput("no content-type", post(GOOD, b"content-type:"), OTHER_TYPE),
    BadInput(
        "`content-encoding: gzip`",
        post(gzip.compress(GOOD, mtime=0), b"content-encoding: gzip"),
        Reply(415, "unsupported_encoding", None, "The body must be sent without a content-encoding."),
    ),
    invalid_json("gzip without content-encoding", gzip.compress(GOOD, mtime=0), "UTF-8: invalid start byte at byte 1"),
    invalid_json("UTF-16", GOOD.decode().encode("utf-16"), "UTF-8: invalid start byte at byte 0"),
    invalid_json("Latin-1", '{"model":"é"}'.encode("latin-1"), "UTF-8: invalid continuation byte at byte 10"),
    invalid_json("an overlong character", b'{"model":"\xc0\xaf"}', "UTF-8: invalid start byte at byte 10"),
    BadInput("a byte order mark", post(b"\xef\xbb\xbf" + GOOD), forwarded()),
    invalid_json(
        "a byte order mark alone",
        b"\xef\xbb\xbf",
        "valid JSON: UTF-8 byte order mark (BOM) is not supported: line 1 column 1 (char 0)",
    ),
    invalid_json("NaN", b'{"model":"m","top_p":NaN}', f"{NO_VALUE}: line 1 column 22 (char 21)"),
    invalid_json(
        "-Infinity", b'{"model":"m","top_p":-Infinity}', "valid JSON: no digit after sign: line 1 column 23 (char 22)"
    ),
    invalid_json(
        "1e999",
        b'{"model":"m","top_p":1e999}',
        "valid JSON: number is infinity when parsed as double: line 1 column 22 (char 21)",
    ),
    invalid_json(
        "half a surrogate pair",
        b'{"model":"m","user":"\\ud800"}',
        "valid JSON: no low surrogate in string: line 1 column 22 (char 21)",
    ),
    invalid_json(
        "a line end in a string",
        b'{"model":"a\nb"}',
        "valid JSON: unexpected control character in string: line 1 column 12 (char 11)",
    ),
    invalid_json(
        "single quotes",
        b"{'model':'m'}",
        "valid JSON: unexpected character, expected a string key: line 1 column 2 (char 1)",
    ),
    invalid_json(
        "a trailing comma", GOOD[:-1] + b",}", "valid JSON: trailing comma is not allowed: line 1 column 66 (char 65)"
    ),
    invalid_json(
        "100,000 brackets", b"[" * 100_000, "valid JSON: depth limit exceeded: line 1 column 1026 (char 1025)"
    ),
    wrong_value(
        "`messages` of 900 levels",
        post(b'{"model":"m","messages":[{"role":"user","content":%b}]}' % DEEP),
        "messages",
        "is nested too deeply",
    ),
    wrong_value("`tools` of 900 levels", post(GOOD[:-1] + b',"tools":%b}' % DEEP), "tools", "is nested too deeply"),
    BadInput(
        "two models, of which the last counts",
        post(GOOD[:-1] + b',"model":"other"}'),
        Reply(404, "model_not_found", "model", "The model `other` does not exist."),
    ),
)
PROMPT: Final = "a string, a list of strings, a list of token ids or a list of lists of token ids"

MEMBERS: Final = (
    BadInput("no `model`", chat(model=None), forwarded()),
    wrong_type("`model` 7", chat(model=7), "model", "a string"),
    wrong_type("`model` in a list", chat(model=["m"]), "model", "a string"),
    BadInput("an empty `model`", chat(model=""), forwarded()),
    BadInput(
        "a model that no worker serves",
        chat(model="other"),
        Reply(404, "model_not_found", "model", "The model `other` does not exist."),
    ),
    BadInput(
        "a model of 256 letters, of which the reply has 200",
        chat(model="x" * 256),
        Reply(404, "model_not_found", "model", f"The model `{'x' * 200}` does not exist."),
    ),
    BadInput(
        "a model of 257 letters",
        chat(model="x" * 257),
        Reply(400, "string_above_max_length", "model", "`model` is longer than 256 bytes."),
    ),
    BadInput(
        "a `user` of 257 letters",
        chat(user="x" * 257),
        Reply(400, "string_above_max_length", "user", "`user` is longer than 256 bytes."),
    ),
    BadInput("no `messages`", chat(messages=None), forwarded()),
    BadInput("`prompt` in place of `messages`", post(b'{"model":"m","prompt":"x"}'), forwarded()),
    wrong_type("`messages` as a string", chat(messages="Hello"), "messages", "a list"),
    wrong_type("`messages` as one message", chat(messages=HELLO[0]), "messages", "a list"),
    BadInput("empty `messages`", chat(messages=[]), forwarded()),
    wrong_type("a string as message", chat(messages=["Hello"]), "messages[0]", "an object"),
    wrong_type("null as second message", chat(messages=[*HELLO, None]), "messages[1]", "an object"),
    BadInput("a message without a role", chat(messages=[{"content": "x"}]), forwarded()),
    BadInput("an unknown role", chat(messages=[{"role": "king", "content": "x"}]), forwarded()),
    BadInput("7 as content", chat(messages=[{"role": "user", "content": 7}]), forwarded()),
    BadInput("7 as a part of the content", chat(messages=[{"role": "user", "content": [7]}]), forwarded()),
    wrong_value("`max_tokens` -1", chat(max_tokens=-1), "max_tokens", "must be at least 0"),
    BadInput("`max_tokens` as a string", chat(max_tokens="9"), forwarded()),
    BadInput("`max_tokens` 9.0", chat(max_tokens=9.0), forwarded()),
    wrong_type("`max_tokens` as a word", chat(max_tokens="nine"), "max_tokens", "an integer"),
    wrong_type("`max_tokens` 1.5", chat(max_tokens=1.5), "max_tokens", "an integer"),
    wrong_type("`max_tokens` true", chat(max_tokens=True), "max_tokens", "an integer"),
    wrong_value("`max_tokens` 10^30", chat(max_tokens=10**30), "max_tokens", "is too large"),
    BadInput("`max_tokens` 2^63", chat(max_tokens=2**63), forwarded()),
    wrong_value(
        "`max_completion_tokens` -1",
        chat(max_completion_tokens=-1),
        "max_completion_tokens",
        "must be at least 0",
    ),
    wrong_value("`n` 0", chat(n=0), "n", "must be at least 1"),
    wrong_type("`n` in a list", chat(n=[1]), "n", "an integer"),
    wrong_value("`n` 10^30", chat(n=10**30), "n", "is too large"),
    wrong_type("`stream` as a word", chat(stream="perhaps"), "stream", "a boolean"),
    wrong_type("`stream` 2", chat(stream=2), "stream", "a boolean"),
    wrong_type("`stream_options` as a list", chat(stream=True, stream_options=[]), "stream_options", "an object"),
    wrong_type(
        "`include_usage` 2",
        chat(stream=True, stream_options={"include_usage": 2}),
        "stream_options.include_usage",
        "a boolean",
    ),
    BadInput("`stream_options` without `stream`", chat(stream_options={"include_usage": True}), forwarded()),
    wrong_type("`user` 7", chat(user=7), "user", "a string"),
    wrong_type("`return_token_ids` as a word", chat(return_token_ids="perhaps"), "return_token_ids", "a boolean"),
    BadInput("`temperature` as a string", chat(temperature="hot"), forwarded()),
    BadInput("`tools` as a string", chat(tools="all"), forwarded()),
    BadInput("no `prompt`", text(prompt=None), forwarded()),
    BadInput("`messages` in place of `prompt`", post(GOOD, path=COMPLETIONS), forwarded()),
    BadInput("empty `prompt`", text(prompt=[]), forwarded()),
    wrong_value("1025 prompts", text(prompt=["a"] * 1025), "prompt", "must not have more than 1024 items"),
    wrong_type("`prompt` 7", text(prompt=7), "prompt", PROMPT),
    wrong_type("`prompt` of an id and a string", text(prompt=[1, "a"]), "prompt", PROMPT),
    wrong_type("`prompt` of a string and an id", text(prompt=["a", 1]), "prompt", PROMPT),
    wrong_type("`prompt` of ids and a string", text(prompt=[[1], "a"]), "prompt", PROMPT),
    wrong_type("`prompt` of lists of lists", text(prompt=[[[1]]]), "prompt", PROMPT),
    wrong_type("token id 1.5", text(prompt=[1.5]), "prompt", PROMPT),
    wrong_type("token id -1", text(prompt=[-1]), "prompt", PROMPT),
    wrong_type("token id 2^32", text(prompt=[[7], [2**32]]), "prompt", PROMPT),
)
