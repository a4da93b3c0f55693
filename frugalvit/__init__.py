"""Vision transformers that need less: fewer tokens, less data, no extra parameters."""
