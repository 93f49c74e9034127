"""How weights and optimizer states come in and leave: models, checkpoints, exports."""
