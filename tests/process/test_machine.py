"""Questions to a machine about its ports."""

from __future__ import annotations

import socket

from flightedl.process import machine


def test_a_port_refuses_when_nothing_listens_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert not machine.refuses(address, 1.0)
    assert machine.refuses(address, 1.0)
    assert machine.refuses(address.replace("127.0.0.1", "localhost"), 1.0)


def test_a_full_queue_and_a_machine_that_does_not_answer_do_not_refuse() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        address = server.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(address)
        assert not machine.refuses("{}:{}".format(*address), 0.2)
        for each in waiting:
            each.close()
    assert not machine.refuses("host.invalid:1", 0.2)
