"""Bugs planted in what a pserver decides: blocks, rounds, applied sets, snapshots, rows of tables. See ``planted``."""

from __future__ import annotations

from flightedl.testing.simulation.planted import Planted, answers, bug, drops, rewrites, swaps

_BLOCKS = "domain.pserver.blocks:BlockProtocol."
_ROUNDS = "domain.consistency.rounds:BlockRounds."
_VIEW = "domain.consistency.views:PserverView."
_APPLIED = "domain.exactly_once.applied:AppliedBatches."
_LIFE = "domain.pserver.life:PserverLife."
_CUT = "domain.checkpoint.snapshot:SnapshotCut."
_SHARD = "testing.simulation.shard:Shard."
_SINCE = "domain.checkpoint.changes:ChangesSince."
_TABLE = "testing.reference_table:ReferenceTable."
_SPANS = "domain.tables.restoring:TakenSpans."

PSERVER_BUGS: dict[str, Planted] = {
    "lost values are zeros": bug(
        "a pserver whose values are lost begins from nothing",
        swaps(f"{_LIFE}_seek_values", "return (Lack(election),)", "return self._serve(election, None)"),
    ),
    "what others could not load is loaded": bug(
        "pservers that go back never agree on a checkpoint",
        swaps("domain.pserver.search:CheckpointSearch.__init__", "= rejected", "= ()"),
    ),
    "orders to go back are forgotten": bug(
        "a pserver that is told to go back stays",
        swaps(f"{_LIFE}apply", "is State.ENDED", "is State.ENDED or isinstance(event, ReloadAsked)"),
    ),
    "late gradients are dropped": bug(
        "what comes after its round has closed without it is marked, and not added",
        rewrites(
            f"{_ROUNDS}_arrive_late",
            "return Accumulate(self._contribute(member, weight, batch).is_first, is_late=True)",
            "self._contribute(member, weight, batch)\nreturn _ARRIVED",
        ),
    ),
    "a round closes too early": bug(
        "a round does not wait for the last of its members",
        swaps(f"{_ROUNDS}closable", "self._missing <= self._backup and", "self._missing <= 1 and"),
    ),
    "marks in another block": bug(
        "a batch is marked as applied in the block beside it",
        swaps(
            f"{_APPLIED}mark_together",
            "(self._masks.get(blocks) if isinstance(blocks, range) else None) or self._masks_of(blocks)",
            "self._masks_of(sorted({max(block - 1, 0) for block in blocks}))",
        ),
    ),
    "no dedupe": bug(
        "a pserver applies a batch that it has already",
        swaps(f"{_BLOCKS}push", "is_new = not any(having)", "is_new = not any(having) or all(having)"),
    ),
    "apply before check": bug(
        "a pserver applies a gradient before it looks at who sent it",
        rewrites(
            f"{_BLOCKS}push",
            "return Pushed(Outcome.NOT_MEMBER, rounds.version)",
            """
            update = Update(rounds.version, rounds.version, span.updates, batches, is_of_round=False)
            span.updates += 1
            return Pushed(Outcome.NOT_MEMBER, rounds.version, [update])
            """,
        ),
    ),
    "snapshot without applied": bug(
        "a checkpoint has values without the batches that are in them",
        swaps(f"{_BLOCKS}restore", "self._applied = applied", "self._applied = AppliedBatches(applied.numbers)"),
    ),
    "marks of the open round are saved": bug(
        "a checkpoint says that it has batches which wait in an accumulator",
        swaps(f"{_CUT}cut", "for batch, batch_count in held", "for batch, batch_count in ()"),
    ),
    "marks after the cut are saved": bug(
        "a checkpoint says that it has batches which came after its copy", answers(f"{_CUT}marked")
    ),
    "blocks change before they are copied": bug(
        "a push does not copy blocks that are due before it changes them", answers(f"{_BLOCKS}_copies_due", "[]")
    ),
    "old views are taken": bug(
        "a pserver follows a deposed master", swaps(f"{_VIEW}consider", "number < self.number", "number < (0, 0)")
    ),
    "sums are taken twice": bug(
        "a block that has some batches of a sum takes the sum all the same",
        rewrites(
            f"{_BLOCKS}push",
            "return self._refuse_sum(span, push, base_version, having_bits(map(bool, having)))",
            """
            for batch, batch_count in batches:
                self._applied.mark(span.numbers, batch, batch_count)
            is_new = True
            """,
        ),
    ),
    "only the first of a sum is marked": bug(
        "a block takes a sum and does not note all of its batches",
        swaps(f"{_BLOCKS}push", "mark_together(span.numbers, batches)", "mark_together(span.numbers, batches[:1])"),
    ),
    "a refusal names no batch": bug(
        "a block that refuses a sum says that it has all of its batches",
        swaps(f"{_BLOCKS}push", "having_bits(map(bool, having))", 'b"\\xff" * len(having_bits(map(bool, having)))'),
    ),
    "a mode begins anywhere": bug(
        "pservers change the mode without agreeing on a round",
        answers(f"{_ROUNDS}can_switch", "True"),
        rewrites(f"{_ROUNDS}switch", "", "at_version = self.version"),
    ),
    "refused and marked": bug("a batch that the round refuses stays marked", answers(f"{_BLOCKS}_unmark")),
    "un-marked in part": bug(
        "of a sum that the round refuses only the first batch is un-marked",
        swaps(f"{_BLOCKS}_unmark", "in batches:", "in batches[:1]:"),
    ),
    "the set of the block beside it": bug(
        "blocks that are put together from files get each other's applied sets",
        rewrites(f"{_APPLIED}rebuilt", "", "blocks = [*blocks[1:], *blocks[:1]]"),
    ),
    "applied sets by place": bug(
        "on another number of pservers a block gets the applied set of another block of its file",
        rewrites(
            f"{_APPLIED}rebuilt",
            "",
            """
            sources = [source for source, _ in blocks]
            blocks = [(it, sum(each is it for each in sources[:at])) for at, it in enumerate(sources)]
            """,
        ),
    ),
    "restored as the first of them": bug(
        "blocks that lie together are restored at the version and with the updates of the first of them",
        rewrites(
            f"{_BLOCKS}restore",
            "",
            "blocks = {number: blocks[span.numbers.start] for span in self.spans for number in span.numbers}",
        ),
    ),
    "rounds of the removed stay open": bug(
        "a view removes a member, and its rounds go on waiting",
        drops(f"{_BLOCKS}_change_members", "self._close_rounds(span, effects)"),
    ),
    "a split forgets its round": bug(
        "blocks that are taken apart lose what waits in their round",
        rewrites(
            f"{_BLOCKS}split",
            "part.updates = span.updates",
            """
            part.updates = span.updates
            if part.rounds.held:
                part.rounds = BlockRounds(self.mode, span.rounds.version)
                part.rounds.change(span.rounds.members, ())
            """,
        ),
    ),
    "marked in the first block": bug(
        "a batch is marked in the first of the blocks that it is pushed to",
        swaps(
            f"{_APPLIED}mark_together",
            "(self._masks.get(blocks) if isinstance(blocks, range) else None) or self._masks_of(blocks)",
            "self._masks_of(blocks[:1])",
        ),
    ),
    "an epoch collapses too early": bug(
        "an epoch counts as applied as a whole while a task of it is not",
        swaps(
            "domain.exactly_once.cohorts:Cohort._collapse",
            "epoch.done.count == epoch.task_count:",
            "epoch.done.count >= epoch.task_count - 1 and not epoch.tasks:",
        ),
    ),
    "a join at a round gone by": bug(
        "a pserver admits a member to rounds that it has closed", answers(f"{_ROUNDS}can_admit", "True")
    ),
    "those who left stay": bug(
        "a pserver does not remove the members that a view does not name",
        swaps(
            f"{_VIEW}consider",
            "tuple(member_id for member_id in self._members if member_id not in wanted)",
            "()",
        ),
    ),
    "blocks are copied at once": bug(
        "a checkpoint at a round has blocks of other rounds",
        answers(f"{_CUT}is_due", "self._versions[block] is None"),
    ),
    "old orders are new": bug(
        "a pserver makes a snapshot that was ordered before its present one",
        swaps(
            "domain.checkpoint.snapshot:PserverSnapshots.take",
            "not snapshot.order.is_newer_than(self._newest)",
            "False",
        ),
    ),
    "who has seen more goes on": bug(
        "a process does not notice that its etcd has gone back",
        drops("domain.recovery.store_history:Witness.saw", "self.broken_because = went_back(known, now)"),
    ),
    "drained by any checkpoint": bug(
        "a pserver that was told to end does not wait for a checkpoint that has what it has",
        answers(f"{_LIFE}is_drained", "self.state is State.DRAINING and self._newest_checkpoint is not None"),
    ),
    "divided by the members": bug(
        "the mean of a round is divided by the number of its members, not by their weights",
        swaps(
            f"{_ROUNDS}close", "(self.version, self._total_weight,", "(self.version, float(len(self._contributors)),"
        ),
    ),
    "repeated weights count": bug(
        "a batch that a block has already adds its weight to the divisor of the round",
        rewrites(
            f"{_ROUNDS}_arrive_in_time",
            "if already_applied or not weight:",
            """
            if already_applied and self._contributors:
                self._contributors[member] = self._contributors.get(member, 0.0) + weight
                self._total_weight += weight
            if already_applied or not weight:
            """,
        ),
    ),
    "late gradients weigh one": bug(
        "what comes after its round counts with another weight in the divisor than in the sum",
        swaps(f"{_ROUNDS}_arrive_late", "(member, weight, batch)", "(member, min(weight, 1.0), batch)"),
    ),
    "added without its weight": bug(
        "a gradient counts once in the sum of its round, and with its weight in the divisor",
        swaps(f"{_BLOCKS}_take", "AddGradient(push.batches[0][0], weight,", "AddGradient(push.batches[0][0], 1.0,"),
    ),
    "the mean of the first mode": bug(
        "after a change of the mode gradients are still added up, or still averaged, as before",
        swaps(
            f"{_BLOCKS}_set_mode",
            "self._is_mean = ",
            'self._is_mean = self._is_mean if hasattr(self, "_is_mean") else ',
        ),
    ),
    "scaled as in the first mode": bug(
        "after a change of the mode the learning rate is still divided by the staleness, or still is not",
        swaps(
            f"{_BLOCKS}_set_mode",
            "self._scales_by_staleness = ",
            'self._scales_by_staleness = self._scales_by_staleness if hasattr(self, "_scales_by_staleness") else ',
        ),
    ),
    "its own update makes it stale": bug(
        "the update that a gradient makes counts among those that it did not see",
        swaps(f"{_ROUNDS}arrive", "Apply(version - base_version)", "Apply(version - base_version + 1)"),
    ),
    "the first step again": bug(
        "the optimizer counts its steps from the beginning after a checkpoint was loaded",
        rewrites(f"{_BLOCKS}restore", "", "blocks = {number: (version, 0) for number, (version, _) in blocks.items()}"),
    ),
    "slots are not restored": bug(
        "a pserver begins with the values of a checkpoint and with empty slots",
        swaps(f"{_SHARD}restore", "shard.slots[place]", "0"),
    ),
    "slots of another version": bug(
        "a checkpoint has the slots that there were when it was written, beside values copied before",
        swaps(f"{_SHARD}_save", "copy[3] for copy in copies", "block.slot for block in self.blocks"),
    ),
    "slots of another block": bug(
        "blocks get each other's slots when they are restored",
        swaps(f"{_SHARD}restore", "shard.slots[place]", "shard.slots[::-1][place]"),
    ),
}

