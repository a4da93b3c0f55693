"""Trainings, one a procedure of the papers, over shared data, metrics and loop modules."""
