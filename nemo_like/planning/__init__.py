"""Resources, layout, memory and time of a run: arithmetic."""
