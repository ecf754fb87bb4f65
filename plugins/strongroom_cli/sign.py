"""``strongroom sign``: verifies a committed checkpoint, and adds a signature to it."""

from __future__ import annotations

import argparse
from pathlib import Path

from strongroom.errors import ConfigError
from strongroom.roles import Duty
from strongroom.verify import Progress
from strongroom_cli.auditing import open_store_of
from strongroom_cli.console import Bar, line, new_console, print_json
from strongroom_cli.standing import read_history, run_of
from strongroom_security import SecurityPolicy, Sign
from strongroom_security.cosigning import add_signature
from strongroom_security.members import TIMEOUT_S
from strongroom_security.trust import ManifestTrust

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Carry the command out; the exit status."""
    guard = options.guard
    sign = _sign(options, options.policy)
    store = open_store_of(options, Duty.SAVE)
    history = read_history(store, guard)
    options.activity.about(run=run_of(history))
    name = history.at_step(options.step) if options.step is not None else history.newest()
    options.activity.about(checkpoint=name)
    commit = history.whole(name)
    options.activity.intend(commit.run, name)
    with Bar("verifying") as bar:

        def show(progress: Progress) -> None:
            bar.show(progress.done_bytes, progress.total_bytes)

        added = add_signature(
            store,
            commit,
            sign.signer,
            within_s=sign.timeout_s,
            sealing=guard.sealing,
            trust=guard.trust if isinstance(guard.trust, ManifestTrust) else None,
            is_unsigned=options.unsigned,
            on_progress=show,
        )
    options.activity.note(signer=added.key_id, is_new=added.is_new)
    if options.json:
        print_json(
            {
                "file": added.key,
                "is_new": added.is_new,
                "key": added.key_id,
                "missing": added.missing,
                "root": store.uri,
                "step": name.step,
            }
        )
        return 0
    console = new_console()
    did = "signed" if added.is_new else "had been signed already"
    console.print(line(f"{name} {did} by ", (added.key_id, "bold")), soft_wrap=True)
    if added.missing is not None:
        console.print(line(("the policy asks for more: ", "yellow"), added.missing), soft_wrap=True)
    return 0


def _sign(options: argparse.Namespace, policy: object) -> Sign:
    if options.key is not None:
        return Sign(
            key=options.key,
            certificate=options.certificate,
            passphrase=options.passphrase,
            timeout_s=TIMEOUT_S,
            base=Path(),
        )
    if options.certificate is not None or options.passphrase is not None:
        raise ConfigError("--certificate and --passphrase are of the key that --key names, and it names none")
    if isinstance(policy, SecurityPolicy) and policy.sign is not None:
        return policy.sign
    raise ConfigError(
        "nobody is named who signs: give --key, as in --key file:signer.pem, or a policy with [sign]"
    )
