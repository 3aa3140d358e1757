"""Server settings: one frozen dataclass, validated once; the command line takes its flags from it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foredraft.errors import ConfigError, shown
from foredraft.server.tools.formats import TOOL_FORMATS

MAX_SECONDS = 86_400.0
MAX_BODY_MIB = 1024
HOST = re.compile(r"[A-Za-z0-9.-]+(:[0-9]+)?")
MAX_PIXELS = 1 << 26  # at 80 million Pillow itself begins to warn


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class ServerSettings:
    """How the server listens, whom it serves and how much it takes on. Raises ConfigError, naming field and rule."""

    host: str = _setting("127.0.0.1", "address to listen on; 0.0.0.0 is every one that the machine has")
    port: int = _setting(8000, "port to listen on; 0 takes a free one")
    api_key: str | None = _setting(
        None, "a key that clients must send; /health, /metrics, /version and the page are open"
    )
    api_key_file: str | Path | None = _setting(None, "file with such keys, one a line, out of sight of other users")
    served_model_name: str | None = _setting(None, "the name of the model in the API; the checkpoint's if left out")
    max_waiting: int = _setting(256, "choices that may wait to start; when so many do, further requests get a 429")
    max_body_mib: int = _setting(8, "largest body of a request, in MiB")
    max_media_mib: int = _setting(20, "largest file of an image or of sound, in MiB")
    max_image_pixels: int = _setting(1 << 24, "pixels that an image may have")
    max_audio_seconds: int = _setting(600, "how long a piece of sound may last")
    allowed_local_media_path: str | Path | None = _setting(
        None, "directory whose files messages may show by file:// URLs; none if left out"
    )
    allowed_media_hosts: str | None = _setting(
        None,
        "hosts that images and sound may be fetched from, host or host:port, with commas between; none if left out",
    )
    drain_seconds: float = _setting(30.0, "how long requests may go on after SIGTERM")
    tool_format: str | None = _setting(None, "how the model writes tool calls; by its chat template if left out")
    cors_origin: str | None = _setting(None, "origin of web pages elsewhere that may use the API; * is any")
    access_log: bool = _setting(False, "a line on standard error for each request")
    traces_endpoint: str | None = _setting(None, "OTLP endpoint (HTTP) that gets a trace of each request")

    def __post_init__(self) -> None:
        for name in (
            "host",
            "api_key",
            "served_model_name",
            "tool_format",
            "cors_origin",
            "traces_endpoint",
            "allowed_media_hosts",
        ):
            value = getattr(self, name)
            if value is None and name != "host":
                continue
            if not isinstance(value, str) or not value.strip() or not value.isprintable():
                raise ConfigError(f"{name} must be text that is not empty, not {shown(value)}")
        if self.traces_endpoint is not None and not self.traces_endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"traces_endpoint must be a URL like http://127.0.0.1:4318/v1/traces, not {shown(self.traces_endpoint)}"
            )
        for name in ("api_key", "cors_origin"):  # they travel in headers
            if (value := getattr(self, name)) is not None and not value.isascii():
                raise ConfigError(f"{name} must be ASCII text")
        if self.tool_format is not None and self.tool_format not in TOOL_FORMATS:
            raise ConfigError(f"tool_format must be one of {', '.join(TOOL_FORMATS)}, not {shown(self.tool_format)}")
        _integer("port", self.port, 0, 65_535)
        _integer("max_waiting", self.max_waiting, 1, 2**31)
        _integer("max_body_mib", self.max_body_mib, 1, MAX_BODY_MIB)
        _integer("max_media_mib", self.max_media_mib, 1, MAX_BODY_MIB)
        _integer("max_image_pixels", self.max_image_pixels, 1, MAX_PIXELS)
        _integer("max_audio_seconds", self.max_audio_seconds, 1, int(MAX_SECONDS))
        if self.allowed_local_media_path is not None and not Path(self.allowed_local_media_path).is_dir():
            path = shown(str(self.allowed_local_media_path))
            raise ConfigError(f"allowed_local_media_path must be a directory that is there, not {path}")
        if self.allowed_media_hosts is not None and not all(map(HOST.fullmatch, self.media_hosts)):
            rule = "must be hosts like example.com or example.com:8080, with commas between"
            raise ConfigError(f"allowed_media_hosts {rule}, not {shown(self.allowed_media_hosts)}")
        seconds = self.drain_seconds
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= MAX_SECONDS:
            raise ConfigError(f"drain_seconds must be a number from 0 to {MAX_SECONDS:.0f}, not {shown(seconds)}")
        if not isinstance(self.access_log, bool):
            raise ConfigError(f"access_log must be true or false, not {shown(self.access_log)}")

    @property
    def media_hosts(self) -> frozenset[str]:
        """The hosts that images and sound may be fetched from."""
        return frozenset(host.strip() for host in (self.allowed_media_hosts or "").split(",") if host.strip())

    def read_api_keys(self) -> frozenset[str]:
        """All keys that clients may send; none: anybody is served. Raises ConfigError for a file that has none."""
        keys = {self.api_key} if self.api_key is not None else set()
        if self.api_key_file is not None:
            try:
                lines = Path(self.api_key_file).read_text(encoding="ascii").split()
            except (OSError, ValueError) as error:
                raise ConfigError(f"api_key_file {self.api_key_file} cannot be read: {error}") from error
            if not lines:
                raise ConfigError(f"api_key_file {self.api_key_file} holds no key")
            keys |= set(lines)
        return frozenset(keys)


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} must be an integer from {low} to {high}, not {shown(value)}")
