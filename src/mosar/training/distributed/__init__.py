"""Training by several processes: DDP, FSDP2, tensor parallelism, and their checkpoints."""
