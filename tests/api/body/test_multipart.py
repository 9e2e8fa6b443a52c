"""Reading the fields of forms, and replacing one."""

import pytest

from router.api.body.multipart import form_fields, is_form, put_field, replace_field
from router.errors import BadRequest

TYPE = 'multipart/form-data; boundary="b o"'
FORM = (
    b'--b o\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n'
    b'--b o\r\ncontent-disposition: form-data; name="file"; filename="model"\r\nContent-Type: audio/wav\r\n\r\n'
    b"RIFF\r\n\r\n\x00\xff\r\n"
    b"--b o\r\nContent-Disposition: form-data; name=stream\r\n\r\ntrue\r\n--b o--\r\n"
)


def test_fields_are_read_and_files_are_not() -> None:
    """The names and values of short fields, with and without quotes."""
    assert is_form(TYPE)
    assert form_fields(FORM, TYPE) == {"model": "whisper", "stream": "true"}


def test_a_field_is_replaced_and_nothing_else() -> None:
    """A file that calls itself like the field stays as it is, whatever it holds."""
    assert replace_field(FORM, TYPE, "model", "other") == FORM.replace(b"whisper", b"other")
    assert replace_field(FORM, TYPE, "file", "other") == FORM


def test_a_field_is_replaced_wherever_it_is() -> None:
    """Every field of the name is replaced, as engines differ in which one they use."""
    field = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\n%b\r\n'
    form = field % b"a" + field.replace(b"model", b"user") % b"a" + field % b"" + b"--x--\r\n"
    replaced = field % b"new" + field.replace(b"model", b"user") % b"a" + field % b"new" + b"--x--\r\n"
    assert replace_field(form, "multipart/form-data; boundary=x", "model", "new") == replaced


def test_a_field_that_is_missing_is_inserted() -> None:
    """All other fields and files stay, and a form that is none stays as it is."""
    kind = "multipart/form-data; boundary=x"
    parts = form(NAMED.replace(b"model", b"user"), NAMED.replace(b"model", b"file") + b'; filename="a"')
    for body in (parts, b"\r\n" + parts):
        put = put_field(body, kind, "model", "m")
        assert form_fields(put, kind) == {"model": "m", "user": "secret"}
        assert put.endswith(parts)
    assert put_field(parts, "multipart/form-data; boundary=y", "model", "m") == parts


def test_an_invalid_form_has_no_fields() -> None:
    """A missing boundary, a wrong boundary or a part without an end gives no fields and no error."""
    assert not is_form("application/json")
    for body, kind in ((FORM, "multipart/form-data"), (FORM, "multipart/form-data; boundary=x"), (FORM[:60], TYPE)):
        assert form_fields(body, kind) == {}


def test_a_long_field_is_ignored() -> None:
    """Values longer than any name or flag are ignored."""
    assert form_fields(FORM.replace(b"whisper", b"w" * 5000), TYPE) == {"stream": "true"}


def form(*heads: bytes, boundary: bytes = b"x") -> bytes:
    """A form of parts with these headers and the value `secret`."""
    parts = b"".join([b"--%b\r\n%b\r\n\r\nsecret\r\n" % (boundary, head) for head in heads])
    return b"%b--%b--\r\n" % (parts, boundary)


NAMED = b'content-disposition: form-data; name="model"'


@pytest.mark.parametrize(
    "head",
    [
        NAMED + b'; x="filename"',
        b'content-type: text/plain; name="other"\r\n' + NAMED,
        NAMED + b"\r\nx-filename: a",
        b'Content-Disposition:form-data;x="; name=other";name=model',
        b'content-disposition: form-data; name="other"\r\n' + NAMED,
        b'content-disposition: form-data; name="mod\\el"'.replace(b"\\", b""),
    ],
)
def test_a_field_cannot_be_hidden_from_the_router(head: bytes) -> None:
    """The router reads fields as the engines do; else a client could call a model that its key does not allow."""
    assert form_fields(form(head), "multipart/form-data; boundary=x") == {"model": "secret"}
    replaced = replace_field(form(head), "multipart/form-data; boundary=x", "model", "m")
    assert replaced == form(head).replace(b"secret", b"m")


def test_what_only_looks_like_a_boundary_ends_no_field() -> None:
    """Neither a longer boundary, nor one within a line, nor a part of one ends a field."""
    for value in (b"a\r\n--boundar", b"--boundary-x", b"a\r\n--boundarx\r\nb", b"\r\n", b"\r\n--\r\n"):
        body = b"--boundary\r\n" + NAMED + b"\r\n\r\n" + value + b"\r\n--boundary--\r\n"
        kind = "multipart/form-data; boundary=boundary"
        assert form_fields(body, kind) == {"model": value.decode()}
        assert replace_field(body, kind, "model", "m") == body.replace(
            value + b"\r\n--boundary--", b"m\r\n--boundary--"
        )


def test_a_field_behind_as_many_files_as_engines_take_is_read() -> None:
    """Engines count fields and files separately, so a thousand files hide no field."""
    files = [b'content-disposition: form-data; name="f"; filename="a"'] * 1000
    assert form_fields(form(*files, NAMED), "multipart/form-data; boundary=x") == {"model": "secret"}


@pytest.mark.parametrize(
    "head",
    [
        b'content-disposition: form-data; name="f"',
        b'content-disposition: form-data; name="f"; filename="a"',
        b"content-disposition: form-data",
    ],
)
def test_more_parts_than_engines_take_are_refused(head: bytes) -> None:
    """Such a form is not read to its end, so the work on it is bounded, and a field there cannot be missed."""
    assert form_fields(form(*[head] * 1000), "multipart/form-data; boundary=x") is not None
    with pytest.raises(BadRequest, match="1000 fields and 1000 files at most"):
        form_fields(form(*[head] * 1001, NAMED), "multipart/form-data; boundary=x")


def test_long_names_of_parts_are_refused() -> None:
    """Each name takes time by its length, and forms have many: beyond a sum of lengths the form is refused."""
    head = b'content-disposition: form-data; name="%b"' % (b";" * 4000)
    assert form_fields(form(*[head] * 30, NAMED), "multipart/form-data; boundary=x")["model"] == "secret"
    with pytest.raises(BadRequest, match="too long"):
        form_fields(form(*[head] * 40, NAMED), "multipart/form-data; boundary=x")


@pytest.mark.parametrize("charset", ["utf-7", "UTF-16", "cp037", "latin-1", "none"])
def test_a_form_in_another_charset_is_refused(charset: str) -> None:
    """Engines decode names of fields by it: in UTF-7, `+AG0AbwBkAGUAbA-` is `model`."""
    body = form(b'content-disposition: form-data; name="+AG0AbwBkAGUAbA-"')
    with pytest.raises(BadRequest, match="must be UTF-8"):
        form_fields(body, f"multipart/form-data; boundary=x; charset={charset}")
    assert form_fields(form(NAMED), "multipart/form-data; boundary=x; Charset=UTF-8") == {"model": "secret"}
