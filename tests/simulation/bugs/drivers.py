"""Bugs in the drivers of the product: client, pserver, master, coordination, rpc and wire.

``found_bugs.json`` has a seed for each bug that one finds, and for the others the number of seeds that were tried.
``NEEDS`` states what the simulation lacks to find those.
"""

from __future__ import annotations

from tests.support.planting import Planted, answers, bug, drops, rewrites, swaps

_SHARD = "pserver.shard:Shard."
_MOVER = "pserver.moving.mover:Mover."
_SERVICE = "pserver.service:PserverService."
_KEY = "coordination.keeper:HeldKey."
_DIRECTORY = "coordination.directory:Directory."
_SERVERS = "client.connections:Servers."
_CLIENT = "client.model.shard_client:ShardClient."
_ELECTION = "client.model.election:_Driver."
_LINK = "master.pservers:PserverLink."
_STATE = "master.state:JobState."
_PROCESS = "pserver.main:PserverProcess."
_ROWS = "rowstore.table:RowTable."
_DATA = "client.data.group_dataset:GroupDataset."
_ATTENDANCE = "client.data.attendance:GroupAttendance."
_GROUP = "domain.groups.incarnation:Group."
_PLAN = "domain.groups.plan:RoundPlan."

#: Bugs of groups of ranks. Their seeds always have a group.
GROUP_BUGS: dict[str, Planted] = {
    "uncommitted rounds count": bug(
        "a position includes rounds that the script has fetched, but not committed",
        swaps(
            f"{_DATA}_handed",
            "self._uncommitted.append((step, batch))",
            "self._uncommitted.append((step, batch))\nself._counted.count()",
        ),
        drops(f"{_DATA}commit", "self._counted.count()"),
    ),
    "a position lacks the current round": bug(
        "a position that is saved before the next batch is requested lacks the current round",
        drops(f"{_DATA}_handed", "self._counted.count()"),
        rewrites(
            f"{_DATA}_rounds",
            "self._handed_out = None",
            "if not self._explicit_commit:\n    self._counted.count()\nself._handed_out = None",
        ),
    ),
    "ranks ignore the position of others": bug(
        "a rank that has not loaded the position begins at the beginning of the data",
        drops(f"{_DATA}_begin", "self.load_state_dict({_KEY: agreed})"),
    ),
    "the reader begins at the beginning": bug(
        "the reader thread ignores the loaded position",
        swaps(f"{_DATA}_begin", "self._plan_from(self._counted.position())", "self._plan_from(BEGINNING)"),
    ),
    "excluded records are read": bug(
        "ranks get the records that have killed ranks before",
        answers(f"{_DATA}_kept", "step"),
    ),
    "a rank leaves unfinished": bug(
        "a rank does not report that it has reached the end of the data",
        answers(f"{_ATTENDANCE}finish"),
    ),
    "the group is not stored": bug(
        "the master answers ranks before their group is stored",
        drops("domain.master.groups:GroupRequests._act", "self._outbox.touch()"),
    ),
    "one rank ends the group": bug(
        "the group is over when the first rank has left",
        swaps(f"{_GROUP}leave", " and all(each.has_left for each in ranks)", ""),
    ),
    "lanes change within an epoch": bug(
        "an epoch that is resumed with another batch size has other lanes",
        swaps(f"{_PLAN}_begin", "start.order if start.records else self._order", "self._order"),
    ),
    "an epoch's end is not its end": bug(
        "a position after the last round of an epoch with records left out is not the beginning of the next one",
        drops(f"{_PLAN}position", "return Position(self._start.epoch + 1)"),
    ),
    "a resumed epoch has too many rounds": bug(
        "the last batches of an epoch that is resumed are empty",
        swaps(f"{_PLAN}_begin", "max(self._total - start.records, 0)", "self._total"),
    ),
    "a stopped group ends at a round that has passed": bug(
        "the last round of a stopped group is one that some ranks have passed",
        swaps(f"{_GROUP}_fix_end", "stop_after=max(", "stop_after=min("),
    ),
    "lanes outlive their epoch": bug(
        "a rank reads an epoch's first records in the order of the epoch before",
        drops("client.data.pieces:PieceReader._opened", "self._lanes.clear()"),
    ),
}

