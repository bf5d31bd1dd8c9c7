"""A trainer's decisions about its tasks, their batches, and its membership. Pure, like all of the domain.

* ``feed``: tasks that the trainer holds, requests to the master, and reports
* ``readings``: the loop over batches, and when a task is finished
* ``acknowledged``: the loop over batches without a model, in which the user acknowledges batches
* ``batches``: identity of a batch, and its state until every block has answered
* ``steps``: the messages of each call of the user's code, from opening to settling a batch
* ``transfers``: one push or pull in flight, and the meaning of answers and failures
* ``joined``: a pserver's answers for all its buckets of rows, combined into one answer
* ``sums``: the batches of the next sum to push, and their outcomes
* ``membership``: joining the view, and the mode of a membership
* ``first_values``: election of the trainer that provides the model's initial values
* ``ending``: the pservers whose values are final

The feed requests a task in advance. A reader reads its batches and passes them to the loop, which hands each batch to
the user's code as a member of the view. Each call of ``model.step`` becomes transfers to all pservers; when every block
has answered, the batch is settled. When all batches of a task are settled, the feed reports the task.

Threads and connections around these cores are in ``client``; the simulated trainer drives the same cores.
"""
