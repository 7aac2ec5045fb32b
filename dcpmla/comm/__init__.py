"""What a DCP step moves between ranks, and how."""
