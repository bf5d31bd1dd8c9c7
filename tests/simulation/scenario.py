"""What a seed simulates: a job, its processes, and the faults that strike it.

A scenario is drawn from its seed at the beginning, so it can be printed, and repeated with fewer strikes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tests.simulation import ranks
from tests.simulation.ranks import GroupPlan

MODES = ("sync", "async", "bounded")
OPTIMIZERS = ("sgd", "adagrad")
#: Number of modes that a job may change to.
MODE_COUNT = 6
#: Rules of eviction of a table.
EVICTIONS = ("", "epochs", "versions", "norms")
#: Kinds of strikes, and how often each is drawn.
KINDS = {
    "kill": 6,
    "kill silently": 1,
    "freeze": 5,
    "terminate": 1,
    "break": 3,
    "cut": 3,
    "slow": 2,
    "lease": 1,
    "etcd down": 1,
    "etcd faults": 1,
    "wall clock": 1,
}
#: Feature -> share of the scenarios that have it.
SHARES = {
    "moves": 0.3,
    "tables": 0.4,
    "no store": 0.1,
    "rollbacks": 0.15,
    "standbys": 0.2,
    # In async mode, pushes of several batches.
    "sums": 0.3,
    "stops": 0.15,
    "evaluations": 0.15,
    "watchers": 0.15,
    "aims": 0.3,
    # A checkpoint store that is slow and fails.
    "files": 0.25,
    # All epochs train the same elements, so an element has several updates.
    "repeats": 0.3,
    "mode changes": 0.15,
    "growing": 0.15,
    "small tasks": 0.15,
    # Of tables.
    "evictions": 0.4,
    "poison": 0.15,
    # A process that follows the model, and stops at checkpoints.
    "followers": 0.15,
    # Trainers save the model and the rows at their end.
    "saves": 0.2,
    # Ranks of a group that trains its own model. Other features have precedence if they are asked for.
    "groups": 0.15,
    # Trainers make several steps on their own values before they push.
    "local steps": 0.1,
    # Allocations of pservers that fail.
    "no memory": 0.1,
    # Processes keep streams to the master open, which shows at once that they have died.
    "presence": 0.1,
    # Only on request.
    "etcd back": 0.0,
}
#: Kind of a strike that hits the checkpoint store -> how often it is drawn, and its possible extents.
FILE_KINDS = {
    "store slow": (2, (1.0, 3.0)),
    "store errors": (3, (1.0, 3.0)),
    "store full": (2, (1.0, 3.0)),
    "damage": (2, (0.0, 0.5)),
}
_RECORDS_PER_TASK = 16
#: Share of the scenarios with moves in which nothing else happens.
_CALM_MOVES = 0.5
#: Kind of a strike -> its possible extents.
_EXTENTS = {
    "kill": (0.1, 0.3, 1.0),
    "kill silently": (0.3, 1.0),
    "freeze": (0.2, 1.0, 2.5, 5.0),
    "terminate": (0.3,),
    "break": (0.3, 1.0),
    "cut": (0.3, 1.0, 3.0),
    "slow": (1.0, 4.0),
    "lease": (0.0,),
    "etcd down": (0.5, 3.0),
    "etcd faults": (1.0, 3.0),
    "wall clock": (-3600.0, 3600.0),
    "lost request": (0.0,),
    "lost reply": (0.0,),
    "mode": tuple(float(number) for number in range(MODE_COUNT)),
    "etcd back": (0.5, 2.0, 5.0),
}
#: (role, event, usual number of such events of a process) at which strikes are aimed.
_AIMS = (
    ("master", "transaction", 40),
    ("pserver", "transaction", 5),
    ("standby", "transaction", 3),
    ("trainer", "transaction", 4),
    ("master", "action snapshot", 12),
    ("master", "action view", 20),
    ("master", "exchange tasks", 30),
    ("pserver", "action view", 20),
    ("pserver", "exchange step", 80),
    ("pserver", "get copy", 40),
    ("pserver", "put init", 3),
    ("pserver", "put move", 10),
    ("trainer", "exchange step", 80),
    ("trainer", "exchange tasks", 12),
    ("trainer", "get pull", 8),
    ("trainer", "put init", 15),
)
#: The same for jobs with a group.
_GROUP_AIMS = (
    ("master", "transaction", 20),
    ("master", "action group_start", 4),
    ("master", "action group_at", 20),
    ("master", "action group_leave", 3),
    ("trainer", "transaction", 4),
    ("trainer", "action group_start", 2),
    ("trainer", "action group_at", 10),
    ("trainer", "action group_leave", 1),
    ("trainer", "action declare_dataset", 1),
)
#: Kinds that are aimed at events of calls, and those that are aimed at transactions.
_AIMED = ("kill", "kill", "kill silently", "freeze", "freeze", "break")
_AIMED_AT_ETCD = (*_AIMED, "lost request", "lost reply")
#: Functions of pservers that allocate memory, and the usual number of their calls.
_ALLOCATIONS = (
    ("pserver.stores.arena:Arena._cut", 12),
    ("pserver.stores.arena:Arena.copy", 20),
    ("pserver.cuts.copier:CopyMemory._copied", 12),
    ("rowstore.memory:reserved", 12),
)
#: Share of aimed strikes that come with another one, on another process.
_PAIRS = 0.4
_ROLES = ("master", "pserver", "pserver", "trainer", "trainer")


@dataclass(frozen=True, slots=True)
class Aim:
    """An event of a process, which a strike may be aimed at.

    Args:
        role: Role of the process.
        index: Its index.
        event: "transaction" of etcd, "write" to the store, the name of a remote call, whose messages count, or "call"
            and the place of a function.
        count: Number of the event among those of the same process.
        when: "before" or "after" the event, or "within" a write.
    """

    role: str
    index: int
    event: str
    count: int
    when: str

    @property
    def called(self) -> str:
        """The place of a function whose calls are events; empty for other events."""
        return self.event.removeprefix("call ") if self.event.startswith("call ") else ""

    def __str__(self) -> str:
        return f"{self.when} {self.event} {self.count} of {self.role} {self.index}"


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault.

    Args:
        number: Its place in the scenario's list, for ``--only``.
        at_s: When it happens.
        kind: One of ``KINDS``.
        role: Role of the process that it strikes.
        index: That process's index, modulo the number of such processes that are alive.
        extent: Duration in seconds, or another size, depending on the kind.
        other: Role of the other end, for links.
        aim: It happens at the first such event instead.
    """

    number: int
    at_s: float
    kind: str
    role: str = ""
    index: int = 0
    extent: float = 0.0
    other: str = ""
    aim: Aim | None = None

    def __str__(self) -> str:
        target = f" {self.role} {self.index}" if self.role else ""
        to = f" to {self.other}" if self.other else ""
        moment = f"at {self.at_s:.2f} s" if self.aim is None else str(self.aim)
        return f"{self.number}: {self.kind}{target}{to} {moment} for {self.extent:.2f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A job and what happens to it. All times are virtual seconds."""

    seed: int
    mode: str = "sync"
    optimizer: str = "sgd"
    masters: int = 1
    trainers: int = 2
    pservers: int = 2
    #: Processes that copy the blocks of pservers.
    standbys: int = 0
    #: "replay" or "rollback".
    recovery: str = "replay"
    #: True if there is a store for checkpoints.
    has_store: bool = True
    #: True if files grow in the store, and a writer that dies leaves a part of its file.
    is_disk: bool = False
    #: Maximum time of a request to the store.
    store_s: float = 0.0
    #: True if the model also has a table.
    has_table: bool = False
    #: Batches whose gradients trainers add up before they push, in async mode.
    push_every: int = 1
    #: When a script stops the job; 0 for never.
    stop_at_s: float = 0.0
    #: True if trainers evaluate the model at their end.
    evaluates: bool = False
    #: True if all epochs train the same elements.
    repeats: bool = False
    #: True if the mode changes, so gradients cannot depend on values.
    changes_modes: bool = False
    #: True if files join the data while it is trained on.
    grows: bool = False
    #: One of ``EVICTIONS``.
    eviction: str = ""
    #: Records that cannot be read.
    poison: tuple[int, ...] = ()
    #: Records that kill the trainer which trains on them.
    deadly: tuple[int, ...] = ()
    #: True if a process asks for the job's status all the time.
    is_watched: bool = False
    #: True if a process follows the model.
    is_followed: bool = False
    #: True if trainers save the model and the rows, and write a report once.
    saves: bool = False
    #: The ranks that train their own model, instead of trainers; None if there is a model on pservers.
    group: GroupPlan | None = None
    records: int = 96
    epochs: int = 2
    batch_size: int = 8
    #: Slices of a batch, for as many local steps.
    local_steps: int = 1
    records_per_task: int = _RECORDS_PER_TASK
    #: Maximum time that a trainer's script takes for a batch.
    batch_s: float = 0.1
    lease_ttl_s: float = 2.0
    #: Seconds between checkpoints; 0 for none but those at the ends of epochs.
    checkpoint_every_s: float = 1.0
    #: Probabilities of naps, late messages, broken and lost connections, and doubled calls.
    nap: float = 0.002
    nap_s: float = 0.05
    tail: float = 0.02
    tail_s: float = 0.1
    breaks: float = 0.0
    losses: float = 0.0
    doubles: float = 0.0
    #: True if processes keep streams to the master open.
    has_presence: bool = False
    #: True if the number of pservers changes, so that blocks move.
    moves: bool = False
    strikes: tuple[Strike, ...] = ()
    #: Faults end at this time.
    calm_after_s: float = 0.0
    #: A job that is not done by then hangs.
    limit_s: float = 300.0

    @property
    def depends_on_values(self) -> bool:
        """True if each gradient is -1 minus the value that was read."""
        return self.repeats and self.optimizer == "sgd" and self.mode == "sync" and not self.changes_modes

    @property
    def may_go_back(self) -> bool:
        """True if etcd may be restored from a backup."""
        return any(each.kind == "etcd back" for each in self.strikes)

    @property
    def updates(self) -> int:
        """Number of updates of each element."""
        return self.epochs if self.repeats else 1

    @property
    def final_value(self) -> float:
        """Value of each element at the end."""
        return self.value_after(self.updates)

    def value_after(self, updates: int) -> float:
        """Value of an element after so many gradients, in closed form."""
        if self.depends_on_values:
            return 2.0**updates - 1.0
        return float(updates) if self.optimizer == "sgd" else sum(0.5 / n**0.5 for n in range(1, updates + 1))

    @property
    def summary(self) -> str:
        """What distinguishes this job, in few words."""
        words = {
            f"push_every={self.push_every}": self.mode == "async" and self.push_every > 1,
            "table": self.has_table,
            f"evicts by {self.eviction}": self.eviction != "",
            f"{self.updates} updates": self.repeats,
            "depends on values": self.depends_on_values,
            "mode changes": self.changes_modes,
            "grows": self.grows,
            f"{self.local_steps} local steps": self.local_steps > 1,
            "small tasks": self.records_per_task < _RECORDS_PER_TASK,
            f"poison {self.poison} {self.deadly}": bool(self.poison or self.deadly),
            "etcd goes back": self.may_go_back,
            "stopped": self.stop_at_s > 0,
            "evaluated": self.evaluates,
            "watched": self.is_watched,
            "followed": self.is_followed,
            "saved": self.saves,
            "presence": self.has_presence,
            "moves": self.moves,
            "rollback": self.recovery == "rollback",
            "no store": not self.has_store,
            "faulty disk" if self.is_disk else "faulty store": self.store_s > 0,
            f"{self.standbys} standbys": self.standbys > 0,
            f"{self.masters} masters": self.masters > 1,
        }
        first = f"{self.mode} {self.optimizer}" if self.group is None else str(self.group)
        return ", ".join([first, *(word for word, has in words.items() if has)])

    def only(self, numbers: Sequence[int]) -> Scenario:
        """Return the scenario with only these strikes."""
        return replace(self, strikes=tuple(each for each in self.strikes if each.number in numbers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a caller asks of scenarios. The empty values leave the choice to the seed."""

    faults: bool = True
    mode: str = ""
    optimizer: str = ""
    #: Feature -> whether scenarios have it. See ``SHARES``.
    features: dict[str, bool] = field(default_factory=dict)
    #: True if scenarios have no other features.
    is_exact: bool = False
    #: Only these strikes; None for all.
    only: tuple[int, ...] | None = None
    #: Names of bugs to plant.
    planted: tuple[str, ...] = ()
    #: Functions whose calls to count.
    counted: tuple[str, ...] = ()
    #: More strikes.
    strikes: tuple[Strike, ...] = ()
    changes: dict[str, float] = field(default_factory=dict)


class _Draws:
    """Draws the features of a seed, each with a chance of its own. So a new feature changes only seeds that have it."""

    def __init__(self, seed: int, wanted: Wanted) -> None:
        self._seed, self._wanted, self._is_exact = seed, wanted.features, wanted.is_exact
        self._is_of_servers = bool(wanted.mode or wanted.optimizer or any(wanted.features.values()))

    def chance(self, feature: str) -> random.Random:
        return random.Random(f"{self._seed} {feature}")

    def has(self, feature: str) -> bool:
        """True if the scenario has a feature, provided that its other features permit it."""
        by_chance = not self._is_exact and self.chance(f"has {feature}").random() < SHARES[feature]
        if feature == "groups":
            by_chance = by_chance and not self._is_of_servers
        return self._wanted.get(feature, by_chance)


def features_of(seed: int, wanted: Wanted) -> dict[str, bool]:
    """Return the features of a seed's scenario, for ``Wanted``. They stay the same if new ones are introduced."""
    draws = _Draws(seed, wanted)
    return {feature: True for feature in SHARES if draws.has(feature)}


def exact(seed: int, wanted: Wanted) -> Wanted:
    """Return ``Wanted`` with the features of a seed's scenario, and no others, so it can be noted."""
    return replace(wanted, features=features_of(seed, wanted), is_exact=True)


def drawn(seed: int, wanted: Wanted) -> Scenario:
    """Return the scenario of a seed."""
    draws = _Draws(seed, wanted)
    made = _with_group(seed, wanted, draws) if draws.has("groups") else _with_servers(seed, wanted, draws)
    made = replace(made, strikes=made.strikes + wanted.strikes)
    if wanted.changes:
        made = replace(made, **wanted.changes)  # type: ignore[arg-type] # names of numbers
    return made if wanted.only is None else made.only(wanted.only)


def _with_group(seed: int, wanted: Wanted, draws: _Draws) -> Scenario:
    """Return a job without pservers, whose trainers are the ranks of a group."""
    draw = draws.chance("groups")
    made = Scenario(
        seed=seed,
        masters=draw.choice((1, 1, 2)),
        records=draw.choice((96, 97, 90)),
        epochs=draw.choice((1, 2, 3)),
        batch_s=draw.choice((0.02, 0.1, 0.3)),
        has_store=not draws.has("no store"),
        evaluates=draws.has("evaluations"),
        is_watched=draws.has("watchers"),
        stop_at_s=0.5 + 3 * draw.random() if draws.has("stops") else 0.0,
        group=ranks.drawn(draw),
    )
    if draws.has("poison"):
        made = replace(made, deadly=(draw.randrange(made.records),), group=ranks.drawn(draw, is_deadly=True))
    if not wanted.faults:
        return made
    made = _struck(made, draw)
    if draws.has("aims"):
        made = _aimed(made, draws.chance("aims"), _GROUP_AIMS)
    if made.has_store and draws.has("files"):
        made = _with_faulty_files(made, draws.chance("files"))
    roles = {"pserver": "trainer"}
    strikes = [replace(e, role=roles.get(e.role, e.role), other=roles.get(e.other, e.other)) for e in made.strikes]
    # A rank that is killed without a deadly record would be taken for one with such a record.
    return replace(made, strikes=tuple(each for each in strikes if not made.deadly or each.role == "master"))


def _with_servers(seed: int, wanted: Wanted, draws: _Draws) -> Scenario:
    """Return a job whose model is on pservers."""
    draw = draws.chance("scenario")
    mode, optimizer = draw.choice(MODES), draw.choice(OPTIMIZERS)
    made = Scenario(
        seed=seed,
        mode=wanted.mode or mode,
        optimizer=wanted.optimizer or optimizer,
        trainers=draw.choice((1, 2, 2, 3)),
        pservers=draw.choice((1, 2, 2, 3)),
        epochs=draw.choice((1, 2, 2, 3)),
        batch_s=draw.choice((0.02, 0.1, 0.3)),
        checkpoint_every_s=draw.choice((0.0, 0.5, 1.0, 3.0)),
        masters=draw.choice((1, 1, 2)),
        has_table=draws.has("tables"),
        has_store=not draws.has("no store"),
        evaluates=draws.has("evaluations"),
        is_watched=draws.has("watchers"),
        is_followed=draws.has("followers"),
        has_presence=draws.has("presence"),
        saves=draws.has("saves"),
    )
    if made.mode == "async" and not wanted.optimizer and draws.has("sums"):
        # Batches that are pushed together are averaged, which Adagrad's first step does not show.
        made = replace(made, optimizer="adagrad", push_every=3)
    if made.has_store and draws.has("rollbacks"):
        made = replace(made, recovery="rollback")
    elif draws.has("standbys"):
        made = replace(made, standbys=draws.chance("standbys").choice((1, 2)))
    if draws.has("stops"):
        made = replace(made, stop_at_s=0.5 + 3 * draws.chance("stops").random())
    made = _with_data(made, draws)
    if wanted.faults:
        made = _with_faults(made, draws)
        if made.has_store and draws.has("files"):
            made = _with_faulty_files(made, draws.chance("files"))
    elif wanted.features.get("moves"):
        made = _moved(made, draws.chance("moves"))
    return made


def _with_data(made: Scenario, draws: _Draws) -> Scenario:
    """Return a job with other data, gradients, or rules for rows."""
    if draws.has("repeats") and made.push_every == 1:
        made = replace(made, repeats=True, epochs=max(made.epochs, 2))
    if draws.has("mode changes"):
        made = replace(made, changes_modes=True)
    if draws.has("growing"):
        made = replace(made, grows=True, epochs=1 if made.epochs < 3 else 2, repeats=False)
    elif draws.has("small tasks") and made.push_every == 1:
        made = replace(made, batch_size=4, records_per_task=4)
    if draws.has("local steps") and made.push_every == 1:
        made = replace(made, has_table=False, local_steps=draws.chance("local steps").choice((2, 4)))
    if made.has_table and draws.has("evictions"):
        made = replace(made, eviction=draws.chance("evictions").choice(EVICTIONS[1:]), epochs=max(made.epochs, 3))
    if draws.has("poison"):
        draw = draws.chance("poison")
        # More than one that raises could be taken for an error of the script.
        one, other = draw.sample(range(made.records), 2)
        kind = draw.choice(("poison", "deadly", "both"))
        made = replace(made, poison=(one,) if kind != "deadly" else (), deadly=(other,) if kind != "poison" else ())
    return made


def _with_faults(made: Scenario, draws: _Draws) -> Scenario:
    moves = draws.chance("moves")
    if not draws.has("moves"):
        made = _struck(made, draws.chance("strikes"))
    elif moves.random() < _CALM_MOVES:
        return _moved(made, moves)
    else:
        made = _scaled(_struck(made, draws.chance("strikes")), moves)
    if draws.has("aims"):
        made = _aimed(made, draws.chance("aims"))
    if made.changes_modes:
        made = _also(made, draws.chance("mode changes"), "mode", (1, 2, 4))
    if draws.has("no memory"):
        made = _starved(made, draws.chance("no memory"))
    if draws.has("etcd back") and made.has_store:
        made = _also(made, draws.chance("etcd back"), "etcd back", (1, 1, 2))
    return made


def _moved(made: Scenario, draw: random.Random) -> Scenario:
    """Return a job whose blocks move all the time on slow machines, and which nothing else strikes."""
    every_s = draw.choice((0.3, 0.5, 0.7))
    times = (0.5 + number * every_s * (0.5 + draw.random()) for number in range(40))
    strikes = tuple(
        Strike(number, at_s, "scale", "pserver", 0, draw.choice((1.0, 2.0, 3.0))) for number, at_s in enumerate(times)
    )
    return replace(
        made,
        moves=True,
        trainers=3,
        records=192,
        epochs=draw.choice((2, 4)),
        batch_s=draw.choice((0.01, 0.03, 0.1, 0.2)),
        nap=0.01,
        nap_s=0.1,
        tail=0.1,
        tail_s=0.5,
        strikes=strikes,
    )


def _scaled(made: Scenario, draw: random.Random) -> Scenario:
    """Return a job in which half of the strikes change the number of pservers instead."""
    strikes = [
        Strike(each.number, each.at_s, "scale", "pserver", 0, draw.choice((1.0, 2.0, 3.0)))
        if draw.random() < 0.5
        else each
        for each in made.strikes
    ]
    return replace(made, moves=True, strikes=tuple(strikes))


def _struck(made: Scenario, draw: random.Random) -> Scenario:
    calm_after_s = draw.choice((5.0, 10.0, 15.0))
    every_s = draw.choice((0.4, 1.0, 2.0))
    made = replace(
        made,
        calm_after_s=calm_after_s,
        nap=draw.choice((0.002, 0.002, 0.01)),
        nap_s=draw.choice((0.05, 0.1)),
        tail=draw.choice((0.02, 0.02, 0.1)),
        tail_s=draw.choice((0.1, 0.5)),
        breaks=draw.choice((0.0, 0.0, 0.002, 0.01)),
        losses=draw.choice((0.0, 0.0, 0.001)),
        doubles=draw.choice((0.0, 0.0, 0.05)),
        batch_s=draw.choice((0.1, 0.3)),
    )
    strikes: list[Strike] = []
    at_s = 0.3 + draw.random() * 0.7
    while at_s < calm_after_s:
        for _ in range(2 if draw.random() < 0.2 else 1):
            strikes.append(_strike(draw, len(strikes), at_s))
        at_s += draw.expovariate(1 / every_s)
    return replace(made, strikes=tuple(strikes))


def _strike(draw: random.Random, number: int, at_s: float) -> Strike:
    kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
    role, index = draw.choice(_ROLES), draw.randrange(6)
    other = draw.choice(("master", "pserver", "trainer", "etcd"))
    return Strike(number, at_s, kind, role, index, draw.choice(_EXTENTS[kind]), other)


def _with_faulty_files(made: Scenario, draw: random.Random) -> Scenario:
    """Return a job whose store is slow, and fails from time to time."""
    strikes = list(made.strikes)
    at_s, every_s = 0.5, draw.choice((0.5, 1.5))
    shares = [share for share, _ in FILE_KINDS.values()]
    while at_s < (made.calm_after_s or 10.0):
        kind = draw.choices(list(FILE_KINDS), shares)[0]
        strikes.append(Strike(len(strikes), at_s, kind, "master", extent=draw.choice(FILE_KINDS[kind][1])))
        at_s += draw.expovariate(1 / every_s)
    for _ in range(draw.choice((0, 1, 2, 4))):
        role, index = draw.choice(("master", "pserver", "pserver")), draw.randrange(2)
        aim = Aim(role, index, "write", 1 + draw.randrange(8), draw.choice(("before", "within", "within", "after")))
        kind = draw.choice(("kill", "kill", "freeze"))
        strikes.append(Strike(len(strikes), 0.0, kind, role, index, draw.choice(_EXTENTS[kind]), aim=aim))
    store_s, is_disk = draw.choice((0.01, 0.05, 0.2)), draw.random() < 0.5
    return replace(made, store_s=store_s, is_disk=is_disk, strikes=tuple(strikes))


def _aimed(made: Scenario, draw: random.Random, aims: Sequence[tuple[str, str, int]] = _AIMS) -> Scenario:
    """Return a job that is also struck at certain events."""
    strikes = list(made.strikes)
    for _ in range(draw.choice((1, 3, 6))):
        role, event, usual = draw.choice(aims)
        kinds = _AIMED_AT_ETCD if event == "transaction" else _AIMED
        index, count = draw.randrange(2), 1 + draw.randrange(usual)
        aim = Aim(role, index, event, count, draw.choice(("before", "after")))
        kind = draw.choice(kinds)
        strikes.append(Strike(len(strikes), 0.0, kind, role, index, draw.choice(_EXTENTS[kind]), aim=aim))
        if draw.random() < _PAIRS:
            other, kind = draw.choice(_ROLES), draw.choice(("kill", "freeze"))
            extent = draw.choice(_EXTENTS[kind])
            strikes.append(Strike(len(strikes), 0.0, kind, other, index + (other == role), extent, aim=aim))
    return replace(made, strikes=tuple(strikes))


def _starved(made: Scenario, draw: random.Random) -> Scenario:
    """Return a job whose pservers sometimes cannot allocate memory."""
    strikes = list(made.strikes)
    for _ in range(draw.choice((2, 4, 8))):
        place, usual = draw.choice(_ALLOCATIONS)
        role, index = draw.choice(("pserver", "pserver", "standby")), draw.randrange(2)
        aim = Aim(role, index, f"call {place}", 1 + draw.randrange(usual), "before")
        strikes.append(Strike(len(strikes), 0.0, "no memory", role, index, aim=aim))
    return replace(made, strikes=tuple(strikes))


def _also(made: Scenario, draw: random.Random, kind: str, counts: tuple[int, ...]) -> Scenario:
    """Return a job that is also struck in this way, some times while it is struck by others."""
    count, end_s = draw.choice(counts), made.calm_after_s or 5.0
    strikes = [
        Strike(len(made.strikes) + number, 0.5 + draw.random() * end_s, kind, "master", 0, draw.choice(_EXTENTS[kind]))
        for number in range(count)
    ]
    return replace(made, strikes=made.strikes + tuple(strikes))
