"""Configurations, one file a family."""
