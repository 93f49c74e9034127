"""The Ray plumbing: a virtual cluster, typed worker groups, named axes, and batches by reference."""
