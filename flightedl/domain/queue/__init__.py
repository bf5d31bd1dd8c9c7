"""The task queue: which trainer does which batches of which epoch.

``tasks`` decides; ``state`` is what it knows, ``values`` what goes in and comes out.

* ``order`` (with ``permutation``) is the order of dispatch, ``seeds`` what shuffles each epoch, ``batching`` the
  batches of a task, as a pure function.
* ``waiting`` are the pieces of work that wait to be handed out again, ``pending`` those in trainers' hands; ``backlog``
  is what one trainer holds, in order, and ``fair_share`` how much it may hold.
* ``clock`` measures how long pieces run, while any can run. ``mixture`` forms the tasks of several sources.
* ``ahead`` says what trainers may read of the next epoch.
* ``bisection`` finds the batches that are at fault when work fails, ``failed`` keeps those set aside.
* ``reopening`` makes done tasks todo again, after their updates were lost with a pserver.
* ``storage`` turns the state into the documents stored in etcd, and back.
"""
