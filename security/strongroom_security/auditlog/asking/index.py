"""The index: a log's events in one SQLite file, so that questions take no reading of segments.

It holds nothing that the segments do not, and can be thrown away and built again. It owns the file: what it
looks like, how it grows, and how two processes and a kill in the middle leave it whole. Which segments come
into it, `indexing` knows; what is asked of it, `queries`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from strongroom.errors import ConfigError, StoreUnavailableError
from strongroom_security.auditlog.asking.doubts import Link, doubts
from strongroom_security.auditlog.asking.leaves import NO_TREE, Held, KnownTree
from strongroom_security.auditlog.asking.rows import ActorRow, Opening, SegmentRows
from strongroom_security.auditlog.format.lines import Certificate, certified_bytes
from strongroom_security.auditlog.verifying.trusting import Voucher, Vouchers

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["INDICES", "SCHEMA", "Index", "IndexCounts", "IndexedSegment", "is_damage"]

SCHEMA: Final = 2
"""Of the tables below; another one's file is thrown away and built again."""

_APPLICATION: Final = 0x5372_4164
"""SQLite's application_id, at offset 68 of the file: "SrAd"."""
_MAGIC: Final = b"SQLite format 3\x00"

_BUSY_S: Final = 60.0
_LOCK_S: Final = 600.0
_POLL_S: Final = 0.05
_CACHE_KIB: Final = 131_072
_AT_ONCE: Final = 64
"""Segments that are taken in at once."""

