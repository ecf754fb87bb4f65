"""The independent command verifies every kind of checkpoint, and refuses each that was tampered with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import torch
from authorities import SIGNER_NAME, Issued, MemorySigner, issue, issue_signer
from independent import ModelSigning

from strongroom import Checkpointer
from strongroom.catalog import Catalog
from strongroom.errors import IntegrityError, NoWholeCheckpointError
from strongroom.stores.local import LocalStore
from strongroom.verify import verify
from strongroom_security import Seal, SecurityPolicy, Sign, Verify
from strongroom_security.certificates import Authority
from strongroom_security.cosigning import add_signature
from strongroom_security.recipients.file import create_key_file
from strongroom_security.signers.base import Signer


@pytest.fixture
def key(tmp_path: Path) -> MemorySigner:
    """A key, the halves of which are beside the run: ``signer.pem``, ``signer.pub``."""
    signer = MemorySigner()
    (tmp_path / "signer.pem").write_bytes(signer.private_pem)
    (tmp_path / "signer.pub").write_bytes(signer.public_key.pem)
    return signer


def save(
    root: Path, signer: Signer, *, digest: str = "sha256", sealed: bool = False, scatter: int | None = None
) -> Path:
    """One checkpoint of a signed run; its folder."""
    seal = None
    if sealed:
        create_key_file(root.parent / "kek.key")
        seal = Seal(recipients=["file:kek.key"], base=root.parent)
    policy = SecurityPolicy(seal=seal, sign=Sign(key=signer), digest=digest)  # type: ignore[arg-type]
    with Checkpointer(root, security=policy, scatter=scatter) as ck:
        ck.save(7, {"model": torch.nn.Linear(300, 300), "extra": {"epoch": 1}}).result(60)
    (folder,) = root.glob("step-*")
    return folder


EVERY_FILE = "--no-ignore-git-paths"
"""By itself the command passes over ``.git`` and its like, which somebody could plant."""


def arguments(folder: Path, signature: str = "signature.json", *flags: str) -> list[str]:
    """What the pages tell an auditor to type."""
    public = folder.parent.parent / "signer.pub"
    named = ["--signature", str(folder / signature), "--public_key", str(public)]
    return [str(folder / "data"), EVERY_FILE, *named, *flags]


@pytest.mark.parametrize("sealed", (False, True), ids=("plain", "sealed"))
def test_every_file_of_a_checkpoint_is_verified(
    sealed: bool, tmp_path: Path, key: MemorySigner, model_signing: ModelSigning
) -> None:
    folder = save(tmp_path / "run", key, sealed=sealed)
    assert model_signing.accepts("key", *arguments(folder))


def test_files_in_folders_are_verified_and_so_is_where_they_are(
    tmp_path: Path, key: MemorySigner, model_signing: ModelSigning
) -> None:
    folder = save(tmp_path / "run", key, scatter=16)
    (shard,) = folder.glob("data/*/00000-00.safetensors")
    assert model_signing.accepts("key", *arguments(folder))
    shard.rename(folder / "data" / shard.name)
    assert not model_signing.accepts("key", *arguments(folder))


@pytest.mark.parametrize("sealed", (False, True), ids=("plain", "sealed"))
def test_with_blake3_the_manifest_is_verified(
    sealed: bool, tmp_path: Path, key: MemorySigner, model_signing: ModelSigning
) -> None:
    folder = save(tmp_path / "run", key, digest="blake3", sealed=sealed)
    flags = "--ignore_unsigned_files"
    assert model_signing.accepts("key", *arguments(folder, "signature.json", flags))
    assert not model_signing.accepts("key", *arguments(folder))
    manifest = folder / "data/MANIFEST.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"step":7', b'"step":8'))
    assert not model_signing.accepts("key", *arguments(folder, "signature.json", flags))


def flip(data: Path) -> None:
    path = data / "00000-00.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def add(data: Path) -> None:
    (data / "00009-00.safetensors").write_bytes(b"more")


def remove(data: Path) -> None:
    (data / "provenance.json").unlink()


def rename(data: Path) -> None:
    (data / "00000-00.safetensors").rename(data / "00000-77.safetensors")


def edit_manifest(data: Path) -> None:
    path = data / "MANIFEST.json"
    path.write_bytes(path.read_bytes().replace(b'"step":7', b'"step":8'))


@pytest.mark.parametrize("tamper", (flip, add, remove, rename, edit_manifest))
def test_each_tampering_is_refused_by_both(
    tamper: Callable[[Path], None], tmp_path: Path, key: MemorySigner, model_signing: ModelSigning
) -> None:
    root = tmp_path / "run"
    folder = save(root, key)
    tamper(folder / "data")
    assert not model_signing.accepts("key", *arguments(folder))
    if tamper is add:
        return  # ours reads what is listed; `strongroom verify` tells of what is not
    policy = SecurityPolicy(verify=Verify(keys=[key.public_key]))
    with Checkpointer(root, security=policy) as ck, pytest.raises(IntegrityError):
        ck.restore(step=7)


def unexpected(root: Path) -> list[str]:
    """What ours tells of that has no place in the root's newest checkpoint."""
    return [problem.key for problem in verify(LocalStore(root)).problems if problem.kind == "unexpected"]


