"""The functions of ``fe.decode``, for ``decode=``. Each parses a whole chunk of lines. Each column has one type."""

from __future__ import annotations

from flightedl.formats.lines import Slots, Svmlight

#: Converts ``1 qid:3 7:0.5 # comment`` to ``label``, ``qid`` (if the line has one), ``indices`` and ``values``.
svmlight = Svmlight()
#: Converts ``1 6001:17 6001:4 6002:9`` to ``label`` (if the line has one), and the list of each slot by its name.
slots = Slots()
