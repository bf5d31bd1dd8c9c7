"""The whole cluster in one process, from one seed."""
