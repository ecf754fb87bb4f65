"""No way round the record opens a checkpoint: what a policy names is on record wherever it is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from strongroom import AuditError, Checkpointer, KeyServiceError
from strongroom.auditing import NO_AUDIT, Act, Action, Activity, Phase
from strongroom.catalog import Catalog
from strongroom.manifest import Commit
from strongroom.opened import open_checkpoint
from strongroom.pace import Pace
from strongroom.signing import NO_GUARD
from strongroom.stores.local import LocalStore
from strongroom.testing.auditing import RecordingAuditor
from strongroom_security import Seal, SecurityPolicy, Sign
from strongroom_security.cosigning import add_signature
from strongroom_security.fields import Context
from strongroom_security.recipients.file import FileKey, create_key_file
from strongroom_security.rotation import AddRecipient, SetRecipients, rotate
from strongroom_security.secret import Secret
from strongroom_security.signers.generating import generate_key
from strongroom_security.unwrapping import Calls


class Service:
    """A key service that wraps anew without showing the key, and tells who asked for what."""

    kind = "aws-kms"
    uri = "aws-kms:alias/run"

    def __init__(self, beneath: FileKey, on_asked: Callable[[str, Context], None]) -> None:
        self.id = beneath.id.replace("file-", "aws-kms-", 1)
        self._beneath = beneath
        self._on_asked = on_asked

    def wrap(self, key: Secret, context: Context, *, within_s: float) -> bytes:
        return self._beneath.wrap(key, context, within_s=within_s)

    def unwrap(self, wrapped: bytes, context: Context, *, within_s: float) -> Secret:
        self._on_asked("unwrap", context)
        return self._beneath.unwrap(wrapped, context, within_s=within_s)

    def rewrap(self, wrapped: bytes, context: Context, to: Any, *, within_s: float) -> bytes | None:
        if not isinstance(to, Service):
            return None
        self._on_asked("rewrap", context)
        key = self._beneath.unwrap(wrapped, context, within_s=within_s)
        return to.wrap(key, context, within_s=within_s)


class Scene:
    """A sealed run, keys of services that know what is on record when they are asked, and a record."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.auditor = RecordingAuditor()
        self.asked: list[str] = []
        self.old, self.new = self.service("old"), self.service("new")
        with Checkpointer(
            folder / "run", security=SecurityPolicy(seal=Seal(recipients=[self.old])), run_id="r"
        ) as ck:
            ck.save(1, {"t": torch.ones(3)})
        self.store = LocalStore(folder / "run")
        (self.commit,) = Catalog(self.store).history().commits.values()

    def service(self, name: str) -> Service:
        return Service(create_key_file(self.folder / f"{name}.key"), self._note)

    def _note(self, what: str, context: Context) -> None:
        self.asked.append(what)
        said = {(act.run, act.checkpoint) for act in self.intended}
        assert (context.run, self.commit.name) in said

    @property
    def intended(self) -> list[Act]:
        return [act for act in self.auditor.acts if act.phase is Phase.INTENDED]

    @property
    def commits(self) -> list[Commit]:
        return [self.commit]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def by_identity(scene: Scene) -> Any:
    seal = SecurityPolicy(
        auditor=scene.auditor, seal=Seal(recipients=[scene.new], identities=[scene.old])
    ).seal
    assert seal is not None
    # To a key that the service cannot wrap for: it has to unwrap.
    other = create_key_file(scene.folder / "other.key")
    return rotate(scene.store, scene.commits, AddRecipient(recipient=other), identities=seal.identities)


def by_recipient(scene: Scene) -> Any:
    seal = SecurityPolicy(auditor=scene.auditor, seal=Seal(recipients=[scene.old])).seal
    assert seal is not None
    other = create_key_file(scene.folder / "other.key")
    return rotate(scene.store, scene.commits, SetRecipients(recipients=(*seal.recipients, other)))


