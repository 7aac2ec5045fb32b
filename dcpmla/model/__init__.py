"""What stands around attention."""