@pytest.mark.parametrize("planted", (".gitignore", ".gitattributes", ".git/config", ".github/more"))
def test_what_is_planted_under_a_name_of_gits_is_refused_with_the_flag_of_the_pages(
    planted: str, tmp_path: Path, key: MemorySigner, model_signing: ModelSigning
) -> None:
    folder = save(tmp_path / "run", key)
    place = folder / "data" / planted
    place.parent.mkdir(exist_ok=True)
    place.write_text("planted")
    given = arguments(folder)
    assert not model_signing.accepts("key", *given)
    # This is why the flag is printed: without it the command says that all is well.
    assert model_signing.accepts("key", *(each for each in given if each != EVERY_FILE))
    (told,) = unexpected(tmp_path / "run")
    assert told.startswith(f"{folder.name}/data/.git")


def test_an_empty_folder_is_told_by_ours_alone(
    tmp_path: Path, key: MemorySigner, model_signing: ModelSigning
) -> None:
    folder = save(tmp_path / "run", key)
    (folder / "data" / "more").mkdir()
    assert model_signing.accepts("key", *arguments(folder))
    assert unexpected(tmp_path / "run") == [f"{folder.name}/data/more/"]


def test_a_foreign_key_is_refused(tmp_path: Path, key: MemorySigner, model_signing: ModelSigning) -> None:
    folder = save(tmp_path / "run", key)
    (tmp_path / "signer.pub").write_bytes(MemorySigner().public_key.pem)
    assert not model_signing.accepts("key", *arguments(folder))


def test_an_edited_payload_is_refused(tmp_path: Path, key: MemorySigner, model_signing: ModelSigning) -> None:
    folder = save(tmp_path / "run", key)
    path = folder / "signature.json"
    bundle = json.loads(path.read_bytes())
    payload = bundle["dsseEnvelope"]["payload"]
    place = len(payload) // 2
    other = "A" if payload[place] != "A" else "B"
    bundle["dsseEnvelope"]["payload"] = payload[:place] + other + payload[place + 1 :]
    path.write_text(json.dumps(bundle))
    assert not model_signing.accepts("key", *arguments(folder))


def test_a_signature_that_was_added_is_verified_too(
    tmp_path: Path, key: MemorySigner, model_signing: ModelSigning
) -> None:
    root = tmp_path / "run"
    folder = save(root, key)
    other = MemorySigner()
    store = LocalStore(root)
    (commit,) = Catalog(store).history().commits.values()
    added = add_signature(store, commit, other, within_s=30)
    (tmp_path / "signer.pub").write_bytes(other.public_key.pem)
    assert model_signing.accepts("key", *arguments(folder, f"signatures/{added.key_id}.json"))


def test_a_certificates_checkpoint_is_verified_by_its_authority(
    tmp_path: Path, model_signing: ModelSigning
) -> None:
    root: Issued = issue("root")
    yesterday = datetime.now(timezone.utc) - timedelta(days=1)
    signer = MemorySigner()
    signer.certificates = (issue_signer(root, signer.private, start=yesterday).der,)
    folder = save(tmp_path / "run", signer)
    (tmp_path / "ca.pem").write_bytes(root.pem)
    chain = ["--certificate_chain", str(tmp_path / "ca.pem")]
    signature = ["--signature", str(folder / "signature.json")]
    assert model_signing.accepts("certificate", str(folder / "data"), EVERY_FILE, *signature, *chain)
    policy = SecurityPolicy(
        verify=Verify(authorities=[Authority(roots=(root.certificate,), names=(SIGNER_NAME,), uri="ca.pem")])
    )
    with Checkpointer(tmp_path / "run", security=policy) as ck:
        restored = ck.restore()
        assert restored is not None
        assert restored.step == 7


@pytest.mark.parametrize("digest", ("sha256", "blake3"))
def test_a_bundle_that_the_command_made_is_accepted_here(
    digest: str, tmp_path: Path, key: MemorySigner, model_signing: ModelSigning
) -> None:
    root = tmp_path / "run"
    with Checkpointer(root, security=SecurityPolicy(digest=digest)) as ck:  # type: ignore[arg-type]
        ck.save(7, {"model": torch.nn.Linear(30, 30)}).result(60)
    (folder,) = root.glob("step-*")
    policy = SecurityPolicy(verify=Verify(keys=[key.public_key]))
    with Checkpointer(root, security=policy) as ck, pytest.raises(NoWholeCheckpointError):
        ck.restore()
    (folder / "signatures").mkdir()
    place = folder / "signatures" / f"{key.public_key.id}.json"
    model_signing.sign(
        "key", str(folder / "data"), "--signature", str(place), "--private_key", str(tmp_path / "signer.pem")
    )
    with Checkpointer(root, security=policy) as ck:
        restored = ck.restore()
        assert restored is not None
        assert restored.step == 7
    # And not for other bytes than it was made for.
    shutil.copy(folder / "data/state.json", folder / "data/MANIFEST.json")
    with Checkpointer(root, security=policy) as ck, pytest.raises(IntegrityError):
        ck.restore(step=7)
