"""The trainable model: its driver handle, its worker processes, and the exact train step."""
