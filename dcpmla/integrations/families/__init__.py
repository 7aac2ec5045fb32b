"""Model families, a row for each in `table`."""
