"""Tasks of `frugalvit evaluate`, a module each."""
