"""Models, one file a family, and the methods that work on models."""
