"""``strongroom sign``: verifies a committed checkpoint, and adds a signature to it."""

from __future__ import annotations

import argparse
from pathlib import Path

from strongroom.config import load_policy
from strongroom.errors import ConfigError
from strongroom.roles import Duty, open_root
from strongroom.signing import NO_GUARD
from strongroom.verify import Progress
from strongroom_cli.console import Bar, line, new_console, print_json
from strongroom_cli.standing import read_history
from strongroom_security import SecurityPolicy, Sign
from strongroom_security.cosigning import add_signature
from strongroom_security.members import TIMEOUT_S
from strongroom_security.trust import ManifestTrust

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Carry the command out; the exit status."""
    policy = load_policy(options.security)
    guard = policy.guard if policy is not None else NO_GUARD
    sign = _sign(options, policy)
    store = open_root(options.root, policy, Duty.SAVE)
    history = read_history(store, guard)
    name = history.at_step(options.step) if options.step is not None else history.newest()
    commit = history.whole(name)
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
