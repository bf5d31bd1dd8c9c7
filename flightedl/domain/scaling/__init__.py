"""How many trainers are worth having. Imports nothing of the other rooms.

* ``marginal``: adds trainers while each further one brings enough, and removes those that do not.
"""
