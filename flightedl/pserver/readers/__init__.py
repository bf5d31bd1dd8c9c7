"""Answers for processes that read the model, but do not train it.

* ``reading``: parameters and tables as Arrow columns
* ``feed``: changes for followers
* ``consumers``: what named followers acknowledge
"""
