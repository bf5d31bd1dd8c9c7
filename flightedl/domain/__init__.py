"""The pure core: everything that decides, as state machines without I/O, threads or a clock.

A state machine takes an event (and ``now``, where time matters) and returns effects or an answer; a thin shell around
it (``master``, ``pserver``, ``client``) carries them out. Most have ``check()``, which asserts their invariants; tests
call it after every step. Of the package it imports only ``errors`` and ``messages``.

``master`` is the core of the master's process: the machines below put together, with all that a master decides.
``pserver`` is the same for a pserver's process: its life, from an index to its end. ``trainer`` is that of a trainer's
process: its tasks, their batches, its membership.

The task queue: which trainer does which batches of which epoch.

* ``tasks`` decides; ``tasks_state`` is what it knows, ``tasks_values`` what goes in and comes out.
* ``tasks_order`` (with ``permutation``) is the order of dispatch, ``tasks_seeds`` what shuffles each epoch.
* ``tasks_waiting`` and ``tasks_pending`` are the pieces of work that wait to be handed out again, and those in
  trainers' hands; ``tasks_lines`` is what one trainer holds, in order, and ``tasks_sharing`` how much it may hold.
* ``tasks_narrowing`` finds the batches that are at fault when work fails, ``tasks_failed`` keeps those set aside.
* ``tasks_reopening`` makes done tasks todo again, after their updates were lost with a pserver.
* ``tasks_storage`` and ``tasks_documents`` turn the state into the documents stored in etcd, and back.
* ``datasets``: the batches of a task, as a pure function.

Exactly once: what makes a push count once, whoever sends it and however often.

* ``batches``: the identity of a batch. ``applied``: which batches each block has taken in; ``applied_cohorts`` keeps
  that once for the many blocks which have the same, ``intervals`` are the sets of numbers that it is made of.
* ``accumulation``: several batches in one push, on the trainer's side.
* ``audit``: compares what every pserver has with what counts as done, at each epoch's end and before the job ends.

Consistency: when a block takes its updates, and who waits for whom.

* ``modes``: the settings that users choose. ``rounds`` decides for a block, ``rounds_values`` is what it answers.
* ``membership`` is the master's side of whom rounds wait for (``membership_values`` what it hands on), ``views`` the
  pservers' side.

The model and its arithmetic.

* ``parameters``: named float arrays, as declared; ``sharding``: blocks, and which pserver owns which.
* ``optimizers`` and ``schedules``: the settings that users choose; ``settings`` is what both, and ``modes``, have in
  common.
* ``updates``: every update rule in plain NumPy, the reference. ``kernels`` compiles ``kernels_rules`` (the same rules
  as loops) and ``kernels_blocks`` (sums, checks, 16-bit conversion); ``kernels_subnormals`` has subnormal numbers
  count as zero in them.

Checkpoints and recovery.

* ``checkpoints``: when one is ordered, and how it becomes complete; ``checkpoints_values`` its settings and effects.
* ``checkpoints_snapshot``: a pserver's side. ``checkpoints_manifest``: what makes files a checkpoint.
  ``checkpoints_pointer``: which one counts. ``checkpoints_restore``: who reads what of it.
* ``checkpoints_replay``: what is done when a pserver comes back with less than it had. ``beginnings``: when the model
  gets first values again, since nothing has the old ones. ``store_history``: whether etcd has gone back.
"""
