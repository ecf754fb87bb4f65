"""What ``strongroom provenance`` tells: to people, to programs, and as SLSA and OpenLineage have it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from strongroom import Checkpointer

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
