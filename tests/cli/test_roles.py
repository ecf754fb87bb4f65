"""``strongroom roles``: documents for review, what stands compared with them, and grants that two approve."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from strongroom import Checkpointer
from strongroom.errors import AccessDeniedError
from strongroom.roles import Duty, open_root
from strongroom_cli.roles_arguments import ROLE_NAMES
from strongroom_security import SecurityPolicy
from strongroom_security.roles import ROLES
from strongroom_security.roles.comparing import Answer
from strongroom_security.roles.definitions import LOG_ROLES
from strongroom_security.roles.looking import Looker
from strongroom_security.roles.rendering import render_all
from strongroom_security.roles.site import Site

Strongroom = Callable[..., Any]

KEY = "arn:aws:kms:eu-central-1:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab"
BUCKET = ("--bucket", "checkpoints")
ACCOUNT = ("--account", "111122223333")
PROVIDER = "arn:aws:iam::111122223333:oidc-provider/tokens.example"
TOKENS = (*BUCKET, *ACCOUNT, "--oidc-provider", PROVIDER, "--audience", "sts.amazonaws.com")
GRANT = ("roles", "grant", "grant.json", "--run", "demo", "--who", "ann", "--reason", "KMS is down")


@pytest.fixture(autouse=True)
def _keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two approvers' keys in the current folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("ann", "bob"):
        key = ec.generate_private_key(ec.SECP256R1())
        path = Path(f"{name}.pem")
        path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        path.chmod(0o600)
        public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        Path(f"{name}.pub").write_bytes(public)


def test_the_command_knows_the_roles() -> None:
    assert tuple(role.name for role in (*ROLES, *LOG_ROLES)) == ROLE_NAMES


# ----------------------------------------------------------------------------------------------------- render


def test_one_role_is_rendered_to_standard_output(strongroom: Strongroom) -> None:
    done = strongroom("roles", "render", "--role", "trainer-writer", *BUCKET, "--run", "a")
    assert (done.status, done.err) == (0, "")
    files = json.loads(done.out)
    assert set(files) == {
        "trainer-writer.identity.json",
        "trainer-writer.role.json",
        "trainer-writer.session.json",
    }
    assert "arn:aws:s3:::checkpoints/runs/a/*" in done.out
    assert strongroom("roles", "render", "--role", "trainer-writer", *BUCKET, "--run", "a").out == done.out


def test_all_documents_are_files_of_their_own_and_the_same_each_time(strongroom: Strongroom) -> None:
    ask = ("roles", "render", "--all", *BUCKET, "--kms-key", KEY, "--audit-bucket", "checkpoints-audit")
    done = strongroom(*ask, "--out", "one", "--transition", "90:GLACIER_IR")
    assert (done.status, done.err) == (0, "")
    assert strongroom(*ask, "--out", "two", "--transition", "90:GLACIER_IR", "--json").json["folder"] == "two"
    one, two = (
        {path.name: path.read_bytes() for path in Path(folder).iterdir()} for folder in ("one", "two")
    )
    assert one == two
    assert {"main.tf.json", "kms-key.policy.json", "audit-bucket.object-lock.json"} <= set(one)
    for data in one.values():
        json.loads(data)
    rendered = render_all(Site(bucket="checkpoints", kms_keys=(KEY,)))
    assert json.loads(one["bucket.policy.json"]) == rendered["bucket.policy.json"]


def test_each_role_is_taken_up_by_the_subject_that_is_given_for_it(strongroom: Strongroom) -> None:
    subject = "tokens.example:sub"

    def subjects(*arguments: str) -> dict[str, str]:
        files = json.loads(strongroom("roles", "render", *TOKENS, *arguments).out)
        trusts = {name.split(".")[0]: document for name, document in files.items() if ".trust." in name}
        del trusts["break-glass"]  # it is people who take it up
        return {
            name: document["Statement"][0]["Condition"]["StringEquals"][subject]
            for name, document in trusts.items()
        }

    two = ("--subject", "trainer-writer=job=7", "--subject", "validator-reader=ci")
    assert subjects("--all", *two) == {"trainer-writer": "job=7", "validator-reader": "ci"}
    alone = json.loads(strongroom("roles", "render", *TOKENS, "--role", "retention", "--subject", "a=b").out)
    said = alone["retention.trust.json"]["Statement"][0]["Condition"]["StringEquals"]
    assert said[subject] == "a=b"


def test_the_roles_of_the_log_are_rendered_by_name_too(strongroom: Strongroom) -> None:
    ask = ("roles", "render", "--role", "audit-sequencer")
    refused = strongroom(*ask, *BUCKET)
    assert refused.status == 2
    assert "give --audit-bucket" in refused.err
    files = json.loads(strongroom(*ask, *BUCKET, "--audit-bucket", "checkpoints-audit").out)
    assert set(files) == {"audit-sequencer.identity.json", "audit-sequencer.role.json"}
    log = ("--audit-bucket", "checkpoints-audit", "--subject", "audit-sequencer=cron")
    done = json.loads(strongroom(*ask, *TOKENS, *log).out)
    # It is taken up for no run, and so by no tag.
    (taken_up,) = done["audit-sequencer.trust.json"]["Statement"]
    assert taken_up["Condition"]["StringEquals"]["tokens.example:sub"] == "cron"


def test_retention_of_one_run_leaves_another_alone(strongroom: Strongroom, root: Path) -> None:
    Path("strongroom.toml").write_text('[role]\nname = "retention"\nrun = "another"\n')
    before = sorted(root.rglob("*"))
    for more in ((), ("--dry-run",)):
        done = strongroom("gc", root, "--keep-last", "1", *more, "--security", "strongroom.toml")
        assert done.status == 4
        assert "is of run demo, and the role retention is for run another" in done.err
    assert sorted(root.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "told"),
    (
        (("render", *BUCKET), "one of the arguments --role --all is required"),
        (("render", "--role", "root", *BUCKET), "invalid choice"),
        (("render", "--all"), "--bucket"),
        (("render", "--all", *BUCKET), "give --account"),
        (("render", "--all", *BUCKET, *ACCOUNT, "--run", "*"), "--run: '*' is not a run id"),
        (("render", "--all", *BUCKET, *ACCOUNT, "--prefix", "runs/*"), "--prefix: expected folders"),
        (("render", "--all", *BUCKET, *ACCOUNT, "--audience", "a"), "belong together"),
        (("render", "--all", *TOKENS, "--subject", "job"), "would take up every role"),
        (("render", "--all", *TOKENS, "--subject", "retention=a", "--subject", "publisher=a"), "of its own"),
        (("render", "--all", *TOKENS, "--subject", "retention=a", "--subject", "retention=b"), "has two"),
        (("render", "--all", *TOKENS, "--subject", "break-glass=a"), "by people"),
        (("check", *TOKENS, "--subject", "job"), "would take up every role"),
        (
            ("check", *TOKENS, "--role", "retention", "--role", "publisher", "--subject", "job"),
            "would take up every role",
        ),
        (("render", "--all", *BUCKET, *ACCOUNT, "--transition", "x:GLACIER"), "expected DAYS:CLASS"),
        (("render", "--all", *BUCKET, *ACCOUNT, "--transition", "9:TAPE"), "'TAPE' is none of"),
        (("render", "--all", *BUCKET, *ACCOUNT, "--out", "ann.pem"), "cannot be written"),
        (("grant", "g.json", "--run", "a", "--who", "x", "--reason", "y", "--hours", "25"), "from 1 to 24"),
        (("grant", "g.json", "--run", "*", "--who", "x", "--reason", "y"), "is not a run id"),
        (("grant", "ann.pem", "--run", "a", "--who", "x", "--reason", "y"), "cannot be made"),
        (("approve", "none.json", "--key", "file:ann.pem"), "cannot be read"),
    ),
)
def test_what_is_not_used_correctly_is_status_2(
    strongroom: Strongroom, arguments: tuple[str, ...], told: str
) -> None:
    done = strongroom("roles", *arguments)
    assert (done.status, done.out) == (2, "")
    assert told in done.err


# ------------------------------------------------------------------------------------------------------ check


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Answer]:
    """What AWS says: everything as it was rendered, with one role in the account."""
    site = Site(bucket="checkpoints", account="111122223333")
    files = render_all(site)
    said = {
        name.removesuffix(".json").replace(".", " "): Answer(value=document)
        for name, document in files.items()
        if name.startswith("bucket.")
    }
    for role in ROLES:
        said[f"role {role.name}"] = Answer()
    monkeypatch.setattr(Looker, "look", lambda *_: said)
    return said


def test_an_account_without_gaps_is_status_0(strongroom: Strongroom, answers: dict[str, Answer]) -> None:
    done = strongroom("roles", "check", *BUCKET, *ACCOUNT)
    assert (done.status, done.err) == (0, "")
    assert "0 gaps, 0 unknown, 7 as it should be" in done.out


def test_a_gap_is_status_1_and_says_what_to_do(strongroom: Strongroom, answers: dict[str, Answer]) -> None:
    answers["bucket versioning"] = Answer(value={})
    answers["bucket policy"] = Answer(unknown="AccessDenied")
    done = strongroom("roles", "check", *BUCKET, *ACCOUNT)
    assert done.status == 1
    assert "1 gap, 1 unknown, 5 as it should be" in done.out
    assert "bucket versioning: turn it on" in done.out
    said = strongroom("roles", "check", *BUCKET, *ACCOUNT, "--json")
    assert said.status == 1
    assert {each["what"]: each["verdict"] for each in said.json["findings"]}["bucket policy"] == "unknown"


def test_what_could_not_be_asked_is_status_4(strongroom: Strongroom, answers: dict[str, Answer]) -> None:
    answers["bucket policy"] = Answer(unknown="AccessDenied")
    assert strongroom("roles", "check", *BUCKET, *ACCOUNT).status == 4


def test_a_role_that_is_asked_for_and_not_there_is_a_gap(
    strongroom: Strongroom, answers: dict[str, Answer]
) -> None:
    done = strongroom("roles", "check", *BUCKET, *ACCOUNT, "--role", "retention")
    assert done.status == 1
    assert "there is no role strongroom-retention" in done.out


def test_an_account_that_is_out_of_reach_is_unknown(
    strongroom: Strongroom, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        for name, value in (
            ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
            ("AWS_ACCESS_KEY_ID", "x"),
            ("AWS_SECRET_ACCESS_KEY", "x"),
            ("AWS_CONFIG_FILE", "none"),
            ("AWS_SHARED_CREDENTIALS_FILE", "none"),
        ):
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("strongroom_security.roles.looking._TRIES", 1)
        done = strongroom("roles", "check", *BUCKET, *ACCOUNT, "--json")
    assert done.status == 4
    assert {each["verdict"] for each in done.json["findings"]} == {"unknown"}


# ----------------------------------------------------------------------------------------------------- grants


def test_a_grant_is_begun_approved_by_two_and_then_used(strongroom: Strongroom, root: Path) -> None:
    begun = strongroom(*GRANT, "--hours", "2", "--approver", "file:ann.pem")
    assert (begun.status, begun.err) == (0, "")
    assert "1 approval missing" in begun.out
    policy = Path("strongroom.toml")
    policy.write_text(
        '[role]\nname = "break-glass"\ngrant = "grant.json"\napprovers = ["file:ann.pub", "file:bob.pub"]\n'
    )
    refused = strongroom("ls", root, "--security", policy)
    assert refused.status == 2
    assert "has 1 of 2 approvers' signatures" in refused.err

    before = Path("grant.json").read_bytes()
    shown = strongroom("roles", "approve", "grant.json")
    assert "because: KMS is down" in shown.out
    assert Path("grant.json").read_bytes() == before
    approved = strongroom("roles", "approve", "grant.json", "--key", "file:bob.pem", "--json")
    assert approved.status == 0
    assert len(approved.json["signatures"]) == 2
    assert approved.json["not_after_ms"] - approved.json["not_before_ms"] == 2 * 3_600_000
    assert strongroom("ls", root, "--security", policy).status == 0
    assert strongroom("verify", root, "--security", policy).status == 0

    with Checkpointer("other", run_id="other") as checkpointer:
        checkpointer.save(1, {"weights": torch.zeros(2)}).result()
    other = strongroom("ls", "other", "--security", policy)
    assert other.status == 4
    assert "is of run other, and the role break-glass is for run demo; have another grant" in other.err


def test_a_grant_is_not_written_over_another(strongroom: Strongroom) -> None:
    assert strongroom(*GRANT).status == 0
    assert strongroom(*GRANT).status == 2


# --------------------------------------------------------------------------------------- every other command


@pytest.mark.parametrize(
    ("role", "command", "status"),
    (
        ("trainer-writer", ("ls",), 4),
        ("trainer-writer", ("verify",), 4),
        ("validator-reader", ("ls",), 0),
        ("validator-reader", ("show",), 0),
        ("validator-reader", ("verify",), 0),
        ("validator-reader", ("provenance",), 0),
        ("validator-reader", ("plan", "--ranks", "2"), 0),
        ("retention", ("ls",), 0),
        ("retention", ("verify",), 4),
        ("key-rotator", ("keys", "list"), 0),
        ("validator-reader", ("sign", "--key", "file:ann.pem", "--unsigned"), 4),
        ("recovery-reader-writer", ("sign", "--key", "file:ann.pem", "--unsigned"), 0),
    ),
)
def test_a_command_does_what_its_policys_role_may(
    strongroom: Strongroom, root: Path, role: str, command: tuple[str, ...], status: int
) -> None:
    Path("strongroom.toml").write_text(f'[role]\nname = "{role}"\n')
    count = 2 if command[0] == "keys" else 1
    done = strongroom(*command[:count], root, *command[count:], "--security", "strongroom.toml")
    assert done.status == status, done
    if status == 4 and command[0] != "verify":
        assert f"the role {role} may not" in done.err


def test_a_policys_role_is_what_a_root_is_opened_by(root: Path) -> None:
    Path("strongroom.toml").write_text('[role]\nname = "retention"\n')
    store = open_root(root, SecurityPolicy.load("strongroom.toml"), Duty.SAVE)
    with pytest.raises(AccessDeniedError):
        store.put("x", b"")
