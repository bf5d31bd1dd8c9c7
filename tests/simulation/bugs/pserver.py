"""Bugs in the decisions of pservers (blocks, rounds, applied sets, snapshots, rows)."""

from __future__ import annotations

from tests.support.planting import Planted, answers, bug, drops, rewrites, swaps

_BLOCKS = "domain.pserver.blocks:BlockProtocol."
_ROUNDS = "domain.consistency.rounds:BlockRounds."
_VIEW = "domain.consistency.views:PserverView."
_APPLIED = "domain.exactly_once.applied:AppliedBatches."
_LIFE = "domain.pserver.life:PserverLife."
_CUT = "domain.checkpoint.snapshot:SnapshotCut."
_SINCE = "domain.checkpoint.changes:ChangesSince."
_SPANS = "domain.tables.restoring:RestoredSpans."

PSERVER_BUGS: dict[str, Planted] = {
    "lost values are zeros": bug(
        "a pserver whose values are lost begins with zeros",
        swaps(f"{_LIFE}_seek_values", "return (Lack(election),)", "return self._serve(election, None)"),
    ),
    "what others could not load is loaded": bug(
        "pservers load a checkpoint that another pserver could not load",
        swaps("domain.pserver.search:CheckpointSearch.__init__", "= rejected", "= ()"),
    ),
    "orders to go back are forgotten": bug(
        "a pserver ignores the order to go back to a checkpoint",
        swaps(f"{_LIFE}apply", "is State.ENDED", "is State.ENDED or isinstance(event, ReloadAsked)"),
    ),
    "late gradients are dropped": bug(
        "a gradient that arrives after its round is marked as applied, but not added",
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
    "restored rows expire early": bug(
        "rows expire by the epoch of a held batch before the batches of earlier epochs have been repeated",
        swaps(f"{_BLOCKS}restore", "span.is_behind = span.is_copied_at_once", "span.is_behind = False"),
    ),
    "no dedupe": bug(
        "a pserver applies a batch twice",
        swaps(f"{_BLOCKS}push", "is_new = not any(having)", "is_new = not any(having) or all(having)"),
    ),
    "apply before check": bug(
        "a pserver applies a gradient before it checks the sender",
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
        "a checkpoint has values without the record of their batches",
        swaps(f"{_BLOCKS}restore", "self._applied = applied", "self._applied = AppliedBatches(applied.numbers)"),
    ),
    "marks of the open round are saved": bug(
        "a checkpoint names batches that still wait in an accumulator",
        swaps(f"{_CUT}cut", "for batch, batch_count in held", "for batch, batch_count in ()"),
    ),
    "marks after the cut are saved": bug(
        "a checkpoint names batches that arrived after its copy", answers(f"{_CUT}marked")
    ),
    "what a cut still needs is not copied": bug(
        "a push does not copy blocks that are due before it changes them", answers(f"{_BLOCKS}_copies_due", "[]")
    ),
    "old views are taken": bug(
        "a pserver follows a deposed master", swaps(f"{_VIEW}consider", "number < self.number", "number < (0, 0)")
    ),
    "sums are taken twice": bug(
        "a block that already has some batches of a sum applies the whole sum",
        rewrites(
            f"{_BLOCKS}push",
            "return self._refuse_sum(span, push, base_version, applied_bits(map(bool, having)))",
            """
            for batch, batch_count in batches:
                self._applied.mark(span.numbers, batch, batch_count)
            is_new = True
            """,
        ),
    ),
    "only the first of a sum is marked": bug(
        "a block applies a sum and records only its first batch",
        swaps(f"{_BLOCKS}push", "mark_together(span.numbers, batches)", "mark_together(span.numbers, batches[:1])"),
    ),
    "a refusal names no batch": bug(
        "a block that rejects a sum reports that it has all of its batches",
        swaps(f"{_BLOCKS}push", "applied_bits(map(bool, having))", 'b"\\xff" * len(applied_bits(map(bool, having)))'),
    ),
    "a mode begins anywhere": bug(
        "pservers change the mode without agreeing on a round",
        answers(f"{_ROUNDS}can_switch", "True"),
        rewrites(f"{_ROUNDS}switch", "", "at_version = self.version"),
    ),
    "refused and marked": bug("a batch that the round refuses stays marked", answers(f"{_BLOCKS}_unmark")),
    "un-marked in part": bug(
        "when a round rejects a sum, only its first batch is unmarked",
        swaps(f"{_BLOCKS}_unmark", "in batches:", "in batches[:1]:"),
    ),
    "the set of the block beside it": bug(
        "blocks loaded from several files get each other's applied sets",
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
        "adjacent blocks are restored with the version and update count of the first of them",
        rewrites(
            f"{_BLOCKS}restore",
            "",
            "blocks = {number: blocks[span.numbers.start] for span in self.spans for number in span.numbers}",
        ),
    ),
    "rounds of the removed stay open": bug(
        "rounds still wait for a member that a view has removed",
        drops(f"{_BLOCKS}_change_members", "self._close_rounds(span, effects)"),
    ),
    "a split forgets its round": bug(
        "blocks that are split lose the gradients of their open round",
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
        "an epoch counts as applied while one of its tasks is not",
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
        "a pserver keeps members that a view does not name",
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
        "a pserver begins a snapshot that is older than its current one",
        swaps(
            "domain.checkpoint.snapshot:PserverSnapshots.take",
            "not snapshot.order.is_newer_than(self._newest)",
            "False",
        ),
    ),
    "who has seen more goes on": bug(
        "a process does not notice that etcd was restored from an older backup",
        drops("domain.recovery.store_history:Witness.saw", "self.broken_because = rollback_reason(known, now)"),
    ),
    "drained by any checkpoint": bug(
        "a pserver that was told to end does not wait for a checkpoint of its values",
        answers(f"{_LIFE}is_drained", "self.state is State.DRAINING and self._newest_checkpoint is not None"),
    ),
    "divided by the members": bug(
        "the mean of a round is divided by the number of members instead of their weights",
        swaps(
            f"{_ROUNDS}close", "(self.version, self._total_weight,", "(self.version, float(len(self._contributors)),"
        ),
    ),
    "repeated weights count": bug(
        "a repeated batch adds its weight to the divisor of the round",
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
        "a gradient that arrives after its round has another weight in the divisor than in the sum",
        swaps(f"{_ROUNDS}_arrive_late", "(member, weight, batch)", "(member, min(weight, 1.0), batch)"),
    ),
    "added without its weight": bug(
        "a gradient is added without its weight, but divided by it",
        swaps(f"{_BLOCKS}_apply", "AddGradient(push.batches[0][0], weight,", "AddGradient(push.batches[0][0], 1.0,"),
    ),
    "the mean of the first mode": bug(
        "after a change of mode, gradients are still summed or averaged as before",
        swaps(
            f"{_BLOCKS}_set_mode",
            "self._is_mean = ",
            'self._is_mean = self._is_mean if hasattr(self, "_is_mean") else ',
        ),
    ),
    "scaled as in the first mode": bug(
        "after a change of mode, the learning rate is still scaled by staleness, or still not",
        swaps(
            f"{_BLOCKS}_set_mode",
            "self._scales_by_staleness = ",
            'self._scales_by_staleness = self._scales_by_staleness if hasattr(self, "_scales_by_staleness") else ',
        ),
    ),
    "its own update makes it stale": bug(
        "a gradient's own update counts towards its staleness",
        swaps(f"{_ROUNDS}arrive", "Apply(version - base_version)", "Apply(version - base_version + 1)"),
    ),
    "the first step again": bug(
        "the optimizer's step count starts at 0 after a checkpoint is loaded",
        rewrites(f"{_BLOCKS}restore", "", "blocks = {number: (version, 0) for number, (version, _) in blocks.items()}"),
    ),
}

#: Runs with one of these bugs always use a table.
ROW_BUGS: dict[str, Planted] = {
    "a failed increment swallows changes": bug(
        "changes in a file that was not written are missing from later increments",
        swaps(f"{_SINCE}cut", "reduce(self._merge, (self._before[1], since_newest))", "since_newest"),
    ),
    "increments are on whatever was cut": bug(
        "an increment builds on a file that belongs to no checkpoint",
        rewrites(f"{_SINCE}cut", "", "after = self._newest if self.knows(after) else after"),
    ),
    "increments on a file that a pserver does not have": bug(
        "a new pserver process continues a chain without knowing the changes since its last file",
        swaps("domain.checkpoint.chains:Chains.offer", " or known.generation != generation", ""),
        answers(f"{_SINCE}knows", "bool(file)"),
        swaps(f"{_SINCE}cut", "return found", "return since_newest if found is None and after else found"),
    ),
    "a new master takes increments for bases": bug(
        "a new master forgets which files the newest checkpoint's increments build on",
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
    "a failed increment swallows removals": bug(
        "removals in a file that was not written are missing from later increments",
        swaps(
            f"{_SINCE}cut",
            "reduce(self._merge, (self._before[1], since_newest))",
            "reduce(self._merge, (self._before[1], since_newest))._replace(removed=since_newest.removed)",
        ),
    ),
    "rows forget the epoch": bug("a restore loses the epoch of its rows", answers(f"{_SPANS}epoch_of", "0")),
    "bases are deleted": bug(
        "retention deletes files that kept checkpoints build on",
        answers("domain.checkpoint.manifest:since_of"),
    ),
}
