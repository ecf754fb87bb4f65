"""Who does it: what a process knows of itself, by the words of the system and of STS."""

from __future__ import annotations

import pwd
import socket
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from recorders import act
from s3_servers import S3Server, moto_s3

from strongroom.auditing import Action
from strongroom.errors import AccessDeniedError
from strongroom.roles import Duty
from strongroom_security.auditlog.recording.actors import Actors, address_of_this_host, job_of, rank_of

__all__ = ["moto_s3"]

SAVE = replace(act(1, action=Action.SAVE), root="s3://checkpoints/runs/run-a")
RESTORE = replace(SAVE, action=Action.RESTORE)
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": "train",
    "SLURM_JOB_NODELIST": "node-[1-999]",
    "SLURM_PROCID": "7",
    "SECRET_TOKEN": "x",
}


def test_the_job_is_told_by_its_ids_and_by_no_other_variable() -> None:
    assert job_of(SLURM) == {"slurm.SLURM_JOB_ID": "4711", "slurm.SLURM_JOB_NAME": "train"}
    assert job_of({"NAMESPACE": "x"}) == {}


@pytest.mark.parametrize(
    ("environment", "rank"),
    (
        ({"RANK": "3", "SLURM_PROCID": "7"}, 3),
        (SLURM, 7),
        ({"RANK": "all"}, None),
        ({}, None),
    ),
)
def test_the_rank_is_as_launchers_set_it(environment: dict[str, str], rank: int | None) -> None:
    assert rank_of(environment) == rank


def test_the_address_is_one_of_this_host() -> None:
    address = address_of_this_host()
    if address is None:
        pytest.skip("this machine has no route to anywhere")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((address, 0))


def test_a_directory_of_users_that_is_slow_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    is_free = threading.Event()
    find = pwd.getpwuid

    def slowly(uid: int) -> Any:
        is_free.wait(20)
        return find(uid)

    monkeypatch.setattr("strongroom_security.auditlog.recording.actors.pwd.getpwuid", slowly)
    began = time.monotonic()
    actors = Actors(role=None, session_of=lambda _: None, asks_aws=False, environment={})
    assert time.monotonic() - began < 10
    assert actors.of(SAVE).user == actors.of(SAVE).uid
    is_free.set()


def test_whose_credentials_they_are_is_asked_of_sts(
    moto_s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**moto_s3.environment, "AWS_ENDPOINT_URL": moto_s3.endpoint_url}.items():
        monkeypatch.setenv(name, value)
    actors = Actors(role="trainer-writer", session_of=lambda _: None, asks_aws=False, environment={})
    actors.wait_for_identity(SAVE, 20)
    assert str(actors.of(SAVE).identity).startswith("arn:aws:sts::")
    assert actors.of(SAVE).role == "trainer-writer"


def test_each_duty_goes_by_its_own_and_those_let_go_of_are_no_error(
    moto_s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**moto_s3.environment, "AWS_ENDPOINT_URL": moto_s3.endpoint_url}.items():
        monkeypatch.setenv(name, value)

    def session_of(duty: Duty) -> Any:
        if duty is Duty.RESTORE:
            raise AccessDeniedError("they were let go of")
        return None

    actors = Actors(role=None, session_of=session_of, asks_aws=True, environment={})
    for each in (RESTORE, SAVE):
        actors.wait_for_identity(each, 20)
    assert actors.of(RESTORE).identity is None
    assert actors.of(SAVE).identity is not None


def test_an_sts_that_is_out_of_reach_leaves_the_identity_out(
    absent_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{absent_port}")
    actors = Actors(role=None, session_of=lambda _: None, asks_aws=True, environment={})
    actors.wait_for_identity(SAVE, 20)
    assert actors.of(SAVE).identity is None


def test_without_a_key_or_a_bucket_of_aws_nobody_is_asked() -> None:
    asked: list[Duty] = []

    def session_of(duty: Duty) -> Any:
        asked.append(duty)
        raise AccessDeniedError("none here")

    actors = Actors(role=None, session_of=session_of, asks_aws=False, environment={})
    actors.wait_for_identity(act(1), 20)
    # A bucket on a server of one's own is none of AWS's, unless something says where its STS is.
    own = {"AWS_ENDPOINT_URL_S3": "http://ceph.example"}
    actors = Actors(role=None, session_of=session_of, asks_aws=True, environment=own)
    actors.wait_for_identity(SAVE, 20)
    assert actors.of(SAVE).identity is None
    assert asked == []


def test_no_credentials_are_taken_up_for_what_nobody_does() -> None:
    asked: list[Duty] = []

    def session_of(duty: Duty) -> Any:
        asked.append(duty)
        raise AccessDeniedError("none here")

    actors = Actors(role=None, session_of=session_of, asks_aws=True, environment={})
    assert asked == []
    actors.wait_for_identity(SAVE, 20)
    actors.refresh()
    assert asked == [Duty.SAVE]


@pytest.fixture
def absent_port() -> Any:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]
