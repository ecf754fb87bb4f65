"""Whole runs in a bucket, each by no more rights than its role has, on a server that enforces them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from strongroom import (
    AccessDeniedError,
    Checkpointer,
    ConfigError,
    KeepLast,
    SaveError,
    StrongroomError,
    Tier,
)
from strongroom.roles import Duty, open_root
from strongroom.stores.s3 import S3Options, S3Store
from strongroom.verify import verify
from strongroom_security import SecurityPolicy
from strongroom_security.recipients.file import create_key_file
from strongroom_security.roles import definition
from strongroom_security.roles.documents import identity_policy
from strongroom_security.roles.site import Site
from strongroom_security.signers.generating import generate_key

sys.path.insert(0, str(Path(__file__).parent.parent / "stores"))

from s3_identities import Enforcing, Identity, enforcing

__all__ = ["enforcing"]

RUN = "run-a"


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((1000,), value), "extra": {"value": value}}


def template() -> dict[str, Any]:
    return {"w": torch.zeros(1000), "extra": {}}


class Platform:
    """A bucket, a job's folder with its policy, and a profile for each role that it may take up."""

    def __init__(self, server: Enforcing, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = server
        self.folder = folder
        self.bucket = server.bucket()
        self.root = f"s3://{self.bucket}/runs/{RUN}"
        self._profiles: list[str] = []
        self._monkeypatch = monkeypatch
        create_key_file(folder / "kek.key")
        generate_key(folder / "signer.pem")
        for name in (*os.environ,):
            if name.startswith("AWS_"):
                monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.address)
        monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "config"))
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    def grant(self, role: str) -> Identity:
        """An identity that may do what the role's document says, for this one run; a profile of that name."""
        document = identity_policy(definition(role), Site(bucket=self.bucket, run=RUN))
        identity = self.server.user(*document["Statement"])
        self._profiles.append(
            f"[profile {role}]\naws_access_key_id = {identity.access_key}\n"
            f"aws_secret_access_key = {identity.secret_key}\nregion = us-east-1\n"
            "s3 =\n  addressing_style = path\n"
        )
        (self.folder / "config").write_text("".join(self._profiles))
        return identity

    def policy(self, role: str, **members: Any) -> SecurityPolicy:
        """Sealed, signed, and by a role."""
        path = self.folder / f"{role}.toml"
        lines = [f"{key} = {json.dumps(value)}" for key, value in {"name": role, **members}.items()]
        path.write_text(
            '[seal]\nrecipients = ["file:kek.key"]\n[sign]\nkey = "file:signer.pem"\n[role]\n'
            + "\n".join(lines)
            + "\n"
        )
        return SecurityPolicy.load(path)

    def behind(self) -> S3Store:
        """The root, by the rights of whoever may do everything."""
        return S3Store(
            self.root,
            options=S3Options(endpoint_url=self.server.address, addressing_style="path"),
            session=self.server.root.session(),
        )


