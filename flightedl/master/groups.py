"""Status of a job whose data goes to a group of ranks. Pure."""

from __future__ import annotations

import msgspec

from flightedl.domain.groups.incarnation import Group
from flightedl.domain.queue.tasks import TaskQueue
from flightedl.formats.record_places import record_ranges
from flightedl.master.failures import RANGES_LIMIT
from flightedl.master.indexing import IndexedDataset
from flightedl.messages.groups import Suspect
from flightedl.messages.status import FailedPiece, GroupStatus, StatusReply, TaskCounts


def with_group(reply: StatusReply, group: Group, queue: TaskQueue, indexed: IndexedDataset) -> StatusReply:
    """Return the status with the group's progress instead of the queue's, because the queue assigns no tasks."""
    record, total = group.record, indexed.layout.record_count
    places = [each.at for each in group.places.values()]
    epochs = reply.epochs or 1
    at = epochs * total if group.is_done else min(places) if len(places) == record.size else 0
    epoch = min(at // max(total, 1), epochs)
    done = reply.tasks.total if epoch == epochs else (at - epoch * total) * reply.tasks.total // max(total, 1)
    failed = [piece for each in record.convicted for piece in _failed(each, queue, indexed)]
    return msgspec.structs.replace(
        reply,
        epoch=epoch,
        records=at,
        tasks=TaskCounts(total=reply.tasks.total, done=done, todo=reply.tasks.total - done),
        failed=failed,
        group=GroupStatus(phase=record.phase, ranks=record.size, starts=record.starts, incarnation=record.incarnation),
    )


def _failed(convicted: Suspect, queue: TaskQueue, indexed: IndexedDataset) -> list[FailedPiece]:
    found = []
    for epoch, task, first, end in convicted.pieces:
        chunks = tuple(indexed.layout.chunks_of(task))
        ranges = list(record_ranges(chunks, first, end, queue.seed_of(epoch), epoch, task))
        of_first_file = [each for each in ranges if each.url == ranges[0].url]
        first_record = min(each.first_record for each in of_first_file)
        piece = FailedPiece(
            epoch=epoch,
            task=task,
            first_batch=0,
            end_batch=0,
            attempts=convicted.deaths,
            trainer="",
            error=convicted.error,
            url=ranges[0].url,
            chunk=ranges[0].chunk,
            first_record=first_record,
            records=max(each.first_record + each.records for each in of_first_file) - first_record,
            ranges=ranges[:RANGES_LIMIT],
        )
        found.append(piece)
    return found
