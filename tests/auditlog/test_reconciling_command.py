"""``strongroom audit reconcile`` and ``alerts`` over a real log: what they say, and by which exit status."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives import serialization
from log_making import VOUCHER, actor, certificate, key_of

from strongroom import Checkpointer
from strongroom.auditing import Act, Action, Activity, Outcome, Phase, new_operation
from strongroom.manifest import Commit
from strongroom_cli.main import main
from strongroom_security import SecurityPolicy
from strongroom_security.auditlog.format.segments import SegmentChain, read_segment


@dataclass(frozen=True, kw_only=True)
class Site:
    """A folder with a policy that keeps a log, and a run.

    Attributes:
        policy: of this process; each command loads its own.
    """

    folder: Path
    policy: SecurityPolicy

    @property
    def root(self) -> Path:
        return self.folder / "runs" / "run-a"

    def save(self, step: int, *, audited: bool = True) -> str:
        with Checkpointer(self.root, security=self.policy if audited else None) as ck:
            folder: str = ck.save(step, {"w": torch.ones(4)}).result(60).folder
        self.policy.auditor.secure(within_s=30)
        return folder

    def trail(self) -> tuple[str, str]:
        """A log that knows of this run, and of nothing that was done to it."""
        run = json.loads((self.root / "run.json").read_text())["run"]
        (self.folder / "refused.json").write_text(json.dumps({"Records": [decrypt(run, refused=True)]}))
        return ("--from", str(self.folder / "refused.json"))

    def run(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
        capsys.readouterr()
        status = main(["audit", *arguments, "--security", str(self.folder / "strongroom.toml"), "--json"])
        told = capsys.readouterr()
        return status, json.loads(told.out) if told.out else told.err


def decrypt(run: str, *, refused: bool = False) -> dict[str, Any]:
    """What CloudTrail tells of a key that somebody asked for."""
    return {
        "userIdentity": {"type": "IAMUser", "arn": "arn:aws:iam::111122223333:user/mallory"},
        "eventTime": "2026-01-01T00:00:00Z",
        "eventSource": "kms.amazonaws.com",
        "eventName": "Decrypt",
        "sourceIPAddress": "198.51.100.9",
        "requestParameters": {"encryptionContext": {"strongroom": "v1", "run": run}},
        **({"errorCode": "AccessDenied"} if refused else {}),
    }


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "strongroom.toml"
    path.write_text('[audit]\nsink = "dir:audit"\n')
    policy = SecurityPolicy.load(path)
    try:
        yield Site(folder=tmp_path, policy=policy)
    finally:
        policy.auditor.close(within_s=30)


def test_a_commit_that_keeps_no_record_is_told(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.save(1)
    status, told = site.run(capsys, "reconcile", str(site.root), *site.trail(), "--settled", "0s")
    assert (status, told["commits"]) == (0, [])
    assert told["events"] >= 3
    folder = site.save(2, audited=False)
    status, told = site.run(capsys, "reconcile", str(site.root), *site.trail(), "--settled", "0s")
    assert status == 1
    assert [(each["folder"], each["standing"]) for each in told["commits"]] == [(folder, "unrecorded")]
    # Too young to be judged is not the same as on record.
    status, told = site.run(capsys, "reconcile", str(site.root), *site.trail())
    assert (status, told["commits"]) == (0, [])
    site.save(3)  # whose launch finds it, and says so
    status, told = site.run(capsys, "reconcile", str(site.root), *site.trail(), "--settled", "0s")
    assert (status, [each["standing"] for each in told["commits"]]) == (0, ["observed"])


@pytest.mark.parametrize("time_ms", (1_000_000_000_000, 4_000_000_000_000))
def test_a_commit_cannot_talk_itself_out_of_being_looked_at_by_its_time(
    site: Site, capsys: pytest.CaptureFixture[str], time_ms: int
) -> None:
    site.save(1)
    path = site.root / site.save(2, audited=False) / "COMMIT"
    forged = replace(Commit.decode(path.read_bytes(), "COMMIT"), committed_at_ms=time_ms)
    path.unlink()
    path.write_bytes(forged.encode())
    status, told = site.run(capsys, "reconcile", str(site.root), *site.trail(), "--settled", "0s")
    assert (status, [each["standing"] for each in told["commits"]]) == (1, ["unrecorded"])


def test_what_cannot_be_read_is_no_verdict(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site.save(1)
    log = tmp_path / "log"
    log.write_text("this is no line of a log\n")
    status, told = site.run(capsys, "reconcile", str(site.root), "--from", str(log), "--settled", "0s")
    assert (status, told["damaged"], told["damages"][0]["source"]) == (4, 1, f"{log}:1")


@pytest.mark.parametrize(
    ("made", "silent"),
    ((None, "no-file"), ("", "no-request"), ('{"Records": []}', "no-request"), ("another", "no-request")),
)
def test_logs_that_know_nothing_of_a_root_are_no_verdict_on_it(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str], made: str | None, silent: str
) -> None:
    site.save(1)
    place = tmp_path / "logs"
    place.mkdir()
    if made == "another":
        made = json.dumps({"Records": [decrypt("another-run")]})
    if made is not None:
        (place / "log").write_text(made)
    asked = ("reconcile", str(site.root), "--from", str(place))
    status, told = site.run(capsys, *asked, "--settled", "0s")
    assert (status, told["silent"]) == (4, silent)
    # Of what is too young to be judged no log has to know yet; that there is none at all is another matter.
    status, told = site.run(capsys, *asked)
    assert (status, told["silent"]) == ((4, silent) if made is None else (0, None))
    capsys.readouterr()
    settled = ("--settled", "0s", "--security", str(site.folder / "strongroom.toml"))
    assert main(["audit", *asked, *settled]) == 4
    out = capsys.readouterr().out
    assert "what went round the log is not known" in out
    assert "nothing went round the log" not in out


def test_a_key_of_a_run_in_a_folder_is_looked_after_too(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site.save(1)
    run = json.loads((site.root / "run.json").read_text())["run"]
    (tmp_path / "trail.json").write_text(json.dumps({"Records": [decrypt(run)]}))
    arguments = ("reconcile", str(site.root), "--from", str(tmp_path / "trail.json"))
    status, told = site.run(capsys, *arguments)
    assert (status, told["bypasses"]) == (1, 1)
    expected = ("--expected", "arn:aws:iam::111122223333:user/mallory")
    assert site.run(capsys, *arguments, *expected)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "status"),
    (
        ((), 2),
        (("--no-commits",), 2),
        (("--from", "nowhere"), 2),
        (("--window", "soon"), 2),
    ),
)
def test_what_cannot_be_meant_is_told_as_such(
    site: Site, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], status: int
) -> None:
    site.save(1)
    try:
        found = site.run(capsys, "reconcile", str(site.root), *arguments)[0]
    except SystemExit as end:
        found = int(end.code or 0)
    assert found == status


def test_a_root_without_a_run_is_told(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.save(1)
    assert site.run(capsys, "reconcile", str(site.folder / "runs" / "none"), "--from", "x")[0] == 3


# ----------------------------------------------------------------------------------------------------- alerts


def alerts_on_record(site: Site) -> list[dict[str, Any]]:
    found = []
    for path in sorted((site.folder / "audit" / "segments").rglob("*.jsonl")):
        reading = read_segment(path.relative_to(site.folder / "audit").as_posix(), path.read_bytes())
        found += [
            value["strongroom"]
            for _, value in reading.events()
            if value["strongroom"]["action"] == Action.ALERT.value
        ]
    return found


def use_a_grant(site: Site) -> None:
    with Activity(site.policy.auditor, Action.BREAK_GLASS, root="s3://bucket/runs/run-a", run="run-a"):
        pass
    site.policy.auditor.secure(within_s=30)


def test_nobody_needs_to_look_at_a_run_that_goes_well(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    for step in range(1, 4):
        site.save(step)
    status, told = site.run(capsys, "alerts")
    assert (status, told["alerts"]) == (0, [])


def test_an_alert_names_its_rule_its_reason_and_the_events(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    use_a_grant(site)
    status, told = site.run(capsys, "alerts", "--all")
    (alert,) = told["alerts"]
    assert (status, alert["rule"], alert["severity"], alert["run"]) == (1, "break-glass", "high", "run-a")
    (event,) = alert["evidence"]
    assert main(["audit", "show", event, "--security", str(site.folder / "strongroom.toml")]) == 0
    assert '"break-glass"' in capsys.readouterr().out
    for _ in range(2):  # to ask about a run puts nothing of it on record
        status, told = site.run(capsys, "alerts", "--run", "run-b")
        assert (status, told["alerts"]) == (3, [])
    rules = site.folder / "rules.toml"
    rules.write_text("[break-glass]\nenabled = false\n")
    assert site.run(capsys, "alerts", "--run", "run-a", "--rules", str(rules))[0] == 0


def test_no_log_and_an_empty_one_are_none_that_nobody_needs_to_look_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = tmp_path / "typo"
    for said in ("is not there", "holds no audit log"):
        assert main(["audit", "alerts", "--sink", f"dir:{sink}", "--index", str(tmp_path / "index")]) == 3
        captured = capsys.readouterr()
        assert said in captured.err
        assert "nobody needs to look" not in captured.out
        sink.mkdir(exist_ok=True)


def test_segments_that_were_touched_are_alerts_until_somebody_looked(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.save(1)
    put_in_log(
        site, SegmentChain(key_of("1" * 32, "run-x", 1)), (hours_ago(1), replace(grant(), run="run-x"))
    )
    rules = site.folder / "rules.toml"
    rules.write_text("[break-glass]\nenabled = false\n")
    alerts = ("alerts", "--rules", str(rules))
    assert site.run(capsys, *alerts)[0] == 0
    (path,) = [each for each in (site.folder / "audit").rglob("*.jsonl") if "1" * 32 in each.name]
    whole = path.read_bytes()
    for change, what in (
        (whole.replace(b"run-x", b"run-y"), "are damaged"),
        (None, "were removed"),
    ):
        path.unlink()
        if change is not None:
            path.write_bytes(change)
        for _ in range(2):
            status, told = site.run(capsys, *alerts)
            assert (status, {each["rule"] for each in told["alerts"]}) == (1, {"log-trouble"})
            (alert,) = [each for each in told["alerts"] if what in each["reason"]]
            assert (alert["severity"], path.name in alert["reason"]) == ("high", True)
    assert site.run(capsys, *alerts, "--run", "run-x")[0] == 1
    assert site.run(capsys, *alerts, "--record")[1]["recorded"] > 0
    assert site.run(capsys, *alerts, "--record")[1]["recorded"] == 0
    rules.write_text("[break-glass]\nenabled = false\n[log-trouble]\nenabled = false\n")
    assert site.run(capsys, *alerts)[0] == 0


def test_an_alert_is_put_on_record_once(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    use_a_grant(site)
    assert site.run(capsys, "alerts", "--record")[1]["recorded"] == 1
    status, told = site.run(capsys, "alerts", "--record")
    assert (status, told["recorded"]) == (1, 0)
    (record,) = alerts_on_record(site)
    assert (record["run"], record["details"]["rule"]) == ("run-a", "break-glass")


def test_looking_for_alerts_gives_no_cause_for_one(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    use_a_grant(site)
    for _ in range(3):
        _, told = site.run(capsys, "alerts")
        assert [each["rule"] for each in told["alerts"]] == ["break-glass"]


def test_a_run_that_ended_is_told_apart_from_one_that_stopped(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the last segment of who saved, which says that nothing follows, or does not."""
    for step in range(1, 6):
        site.save(step)
    later = ("alerts", "--rules", str(site.folder / "rules.toml"), "--now", _in_days(1), "--since", "2d")
    (site.folder / "rules.toml").write_text("[log-trouble]\nenabled = false\n")
    status, told = site.run(capsys, *later)
    assert (status, [each["rule"] for each in told["alerts"]]) == (1, ["saves-stopped"])
    site.policy.auditor.close(within_s=30)
    assert site.run(capsys, *later)[0] == 0


