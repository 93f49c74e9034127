"""Policy weights → engines: complete, versioned and checked."""
