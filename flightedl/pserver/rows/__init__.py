"""The rows of embedding tables on a parameter server.

Map: ``incoming`` checks what a message says about rows, and ``span`` carries out what is decided about them. ``store``
keeps the rows of all tables: ``table`` has those of one, in memory that ``layout`` makes and ``memory`` bounds;
``calls`` reads and updates rows of all tables at once, on two cores (``threads``) where they are many; ``values`` goes
in and out. ``cut`` is the content of a store at one moment, without the rows whose norm is too small (``norms``);
``stored`` brings it to files, ``restoring`` takes it over from them, and ``first`` loads rows from a user's file.
"""