#: Bugs of moves. Their seeds always have moves.
MOVE_BUGS: dict[str, Planted] = {
    "frozen units take pushes": bug(
        "a push between the last copy of blocks that move and their new owner's answer is applied to the old ones",
        answers("pserver.shard:Shard._require_thawed"),
    ),
    "pinned units do not hold views back": bug(
        "a pserver applies a view, or begins a cut, after it has sent the state of blocks that move",
        swaps(f"{_MOVER}no_unit_is_pinned", "if self._pinned or self._acknowledged:", "if False:"),
    ),
    "units freeze within a round": bug(
        "blocks that move freeze while their open round has gradients",
        swaps(
            f"{_MOVER}_freeze",
            "if self._shard.freeze(leaving.numbers):",
            "if self._shard.freeze(leaving.numbers) or True:",
        ),
    ),
    "moves ignore generations": bug(
        "a move is stored although a process that takes part in it was replaced",
        swaps(
            "master.moves:MoveTransactions._executed",
            "for index, each in transaction.generations),",
            "for index, each in ()),",
        ),
    ),
    "a unit is sent to any process": bug(
        "a pserver sends its blocks to a process that has replaced the one that the move names",
        swaps(
            "pserver.moving.peers:Peers.pserver", "record is None or record.generation != generation", "record is None"
        ),
    ),
    "a move is not repeated after an unknown outcome": bug(
        "the master forgets a transaction of a move if etcd's answer is lost",
        rewrites(
            "master.moves:MoveTransactions._repeated",
            "except (UnavailableError, OutcomeUnknownError):",
            "except OutcomeUnknownError:\n    return None\nexcept UnavailableError:",
        ),
    ),
    "a stale span takes pushes": bug(
        "a push that waited for a lock is applied to blocks that have left in the meantime",
        swaps(f"{_SHARD}_push", "if span.is_split:", "if False:"),
    ),
    "all blocks are asked for by number of pserver": bug(
        "a sender that names no blocks gets those that a pserver happens to have",
        swaps(
            f"{_SHARD}all_numbers", "if placement_of_hash(plan_hash) < self._placement + self._has_moved:", "if False:"
        ),
        swaps(f"{_CLIENT}_pull", " and self._placement <= 1", ""),
    ),
    "gradients keep their old places": bug(
        "gradients that are pushed again after a move are laid out for the old owners",
        swaps(
            "client.model.parameters:Parameters._find_placement",
            "self._layout.plans.placed(outgoing, self._layout.plan)",
            "outgoing",
        ),
    ),
    "acknowledged units are adopted unprepared": bug(
        "a pserver acknowledges blocks before it has allocated them",
        drops(f"{_MOVER}_receive_last", "arrival.prepare()"),
    ),
    "a move that failed is not given up": bug(
        "the intent of a move that has failed stays in etcd",
        answers("pserver.moving.peers:Peers.give_up"),
    ),
    "a thawed unit stays pinned": bug(
        "a pserver refuses views for ever after a move that was given up",
        drops(f"{_MOVER}_thaw", "self._pinned.difference_update(numbers)"),
    ),
    "an acknowledgement is sent once": bug(
        "a pserver does not repeat the acknowledgement of blocks that move to it",
        rewrites(
            f"{_MOVER}_acknowledge",
            "acknowledged = list(self._acknowledged.values())",
            "acknowledged = list(self._acknowledged.values())\nself._acknowledged.clear()",
        ),
    ),
    "placements are not followed": bug(
        "a master does not learn the outcome of moves from etcd",
        drops(
            "master.service:MasterService.read_directory",
            "state.apply(read_moves("
            "self._directory.entry(keys.placement), self._directory.entry(keys.moving), revision))",
        ),
    ),
    "the plan of a shard is never replaced": bug(
        "a pserver whose blocks have moved goes on under the old plan",
        drops(f"{_SERVICE}_has_moved", "self._apply(happens.Placed(shard.plan_hash))"),
    ),
    "blocks are acknowledged during a cut": bug(
        "a pserver acknowledges blocks while it copies its own blocks for a checkpoint",
        swaps(
            "pserver.moving.arrival:Arrival.prepare",
            "if (unmovable := self._shard.unadoptable(state)) is not None:",
            "if (unmovable := None):",
        ),
    ),
    "a checkpoint begins during a move": bug(
        "the transaction that begins a move does not exclude a checkpoint that has begun since",
        swaps("master.moves:MoveTransactions._executed", "if transaction.excludes_checkpoint:", "if False:"),
    ),
}

