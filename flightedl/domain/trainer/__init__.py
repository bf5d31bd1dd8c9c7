"""What a trainer decides: its tasks, their batches, its membership. Pure, as all of the domain.

* ``feed``: the tasks that it holds, when it asks the master for more, and its reports.
* ``readings``: the batch that the user's code gets next, and when a task is done. ``acknowledged``: the same without a
  model, where a batch is done when the user says so. ``batches``: a batch's identity, and its state until every block
  has answered for it.
* ``steps``: the messages of each call of the user's code, from a batch's opening to its settling. ``transfers``: one
  push or pull under way, and the meaning of answers and failures. ``joined``: a pserver's answers for all its buckets
  of rows as one.
* ``sums``: the batches of the sum that is pushed next, and the outcome of each.
* ``membership``: when it joins the view, and under which mode.
* ``first_values``: the election of the trainer that gives the model its first values. ``ending``: the pservers whose
  values are the result.

The drivers are in ``client``, threads and connections around these; the simulated trainer drives the same ones.
"""
