"""The small models trained in this repository, each folder a complete hub repository."""
