"""Models, one file a family, and what is done to models."""