_TABLES: Final = (
    "CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE IF NOT EXISTS segments (
        id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL UNIQUE, run TEXT, writer TEXT NOT NULL,
        number INTEGER NOT NULL, version TEXT NOT NULL, digest BLOB NOT NULL, leaves BLOB NOT NULL,
        lines INTEGER NOT NULL, events INTEGER NOT NULL, first_seq INTEGER NOT NULL,
        first_prev TEXT NOT NULL, last_hash TEXT NOT NULL, first_row INTEGER NOT NULL,
        earliest INTEGER, opened INTEGER, salvager INTEGER, is_last INTEGER NOT NULL, leaf INTEGER,
        problem TEXT, doubt TEXT, has_changed INTEGER NOT NULL, is_removed INTEGER NOT NULL)""",
    "CREATE INDEX IF NOT EXISTS segments_writer ON segments (writer, number)",
    """CREATE TABLE IF NOT EXISTS held (
        key TEXT PRIMARY KEY, leaf INTEGER NOT NULL, leaves BLOB NOT NULL) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS writers (
        id INTEGER PRIMARY KEY, writer TEXT NOT NULL, public BLOB NOT NULL, run TEXT NOT NULL,
        host TEXT NOT NULL, pid INTEGER NOT NULL, UNIQUE (writer, public, run, host, pid))""",
    """CREATE TABLE IF NOT EXISTS certificates (
        writer INTEGER NOT NULL, key_id TEXT NOT NULL, signature BLOB NOT NULL, is_good INTEGER,
        PRIMARY KEY (writer, key_id, signature)) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS actors (
        id INTEGER PRIMARY KEY, user TEXT NOT NULL, host TEXT NOT NULL, ip TEXT, pid INTEGER NOT NULL,
        identity TEXT, role TEXT, rank INTEGER, job TEXT NOT NULL)""",
    """CREATE TABLE IF NOT EXISTS events (
        row INTEGER PRIMARY KEY, segment INTEGER NOT NULL, line INTEGER NOT NULL, seq INTEGER NOT NULL,
        prev BLOB NOT NULL, time INTEGER NOT NULL, action TEXT NOT NULL, phase TEXT NOT NULL,
        outcome TEXT NOT NULL, operation TEXT NOT NULL, root TEXT NOT NULL, run TEXT, step INTEGER,
        launch INTEGER, attempt TEXT, path TEXT, range_begin INTEGER, range_end INTEGER, reason TEXT,
        details TEXT, actor INTEGER NOT NULL)""",
)

INDICES: Final[Mapping[str, str]] = {
    "events_checkpoint": "events (run, step, time)",
    "events_run": "events (run, time)",
    "events_actor": "events (actor, time)",
    "events_outcome": "events (outcome, time)",
    "events_action": "events (action, time)",
    "events_operation": "events (operation)",
    "events_time": "events (time)",
}
"""They are made once the events of the first building are in: that takes half as long."""

_INSERT: Final = (
    "INSERT INTO events (segment, line, actor, seq, prev, time, action, phase, outcome, operation, root, "
    "run, step, launch, attempt, path, range_begin, range_end, reason, details) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_INSERT_SEGMENT: Final = (
    "INSERT INTO segments (key, run, writer, number, version, digest, leaves, lines, events, first_seq, "
    "first_prev, last_hash, first_row, earliest, opened, salvager, is_last, problem, has_changed, "
    "is_removed) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0)"
)
_WRITER: Final = "SELECT id FROM writers WHERE writer = ? AND public = ? AND run = ? AND host = ? AND pid = ?"
_INSERT_WRITER: Final = "INSERT INTO writers (writer, public, run, host, pid) VALUES (?, ?, ?, ?, ?)"
_CERTIFICATES: Final = (
    "SELECT c.writer, c.key_id, c.signature, c.is_good, w.writer, w.public, w.run, w.host, w.pid "
    "FROM certificates c JOIN writers w ON w.id = c.writer"
)
_JUDGE_CERTIFICATE: Final = (
    "UPDATE certificates SET is_good = ? WHERE writer = ? AND key_id = ? AND signature = ?"
)
_LINKS: Final = (
    "SELECT writer, id, number, opened, first_seq, first_prev, first_seq + lines, last_hash, leaf, "
    "problem IS NULL, doubt FROM segments"
)
_PLACE: Final = (
    "UPDATE segments SET leaf = (SELECT h.leaf FROM held h WHERE h.key = segments.key AND h.leaves = "
    "segments.leaves)"
)
_INSERT_ACTOR: Final = (
    "INSERT INTO actors (user, host, ip, pid, identity, role, rank, job) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
)
_ACTORS: Final = "SELECT id, user, host, ip, pid, identity, role, rank, job FROM actors"
_SEGMENTS: Final = (
    "SELECT id, key, run, writer, number, version, digest, leaves, lines, events, first_seq, opened, "
    "salvager, is_last, leaf, problem, doubt, has_changed, is_removed FROM segments"
)
_SEGMENTS_OF: Final = (
    f"{_SEGMENTS} WHERE writer = ? AND first_seq <= ? AND first_seq + lines > ? "
    "ORDER BY doubt IS NOT NULL, problem IS NOT NULL, leaf IS NULL, id"
)
_LAST_OF: Final = f"{_SEGMENTS} WHERE writer = ? ORDER BY number DESC"
_COUNTS: Final = (
    "SELECT count(*), ifnull(sum(events), 0), ifnull(sum(CASE WHEN leaf IS NULL THEN 0 ELSE events END), 0), "
    "count(problem), count(doubt), ifnull(sum(has_changed), 0), ifnull(sum(is_removed), 0) FROM segments"
)
_TREE: Final = "tree"
_MARK: Final = "mark"
_UNREADABLE: Final = "unreadable"
_MAX_UNREADABLE: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedSegment:
    """What the index knows of a segment.

    Attributes:
        version: by which the store tells whether it may have changed.
        digest: SHA-256 of what was read; ``leaves`` is that of its lines' hashes as leaves.
        opened, salvager: by whom, as a number of `Index.trusted`; None: that is not known, or nobody.
        is_last: its writer has ended with it.
        leaf: of its opening line in the tree; None: it is not known to be sequenced.
        problem: what was wrong with it, at its first place; None: nothing in itself.
        doubt: why it may not be its writer's; None: it goes on from the others.
        has_changed: it was another one once.
        is_removed: it is no more.
    """

    id: int
    key: str
    run: str | None
    writer: str
    number: int
    version: str
    digest: bytes
    leaves: bytes
    lines: int
    events: int
    first_seq: int
    opened: int | None
    salvager: int | None
    is_last: bool
    leaf: int | None
    problem: str | None
    doubt: str | None
    has_changed: bool
    is_removed: bool

    @property
    def is_doubtful(self) -> bool:
        return self.problem is not None or self.doubt is not None or self.has_changed or self.is_removed

    def is_certified(self, trusted: frozenset[int] | None) -> bool:
        """Whether somebody trusted vouches for whoever wrote and closed it; nobody was named: all is."""
        if trusted is None:
            return True
        return self.opened in trusted and (self.salvager is None or self.salvager in trusted)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexCounts:
    """How much is in the index, and how far it can be believed.

    Attributes:
        sequenced: events of segments that the tree holds.
        damaged, doubtful, changed, removed: segments with something wrong in them, that may not be their
            writer's, that were another one once, and that are no more.
    """

    segments: int
    events: int
    sequenced: int
    damaged: int
    doubtful: int
    changed: int
    removed: int

    def to_json(self) -> dict[str, int]:
        return {
            "changed_segments": self.changed,
            "damaged_segments": self.damaged,
            "doubtful_segments": self.doubtful,
            "events": self.events,
            "removed_segments": self.removed,
            "segments": self.segments,
            "sequenced_events": self.sequenced,
            "unproven_events": self.events - self.sequenced,
        }


class Index:
    """The file, open. Used by one thread.

    Args:
        path: of the file; it and its folder come to be, for this user alone.
        sink: whose index it is.
        is_ours: whether a file that is no index at all may be thrown away: nobody chose its name.

    Raises:
        ConfigError: the file cannot be had, is no index, or is another sink's.
    """

    def __init__(self, path: Path, *, sink: str, is_ours: bool = False) -> None:
        self.path: Final = path
        self.rebuilt: str | None = None
        self._sink = sink
        self._is_ours = is_ours
        self._actors: dict[tuple[Any, ...], int] = {}
        self._writers: dict[tuple[Any, ...], int] = {}
        self._pending = 0
        self._connection = self._open()

    # ------------------------------------------------------------------------------------------------ opening

    def _open(self) -> sqlite3.Connection:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"the index {self.path} cannot be had: {reason}; name another file with --index"
            ) from error
        self._check_kind()
        try:
            return self._connect()
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            return self._anew(str(error))

    def _know_actors(self) -> None:
        rows = self._connection.execute(_ACTORS)
        self._actors = {row[1:]: row[0] for row in rows}
        self._writers.clear()

    def _check_kind(self) -> None:
        """Refuse to take for an index, and perhaps to throw away, what is somebody's other file."""
        with open(self.path, "rb") as file:
            head = file.read(72)
        if not head or self._is_ours:
            return
        application = int.from_bytes(head[68:72], "big")
        if not head.startswith(_MAGIC) or application not in (_APPLICATION, 0):
            raise ConfigError(
                f"{self.path} is no index of an audit log, and is left alone; name another file with --index"
            )

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, isolation_level=None, timeout=_BUSY_S)
        try:
            # In this order: another process may make the tables in between, and marks the file as it does.
            tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            application = connection.execute("PRAGMA application_id").fetchone()[0]
            if tables and application != _APPLICATION:
                if not self._is_ours:
                    raise ConfigError(f"{self.path} is another program's database, and is left alone")
                raise sqlite3.DatabaseError("it is another program's database")
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if tables and version != SCHEMA:
                raise sqlite3.DatabaseError(f"it has the form {version}, and this release's is {SCHEMA}")
            connection.execute("PRAGMA journal_mode = WAL")
            # A power cut may take the last refreshing away, which is then done again.
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
            connection.execute("PRAGMA temp_store = MEMORY")
            connection.execute("PRAGMA trusted_schema = OFF")
            if not tables:
                self._create(connection)
            found = connection.execute("SELECT value FROM facts WHERE name = 'sink'").fetchone()
            if found is None or found[0] != self._sink:
                raise ConfigError(
                    f"the index {self.path} is of the sink {found and found[0]!r:.200}, and not of "
                    f"{self._sink!r}; name another file with --index"
                )
        except BaseException:
            connection.close()
            raise
        return connection

    def _create(self, connection: sqlite3.Connection) -> None:
        connection.execute("BEGIN IMMEDIATE")  # of two processes one does it, and the other finds it done
        connection.execute(f"PRAGMA application_id = {_APPLICATION}")
        connection.execute(f"PRAGMA user_version = {SCHEMA}")
        for statement in _TABLES:
            connection.execute(statement)
        connection.execute("INSERT OR IGNORE INTO facts VALUES ('sink', ?)", (self._sink,))
        connection.execute("COMMIT")

    def _anew(self, why: str) -> sqlite3.Connection:
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self.path}{suffix}")
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self.rebuilt = why
        self._actors.clear()
        self._writers.clear()
        return self._connect()

    def start_anew(self, why: str) -> None:
        """Throw all of it away: it is damaged."""
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()
        self._connection = self._anew(why)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------ growing

    @contextlib.contextmanager
    def refreshing(self) -> Iterator[None]:
        """While it grows: one process at a time, the others wait and find it done.

        Raises:
            StoreUnavailableError: another process has been at it for too long.
        """
        lock = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            deadline = time.monotonic() + _LOCK_S
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise StoreUnavailableError(
                            f"another process has been building the index {self.path} for {_LOCK_S:.0f} s; "
                            "ask with --no-refresh, or name another file with --index"
                        ) from None
                    time.sleep(_POLL_S)
                except OSError:
                    break  # a file system without locks: SQLite's own have to do
            self._know_actors()
            yield
        finally:
            os.close(lock)

    def segments(self) -> dict[str, IndexedSegment]:
        """All that it knows of segments, by key."""
        rows = self._connection.execute(_SEGMENTS)
        return {row[1]: _segment(row) for row in rows}

    @contextlib.contextmanager
    def taking_in(self) -> Iterator[None]:
        """While segments are put: what was put stays, whatever ends it."""
        self._pending = 0
        try:
            yield
        finally:
            self._commit()

    def _commit(self) -> None:
        if self._connection.in_transaction:
            self._connection.execute("COMMIT")
        self._pending = 0

    def put(self, segment: SegmentRows, *, version: str, has_changed: bool) -> None:
        """Take a segment in, or another one in its place; all of it or nothing."""
        connection = self._connection
        with self._step():
            old = connection.execute(
                "SELECT id, first_row, events, digest FROM segments WHERE key = ?", (segment.key,)
            ).fetchone()
            if old is not None:
                if old[3] == segment.digest:
                    return  # another process was quicker
                connection.execute("DELETE FROM events WHERE row >= ? AND row < ?", (old[1], old[1] + old[2]))
                connection.execute("DELETE FROM segments WHERE id = ?", (old[0],))
            first_row = connection.execute("SELECT ifnull(max(row), 0) + 1 FROM events").fetchone()[0]
            number = connection.execute(
                _INSERT_SEGMENT,
                (
                    segment.key,
                    segment.run,
                    segment.writer,
                    segment.number,
                    version,
                    segment.digest,
                    segment.leaves,
                    segment.lines,
                    len(segment.events),
                    segment.first_seq,
                    segment.first_prev,
                    segment.last_hash,
                    first_row,
                    min((event[2] for _, event, _ in segment.events), default=None),
                    self._writer(segment.opened),
                    self._writer(segment.salvager),
                    segment.is_last,
                    segment.problem,
                    has_changed,
                ),
            ).lastrowid
            connection.executemany(
                _INSERT, [(number, line, self._actor(actor), *event) for line, event, actor in segment.events]
            )

    def note_version(self, key: str, version: str) -> None:
        """Note that a segment is the same as before, by another version of the store's."""
        self._connection.execute("UPDATE segments SET version = ? WHERE key = ?", (version, key))

    def note_removed(self, keys: Sequence[str], *, is_removed: bool = True) -> None:
        """Note that segments are no more, or are back. Their events stay."""
        with self._transaction():
            self._connection.executemany(
                "UPDATE segments SET is_removed = ? WHERE key = ?", [(is_removed, key) for key in keys]
            )

    @property
    def tree(self) -> KnownTree:
        """Up to where it is known which segments the tree holds."""
        found = self._fact(_TREE)
        if found is None:
            return NO_TREE
        size, root, is_signed = found.split(" ")
        return KnownTree(size=int(size), root=bytes.fromhex(root), is_signed=is_signed == "1")

    def note_held(self, segments: Mapping[str, Held], tree: KnownTree | None, *, begin: int) -> None:
        """Note which segments the tree holds from a leaf on, and up to where that goes.

        Args:
            tree: None: of no tree anything is known any more.
        """
        with self._transaction():
            self._connection.execute("DELETE FROM held WHERE leaf >= ?", (begin,))
            self._connection.executemany(
                "INSERT OR IGNORE INTO held VALUES (?, ?, ?)",
                [(key, each.leaf, each.leaves) for key, each in segments.items()],
            )
            if tree is None:
                self._connection.execute("DELETE FROM facts WHERE name = ?", (_TREE,))
            else:
                told = f"{tree.size} {tree.root.hex()} {int(tree.is_signed)}"
                self._connection.execute("REPLACE INTO facts VALUES (?, ?)", (_TREE, told))

    def judge(self) -> None:
        """Find out which segments stand in the tree, and which do not go on from their writer's others."""
        links: dict[str, list[Link]] = {}
        before: dict[int, str | None] = {}
        with self._transaction():
            self._connection.execute(_PLACE)
            for writer, *row, is_whole, doubt in self._connection.execute(_LINKS):
                before[row[0]] = doubt
                links.setdefault(writer, []).append(_link(row, is_whole))
            found = {number: why for several in links.values() for number, why in doubts(several).items()}
            changed = [(found.get(each), each) for each, was in before.items() if found.get(each) != was]
            self._connection.executemany("UPDATE segments SET doubt = ? WHERE id = ?", changed)

    def mark(self, scope: str) -> int | None:
        """How far whoever asks regularly has looked, as `newest` was then; None: it never has."""
        found = self._fact(f"{_MARK} {scope}")
        return None if found is None else int(found)

    def set_mark(self, scope: str, newest: int) -> None:
        with self._transaction():
            self._connection.execute("REPLACE INTO facts VALUES (?, ?)", (f"{_MARK} {scope}", str(newest)))

    @property
    def newest(self) -> int:
        """The number of the segment that was taken in last; none is ever given twice."""
        row = self._connection.execute("SELECT ifnull(max(seq), 0) FROM sqlite_sequence").fetchone()
        return int(row[0])

    def earliest_after(self, mark: int) -> int | None:
        """The time of the earliest event in what was taken in since; None: nothing was."""
        statement = "SELECT min(earliest) FROM segments WHERE id > ?"
        found: int | None = self._connection.execute(statement, (mark,)).fetchone()[0]
        return found

    def note_unreadable(self, keys: Sequence[str]) -> None:
        """Note which segments could not be taken in the last time; of very many the first ones."""
        told = json.dumps(sorted(keys)[:_MAX_UNREADABLE])
        if told != (self._fact(_UNREADABLE) or "[]"):
            with self._transaction():
                self._connection.execute("REPLACE INTO facts VALUES (?, ?)", (_UNREADABLE, told))

    @property
    def unreadable(self) -> list[str]:
        """Keys of segments that could not be taken in the last time."""
        found: list[str] = json.loads(self._fact(_UNREADABLE) or "[]")
        return found

    def _fact(self, name: str) -> str | None:
        row = self._connection.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def finish(self) -> None:
        """Make what questions go by, where it is missing, and let SQLite look at how things are spread."""
        for name, columns in INDICES.items():
            self._connection.execute(f"CREATE INDEX IF NOT EXISTS {name} ON {columns}")
        self._connection.execute("PRAGMA analysis_limit = 1000")
        self._connection.execute("ANALYZE")

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
                self._know_actors()  # those that came in it are not there
            raise
        self._connection.execute("COMMIT")

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        """A part of a transaction of many: all of it or nothing."""
        if not self._connection.in_transaction:
            self._connection.execute("BEGIN IMMEDIATE")
        self._connection.execute("SAVEPOINT step")
        try:
            yield
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK TO step")
                self._know_actors()
            raise
        self._connection.execute("RELEASE step")
        self._pending += 1
        if self._pending >= _AT_ONCE:
            self._commit()

    def _writer(self, opening: Opening | None) -> int | None:
        if opening is None:
            return None
        who = (opening.writer, opening.public, opening.run, opening.host, opening.pid)
        known = self._writers.get(who)
        if known is None:
            row = self._connection.execute(_WRITER, who).fetchone()
            known = row[0] if row is not None else self._connection.execute(_INSERT_WRITER, who).lastrowid
            self._writers[who] = known or 0
        if opening.key_id is not None:
            self._connection.execute(
                "INSERT OR IGNORE INTO certificates VALUES (?, ?, ?, NULL)",
                (known, opening.key_id, opening.signature),
            )
        return known

    def _actor(self, actor: ActorRow) -> int:
        known = self._actors.get(actor)
        if known is None:
            inserted = self._connection.execute(_INSERT_ACTOR, actor).lastrowid
            known = self._actors[actor] = 0 if inserted is None else inserted
        return known

    # ------------------------------------------------------------------------------------------------- asking

    def counts(self) -> IndexCounts:
        """How much it holds."""
        row = self._connection.execute(_COUNTS).fetchone()
        return IndexCounts(
            segments=row[0],
            events=row[1],
            sequenced=row[2],
            damaged=row[3],
            doubtful=row[4],
            changed=row[5],
            removed=row[6],
        )

    def trusted(self, vouchers: Vouchers) -> frozenset[int] | None:
        """The writers for which somebody trusted vouches, as segments name them; None: nobody was named."""
        if not vouchers.keys:
            return None
        found: set[int] = set()
        for number, key_id, signature, known, *who in self._connection.execute(_CERTIFICATES).fetchall():
            if key_id not in vouchers.keys:
                continue
            is_good = known
            if known is None:
                # A key is known by its hash: what one has signed once it has signed for good.
                is_good = _is_good(vouchers, Certificate(key_id=key_id, signature=signature), who)
                with contextlib.suppress(sqlite3.OperationalError):
                    self._connection.execute(
                        _JUDGE_CERTIFICATE,
                        (is_good, number, key_id, signature),
                    )
            if is_good:
                found.add(number)
        return frozenset(found)

    def segment_of(self, writer: str, seq: int) -> IndexedSegment | None:
        """The segment that holds a writer's line; of several that say so the one that is doubtful least."""
        return next(iter(self.segments_of(writer, seq)), None)

    def segments_of(self, writer: str, seq: int) -> list[IndexedSegment]:
        """All that say that they hold a writer's line."""
        return [_segment(row) for row in self._connection.execute(_SEGMENTS_OF, (writer, seq, seq))]

    def lasts_of(self, writer: str) -> Iterator[IndexedSegment]:
        """A writer's segments, the last first."""
        return map(_segment, self._connection.execute(_LAST_OF, (writer,)))

    def select(self, statement: str, parameters: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        """What a question of `queries` comes to."""
        return self._connection.execute(statement, parameters)


def is_damage(error: sqlite3.Error) -> bool:
    """Whether an error says that the file is damaged, or none: SQLITE_CORRUPT and SQLITE_NOTADB.

    A full disk, a lock and the like are `sqlite3.OperationalError`, and nothing is thrown away for those.
    """
    return type(error) is sqlite3.DatabaseError


def _segment(row: tuple[Any, ...]) -> IndexedSegment:
    return IndexedSegment(
        id=row[0],
        key=row[1],
        run=row[2],
        writer=row[3],
        number=row[4],
        version=row[5],
        digest=row[6],
        leaves=row[7],
        lines=row[8],
        events=row[9],
        first_seq=row[10],
        opened=row[11],
        salvager=row[12],
        is_last=bool(row[13]),
        leaf=row[14],
        problem=row[15],
        doubt=row[16],
        has_changed=bool(row[17]),
        is_removed=bool(row[18]),
    )


def _link(row: Sequence[Any], is_whole: int) -> Link:
    number, place, opened, first_seq, first_prev, next_seq, last_hash, leaf = row
    return Link(
        id=number,
        number=place,
        opened=opened,
        first_seq=first_seq,
        first_prev=first_prev,
        next_seq=next_seq,
        last_hash=last_hash,
        leaf=leaf,
        is_whole=bool(is_whole),
    )


def _is_good(vouchers: Vouchers, certificate: Certificate, who: Sequence[Any]) -> bool:
    writer, public, run, host, pid = who
    certified = certified_bytes(writer=writer, run=run or None, key=public, host=host, pid=pid)
    return vouchers.of(certificate, certified) is Voucher.TRUSTED
