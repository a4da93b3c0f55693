"""Configurations, one file for each model family."""
