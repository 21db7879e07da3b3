"""What a person sees while it runs: the bar of a run, the table of a study."""
