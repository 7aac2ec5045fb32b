"""Other people's models and engines, each in one thin file, imported only when asked for."""
