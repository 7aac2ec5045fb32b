"""Model families: what differs between them (`family`), with a row for each in `table`."""
