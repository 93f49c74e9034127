"""An engine of our own for dense models on one GPU: bursts of decoding steps without the host."""
