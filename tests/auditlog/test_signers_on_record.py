"""Whose key signed what was saved, and whose signatures were verified of what was read, stands in the log."""

from __future__ import annotations

from pathlib import Path

import torch

from strongroom import Checkpointer
from strongroom.auditing import Action, Phase
from strongroom.stores.open import open_store
from strongroom.testing.auditing import RecordingAuditor
from strongroom.verify import verify
from strongroom_security import SecurityPolicy, Sign
from strongroom_security.signers.file import FileSigner
from strongroom_security.signers.generating import generate_key


def test_a_save_a_restore_and_a_verification_say_whose_signature_it_was(tmp_path: Path) -> None:
    generate_key(tmp_path / "signer.pem")
    signer = FileSigner.read(tmp_path / "signer.pem", uri="file:signer.pem")
    auditor = RecordingAuditor()
    policy = SecurityPolicy(sign=Sign(key=signer), auditor=auditor)
    with Checkpointer(tmp_path / "run", security=policy, collect_provenance=False) as checkpointer:
        checkpointer.save(1, {"x": torch.ones(2)}).result()
        assert checkpointer.restore() is not None
    assert verify(open_store(tmp_path / "run"), guard=policy.guard).verdict == "whole"

    def signers(action: Action) -> set[object]:
        ended = [act for act in auditor.acts if act.action is action and act.phase is Phase.FINISHED]
        return {act.details["signer"] for act in ended if "signer" in act.details}

    whole = signer.public_key.id
    assert signers(Action.SAVE) == {whole[:16]}
    assert signers(Action.RESTORE) == {whole}
    assert signers(Action.VERIFY) == {whole}
