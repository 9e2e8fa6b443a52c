from router.api.multipart import form_fields, is_form, replace_field

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
    """Engines differ in which one counts."""
    field = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\n%b\r\n'
    form = field % b"a" + field.replace(b"model", b"user") % b"a" + field % b"" + b"--x--\r\n"
    told = field % b"new" + field.replace(b"model", b"user") % b"a" + field % b"new" + b"--x--\r\n"
    assert replace_field(form, "multipart/form-data; boundary=x", "model", "new") == told


def test_what_is_no_form_has_no_fields() -> None:
    """No boundary, a boundary that is not there, a part without an end: nothing, and no error."""
    assert not is_form("application/json")
    for body, kind in ((FORM, "multipart/form-data"), (FORM, "multipart/form-data; boundary=x"), (FORM[:60], TYPE)):
        assert form_fields(body, kind) == {}


def test_a_long_field_is_no_name() -> None:
    """What is longer than a name or flag can be is passed over."""
    assert form_fields(FORM.replace(b"whisper", b"w" * 5000), TYPE) == {"stream": "true"}
