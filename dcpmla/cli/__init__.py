"""Commands of `python -m dcpmla`, one file each."""
