"""Cuts: copies of all blocks and rows of a pserver as of one moment, made while training continues.

* ``copying``: all cuts in progress
* ``copier``: progress of one cut, and the memory of its copies
* ``snapshots``: checkpoint orders, and the thread that writes the copies to files
* ``kept``: cuts in memory for readers

A checkpoint's path: ``snapshots`` accepts an order, and ``copying`` begins a cut. As the block protocol decides, pushes
and the thread of ``snapshots`` copy blocks to a ``copier``. When it is complete, the thread writes the file.
"""