#: Bugs of tables. Their seeds always have a table.
ROW_BUGS: dict[str, Planted] = {
    "removals in increments are ignored": bug(
        "rows that were removed before an increment exist again after a restore",
        answers("rowstore.tables:RowTables.restore_removed"),
    ),
    "waiting ids are not restored": bug(
        "a restore loses the push counts of ids that wait for admission",
        rewrites(f"{_ROWS}restore", "", "if chunk.is_waiting:\n    return"),
    ),
    "a restore evicts rows too early": bug(
        "a restore evicts rows of one version too many",
        swaps(f"{_ROWS}restore_table", "oldest, count = (cut.oldest,", "oldest, count = (cut.oldest + 1,"),
    ),
    "a limit of one bucket holds for all": bug(
        "a restore evicts rows of all buckets by the limit of the strictest bucket",
        swaps(
            f"{_ROWS}restore_table",
            "cut.given_up[buckets.start : buckets.stop])",
            "cut.given_up[buckets.start : buckets.stop].max())",
        ),
    ),
    "rows expire too late": bug(
        "an expired row exists for one version too long",
        swaps(
            f"{_ROWS}oldest",
            "return version - self._unused_versions if",
            "return version - self._unused_versions - 1 if",
        ),
    ),
}

#: Bugs of standbys. Their seeds always have standbys.
STANDBY_BUGS: dict[str, Planted] = {
    "a claim does not compare the standby": bug(
        "a process claims an index although another process is its standby",
        swaps("domain.moving.standby:claims", "else index not in standbys", "else True"),
        swaps(f"{_PROCESS}_claim_free", "[CreatedAt(key, claim.standby)] if claim.standby else [Absent(key)]", "[]"),
    ),
    "a standby outlives its key": bug(
        "a process claims an index as its standby after its key was deleted and another process held the index",
        swaps("domain.moving.standby:keeps_following", "and not is_dismissed", ""),
        swaps(f"{_PROCESS}_claim_free", "[CreatedAt(key, claim.standby)] if claim.standby else [Absent(key)]", "[]"),
    ),
    "a copy names the newest batches": bug(
        "the applied set of a copy for a standby is newer than its values",
        swaps(
            "pserver.moving.copies:Copies._cut",
            "return applied.encode()",
            "return self._shard.applied().encode()",
        ),
    ),
}

