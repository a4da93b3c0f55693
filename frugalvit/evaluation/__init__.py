"""Tasks of `frugalvit evaluate`, one module a task."""
