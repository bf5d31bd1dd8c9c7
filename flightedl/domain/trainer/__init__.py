"""A trainer's decisions about its tasks, their batches, and its membership.

* ``feed``: the tasks that the trainer holds, its requests to the master, and its reports
* ``readings``: the loop over batches, which finds out when a task is finished
* ``acknowledged``: the loop over batches of a job without a model, in which the user acknowledges batches
* ``batches``: identity of a batch, and its state until every block has answered
* ``steps``: the messages that follow from the user's calls, from opening a batch to settling it
* ``transfers``: one push or pull in flight, and what its answers and failures mean
* ``joined``: combines a pserver's answers for all of its buckets of rows into one answer
* ``sums``: the batches of the sum to be pushed next, and their outcomes
* ``membership``: when to join the view, and the mode of a membership
* ``first_values``: election of the trainer that provides the model's initial values
* ``ending``: the pservers whose values are known to be final

The feed requests tasks in advance. A reader reads their batches and passes them to the loop, which hands each batch to
the user's code while the trainer is a member of the view. Each call of ``model.step`` becomes transfers to all
pservers. When every block has answered, the batch is settled. The feed reports a task when all of its batches are
settled.

Threads and connections around these state machines are in ``client``; the simulated trainer drives the same state
machines.
"""
