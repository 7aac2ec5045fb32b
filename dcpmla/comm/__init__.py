"""The exchange of a DCP group: the data that moves between ranks, and the backends that move it."""
