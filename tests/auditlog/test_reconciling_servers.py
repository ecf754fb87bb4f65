"""A checkpoint on a real server: what the library does is accounted for, and a read round it is not.

The server is ministack, which enforces policies and keeps a CloudTrail of calls of S3 and KMS, but delivers
no files of it: what ``lookup-events`` tells is put into one here. It names a caller by the access key alone,
which is put right here. It keeps no server access logs: they are written in their form of what a proxy sees.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from s3_identities import ACCOUNT, REGION, Enforcing, Identity, statement
from s3_servers import start_ministack
from wire_proxy import Request, WireProxy

from strongroom import Checkpointer
from strongroom_cli.main import main
from strongroom_security import SecurityPolicy

pytest.importorskip("boto3", reason="needs boto3")

SHARD = "data/00000-00.safetensors.floe"


@dataclass(kw_only=True)
class Site:
    """A run that was saved and restored through the library, and then read round it.

    Attributes:
        users: whose access keys are whose.
        honest: how many requests the proxy had seen before anything was read round the library.
        honest_trail: CloudTrail's events until then; ``whole_trail``: until right after it.
    """

    server: Enforcing
    folder: Path
    root: str
    bucket: str
    trainer: Identity
    mallory: Identity
    checkpoint: str = ""
    honest: int = 0
    users: dict[str, str] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    honest_trail: list[dict[str, Any]] = field(default_factory=list)
    whole_trail: list[dict[str, Any]] = field(default_factory=list)

    @property
    def policy(self) -> str:
        return str(self.folder / "strongroom.toml")

    def trail(self) -> list[dict[str, Any]]:
        """CloudTrail's events, as ``aws cloudtrail lookup-events`` prints them."""
        client = self.server.client("cloudtrail")
        found: list[dict[str, Any]] = []
        for name in ("GetObject", "HeadObject", "PutObject", "ListObjects", "Decrypt", "Encrypt"):
            told = client.lookup_events(
                LookupAttributes=[{"AttributeKey": "EventName", "AttributeValue": name}]
            )
            for each in told["Events"]:
                event = json.loads(each["CloudTrailEvent"])
                key = event["userIdentity"]["accessKeyId"]
                event["userIdentity"]["arn"] = self.users.get(key, event["userIdentity"]["arn"])
                found.append({"Resources": each["Resources"], "CloudTrailEvent": json.dumps(event)})
        return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    admin = Identity(name="root", access_key="test", secret_key="test")  # noqa: S106 - ministack's own
    environment = {
        "AUTH": "true",
        "CLOUDTRAIL_RECORDING": "1",
        "SERVICES": "s3,iam,sts,kms,cloudtrail",
        "AWS_ACCESS_KEY_ID": admin.access_key,
        "AWS_SECRET_ACCESS_KEY": admin.secret_key,
        "MINISTACK_ACCOUNT_ID": ACCOUNT,
        "MINISTACK_REGION": REGION,
    }
    with (
        start_ministack(environment=environment) as running,
        WireProxy(running.port) as wire,
        pytest.MonkeyPatch.context() as patch,
    ):
        server = Enforcing(address=wire.endpoint_url, root=admin)
        bucket, log = server.bucket(), server.bucket()
        trainer, mallory = (server.user(statement(["s3:*", "kms:*", "sts:*"], "*")) for _ in range(2))
        key = server.client("kms").create_key()["KeyMetadata"]["Arn"]
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in {
            "AWS_ACCESS_KEY_ID": trainer.access_key,
            "AWS_SECRET_ACCESS_KEY": trainer.secret_key,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ENDPOINT_URL": wire.endpoint_url,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "XDG_STATE_HOME": str(folder / "state"),
            "XDG_CACHE_HOME": str(folder / "cache"),
        }.items():
            patch.setenv(name, value)
        (folder / "strongroom.toml").write_text(
            f'[seal]\nrecipients = ["aws-kms:{key}"]\n[audit]\nsink = "s3://{log}/log"\n'
        )
        made = Site(
            server=server,
            folder=folder,
            root=f"s3://{bucket}/runs/run-a",
            bucket=bucket,
            trainer=trainer,
            mallory=mallory,
            users={
                each.access_key: f"arn:aws:iam::{ACCOUNT}:user/{each.name}" for each in (trainer, mallory)
            },
            requests=wire.requests,
        )
        policy = SecurityPolicy.load(folder / "strongroom.toml")
        with Checkpointer(made.root, security=policy) as ck:
            made.checkpoint = ck.save(1, {"w": torch.ones(64)}).result(60).folder
        with Checkpointer(made.root, security=policy) as ck:
            assert ck.restore({"w": torch.zeros(64)}) is not None
        policy.auditor.close(within_s=30)
        made.honest, made.honest_trail = len(wire.requests), made.trail()
        _read_round_the_library(made)
        made.whole_trail = made.trail()
        yield made


def _read_round_the_library(site: Site) -> None:
    """With raw credentials: an object by two people, and a key."""
    for each in (site.mallory, site.trainer):
        key = f"runs/run-a/{site.checkpoint}/{SHARD}"
        site.server.client("s3", each).get_object(Bucket=site.bucket, Key=key)["Body"].read()
    (unwrap,) = [
        json.loads(each["CloudTrailEvent"])["requestParameters"]
        for each in site.honest_trail
        if json.loads(each["CloudTrailEvent"])["eventName"] == "Decrypt"
    ]
    site.server.client("kms", site.mallory).decrypt(
        CiphertextBlob=base64.b64decode(unwrap["CiphertextBlob"]),
        EncryptionContext=unwrap["EncryptionContext"],
    )


