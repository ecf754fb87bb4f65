"""``strongroom audit`` on a log in a bucket: what was written there is verified, indexed and asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from log_making import LOG_KEY, RUN, pristine, sequence
from s3_servers import S3Server, moto_s3

from strongroom.stores.s3 import S3Store
from strongroom_cli.main import main

__all__ = ["moto_s3"]


def test_a_log_in_a_bucket_is_verified_indexed_and_asked(
    moto_s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in moto_s3.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("STRONGROOM_CONFIG", raising=False)
    uri = f"s3://{moto_s3.make_bucket()}/log"
    sink = S3Store(uri)
    for key, data in pristine().items():
        assert sink.put_if_absent(key, data)
    sequence(sink)
    named = ("--sink", uri, "--json")

    def audit(*arguments: str) -> tuple[int, Any]:
        capsys.readouterr()
        status = main(["audit", *arguments])
        return status, json.loads(capsys.readouterr().out)

    status, said = audit("verify", *named, "--log-key", str(LOG_KEY.key))
    assert status == 0
    assert said["totals"]["sequenced_events"] == 10
    index = str(tmp_path / "index.sqlite")
    status, said = audit("query", *named, "--index", index, "--checkpoint", RUN, "100")
    assert (status, len(said["rows"]), said["index"]["sequenced_events"]) == (0, 8, 10)
    first, second, *_ = sorted(pristine())
    sink.delete(first)
    changed = pristine()[second].replace(b'"name":"ada"', b'"name":"eve"')
    moto_s3.behind.put_object(Bucket=uri.split("/")[2], Key=f"log/{second}", Body=changed)
    status, said = audit("verify", *named, "--log-key", str(LOG_KEY.key))
    assert status == 1
    where = {(each["segment"], each["kind"]) for each in said["findings"] if each["gravity"] == "tampered"}
    assert {(first, "removed"), (second, "altered")} <= where
    status, said = audit("query", *named, "--index", index, "--actor", "eve")
    assert status == 0
    assert [row["doubtful"] for row in said["rows"]] == [True] * 3
    assert (said["index"]["removed_segments"], said["index"]["changed_segments"]) == (1, 1)
