"""One worker's copy of the model, its parameters and gradients in flat buffers."""
