"""Real engines: Slurm and others are started, trained on, broken and resumed on."""
