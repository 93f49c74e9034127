"""What a run shows and keeps: metrics, spans, sinks, the console, log files and trajectories."""