#: Runs with one of these are runs with rows.
ROW_BUGS: dict[str, Planted] = {
    "a failed increment swallows changes": bug(
        "what had changed up to a cut whose file came to nothing is in no later increment",
        swaps(f"{_SINCE}cut", "reduce(self._merge, (self._before[1], since_newest))", "since_newest"),
    ),
    "increments are on whatever was cut": bug(
        "an increment has what has changed since a cut whose file is in no checkpoint",
        rewrites(f"{_SINCE}cut", "", "after = self._newest if self.knows(after) else after"),
    ),
    "increments on a file that a pserver does not have": bug(
        "a chain goes on with whatever process has the index, which does not look whether it knows what has changed",
        swaps("domain.checkpoint.chains:Chains.offer", " or known.generation != generation", ""),
        answers(f"{_SINCE}knows", "bool(file)"),
        swaps(f"{_SINCE}cut", "return found", "return since_newest if found is None and after else found"),
    ),
    "a new master takes increments for bases": bug(
        "what the newest checkpoint's files are built on is forgotten when another master takes over",
        rewrites(
            "domain.checkpoint.checkpoints:Checkpoints.restore",
            "",
            """
            from msgspec.structs import replace
            files = [replace(file, links=(), after="") for file in files]
            """,
        ),
    ),
    "increments are read alone": bug(
        "rows are restored without the base",
        swaps("domain.checkpoint.manifest:ShardFile.chain", "(*self.links, self)", "(self,)"),
    ),
    "removed rows return": bug(
        "a restore takes no notice of what an increment says was removed", answers(f"{_TABLE}remove")
    ),
    "a failed increment swallows removals": bug(
        "what a cut removed whose file came to nothing is in no later increment",
        swaps(
            f"{_SINCE}cut",
            "reduce(self._merge, (self._before[1], since_newest))",
            "reduce(self._merge, (self._before[1], since_newest))._replace(removed=since_newest.removed)",
        ),
    ),
    "admission begins anew": bug(
        "how often an id was pushed that waits for admission is lost by a restore",
        drops(f"{_TABLE}restore", "self.waiting[row_id] = copied"),
    ),
    "rows go a version too early": bug(
        "a restore gives up rows of one version more than their file had given up",
        swaps(f"{_TABLE}expire", "row.version < least", "row.version <= least"),
    ),
    "what one bucket gave up is gone in all": bug(
        "rows that come from a file go by the rule of the bucket that has given up most",
        swaps(f"{_TABLE}expire", "oldest.get(self.bucket_of(row_id))", "max(oldest.values())"),
    ),
    "rows forget the epoch": bug(
        "a restore does not know of which epoch its rows are", answers(f"{_SPANS}epoch_of", "0")
    ),
    "rows live a version too long": bug(
        "a row that has expired is there for one version more",
        rewrites(f"{_TABLE}exists", "", "version = max(0, version - 1)"),
    ),
    "bases are deleted": bug(
        "retention deletes what kept checkpoints are increments on",
        answers("domain.checkpoint.manifest:since_of"),
    ),
}
