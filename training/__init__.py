"""Training: one module for each method of the papers, and shared modules for data, metrics and the trainer."""
