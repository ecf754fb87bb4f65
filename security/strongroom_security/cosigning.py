"""Adding a signature to a committed checkpoint: ``signatures/<key id>.json``, beside the writer's own.

For thresholds, and for what was saved before a run was signed. It owns what a signer must have seen first:
every file, against what pins it. Nothing that stands is changed, so that ``COMMIT`` holds as before.
"""

from __future__ import annotations

from dataclasses import dataclass

from strongroom import layout
from strongroom.auditing import Action, Activity, accepted_operation
from strongroom.digest import sha256_of
from strongroom.errors import IntegrityError, UntrustedError
from strongroom.manifest import MANIFEST_BOUNDS, Commit, Manifest
from strongroom.sealing import Sealing
from strongroom.signing import MAX_SIGNATURE_BYTES, Guard
from strongroom.stores.base import Store
from strongroom.verify import OnProgress, verify_checkpoint
from strongroom_security import dsse, oms
from strongroom_security.intents import auditor_of
from strongroom_security.signers.base import Signer
from strongroom_security.signing import resources_of
from strongroom_security.trust import ManifestTrust

__all__ = ["Added", "add_signature"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """What became of it.

    Attributes:
        key: where the signature stands in the store.
        key_id: of the key that signed.
        is_new: whether it was added now; False: that key's stood there before, and holds.
        missing: what the policy still asks for, in words; None: nothing, or there is no policy.
    """

    key: str
    key_id: str
    is_new: bool
    missing: str | None


def add_signature(
    store: Store,
    commit: Commit,
    signer: Signer,
    *,
    within_s: float,
    sealing: Sealing | None = None,
    trust: ManifestTrust | None = None,
    is_unsigned: bool = False,
    on_progress: OnProgress | None = None,
) -> Added:
    """Verify a checkpoint by its digests, and sign it.

    Args:
        signer: whose signature is added.
        within_s: seconds that it may take.
        sealing: opens a sealed checkpoint, which is then verified segment by segment too.
        trust: who judges it: at least one signature that it knows has to hold already. It also says what is
            missing afterwards.
        is_unsigned: the signer vouches alone: nobody whom ``trust`` knows need have signed before.

    What a policy with a record names (its sealing, its trust, its signer) is used on record: the checkpoint
    is read only once it stands there that it is about to be, by this or by what this is a part of.

    Raises:
        AuditError: it could not be put on record first, and was not read.
        IntegrityError: it is damaged; or a signature that stands at this key's place is another's or wrong;
            or, as `UntrustedError`, nobody whom the policy trusts has signed it. No key is asked for then.
        KeyServiceError, NoKeyError: the signer's.
        StoreError: the store could not be asked.
    """
    auditor = auditor_of(sealing, trust, signer)
    if accepted_operation(auditor, commit.run, commit.name) is not None:
        return _added(store, commit, signer, within_s, sealing, trust, is_unsigned, on_progress)
    with Activity(auditor, Action.SIGN, root=store.uri, run=commit.run, checkpoint=commit.name) as activity:
        activity.intend(commit.run, commit.name)
        added = _added(store, commit, signer, within_s, sealing, trust, is_unsigned, on_progress)
        activity.note(signer=added.key_id, is_new=added.is_new)
        return added


def _added(
    store: Store,
    commit: Commit,
    signer: Signer,
    within_s: float,
    sealing: Sealing | None,
    trust: ManifestTrust | None,
    is_unsigned: bool,
    on_progress: OnProgress | None,
) -> Added:
    data = store.read(layout.data_key(commit.name, layout.MANIFEST), limit_bytes=MANIFEST_BOUNDS.length_bytes)
    if not sha256_of(data).matches(commit.manifest):
        raise IntegrityError(
            f"the manifest of {commit.name} is not the one that COMMIT pins; nothing is signed"
        )
    if trust is not None and not trust.standing(store, commit, data) and not is_unsigned:
        raise UntrustedError(
            f"nobody whom the policy trusts has signed {commit.name}: whoever can write to the storage may "
            "have made it, and your signature would be the first to vouch for it. If you know that it is "
            "right, say so (--unsigned)"
        )
    report = verify_checkpoint(store, commit.name, guard=Guard(sealing=sealing), on_progress=on_progress)
    if report.problems:
        first = report.problems[0]
        raise IntegrityError(
            f"{commit.name} is not signed, because it is not whole: {first.key}: {first.message}"
        )
    files = Manifest.decode(data, f"{layout.MANIFEST} of {commit.name}").files
    payload = oms.statement(resources_of(data, files))
    key_id = signer.public_key.id
    key = layout.further_signature_key(commit.name, key_id)
    is_new = store.put_if_absent(key, oms.sign_payload(payload, signer, within_s=within_s))
    if not is_new:
        _check_stands(store, key, signer, payload)
    else:
        store.make_durable(commit.name.folder)
    return Added(key=key, key_id=key_id, is_new=is_new, missing=_missing(store, commit, data, trust))


def _check_stands(store: Store, key: str, signer: Signer, payload: bytes) -> None:
    """Raise IntegrityError where what stands at a key's place is not its signature over the same."""
    bundle = oms.decode_bundle(store.read(key, limit_bytes=MAX_SIGNATURE_BYTES), key)
    envelope = bundle.envelope
    holds = signer.public_key.verify(dsse.pae(envelope.payload_type, envelope.payload), envelope.signature)
    if not holds or envelope.payload != payload:
        raise IntegrityError(
            f"{key} stands already, and is not that key's signature over this checkpoint: whoever can write "
            "to the storage put it there. Remove it, and sign again"
        )


def _missing(store: Store, commit: Commit, manifest: bytes, trust: ManifestTrust | None) -> str | None:
    if trust is None:
        return None
    try:
        trust.judge(store, commit, manifest)
    except UntrustedError as error:
        return str(error)
    return None
