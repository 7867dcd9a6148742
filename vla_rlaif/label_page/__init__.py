"""The human labeller: a local page that shows two clips side by side and keeps what people answer.

catalogue, shards (what can be shown) -> queue (which pair next) -> desk (leases, answers, undo) -> server -> page.*
"""
