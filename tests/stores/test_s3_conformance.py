"""The store in a bucket keeps the promises of every store, on two servers that share no code."""

from __future__ import annotations

from typing import Any

import pytest
from s3_servers import S3Server

from strongroom.stores import S3Options, S3Store, Store
from strongroom.testing.conformance import StoreConformance


class _OnAServer(StoreConformance):
    """One bucket for each test, and a plain client to look behind the store."""

    _server: S3Server
    _client: Any
    _name: str

    @pytest.fixture
    def server(self) -> S3Server:
        raise NotImplementedError

    @pytest.fixture
    def store(self, server: S3Server) -> Store:
        self._server, self._client, self._name = server, server.behind, server.make_bucket()
        return self._open()

    def _open(self) -> S3Store:
        return S3Store(
            f"s3://{self._name}/runs/a",
            options=S3Options(endpoint_url=self._server.endpoint_url),
            session=self._server.session,
        )

    def raw(self, store: Store, key: str) -> bytes | None:
        try:
            found = self._client.get_object(Bucket=self._name, Key=f"runs/a/{key}")
        except self._client.exceptions.NoSuchKey:
            return None
        with found["Body"] as body:
            return bytes(body.read())

    def plant(self, store: Store, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=self._name, Key=f"runs/a/{key}", Body=data)

    def reopen(self, store: Store) -> Store:
        return self._open()


class TestOnMoto(_OnAServer):
    @pytest.fixture
    def server(self, moto_s3: S3Server) -> S3Server:
        return moto_s3


class TestOnMinistack(_OnAServer):
    @pytest.fixture
    def server(self, ministack_s3: S3Server) -> S3Server:
        return ministack_s3


del _OnAServer
