"""One model on several workers: its layers, its weights or its images are split, not copied."""
