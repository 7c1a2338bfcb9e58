"""What a model is: its layers, the trace of one pass, torch's operations by what they do, rewrites."""
