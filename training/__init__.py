"""Trainings: one module for each procedure of the papers, and shared modules for data, metrics and the loop."""
