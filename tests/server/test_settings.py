"""The settings of a server: each is checked by name, and keys are read from where they are kept."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from foredraft.errors import ConfigError
from foredraft.server.service import Service
from foredraft.server.settings import MAX_BODY_MIB, MAX_PIXELS, MAX_SECONDS, ServerSettings


def test_what_it_does_by_itself() -> None:
    """Only this machine reaches it, at the usual port, and nobody needs a key."""
    settings = ServerSettings()
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)
    assert settings.read_api_keys() == frozenset()
    assert settings.cors_origin is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("host", ""),
        ("host", None),
        ("host", 1),
        ("host", "a\nb"),
        ("port", -1),
        ("port", 65_536),
        ("port", "8000"),
        ("port", True),
        ("port", 80.0),
        ("api_key", ""),
        ("api_key", " "),
        ("api_key", "schl\xfcssel"),
        ("api_key", "a\r\nb"),
        ("served_model_name", ""),
        ("served_model_name", "a\x00b"),
        ("max_waiting", 0),
        ("max_waiting", None),
        ("max_waiting", 2**31 + 1),
        ("max_body_mib", 0),
        ("max_body_mib", MAX_BODY_MIB + 1),
        ("drain_seconds", -1),
        ("drain_seconds", float("nan")),
        ("drain_seconds", float("inf")),
        ("drain_seconds", MAX_SECONDS + 1),
        ("drain_seconds", "30"),
        ("drain_seconds", True),
        ("tool_format", ""),
        ("cors_origin", ""),
        ("cors_origin", "https://\xe9"),
        ("access_log", 1),
        ("access_log", None),
        ("traces_endpoint", " "),
        ("traces_endpoint", "127.0.0.1:4318"),
        ("max_media_mib", 0),
        ("max_image_pixels", MAX_PIXELS + 1),
        ("max_audio_seconds", 0),
        ("max_audio_seconds", 1.5),
        ("allowed_local_media_path", "/no/such/directory"),
        ("allowed_local_media_path", __file__),
        ("allowed_media_hosts", ""),
        ("allowed_media_hosts", "http://example.com"),
        ("allowed_media_hosts", "example.com, a/b"),
        ("allowed_media_hosts", "user@example.com"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{field} must be") as caught:
        ServerSettings(**{field: value})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", 0),
        ("port", 65_535),
        ("api_key", "k"),
        ("served_model_name", "org/model:\xe9"),
        ("max_waiting", 1),
        ("max_body_mib", MAX_BODY_MIB),
        ("drain_seconds", 0),
        ("drain_seconds", 0.5),
        ("cors_origin", "*"),
        ("access_log", True),
        ("traces_endpoint", "http://127.0.0.1:4318/v1/traces"),
        ("max_media_mib", 1),
        ("max_image_pixels", MAX_PIXELS),
        ("max_audio_seconds", 1),
        ("allowed_local_media_path", Path(__file__).parent),
        ("allowed_media_hosts", "example.com, example.org:8080"),
    ],
)
def test_right_settings_are_taken(field: str, value: Any) -> None:
    assert getattr(ServerSettings(**{field: value}), field) == value


def test_hosts_are_listed_with_commas() -> None:
    assert ServerSettings().media_hosts == frozenset()
    hosts = ServerSettings(allowed_media_hosts="example.com, example.org:8080,").media_hosts
    assert hosts == {"example.com", "example.org:8080"}


def test_every_setting_says_what_it_does() -> None:
    assert all(len(field.metadata["help"]) > 10 for field in fields(ServerSettings))


def test_an_unknown_tool_format_is_refused_before_anything_is_loaded() -> None:
    def load() -> Any:
        raise AssertionError("nothing may be loaded")

    with pytest.raises(ConfigError, match=r"^tool_format must be one of .*hermes.*, not 'french'"):
        Service(load, ServerSettings(tool_format="french"), "model")


def test_keys_come_from_both_places(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("\none\n  two \r\n\nthree", encoding="ascii")
    assert ServerSettings(api_key_file=path).read_api_keys() == {"one", "two", "three"}
    assert ServerSettings(api_key="four", api_key_file=str(path)).read_api_keys() == {"one", "two", "three", "four"}
    assert ServerSettings(api_key="four").read_api_keys() == {"four"}


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "cannot be read"), (b"", "holds no key"), (b"\n \n", "holds no key"), (b"\xff", "cannot be read")],
)
def test_a_file_without_keys_is_refused(tmp_path: Path, content: bytes | None, reason: str) -> None:
    """A server that was meant to be locked never stands open."""
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^api_key_file .*{reason}"):
        ServerSettings(api_key_file=path).read_api_keys()
    with pytest.raises(ConfigError, match=r"^api_key_file"):
        ServerSettings(api_key_file=tmp_path).read_api_keys()
