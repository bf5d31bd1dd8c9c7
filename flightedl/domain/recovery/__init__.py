"""What is done again after something was lost.

* ``replay``: what is done when a pserver comes back with less than it had. ``audit`` compares what every pserver has
  with what counts as done, at each epoch's end and before the job ends.
* ``reinitialization``: when the model gets first values a second time, since nothing has the old ones.
* ``lives``: which life of the model the names of its results belong to.
* ``store_history``: whether etcd has gone back.
"""
