"""Preference records: store, pair sampling, labellers."""