def _in_days(days: int) -> str:
    return (datetime.now(timezone.utc) + timedelta(days=days)).isoformat()


def test_rules_that_cannot_be_meant_are_told_with_their_line(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    use_a_grant(site)
    rules = site.folder / "rules.toml"
    rules.write_text("[break-glass]\nenabled = false\n")
    assert site.run(capsys, "alerts", "--rules", str(rules))[0] == 0
    rules.write_text("[break-glass]\n\nenabeld = false\n")
    status, told = site.run(capsys, "alerts", "--rules", str(rules))
    assert status == 2
    assert f"{rules}:3: [break-glass] has no member 'enabeld'" in told
    rules.write_bytes(b"\xff")
    assert site.run(capsys, "alerts", "--rules", str(rules))[0] == 2


def test_to_record_alerts_needs_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "audit").mkdir()
    status = main(["audit", "alerts", "--sink", f"dir:{tmp_path / 'audit'}", "--record"])
    assert (status, "--record puts alerts on record" in capsys.readouterr().err) == (2, True)


def test_denials_reach_the_rules_as_they_are_recorded(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(5):
        site.policy.auditor.record(
            Act(
                action=Action.RESTORE,
                phase=Phase.FINISHED,
                outcome=Outcome.DENIED,
                operation=new_operation(),
                run="run-a",
                reason="no key",
            )
        )
    site.policy.auditor.secure(within_s=30)
    assert [each["rule"] for each in site.run(capsys, "alerts")[1]["alerts"]] == ["denied-burst"]


# --------------------------------------------------------------------- what came late, and who is believed


def put_in_log(site: Site, chain: SegmentChain, *acts: tuple[int, Act], certificate: Any = None) -> list[str]:
    """Put a segment into the log, of events at these times; their ids."""
    lines = [chain.open(time_ms=acts[0][0], certificate=certificate)]
    lines += [chain.add(act, actor("eve", ip="198.51.100.9"), time_ms=at) for at, act in acts]
    lines.append(chain.close(time_ms=acts[-1][0]))
    path = site.folder / "audit" / chain.key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(lines))
    writer, _, _ = path.name.partition("-")
    return [f"{writer}-{seq}" for seq in range(1, len(acts) + 1)]