DRIVER_BUGS: dict[str, Planted] = {
    **MOVE_BUGS,
    **ROW_BUGS,
    **STANDBY_BUGS,
    **GROUP_BUGS,
    "any generation is served": bug(
        "a server answers calls that are meant for the process before it",
        drops(
            "rpc.admission:Admission.admit",
            "self.identity.check_meant_by(ServerIdentity.from_header(headers[EXPECT_HEADER]))",
        ),
    ),
    "lost leases go unnoticed": bug(
        "a process acts under its key although it has not renewed the lease in time",
        answers("coordination.keeper:HeldKey.is_held", "True"),
    ),
    "replies before they are durable": bug(
        "the master answers before the state that the answer follows from is stored",
        answers("master.durable:DurableState.wait"),
    ),
    "calls before they are durable": bug(
        "the master calls pservers before the state that the call follows from is stored",
        drops("master.pservers:PserverLink._call", "self._state.wait_durable(call.revision)"),
    ),
    "broken streams are kept": bug(
        "a stream whose request failed serves the next request",
        swaps("rpc.reuse:ReusableExchange.end", "error is not None", "False"),
    ),
    "blocks change before they are copied": bug(
        "an update does not wait for the copy of the values that a checkpoint needs",
        swaps("pserver.shard:Shard._carry_out", "CopyBlocks | BlocksDue", "BlocksDue"),
    ),
    "a broken push counts": bug(
        "blocks that did not answer a push count as if nothing had failed",
        swaps("client.model.shard_client:ShardClient._attempt", "answers, moved)", "answers)"),
    ),
    "tasks outlive a registration": bug(
        "a trainer keeps tasks that it was assigned under a lease that has ended",
        answers("client.data.feed:TaskFeed.registered_again"),
    ),
    "a new lease is no news": bug(
        "a trainer does not notice that it has registered again",
        swaps("client.registration:Registration._renew", "self._is_news = True", "self._is_news = False"),
    ),
    "removed keys stay": bug(
        "processes whose keys are gone are still seen",
        drops("coordination.directory:Directory._apply", "entries.pop(event.key, None)"),
    ),
    "pushes after the lease": bug(
        "a pserver whose lease has ended applies pushes",
        answers("pserver.service:PserverService._find_lease_over"),
    ),
    "a deposed master writes": bug(
        "a master's writes do not compare its lock",
        swaps("coordination.keeper:HeldKey.write", "[fence, *extra_conditions]", "extra_conditions"),
    ),
    # coordination
    "a renewal counts from its answer": bug(
        "a lease is trusted for its whole time to live from the arrival of a late answer",
        swaps(f"{_KEY}_keep", "self._note_renewed(sent_at)", "self._note_renewed(self._clock.now())"),
    ),
    "two processes claim a key": bug(
        "a key is claimed although another process holds it",
        swaps(f"{_KEY}claim", "[Absent(key), *also_when]", "[*also_when]"),
    ),
    "a claim whose answer was lost counts": bug(
        "a process counts as the holder of a key if the answer to its claim was lost",
        answers("coordination.keeper:_claimed_after_all", "1"),
    ),
    "a directory misses deletions during an outage": bug(
        "keys that were deleted while a directory did not follow etcd stay in it",
        swaps(
            f"{_DIRECTORY}_follow",
            "for entry in listing.entries}",
            "for entry in (*self._snapshot[0].values(), *listing.entries)}",
        ),
    ),
    "a watch begins late": bug(
        "a directory misses the first change after its listing",
        swaps(f"{_DIRECTORY}_follow", "self._watch(listing.revision)", "self._watch(listing.revision + 1)"),
    ),
    "a directory gives up": bug(
        "a directory no longer follows etcd after etcd has failed once",
        rewrites(f"{_DIRECTORY}_follow", "self._trouble = str(error)", "return"),
    ),
    "a subscriber's error is swallowed": bug(
        "a pserver goes on although it has not carried out all effects of a change",
        drops(f"{_DIRECTORY}_replace", "self._failed(error)"),
        rewrites(
            "pserver.main:PserverProcess._look",
            "except FlightedlError as error:",
            "except Exception as error:\n    return\nexcept FlightedlError as error:",
        ),
    ),
    # master
    "files before the state is durable": bug(
        "a master writes manifests before the state that led to them is in etcd",
        swaps(
            "master.checkpointing:CheckpointStore._run",
            "if self._state.becomes_durable(lambda: self._is_stopping, work.revision):",
            "if True:",
        ),
    ),
    "an unknown outcome counts as written": bug(
        "a master takes a state for written if etcd's answer was lost",
        rewrites(
            "master.durable:DurableState._write",
            "except (UnavailableError, OutcomeUnknownError) as error:",
            "except OutcomeUnknownError:\n    return True\nexcept UnavailableError as error:",
        ),
    ),
    "waiters of a later revision are released": bug(
        "a request is answered when an earlier state is durable",
        swaps("master.durable:DurableState._write_on", "if wanted <= revision]", "]"),
        swaps("master.durable:DurableState._write_on", "if waiter[0] > revision]", "if False]"),
        swaps("master.durable:DurableState._write_on", "self._durable = revision", "self._durable = self._wanted"),
    ),
    "a manifest without files": bug(
        "a manifest is written although files of pservers are missing",
        answers("master.checkpointing:_missing_file", '""'),
    ),
    "a sweep deletes everything": bug(
        "files of a checkpoint under way are deleted",
        swaps(
            "master.checkpointing:CheckpointStore._sweep",
            "state.core.checkpointing.checkpoints.deletable(names)",
            "names",
        ),
    ),
    "a master calls a pserver that was replaced": bug(
        "a master keeps the connection to a pserver that was replaced",
        swaps(f"{_LINK}_connect", "if self._connection[:2] == (address, generation):", "if True:"),
    ),
    "calls to replaced pservers are not aborted": bug(
        "a master waits for the answer of a pserver that was replaced",
        answers(f"{_LINK}_leave_replaced"),
    ),
    "a failed view is not reported": bug(
        "a master's core does not learn that a call with a view has failed",
        swaps(f"{_LINK}_call", "if isinstance(request, ViewRequest):", "if False:"),
    ),
    "a lost election is not deleted": bug(
        "a master does not delete the election of a model whose values were lost",
        answers("master.beginning:delete_election"),
    ),
    "leases are read before their revision": bug(
        "a master takes leases for newer than they are",
        rewrites(
            "master.service:MasterService.read_directory",
            "state.apply(LeasesSeen(trainers, pservers, revision))",
            "state.clock.sleep(0.0)\nstate.apply(LeasesSeen(trainers, pservers, self._directory.revision))",
        ),
    ),
    # pserver
    "a deposed master's orders are taken": bug(
        "a pserver carries out requests of a master that was deposed",
        swaps(f"{_SERVICE}_check", "0 if found is None else found.generation", "0"),
        drops(f"{_SERVICE}_check", "self._life.check_request(request)"),
    ),
    "a stale pointer is restored": bug(
        "a pserver restores a checkpoint without having read which ones exist now",
        answers(f"{_SERVICE}_has_caught_up", "True"),
    ),
    "a restore forgets its batches": bug(
        "a restored pserver does not know which batches its values contain",
        swaps(
            f"{_SERVICE}_restore", "shard.restored(found.applied)", "shard.restored(type(found.applied)(shard.numbers))"
        ),
    ),
    "a snapshot is not a copy": bug(
        "a checkpoint contains updates that followed its cut",
        answers("pserver.cuts.copier:CopyMemory._copied", "array"),
    ),
    "due blocks are not copied before an update": bug(
        "an update changes blocks that a checkpoint has not copied yet",
        swaps(f"{_SHARD}_push", "if protocol.is_synchronous or self.copying.under_way:", "if protocol.is_synchronous:"),
    ),
    "a checkpoint loses the slots": bug(
        "a checkpoint has zeros in place of the optimizer's slots",
        swaps(
            "pserver.cuts.copier:SnapshotCopier.copy",
            "*(slot[at] for slot in span.slots)",
            "*(slot[at] * 0 for slot in span.slots)",
        ),
    ),
    "slots change after their cut": bug(
        "a checkpoint has values from its copy and slots from the time of writing",
        swaps(
            "pserver.cuts.copier:SnapshotCopier.copy",
            "values, *slots = self._memory.copy(number, [span.values[at], *(slot[at] for slot in span.slots)])",
            "values, *slots = *self._memory.copy(number, [span.values[at]]), *(slot[at] for slot in span.slots)",
        ),
    ),
    "slots are not loaded": bug(
        "a pserver loads the values of a checkpoint without the slots",
        drops("pserver.stores.dense:DenseStore._fill", "np.copyto(slot[at], saved)"),
    ),
    "slots are loaded into the first block": bug(
        "the slots of adjacent blocks are all loaded into the first of them",
        swaps(
            "pserver.stores.dense:DenseStore._fill",
            "np.copyto(slot[at], saved)",
            "np.copyto(slot[: saved.size], saved)",
        ),
    ),
    "a replaced cut is completed": bug(
        "the copies of an order that was replaced stay under way",
        answers("pserver.cuts.copying:Copying._drop"),
    ),
    "effects of a view are not carried out": bug(
        "rounds that a new view closes do not update the values",
        swaps(f"{_SHARD}set_members", "for first, effects in applied.effects:", "for first, effects in ():"),
    ),
    "initial values of any election are taken": bug(
        "a pserver accepts the values of a trainer that has lost the election",
        swaps(f"{_SHARD}initialize", "if is_accepted:", "if True:"),
    ),
    "lent values change": bug(
        "an update changes values that are being sent",
        answers("pserver.stores.array_span:ArraySpan.detach_for_write", "self.values"),
    ),
    "values before their round": bug(
        "a pserver answers a pull with the values of an earlier round",
        swaps(f"{_SHARD}read", "if state is Pull.WAIT:", "if False:"),
    ),
    "values whose round is open are forgotten": bug(
        "a step ends without the values whose rounds close late",
        drops("pserver.steps.session:awaited_values", "waiting.extendleft(reversed(missing))"),
    ),
    "a drain does nothing": bug(
        "a pserver that is asked to end does not wait for a checkpoint",
        answers("pserver.main:PserverProcess._drain"),
    ),
    # client
    "a repeated push has another identity": bug(
        "a push that is repeated after an error names another batch",
        swaps(
            f"{_CLIENT}_push",
            "identity=batch.identity,",
            "identity=batch.identity if self.conversation.waiting is None else type(batch.identity)("
            "epoch=batch.identity.epoch, task=batch.identity.task, batch_count=batch.identity.batch_count, "
            "batch=(batch.identity.batch + 1) % batch.identity.batch_count),",
        ),
    ),
    "a failed transfer counts as complete": bug(
        "a trainer goes on although some blocks have not answered its push",
        swaps(f"{_CLIENT}_converse", "if not isinstance(verdict, Over):", "if isinstance(verdict, Refused):"),
    ),
    "a push is not repeated after an unknown outcome": bug(
        "a trainer takes a push for applied if its answer was lost",
        rewrites(
            f"{_CLIENT}_attempt",
            "moved = or_moved(error, is_newest=self._is_newest(self._plan_hash))",
            "if isinstance(call, Push):\n"
            "    answers.extend(Answer(number, number + 1, Outcome.ACCEPTED, None) for number in call.blocks)\n"
            "moved = or_moved(error, is_newest=self._is_newest(self._plan_hash))",
        ),
    ),
    "errors of a pserver are dropped": bug(
        "a step ends without an error although one of its pservers has failed",
        swaps("client.model.parameters:Parameters._ask_all", "if errors:", "if False:"),
    ),
    "final values of any process": bug(
        "a trainer reads final values from a pserver that lacks batches",
        answers("client.participation:Participation.require_final"),
    ),
    "a membership outlives a registration": bug(
        "a trainer that has registered again goes on as the member that it was",
        drops("client.participation:Participation._renew_registration", "self.membership.lost()"),
    ),
    "a stream outlives its connection": bug(
        "a trainer sends steps to the process that a pserver has replaced",
        swaps("rpc.reuse:ReusableExchange.begin", "connection is held.connection and ", ""),
    ),
    "a pserver's address is never read again": bug(
        "a trainer keeps the connection to a pserver that was replaced",
        swaps(f"{_SERVERS}pserver", "if known is None or known[0] is not state:", "if known is None:"),
    ),
    "calls to replaced servers are not aborted": bug(
        "a trainer waits for the answer of a server that was replaced",
        answers(f"{_SERVERS}_leave_replaced"),
    ),
    "a failed request for tasks is forgotten": bug(
        "a trainer waits for the answer to a request that has failed",
        drops("client.data.feed:TaskFeed._run", "self._feed.ask_failed(error, self._clock.now())"),
    ),
    "revoked tasks are trained": bug(
        "a trainer goes on with a task that the master has given to another one",
        swaps("client.data.dataset:Dataset._open", "not feed.is_held(task) or ", ""),
    ),
    "a candidate's key outlives it": bug(
        "the election of the initial values waits for a trainer that has died",
        swaps(f"{_ELECTION}_stand", "[held.attached(key, record)]", "[Put(key, record)]"),
    ),
    "an election ignores generations": bug(
        "an election is complete although a pserver with its values was replaced",
        swaps(f"{_ELECTION}_confirm", "*received[:_CONDITIONS_LIMIT]", ""),
    ),
    "an upload counts before it ends": bug(
        "a pserver takes the initial values for complete that a connection broke off",
        rewrites(
            "rpc.streams:_Upload.read",
            'raise BrokenOffError("the upload broke off before its commit record; nothing of it counts")',
            "return None",
        ),
        swaps(
            f"{_SERVICE}first_values_received", "count = shard.initialized_count(election)", "count = shard.block_count"
        ),
    ),
    # rpc and wire
    "any server answers": bug(
        "a client takes the answer of another process at the same address",
        answers("rpc.client_streams:ClientCall.check_server"),
    ),
    "versions are read as zero": bug(
        "a received message loses the version of its blocks",
        swaps(
            "wire.parts:_decoded",
            "ReceivedBlocks(range(first, first + length), version,",
            "ReceivedBlocks(range(first, first + length), 0,",
        ),
    ),
    "the last part of a message is lost": bug(
        "a message with many parts lacks the last one",
        swaps("wire.parts:_decoded", "return parts, attached", "return parts[: max(1, len(parts) - 1)], attached"),
    ),
}

