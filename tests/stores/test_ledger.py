"""The account of names: what an fsync must cover, what it covered, and what it lost for good."""

from __future__ import annotations

from strongroom.stores.ledger import NameLedger


def _ledger() -> NameLedger:
    ledger = NameLedger()
    ledger.note_created("/disk", "run", is_folder=True)
    ledger.note_created("", "step-1", is_folder=True)
    ledger.note_created("step-1", "data", is_folder=True)
    ledger.note_created("step-1/data", "shard")
    ledger.note_created("", "step-10", is_folder=True)
    ledger.note_created("step-10", "shard")
    return ledger


def test_a_folder_needs_all_on_the_way_to_it_and_all_below_it() -> None:
    assert _ledger().unsettled("step-1", below=True) == ["step-1/data", "step-1", "", "/disk"]
    assert _ledger().unsettled("step-1/data", below=True) == ["step-1/data", "step-1", "", "/disk"]
    assert _ledger().unsettled("step-10", below=True) == ["step-10", "", "/disk"]


def test_without_what_lies_below_only_the_way_to_it_is_needed() -> None:
    assert _ledger().unsettled("", below=False) == ["", "/disk"]
    assert _ledger().unsettled("step-1", below=False) == ["step-1", "", "/disk"]


def test_only_names_noted_before_the_fsync_are_settled_by_it() -> None:
    ledger = _ledger()
    names = ledger.names("step-1/data")
    ledger.note_created("step-1/data", "later")
    ledger.settle("step-1/data", names)
    assert ledger.names("step-1/data") == ["later"]


def test_a_name_given_up_needs_no_fsync() -> None:
    ledger = NameLedger()
    ledger.note_created("step-1", "one")
    ledger.note_created("step-1", "two")
    ledger.withdraw("step-1", "one")
    assert ledger.names("step-1") == ["two"]
    ledger.withdraw("step-1", "two")
    ledger.withdraw("step-1", "never noted")
    assert ledger.unsettled("step-1", below=True) == []


def test_a_folder_found_needs_an_fsync_once() -> None:
    ledger = NameLedger()
    for _ in range(2):
        ledger.note_found("", "step-1")
    assert ledger.unsettled("step-1", below=True) == [""]
    ledger.settle("", ledger.names(""))
    ledger.note_found("", "step-1")
    assert ledger.unsettled("step-1", below=True) == []


def test_a_folder_removed_and_made_again_needs_another_fsync() -> None:
    ledger = NameLedger()
    ledger.note_created("", "step-1", is_folder=True)
    ledger.settle("", ledger.names(""))
    ledger.forget("step-1")
    ledger.note_found("", "step-1")
    assert ledger.unsettled("step-1", below=True) == [""]


def test_what_was_lost_below_on_the_way_or_at_a_prefix_is_lost_to_it() -> None:
    ledger = _ledger()
    ledger.lose("step-1/data", ["shard"], "why")
    assert ledger.why_lost("step-1", below=True) == "why"
    assert ledger.why_lost("", below=True) == "why"
    assert ledger.why_lost("step-1/data/shard", below=False) == "why"
    assert ledger.why_lost("step-1/data/shard/under", below=False) == "why"
    assert ledger.why_lost("step-1", below=False) is None
    assert ledger.why_lost("step-10", below=True) is None
    assert ledger.why_lost("step-1/data/shard-2", below=True) is None


def test_a_root_whose_own_name_was_lost_is_lost_with_all_in_it() -> None:
    ledger = _ledger()
    ledger.lose("/disk", ["run"], "why")
    assert ledger.why_lost("step-10/COMMIT", below=False) == "why"
    assert ledger.why_lost("", below=False) == "why"


def test_what_was_lost_stays_lost_also_when_it_is_removed() -> None:
    ledger = _ledger()
    ledger.lose("step-1/data", ["shard"], "why")
    ledger.forget("step-1")
    assert ledger.why_lost("step-1", below=True) == "why"
    assert ledger.unsettled("step-1", below=True) == ["", "/disk"]
