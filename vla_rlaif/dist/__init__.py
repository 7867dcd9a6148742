"""A run on several processes and machines. Ray is imported by `ray_cluster.py` and its two helpers only,
torch.distributed by `process_groups.py` only; everything else here is plain Python that tests run in one process.
"""
