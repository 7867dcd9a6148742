"""Environments: one file a suite."""
