"""The policy's weights on their way to generation: complete, versioned, and checked."""
