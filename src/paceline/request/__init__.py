"""What a person asked for, made definite: options, choices, sizes, the job."""
