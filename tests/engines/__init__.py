"""Other engines, real ones, with this package in them. `launch/test_engines.sh` runs these tests."""
