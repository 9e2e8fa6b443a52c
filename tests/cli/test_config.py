"""The commented settings file: it is complete, equals the settings, and contains no secret."""

import re
from pathlib import Path

import yaml

from router.config.settings import Settings
from router.config.sources import keys, load
from router.config.template import commented

DEPLOYED = Path(__file__).parents[2] / "deploy/router.yaml"


def read(text: str, directory: Path) -> Settings:
    """Return the settings of a file with this text."""
    file = directory / "router.yaml"
    file.write_text(text)
    return load({"--config": str(file)}, {}).model_copy(update={"config": None})


def uncommented(text: str) -> str:
    """Return the text with every setting uncommented that has a value or a group below it."""
    valued = re.sub(r"^#(\w+: .+| +\w+: .+)$", r"\1", text, flags=re.MULTILINE)
    return re.sub(r"^#(\w+:)$(?=\n  )", r"\1", valued, flags=re.MULTILINE)


def test_the_template_has_every_key_once_with_its_description() -> None:
    """The template lists every setting of a file with its description."""
    text = commented(Settings())
    for key in keys():
        if key.path != ("config",):
            name = key.path[-1]
            assert re.search(rf"^#{'  ' if len(key.path) > 1 else ''}{name}:", text, re.MULTILINE), key
            assert key.about.split()[-1] in text
    assert yaml.safe_load(text) is None


def test_the_templates_defaults_are_the_defaults(tmp_path: Path) -> None:
    """A template with all settings uncommented gives the default settings."""
    text = uncommented(commented(Settings()))
    assert read(text, tmp_path) == Settings()
    assert len(yaml.safe_load(text)) > 50


def test_set_values_are_read_back_unchanged(tmp_path: Path) -> None:
    """Ambiguous scalars, lists, workers with and without names, and a parameter of a group survive a round trip."""
    given = {
        "window": "off",
        "port": 1,
        "response_headers": False,
        "identity": ["user", "address"],
        "state": "/var/lib/x: y",
        "worker": [
            "http://a:1",
            {"url": "http://b:2", "id": "west", "kv_events": "tcp://b:5557"},
            {"url": "http://c:3", "rank": 0, "group": "moe"},
        ],
        "dlpm": {"quantum": 7},
    }
    settings = Settings.model_validate(given)
    text = commented(settings)
    assert read(text, tmp_path) == settings
    assert "\n  - http://a:1\n" in text


def test_the_template_contains_no_secret() -> None:
    """In place of each secret a comment says where to set it."""
    secrets = {"admin_key": "a" * 16, "hash_secret": "h" * 16, "worker_api_key": "sk-all"}
    settings = Settings.model_validate({**secrets, "worker": [{"url": "http://a", "api_key": "sk-one"}]})
    text = commented(settings)
    assert not any(secret in text for secret in [*secrets.values(), "sk-one"])
    assert "D2LPM_ADMIN_KEY" in text
    assert "its api_key is not shown" in text


def test_the_deployed_file_is_current() -> None:
    """The deployed file equals the output of `d2lpm config --config deploy/router.yaml`."""
    settings = load({"--config": str(DEPLOYED)}, {})
    assert DEPLOYED.read_text() == commented(settings)
