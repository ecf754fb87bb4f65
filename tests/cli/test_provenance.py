"""What ``strongroom provenance`` tells: to people, to programs, and as SLSA and OpenLineage have it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch

from strongroom import Checkpointer, canonical
from strongroom.digest import sha256_of
from strongroom.manifest import MANIFEST_BOUNDS, Commit
from strongroom_security import oms

sys.path.append(str(Path(__file__).parent.parent / "security"))

from authorities import SIGNER_NAME, issue, issue_signer

Strongroom = Callable[..., Any]

DATA = {
    "version": "2026-10",
    "manifest_digest": "sha256:" + "ab" * 32,
    "uri": "s3://bucket/corpus",
    "cursor": {"shard": 3},
}
GIVEN = {
    "hyper_parameters": {"lr": 0.1, "layers": 2, "betas": (0.9, 0.99)},
    "data": DATA,
    "container_digest": "registry/image@sha256:" + "cd" * 32,
}


def save(root: Path, **options: Any) -> Path:
    with Checkpointer(
        root, run_id="demo", retention_class="gold", provenance=GIVEN, **options
    ) as checkpointer:
        for step in (1, 2):
            checkpointer.save(
                step, {"model": torch.nn.Linear(2, 2)}, metrics={"loss": 0.5}, tags=["pii", "audited"]
            )
    return root


@pytest.fixture(scope="module")
def told_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("provenance") / "run")


def test_people_are_told_what_was_said_and_what_was_gathered(strongroom: Strongroom, told_root: Path) -> None:
    done = strongroom("provenance", told_root)
    assert (done.status, done.err) == (0, "")
    for part in (
        "step 2 (", "of run demo", "class       gold", "tags        pii, audited", "parent      step 1 (",
        "told", "    lr: 0.1", "    version: '2026-10'", "gathered", "    user: ", "  architecture: 'sha256:",
        "metrics", "  loss: 0.5",
    ):  # fmt: skip
        assert part in done.out, part
    assert strongroom("provenance", told_root, 1).out.startswith("step 1 (")


def test_json_has_the_documented_members(strongroom: Strongroom, told_root: Path) -> None:
    done = strongroom("provenance", told_root, "--format", "json")
    found = done.json
    assert found == strongroom("provenance", told_root, "--json").json
    assert set(found) == {
        "checkpoint", "collected", "metrics", "producer", "provenance", "root", "run", "tags",
    }  # fmt: skip
    assert set(found["checkpoint"]) == {
        "attempt", "committed_at_ms", "folder", "launch", "manifest_digest", "parent", "retention_class",
        "step", "world_size",
    }  # fmt: skip
    assert found["provenance"]["hyper_parameters"] == {"lr": 0.1, "layers": 2, "betas": [0.9, 0.99]}
    assert found["collected"]["environment"]["torch"] == str(torch.__version__)
    assert found["metrics"] == {"loss": 0.5}


def test_a_checkpoint_of_which_nothing_was_gathered_is_told_all_the_same(
    strongroom: Strongroom, tmp_path: Path
) -> None:
    with Checkpointer(tmp_path / "run", collect_provenance=False) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(2)})
    assert "gathered  nothing" in strongroom("provenance", tmp_path / "run").out
    assert strongroom("provenance", tmp_path / "run", "--json").json["collected"] == {}
    for form in ("slsa", "openlineage"):
        assert strongroom("provenance", tmp_path / "run", "--format", form).status == 0


def test_what_is_not_there_or_not_used_correctly_has_its_status(
    strongroom: Strongroom, told_root: Path, tmp_path: Path
) -> None:
    assert strongroom("provenance", tmp_path).status == 3
    assert strongroom("provenance", told_root, 7).status == 3
    assert strongroom("provenance", told_root, "--format", "xml").status == 2
    assert strongroom("provenance", told_root, "--sign").status == 2
    done = strongroom("provenance", told_root, "--sign", "--format", "slsa")
    assert (done.status, done.out) == (2, "")
    assert "[sign]" in done.err


# --------------------------------------------------------------------------------------------------- SLSA


def dependencies(statement: Any) -> dict[str, Any]:
    return {item["name"]: item for item in statement["predicate"]["buildDefinition"]["resolvedDependencies"]}


@pytest.mark.parametrize("digest", ("sha256", "blake3"))
def test_a_slsa_statement_is_about_what_a_signature_is_about(
    strongroom: Strongroom, tmp_path: Path, digest: str
) -> None:
    root = save(tmp_path / "run", digest=digest)
    statement = strongroom("provenance", root, "--format", "slsa").json
    (folder,) = root.glob("step-000000000002-*/data")
    files = sorted(folder.iterdir()) if digest == "sha256" else [folder / "MANIFEST.json"]
    digests = b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)
    assert statement["subject"] == [
        {"name": "data", "digest": {"sha256": hashlib.sha256(digests).hexdigest()}}
    ]


def test_a_slsa_statement_has_what_the_specification_asks_for(
    strongroom: Strongroom, told_root: Path
) -> None:
    statement = strongroom("provenance", told_root, "--format", "slsa").json
    assert set(statement) == {"_type", "subject", "predicateType", "predicate"}
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    definition, details = statement["predicate"]["buildDefinition"], statement["predicate"]["runDetails"]
    assert definition["buildType"] == "urn:strongroom:training:v1"
    # No fraction, which readers may round differently; and no cursor, which is no parameter.
    assert definition["externalParameters"]["hyperParameters"] == {
        "lr": "0.1", "layers": 2, "betas": ["0.9", "0.99"],
    }  # fmt: skip
    assert "cursor" not in definition["externalParameters"]["data"]
    assert definition["internalParameters"]["worldSize"] == 1
    assert definition["internalParameters"]["retentionClass"] == "gold"
    found = dependencies(statement)
    assert found["data"]["digest"] == {"sha256": "ab" * 32}
    assert found["data"]["uri"] == "s3://bucket/corpus"
    assert found["data"]["annotations"]["cursor"] == {"shard": 3}
    assert found["container"]["digest"] == {"sha256": "cd" * 32}
    assert re.fullmatch("[0-9a-f]{64}", found["parent checkpoint"]["digest"]["sha256"])
    for item in (*found.values(), *details["byproducts"]):
        assert item.keys() & {"uri", "digest", "content"}, item
    assert details["builder"]["id"] == "urn:strongroom:builder:self"
    assert details["metadata"]["invocationId"] == "demo"
    for name in ("startedOn", "finishedOn"):
        assert datetime.fromisoformat(details["metadata"][name].replace("Z", "+00:00"))
    (manifest,) = details["byproducts"]
    assert manifest["annotations"]["metrics"] == {"loss": "0.5"}
    assert manifest["annotations"]["tags"] == ["pii", "audited"]


def test_a_platform_that_vouches_is_named(strongroom: Strongroom, told_root: Path) -> None:
    done = strongroom(
        "provenance", told_root, "--format", "slsa", "--builder", "https://ci.example.com/trainer"
    )
    assert done.json["predicate"]["runDetails"]["builder"]["id"] == "https://ci.example.com/trainer"


def test_a_signed_statement_verifies_with_the_policys_key(
    strongroom: Strongroom, told_root: Path, tmp_path: Path
) -> None:
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    (tmp_path / "signer.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    (tmp_path / "signer.pem").chmod(0o600)
    policy = tmp_path / "strongroom.toml"
    policy.write_text('[sign]\nkey = "file:signer.pem"\n\n[verify]\nrequire = false\n')
    done = strongroom("provenance", told_root, "--format", "slsa", "--sign", "--security", policy)
    assert done.status == 0, done.err
    envelope = done.json["dsseEnvelope"]
    payload = base64.b64decode(envelope["payload"])
    (signature,) = envelope["signatures"]
    kind = envelope["payloadType"].encode()
    message = b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)
    key.public_key().verify(base64.b64decode(signature["sig"]), message, ec.ECDSA(hashes.SHA256()))
    assert json.loads(payload) == strongroom("provenance", told_root, "--format", "slsa").json


def rewrite_commit(folder: Path, **changed: Any) -> None:
    """Another COMMIT, as whoever can write to the storage may put there."""
    commit = Commit.decode((folder / "COMMIT").read_bytes(), "COMMIT")
    (folder / "COMMIT").write_bytes(replace(commit, **changed).encode())


def test_when_it_was_finished_is_told_by_what_is_signed(strongroom: Strongroom, tmp_path: Path) -> None:
    root = save(tmp_path / "run")
    before = strongroom("provenance", root, "--format", "slsa").json
    (folder,) = root.glob("step-000000000002-*")
    rewrite_commit(folder, committed_at_ms=1_000)
    after = strongroom("provenance", root, "--format", "slsa").json
    assert after == before
    at_ms = json.loads((folder / "data" / "MANIFEST.json").read_bytes())["created_at_ms"]
    finished = datetime.fromisoformat(
        after["predicate"]["runDetails"]["metadata"]["finishedOn"][:-1] + "+00:00"
    )
    assert round(finished.timestamp() * 1000) == at_ms


def test_notes_in_a_manifest_are_within_the_subject(
    strongroom: Strongroom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    root = save(tmp_path / "run", digest="sha256")
    (folder,) = root.glob("step-000000000002-*")
    path = folder / "data" / "MANIFEST.json"
    members = canonical.decode(path.read_bytes(), "it", MANIFEST_BOUNDS)
    assert isinstance(members, dict)
    path.write_bytes(canonical.encode({**members, "x-note": "by another writer"}))
    rewrite_commit(folder, manifest=sha256_of(path.read_bytes()))
    assert strongroom("keys", "init", "signer.pem", "--kind", "sign-p256").status == 0
    signed = strongroom("sign", root, "--key", "file:signer.pem", "--unsigned", "--json")
    assert signed.status == 0, signed.err
    bundle = oms.decode_bundle((root / signed.json["file"]).read_bytes(), "it")
    subject = json.loads(bundle.envelope.payload)["subject"]
    statement = strongroom("provenance", root, "--format", "slsa").json
    assert statement["subject"][0]["digest"] == subject[0]["digest"]
    digests = b"".join(hashlib.sha256(each.read_bytes()).digest() for each in sorted(path.parent.iterdir()))
    assert subject[0]["digest"] == {"sha256": hashlib.sha256(digests).hexdigest()}


def test_under_a_threshold_nothing_is_told_until_enough_have_signed(
    strongroom: Strongroom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("alice", "bob"):
        assert strongroom("keys", "init", f"{name}.pem", "--kind", "sign-p256").status == 0
    Path("alice.toml").write_text('[sign]\nkey = "file:alice.pem"\n')
    verify = '[verify]\nkeys = ["file:alice.pub", "file:bob.pub"]\nthreshold = 2\n'
    for name in ("alice", "bob"):
        Path(f"{name}-of-both.toml").write_text(f'[sign]\nkey = "file:{name}.pem"\n{verify}')
    root = save(tmp_path / "run", security="alice.toml")
    forms = (["json"], ["openlineage"], ["slsa"], ["slsa", "--sign"])
    for form in forms:
        done = strongroom("provenance", root, "--security", "bob-of-both.toml", "--format", *form)
        assert (done.status, done.out) == (1, ""), form
        assert "2 of 2" in done.err
    assert strongroom("sign", root, "--key", "file:bob.pem").status == 0
    for form in forms:
        done = strongroom("provenance", root, "--security", "bob-of-both.toml", "--format", *form)
        assert done.status == 0, done.err
    # Each signs a statement of its own; both are of the same.
    bundles = [
        oms.decode_bundle(
            strongroom(
                "provenance", root, "--security", f"{name}-of-both.toml", "--format", "slsa", "--sign"
            ).out.encode(),
            "it",
        )
        for name in ("alice", "bob")
    ]
    assert bundles[0].envelope.payload == bundles[1].envelope.payload
    assert bundles[0].key_id != bundles[1].key_id


def test_a_statement_by_a_certified_key_carries_its_certificates(
    strongroom: Strongroom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    from strongroom_security.certificates import Authority

    monkeypatch.chdir(tmp_path)
    assert strongroom("keys", "init", "signer.pem", "--kind", "sign-p256").status == 0
    start = datetime.now(timezone.utc) - timedelta(days=1)
    authority = issue("root", start=start)
    key: Any = load_pem_private_key(Path("signer.pem").read_bytes(), None)
    Path("root.crt").write_bytes(authority.pem)
    Path("chain.pem").write_bytes(issue_signer(authority, key, start=start).pem)
    Path("certified.toml").write_text(
        '[sign]\nkey = "file:signer.pem"\ncertificate = "file:chain.pem"\n\n'
        f'[verify]\nauthorities = [{{roots = "root.crt", names = ["{SIGNER_NAME}"]}}]\n'
    )
    root = save(tmp_path / "run", security="certified.toml")
    for form in ("json", "openlineage", "slsa"):
        assert strongroom("provenance", root, "--security", "certified.toml", "--format", form).status == 0
    done = strongroom("provenance", root, "--security", "certified.toml", "--format", "slsa", "--sign")
    bundle = oms.decode_bundle(done.out.encode(), "it")
    public = Authority.read(Path("root.crt"), [SIGNER_NAME]).leaf(bundle.certificates, "it")
    assert public.verify(bundle.envelope.to_be_signed, bundle.envelope.signature)


# -------------------------------------------------------------------------------------------- OpenLineage


def facets(event: Any) -> Iterator[tuple[str, Any]]:
    yield from event["run"]["facets"].items()
    yield from event["job"]["facets"].items()
    for dataset in (*event["inputs"], *event["outputs"]):
        assert dataset["namespace"]
        assert dataset["name"]
        yield from dataset["facets"].items()


def test_an_openlineage_event_has_what_its_schema_requires(strongroom: Strongroom, told_root: Path) -> None:
    # The required members of openlineage.io/spec/2-0-2 and of the facets that are used.
    event = strongroom("provenance", told_root, "--format", "openlineage").json
    assert set(event) == {
        "eventType", "eventTime", "producer", "schemaURL", "run", "job", "inputs", "outputs",
    }  # fmt: skip
    assert event["eventType"] == "COMPLETE"
    assert event["schemaURL"] == "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent"
    assert datetime.fromisoformat(event["eventTime"].replace("Z", "+00:00"))
    assert str(uuid.UUID(event["run"]["runId"])) == event["run"]["runId"]
    assert (event["job"]["namespace"], event["job"]["name"]) == ("strongroom", "demo")
    for name, facet in facets(event):
        assert re.match(r"[a-z]+:", facet["_producer"]), name
        assert re.match(r"[a-z]+:", facet["_schemaURL"]), name
    parent = event["run"]["facets"]["parent"]
    assert str(uuid.UUID(parent["run"]["runId"])) == parent["run"]["runId"]
    assert event["run"]["facets"]["processing_engine"]["version"] == str(torch.__version__)
    assert [tag["key"] for tag in event["run"]["facets"]["tags"]["tags"]] == ["pii", "audited"]
    assert {"processingType", "integration"} <= set(event["job"]["facets"]["jobType"])


def test_an_openlineage_event_links_data_parent_and_checkpoint(
    strongroom: Strongroom, told_root: Path
) -> None:
    first, second = (
        strongroom("provenance", told_root, step, "--format", "openlineage").json for step in (1, 2)
    )
    data, parent = second["inputs"]
    assert (data["namespace"], data["name"]) == ("s3://bucket", "corpus")
    assert data["facets"]["version"]["datasetVersion"] == "2026-10"
    (before,) = first["outputs"]
    assert (parent["namespace"], parent["name"]) == (before["namespace"], before["name"])
    assert parent["facets"]["version"] == before["facets"]["version"]
    assert first["run"]["runId"] != second["run"]["runId"]
    assert first["run"]["facets"]["parent"] == second["run"]["facets"]["parent"]
    assert strongroom("provenance", told_root, "--format", "openlineage").json == second
