"""Process groups: the TP x DCP mesh, linear layers sharded over TP, collectives with names."""
