"""What a trainer decides: its tasks, their batches, its membership. Pure, as all of the domain.

* ``feed``: what it holds, what it asks the master for and when, and what it reports.
* ``readings``: which batch the user's code gets next, and when a task is done. ``batches`` is the batch at hand, from
  the moment it is handed out until every block has answered for it. ``acknowledged``: the same where there is no model,
  and a batch is done when the user says so.
* ``steps``: what each call of the user's code sends and asks for, from a batch's membership to its settling.
  ``transfers`` is one push or pull on its way: what answers and failures mean for it. ``joined``: a pserver's answers
  for all its buckets of rows as one.
* ``sums``: which batches are in the sum that is pushed next, and what becomes of each.
* ``membership``: when it joins the view, and under which mode.
* ``first_values``: who gives the model its first values. ``ending``: which pservers' values are the result.

The drivers are in ``client``, threads and connections around these; the simulated trainer drives the same ones.
"""