def by_rewrapping_at_the_service(scene: Scene) -> Any:
    seal = SecurityPolicy(auditor=scene.auditor, seal=Seal(recipients=[scene.old])).seal
    assert seal is not None
    return rotate(scene.store, scene.commits, AddRecipient(recipient=scene.new), identities=seal.openers)


def by_rewrapping_to_who_is_on_record(scene: Scene) -> Any:
    SecurityPolicy(auditor=scene.auditor, seal=Seal(recipients=[scene.new]))
    return rotate(scene.store, scene.commits, AddRecipient(recipient=scene.new), identities=[scene.old])


def by_verifying(scene: Scene) -> Any:
    seal = SecurityPolicy(auditor=scene.auditor, seal=Seal(recipients=[scene.old])).seal
    assert seal is not None
    return rotate(scene.store, scene.commits, SetRecipients(recipients=seal.recipients), verify=True)


def by_an_activity_of_nobody(scene: Scene) -> Any:
    seal = SecurityPolicy(auditor=scene.auditor, seal=Seal(recipients=[scene.old])).seal
    assert seal is not None
    with Activity(NO_AUDIT, Action.ROTATE) as activity:
        return rotate(
            scene.store,
            scene.commits,
            AddRecipient(recipient=scene.new),
            identities=seal.openers,
            activity=activity,
        )


def by_a_sealing_of_its_own(scene: Scene) -> Any:
    seal = SecurityPolicy(auditor=scene.auditor, seal=Seal(recipients=[scene.old])).seal
    assert seal is not None
    manifest = open_checkpoint(scene.store, scene.commit, NO_GUARD).manifest
    return seal.sealing().unlock(scene.store, scene.commit, manifest)


def by_asking_for_one_key(scene: Scene) -> Any:
    SecurityPolicy(auditor=scene.auditor, seal=Seal(recipients=[scene.old]))
    context = Context.of(scene.commit.run, scene.commit.name)
    wrapped = scene.old.wrap(Secret.draw(32), context, within_s=30)
    return Calls(Pace(None), 30).unwrap(scene.old, wrapped, context)


WAYS = [
    (by_identity, "unwrap"),
    (by_recipient, "unwrap"),
    (by_rewrapping_at_the_service, "rewrap"),
    (by_rewrapping_to_who_is_on_record, "rewrap"),
    (by_verifying, "unwrap"),
    (by_an_activity_of_nobody, "rewrap"),
    (by_a_sealing_of_its_own, "unwrap"),
    (by_asking_for_one_key, "unwrap"),
]


@pytest.mark.parametrize(("way", "how"), WAYS, ids=lambda each: getattr(each, "__name__", None))
def test_a_keeper_is_asked_only_after_that_is_on_record(
    way: Callable[[Scene], Any], how: str, scene: Scene
) -> None:
    outcome = way(scene)
    assert how in scene.asked
    assert getattr(outcome, "failed", ()) == ()
    assert len(scene.intended) == 1
    assert scene.auditor.told[-1][1:] == ("finished", "success")


@pytest.mark.parametrize(("way", "how"), WAYS, ids=lambda each: getattr(each, "__name__", None))
def test_no_keeper_is_asked_where_it_cannot_be_put_on_record(
    way: Callable[[Scene], Any], how: str, scene: Scene
) -> None:
    scene.auditor.refuses = True
    with pytest.raises(AuditError):
        way(scene)
    assert scene.asked == []
    assert scene.auditor.told[-1][1:] == ("finished", "denied")


