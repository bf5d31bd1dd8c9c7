"""Measurements for developers, run from a clone by ``python -m benchmarks.NAME``; users have ``flightedl bench``.

* ``step_calls``: calls that one small step makes, in the trainer and the pserver.
* ``kernels``: the optimizers' loops against torch's fused ones.
* ``rows``: a pserver's table as it grows, and its checkpoints.
* ``dispatch``: the cost of dispatching a task, by the number of tasks; the master's memory and start.
* ``scale``: predicted cost of large jobs, based on measurements of small jobs.
* ``table_peers``: ``flightedl bench sparse`` also against Redis and torch.distributed.rpc.
* ``checkpoint``: a checkpoint of one big shard under pushes, against np.save and fsync.
* ``memory``: peak memory of a pserver with many trainers.
* ``data_restarts``: records that restarts within an epoch lose or repeat, against torchdata.
* ``deaths``: how long trainers wait for one that is killed where no launcher sees its end.
* ``following``: freshness of a follower, and its cost to training; ``followed_evictions``: its rows under kills.
* ``moving``: pauses of training while half of a model moves to new pservers.
* ``start``: a whole command: the first batch, short tasks.
"""