def grant() -> Act:
    return Act(
        action=Action.BREAK_GLASS,
        phase=Phase.FINISHED,
        outcome=Outcome.SUCCESS,
        operation=new_operation(),
        root="s3://bucket/runs/run-a",
        run="run-a",
    )


def hours_ago(hours: int) -> int:
    return round((datetime.now(timezone.utc) - timedelta(hours=hours)).timestamp() * 1000)


def test_an_event_that_came_after_its_hour_was_judged_is_judged_then_and_once(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    put_in_log(site, SegmentChain(key_of("1" * 32, "run-a", 1)), (hours_ago(9), grant()))
    hourly = ("alerts", "--since", "1h")
    assert site.run(capsys, *hourly)[0] == 0  # the first time, what is older is not asked for
    (told_id,) = put_in_log(site, SegmentChain(key_of("2" * 32, "run-a", 2)), (hours_ago(3), grant()))
    assert site.run(capsys, "query", "--run", "run-a")[0] == 0  # whoever takes it in, alerts will look at it
    assert site.run(capsys, *hourly, "--now", _in_days(1))[1]["late"] == 0
    status, told = site.run(capsys, *hourly)
    assert (status, [each["evidence"] for each in told["alerts"]], told["late"]) == (1, [[told_id]], 1)
    assert site.run(capsys, *hourly)[0] == 0


def test_an_alert_by_events_that_nobody_vouches_for_is_marked(
    site: Site, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    known = key_of("1" * 32, "run-a", 1)
    (mine,) = put_in_log(site, SegmentChain(known), (hours_ago(1), grant()), certificate=certificate(known))
    (made_up,) = put_in_log(site, SegmentChain(key_of("2" * 32, "run-a", 2)), (hours_ago(1), grant()))
    signer = tmp_path / "audit.pub"
    signer.write_bytes(
        VOUCHER.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    _, told = site.run(capsys, "alerts", "--signer", f"file:{signer}")
    assert {each["evidence"][0]: each["doubtful"] for each in told["alerts"]} == {
        mine: [],
        made_up: [made_up],
    }
    _, told = site.run(capsys, "alerts")
    assert [each["doubtful"] for each in told["alerts"]] == [[], []]
    _, told = site.run(capsys, "query", "--run", "run-a", "--all", "--signer", f"file:{signer}")
    assert {row["id"]: row["certified"] for row in told["rows"]} == {mine: True, made_up: False}
    capsys.readouterr()
    asked = ("--sink", str(site.folder / "audit"), "--action", "break-glass", "--signer", f"file:{signer}")
    main(["audit", "query", *asked])
    assert capsys.readouterr().out.count("by a writer that nobody vouches for") == 1


def test_events_that_nobody_vouches_for_account_for_no_commit_where_a_signer_is_known(
    site: Site, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    site.save(1)
    signer = tmp_path / "audit.pub"
    signer.write_bytes(
        VOUCHER.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    asked = ("reconcile", str(site.root), *site.trail(), "--settled", "0s")
    assert site.run(capsys, *asked)[0] == 0
    run = json.loads((site.root / "run.json").read_text())["run"]
    known = key_of("1" * 32, run, 1)
    listed = replace(grant(), action=Action.LIST, run=run)
    put_in_log(site, SegmentChain(known), (hours_ago(1), listed), certificate=certificate(known))
    status, told = site.run(capsys, *asked, "--signer", f"file:{signer}")
    assert [each["standing"] for each in told["commits"]] == ["unrecorded"]
    assert (status, told["events"]) == (1, 1)
    assert told["passed_over"] >= 3


def test_a_commit_is_not_older_than_the_log_because_nobody_vouches_for_any_of_it(
    site: Site, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    site.save(1)
    signer = tmp_path / "audit.pub"
    signer.write_bytes(
        VOUCHER.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    asked = ("reconcile", str(site.root), *site.trail(), "--settled", "0s", "--signer", f"file:{signer}")
    status, told = site.run(capsys, *asked)
    assert (status, [each["standing"] for each in told["commits"]]) == (1, ["unrecorded"])
