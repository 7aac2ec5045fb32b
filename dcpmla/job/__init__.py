"""How a job starts, is watched and ends."""
