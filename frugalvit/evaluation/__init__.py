"""What `frugalvit evaluate` measures, a module a task."""
