"""Starting the workers of a job, and what a run leaves behind."""
