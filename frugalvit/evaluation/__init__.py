"""Tasks of `frugalvit evaluate`, each in its own module."""
