"""The Ray plumbing: a virtual cluster, typed worker groups, named axes, batches by reference."""
