"""Windows in layers of MLA (dots3): each token attends to the last tokens up to itself, as to a fixed selection."""