#: Bug that no seed has found -> what a scenario would need to find it.
NEEDS: dict[str, str] = {
    "a subscriber's error is swallowed": "subscribers that fail, for example by a MemoryError at an allocation",
    "a renewal counts from its answer": "answers of etcd that are late by most of a lease",
    "a claim whose answer was lost counts": "claims whose request etcd loses, aimed",
    "a directory misses deletions during an outage": "watches that an outage of etcd ends",
    "a watch begins late": "a change between a listing and its watch, aimed",
    "files before the state is durable": "a kill between a write to the store and the write to etcd, aimed",
    "an unknown outcome counts as written": "a lost request of the master's last write before it is killed, aimed",
    "waiters of a later revision are released": "a kill between an answer and the next write to etcd, aimed",
    "a manifest without files": "a pserver whose store is another one",
    "calls to replaced pservers are not aborted": "a bound on the time of a recovery",
    "calls to replaced servers are not aborted": "a bound on the time of a recovery",
    "values before their round": "scripts whose gradients depend on the values that they have read",
    "initial values of any election are taken": "trainers with different initial values",
    "any server answers": "ports that are used again after a process has ended",
    "a drain does nothing": "a check of the last checkpoint of a job that is stopped",
    "an election ignores generations": "a kill of a pserver between an upload and the end of the election, aimed",
    "an upload counts before it ends": "a connection that breaks during the upload of initial values, aimed",
    "a unit is sent to any process": "a kill of the destination between two messages of a move, aimed",
    "moves ignore generations": "a kill of the destination after its acknowledgement, aimed",
    "all blocks are asked for by number of pserver": "plain pulls during moves",
    "a checkpoint begins during a move": "a master that is deposed between a checkpoint's order and a move",
}
