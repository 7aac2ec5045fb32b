"""Process groups: start-up, the TP x DCP mesh, linear layers cut over TP."""