def reconcile(
    site: Site, place: Path | str, capsys: pytest.CaptureFixture[str], *more: str
) -> tuple[int, Any]:
    arguments = ["audit", "reconcile", site.root, "--from", str(place), "--security", site.policy, "--json"]
    status = main([*arguments, "--settled", "0s", *more])
    return status, json.loads(capsys.readouterr().out)


def found_in(told: Any) -> set[tuple[str, str, str]]:
    return {
        (each["verdict"], each["operation"], each["identity"]) for each in told["findings"] if each["bypass"]
    }


def test_what_the_library_did_is_accounted_for_by_cloudtrail(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trail.json").write_text(json.dumps({"Events": site.honest_trail}))
    # As a trail delivers it: packed, and somewhere deep in a bucket.
    logs = site.server.bucket()
    site.server.client("s3").put_object(
        Bucket=logs,
        Key="AWSLogs/0/CloudTrail/trail.json.gz",
        Body=gzip.compress((tmp_path / "trail.json").read_bytes()),
    )
    status, told = reconcile(site, f"s3://{logs}/AWSLogs", capsys)
    assert (status, told["bypasses"], told["damaged"]) == (0, 0, 0), told["findings"]
    assert told["matched"] > 20
    assert told["unseen"] == []
    assert told["commits"] == []


def test_a_read_with_raw_credentials_shows_up_by_cloudtrail(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trail.json").write_text(json.dumps({"Events": site.whole_trail}))
    status, told = reconcile(site, tmp_path, capsys)
    mallory, trainer = (site.users[each.access_key] for each in (site.mallory, site.trainer))
    assert status == 1
    assert found_in(told) == {
        ("other-identity", "GetObject", mallory),
        ("other-identity", "Decrypt", mallory),
        ("other-program", "GetObject", trainer),
    }
    read = next(each for each in told["findings"] if each["operation"] == "GetObject")
    assert (read["where"], read["address"], read["count"]) == (site.checkpoint, "127.0.0.1", 1)
    # Somewhat later there is no restore on record that it could be held against.
    narrow = reconcile(site, tmp_path, capsys, "--window", "0s")[1]
    assert {each[2] for each in found_in(narrow)} >= {mallory}


def test_a_read_with_raw_credentials_shows_up_by_the_servers_access_log(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = access_log_of(site)
    place = tmp_path / "2026-11-30-00-00-00-0123456789ABCDEF"
    place.write_text("".join(lines[: site.honest]))
    status, told = reconcile(site, place, capsys)
    assert (status, told["bypasses"], told["damaged"]) == (0, 0, 0), told["findings"]
    assert told["matched"] > 15
    place.write_text("".join(lines))
    status, told = reconcile(site, place, capsys)
    mallory, trainer = (site.users[each.access_key] for each in (site.mallory, site.trainer))
    assert status == 1
    assert found_in(told) == {
        ("other-identity", "REST.GET.OBJECT", mallory),
        ("other-program", "REST.GET.OBJECT", trainer),
    }


def test_people_are_told_who_read_what_from_where_and_no_key(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trail = json.dumps({"Events": site.whole_trail})
    assert "Plaintext" in trail  # ministack's tells even that
    (tmp_path / "trail.json").write_text(trail)
    arguments = ["audit", "reconcile", site.root, "--from", str(tmp_path), "--security", site.policy]
    assert main([*arguments, "--settled", "0s"]) == 1
    printed = capsys.readouterr().out
    assert site.users[site.mallory.access_key] in printed
    assert "by another identity than the log has, which is" in printed
    assert "3 accesses went round the log" in printed
    for each in site.whole_trail:
        asked = json.loads(each["CloudTrailEvent"])["requestParameters"] or {}
        for name in ("Plaintext", "CiphertextBlob"):
            assert asked.get(name, "-") == "-" or asked[name] not in printed


def access_log_of(site: Site) -> list[str]:
    """What S3 would have written of what the proxy saw: one line a request, empty where it is not S3's."""
    lines = []
    for request in site.requests:
        bucket, _, key = request.path.lstrip("/").partition("/")
        at = datetime.fromtimestamp(request.at_s, tz=timezone.utc)
        operation = f"REST.{request.method}.{'OBJECT' if key else 'BUCKET'}"
        uri = f"{request.method} {request.path}{'?' if request.query else ''}{request.query} HTTP/1.1"
        who = site.users.get(request.access_key, "-")
        line = (
            f"0123456789ab {bucket} [{at:%d/%b/%Y:%H:%M:%S} +0000] 127.0.0.1 {who} R{request.number:015d} "
            f'{operation} {key or "-"} "{uri}" {request.status} - {request.received_bytes or "-"} - 1 1 "-" '
            f'"{request.agent}" - hostid= SigV4 - AuthHeader {bucket}.localhost TLSv1.3 - -\n'
        )
        lines.append(line if bucket == site.bucket else "")
    return lines
