"""The commands: parse, call one function, print. ``main`` is the ``flightedl`` command; ``bench`` measures."""