def test_a_rotation_by_itself_is_on_record_with_what_became_of_each_checkpoint(scene: Scene) -> None:
    by_rewrapping_at_the_service(scene)
    assert scene.auditor.told == [
        ("recipients", "intended", "unknown"),
        ("recipients", "finished", "success"),
        ("recipients", "finished", "success"),
    ]
    assert {act.root for act in scene.auditor.acts} == {scene.store.uri}
    scene.auditor.acts.clear()
    # Whoever it is left to cannot be opened for by what is here.
    other = create_key_file(scene.folder / "other.key")
    change = SetRecipients(recipients=(other,), new_checkpoint_key=True)
    SecurityPolicy(auditor=scene.auditor, seal=Seal(recipients=[other]))
    assert len(rotate(scene.store, scene.commits, change).failed) == 1
    assert scene.auditor.told == [
        ("rotate", "intended", "unknown"),
        ("rotate", "finished", "denied"),
        ("rotate", "finished", "failure"),
    ]


def test_the_trust_of_a_policy_brings_its_record_along(scene: Scene) -> None:
    generate_key(scene.folder / "signer.pem")
    policy = SecurityPolicy(auditor=scene.auditor, sign=Sign(key=f"file:{scene.folder / 'signer.pem'}"))
    change = AddRecipient(recipient=scene.new)
    report = rotate(scene.store, scene.commits, change, identities=[scene.old], trust=policy.guard.trust)
    assert len(report.failed) == 1  # nobody has signed it
    assert scene.auditor.told[0] == ("recipients", "intended", "unknown")
    assert scene.asked == []


def test_what_a_policy_made_anew_from_the_same_parts_has_put_on_record_is_not_said_twice(
    scene: Scene,
) -> None:
    seal = Seal(recipients=[scene.old])
    first, second = RecordingAuditor(), scene.auditor
    policies = [SecurityPolicy(auditor=second, seal=seal), SecurityPolicy(auditor=first, seal=seal)]
    assert Checkpointer(scene.folder / "run", security=policies[0]).restore() is not None
    assert first.acts == []


def test_keys_of_a_policy_without_a_record_are_asked_as_ever(scene: Scene) -> None:
    manifest = open_checkpoint(scene.store, scene.commit, NO_GUARD).manifest
    with pytest.raises(KeyServiceError):  # the service of this scene complains
        Seal(recipients=[scene.old]).sealing().unlock(scene.store, scene.commit, manifest)
    assert scene.asked == ["unwrap"]
    assert scene.auditor.acts == []


# ------------------------------------------------------------------------------------------- signatures


@pytest.mark.parametrize("is_sealed", (True, False))
def test_a_signature_is_added_on_record_and_nothing_is_read_without(is_sealed: bool, tmp_path: Path) -> None:
    auditor = RecordingAuditor()
    generate_key(tmp_path / "signer.pem")
    kek = create_key_file(tmp_path / "kek.key")
    policy = SecurityPolicy(
        auditor=auditor,
        seal=Seal(recipients=[kek]) if is_sealed else None,
        sign=Sign(key=f"file:{tmp_path / 'signer.pem'}"),
    )
    with Checkpointer(tmp_path / "run", security=policy, run_id="r") as checkpointer:
        checkpointer.save(1, {"t": torch.ones(3)})
    store = LocalStore(tmp_path / "run")
    (commit,) = Catalog(store).history().commits.values()
    assert policy.sign is not None

    def add() -> None:
        add_signature(store, commit, policy.sign.signer, within_s=30, sealing=policy.sealing)  # type: ignore[union-attr]

    auditor.acts.clear()
    auditor.refuses = True
    with pytest.raises(AuditError):
        add()
    assert auditor.told == [("sign", "finished", "denied")]
    auditor.refuses = False
    auditor.acts.clear()
    add()
    told = [each for each in auditor.told if each[0] == "sign"]
    assert told == [("sign", "intended", "unknown"), ("sign", "finished", "success")]
    assert auditor.told[0] == told[0]
    # As a part of something that has said so, it says nothing more.
    auditor.acts.clear()
    with Activity(auditor, Action.SIGN, root=store.uri) as activity:
        activity.intend("r", commit.name)
        add()
    assert len(auditor.of(Action.SIGN)) == 2
