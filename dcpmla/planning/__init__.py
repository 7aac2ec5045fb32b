"""Predictions for a model on machines that need not be there: memory, step times, a recommendation."""
