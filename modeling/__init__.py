"""Models, one file for each model family, and methods that work on models."""
