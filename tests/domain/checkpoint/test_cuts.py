"""A cut made on request: all pservers cut at the same round, whatever they do in the meantime."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flightedl.domain.checkpoint.cuts import CutAgreement
from flightedl.domain.checkpoint.snapshot import PserverSnapshots, SnapshotCut
from flightedl.messages.control import CutRequest, OrderNumber, SnapshotReply


class Server:
    """A pserver with one block."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.progress = PserverSnapshots()
        self.cut: SnapshotCut | None = None
        self.order: OrderNumber | None = None

    def ask(self, request: CutRequest) -> SnapshotReply:
        if request.order.is_newer_than(self.order):
            self.order = request.order
            begins = self.progress.take(request, [self.version], self.version)
            self.cut = SnapshotCut([0], request.round) if begins else None
        if self.cut is not None:
            if not self.cut.is_complete and self.cut.is_due(0, self.version):
                self.cut.cut([0], self.version, [])
            if self.cut.is_complete:
                self.progress.taken(request.order)
        assert self.progress.progress is not None
        return self.progress.progress

    def advance(self) -> None:
        if self.cut is not None and not self.cut.is_complete and self.cut.is_due(0, self.version):
            self.cut.cut([0], self.version, [])
        self.version += 1


class Cluster:
    """Pservers, and the master's agreement."""

    def __init__(self, versions: list[int], *, has_rounds: bool) -> None:
        # In sync mode, no block is more than a round ahead of the others.
        least = max(versions) - 1 if has_rounds else 0
        self.servers = [Server(max(version, least)) for version in versions]
        self.now, self.has_rounds = 0.0, has_rounds
        self.agreement = CutAgreement(range(len(versions)), 7, 3, "p", 0.0, has_rounds=has_rounds)

    def ask(self, index: int) -> None:
        request = self.agreement.request(index)
        if request is not None:
            assert request.order.cut == (7, 3)
            self.agreement.answered(index, self.servers[index].ask(request), self.now)

    def train(self, index: int) -> None:
        server = self.servers[index]
        if not self.has_rounds or server.version == min(each.version for each in self.servers):
            server.advance()

    def pause(self) -> None:
        """End the open round, and then ask the pservers without training."""
        highest = max(server.version for server in self.servers)
        for server in self.servers if self.has_rounds else ():
            while server.version < highest:
                server.advance()
        for _ in range(12):
            self.now += 0.7
            for index in range(len(self.servers)):
                self.ask(index)


@given(
    versions=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    steps=st.lists(st.tuples(st.sampled_from(["ask", "train", "wait"]), st.integers(0, 3)), max_size=60),
    has_rounds=st.booleans(),
)
def test_all_pservers_cut_at_one_round(versions: list[int], steps: list[tuple[str, int]], has_rounds: bool) -> None:
    cluster = Cluster(versions, has_rounds=has_rounds)
    for what, number in steps:
        index = number % len(versions)
        if what == "ask":
            cluster.ask(index)
        elif what == "train":
            cluster.train(index)
        else:
            cluster.now += 0.7
    cluster.pause()
    assert cluster.agreement.is_complete, "training that pauses must not prevent the cut"
    cuts = [tuple(server.cut.versions) for server in cluster.servers if server.cut is not None]
    assert len(cuts) == len(versions)
    assert len(set(cuts)) == 1 or not has_rounds


def test_a_failure_is_reported_with_its_reason_and_late_replies_are_ignored() -> None:
    agreement = CutAgreement([0], 1, 1, "p", 0.0, has_rounds=True)
    first = agreement.request(0)
    assert first is not None
    agreement.answered(0, SnapshotReply(first.order, "refused", 9), 0.0)
    agreement.answered(0, SnapshotReply(first.order, "failed", reason="late"), 0.0)
    second = agreement.request(0)
    assert second is not None
    assert (second.round, second.order.serial, agreement.trouble) == (9, 1, "")
    agreement.answered(0, SnapshotReply(second.order, "failed", reason="no memory"), 0.0)
    assert agreement.trouble == "pserver 0 could not make the cut: no memory"
