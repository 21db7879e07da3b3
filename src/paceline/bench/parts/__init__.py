"""What all benchmarks share: options, tables, and how they are found."""
