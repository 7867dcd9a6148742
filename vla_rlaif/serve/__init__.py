"""A policy server for robots: openpi's protocol, dynamic batching, weight hot-swap, HTTP health and metrics.

protocol (bytes) -> requests (checked observations) -> robot (what is remembered) -> batching, engine (policy) -> server
"""
