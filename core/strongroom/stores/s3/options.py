"""How a bucket is reached, and how hard: values, checked once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final, Literal
from urllib.parse import urlsplit

from strongroom.errors import ConfigError

__all__ = ["MAX_PARTS", "MIN_PART_BYTES", "S3Options"]

MIN_PART_BYTES: Final = 5 << 20
"""The shortest part but for the last (Amazon S3 user guide, multipart upload limits)."""
MAX_PARTS: Final = 10_000
"""Of one upload (same page)."""
_MIB: Final = 1 << 20
_MAX_PART_BYTES: Final = 1 << 30
_SECRETS: Final = re.compile(r"^([^/@]*//)?.*@")
"""A user and a password at the beginning of a URL, which need not have a scheme."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class S3Options:
    """How a bucket is reached, and how hard.

    What is None is what boto3 finds for itself, as for every program of the user: environment variables,
    ``~/.aws/config``, the machine's role.

    Attributes:
        endpoint_url: of a server other than AWS.
        region_name: where the bucket is.
        profile_name: of ``~/.aws/config``.
        addressing_style: ``path``, ``virtual`` or ``auto``: where the bucket's name goes.
        ca_bundle: a file of certificates by which the server's is judged.
        proxies: a URL for each scheme, such as ``{"https": "http://proxy:3128"}``.
        part_bytes: what one part of an upload holds; longer objects than 10,000 parts get larger ones.
        parts_in_flight: how many parts of all objects are on their way at once. So much memory is theirs
            (``parts_in_flight * part_bytes``), besides one part for each object being written.
        read_bytes: what one ranged read asks for at most.
        reads_in_flight: how many of them are under way at once.
        connect_timeout_s: how long one wait for a connection lasts.
        read_timeout_s: how long one wait for bytes lasts.
        tries: how often a request is sent, at most.
        patience_s: after so long since the first of them none is sent again.
    """

    endpoint_url: str | None = None
    region_name: str | None = None
    profile_name: str | None = None
    addressing_style: Literal["path", "virtual", "auto"] | None = None
    ca_bundle: str | None = None
    proxies: Mapping[str, str] | None = None
    part_bytes: int = 16 * _MIB
    parts_in_flight: int = 16
    read_bytes: int = 8 * _MIB
    reads_in_flight: int = 16
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 60.0
    tries: int = 10
    patience_s: float = 120.0

    def __repr__(self) -> str:
        shown = {each.name: getattr(self, each.name) for each in fields(self)}
        if self.proxies is not None:
            shown["proxies"] = {scheme: _without_password(url) for scheme, url in self.proxies.items()}
        return f"S3Options({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def __post_init__(self) -> None:
        _check_range("part_bytes", self.part_bytes, MIN_PART_BYTES, _MAX_PART_BYTES)
        _check_range("parts_in_flight", self.parts_in_flight, 1, 256)
        _check_range("read_bytes", self.read_bytes, _MIB, 1 << 30)
        if self.read_bytes % _MIB:
            raise ConfigError(f"S3Options.read_bytes is a multiple of {_MIB}, got {self.read_bytes}")
        _check_range("reads_in_flight", self.reads_in_flight, 1, 256)
        _check_range("connect_timeout_s", self.connect_timeout_s, 0.001, 3600)
        _check_range("read_timeout_s", self.read_timeout_s, 0.001, 3600)
        _check_range("tries", self.tries, 1, 100)
        _check_range("patience_s", self.patience_s, 0, 86_400)
        if self.addressing_style not in (None, "path", "virtual", "auto"):
            raise ConfigError(
                f"S3Options.addressing_style is 'path', 'virtual' or 'auto', got {self.addressing_style!r}"
            )
        if self.endpoint_url is not None:
            _check_endpoint(self.endpoint_url)


def _without_password(url: str) -> str:
    return _SECRETS.sub(r"\1***@", url)


def _check_range(name: str, value: object, least: float, most: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:  # type: ignore[operator]
        raise ConfigError(f"S3Options.{name} lies between {least} and {most}, got {value!r:.60}")


def _check_endpoint(url: str) -> None:
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        host = None
    if not host or parts.scheme not in ("http", "https"):
        raise ConfigError(
            f"S3Options.endpoint_url is https://HOST[:PORT], got {_without_password(url)!r:.200}; without "
            "one it is AWS, or what AWS_ENDPOINT_URL_S3 says"
        )
    if parts.username is not None:
        raise ConfigError(
            "S3Options.endpoint_url holds no user or password; give credentials as boto3 takes them"
        )
