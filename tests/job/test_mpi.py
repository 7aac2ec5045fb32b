"""The store's listener under mpirun: it listens at the address that other ranks are given, if that is one."""

import socket
from contextlib import closing

import pytest

from dcpmla.job.mpi import _listen, _own_name


@pytest.mark.parametrize(
    ("host", "addresses"),
    [
        (_own_name(alone=True), {"127.0.0.1"}),
        ("127.0.0.2", {"127.0.0.2"}),
        ("localhost", {"::", "0.0.0.0"}),
        ("192.0.2.1", {"::", "0.0.0.0"}),  # of no host: a router may translate it
    ],
)
def test_the_address_that_the_store_listens_at(host: str, addresses: set[str]) -> None:
    with closing(_listen(host)) as listener:
        address, port, *_ = listener.getsockname()
        assert address in addresses
        with socket.create_connection((host if address == host else "127.0.0.1", port), timeout=10):
            pass