@pytest.fixture
def platform(enforcing: Enforcing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Platform:
    folder = tmp_path / "job"
    folder.mkdir()
    return Platform(enforcing, folder, monkeypatch)


def test_a_trainer_that_may_only_create_saves_sealed_and_signed_checkpoints(platform: Platform) -> None:
    platform.grant("trainer-writer")
    policy = platform.policy("trainer-writer", run=RUN, launch=1, save="profile:trainer-writer")
    with Checkpointer(platform.root, security=policy, scatter=4) as ck:
        for step in (1, 2):
            ck.save(step, state(float(step))).result(60)
        with pytest.raises(AccessDeniedError):
            ck.restore(template())
        with pytest.raises(AccessDeniedError):
            ck.checkpoints()
    report = verify(platform.behind(), everything=True, guard=policy.guard)
    assert report.verdict == "whole", report.problems
    assert sorted(each.name.step for each in report.checkpoints) == [1, 2]


def test_a_trainers_token_is_refused_by_the_server_too(
    platform: Platform,
) -> None:
    """The rights are the server's, and not only this program's good manners."""
    identity = platform.grant("trainer-writer")
    policy = platform.policy("trainer-writer", run=RUN, launch=1, save="profile:trainer-writer")
    with Checkpointer(platform.root, security=policy) as ck:
        folder = ck.save(1, state(1.0)).result(60).folder
    options = S3Options(endpoint_url=platform.server.address, addressing_style="path")
    token = S3Store(platform.root, options=options, session=identity.session())
    for act in (
        lambda: token.read("run.json", limit_bytes=1000),
        lambda: token.stat(f"{folder}/COMMIT"),
        lambda: token.list_names(""),
        lambda: token.delete(f"{folder}/COMMIT"),
        lambda: S3Store(
            f"s3://{platform.bucket}/runs/run-b", options=options, session=identity.session()
        ).put("run.json", b"x"),
        lambda: S3Store(
            f"s3://{platform.bucket}/runs/run-b", options=options, session=identity.session()
        ).read("run.json", limit_bytes=10),
    ):
        with pytest.raises(AccessDeniedError):
            act()
    assert platform.behind().stat(f"{folder}/COMMIT").size_bytes > 0


def test_restoring_goes_by_other_credentials_which_are_gone_before_the_first_save(platform: Platform) -> None:
    platform.grant("trainer-writer")
    platform.grant("validator-reader")
    both = {"save": "profile:trainer-writer", "restore": "profile:validator-reader"}
    with Checkpointer(platform.root, security=platform.policy("trainer-writer", run=RUN, **both)) as ck:
        assert ck.restore(template()) is None
        assert ck.save(1, state(1.0)).result(60).launch == 1
        with pytest.raises(AccessDeniedError):
            ck.restore(template())
    with Checkpointer(platform.root, security=platform.policy("trainer-writer", run=RUN, **both)) as ck:
        restored = ck.restore(template())
        assert restored is not None
        assert torch.equal(restored.state["w"], state(1.0)["w"])
        assert ck.save(2, state(2.0)).result(60).launch == 2
    # Whatever the platform says of the number is said in vain where the restore step has found it out.
    with Checkpointer(platform.root, security=platform.policy("trainer-writer", run=RUN, **both)) as ck:
        assert [each.step for each in ck.checkpoints()] == [2, 1]


def test_a_validator_reads_and_saves_nothing(platform: Platform) -> None:
    platform.grant("trainer-writer")
    platform.grant("validator-reader")
    trainer = platform.policy("trainer-writer", run=RUN, launch=1, save="profile:trainer-writer")
    with Checkpointer(platform.root, security=trainer) as ck:
        ck.save(1, state(1.0)).result(60)
    reader = platform.policy("validator-reader", run=RUN, save="profile:validator-reader")
    with Checkpointer(platform.root, security=reader) as ck:
        assert ck.restore(template()) is not None
        with pytest.raises(StrongroomError, match="validator-reader"):
            ck.save(2, state(2.0))
    store = open_root(platform.root, reader, Duty.RESTORE)
    assert verify(store, everything=True, guard=reader.guard).verdict == "whole"


def test_retention_is_the_retention_roles_and_nobody_elses(platform: Platform) -> None:
    platform.grant("trainer-writer")
    policy = platform.policy("trainer-writer", run=RUN, launch=1, save="profile:trainer-writer")
    with pytest.raises(ConfigError, match=r"may not delete any.*strongroom gc.*retention"):
        Checkpointer(platform.root, security=policy, keep=KeepLast(count=1))
    with pytest.raises(ConfigError, match=r"may not delete any"):
        Checkpointer(
            platform.folder / "fast",
            security=policy,
            replicate_to=[Tier(platform.root, keep=KeepLast(count=1))],
        )


def test_a_local_run_is_copied_to_a_bucket_that_it_may_only_create_in(
    platform: Platform, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    platform.grant("trainer-writer")
    platform.grant("validator-reader")
    both = {"save": "profile:trainer-writer", "restore": "profile:validator-reader"}
    fast = tmp_path / "fast"
    policy = platform.policy("trainer-writer", run=RUN, **both)
    with Checkpointer(fast, security=policy, replicate_to=[platform.root]) as ck:
        assert ck.restore(template()) is None
        for step in (1, 2):
            ck.save(step, state(float(step))).replicated(60)
    assert verify(platform.behind(), everything=True, guard=policy.guard).verdict == "whole"
    # A new machine.
    shutil.rmtree(fast)
    policy = platform.policy("trainer-writer", run=RUN, **both)
    with Checkpointer(fast, security=policy, replicate_to=[Tier(platform.root)]) as ck:
        restored = ck.restore(template())
        assert restored is not None
        assert restored.step == 2
        assert ck.save(3, state(3.0)).replicated(60).launch == 2


def test_a_local_run_may_be_trimmed_by_whoever_may_not_delete_in_the_bucket(
    platform: Platform, tmp_path: Path
) -> None:
    platform.grant("trainer-writer")
    platform.grant("validator-reader")
    policy = platform.policy(
        "trainer-writer", run=RUN, save="profile:trainer-writer", restore="profile:validator-reader"
    )
    fast = tmp_path / "fast"
    with Checkpointer(fast, security=policy, keep=KeepLast(count=1), replicate_to=[platform.root]) as ck:
        ck.restore(template())
        for step in (1, 2, 3):
            ck.save(step, state(float(step))).replicated(60)
            ck.wait()
    assert len(list(fast.glob("step-*"))) <= 2


def test_a_role_for_another_run_is_refused_by_the_server(platform: Platform) -> None:
    platform.grant("trainer-writer")
    policy = platform.policy("trainer-writer", run="run-b", launch=1, save="profile:trainer-writer")
    ck = Checkpointer(f"s3://{platform.bucket}/runs/run-b", security=policy)
    with pytest.raises(AccessDeniedError):
        ck.save(1, state(1.0))
    with contextlib.suppress(SaveError):
        ck.close()
